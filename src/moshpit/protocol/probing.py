"""Which probes are under way, for whom this peer relays probes, and how well it is itself.

Local health (Lifeguard): when this peer's own probes fail, it may be the one that is cut off
or overloaded; each failure makes it more patient, each success less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Final

from moshpit.protocol.machine import Rng
from moshpit.protocol.view import BUCKETS, LiveView
from moshpit.types import PeerId

HEALTH_MAX: Final = 4  # guess: timeouts grow up to five-fold; Lifeguard has 8
PROBES_MAX: Final = 64  # guess: probes under way at once
WHOLE_MAX: Final = 1024  # guess: a list of so many ids costs as little as the buckets do
RELAYS_MAX: Final = 256  # guess: probes made for others


@dataclass(slots=True)
class Probe:
    """A probe under way: first direct, then through helpers."""

    seq: int
    target: PeerId
    deadline: float
    indirect: bool = False
    refused: bool = False
    helpers: tuple[PeerId, ...] = ()


@dataclass(slots=True, frozen=True)
class Relay:
    """A probe made for somebody else: their ``seq`` is answered when the target answers."""

    asker: PeerId
    seq: int
    target: PeerId


class ProbeOrder:
    """Whom to probe next: everybody once, in a random order, then again in another one.

    In a large swarm one bucket of ids after another, in a random order: a list of everybody,
    shuffled at once, costs milliseconds and, in a simulator of thousands, gigabytes.

    Args:
        view: the living.
        me: not this one.
        rng: randomness.
    """

    def __init__(self, view: LiveView, me: PeerId, rng: Rng) -> None:
        self._view = view
        self._me = me
        self._rng = rng
        self._order: list[PeerId] = []  # from the end
        self._parts: list[int] = []  # buckets that follow, from the end

    def next(self) -> Iterator[PeerId]:
        """Yield candidates, until one of them is probed; may be none, and must be checked: they
        were alive when their turn was decided."""
        for _ in range(2):
            while self._order:
                yield self._order.pop()
            self._order = [peer for peer in self._next_part() if peer != self._me]
            self._rng.shuffle(self._order)

    def _next_part(self) -> Sequence[PeerId]:
        if len(self._view.live) <= WHOLE_MAX:
            return self._view.live
        parts = self._parts
        if not parts:
            parts += range(BUCKETS)
            for last in range(BUCKETS - 1, 0, -1):
                other = self._rng.randrange(last + 1)
                parts[last], parts[other] = parts[other], parts[last]
        return self._view.live_in(parts.pop())


class Probes:
    """The book of probes."""

    def __init__(self, first_seq: int) -> None:
        self._seq = first_seq
        self._by_seq: dict[int, Probe] = {}
        self._by_target: dict[PeerId, Probe] = {}
        self._relays: dict[int, Relay] = {}
        self.health = 0
        """0 is well; every timeout is multiplied by ``health + 1``."""

    @property
    def wakeup(self) -> float:
        """The first deadline of a probe."""
        if not self._by_seq:
            return inf
        return min(probe.deadline for probe in self._by_seq.values())

    @property
    def full(self) -> bool:
        """Whether no further probe can be started."""
        return len(self._by_seq) >= PROBES_MAX

    def next_seq(self) -> int:
        """Return a number for a ping."""
        self._seq += 1
        return self._seq

    def start(self, target: PeerId, deadline: float) -> Probe | None:
        """Begin a probe, unless one of this target is under way or there are too many."""
        if target in self._by_target or self.full:
            return None
        probe = Probe(self.next_seq(), target, deadline)
        self._by_seq[probe.seq] = probe
        self._by_target[target] = probe
        return probe

    def of(self, target: PeerId) -> Probe | None:
        """Return the probe of this target that is under way."""
        return self._by_target.get(target)

    def acked(self, seq: int, sender: PeerId) -> Probe | None:
        """End a probe that succeeded; None if this answer is to none, or not from whom asked."""
        probe = self._by_seq.get(seq)
        if probe is None or (sender != probe.target and sender not in probe.helpers):
            return None
        self._succeeded(probe)
        return probe

    def answered(self, target: PeerId) -> None:
        """End the probe of a peer that gave another sign of life."""
        probe = self._by_target.get(target)
        if probe is not None:
            self._succeeded(probe)

    def _succeeded(self, probe: Probe) -> None:
        self.end(probe)
        self.health = max(0, self.health - 1)

    def end(self, probe: Probe) -> None:
        """Forget a probe."""
        del self._by_seq[probe.seq], self._by_target[probe.target]

    def expired(self, now: float) -> list[Probe]:
        """Return the probes whose deadline has passed, in the order of their start."""
        return [probe for probe in self._by_seq.values() if probe.deadline <= now]

    def failed(self) -> None:
        """Note that an own probe got no answer by any way."""
        self.health = min(HEALTH_MAX, self.health + 1)

    def relay(self, relay: Relay) -> int:
        """Remember for whom a ping is made; return its number."""
        if len(self._relays) >= RELAYS_MAX:
            del self._relays[next(iter(self._relays))]
        seq = self.next_seq()
        self._relays[seq] = relay
        return seq

    def relayed(self, seq: int, sender: PeerId) -> Relay | None:
        """Return for whom an answered ping was made."""
        relay = self._relays.get(seq)
        if relay is None or relay.target != sender:
            return None
        del self._relays[seq]
        return relay

    def relays_lost(self, target: PeerId) -> list[Relay]:
        """Return and forget the relays to a target that cannot be had."""
        lost = [seq for seq, relay in self._relays.items() if relay.target == target]
        return [self._relays.pop(seq) for seq in lost]
