"""A control connection: frames over TLS, first pulled by the handshake, then pushed.

Until `ControlLink.open` nothing that arrives is looked at except the frames that the handshake
asks for, under its own size limit. Afterwards every frame goes to `ControlEvents`.
"""

from __future__ import annotations

import asyncio
from typing import Final, Protocol, cast, final

from moshpit.errors import HandshakeError, WireError
from moshpit.types import Address, PeerId
from moshpit.wire.framing import LENGTH

UNREAD_BYTES_MAX: Final = 256 * 1024  # guess: what may wait while the handshake is finished


class ControlEvents(Protocol):
    """Who hears of an open link."""

    def control_frame(self, link: ControlLink, body: bytes) -> None:
        """One whole frame, without its length."""
        ...

    def control_fault(self, link: ControlLink, error: WireError) -> None:
        """The other side broke the framing; nothing more will come."""
        ...

    def control_closed(self, link: ControlLink, detail: str) -> None:
        """The connection is gone."""
        ...


@final
class ControlLink(asyncio.Protocol):
    """One TLS connection that carries length-prefixed frames.

    Attributes:
        where: the other side, as logs call it; the address until the peer is known.
        proved: whose key the other side has proved to hold, so that blame can name it.
        proof_sent: whether this side has dialled and sent its proof: what follows it must be
            messages, since the other side may have opened the link by it.
        closed: done when the connection is gone.
        bytes_in, bytes_out: bytes of frames since `open`.
    """

    def __init__(self, where: str, handshake_bytes_max: int, frame_bytes_max: int) -> None:
        self.where = where
        self.proved: PeerId | None = None
        self.proof_sent = False
        self.bytes_in = 0
        self.bytes_out = 0
        self._loop = asyncio.get_running_loop()
        self.closed: asyncio.Future[None] = self._loop.create_future()
        self._handshake_bytes_max = handshake_bytes_max
        self._frame_bytes_max = frame_bytes_max
        self._transport: asyncio.Transport | None = None
        self._events: ControlEvents | None = None
        self._buffer = bytearray()
        self._reader: asyncio.Future[None] | None = None
        self._reading_paused = False
        self._eof = False
        self._closing = False
        self._outgoing: list[bytes] = []
        self._outgoing_bytes = 0
        self._flush_planned = False

    # --- asyncio's side -------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """TLS is up."""
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        """Bytes came."""
        self._buffer += data
        if self._events is not None:
            self.bytes_in += len(data)
            self._deliver()
            return
        if len(self._buffer) > UNREAD_BYTES_MAX and not self._reading_paused:
            self._reading_paused = True
            self._connected().pause_reading()
        self._wake()

    def eof_received(self) -> None:
        """The other side will send no more: close."""
        self._eof = True
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        self._eof = True
        self._closing = True
        self._wake()
        if not self.closed.done():
            self.closed.set_result(None)
        if self._events is not None:
            self._events.control_closed(self, str(exc) if exc else "closed by the other side")

    # --- the handshake's side -------------------------------------------------------------

    def certificate(self) -> bytes:
        """Return the DER bytes of the certificate that the other side showed."""
        return self._connected().get_extra_info("ssl_object").getpeercert(True) or b""

    @property
    def remote(self) -> Address | None:
        """The socket's far end; None if it is gone."""
        where = self._connected().get_extra_info("peername")
        return Address(where[0], where[1]) if where else None

    async def read_frame(self) -> bytes:
        """Wait for one frame of the handshake.

        Raises:
            HandshakeError: it is too long, or the connection ends before it does.
        """
        while True:
            if len(self._buffer) >= LENGTH.size:
                (length,) = LENGTH.unpack_from(self._buffer)
                if length > self._handshake_bytes_max:
                    raise HandshakeError(
                        self.where, "oversized", f"{length} bytes in the handshake"
                    )
                end = LENGTH.size + length
                if len(self._buffer) >= end:
                    body = bytes(memoryview(self._buffer)[LENGTH.size : end])
                    del self._buffer[:end]
                    return body
            if self._eof:
                raise HandshakeError(self.where, "closed", "it hung up during the handshake")
            self._reader = self._loop.create_future()
            try:
                await self._reader
            finally:
                self._reader = None

    def write_frame(self, body: bytes) -> None:
        """Send one frame of the handshake."""
        if not self._closing:
            self._connected().write(LENGTH.pack(len(body)) + body)

    def open(self, events: ControlEvents) -> None:
        """End the handshake: from now on frames go to ``events``."""
        self._events = events
        self.bytes_in += len(self._buffer)
        self._loop.call_soon(self._begin)

    # --- the transport's side -------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether it is neither closing nor closed."""
        return not self._closing and not self._eof

    @property
    def backlog(self) -> int:
        """Bytes that were sent and have not left this process."""
        waiting = self._connected().get_write_buffer_size() if not self._closing else 0
        return self._outgoing_bytes + waiting

    def send(self, frame: bytes) -> None:
        """Queue a frame (with its length); frames of one loop turn leave together."""
        if self._closing:
            return
        self._outgoing.append(frame)
        self._outgoing_bytes += len(frame)
        self.bytes_out += len(frame)
        if not self._flush_planned:
            self._flush_planned = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Close after what is queued; `closed` follows."""
        if self._closing:
            return
        self._flush()
        self._closing = True
        if self._transport is not None:
            self._transport.close()

    def abort(self) -> None:
        """Close at once; `closed` follows."""
        self._closing = True
        self._outgoing.clear()
        if self._transport is not None:
            self._transport.abort()

    # --- inside ---------------------------------------------------------------------------

    def _connected(self) -> asyncio.Transport:
        assert self._transport is not None, "used before TLS was up"
        return self._transport

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _begin(self) -> None:
        if self._reading_paused and not self._closing:
            self._connected().resume_reading()
        self._reading_paused = False
        self._deliver()

    def _flush(self) -> None:
        self._flush_planned = False
        if self._outgoing and not self._closing:
            data = b"".join(self._outgoing)
            self._outgoing.clear()
            self._outgoing_bytes = 0
            self._connected().write(data)

    def _deliver(self) -> None:
        assert self._events is not None
        position = 0
        buffer = self._buffer
        while not self._closing and len(buffer) - position >= LENGTH.size:
            (length,) = LENGTH.unpack_from(buffer, position)
            if length > self._frame_bytes_max:
                detail = f"a message of {length} bytes, limit {self._frame_bytes_max}"
                self._events.control_fault(self, WireError(self.where, "oversized", detail))
                return
            end = position + LENGTH.size + length
            if len(buffer) < end:
                break
            body = bytes(memoryview(buffer)[position + LENGTH.size : end])
            position = end
            self._events.control_frame(self, body)
        if position:
            del buffer[:position]
