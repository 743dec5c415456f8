"""Lines between virtual peers: how long messages and chunks take.

Each peer has a line with so many bytes per second in each direction, and stands so many seconds
away from the middle of the net. A transfer gets the smaller of an equal share of its sender's line
up and an equal share of its receiver's line down, from moment to moment. (A real net would give
what one transfer leaves unused of its share to others; so this is a lower bound.) Control messages
are small: they take the latency only, and never wait behind chunks, as in
`moshpit.transport.tcp`.

A line that was idle may take its time to begin: a *hiccup*. This is the paper's latency injected
before each round (paper §4.2), whatever the protocol above: the first burst of chunks that a peer
sends after it has computed something (`ShapedWire.computed`) is so much later.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from heapq import heappop, heappush
from random import Random
from typing import Final, final

from moshpit.errors import ConfigError
from moshpit.transport.memory import Wire
from moshpit.types import PeerId

DIAL_TRIPS: Final = 6  # one way: TCP, TLS 1.3, proof of keys; as in moshpit.sim
TOGETHER_S: Final = 1e-7  # transfers that end so close end together; a microsecond is no time here
UNKNOWN_S: Final = 0.05  # guess: the way to where nobody listens
BURST_PAUSE_S: Final = 0.25  # guess: chunks that are further apart are two bursts


@dataclass(frozen=True, slots=True)
class Line:
    """How a peer is connected.

    Attributes:
        up, down: bytes per second.
        latency_s: one way, to the middle of the net.
        hiccup_s: the mean of the extra latency (exponentially distributed) of the
            first burst of chunks after some computing; 0: none.
    """

    up: float
    down: float
    latency_s: float = 0.0005
    hiccup_s: float = 0.0

    def __post_init__(self) -> None:
        if not (self.up > 0 and self.down > 0 and self.latency_s >= 0 and self.hiccup_s >= 0):
            raise ConfigError(f"{self}: rates must be positive, and times not negative")


class _Pipe:
    """One direction of a line, and the transfers that share it."""

    __slots__ = ("rate", "transfers")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.transfers: dict[_Transfer, None] = {}

    @property
    def share(self) -> float:
        return self.rate / len(self.transfers)


class _Burst:
    """What a peer has sent without a longer pause."""

    __slots__ = ("begins", "ended", "fresh", "under_way")

    def __init__(self) -> None:
        self.fresh = True  # nothing was sent since something was computed
        self.under_way = 0
        self.ended = float("-inf")
        self.begins = 0.0


class _Transfer:
    """A chunk on its way."""

    __slots__ = ("arrive", "burst", "down", "due", "left", "rate", "sent", "since", "up")

    def __init__(
        self,
        pipes: tuple[_Pipe, _Pipe],
        size: int,
        burst: _Burst,
        sent: Callable[[], None],
        arrive: Callable[[], object],
    ) -> None:
        self.up, self.down = pipes
        self.left = float(size)
        self.burst = burst
        self.sent = sent
        self.arrive = arrive
        """To be called when its last byte has left."""
        self.rate = 0.0
        self.since = 0.0
        self.due = float("inf")


@final
class ShapedWire(Wire):
    """The net between all virtual peers.

    Args:
        loop: whose clock counts.
        rng: the hiccups' randomness.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, rng: Random) -> None:
        self._loop = loop
        self._rng = rng
        self._lines: dict[PeerId, Line] = {}
        self._up: dict[PeerId, _Pipe] = {}
        self._down: dict[PeerId, _Pipe] = {}
        self._bursts: dict[PeerId, _Burst] = {}
        self._ways: dict[tuple[PeerId, PeerId], deque[Callable[[], None]]] = {}
        self._touched: dict[_Pipe, None] = {}
        self._planned = False
        self._heap: list[tuple[float, int, _Transfer]] = []
        self._number = 0
        self._timer: asyncio.TimerHandle | None = None
        self.bytes_carried = 0
        """Of all chunks, headers included."""

    def connect(self, peer: PeerId, line: Line) -> None:
        """Put up a peer's line."""
        self._lines[peer] = line
        self._up[peer] = _Pipe(line.up)
        self._down[peer] = _Pipe(line.down)
        self._bursts[peer] = _Burst()

    def latency_s(self, source: PeerId, target: PeerId) -> float:
        """Return how long a message takes from one peer to another."""
        return self._lines[source].latency_s + self._lines[target].latency_s

    def computed(self, peer: PeerId) -> None:
        """A peer has computed something: what it sends next may hiccup."""
        self._bursts[peer].fresh = True

    # --- Wire -----------------------------------------------------------------------------

    def dial_s(self, source: PeerId, target: PeerId | None) -> float:
        """See `Wire.dial_s`."""
        if target is None or target not in self._lines:
            return 2 * UNKNOWN_S
        return DIAL_TRIPS * self.latency_s(source, target)

    def message(self, source: PeerId, target: PeerId, deliver: Callable[[], None]) -> None:
        """See `Wire.message`."""
        # Timers that are due together come in any order, so each takes the first one.
        way = self._ways.setdefault((source, target), deque())
        way.append(deliver)
        self._loop.call_later(self.latency_s(source, target), _deliver_first, way)

    def chunk(
        self,
        source: PeerId,
        target: PeerId,
        size: int,
        sent: Callable[[], None],
        deliver: Callable[[], None],
    ) -> None:
        """See `Wire.chunk`."""
        now, burst = self._loop.time(), self._bursts[source]
        self.bytes_carried += size
        hiccup_s = self._lines[source].hiccup_s
        idle = not burst.under_way and now - burst.ended > BURST_PAUSE_S
        if hiccup_s and burst.fresh and idle:
            burst.begins = now + self._rng.expovariate(1.0 / hiccup_s)
        burst.fresh = False
        burst.under_way += 1
        pipes = (self._up[source], self._down[target])
        arrive = partial(self._loop.call_later, self.latency_s(source, target), deliver)
        transfer = _Transfer(pipes, size, burst, sent, arrive)
        if burst.begins > now:
            self._loop.call_at(burst.begins, self._begin, transfer)
        else:
            self._begin(transfer)

    # --- shares ---------------------------------------------------------------------------

    def _begin(self, transfer: _Transfer) -> None:
        transfer.since = self._loop.time()
        for pipe in (transfer.up, transfer.down):
            pipe.transfers[transfer] = None
            self._touched[pipe] = None
        self._plan()

    def _plan(self) -> None:
        """Share anew, once for all that happens at this moment."""
        if not self._planned:
            self._planned = True
            self._loop.call_soon(self._share)

    def _share(self) -> None:
        self._planned = False
        now = self._loop.time()
        touched, self._touched = self._touched, {}
        concerned: dict[_Transfer, None] = {}
        for pipe in touched:
            concerned.update(pipe.transfers)
        for transfer in concerned:
            rate = min(transfer.up.share, transfer.down.share)
            if rate == transfer.rate:
                continue
            transfer.left -= transfer.rate * (now - transfer.since)
            transfer.rate, transfer.since = rate, now
            transfer.due = now + max(0.0, transfer.left) / rate
            self._number += 1
            heappush(self._heap, (transfer.due, self._number, transfer))
        self._arm()

    def _arm(self) -> None:
        heap = self._heap
        while heap and heap[0][0] != heap[0][2].due:  # it was given another rate since
            heappop(heap)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if heap:
            self._timer = self._loop.call_at(heap[0][0], self._look)

    def _look(self) -> None:
        self._timer = None
        heap, now = self._heap, self._loop.time()
        ended: list[_Transfer] = []
        while heap and heap[0][0] <= now + TOGETHER_S:
            due, _, transfer = heappop(heap)
            if due == transfer.due:
                transfer.due = float("inf")
                ended.append(transfer)
        for transfer in ended:
            for pipe in (transfer.up, transfer.down):
                del pipe.transfers[transfer]
                self._touched[pipe] = None
        for transfer in ended:
            transfer.arrive()
            transfer.burst.under_way -= 1
            transfer.burst.ended = now
            transfer.sent()
        self._plan()


def _deliver_first(way: deque[Callable[[], None]]) -> None:
    way.popleft()()
