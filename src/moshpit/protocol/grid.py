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
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from operator import itemgetter

from moshpit.errors import ConfigError
from moshpit.types import PeerId

GROUP_SIZE_MAX = 64  # seats fit the 64-bit mask of a chunk header

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

    __slots__ = (
        "_groups", "_keystones", "_paths", "_shapes", "_slots", "_sorted", "axes", "group_size",
        "largest", "n",
    )  # fmt: skip

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
        self._keystones: tuple[int, ...] | None = None
        self._shapes: dict[tuple[tuple[int, ...], int], tuple[int, int]] = {}
        self._place([(rank,) for rank in range(n)], (), 0)
        self._shapes.clear()
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

    @property
    def rows(self) -> tuple[tuple[int, ...], ...]:
        """The groups of the first axis: ranks by slot."""
        return tuple(self._groups[0][path] for path in self._sorted[0])

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

    @property
    def keystones(self) -> tuple[int, ...]:
        """Ranks of which every group of every axis holds at least one, as few as are found.

        Where peers that can reduce sit at these ranks, no group is without one.
        """
        if self._keystones is None:
            self._keystones = self._find_keystones()
        return self._keystones

    def _find_keystones(self) -> tuple[int, ...]:
        lacking = {
            (axis, path): None for axis, groups in enumerate(self._groups) for path in groups
        }
        found: list[int] = []
        axes = range(self.axes)
        gains = [self.axes] * self.n
        while lacking:
            # The best rank covers as many more groups as any; the first such is taken.
            best, gain = 0, 0
            for rank, bound in enumerate(gains):
                if bound > gain:
                    gains[rank] = sum(
                        (a, self._paths[a][rank]) in lacking for a in range(self.axes)
                    )
                    if gains[rank] > gain:
                        best, gain = rank, gains[rank]
                        if gain == self.axes:
                            break
            found.append(best)
            for axis in axes:
                lacking.pop((axis, self._paths[axis][best]), None)
        return tuple(found)

    def _place(self, block: list[_Family], prefix: Path, axis: int) -> None:
        """Plan a block of families from this axis on."""
        left = self.axes - axis
        sizes = tuple(len(family) for family in block)
        edges = _cut(sizes, self._shape(sizes, left)[1]) if left > 1 else [0, len(block)]
        rows = [
            [rank for family in block[start:end] for rank in family]
            for start, end in pairwise(edges)
        ]
        for number, ranks in enumerate(rows):
            path = (*prefix, number)
            self._groups[axis][path] = tuple(ranks)
            for slot, rank in enumerate(ranks):
                self._paths[axis][rank] = path
                self._slots[axis][rank] = slot
        if left == 1:
            return
        seats = _columns(tuple(len(ranks) for ranks in rows))
        for number, column in enumerate(seats):
            families = [
                tuple(ranks[slot] for slot in slots)
                for ranks, slots in zip(rows, column, strict=True)
            ]
            self._place(families, (*prefix, number), axis + 1)

    def _shape(self, sizes: tuple[int, ...], left: int) -> tuple[int, int]:
        """Return the largest group to come of a block, and into how many rows to cut it.

        The rows of the rule come first; where they lead to groups beyond M, rows one shorter,
        one and two longer are tried too, and the best is taken.

        Args:
            sizes: of the block's families; all that matters of it.
            left: the axes left, this one included.
        """
        n = sum(sizes)
        if left == 1:
            return n, 1
        known = self._shapes.get((sizes, left))
        if known is not None:
            return known
        root = _root(n, left)
        best = (n + 1, 1)
        for longest in (root, root - 1, root + 1, root + 2):
            count = min(-(-n // max(1, longest)), len(sizes))
            rows = tuple(sum(sizes[start:end]) for start, end in pairwise(_cut(sizes, count)))
            columns = {tuple(len(slots) for slots in column): None for column in _columns(rows)}
            largest = max(*rows, *(self._shape(column, left - 1)[0] for column in columns))
            if largest < best[0]:
                best = (largest, count)
            if best[0] <= self.group_size:
                break
        self._shapes[sizes, left] = best
        return best


def _root(n: int, degree: int) -> int:
    """Return ceil(n^(1/degree)), exactly."""
    root = max(1, round(n ** (1 / degree)))
    while root**degree < n:
        root += 1
    while root > 1 and (root - 1) ** degree >= n:
        root -= 1
    return root


def _cut(sizes: Sequence[int], count: int) -> list[int]:
    """Cut families into ``count`` rows of near-equal size; return the ``count`` + 1 edges.

    An edge lies at the boundary between families nearest to the ideal one; no row is empty.
    """
    n = sum(sizes)
    edges = [0]
    filled = 0
    for index, size in enumerate(sizes):
        row = len(edges)
        boundary = -(-row * n // count)
        late = 2 * filled + size > 2 * boundary or len(sizes) - index <= count - row
        if row < count and index > edges[-1] and late:
            edges.append(index)
        filled += size
    return [*edges, len(sizes)]


def _columns(rows: Sequence[int]) -> list[list[list[int]]]:
    """Deal the slots of rows out to columns: for each column and row, the row's slots there.

    Each column gets a slot from every row; surplus slots are spread.
    """
    count = min(rows)
    columns: list[list[list[int]]] = [[[slot] for _ in rows] for slot in range(count)]
    surplus = 0
    for row, size in enumerate(rows):
        for slot in range(count, size):
            columns[surplus % count][row].append(slot)
            surplus += 1
    return columns


@lru_cache(maxsize=256)
def plan(n: int, group_size: int) -> Plan:
    """Return the plan for n peers in groups of about ``group_size``; cached.

    Raises:
        ConfigError: n < 1 or group_size < 2.
    """
    return Plan(n, group_size)


def arrange(
    peers: Sequence[PeerId], epoch: int, group_size: int, reduces: Callable[[bytes], bool]
) -> tuple[Plan, list[PeerId]]:
    """Return the plan for these peers, and who has which rank, so that groups can reduce.

    Peers that reduce nothing (clients) cannot be a group by themselves. Those that do take the
    plan's keystones. Where they are too few for that, groups are larger, up to
    `GROUP_SIZE_MAX`: a few peers with an address then reduce for many without.

    Args:
        peers: not empty.
        epoch: moves the order, see `order`.
        group_size: M, the size that groups should have.
        reduces: whether a peer can be dialled and so reduce.
    """
    ranked = order(peers, epoch)
    chosen = plan(len(ranked), group_size)
    reducers = list(filter(reduces, ranked))
    if not reducers or len(reducers) == len(ranked):
        return chosen, ranked
    while len(chosen.keystones) > len(reducers) and chosen.group_size < GROUP_SIZE_MAX:
        chosen = plan(len(ranked), min(2 * chosen.group_size, GROUP_SIZE_MAX))
    at = dict(zip(chosen.keystones, reducers, strict=False))
    placed = frozenset(at.values())
    others = iter([peer for peer in ranked if peer not in placed])
    return chosen, [at[rank] if rank in at else next(others) for rank in range(len(ranked))]


def order(peers: Sequence[PeerId], epoch: int) -> list[PeerId]:
    """Return the peers in the order of their ranks in this epoch.

    They are sorted by their ids, read from a byte that moves with the epoch: other
    neighbours in every epoch (32 orders), and a peer more or less moves nobody past another.

    >>> order([PeerId(bytes([1, 2])), PeerId(bytes([2, 1]))], 1)
    [b'\\x02\\x01', b'\\x01\\x02']
    """
    return list(_ordered(tuple(peers), epoch))


@lru_cache(maxsize=8)  # a peer seeks its group and hosts another; simulated peers see the same
def _ordered(peers: tuple[PeerId, ...], epoch: int) -> list[PeerId]:
    if not peers:
        return []
    start = epoch * 5 % len(peers[0])  # 5 is prime to 32: all starts occur, neighbours far apart
    # The sort is stable: peers that agree from there on stay in the order of their first bytes.
    return sorted(sorted(peers), key=itemgetter(slice(start, None)))
