"""Which faults hit whom, and when: drawn from a seed, and from nothing else.

A fault hits some peers from one time to another. Rules of the draw:

- Faults that take a peer out of the swarm (`TAKES_AWAY`) never hit more than half of the peers at
  a time, nor one peer twice at a time: there is always a swarm to come back to. Who is started
  again counts as away for some more seconds. The one exception is the blackout, which hits
  everybody, alone.
- Settings of a link, a disk or a pace hit a peer once at a time, beside anything else.
- Everything is over ``calm_s`` before the end.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeVar

T = TypeVar("T")
ALL: tuple[int, ...] = ()


class Place(StrEnum):
    """Where a peer's machine stands."""

    PUBLIC = "public"
    HIDDEN = "hidden"  # behind a router with NAT: a client
    FAR = "far"  # at the end of a long line, whose delay varies


class Kind(StrEnum):
    """What a fault does."""

    KILL = "kill"  # SIGKILL; started again with its key and its checkpoints
    REPLACE = "replace"  # SIGKILL; another machine comes in its place, with nothing
    STORM = "storm"  # several are killed and started at once, and again while they start
    BLACKOUT = "blackout"  # everybody is killed at once
    LEAVE = "leave"  # SIGTERM; started again with what it has saved
    PAUSE = "pause"  # SIGSTOP, SIGCONT
    JOIN = "join"  # a machine more
    CUT = "cut"  # nothing passes between some and the others
    PAIR = "pair"  # two do not reach each other, but all others
    DEAF = "deaf"  # what others send to it is lost
    MUTE = "mute"  # what it sends is lost
    LOSS = "loss"  # amount: the share of packets that is lost
    RATE = "rate"  # amount: Mbit/s
    DELAY = "delay"  # amount: milliseconds there and back, more than nothing
    DISK = "disk"  # where it saves, there is no room
    SLOW = "slow"  # amount: the share of its speed that is left


TAKES_AWAY = (
    Kind.KILL,
    Kind.REPLACE,
    Kind.STORM,
    Kind.LEAVE,
    Kind.PAUSE,
    Kind.CUT,
    Kind.DEAF,
    Kind.MUTE,
)
"""Who is hit by one of these may be away from the swarm while it lasts."""

LASTING_S = {
    Kind.KILL: (0.5, 20.0),
    Kind.REPLACE: (0.5, 20.0),
    Kind.STORM: (1.0, 6.0),
    Kind.BLACKOUT: (1.0, 5.0),
    Kind.LEAVE: (4.0, 20.0),
    Kind.PAUSE: (0.5, 25.0),
    Kind.JOIN: (0.0, 0.0),
    Kind.CUT: (2.0, 40.0),
    Kind.PAIR: (5.0, 40.0),
    Kind.DEAF: (2.0, 25.0),
    Kind.MUTE: (2.0, 25.0),
    Kind.LOSS: (5.0, 40.0),
    Kind.RATE: (5.0, 40.0),
    Kind.DELAY: (5.0, 60.0),
    Kind.DISK: (5.0, 30.0),
    Kind.SLOW: (5.0, 40.0),
}
"""How long they last, at least and at most; short runs have shorter ones."""

AMOUNT = {
    Kind.LOSS: (0.005, 0.1),
    Kind.RATE: (2.0, 50.0),
    Kind.DELAY: (20.0, 400.0),
    Kind.SLOW: (0.1, 0.7),
}

WEIGHT = {
    Kind.KILL: 4,
    Kind.REPLACE: 2,
    Kind.STORM: 1,
    Kind.LEAVE: 2,
    Kind.PAUSE: 3,
    Kind.CUT: 2,
    Kind.PAIR: 1,
    Kind.DEAF: 1,
    Kind.MUTE: 1,
    Kind.LOSS: 2,
    Kind.RATE: 2,
    Kind.DELAY: 1,
    Kind.DISK: 1,
    Kind.SLOW: 2,
}
"""How often they come, relative to each other; joins and the blackout have their own rule."""

STARTS_S = 6.0  # until a process that was started again trains, where it is not crowded
STARTED_AGAIN = (Kind.KILL, Kind.REPLACE, Kind.STORM, Kind.LEAVE)

BLACKOUT_SHARE = 0.5  # of the runs that are long enough for one
BLACKOUT_RUN_S_MIN = 120.0
SHARE_OF_RUN_MAX = 0.2  # no fault lasts longer than that


@dataclass(frozen=True)
class Setup:
    """A run.

    Attributes:
        peers: how many are there from the start.
        seconds: how long faults and the calm after them last together.
        first_s: nothing happens before.
        calm_s: nothing happens in so many seconds at the end.
        gap_s: mean time from one fault to the next.
        kinds: those that may be drawn.
    """

    peers: int = 8
    seconds: float = 600.0
    first_s: float = 10.0
    calm_s: float = 60.0
    gap_s: float = 7.0
    kinds: tuple[Kind, ...] = tuple(Kind)

    @property
    def late(self) -> int:
        """How many more come late."""
        return self.peers // 4 if Kind.JOIN in self.kinds else 0


@dataclass(frozen=True)
class Fault:
    """Something that is done to a run.

    Attributes:
        kind: what.
        at_s, until_s: from when to when.
        peers: whom it hits; `ALL`: everybody.
        amount: how much; see `Kind`.
    """

    kind: Kind
    at_s: float
    until_s: float
    peers: tuple[int, ...] = ALL
    amount: float = 0.0

    @property
    def back_s(self) -> float:
        """When those it has hit are back."""
        return self.until_s + (STARTS_S if self.kind in STARTED_AGAIN else 0.0)

    def __str__(self) -> str:
        whom = " ".join(f"p{p}" for p in self.peers) or "everybody"
        amount = {
            Kind.LOSS: f" {self.amount:.1%}",
            Kind.RATE: f" {self.amount:.1f} Mbit/s",
            Kind.DELAY: f" {self.amount:.0f} ms",
            Kind.SLOW: f" to {self.amount:.0%}",
        }.get(self.kind, "")
        lasting = f" for {self.until_s - self.at_s:.1f} s" if self.until_s > self.at_s else ""
        return f"{self.kind} {whom}{amount}{lasting}"


def places(seed: int, setup: Setup) -> tuple[Place, ...]:
    """Return where each peer stands, those that come late included. The first one is public."""
    rng = random.Random(f"places {seed}")
    total = setup.peers + setup.late
    hidden, far = setup.peers // 4, -(-setup.peers // 8)
    rest = [Place.HIDDEN] * hidden + [Place.FAR] * far
    rest += [Place.PUBLIC] * (total - 1 - len(rest))
    return (Place.PUBLIC, *(_take(rng, rest) for _ in range(total - 1)))


def draw(seed: int, setup: Setup) -> tuple[Fault, ...]:
    """Return the faults of a run, in the order in which they begin."""
    return _Draw(random.Random(f"faults {seed}"), setup, places(seed, setup)).faults()


class _Draw:
    def __init__(self, rng: random.Random, setup: Setup, where: tuple[Place, ...]) -> None:
        self._rng, self._setup, self._where = rng, setup, where
        self._end = setup.seconds - setup.calm_s
        self._made: list[Fault] = []
        self._joined_at = dict.fromkeys(range(setup.peers), 0.0)

    def faults(self) -> tuple[Fault, ...]:
        for number in range(self._setup.late):
            at = self._rng.uniform(self._setup.first_s, self._end)
            peer = self._setup.peers + number
            self._joined_at[peer] = at
            self._made.append(Fault(Kind.JOIN, at, at, (peer,)))
        dark = self._blackout()
        at = self._setup.first_s
        while at < self._end:
            fault = self._one(at)
            if fault is not None and not (dark and _overlap(fault, dark)):
                self._made.append(fault)
            at += -math.log(1.0 - self._rng.random()) * self._setup.gap_s
        return tuple(sorted(self._made, key=lambda f: (f.at_s, f.kind, f.peers)))

    def _blackout(self) -> Fault | None:
        long_enough = self._setup.seconds >= BLACKOUT_RUN_S_MIN
        if Kind.BLACKOUT not in self._setup.kinds or not long_enough:
            return None
        if self._rng.random() >= BLACKOUT_SHARE:
            return None
        at = self._rng.uniform(0.3, 0.7) * self._end
        dark = Fault(Kind.BLACKOUT, at, at + self._rng.uniform(*LASTING_S[Kind.BLACKOUT]))
        # Who joins in the dark would be alone, and begin a run of its own.
        for fault in [f for f in self._made if _overlap(f, dark)]:
            self._made.remove(fault)
            del self._joined_at[fault.peers[0]]
        self._made.append(dark)
        return dark

    def _one(self, at: float) -> Fault | None:
        kinds = [k for k in WEIGHT if k in self._setup.kinds]
        if not kinds:
            return None
        kind = _weighed(self._rng, kinds)
        until = at + self._lasting(kind)
        peers = self._whom(kind, at, until)
        if until > self._end or not peers:
            return None
        amount = self._rng.uniform(*AMOUNT[kind]) if kind in AMOUNT else 0.0
        return Fault(kind, at, until, peers, amount)

    def _lasting(self, kind: Kind) -> float:
        least, most = LASTING_S[kind]
        most = min(most, max(least, SHARE_OF_RUN_MAX * self._setup.seconds))
        return math.exp(self._rng.uniform(math.log(least), math.log(most)))  # short ones too

    def _whom(self, kind: Kind, at: float, until: float) -> tuple[int, ...]:
        here = [p for p, joined in self._joined_at.items() if joined <= at]
        others = [f for f in self._made if f.at_s < until and at < f.back_s]
        if kind is Kind.DELAY:
            here = [p for p in here if self._where[p] is Place.FAR]
        if kind is Kind.PAIR:
            free = _without(here, others, (Kind.PAIR,))
            return tuple(sorted(_take(self._rng, free) for _ in range(2))) if free[1:] else ()
        if kind not in TAKES_AWAY:
            free = _without(here, others, (kind,))
            return (_take(self._rng, free),) if free else ()
        free = _without(here, others, TAKES_AWAY)
        most = self._setup.peers // 2 - (len(here) - len(free))
        if most < 1 or not free:
            return ()
        several = kind in (Kind.STORM, Kind.CUT)
        number = 1 + self._rng.randrange(min(most, len(free))) if several else 1
        return tuple(sorted(_take(self._rng, free) for _ in range(number)))


def _without(peers: list[int], faults: list[Fault], kinds: tuple[Kind, ...]) -> list[int]:
    hit = [p for f in faults if f.kind in kinds for p in f.peers]
    return [p for p in peers if p not in hit]


def _overlap(a: Fault, b: Fault) -> bool:
    return a.at_s <= b.until_s and b.at_s <= a.until_s


def _take(rng: random.Random, things: list[T]) -> T:
    return things.pop(rng.randrange(len(things)))


def _weighed(rng: random.Random, kinds: list[Kind]) -> Kind:
    left = rng.random() * sum(WEIGHT[k] for k in kinds)
    for kind in kinds:
        left -= WEIGHT[kind]
        if left < 0:
            return kind
    return kinds[-1]
