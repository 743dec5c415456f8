"""Averaging without a network: one number per peer, rounds, and deaths, in whole-array steps.

For questions about a schedule itself: is it exact, and how fast do the peers' values approach
each other when some miss rounds? A round costs some array operations, so thousands of peers and
hundreds of runs take seconds. Messages, time and the all-reduce's own faults are not in it;
they are in `moshpit.sim.world`.

- Failures are those of paper §4.1: in each round every peer is dead with some probability, and
  back in the next one. It keeps its value; what the others of its group do is the `Failure` model.
- A `Method` makes rounds. `GridRounds` is Moshpit's: the groups are those of `protocol.grid`,
  the masses are kept as the protocol keeps them (docs/internals/protocol.md "Grid"). `RandomGroups`
  is the paper's random split. What they are compared with is in `moshpit.sim.rivals`.
- The spread is the variance over all peers, the dead ones too, around their present mean.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
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
Dice = np.random.Generator | np.random.RandomState

ID_BYTES = 32


class Failure(Enum):
    """What a group does when one of its members misses the round (paper.md §5)."""

    ALIVE = "alive"
    """The others average."""
    GROUP = "group"
    """Nobody of the group does."""


class Method(Protocol):
    """A way to average: makes one round after another."""

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Return the values after the next round.

        Args:
            values: (n,), by peer.
            alive: (n,), who takes part; the others keep their values.
        """
        ...


def attending(groups: Ints, alive: Bools, failure: Failure) -> Bools:
    """Return who averages, of those that live.

    Args:
        groups: (n,), the number of each peer's group, not negative.
        alive: (n,).
        failure: what the others of a dead peer's group do.
    """
    if failure is Failure.ALIVE:
        return alive
    return np.bincount(groups, ~alive)[groups] == 0


def group_means(
    values: Floats,
    masses: Floats,
    groups: Ints,
    alive: Bools,
    origins: Ints,
    *,
    counted: Bools | None = None,
) -> tuple[Floats, Floats]:
    """Return everybody's value and mass after the living of each group have averaged.

    Members that bring the same value, since one group made it, count once: each weighs
    ``mass / s``, where s is how many of them are in its new group.

    Args:
        values, masses: (n,), by peer; with mass 0 a value is not looked at.
        groups: (n,), the number of each peer's group, not negative.
        alive: (n,), who takes part.
        origins: (n,), the number of the group that made the value; -1 where none did.
        counted: (n,), who is in its new group: also those that die as it has formed, whose share
            is then lost. Nothing: the living.
    """
    giving = alive & (masses > 0)
    shares = np.ones_like(values)
    kin = (giving if counted is None else counted & (masses > 0)) & (origins >= 0)
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
        failure: what the others of a dead peer's group do.

    Attributes:
        ids: (n, 32), the bytes of the peers' ids.
        masses: (n,), the mass behind each peer's present value.
    """

    def __init__(
        self,
        n: int,
        group_size: int,
        rng: np.random.Generator,
        weights: Floats | None = None,
        *,
        failure: Failure = Failure.ALIVE,
    ) -> None:
        self.ids = np.frombuffer(rng.bytes(ID_BYTES * n), np.uint8).reshape(n, ID_BYTES)
        self._sorted = _order(self.ids)
        self._failure = failure
        self._weights = np.ones(n) if weights is None else weights
        self.masses = self._weights.copy()
        self._plan = grid.plan(n, group_size)
        self._groups = [_numbers(n, group_size, axis) for axis in range(self._plan.axes)]
        self._epoch = self._axis = 0

    @property
    def peers(self) -> list[PeerId]:
        """The peers' ids, as the protocol has them."""
        return [PeerId(row.tobytes()) for row in self.ids]

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
        there = attending(groups, alive, self._failure)
        values, self.masses = group_means(values, self.masses, groups, there, self._origins)
        self._origins = np.where(there, groups + self._first[self._axis], self._origins)
        self._axis += 1
        if self._axis == self.axes:
            self._axis = 0
            self._epoch += 1
        return values

    def _begin(self) -> None:
        # As `grid.order`: by the ids from a byte on that moves; the sort is stable.
        start = self._epoch * 5 % ID_BYTES
        ranked = self._sorted[_order(self.ids[self._sorted, start:])]
        self._rank = np.empty_like(ranked)
        self._rank[ranked] = np.arange(len(ranked))
        self.masses = self._weights.copy()
        self._origins = np.full(len(ranked), -1)
        counts = [int(groups.max()) + 1 for groups in self._groups]
        self._first = np.cumsum([0, *counts])


def _order(rows: NDArray[np.uint8]) -> Ints:
    """Return the order of rows of bytes, as bytes are compared; equal ones stay as they were."""
    padded = np.zeros((len(rows), ID_BYTES), np.uint8)
    padded[:, : rows.shape[1]] = rows
    return np.lexsort(padded.view(">u8").T[::-1])


@lru_cache(maxsize=64)
def _numbers(n: int, group_size: int, axis: int) -> Ints:
    """Return the number of each rank's group on an axis of the plan."""
    plan = grid.plan(n, group_size)
    paths = [plan.path(rank, axis) for rank in range(n)]
    number = {path: index for index, path in enumerate(dict.fromkeys(paths))}
    return np.array([number[path] for path in paths])


@final
class RandomGroups:
    """The paper's random split: peers are shuffled into groups of near-equal sizes.

    Args:
        group_size: M; the shuffled peers make floor(peers / M) groups, at least one, and those that
            are left over go to the first groups, one to each.
        groups: that many groups instead, of near-equal sizes.
        rng: shuffles.
        failure: where only the living average, only they are shuffled; where a dead peer
            stops its group, all are.
    """

    def __init__(
        self,
        group_size: int,
        rng: Dice,
        *,
        groups: int | None = None,
        failure: Failure = Failure.ALIVE,
    ) -> None:
        self._group_size = group_size
        self._count = groups
        self._rng = rng
        self._failure = failure

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `Method`."""
        dealt = alive if self._failure is Failure.ALIVE else np.ones_like(alive)
        shuffled = self._rng.permutation(np.flatnonzero(dealt))
        places = np.arange(len(shuffled))
        count = self._count or max(1, len(shuffled) // self._group_size)
        full = 0 if self._count else count * self._group_size
        groups = np.zeros(len(values), np.int64)
        groups[shuffled] = np.where(places < full, places // self._group_size, places % count)
        there = alive if self._failure is Failure.ALIVE else attending(groups, alive, self._failure)
        return plain_means(values, groups, there)


def plain_means(values: Floats, groups: Ints, there: Bools) -> Floats:
    """Return everybody's value after each group has averaged those of it that are there.

    Args:
        values: (n,), by peer.
        groups: (n,), the number of each peer's group, not negative.
        there: (n,), who takes part; the others keep their values.
    """
    counts = np.bincount(groups, there)
    sums = np.bincount(groups, np.where(there, values, 0.0))
    means = np.divide(sums, counts, out=np.zeros_like(sums), where=counts > 0)
    return np.where(there, means[groups], values)


@dataclass(frozen=True, slots=True)
class Spreads:
    """How far apart the values were, over many runs.

    Attributes:
        each: (runs, rounds + 1), the spread before the first round and after each.
    """

    each: Floats

    @property
    def mean(self) -> Floats:
        """(rounds + 1,), the mean over the runs."""
        return self.each.mean(0)

    @property
    def error(self) -> Floats:
        """(rounds + 1,), the standard error of that mean."""
        return self.each.std(0, ddof=1) / np.sqrt(len(self.each))

    def rounds_until(self, threshold: float) -> Ints:
        """Return, (runs,), after how many rounds the spread was first below a threshold.

        A run that never was counts with all its rounds, as in the paper's experiment.
        """
        below = self.each < threshold
        below[:, -1] = True
        first: Ints = below.argmax(1)
        return first


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
        spreads[run] = run_once(method, world, n=n, death=death, rounds=rounds)
    return Spreads(spreads)


def run_once(method: Method, world: Dice, *, n: int, death: float, rounds: int) -> Floats:
    """Return, (rounds + 1,), the spreads of one run, before the first round and after each.

    Args:
        method: a new one.
        world: draws the values first, then who lives in each round.
        n, death, rounds: as of `measure`.
    """
    spreads = np.empty(rounds + 1)
    values = world.standard_normal(n)
    spreads[0] = values.var()
    for number in range(1, rounds + 1):
        values = method.round(values, world.random(n) >= death)
        spreads[number] = values.var()
    return spreads
