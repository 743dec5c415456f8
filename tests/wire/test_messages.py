"""Every message survives the wire, and whatever else comes is a `WireError`."""

from __future__ import annotations

import types
import typing

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.errors import WireError
from moshpit.types import GroupId
from moshpit.wire.framing import (
    HEADER_BYTES,
    LENGTH,
    ChunkHeader,
    ChunkKind,
    decode_message,
    encode_message,
)
from moshpit.wire.messages import (
    Admission,
    AnyMessage,
    GroupFormed,
    Join,
    PeerRecord,
    Ping,
    pack_mask,
    signing_bytes,
    unpack_mask,
)

MESSAGES = typing.get_args(AnyMessage)
LEAVES = {
    int: st.integers(-(1 << 63), (1 << 64) - 1),
    float: st.floats(),
    str: st.text(max_size=20),
    bytes: st.binary(max_size=40),
    bool: st.booleans(),
}


def values_of(hint: object) -> st.SearchStrategy:
    """A strategy for a type of the schema."""
    if hint in LEAVES:
        return LEAVES[hint]
    if typing.get_origin(hint) is tuple:
        inner = typing.get_args(hint)
        if inner[-1] is Ellipsis:
            return st.lists(values_of(inner[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, inner))
    if typing.get_origin(hint) is types.UnionType:
        kinds = [kind for kind in typing.get_args(hint) if kind is not types.NoneType]
        return st.one_of(st.none(), *map(values_of, kinds))
    fields = typing.get_type_hints(hint)
    names = hint.__struct_fields__
    return st.builds(hint, **{name: values_of(fields[name]) for name in names})


ANY = st.one_of([values_of(kind) for kind in MESSAGES])
FEW = settings(max_examples=settings.default.max_examples // 5)  # of each kind of message


def same(one: object, other: object) -> bool:
    """Equal, where NaN equals NaN."""
    return msgspec.msgpack.encode(one) == msgspec.msgpack.encode(other)


def tag_of(kind: type) -> int:
    return kind.__struct_config__.tag


def test_tags_are_unique() -> None:
    assert len({tag_of(kind) for kind in MESSAGES}) == len(MESSAGES)


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda kind: kind.__name__)
@FEW
@given(data=st.data())
def test_round_trip(kind: type, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    frame = encode_message(message)
    (length,) = LENGTH.unpack(frame[:4])
    assert length == len(frame) - 4
    got = decode_message(frame[4:], "peer")
    assert type(got) is kind
    assert same(got, message)


def decode_or_refuse(body: bytes) -> None:
    """Decode, or fail with a `WireError` that names the sender; anything else is a bug."""
    refusal = None
    try:
        decode_message(body, "somebody")
    except WireError as error:
        refusal = (error.peer, error.reason)
    assert refusal in (None, ("somebody", "undecodable"))


@FEW
@given(st.binary(max_size=200))
def test_noise_is_refused(body: bytes) -> None:
    decode_or_refuse(body)


def spoil(message, data) -> bytes:
    body = bytearray(encode_message(message)[4:])
    for _ in range(data.draw(st.integers(1, 3))):
        if body:
            body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    return bytes(body[: data.draw(st.integers(0, len(body)))])


@FEW
@given(ANY, st.data())
def test_spoiled_messages_are_refused(message, data) -> None:
    decode_or_refuse(spoil(message, data))


@pytest.mark.soak
@settings(max_examples=20_000)
@given(ANY, st.binary(max_size=2000), st.data())
def test_refused_for_long(message, body, data) -> None:
    decode_or_refuse(spoil(message, data))
    decode_or_refuse(body)


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"\x90",
        msgspec.msgpack.encode((1,)),
        msgspec.msgpack.encode((1, 2, ((), ()), "more")),
        msgspec.msgpack.encode((1, "seq")),
        msgspec.msgpack.encode((999, 1)),
        msgspec.msgpack.encode({"type": 1, "seq": 2}),
        b"\x91" * 100_000,
        encode_message(Ping(1))[4:] + b"x",
        b"\xdd\xff\xff\xff\xff",
    ],
    ids=["empty", "none", "cut", "longer", "type", "tag", "map", "deep", "tail", "huge-array"],
)
def test_what_is_no_message(body: bytes) -> None:
    with pytest.raises(WireError):
        decode_message(body, "somebody")


@pytest.mark.parametrize("kind", [PeerRecord, Join, GroupFormed])
@FEW
@given(data=st.data())
def test_signatures_cover_everything_but_themselves(kind: type, data: st.DataObject) -> None:
    message = data.draw(values_of(kind))
    signed = signing_bytes(message)
    assert signing_bytes(msgspec.structs.replace(message, signature=b"other")) == signed
    hints = typing.get_type_hints(kind)
    name = data.draw(st.sampled_from([n for n in kind.__struct_fields__ if n != "signature"]))
    changed = msgspec.structs.replace(message, **{name: data.draw(values_of(hints[name]))})
    assert same(changed, message) == (signing_bytes(changed) == signed)


def test_records_are_shown_with_short_ids_and_without_proofs() -> None:
    admission = Admission(b"i" * 32, ("worker",), 0, b"s" * 64, b"p" * 64)
    record = PeerRecord(
        peer=bytes(32), incarnation=1, version=2, role="client", addresses=(("10.0.0.7", 7000),),
        via=(b"\1" * 32,), up=1e6, down=0.0, schema=b"", epoch=3, samples=4.0, rate=5.0,
        group_key=(), step_s=0.5, left=False, admission=admission, signature=b"s" * 64,
    )  # fmt: skip
    assert repr(record) == (
        "PeerRecord(peer=aaaaaaaa, incarnation=1, version=2, role='client', "
        "addresses=[['10.0.0.7', 7000]], via=[aeaqcaib], up=1000000.0, down=0.0, schema=none, "
        "epoch=3, samples=4.0, rate=5.0, group_key=[], step_s=0.5, left=False, "
        "merges_from=-1)"
    )


@given(st.integers(0, 1 << 200))
def test_masks(mask: int) -> None:
    assert unpack_mask(pack_mask(mask)) == mask


HEADERS = st.builds(
    ChunkHeader,
    kind=st.sampled_from(ChunkKind),
    ballot=st.integers(0, (1 << 16) - 1),
    chunk=st.integers(0, (1 << 32) - 1),
    length=st.integers(0, 1 << 20),
    codec=st.integers(0, 255),
    group=st.binary(min_size=16, max_size=16).map(GroupId),
    mass=st.floats(),
    seats=st.integers(0, (1 << 64) - 1),
)


@given(HEADERS)
def test_chunk_headers_round_trip(header: ChunkHeader) -> None:
    packed = header.pack()
    assert len(packed) == HEADER_BYTES
    assert same(ChunkHeader.unpack(packed, "peer", 1 << 20), header)


@given(st.binary(min_size=HEADER_BYTES, max_size=HEADER_BYTES))
def test_noise_is_no_header(data: bytes) -> None:
    refused_by, length = None, 0
    try:
        length = ChunkHeader.unpack(data, "somebody", 1 << 20).length
    except WireError as error:
        refused_by = error.peer
    assert refused_by in (None, "somebody")
    assert length <= 1 << 20


def test_oversized_chunks_are_refused() -> None:
    header = ChunkHeader(ChunkKind.RESULT, 0, 0, 101, 0, GroupId(bytes(16)), 1.0, 1)
    with pytest.raises(WireError, match="oversized"):
        ChunkHeader.unpack(header.pack(), "somebody", 100)
