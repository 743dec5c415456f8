"""A transport within one process: for tests, and for peers that share an interpreter.

An `Exchange` joins several `MemoryTransport`s of one loop. Messages are encoded and decoded as
on a wire, arrive in later turns of the loop, and in order; a bulk link holds one chunk. How long
all that takes is the `Wire`'s matter: none by default. Faults are provoked by the exchange's
methods: `break_link`, `refuse`, `heal`, `kill`.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
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


class Wire(ABC):
    """What lies between the transports of an exchange. It keeps the order of messages."""

    @abstractmethod
    def dial_s(self, source: PeerId, target: PeerId | None) -> float:
        """Return how long a dial takes; ``target``: who listens there, if anybody does."""

    @abstractmethod
    def message(self, source: PeerId, target: PeerId, deliver: Callable[[], None]) -> None:
        """Call ``deliver`` when a message has arrived."""

    @abstractmethod
    def chunk(
        self,
        source: PeerId,
        target: PeerId,
        size: int,
        sent: Callable[[], None],
        deliver: Callable[[], None],
    ) -> None:
        """Call ``sent`` when a chunk of so many bytes has left, ``deliver`` when it is there."""


@final
class Instant(Wire):
    """Nothing takes any time."""

    def dial_s(self, source: PeerId, target: PeerId | None) -> float:
        """See `Wire.dial_s`."""
        return 0.0

    def message(self, source: PeerId, target: PeerId, deliver: Callable[[], None]) -> None:
        """See `Wire.message`."""
        deliver()

    def chunk(
        self,
        source: PeerId,
        target: PeerId,
        size: int,
        sent: Callable[[], None],
        deliver: Callable[[], None],
    ) -> None:
        """See `Wire.chunk`."""
        deliver()
        sent()


@final
class Exchange:
    """Where the transports of one process find each other.

    Args:
        wire: what lies between them.
    """

    def __init__(self, wire: Wire | None = None) -> None:
        self.wire: Wire = wire or Instant()
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

    def kill(self, victim: MemoryTransport, *, unnoticed_s: float = 0.0) -> None:
        """End a peer without a word, as the death of its process does.

        Args:
            victim: whose.
            unnoticed_s: when the others' connections to it break: at once, as a kernel does it
                for a process, or as late as their own kernels give it up.
        """
        for address in victim.addresses:
            self.listening.pop(address, None)
        for other in victim.die():
            if unnoticed_s:
                loop = asyncio.get_running_loop()
                loop.call_later(unnoticed_s, other.break_off, victim.peer, victim)
            else:
                other.break_off(victim.peer)


@dataclass(slots=True, eq=False)
class _End:
    """One peer's end of its link to another."""

    peer: PeerId
    other: MemoryTransport | None = None
    link: object = None
    """The same at both ends of a connection, and another one for the next."""
    dialling: bool = False
    listens_at: Address | None = None
    queue: deque[bytes] = field(default_factory=deque[bytes])
    queue_bytes: int = 0
    chunk: tuple[ChunkHeader, bytes] | None = None
    sending: bool = False
    """A chunk has not left yet."""
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
            await asyncio.sleep(0)  # what is queued is sent turn by turn
        self._closed = True
        for address in self.addresses:
            self._exchange.listening.pop(address, None)
        detail = "it closed the link: closing"
        for end in list(self._ends.values()):
            other, end.other = end.other, None
            if other is not None:
                bye = partial(other.said_goodbye, self.peer, end.link, refused=True, detail=detail)
                self._exchange.wire.message(self.peer, other.peer, bye)
        self._ends.clear()

    async def dial(self, address: Address, expect: PeerId | None = None) -> PeerId:
        """See `Transport.dial`."""
        if self._closing:
            raise ClosedError("the transport is closed")
        await asyncio.sleep(self._dial_s(address))
        other = self._look(address, expect)
        self._join(other)
        return other.peer

    async def reach(self, address: Address, expect: PeerId) -> None:
        """See `Transport.reach`."""
        if self._closing:
            raise ClosedError("the transport is closed")
        await asyncio.sleep(self._dial_s(address))
        self._look(address, expect)

    def _dial_s(self, address: Address) -> float:
        target = self._exchange.find(address)
        return self._exchange.wire.dial_s(self.peer, target.peer if target is not None else None)

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
        if end.other is None or end.chunk is not None or end.sending:
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

    def break_off(self, peer: PeerId, whom: MemoryTransport | None = None) -> None:
        """Lose the link to a peer without a word (see `Exchange.break_link`); ``whom``: only if it
        still leads there."""
        end = self._ends.get(peer)
        if end is not None and end.other is not None and whom in (None, end.other):
            end.other = None
            end.chunk = None
            end.sending = False
            self._loop.call_soon(self._redial, end, "its link was lost")

    def die(self) -> list[MemoryTransport]:
        """Stop without a word; returns who was connected (see `Exchange.kill`)."""
        self._closing = self._closed = True
        others = [end.other for end in self._ends.values() if end.other is not None]
        self._ends.clear()
        return others

    # --- what the other ends call -----------------------------------------------------------

    def joined(self, other: MemoryTransport, link: object) -> None:
        """A link to ``other`` exists; called by whoever dialled."""
        end = self._end(other.peer)
        end.other = other
        end.link = link
        end.listens_at = other.addresses[0] if other.addresses else None
        self._handler.on_link(other.peer, other.admission)
        self._pump_soon(end)
        self._offer_room(end)

    def said_goodbye(self, peer: PeerId, link: object, *, refused: bool, detail: str) -> None:
        """The other side closed the link on purpose."""
        end = self._over(peer, link)
        if end is not None:
            end.other = None
            end.sending = False
            self._give_up(end, refused, detail)

    def take_message(self, peer: PeerId, link: object, frame: bytes) -> None:
        """A message arrives."""
        end = self._over(peer, link)
        if not self._closed and end is not None:
            end.stats.control_in += len(frame)
            self._handler.on_message(peer, decode_message(frame[LENGTH.size :], short(peer)))

    def take_chunk(self, peer: PeerId, link: object, header: ChunkHeader, payload: bytes) -> None:
        """A chunk arrives."""
        end = self._over(peer, link)
        if self._closed or end is None:
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

    def _over(self, peer: PeerId, link: object) -> _End | None:
        """Return the end of a connection, if it is still the present one."""
        end = self._ends.get(peer)
        return end if end is not None and end.other is not None and end.link is link else None

    def _join(self, other: MemoryTransport) -> None:
        if not self.connected(other.peer):
            link = object()
            self.joined(other, link)
            other.joined(self, link)

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
        wire, other, link = self._exchange.wire, end.other, end.link
        frames, end.queue, end.queue_bytes = end.queue, deque[bytes](), 0
        for frame in frames:
            end.stats.control_out += len(frame)
            arrive = partial(other.take_message, self.peer, link, frame)
            wire.message(self.peer, other.peer, arrive)
        if end.chunk is not None and end.link is link:
            header, payload = end.chunk
            end.chunk = None
            end.sending = True
            end.stats.bulk_out += HEADER_BYTES + len(payload)
            arrive = partial(other.take_chunk, self.peer, link, header, payload)
            size = HEADER_BYTES + len(payload)
            wire.chunk(self.peer, other.peer, size, partial(self._sent, end, link), arrive)

    def _sent(self, end: _End, link: object) -> None:
        if end.link is link and end.other is not None:
            end.sending = False
            self._offer_room(end)

    def _offer_room(self, end: _End) -> None:
        if end.wanted and end.chunk is None and not end.sending and end.other is not None:
            end.wanted = False
            self._handler.chunks_wanted(end.peer)

    def _redial(self, end: _End, detail: str) -> None:
        if self._closed or end.other is not None or end.dialling:
            return
        seconds = self._exchange.wire.dial_s(self.peer, end.peer)
        if seconds:
            end.dialling = True
            self._loop.call_later(seconds, self._dialled, end, detail)
        else:
            self._dialled(end, detail)

    def _dialled(self, end: _End, detail: str) -> None:
        end.dialling = False
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
        end.sending = False
        other, end.other = end.other, None
        if other is not None:
            detail = f"it closed the link: {reason}"
            bye = partial(other.said_goodbye, self.peer, end.link, refused=False, detail=detail)
            self._loop.call_soon(self._exchange.wire.message, self.peer, other.peer, bye)

    def _give_up(self, end: _End, refused: bool, detail: str) -> None:
        self._cut(end, detail)
        if not end.lost_planned:
            end.lost_planned = True
            self._loop.call_soon(self._lost, end, refused, detail)

    def _lost(self, end: _End, refused: bool, detail: str) -> None:
        end.lost_planned = False
        if not self._closed:
            self._handler.on_lost(end.peer, refused, detail)
