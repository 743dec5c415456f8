"""The grid: who meets whom on each axis, so that d rounds give the exact global mean.

Rules (docs/internals/protocol.md "Grid", paper.md §1 "Exact for any N"):

- n peers, ranks 0..n-1. On an axis the ranks of one block are cut into rows of consecutive
  ranks; a row is a group. A member's slot in its row decides its column; a column is a block
  of its own on the next axis. On the last axis a whole block meets.
- Every column holds at least one member of every row (columns ≤ the smallest row), so a
  column knows all that its block knew. Slots beyond the smallest row are spread.
- Members of one row that share a column hold the same value. They count once: each weighs
  the row's mass divided by how many of them are in its *new group*. So they must meet in the
  same row again, and rows are cut between such families, never inside one.

Hence, by induction, every column's total is its block's total, and after the last axis
everybody holds the weighted global mean, for every n and every weights.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import lru_cache

from moshpit.errors import ConfigError
from moshpit.types import PeerId

Path = tuple[int, ...]
_Family = tuple[int, ...]
"""Ranks of one block that hold the same value; they stay in one row."""


class Plan:
    """Where each rank of a swarm of n peers sits on each axis.

    On axis t a group is named by its path (column_0, ..., column_{t-1}, row).

    Attributes:
        n: how many peers are planned for.
        group_size: M, the size that groups should have.
        axes: d, the smallest with n ≤ M^d (1 for a single peer).
        largest: the members of the largest group. With one axis it is n, at most M. With
            two it is at most M + 1: with m = ceil(√n) ≤ M and r = ceil(n/m) ≤ m rows no row
            exceeds m, and no column ceil(n / floor(n/r)) ≤ m + 1. With three or more it was
            enumerated, not proved; see the tests.

    Example:
        >>> p = plan(5, 4)
        >>> p.axes, [p.path(rank, 0) for rank in range(5)], [p.path(rank, 1) for rank in range(5)]
        (2, [(0,), (0,), (0,), (1,), (1,)], [(0, 0), (1, 0), (0, 0), (0, 0), (1, 0)])
    """

    __slots__ = ("_groups", "_paths", "_slots", "_sorted", "axes", "group_size", "largest", "n")

    def __init__(self, n: int, group_size: int) -> None:
        if n < 1 or group_size < 2:
            raise ConfigError(
                f"a grid of {n} peers in groups of {group_size}: needs at least 1 and 2"
            )
        self.n = n
        self.group_size = group_size
        self.axes = 1
        while group_size**self.axes < n:
            self.axes += 1
        self._paths: list[list[Path]] = [[()] * n for _ in range(self.axes)]
        self._slots: list[list[int]] = [[0] * n for _ in range(self.axes)]
        self._groups: list[dict[Path, tuple[int, ...]]] = [{} for _ in range(self.axes)]
        self._place([(rank,) for rank in range(n)], (), 0)
        self._sorted = [sorted(groups) for groups in self._groups]
        self.largest = max(len(ranks) for groups in self._groups for ranks in groups.values())

    def path(self, rank: int, axis: int) -> Path:
        """Return the path of the group that this rank is in on this axis."""
        return self._paths[axis][rank]

    def slot(self, rank: int, axis: int) -> int:
        """Return the rank's place in its group on this axis."""
        return self._slots[axis][rank]

    def members(self, axis: int, path: Path) -> tuple[int, ...]:
        """Return the ranks of a group by slot; empty where the plan has no such group."""
        return self._groups[axis].get(path, ()) if 0 <= axis < self.axes else ()

    def next_path(self, axis: int, path: Path, slot: int) -> Path:
        """Return the path, on the next axis, of whoever sits in this slot; () after the last.

        A slot beyond the planned ones goes where one of the planned members goes, spread by
        slot and row, so that an unplanned member shares that member's value and the mean
        stays exact. A group that is not planned at all spreads its members over the axis.
        """
        if not 0 <= axis < self.axes - 1:
            return ()
        ranks = self._groups[axis].get(path, ())
        row = path[-1] if path else 0
        if ranks:
            at = slot if 0 <= slot < len(ranks) else (slot + row) % len(ranks)
            return self._paths[axis + 1][ranks[at]]
        following = self._sorted[axis + 1]
        start = bisect_left(following, path[:-1])
        return following[(start + slot) % len(following)]

    def _place(self, block: list[_Family], prefix: Path, axis: int) -> None:
        """Plan a block of families from this axis on."""
        rows = [block] if axis == self.axes - 1 else _cut(block, self.axes - axis)
        members = [[rank for family in row for rank in family] for row in rows]
        for number, ranks in enumerate(members):
            path = (*prefix, number)
            self._groups[axis][path] = tuple(ranks)
            for slot, rank in enumerate(ranks):
                self._paths[axis][rank] = path
                self._slots[axis][rank] = slot
        if axis < self.axes - 1:
            for column, families in enumerate(_columns(members)):
                self._place(families, (*prefix, column), axis + 1)


def _root(n: int, degree: int) -> int:
    """Return ceil(n^(1/degree)), exactly."""
    root = max(1, round(n ** (1 / degree)))
    while root**degree < n:
        root += 1
    while root > 1 and (root - 1) ** degree >= n:
        root -= 1
    return root


def _cut(block: list[_Family], axes_left: int) -> list[list[_Family]]:
    """Cut a block into rows of near-equal size, as few as keep rows ≤ ceil(n^(1/axes))."""
    n = sum(len(family) for family in block)
    count = min(-(-n // _root(n, axes_left)), len(block))
    rows: list[list[_Family]] = [[] for _ in range(count)]
    row = filled = 0
    for index, family in enumerate(block):
        # The next row starts where the ideal boundary lies nearer to this family's start
        # than to its end, and no later than leaves a family for each row to come.
        boundary = -(-(row + 1) * n // count)
        late = 2 * filled + len(family) > 2 * boundary or len(block) - index < count - row
        if rows[row] and row < count - 1 and late:
            row += 1
        rows[row].append(family)
        filled += len(family)
    return rows


def _columns(rows: list[list[int]]) -> list[list[_Family]]:
    """Deal the members of rows out to columns; each column gets a family from every row."""
    count = min(len(ranks) for ranks in rows)
    columns: list[list[list[int]]] = [[[] for _ in rows] for _ in range(count)]
    surplus = 0
    for number, ranks in enumerate(rows):
        for slot, rank in enumerate(ranks):
            column = slot
            if slot >= count:
                column = surplus % count
                surplus += 1
            columns[column][number].append(rank)
    return [[tuple(family) for family in column] for column in columns]


@lru_cache(maxsize=256)
def plan(n: int, group_size: int) -> Plan:
    """Return the plan for n peers in groups of about ``group_size``; cached.

    Raises:
        ConfigError: n < 1 or group_size < 2.
    """
    return Plan(n, group_size)


def order(peers: Sequence[PeerId], epoch: int) -> list[PeerId]:
    """Return the peers in the order of their ranks in this epoch.

    They are sorted by their ids, read from a byte that moves with the epoch: other
    neighbours in every epoch (32 orders), and a peer more or less moves nobody past another.

    >>> order([PeerId(bytes([1, 2])), PeerId(bytes([2, 1]))], 1)
    [b'\\x02\\x01', b'\\x01\\x02']
    """
    if not peers:
        return []
    start = epoch * 5 % len(peers[0])  # 5 is prime to 32: all starts occur, neighbours far apart
    return sorted(peers, key=lambda peer: peer[start:] + peer[:start])
