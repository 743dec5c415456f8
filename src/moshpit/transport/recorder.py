"""A handler for checks of transports: it keeps what it hears, and waits for more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final, final

from moshpit.events import Notice
from moshpit.transport.base import Handler, Transport
from moshpit.types import Address, PeerId
from moshpit.wire.framing import ChunkHeader
from moshpit.wire.messages import Admission, AnyMessage

ArrivedChunk = tuple[PeerId, ChunkHeader, bytes]

PATIENCE_S: Final = 20.0  # only reached by a failing check


@final
class Recorder(Handler):
    """A handler that keeps what it hears, and feeds chunks that a check queues."""

    def __init__(self, book: dict[PeerId, tuple[Address, ...]]) -> None:
        self.book = book
        self.transport: Transport | None = None
        self.links: list[tuple[PeerId, Admission]] = []
        self.lost: list[tuple[PeerId, bool, str]] = []
        self.messages: list[tuple[PeerId, AnyMessage]] = []
        self.chunks: list[ArrivedChunk] = []
        self.notices: list[Notice] = []
        self.resets: list[PeerId] = []
        self.unwanted: list[int] = []  # numbers of chunks to drop
        self.outgoing: dict[PeerId, list[tuple[ChunkHeader, bytes]]] = {}
        self._sinks: dict[PeerId, bytearray] = {}
        self._waiter: asyncio.Future[None] | None = None

    # --- Handler --------------------------------------------------------------------------

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        """See `Handler`."""
        self.links.append((peer, admission))
        self._changed()

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        """See `Handler`."""
        self.lost.append((peer, refused, detail))
        self._changed()

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        """See `Handler`."""
        self.messages.append((peer, message))
        self._changed()

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        """See `Handler`."""
        if header.chunk in self.unwanted:
            return None
        self._sinks[peer] = bytearray(header.length)
        return memoryview(self._sinks[peer])

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        """See `Handler`."""
        self.chunks.append((peer, header, bytes(self._sinks.pop(peer))))
        self._changed()

    def chunks_wanted(self, peer: PeerId) -> None:
        """See `Handler`."""
        self.feed(peer)
        self._changed()

    def bulk_reset(self, peer: PeerId) -> None:
        """See `Handler`."""
        self.resets.append(peer)
        self._changed()

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        """See `Handler`."""
        return self.book.get(peer, ())

    def on_notice(self, notice: Notice) -> None:
        """See `Handler`."""
        self.notices.append(notice)
        self._changed()

    # --- for checks -----------------------------------------------------------------------

    def feed(self, peer: PeerId) -> None:
        """Hand in queued chunks until the link is full."""
        assert self.transport is not None
        waiting = self.outgoing.get(peer, [])
        while waiting:
            header, payload = waiting[0]
            if not self.transport.send_chunk(peer, header, memoryview(payload)):
                return
            waiting.pop(0)

    def queue(self, peer: PeerId, chunks: Sequence[tuple[ChunkHeader, bytes]]) -> None:
        """Queue chunks for a peer and begin to send them."""
        self.outgoing.setdefault(peer, []).extend(chunks)
        self.feed(peer)

    async def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until a condition holds; raises `TimeoutError` naming it."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while not condition():
                    self._waiter = asyncio.get_running_loop().create_future()
                    await self._waiter
        except TimeoutError:
            heard = f"lost {self.lost}, notices {self.notices}, {len(self.chunks)} chunks"
            raise TimeoutError(f"waited for {what}: {heard}") from None

    def _changed(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
