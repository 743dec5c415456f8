"""A transport within one process: for tests, and for peers that share an interpreter.

An `Exchange` joins several `MemoryTransport`s of one loop. Messages are encoded and decoded as
on a wire, arrive in later turns of the loop, and in order; a bulk link holds one chunk. Faults
are provoked by the exchange's methods: `break_link`, `refuse`, `heal`, `kill`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final, final

from moshpit.config import TransportConfig
from moshpit.errors import ClosedError, HandshakeError, LocalError, UnreachableError
from moshpit.events import Notice
from moshpit.transport.base import CODEC_SLACK_BYTES, Handler, LinkStats, Transport
from moshpit.types import Address, PeerId, short
from moshpit.wire.framing import HEADER_BYTES, LENGTH, ChunkHeader, decode_message, encode_message
from moshpit.wire.messages import Admission, Message

FIRST_PORT: Final = 1
HOST: Final = "memory"


@final
class Exchange:
    """Where the transports of one process find each other."""

    def __init__(self) -> None:
        self.listening: dict[Address, MemoryTransport] = {}
        self._refusing: dict[Address, None] = {}
        self._next_port = FIRST_PORT

    def new_address(self) -> Address:
        """Return an address that nobody has had yet."""
        address = Address(HOST, self._next_port)
        self._next_port += 1
        return address

    def find(self, address: Address) -> MemoryTransport | None:
        """Return who listens at an address and takes new links."""
        return None if address in self._refusing else self.listening.get(address)

    def refuse(self, address: Address) -> None:
        """Have dials to an address refused, until `heal`."""
        self._refusing[address] = None

    def heal(self, address: Address) -> None:
        """End `refuse`."""
        self._refusing.pop(address, None)

    def break_link(self, one: MemoryTransport, other: MemoryTransport) -> None:
        """Break the link between two peers, as a router that forgets it does."""
        one.break_off(other.peer)
        other.break_off(one.peer)

    def kill(self, victim: MemoryTransport) -> None:
        """End a peer without a word, as the death of its process does."""
        for address in victim.addresses:
            self.listening.pop(address, None)
        for other in victim.die():
            other.break_off(victim.peer)


@dataclass(slots=True, eq=False)
class _End:
    """One peer's end of its link to another."""

    peer: PeerId
    other: MemoryTransport | None = None
    listens_at: Address | None = None
    queue: deque[bytes] = field(default_factory=deque[bytes])
    queue_bytes: int = 0
    chunk: tuple[ChunkHeader, bytes] | None = None
    wanted: bool = False
    pumping: bool = False
    lost_planned: bool = False
    stats: LinkStats = field(default_factory=LinkStats)


@final
class MemoryTransport(Transport):
    """A transport without sockets.

    Args:
        exchange: where it finds the others.
        peer, admission: who it is; nothing is proved here, all is one process.
        config: limits.
        listens: False for clients.
    """

    def __init__(
        self,
        exchange: Exchange,
        peer: PeerId,
        admission: Admission,
        config: TransportConfig,
        *,
        listens: bool = True,
    ) -> None:
        self.peer = peer
        self.admission = admission
        self.addresses: tuple[Address, ...] = ()
        self._exchange = exchange
        self._config = config
        self._listens = listens
        self._ends: dict[PeerId, _End] = {}
        self._closing = False  # takes nothing new
        self._closed = False

    async def start(self, handler: Handler) -> None:
        """See `Transport.start`."""
        self._handler = handler
        self._loop = asyncio.get_running_loop()
        if self._listens:
            self.addresses = (self._exchange.new_address(),)
            self._exchange.listening[self.addresses[0]] = self

    async def close(self) -> None:
        """See `Transport.close`."""
        if self._closing:
            return
        self._closing = True
        while any(end.other and (end.queue or end.chunk) for end in self._ends.values()):
            await asyncio.sleep(0)  # what is queued is delivered turn by turn
        self._closed = True
        for address in self.addresses:
            self._exchange.listening.pop(address, None)
        for end in list(self._ends.values()):
            other, end.other = end.other, None
            if other is not None:
                other.said_goodbye(self.peer, refused=True, detail="it closed the link: closing")
        self._ends.clear()

    async def dial(self, address: Address, expect: PeerId | None = None) -> PeerId:
        """See `Transport.dial`."""
        if self._closing:
            raise ClosedError("the transport is closed")
        await asyncio.sleep(0)
        other = self._look(address, expect)
        self._join(other)
        return other.peer

    async def reach(self, address: Address, expect: PeerId) -> None:
        """See `Transport.reach`."""
        if self._closing:
            raise ClosedError("the transport is closed")
        await asyncio.sleep(0)
        self._look(address, expect)

    def _look(self, address: Address, expect: PeerId | None) -> MemoryTransport:
        if expect == self.peer or address in self.addresses:
            raise HandshakeError(str(address), "self-dial", "a peer cannot dial itself")
        other = self._exchange.find(address)
        if other is None:
            raise UnreachableError(str(address), "refused", "nobody listens there")
        if expect is not None and other.peer != expect:
            raise HandshakeError(
                str(address), "swapped-certificate", f"{short(other.peer)} is there"
            )
        return other

    def send(self, peer: PeerId, message: Message) -> None:
        """See `Transport.send`."""
        if self._closing:
            return
        end = self._end(peer)
        frame = encode_message(message)
        if len(frame) > self._config.control_frame_bytes_max:
            raise LocalError(f"a message of {len(frame)} bytes is over the limit")
        if end.queue_bytes + len(frame) > self._config.control_queue_bytes_max:
            notice = Notice("control-queue-full", peer, f"{end.queue_bytes} bytes wait")
            self._loop.call_soon(self._handler.on_notice, notice)
            self._give_up(end, False, "its control queue is full")
            return
        end.queue.append(frame)
        end.queue_bytes += len(frame)
        self._pump_soon(end)

    def send_chunk(self, peer: PeerId, header: ChunkHeader, payload: memoryview) -> bool:
        """See `Transport.send_chunk`."""
        limit = self._config.chunk_bytes + CODEC_SLACK_BYTES
        if payload.nbytes != header.length or header.length > limit:
            raise LocalError(f"a chunk of {payload.nbytes} bytes, limit {limit}")
        if self._closing:
            return False
        end = self._end(peer)
        if end.other is None or end.chunk is not None:
            end.wanted = True
            self._pump_soon(end)
            return False
        end.chunk = (header, bytes(payload))
        self._pump_soon(end)
        return True

    def drop(self, peer: PeerId, reason: str) -> None:
        """See `Transport.drop`."""
        end = self._ends.get(peer)
        if end is not None:
            self._cut(end, reason)

    def connected(self, peer: PeerId) -> bool:
        """See `Transport.connected`."""
        end = self._ends.get(peer)
        return end is not None and end.other is not None

    def remote(self, peer: PeerId) -> Address | None:
        """See `Transport.remote`; everybody is at one host here, and ports are made up."""
        return Address(HOST, 0) if self.connected(peer) else None

    def stats(self, peer: PeerId) -> LinkStats:
        """See `Transport.stats`."""
        end = self._ends.get(peer)
        return LinkStats() if end is None else replace(end.stats)

    # --- faults ---------------------------------------------------------------------------

    def break_off(self, peer: PeerId) -> None:
        """Lose the link to a peer without a word (see `Exchange.break_link`)."""
        end = self._ends.get(peer)
        if end is not None and end.other is not None:
            end.other = None
            end.chunk = None
            self._loop.call_soon(self._redial, end, "its link was lost")

    def die(self) -> list[MemoryTransport]:
        """Stop without a word; returns who was connected (see `Exchange.kill`)."""
        self._closing = self._closed = True
        others = [end.other for end in self._ends.values() if end.other is not None]
        self._ends.clear()
        return others

    # --- what the other ends call -----------------------------------------------------------

    def joined(self, other: MemoryTransport) -> None:
        """A link to ``other`` exists; called by whoever dialled."""
        end = self._end(other.peer)
        end.other = other
        end.listens_at = other.addresses[0] if other.addresses else None
        self._handler.on_link(other.peer, other.admission)
        self._pump_soon(end)
        self._offer_room(end)

    def said_goodbye(self, peer: PeerId, *, refused: bool, detail: str) -> None:
        """The other side closed the link on purpose."""
        end = self._ends.get(peer)
        if end is not None and end.other is not None:
            end.other = None
            self._give_up(end, refused, detail)

    def take_message(self, peer: PeerId, frame: bytes) -> None:
        """A message arrives."""
        end = self._ends.get(peer)
        if not self._closed and end is not None and end.other is not None:
            end.stats.control_in += len(frame)
            self._handler.on_message(peer, decode_message(frame[LENGTH.size :], short(peer)))

    def take_chunk(self, peer: PeerId, header: ChunkHeader, payload: bytes) -> None:
        """A chunk arrives."""
        end = self._ends.get(peer)
        if self._closed or end is None or end.other is None:
            return
        end.stats.bulk_in += HEADER_BYTES + len(payload)
        sink = self._handler.chunk_sink(peer, header)
        if sink is not None:
            sink.cast("B")[:] = payload
            self._handler.on_chunk(peer, header)

    # --- inside ---------------------------------------------------------------------------

    def _end(self, peer: PeerId) -> _End:
        if peer == self.peer:
            raise LocalError("a peer sends nothing to itself")
        return self._ends.setdefault(peer, _End(peer))

    def _join(self, other: MemoryTransport) -> None:
        if not self.connected(other.peer):
            self.joined(other)
            other.joined(self)

    def _pump_soon(self, end: _End) -> None:
        if not end.pumping:
            end.pumping = True
            self._loop.call_soon(self._pump, end)

    def _pump(self, end: _End) -> None:
        """Deliver one turn's worth: everything on control, one chunk on bulk."""
        end.pumping = False
        if self._closed:
            return
        if end.other is None:
            if end.queue or end.wanted:
                self._redial(end, "it has no address that can be dialled")
            return
        other = end.other
        frames, end.queue, end.queue_bytes = end.queue, deque[bytes](), 0
        for frame in frames:
            end.stats.control_out += len(frame)
            other.take_message(self.peer, frame)
        if end.chunk is not None:
            header, payload = end.chunk
            end.chunk = None
            end.stats.bulk_out += HEADER_BYTES + len(payload)
            other.take_chunk(self.peer, header, payload)
            self._offer_room(end)

    def _offer_room(self, end: _End) -> None:
        if end.wanted and end.chunk is None and end.other is not None:
            end.wanted = False
            self._handler.chunks_wanted(end.peer)

    def _redial(self, end: _End, detail: str) -> None:
        if self._closed or end.other is not None:
            return
        addresses: Sequence[Address] = self._handler.addresses_of(end.peer)
        if not addresses and end.listens_at is not None:
            addresses = (end.listens_at,)
        for address in addresses:
            other = self._exchange.find(address)
            if other is not None and other.peer == end.peer:
                self._join(other)
                return
        self._give_up(end, bool(addresses), "nobody listens there" if addresses else detail)

    def _cut(self, end: _End, reason: str) -> None:
        end.queue.clear()
        end.queue_bytes = 0
        end.chunk = None
        end.wanted = False
        other, end.other = end.other, None
        if other is not None:
            detail = f"it closed the link: {reason}"
            self._loop.call_soon(_goodbye, other, self.peer, detail)

    def _give_up(self, end: _End, refused: bool, detail: str) -> None:
        self._cut(end, detail)
        if not end.lost_planned:
            end.lost_planned = True
            self._loop.call_soon(self._lost, end, refused, detail)

    def _lost(self, end: _End, refused: bool, detail: str) -> None:
        end.lost_planned = False
        if not self._closed:
            self._handler.on_lost(end.peer, refused, detail)


def _goodbye(other: MemoryTransport, peer: PeerId, detail: str) -> None:
    other.said_goodbye(peer, refused=False, detail=detail)
