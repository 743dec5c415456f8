"""The torus schedule: rows and columns of the grid, and which slice goes up which column.

Rules (docs/internals/protocol.md "Torus"):

- It is for grids of two axes. With k the fewest reducers that a row has, the vector is cut into
  k near-equal slices, alike in all rows. The first k reducers of a row, by slot, are its
  *holders*: holder j reduces slice j and takes the mean to column j, where it meets the
  holders j of the other rows. Everybody else in a row has no part.
- The host of a row decides for its row, from its plan. Rows that were cut otherwise never meet:
  the slice is part of the column's key.
- In place of an absent holder comes a reducer of the row that has no column. Where there is
  none, its neighbour reduces that slice too, and there the row's mean stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moshpit.config import Schedule
from moshpit.protocol import grid


class Torus(NamedTuple):
    """Who holds what, in ranks of a plan.

    Attributes:
        holders: for each row, the ranks of its holders; holder j is of column j.
    """

    holders: tuple[tuple[int, ...], ...]

    @property
    def rows(self) -> int:
        """How many members a column has."""
        return len(self.holders)

    @property
    def columns(self) -> int:
        """k, the number of slices."""
        return len(self.holders[0])

    def row(self, ranks: Sequence[int]) -> int:
        """Return the number of the row that these ranks are."""
        return next(i for i, row in enumerate(self.holders) if row[0] in ranks)

    def members(self, path: grid.Path) -> tuple[int, ...]:
        """Return the ranks of a column, by row; empty where there is no such column."""
        if len(path) != 2 or path[1] != 0 or not 0 <= path[0] < self.columns:
            return ()
        return tuple(row[path[0]] for row in self.holders)


def torus(
    plan: grid.Plan, reduces: Sequence[bool], chunks: int, schedule: Schedule
) -> Torus | None:
    """Return the torus of a plan; None where the schedule is the grid's.

    ``auto`` takes the torus where every peer reduces and there are two slices or more; parts
    of equal size cost nobody more than two full rounds would, whatever the bandwidths.

    Args:
        plan: the grid.
        reduces: for each rank, whether it can be dialled and so reduce.
        chunks: of the vector.
        schedule: what was asked for.
    """
    if schedule == "grid" or plan.axes != 2:
        return None
    able = [tuple(rank for rank in row if reduces[rank]) for row in plan.rows]
    count = min(chunks, *(len(row) for row in able))
    if not count or (schedule == "auto" and (count < 2 or not all(reduces))):
        return None
    return Torus(tuple(row[:count] for row in able))


def edges(columns: int, chunks: int) -> list[int]:
    """Return where the slices begin and end: slice j is the chunks from j up to j + 1.

    >>> edges(3, 8)
    [0, 2, 5, 8]
    """
    return [chunks * number // columns for number in range(columns + 1)]


class Seats(NamedTuple):
    """How a row is seated.

    Attributes:
        order: for each seat, the index of its member.
        columns: for each seat, its column; -1: none.
        bounds: the parts, as in `GroupFormed`.
        spans: for each seat, what it holds, as in `Columns`.
    """

    order: tuple[int, ...]
    columns: tuple[int, ...]
    bounds: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]


def seat_row(
    layout: Torus, chunks: int, columns: Sequence[int], reduces: Sequence[bool]
) -> Seats | None:
    """Seat the members of a row; None where nobody of them reduces.

    Args:
        layout: the torus.
        chunks: of the vector.
        columns: for each member, the column of which it is the planned holder; -1: of none.
        reduces: for each member.
    """
    takes = list(columns)
    absent = [number for number in range(layout.columns) if number not in takes]
    for index, able in enumerate(reduces):
        if absent and able and takes[index] < 0:
            takes[index] = absent.pop(0)
    order = sorted(range(len(takes)), key=lambda i: (takes[i] < 0, takes[i]))
    cuts = edges(layout.columns, chunks)
    held = [takes[index] for index in order]
    if held[0] < 0:
        return None
    starts = [0, *(cuts[number] for number in held[1:] if number >= 0)]
    bounds = (*starts, *(chunks for _ in range(len(held) - len(starts) + 1)))
    spans = tuple((cuts[n], cuts[n + 1]) if n >= 0 else (0, 0) for n in held)
    return Seats(tuple(order), tuple(held), bounds, spans)
