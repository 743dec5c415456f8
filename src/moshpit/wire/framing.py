"""How messages and chunks lie on the wire, with every size checked before it is used.

Control: a 4-byte little-endian length, then the MessagePack of one message.
Bulk: a fixed header, then the payload (with its 16-byte tag, where it is sealed).
"""

from __future__ import annotations

import struct
from enum import IntEnum

import msgspec

from moshpit.errors import WireError
from moshpit.types import GroupId
from moshpit.wire.messages import AnyMessage, Message

LENGTH = struct.Struct("<I")
_HEADER = struct.Struct("<BBHIIBB2x16sdQ")
HEADER_BYTES = _HEADER.size
TAG_BYTES = 16
_MAGIC = 0x4D

_encoder = msgspec.msgpack.Encoder()
_decoder: msgspec.msgpack.Decoder[AnyMessage] = msgspec.msgpack.Decoder(AnyMessage)


def encode_message(message: Message) -> bytes:
    """Return the frame of a message: length and body."""
    body = _encoder.encode(message)
    return LENGTH.pack(len(body)) + body


def decode_message(body: bytes | memoryview, sender: str) -> AnyMessage:
    """Read the body of a frame; raises `WireError` with the sender's name if it is none."""
    try:
        return _decoder.decode(body)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise WireError(sender, "undecodable", str(error)) from error


class ChunkKind(IntEnum):
    """What a chunk on a bulk connection is."""

    CONTRIBUTION = 1
    RESULT = 2
    STATE = 3
    """A piece of a training state; ``group`` is the first half of its hash."""
    PARCEL = 4
    """A piece of a parcel: ``group`` is its tag and the sender's session (`parcel_name`),
    ``ballot`` its serial number, ``chunk`` the number at which the piece begins, ``seats`` how
    many numbers it has in all, ``mass`` its weight."""


_KINDS = frozenset(ChunkKind)
_PARCEL_NAME = struct.Struct("<QII")


def parcel_name(kind: int, number: int, session: int) -> GroupId:
    """Return what stands in the place of the group in a parcel's chunks.

    >>> read_parcel_name(parcel_name(3, 70, 9))
    (3, 70, 9)
    """
    return GroupId(_PARCEL_NAME.pack(number, kind, session))


def read_parcel_name(group: GroupId) -> tuple[int, int, int]:
    """The inverse of `parcel_name`: kind, number and session."""
    number, kind, session = _PARCEL_NAME.unpack(group)
    return kind, number, session


class ChunkHeader(msgspec.Struct, frozen=True, gc=False):
    """The header of a chunk.

    Attributes:
        kind: a contribution to a mean, or a mean.
        ballot: which reducer of the chunk's part is meant, or made it (see `Takeover`).
        chunk: the chunk's number in the vector.
        length: payload bytes, without the tag.
        codec: number of the codec by which the payload is encoded.
        group: the round.
        mass: the weight behind the value.
        seats: for a result, the bit mask of the seats that are in it; else 0.
        reach: for a result of a row of the torus schedule, how far it reaches (`Reach`).
    """

    kind: ChunkKind
    ballot: int
    chunk: int
    length: int
    codec: int
    group: GroupId
    mass: float
    seats: int
    reach: int = 0

    def pack(self) -> bytes:
        """Return the header's bytes; with a sealed payload they are authenticated too."""
        return _HEADER.pack(
            _MAGIC,
            self.kind,
            self.ballot,
            self.chunk,
            self.length,
            self.codec,
            self.reach,
            self.group,
            self.mass,
            self.seats,
        )

    @classmethod
    def unpack(
        cls, data: bytes | bytearray | memoryview, sender: str, length_max: int
    ) -> ChunkHeader:
        """Read and check a header; raises `WireError` naming the sender."""
        magic, kind, ballot, chunk, length, codec, reach, group, mass, seats = _HEADER.unpack(data)
        if magic != _MAGIC or kind not in _KINDS:
            raise WireError(sender, "bad-chunk-header", f"magic {magic:#x}, kind {kind}")
        if length > length_max:
            raise WireError(sender, "oversized", f"chunk of {length} bytes, limit {length_max}")
        return cls(
            ChunkKind(kind), ballot, chunk, length, codec, GroupId(group), mass, seats, reach
        )
