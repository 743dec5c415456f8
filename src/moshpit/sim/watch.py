"""What the checkers remember: verdicts, what an epoch brought, what a process still owes."""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpit.types import GroupId, PeerId


@dataclass
class Verdict:
    """What became of one invariant."""

    name: str
    checked: int = 0
    violations: int = 0
    first: str = ""

    @property
    def ok(self) -> bool:
        """Whether it held whenever it was looked at."""
        return self.violations == 0


@dataclass
class EpochSeen:
    """What the peers brought to an epoch's averaging and took from it."""

    weights: list[float] = field(default_factory=list[float])
    values: list[list[float]] = field(default_factory=list[list[float]])
    low: list[float] = field(default_factory=list[float])
    high: list[float] = field(default_factory=list[float])
    ended: int = 0
    incomplete: int = 0

    def spread(self) -> float:
        """The widest difference between two peers, relative to the largest value."""
        scale = max(map(abs, [*self.low, *self.high]), default=0.0)
        width = max((h - low for low, h in zip(self.low, self.high, strict=True)), default=0.0)
        return width / scale if scale else 0.0


@dataclass
class Watch:
    """What one process still owes."""

    began: float | None = None
    weighed: bool = False
    """Whether its value has a weight in the averaging under way."""
    rounds: dict[GroupId, list[float]] = field(default_factory=dict[GroupId, list[float]])
    """For each open round: by when it must end; once it has, by when it must be closed."""
    ended: dict[GroupId, float] = field(default_factory=dict[GroupId, float])
    broken: dict[GroupId, list[PeerId]] = field(default_factory=dict[GroupId, list[PeerId]])
    """Who sent broken data in this round, in the order of arrival."""
