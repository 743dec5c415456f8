"""What happened in a chaos run, as data, from which the verdict is made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from .schedule import Fault

Event = dict[str, Any]

GRACE_S = 30.0  # of --grace: a busy machine's processes need their time
KEEP = 2  # checkpoints that each peer keeps


@dataclass(frozen=True)
class Held:
    """What a process holds at a moment, as the kernel tells it."""

    at: float
    threads: int
    sockets: int
    files: int
    memory_mb: float


@dataclass
class Life:
    """One process of a peer, from its start to its end.

    Attributes:
        peer: whose.
        started, ended: when; 0: not yet.
        expected: why it ended, if it was meant to: killed, left, finished; else empty.
        code: its exit code.
        told_to_leave: when it was sent SIGTERM; 0: never.
        stopped: when it was stopped, from and to.
        events: what it has said, in order.
        held: what it held, about every second.
        after: what it held when the swarm was closed.
        complaints: lines of its log that no fault explains.
    """

    peer: int
    started: float
    ended: float = 0.0
    expected: str = ""
    code: int | None = None
    told_to_leave: float = 0.0
    stopped: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    events: list[Event] = field(default_factory=list[Event])
    held: list[Held] = field(default_factory=list[Held])
    after: Held | None = None
    complaints: list[str] = field(default_factory=list[str])

    def all_of(self, kind: str) -> list[Event]:
        """Return the events of a kind."""
        return [e for e in self.events if e["event"] == kind]

    def last_of(self, kind: str) -> Event | None:
        """Return the last event of a kind."""
        return next((e for e in reversed(self.events) if e["event"] == kind), None)

    @property
    def epoch(self) -> int:
        """How far it has come."""
        last = self.last_of("epoch")
        return last["epoch"] if last is not None else -1


@dataclass
class Record:
    """A run.

    Attributes:
        began: when all peers were there and the schedule began.
        calm: when the last fault was over.
        told: when the peers were told at which epoch to finish.
        ended: when all were done.
        faults: what was done.
        lives: all processes.
        left_on_disk: for each peer, what is in the directory in which it saves.
        spread: by how much any number in the parameters of those who have finished differs most.
    """

    began: float = 0.0
    calm: float = 0.0
    told: float = 0.0
    ended: float = 0.0
    faults: tuple[Fault, ...] = ()
    lives: list[Life] = field(default_factory=list[Life])
    left_on_disk: dict[int, list[str]] = field(default_factory=dict[int, list[str]])
    spread: float = 0.0

    @property
    def last_lives(self) -> list[Life]:
        """Return the process that each peer had at the end."""
        return list({life.peer: life for life in self.lives}.values())
