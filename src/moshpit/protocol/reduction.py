"""The parts that this seat reduces: who has contributed to which chunk, and when it is finished.

A chunk is finished as soon as nobody can add to it any more: every seat that may contribute has,
or is lost, or was refused something, or lags (rules 1 and 4).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from moshpit.protocol.ledger import Result
from moshpit.protocol.machine import Accumulate, AccumulateOwn, Finalize, ResetSum
from moshpit.protocol.round import Round
from moshpit.protocol.seating import bits
from moshpit.wire.framing import ChunkHeader

MASS_MAX = 1e30  # guess: nobody has more samples; keeps sums of masses finite
CUT_SHARE = 0.5  # guess: contributions are waited for at most so much of the time that is left


@dataclass(slots=True)
class Reduction:
    """The sums of a part that are not finished yet.

    Attributes:
        part, ballot: what is reduced, and as the how-manieth reducer.
        started: when contributions were first asked for.
        todo: bit mask of the chunks that have no result yet.
        seats: for each such chunk, the bit mask of the other seats whose contributions are in.
        mass: for each such chunk, the mass of these.
        cut: seats that lagged and are not waited for any more.
        delivered: for each seat that has delivered everything, how long it took, in seconds.
    """

    part: int
    ballot: int
    started: float
    todo: int = 0
    seats: dict[int, int] = field(default_factory=dict[int, int])
    mass: dict[int, float] = field(default_factory=dict[int, float])
    cut: int = 0
    delivered: dict[int, float] = field(default_factory=dict[int, float])
    _due: dict[int, int] = field(default_factory=dict[int, int])

    def extend(self, chunks: int) -> None:
        """Reduce these chunks (a bit mask) too."""
        new = list(bits(chunks & ~self.todo))
        self.todo |= chunks
        for chunk in new:
            self.seats[chunk] = 0
            self.mass[chunk] = 0.0
        for seat in self._due:
            self._due[seat] += len(new)
        self.delivered.clear()

    def add(self, chunk: int, seat: int, mass: float, took_s: float) -> None:
        """Note a contribution."""
        due = self._due.get(seat)
        if due is None:
            due = sum(1 for mask in self.seats.values() if not mask >> seat & 1)
        self.seats[chunk] |= 1 << seat
        self.mass[chunk] += mass
        self._due[seat] = due - 1
        if due == 1:
            self.delivered[seat] = took_s

    def ready(self, chunk: int, expected: int) -> bool:
        """Whether nothing of the expected seats is missing."""
        return not expected & ~self.seats[chunk]

    def pop(self, chunk: int) -> tuple[int, float]:
        """Take a chunk out, with the seats and the mass that it has."""
        self.todo &= ~(1 << chunk)
        return self.seats.pop(chunk), self.mass.pop(chunk)


class Reductions:
    """Everything that one seat reduces in one round.

    Args:
        state: the round.
        keep: takes a finished chunk's result.
    """

    def __init__(self, state: Round, keep: Callable[[int, Result], None]) -> None:
        self._round = state
        self._keep = keep
        self._by_part: dict[int, Reduction] = {}

    def todo(self, part: int) -> int:
        """Return the chunks of a part that are being reduced."""
        reduction = self._by_part.get(part)
        return 0 if reduction is None else reduction.todo

    def begin(self, part: int, ballot: int, chunks: int, now: float) -> None:
        """Reduce these chunks (a bit mask) of a part."""
        reduction = self._by_part.get(part)
        if reduction is None:
            reduction = self._by_part[part] = Reduction(part, ballot, now)
        reduction.started = now
        reduction.extend(chunks)
        self._settle(reduction)

    def settle(self) -> None:
        """Finish every chunk to which nobody can add any more."""
        for reduction in list(self._by_part.values()):
            self._settle(reduction)

    def settle_alone(self, chunks: int) -> None:
        """Nobody else is left: finish the chunks that hold others' contributions, and these
        (a bit mask)."""
        for reduction in list(self._by_part.values()):
            for chunk, seats in list(reduction.seats.items()):
                if seats or chunks >> chunk & 1:
                    self._finalize(reduction, chunk)

    def drop(self) -> None:
        """Give up what is not finished."""
        for reduction in self._by_part.values():
            for chunk in list(reduction.seats):
                self._round.out.append(ResetSum(self._round.group, chunk))
        self._by_part.clear()

    def _settle(self, reduction: Reduction) -> None:
        expected = self._round.contributors & ~reduction.cut
        for chunk in list(reduction.seats):
            if reduction.ready(chunk, expected):
                self._finalize(reduction, chunk)

    def _finalize(self, reduction: Reduction, chunk: int) -> None:
        state = self._round
        seats, mass = reduction.pop(chunk)
        if state.weighs:
            own = state.ledger.own[chunk]
            seats |= 1 << state.seating.me
            mass += own
            if own > 0:
                state.out.append(AccumulateOwn(state.group, chunk, own))
        if mass > 0:
            state.out.append(Finalize(state.group, chunk, reduction.ballot, mass, seats))
            self._keep(chunk, Result(reduction.ballot, mass, seats))
        else:
            self._keep(chunk, Result(reduction.ballot, 0.0, 0))

    def contribution(self, seat: int, header: ChunkHeader, fault: str, now: float) -> str:
        """Take a contribution that has arrived; returns the code of what is wrong with it."""
        state, chunk, mass = self._round, header.chunk, header.mass
        part = state.ledger.part_of(chunk)
        if state.reducer(part, header.ballot) != state.seating.me:
            return "wrong-part"
        if not state.seating.weighers >> seat & 1:
            return "weightless"
        reduction = self._by_part.get(part)
        if reduction is None or reduction.ballot != header.ballot:
            return ""
        if reduction.seats.get(chunk, -1) >> seat & 1 or (state.bad | reduction.cut) >> seat & 1:
            return ""  # late or repeated, or its sender is out
        if not (math.isfinite(mass) and 0 <= mass <= MASS_MAX):
            return "bad-mass"
        if mass > 0:
            if fault:
                return fault
            state.out.append(Accumulate(state.group, chunk, mass))
        began = max(reduction.started, state.seating.present_at[seat])
        reduction.add(chunk, seat, mass, now - began)
        if reduction.ready(chunk, state.contributors & ~reduction.cut):
            self._finalize(reduction, chunk)
        return ""

    def cut_laggards(self, now: float) -> None:
        """Rule 1: leave out who takes much longer than the others."""
        for reduction in list(self._by_part.values()):
            late = self._laggards(reduction, now) if reduction.todo else []
            for seat in late:
                reduction.cut |= 1 << seat
                detail = f"in part {reduction.part}"
                self._round.ledger.blame(seat, "lagging", detail)
                self._round.notice("lagging", seat, detail)
            if late:
                self._settle(reduction)

    def _laggards(self, reduction: Reduction, now: float) -> list[int]:
        state, config = self._round, self._round.config
        expected = state.contributors & ~reduction.cut
        late = [s for s in state.seating.seats(expected) if s not in reduction.delivered]
        # What the deadline has for the columns of a torus is not for senders that lag.
        left_s = min(state.deadline - reduction.started, state.base_s)
        if now - reduction.started >= CUT_SHARE * left_s:
            return late
        if len(late) != 1 or not reduction.delivered:
            return []
        # By its announced bandwidth it may be known to need longer than those that are there.
        usual = max(*reduction.delivered.values(), state.needs_s(late[0]))
        allowed = config.laggard_factor * usual + config.stall_s
        began = max(reduction.started, state.seating.present_at[late[0]])
        return late if now - began >= allowed else []
