"""Torus: the way of one peer's slice up its column, while its row waits for it.

The row's machine holds the slice (`holding.py`). When all of it is reduced, the node looks for
the column's group and runs a second `AllReduce` over these chunks: its local values are the
row's means, its masses theirs. Each result that comes lets the row's machine go on with that
chunk. However the column ends, and at the latest when the row does, the row's own means stand
for what it has not brought.
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpit.events import Reach
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.ledger import Result
from moshpit.protocol.matchmaking import JoinFields
from moshpit.protocol.seating import bits
from moshpit.types import GroupId
from moshpit.wire.messages import GroupFormed, GroupKey


@dataclass(slots=True)
class RunningRound:
    """A round that has a group, until nobody needs it any more."""

    machine: AllReduce
    formed: GroupFormed
    seat: int


@dataclass(slots=True)
class Climb:
    """How far the slice has come.

    Attributes:
        row: the row's round.
        key: of the column.
        sought: when the search for the column began; None: not yet.
        meeting_s: how long it took.
        column: the column's round, once there is one.
        over: nothing more is to come of it.
    """

    row: RunningRound
    key: GroupKey
    sought: float | None = None
    meeting_s: float = 0.0
    column: RunningRound | None = None
    over: bool = False

    @staticmethod
    def of(row: RunningRound) -> Climb | None:
        """Return what is ahead of this seat of a row; None if it holds nothing."""
        formed, seat = row.formed, row.seat
        if formed.columns is None or not formed.next_path[seat]:
            return None
        key = formed.key
        span = formed.columns.spans[seat]
        return Climb(row, GroupKey(key.epoch, key.axis + 1, formed.next_path[seat], span))

    @property
    def seeking(self) -> bool:
        """Whether the column's group is being looked for."""
        return self.sought is not None and self.column is None and not self.over

    @property
    def group(self) -> GroupId | None:
        """The column's group."""
        return None if self.column is None else self.column.machine.group

    def masses(self) -> list[float]:
        """Return, for each chunk of the vector, the mass behind what this peer brings."""
        holding = self.row.machine.holding
        masses = [0.0] * self.row.formed.joins[0].vector_chunks
        for chunk in bits(holding.held):
            masses[chunk] = holding.result(chunk).mass
        return masses

    def fields(self, row: JoinFields) -> JoinFields:
        """Return what this peer says of itself there, given what it said in the row."""
        first, end = self.key.span
        return JoinFields(
            role=row.role,
            schema=row.schema,
            vector_chunks=row.vector_chunks,
            vector_bytes=-(-row.vector_bytes * (end - first) // row.vector_chunks),
            bandwidth=row.bandwidth,
            weighs=any(mass > 0 for mass in self.masses()),
            origin=self.row.machine.group,
            planned=row.planned,
            fill_s=row.fill_s,
        )

    def found(self) -> list[tuple[int, GroupId, Result]]:
        """Return what the column has brought since the last call, as results of the row.

        A chunk to which nobody in the column had anything is not among them.
        """
        assert self.column is not None, "no column yet"
        machine, columns = self.column.machine, self.row.formed.columns
        assert columns is not None, "no row of a torus"
        news, machine.news = machine.news, []
        held = self.row.machine.holding.held
        full = len(self.column.formed.joins) >= columns.rows
        found: list[tuple[int, GroupId, Result]] = []
        for chunk in news:
            result, mine, whole = machine.made(chunk)
            if not held >> chunk & 1 or not (result.mass > 0 or whole):
                continue
            own = self.row.machine.holding.result(chunk)
            reach = Reach.ALL if whole and full else Reach.SOME
            seats = own.seats if mine else 0
            found.append((chunk, machine.group, Result(own.ballot, result.mass, seats, reach)))
        return found
