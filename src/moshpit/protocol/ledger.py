"""What a seat holds of a round: the results by chunk, who is in them, and the report of it all."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from moshpit.events import Blame, Outcome, Reach, RoundReport
from moshpit.protocol.seating import Seating, span
from moshpit.types import GroupId
from moshpit.wire.messages import GroupFormed


class Result(NamedTuple):
    """A chunk's result: the reducer that made it (by ballot), its mass and who is in it.

    Mass 0 says that nobody had anything to give: there is no value, everybody keeps his own.
    In a torus row ``reach`` says how far it reaches, and the mass is that of all who are in it.
    """

    ballot: int
    mass: float
    seats: int
    reach: int = Reach.ROW


class Ledger:
    """The results of one round at one seat.

    Args:
        formed: the announcement, already judged.
        seating: its seats.
        masses: for each chunk, the mass behind this peer's value.
    """

    def __init__(self, formed: GroupFormed, seating: Seating, masses: Sequence[float]) -> None:
        self._formed = formed
        self._seating = seating
        self.bounds = formed.bounds
        self.own = [mass / seating.share for mass in masses]
        """For each chunk, the mass of this peer's contribution."""
        self.results: list[Result | None] = [None] * len(masses)
        self.have = 0
        self.all = span(self.bounds[0], self.bounds[-1])
        self.parts = [p for p in range(seating.size) if self.bounds[p] < self.bounds[p + 1]]
        self.blames: dict[tuple[int, str], Blame] = {}

    @property
    def lacking(self) -> int:
        """The chunks without a result."""
        return self.all & ~self.have

    def knows(self, chunk: int) -> bool:
        """Whether the round is about a chunk."""
        return self.bounds[0] <= chunk < self.bounds[-1]

    def part_of(self, chunk: int) -> int:
        """Return the part that a chunk belongs to."""
        return bisect_right(self.bounds, chunk) - 1

    def mask(self, part: int) -> int:
        """Return the chunks of a part."""
        return span(self.bounds[part], self.bounds[part + 1])

    def keep(self, chunk: int, result: Result) -> None:
        """Note a result; the first one stays."""
        assert self.results[chunk] is None
        self.results[chunk] = result
        self.have |= 1 << chunk

    def blame(self, seat: int, reason: str, detail: str) -> bool:
        """Note who was refused or left out, and why; False if that is known already."""
        if (seat, reason) in self.blames:
            return False
        self.blames[seat, reason] = Blame(self._seating.peers[seat], reason, detail)
        return True

    def masses_after(self) -> list[float]:
        """Return the mass behind each chunk's value now."""
        return [
            r.mass if r is not None and r.mass > 0 else own
            for r, own in zip(self.results, self.own, strict=True)
        ]

    def report(self, seconds: float) -> RoundReport:
        """Return the round's report as of now."""
        seating, mine = self._seating, 1 << self._seating.me
        first, end = self.bounds[0], self.bounds[-1]
        results = self.results[first:end]
        value = [r if r is not None and r.mass > 0 else None for r in results]
        masks = tuple(mine if r is None else r.seats for r in value)
        reach = tuple(Reach.ROW if r is None else r.reach for r in results)
        return RoundReport(
            epoch=self._formed.key.epoch,
            axis=self._formed.key.axis,
            group=GroupId(self._formed.group),
            peers=seating.peers,
            seat=seating.me,
            outcome=self._outcome(masks) if self._formed.columns is None else self._torus_outcome(),
            ledger=masks,
            masses=tuple(self.masses_after()[first:end]),
            missing=tuple(chunk for chunk, r in enumerate(value, first) if r is None),
            attempts=tuple(0 if r is None else r.ballot for r in value),
            blames=tuple(self.blames.values()),
            moving_s=seconds,
            span=self._formed.key.span,
            reach=() if self._formed.columns is None else reach,
            deadline_s=self._formed.deadline_s,
        )

    def _outcome(self, masks: Sequence[int]) -> Outcome:
        weighers, mine = self._seating.weighers, 1 << self._seating.me
        if self._seating.size == 1 or not weighers:
            return Outcome.COMPLETE
        if all(mask == weighers for mask in masks):
            return Outcome.COMPLETE
        if weighers & ~mine and not any(mask & ~mine for mask in masks):
            return Outcome.FAILED
        return Outcome.PARTIAL

    def _torus_outcome(self) -> Outcome:
        """The same for a row whose parts went up their columns."""
        weighers, mine = self._seating.weighers, 1 << self._seating.me
        made = [r for r in self.results if r is not None]
        whole = [r for r in made if r.reach == Reach.ALL and r.seats == weighers]
        if len(whole) == len(self.results):
            return Outcome.COMPLETE
        if not any(r.seats & ~mine or r.reach > Reach.ROW for r in made):
            return Outcome.FAILED
        return Outcome.PARTIAL
