"""Averaging without a network: one number per peer, rounds, and deaths, in whole-array steps.

For questions about a schedule itself: is it exact, and how fast do the peers' values approach
each other when some miss rounds? A round costs some array operations, so thousands of peers and
hundreds of runs take seconds. Messages, time and the all-reduce's own faults are not in it;
they are in `moshpit.sim.world`.

- Failures are those of paper §4.1, "alive only": in each round every peer is dead with some
  probability, and back in the next one. The others of its group average; it keeps its value.
- A `Method` makes rounds. `GridRounds` is Moshpit's: the groups are those of `protocol.grid`,
  the masses are kept as the protocol keeps them (docs/internals/protocol.md "Grid"). `RandomGroups`
  is the paper's random split.
- The spread is the variance over all peers, the dead ones too, around their present mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, final

import numpy as np
from numpy.typing import NDArray

from moshpit.errors import ConfigError
from moshpit.protocol import grid
from moshpit.types import PeerId

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

ID_BYTES = 32


class Method(Protocol):
    """A way to average: makes one round after another."""

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Return the values after the next round.

        Args:
            values: (n,), by peer.
            alive: (n,), who takes part; the others keep their values.
        """
        ...


def group_means(
    values: Floats, masses: Floats, groups: Ints, alive: Bools, origins: Ints
) -> tuple[Floats, Floats]:
    """Return everybody's value and mass after the living of each group have averaged.

    Members that bring the same value, since one group made it, count once: each weighs
    ``mass / s``, where s is how many of them are in its new group.

    Args:
        values, masses: (n,), by peer; with mass 0 a value is not looked at.
        groups: (n,), the number of each peer's group, not negative.
        alive: (n,), who takes part.
        origins: (n,), the number of the group that made the value; -1 where none did.
    """
    giving = alive & (masses > 0)
    shares = np.ones_like(values)
    kin = giving & (origins >= 0)
    pairs = groups[kin] * (origins.max(initial=0) + 1) + origins[kin]
    _, which, counts = np.unique(pairs, return_inverse=True, return_counts=True)
    shares[kin] = counts[which]
    weights = np.where(giving, masses / shares, 0.0)
    totals = np.bincount(groups, weights)
    # Weights first: a value may be large where its share of the total is small.
    parts = np.divide(weights, totals[groups], out=np.zeros_like(values), where=giving)
    means = np.bincount(groups, parts * np.where(giving, values, 0.0))
    taking = alive & (totals[groups] > 0)
    return (
        np.where(taking, means[groups], values),
        np.where(taking, totals[groups], np.where(alive, masses / shares, masses)),
    )


@final
class GridRounds:
    """Moshpit's schedule: one epoch's averaging, of ``axes`` rounds, after another.

    Every epoch begins with the peers' own weights and in another order of the peers. The plan is
    made for all peers: nobody knows beforehand who will miss a round. Who has missed one
    goes where the plan wanted it, with the value, mass and origin that it had.

    Args:
        n: peers.
        group_size: M.
        rng: makes their ids, which decide on the order.
        weights: (n,), the mass of each peer's own value; nothing: 1 each.

    Attributes:
        peers: the ids.
        masses: (n,), the mass behind each peer's present value.
    """

    def __init__(
        self,
        n: int,
        group_size: int,
        rng: np.random.Generator,
        weights: Floats | None = None,
    ) -> None:
        ids = rng.bytes(ID_BYTES * n)
        self.peers = [PeerId(ids[at : at + ID_BYTES]) for at in range(0, len(ids), ID_BYTES)]
        self._at = {peer: index for index, peer in enumerate(self.peers)}
        self._weights = np.ones(n) if weights is None else weights
        self.masses = self._weights.copy()
        self._plan = grid.plan(n, group_size)
        self._groups = [_numbers(n, group_size, axis) for axis in range(self._plan.axes)]
        self._epoch = self._axis = 0

    @property
    def axes(self) -> int:
        """The rounds of an epoch."""
        return self._plan.axes

    @property
    def rows(self) -> int:
        """The groups of an epoch's first round."""
        return int(self._groups[0].max()) + 1

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `Method`."""
        if self._axis == 0:
            self._begin()
        groups = self._groups[self._axis][self._rank]
        values, self.masses = group_means(values, self.masses, groups, alive, self._origins)
        self._origins = np.where(alive, groups + self._first[self._axis], self._origins)
        self._axis += 1
        if self._axis == self.axes:
            self._axis = 0
            self._epoch += 1
        return values

    def _begin(self) -> None:
        ranked = grid.order(self.peers, self._epoch)
        self._rank = np.empty(len(ranked), np.int64)
        self._rank[[self._at[peer] for peer in ranked]] = np.arange(len(ranked))
        self.masses = self._weights.copy()
        self._origins = np.full(len(ranked), -1)
        counts = [int(groups.max()) + 1 for groups in self._groups]
        self._first = np.cumsum([0, *counts])


@lru_cache(maxsize=64)
def _numbers(n: int, group_size: int, axis: int) -> Ints:
    """Return the number of each rank's group on an axis of the plan."""
    plan = grid.plan(n, group_size)
    paths = [plan.path(rank, axis) for rank in range(n)]
    number = {path: index for index, path in enumerate(dict.fromkeys(paths))}
    return np.array([number[path] for path in paths])


@final
class RandomGroups:
    """The paper's random split: the living are shuffled into groups of near-equal sizes.

    Args:
        group_size: M; the living are dealt out to floor(living / M) groups, at least one.
        groups: that many groups instead.
        rng: shuffles.
    """

    def __init__(
        self, group_size: int, rng: np.random.Generator, *, groups: int | None = None
    ) -> None:
        self._group_size = group_size
        self._count = groups
        self._rng = rng

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `Method`."""
        living = self._rng.permutation(np.flatnonzero(alive))
        count = self._count or max(1, len(living) // self._group_size)
        groups = np.zeros(len(values), np.int64)
        groups[living] = np.arange(len(living)) % count
        ones = np.ones_like(values)
        return group_means(values, ones, groups, alive, np.full(len(values), -1))[0]


@dataclass(frozen=True, slots=True)
class Spreads:
    """How far apart the values were, over many runs.

    Attributes:
        mean: (rounds + 1,), the mean spread before the first round and after each.
        error: (rounds + 1,), the standard error of that mean.
    """

    mean: Floats
    error: Floats


def measure(
    make: Callable[[np.random.Generator], Method],
    *,
    n: int,
    death: float,
    rounds: int,
    runs: int,
    seed: int,
) -> Spreads:
    """Run a method on values from N(0, 1), again and again (paper §4.1).

    Args:
        make: a method for one run.
        n: peers.
        death: the probability that a peer misses a round.
        rounds: of each run.
        runs: at least 2.
        seed: of everything; the same seed gives every method the same values and deaths.

    Raises:
        ConfigError: arguments that make no experiment.

    Example:
        >>> spreads = measure(
        ...     lambda rng: RandomGroups(8, rng), n=64, death=0.0, rounds=2, runs=50, seed=1
        ... )
        >>> bool(spreads.mean[2] < spreads.mean[1] < spreads.mean[0])
        True
    """
    if n < 1 or not 0 <= death < 1 or rounds < 1 or runs < 2:
        raise ConfigError(
            f"{runs} runs of {rounds} rounds of {n} peers with deaths {death}: needs at least "
            "2, 1 and 1, and a probability below 1"
        )
    spreads = np.empty((runs, rounds + 1))
    for run in range(runs):
        world = np.random.default_rng((seed, run, 0))
        method = make(np.random.default_rng((seed, run, 1)))
        values = world.standard_normal(n)
        spreads[run, 0] = values.var()
        for number in range(rounds):
            values = method.round(values, world.random(n) >= death)
            spreads[run, number + 1] = values.var()
    return Spreads(spreads.mean(0), spreads.std(0, ddof=1) / np.sqrt(runs))
