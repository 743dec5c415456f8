"""The course of one epoch's averaging at one peer, from the snapshot to the report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from moshpit.events import Blame, Outcome, RoundReport
from moshpit.protocol.climb import Climb
from moshpit.protocol.machine import BeginAveraging
from moshpit.protocol.matchmaking import JoinFields
from moshpit.types import NO_GROUP, GroupId, PeerId
from moshpit.wire.messages import GroupKey, PeerRecord


@dataclass(slots=True)
class Averaging:
    """How far an epoch's averaging has come.

    Attributes:
        request: what it began with.
        began: when.
        masses: for each chunk, the mass behind the peer's present value.
        company: the peers that this one planned for, sorted by id.
        axis: the grid axis that is under way.
        key: the group that is sought, or was last.
        origin: the group whose mean the peer holds.
        sought: when the search began.
        meeting_s: how long it took.
        group: the round under way; None while one is sought.
        climb: the way up the column, in a row of the torus schedule.
        reports: of the rounds that have ended.
    """

    request: BeginAveraging
    began: float
    masses: list[float]
    company: Sequence[PeerId] = ()
    axis: int = 0
    key: GroupKey = field(default_factory=lambda: GroupKey(0, 0, ()))
    origin: GroupId = NO_GROUP
    sought: float = 0.0
    meeting_s: float = 0.0
    group: GroupId | None = None
    climb: Climb | None = None
    reports: list[RoundReport] = field(default_factory=list[RoundReport])

    def join_fields(self, me: PeerRecord) -> JoinFields:
        """Return what this peer says of itself when it seeks its next group."""
        known = [b for b in (me.up, me.down) if b > 0]
        return JoinFields(
            role=me.role,
            schema=self.request.schema,
            vector_chunks=self.request.chunks,
            vector_bytes=self.request.vector_bytes,
            bandwidth=min(known, default=0.0),
            weighs=any(m > 0 for m in self.masses),
            origin=self.origin,
            planned=len(self.company),
            fill_s=self.request.fill_s,
        )

    def ended(self, report: RoundReport) -> RoundReport:
        """Note the end of a round; returns its report, if it is of this averaging with how long
        the meeting took."""
        if report.group == self.group:
            meeting_s = self.meeting_s
        elif self.climb is not None and report.group == self.climb.group:
            meeting_s = self.climb.meeting_s
        else:
            return report
        report = msgspec.structs.replace(report, meeting_s=meeting_s)
        self.reports.append(report)
        return report

    def weigh(self, weight: float | None) -> None:
        """Change what this peer's value weighs, before its first round; None, or nothing: no."""
        if weight is not None and any(self.masses):
            self.masses = [weight] * len(self.masses)

    def together(self, me: PeerId) -> tuple[Sequence[PeerId], bool]:
        """Return who has made the mean, sorted by id, and whether that is known for sure: of a
        grid's other rows a peer knows only who was to come. Nobody: it is not the mean of all."""
        met = [r for r in self.reports if len(r.peers) > 1]
        if not met:
            return (me,), True
        if any(r.outcome is not Outcome.COMPLETE for r in met):
            return (), True
        if len(self.reports) == 1 and not met[0].reach:
            return sorted(met[0].contributors() or met[0].peers), True
        return self.company, False

    def no_group(self, me: PeerId, reason: str, now: float) -> None:
        """Report a round that no group was had for: the peer keeps its value."""
        chunks = self.request.chunks
        self.reports.append(
            RoundReport(
                epoch=self.key.epoch,
                axis=self.axis,
                group=NO_GROUP,
                peers=(me,),
                seat=0,
                outcome=Outcome.FAILED,
                ledger=(1,) * chunks,
                masses=tuple(self.masses),
                missing=tuple(range(chunks)),
                attempts=(0,) * chunks,
                blames=(Blame(me, "no-group", reason),),
                meeting_s=now - self.sought,
            )
        )

    def no_column(self, me: PeerId, climb: Climb, reason: str, now: float) -> None:
        """Report a column that no group was had for."""
        first, end = climb.key.span
        self.reports.append(
            RoundReport(
                epoch=climb.key.epoch,
                axis=climb.key.axis,
                group=NO_GROUP,
                peers=(me,),
                seat=0,
                outcome=Outcome.FAILED,
                ledger=(1,) * (end - first),
                masses=tuple(climb.masses()[first:end]),
                missing=tuple(range(first, end)),
                attempts=(0,) * (end - first),
                blames=(Blame(me, "no-group", reason),),
                meeting_s=now - (climb.sought or now),
                span=climb.key.span,
            )
        )
