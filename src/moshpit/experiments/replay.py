"""What every peer of a simulated swarm must hold after every round, by arithmetic alone.

Given are the plan of the grid, who was in a group that has formed, and whose values came into each
mean: all else follows. A mean is that of these values, weighted by their masses. Members that
bring the mean of one and the same group share its mass, so the share of one that dies after
its group has formed is lost. Nothing here comes from the protocol's code
but the plan.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from moshpit.experiments.crashing import Case, Observed
from moshpit.protocol import grid
from moshpit.sim.averaging import Bools, Floats, Ints, group_means
from moshpit.types import PeerId


def furthest_apart(case: Case, world: Observed) -> float:
    """Return by how much a value of a peer differs from the arithmetic's, at most, over all rounds.

    Args:
        case: what was simulated.
        world: after its run.
    """
    furthest = 0.0
    values = {peer: np.array(numbers) for peer, numbers in world.first.items()}
    for epoch in range(case.epochs):
        peers = grid.order(sorted(world.after[epoch, 0]), epoch)
        held = np.stack([values[peer] for peer in peers])
        for axis, means in enumerate(_epoch(case, world, (epoch, peers), held)):
            values = dict(zip(peers, means, strict=True))
            for peer, numbers in world.after[epoch, axis].items():
                if world.last.get(peer) != (epoch, axis):
                    off = np.abs(values[peer] - np.array(numbers))
                    furthest = max(furthest, float(off.max()))
    return furthest


def _epoch(
    case: Case, world: Observed, who: tuple[int, list[PeerId]], held: Floats
) -> list[Floats]:
    """Return, for each axis, everybody's values after its round; those of the dead mean nothing.

    Args:
        who: the epoch, and its peers by rank.
        held: (peers, values), before the first round.
    """
    (epoch, peers), after = who, list[Floats]()
    plan = grid.plan(len(peers), case.group_size)
    masses, made = np.ones_like(held), 0
    origins = np.full(len(peers), -1)
    for axis in range(plan.axes):
        groups = _groups(plan, axis)
        met = _those(peers, world.met[epoch, axis])
        columns = [
            group_means(one, mass, groups, _those(peers, givers), origins, counted=met)
            for one, mass, givers in zip(held.T, masses.T, world.gave[epoch, axis], strict=True)
        ]
        held = np.stack([means for means, _ in columns], 1)
        masses = np.stack([mass for _, mass in columns], 1)
        origins = np.where(_those(peers, world.after[epoch, axis]), groups + made, origins)
        made += int(groups.max()) + 1
        after.append(held)
    return after


def _groups(plan: grid.Plan, axis: int) -> Ints:
    paths = [plan.path(rank, axis) for rank in range(plan.n)]
    number = {path: index for index, path in enumerate(dict.fromkeys(paths))}
    return np.array([number[path] for path in paths])


def _those(peers: list[PeerId], among: Mapping[PeerId, object]) -> Bools:
    return np.array([peer in among for peer in peers])
