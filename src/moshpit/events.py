"""What happened, as data: the reports and notices that people, logs and tests read.

Machines emit these; nothing in Moshpit reacts to them.
"""

from __future__ import annotations

from enum import IntEnum, StrEnum

import msgspec

from moshpit.types import GroupId, PeerId


class Outcome(StrEnum):
    """How a round ended, judged by the bytes and nothing else.

    Example:
        >>> Outcome("partial") is Outcome.PARTIAL
        True
    """

    COMPLETE = "complete"
    """Every chunk is the mean over every member that had something to give."""
    PARTIAL = "partial"
    """Some contribution is missing from some mean, or some chunk kept its local value."""
    FAILED = "failed"
    """No chunk was averaged with anybody else's contribution."""


class Reach(IntEnum):
    """How far a chunk's mean reaches in a row of the torus schedule."""

    ROW = 0
    """Only this row: its column, or whoever took it there, failed."""
    SOME = 1
    """Its column's mean, in which somebody is missing."""
    ALL = 2
    """The whole column's mean."""


class Blame(msgspec.Struct, frozen=True):
    """A peer that was refused something, and why (invariant S4)."""

    peer: PeerId
    reason: str
    detail: str = ""


class RoundReport(msgspec.Struct, frozen=True):
    """What one group all-reduce really did at this peer.

    Attributes:
        epoch, axis: which round this was.
        group: the group's id; empty where no group was formed.
        peers: the members by seat.
        seat: this peer's seat.
        outcome: see `Outcome`.
        ledger: for each chunk, the bit mask of the seats whose contributions are in
            this peer's value (its own bit only, where it kept its local value).
        masses: for each chunk, the mass behind this peer's value.
        missing: the chunks that kept their local value.
        attempts: for each chunk, how many reducers before the one that made the result
            were given up; together with the reducer it names the result.
        blames: who was refused or left out, and why.
        meeting_s: seconds from asking for a group to having one.
        moving_s: seconds from having a group to having every chunk.
        deadline_s: the longest that the group has promised this to take; 0: no group.
        bytes_sent, bytes_received: payload bytes of chunks.
        span: (): the round was about the whole vector; else about these chunks, from the
            first number up to the second. ``ledger``, ``masses`` and ``attempts`` begin at
            the first of them; ``missing`` has the numbers of the vector's chunks.
        reach: for rows of the torus schedule, how far each chunk's mean reaches (`Reach`);
            () for other rounds.

    Example:
        >>> report = RoundReport(  # of two chunks; of the second peer's, one did not arrive
        ...     epoch=0, axis=0, group=GroupId(b"g"), peers=(PeerId(b"a"), PeerId(b"b")), seat=0,
        ...     outcome=Outcome.PARTIAL, ledger=(0b11, 0b01), masses=(2.0, 1.0), missing=(),
        ...     attempts=(0, 0),
        ... )
        >>> report.contributors()  # in every chunk
        (b'a',)
    """

    epoch: int
    axis: int
    group: GroupId
    peers: tuple[PeerId, ...]
    seat: int
    outcome: Outcome
    ledger: tuple[int, ...]
    masses: tuple[float, ...]
    missing: tuple[int, ...]
    attempts: tuple[int, ...]
    blames: tuple[Blame, ...] = ()
    meeting_s: float = 0.0
    moving_s: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    span: tuple[int, ...] = ()
    reach: tuple[int, ...] = ()
    deadline_s: float = 0.0

    @property
    def fallback(self) -> tuple[int, ...]:
        """The chunks that hold only their row's mean, because their column failed."""
        return tuple(
            chunk
            for chunk, reach in enumerate(self.reach)
            if reach == Reach.ROW and chunk not in self.missing
        )

    def contributors(self) -> tuple[PeerId, ...]:
        """Return the members that are in every averaged chunk of this round."""
        common = -1
        for chunk, mask in enumerate(self.ledger, self.span[0] if self.span else 0):
            if chunk not in self.missing:
                common &= mask
        return tuple(p for i, p in enumerate(self.peers) if common >> i & 1)


class EpochReport(msgspec.Struct, frozen=True):
    """What one epoch's averaging (all its rounds) did at this peer.

    Attributes:
        epoch: which averaging this was, from 0.
        rounds: one report for each round; () if this peer was alone.
        seconds: from asking for it to its end.
        stale: the swarm had moved on; this peer's contribution came too late and was not used.

    Example:
        >>> EpochReport(epoch=3, rounds=(), seconds=0.1).outcome
        <Outcome.COMPLETE: 'complete'>
    """

    epoch: int
    rounds: tuple[RoundReport, ...]
    seconds: float
    stale: bool = False

    @property
    def outcome(self) -> Outcome:
        """The worst outcome of the rounds; complete if this peer was alone, failed if stale.

        What came of a torus column is in the outcome of its row.
        """
        if self.stale:
            return Outcome.FAILED
        order = (Outcome.FAILED, Outcome.PARTIAL, Outcome.COMPLETE)
        worst = min((order.index(r.outcome) for r in self.rounds if not r.span), default=2)
        return order[worst]

    @property
    def parted(self) -> bool:
        """Whether peers hold different means of it, or may: in the torus schedule a column had not
        all rows, so that for its slice some row's own mean stands there, and elsewhere a mean
        without that row. All rows see that, since each has a slice in every column."""
        return any(reach != Reach.ALL for r in self.rounds for reach in r.reach)


class Notice(msgspec.Struct, frozen=True):
    """One line of a peer's log: a stable code, who it is about, and words."""

    code: str
    peer: PeerId | None = None
    detail: str = ""
