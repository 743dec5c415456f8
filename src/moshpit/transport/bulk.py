"""A bulk connection: chunks over a plain socket, each sealed by AES-256-GCM (design §4).

Keys and a token come over the TLS control channel (`BulkOffer`). The connection starts with::

    dialer   magic, token
    server   challenge, HMAC(server's sealing key, token, challenge)
    dialer   HMAC(dialer's sealing key, token, challenge)

so that a token seen on the wire opens nothing. Then chunks flow both ways: the 48-byte header
in clear but authenticated, the payload, its tag. The nonce is the chunk's number on this
connection and direction: a chunk that is altered, left out, repeated or moved fails its tag,
and the first failure ends the connection.
"""

from __future__ import annotations

import asyncio
import hmac
import os
import secrets
import socket
from dataclasses import dataclass, field
from typing import Final, Protocol, cast, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from moshpit.errors import HandshakeError, RemoteError, SealError, WireError
from moshpit.transport.sockets import keep_queue_short
from moshpit.types import PeerId, short
from moshpit.wire.framing import HEADER_BYTES, TAG_BYTES, ChunkHeader
from moshpit.wire.links import BulkOffer

MAGIC: Final = b"MPB1"
TOKEN_BYTES: Final = 32
KEY_BYTES: Final = 32
MAC_BYTES: Final = 32
SLOTS_MAX: Final = 4  # see `_Arena`
_SERVER: Final = b"moshpit/1 bulk server\0"
_DIALER: Final = b"moshpit/1 bulk dialer\0"


@final
@dataclass(frozen=True, slots=True)
class BulkKeys:
    """What opens one bulk connection, seen from one side.

    Attributes:
        token: names the connection, once.
        out: seals what this side sends.
        into: seals what this side receives.
        sealed: whether payloads are sealed at all.
    """

    token: bytes
    out: bytes = field(repr=False)
    into: bytes = field(repr=False)
    sealed: bool

    @classmethod
    def fresh(cls, sealed: bool) -> BulkKeys:
        """Make new keys."""
        return cls(
            secrets.token_bytes(TOKEN_BYTES),
            secrets.token_bytes(KEY_BYTES),
            secrets.token_bytes(KEY_BYTES),
            sealed,
        )

    def offer(self, stripe: int) -> BulkOffer:
        """Return the message that tells the other side, of the connection with this number."""
        return BulkOffer(self.token, self.out, self.into, self.sealed, stripe)

    @classmethod
    def offered(cls, offer: BulkOffer, sender: str) -> BulkKeys:
        """Read an offer; raises `WireError` if its fields have wrong sizes."""
        sizes = len(offer.token), len(offer.key_out), len(offer.key_in)
        if sizes != (TOKEN_BYTES, KEY_BYTES, KEY_BYTES) or offer.key_in == offer.key_out:
            raise WireError(sender, "bad-bulk-offer", f"fields of {sizes} bytes")
        return cls(offer.token, offer.key_in, offer.key_out, offer.sealed)


# --- opening, on the raw socket -----------------------------------------------------------


async def read_exactly(sock: socket.socket, size: int, where: str) -> bytes:
    """Read so many bytes of a raw socket; raises `HandshakeError` if it ends before."""
    loop = asyncio.get_running_loop()
    data = bytearray()
    while len(data) < size:
        got = await loop.sock_recv(sock, size - len(data))
        if not got:
            raise HandshakeError(where, "closed", "the bulk connection was closed while it opened")
        data += got
    return bytes(data)


def _mac(key: bytes, context: bytes, token: bytes, challenge: bytes) -> bytes:
    return hmac.digest(key, context + token + challenge, "sha256")


async def knock(sock: socket.socket, keys: BulkKeys, where: str) -> None:
    """Open a connection as the dialer; raises `HandshakeError`, `OSError`."""
    loop = asyncio.get_running_loop()
    await loop.sock_sendall(sock, MAGIC + keys.token)
    answer = await read_exactly(sock, 32 + MAC_BYTES, where)
    challenge, mac = answer[:32], answer[32:]
    if not hmac.compare_digest(mac, _mac(keys.into, _SERVER, keys.token, challenge)):
        raise HandshakeError(where, "bad-bulk-proof", "it does not know the keys that were offered")
    await loop.sock_sendall(sock, _mac(keys.out, _DIALER, keys.token, challenge))


async def read_token(sock: socket.socket, where: str) -> bytes:
    """Read what a dialer says first; raises `HandshakeError`, `OSError`."""
    hello = await read_exactly(sock, len(MAGIC) + TOKEN_BYTES, where)
    if not hello.startswith(MAGIC):
        raise HandshakeError(where, "not-moshpit", "its first bytes are not a bulk connection's")
    return hello[len(MAGIC) :]


async def admit(sock: socket.socket, keys: BulkKeys, where: str) -> None:
    """Have the dialer prove that the offer was made to it; raises `HandshakeError`, `OSError`."""
    loop = asyncio.get_running_loop()
    challenge = secrets.token_bytes(32)
    await loop.sock_sendall(sock, challenge + _mac(keys.out, _SERVER, keys.token, challenge))
    proof = await read_exactly(sock, MAC_BYTES, where)
    if not hmac.compare_digest(proof, _mac(keys.into, _DIALER, keys.token, challenge)):
        raise HandshakeError(where, "bad-bulk-proof", "it has the token but not the keys")


# --- chunks -------------------------------------------------------------------------------


class BulkEvents(Protocol):
    """Who hears of an open bulk connection."""

    def bulk_sink(self, header: ChunkHeader) -> memoryview | None:
        """Return where the payload goes; None drops it."""
        ...

    def bulk_chunk(self, header: ChunkHeader) -> None:
        """The sink is full and authentic."""
        ...

    def bulk_writable(self, link: BulkLink) -> None:
        """The connection can take more."""
        ...

    def bulk_closed(self, link: BulkLink, fault: RemoteError | None, detail: str) -> None:
        """The connection is gone; ``fault`` if the other side broke a rule."""
        ...


@final
class _Arena:
    """Memory for what is on its way out, reused only when it has left this process.

    uvloop and newer asyncio keep references to what they could not send yet, so the arena
    compares stream positions: what was handed over, less the backlog, has gone. Chunks fill
    slots from the front. While the backlog is below one slot (the high-water mark is a quarter of
    that), at most four slots can hold bytes that have not gone.
    """

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._slots: list[memoryview] = []
        self._ends: list[int] = []  # stream position after the last byte in each slot
        self._current = -1
        self._used = slot_bytes
        self._position = 0

    def reserve(self, size: int, backlog: int) -> memoryview | None:
        if self._used + size > self._slot_bytes and not self._turn(self._position - backlog):
            return None
        view = self._slots[self._current][self._used : self._used + size]
        self._used += size
        self._position += size
        self._ends[self._current] = self._position
        return view

    def _turn(self, gone: int) -> bool:
        for slot, end in enumerate(self._ends):
            if end <= gone:
                self._current, self._used = slot, 0
                return True
        if len(self._slots) == SLOTS_MAX:
            return False
        self._slots.append(memoryview(bytearray(self._slot_bytes)))
        self._ends.append(0)
        self._current, self._used = len(self._slots) - 1, 0
        return True


@final
class BulkLink(asyncio.BufferedProtocol):
    """One open bulk connection.

    Attributes:
        closed: done when the connection is gone.
        bytes_in, bytes_out: headers, payloads and tags.
        chunks_in: authentic chunks received.
    """

    def __init__(
        self, peer: PeerId, keys: BulkKeys, payload_bytes_max: int, events: BulkEvents
    ) -> None:
        loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = loop.create_future()
        self.bytes_in = 0
        self.bytes_out = 0
        self.chunks_in = 0
        self._who = short(peer)
        self._events = events
        self._payload_bytes_max = payload_bytes_max
        self._sealer = AESGCM(keys.out) if keys.sealed else None
        self._opener = AESGCM(keys.into) if keys.sealed else None
        self._tag_bytes = TAG_BYTES if keys.sealed else 0
        self._arena = _Arena(HEADER_BYTES + payload_bytes_max + TAG_BYTES)
        self._transport: asyncio.Transport | None = None
        self._socket = -1  # what can be written to directly
        self._paused = False
        self._staged = False
        self._dead = False
        self._fault: RemoteError | None = None
        self._sent = 0
        self._head = memoryview(bytearray(HEADER_BYTES))
        self._scratch = memoryview(bytearray(0))
        self._header: ChunkHeader | None = None
        self._sink: memoryview | None = None
        self._target = self._head
        self._filled = 0

    # --- out ------------------------------------------------------------------------------

    def send(self, header: ChunkHeader, payload: memoryview) -> bool:
        """Hand in a chunk; False if the connection is full. The payload is copied or sealed."""
        if self._paused or self._dead or self._transport is None:
            return False
        size = HEADER_BYTES + header.length + self._tag_bytes
        view = self._arena.reserve(size, self._transport.get_write_buffer_size())
        if view is None:
            return False
        head = header.pack()
        gone = 0
        if self._sealer is not None:
            view[:HEADER_BYTES] = head
            self._sealer.encrypt_into(_nonce(self._sent), payload, head, view[HEADER_BYTES:])
        else:
            gone = self._write_now(head, payload)
            if gone < HEADER_BYTES:
                view[gone:HEADER_BYTES] = head[gone:]
            view[max(gone, HEADER_BYTES) :] = payload[max(0, gone - HEADER_BYTES) :]
        self._sent += 1
        self.bytes_out += size
        if gone < size:
            self._transport.write(view[gone:])
        return True

    def _write_now(self, head: bytes, payload: memoryview) -> int:
        """Give the system what it takes at once, without a copy on the way; return how much."""
        assert self._transport is not None
        if self._socket < 0 or self._transport.get_write_buffer_size():
            return 0
        try:
            return os.writev(self._socket, (head, payload))
        except OSError:  # full, or broken: then the transport finds out
            return 0

    @property
    def backlog(self) -> int:
        """Bytes that were handed in and have not left this process."""
        if self._transport is None or self._dead:
            return 0
        return self._transport.get_write_buffer_size()

    def pause_writing(self) -> None:
        """The backlog is above a quarter of a chunk: what comes later may be more urgent."""
        self._paused = True

    def resume_writing(self) -> None:
        """The backlog is low again."""
        self._paused = False
        if not self._dead:
            self._events.bulk_writable(self)

    # --- in -------------------------------------------------------------------------------

    def stage(self) -> None:
        """From now on, ask for a payload's sink only when the payload is whole.

        So no two connections that share a listener have a sink at once. Sealed ones are so
        anyway: what is decrypted is whole.
        """
        self._staged = True
        if self._sink is not None:
            room = self._room(self._sink.nbytes)
            room[: self._filled] = self._sink[: self._filled]
            self._target, self._sink = room, None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The opened socket was handed over."""
        self._transport = cast(asyncio.Transport, transport)
        sock = cast(socket.socket, transport.get_extra_info("socket"))
        keep_queue_short(sock)
        if hasattr(os, "writev"):
            self._socket = sock.fileno()
        slot = HEADER_BYTES + self._payload_bytes_max + TAG_BYTES
        self._transport.set_write_buffer_limits(high=slot // 4, low=slot // 4)

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the rest of the header or payload that is awaited; never empty."""
        return self._head if self._dead else self._target[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        """Bytes were written into the buffer."""
        if self._dead:
            return
        self.bytes_in += nbytes
        self._filled += nbytes
        if self._filled < len(self._target):
            return
        try:
            if self._header is None:
                self._begin()
            else:
                self._finish(self._header)
        except RemoteError as error:
            self._fault = error
            self.abort()

    def _begin(self) -> None:
        header = ChunkHeader.unpack(self._head, self._who, self._payload_bytes_max)
        self._header = header
        self._filled = 0
        if self._opener is not None:
            self._target = self._room(header.length + TAG_BYTES)
            return
        self._sink = None if self._staged else self._wanted(header)
        self._target = self._room(header.length) if self._sink is None else self._sink
        if header.length == 0:
            self._finish(header)

    def _finish(self, header: ChunkHeader) -> None:
        if self._opener is not None:
            self._open(self._opener, header)
        elif self._staged:
            self._sink = self._wanted(header)
            if self._sink is not None:
                self._sink[:] = self._target[: header.length]
        sink = self._sink
        self._header, self._sink = None, None
        self._target, self._filled = self._head, 0
        self.chunks_in += 1
        if sink is not None:
            self._events.bulk_chunk(header)

    def _open(self, opener: AESGCM, header: ChunkHeader) -> None:
        self._sink = self._wanted(header)
        # A dropped chunk must be proved too: decrypting in place is as good as anywhere.
        into = self._target[: header.length] if self._sink is None else self._sink
        sealed = self._target if self._sink is not None else bytes(self._target)
        try:
            opener.decrypt_into(_nonce(self.chunks_in), sealed, self._head, into)
        except InvalidTag as error:
            detail = f"chunk {self.chunks_in} of this connection was altered, moved or repeated"
            raise SealError(self._who, "bad-tag", detail) from error

    def _wanted(self, header: ChunkHeader) -> memoryview | None:
        sink = self._events.bulk_sink(header)
        assert sink is None or sink.nbytes == header.length, "a sink must have the chunk's length"
        return sink if sink is None else sink.cast("B")

    def _room(self, size: int) -> memoryview:
        if len(self._scratch) < size:
            self._scratch = memoryview(bytearray(size))
        return self._scratch[:size]

    # --- end ------------------------------------------------------------------------------

    def eof_received(self) -> None:
        """The other side sends no more: close."""

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        cut = self._filled > 0 or self._header is not None
        if self._fault is None and cut and not self._dead:
            self._fault = SealError(
                self._who, "cut-chunk", f"the connection ended {self._filled} bytes into one"
            )
        self._dead = True
        self._socket = -1
        self._sink = None
        self._target = self._head
        if not self.closed.done():
            self.closed.set_result(None)
        detail = str(self._fault or exc or "closed by the other side")
        self._events.bulk_closed(self, self._fault, detail)

    def close(self) -> None:
        """Close after what was handed in; `closed` follows."""
        self._dead = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; `closed` follows."""
        self._dead = True
        if self._transport is not None:
            self._transport.abort()


def _nonce(number: int) -> bytes:
    return number.to_bytes(12, "little")
