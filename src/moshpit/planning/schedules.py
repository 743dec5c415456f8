"""Who sends which share of the vector to whom: the two schedules, phase by phase.

Groups, parts and slices are those of `moshpit.protocol`: the plan asks the code that will run.

*grid*: d rounds, one per axis; in each the whole vector is averaged over the group. A member
with part w of a group of M sends 1 - w of the vector to the other reducers and the mean of its
part to M - 1 members, and receives as much (paper.md §3); a client sends and receives the
vector once.

*torus*, on grids of two axes: the vector is cut into k equal slices, k the fewest reducers of a
row. In a row of m the holder of a slice sends 1 - 1/k and receives (m - 1)/k; it averages the
slice with the holders of the other rows, as a group of their own; then the row hands the slices
round. In all 2(1 - 1/N) of the vector (paper.md §4). Slices are the same in all rows, so they do
not follow the bandwidths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moshpit.config import TransportConfig
from moshpit.planning.swarm import PlannedPeer, PlannedSwarm
from moshpit.protocol.grid import Plan, arrange
from moshpit.protocol.partition import bounds, fractions
from moshpit.protocol.torus import Torus, edges, torus

SCHEDULES = ("grid", "torus")


@dataclass(frozen=True, slots=True)
class Share:
    """What one member moves in one phase, in vectors.

    Attributes:
        peer: whose.
        sent_values: contributions to others' parts.
        sent_means: results of its own part.
        got_values: others' contributions to its part.
        got_means: results of others' parts.
        part: of the vector, that it reduces or hands round.
    """

    peer: int
    sent_values: float = 0.0
    sent_means: float = 0.0
    got_values: float = 0.0
    got_means: float = 0.0
    part: float = 0.0


Group = tuple[Share, ...]


@dataclass(frozen=True, slots=True)
class Phase:
    """Groups that work at the same time, each for itself.

    Attributes:
        groups: the shares of each group's members.
        hops: how often data crosses the network one after the other: 1 or 2.
        meets: whether the groups have to assemble first.
    """

    groups: tuple[Group, ...]
    hops: int
    meets: bool


def chunks_of(numel: int, config: TransportConfig | None = None) -> int:
    """Return into how many chunks a vector is cut: parts are whole chunks.

    >>> chunks_of(16_000_000), chunks_of(1_000_000)
    (64, 16)
    """
    return max(1, -(-numel // (config or TransportConfig()).chunk_numel(numel)))


def group_shares(
    peers: Sequence[PlannedPeer],
    numbers: Sequence[int],
    chunks: int,
    whole: float = 1.0,
) -> Group:
    """Return what each member of one group all-reduce moves.

    Args:
        peers: the members; at least one of two or more reduces.
        numbers: their numbers in the swarm.
        chunks: into which the vector is cut.
        whole: how much of the vector this group averages.

    >>> fast, slow = PlannedPeer(1e9, 1e9), PlannedPeer(1e6, 1e6)
    >>> [share.part for share in group_shares([fast, slow, slow], range(3), 1024)]
    [1.0, 0.0, 0.0]
    """
    size = len(peers)
    parts = fractions([peer.bandwidth for peer in peers], [peer.reduces for peer in peers])
    assert parts is not None, "grid.arrange leaves no group without a reducer"
    cuts = bounds(parts, max(1, chunks))
    shares: list[Share] = []
    for number, (start, end) in zip(numbers, pairwise(cuts), strict=True):
        own = whole * (end - start) / cuts[-1]
        others = (size - 1) * own
        alone = size == 1
        rest = 0.0 if alone else whole - own
        shares.append(Share(number, rest, others, others, rest, own))
    return tuple(shares)


def phases(
    swarm: PlannedSwarm, schedule: str, group_size: int, chunks: int, epoch: int
) -> list[Phase]:
    """Return the phases of one averaging, with the groups that this epoch's order makes."""
    ids = swarm.ids()
    index: dict[bytes, int] = {peer: number for number, peer in enumerate(ids)}
    plan, ranked = arrange(ids, epoch, group_size, lambda peer: swarm.peers[index[peer]].reduces)
    members = [index[peer] for peer in ranked]
    if schedule == "torus":
        reduces = [swarm.peers[number].reduces for number in members]
        layout = torus(plan, reduces, chunks, "torus")
        if layout is not None:
            return _torus(swarm, plan, layout, members, chunks)
    return [
        Phase(
            tuple(
                _reduce(swarm, _of(plan, axis, path, members), chunks)
                for path in _paths(plan, axis)
            ),
            hops=2,
            meets=True,
        )
        for axis in range(plan.axes)
    ]


def _paths(plan: Plan, axis: int) -> list[tuple[int, ...]]:
    return list(dict.fromkeys(plan.path(rank, axis) for rank in range(plan.n)))


def _of(plan: Plan, axis: int, path: tuple[int, ...], members: Sequence[int]) -> list[int]:
    return [members[rank] for rank in plan.members(axis, path)]


def _reduce(swarm: PlannedSwarm, group: Sequence[int], chunks: int, whole: float = 1.0) -> Group:
    return group_shares([swarm.peers[number] for number in group], group, chunks, whole)


def _torus(
    swarm: PlannedSwarm, plan: Plan, layout: Torus, members: Sequence[int], chunks: int
) -> list[Phase]:
    rows = [[members[rank] for rank in row] for row in plan.rows]
    holders = [[members[rank] for rank in row] for row in layout.holders]
    cuts = edges(layout.columns, chunks)
    sizes = [(end - start) / chunks for start, end in pairwise(cuts)]
    scatter: list[Group] = []
    gather: list[Group] = []
    for row, held in zip(rows, holders, strict=True):
        own = dict(zip(held, sizes, strict=True))
        forth: list[Share] = []
        back: list[Share] = []
        for number in row:
            part = own.get(number, 0.0)
            rest, others = 1.0 - part, (len(row) - 1) * part
            forth.append(Share(number, sent_values=rest, got_values=others, part=part))
            back.append(Share(number, sent_means=others, got_means=rest, part=part))
        scatter.append(tuple(forth))
        gather.append(tuple(back))
    columns = tuple(
        _reduce(swarm, [held[number] for held in holders], chunks // layout.columns, size)
        for number, size in enumerate(sizes)
    )
    return [
        Phase(tuple(scatter), hops=1, meets=True),
        Phase(columns, hops=2, meets=True),
        Phase(tuple(gather), hops=1, meets=False),
    ]
