"""What Moshpit's averaging is compared with in paper §4.1, as methods of `moshpit.sim.averaging`.

One number per peer, whole-array steps, no network. Where a round is no group of its own but a
weighted mean over a few neighbours (`Gossip`, `ReleasedSGP`), a peer's group is itself and them.
"""

from __future__ import annotations

from typing import final

import numpy as np

from moshpit.errors import ConfigError
from moshpit.sim.averaging import Bools, Dice, Failure, Floats, Ints, attending, plain_means


@final
class AllReduce:
    """One group of everybody: the mean if all live; else nothing, under either failure model."""

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `moshpit.sim.averaging.Method`."""
        return np.full_like(values, values.mean()) if alive.all() else values


@final
class Gossip:
    """A ring: everybody takes the mean of itself and both neighbours, of those that live.

    Args:
        failure: with ``GROUP``, who has a dead neighbour keeps its value.
    """

    def __init__(self, failure: Failure = Failure.ALIVE) -> None:
        self._failure = failure

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `moshpit.sim.averaging.Method`."""
        given, count = np.where(alive, values, 0.0), alive.astype(float)
        sums = given + np.roll(given, 1) + np.roll(given, -1)
        counts = count + np.roll(count, 1) + np.roll(count, -1)
        there = alive if self._failure is Failure.ALIVE else alive & (counts == 3)
        return np.divide(sums, counts, out=values.copy(), where=there)


@final
class ReleasedSGP:
    """Stochastic gradient push as the experiment of the paper has it: means of three peers.

    In round t = 1, 2, ... peer i takes the mean of itself, i + 2^h and i + 2^(h+1), of those that
    live, with h = t mod floor(log2(n - 1)). Rows of the weights sum to 1, columns need not: the
    mean moves. `PushSum` is the true algorithm.

    The released program makes its weights by rolling a flattened matrix, so that what wraps
    around the ring comes to the next peer: for a hop s, peer i > n - s takes from i - 1 + s - n,
    peer n - s from nobody, peer 0 from s and from s - 1. Its numbers are with that, so ours are.

    Args:
        n: peers, at least 3.
        failure: with ``GROUP``, who would take from a dead peer keeps its value.

    Raises:
        ConfigError: fewer than 3 peers have no two neighbours.
    """

    def __init__(self, n: int, failure: Failure = Failure.ALIVE) -> None:
        if n < 3:
            raise ConfigError(f"released SGP: {n} peers, needs at least 3")
        self._failure = failure
        self._hops = (n - 1).bit_length() - 1  # floor(log2(n - 1))
        self._round = 0

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `moshpit.sim.averaging.Method`."""
        self._round += 1
        h = self._round % self._hops
        given = np.where(alive, values, 0.0)
        sums, counts, wanted = given, alive.astype(float), np.ones(len(values))
        for hop in (2**h, 2 ** (h + 1)):
            sums = sums + _from_ahead(given, hop)
            counts = counts + _from_ahead(alive.astype(float), hop)
            wanted = wanted + _from_ahead(np.ones(len(values)), hop)
        there = alive if self._failure is Failure.ALIVE else alive & (counts == wanted)
        return np.divide(sums, counts, out=values.copy(), where=there)


def _from_ahead(given: Floats, hop: int) -> Floats:
    """Return what each peer takes from the one that many places ahead, as released."""
    ahead = np.roll(given, -hop)
    seam = len(given) - hop
    taken = np.zeros_like(given)
    taken[:seam] = ahead[:seam]
    taken[seam + 1 :] = ahead[seam:-1]
    taken[0] += ahead[-1]
    return taken


@final
class PushSum:
    """Stochastic gradient push (Assran 2019) without gradients: push-sum on the exponential graph.

    Peer i holds x_i and a weight w_i = 1; its value is x_i / w_i. In round t it keeps half of both
    and sends half to (i + 2^(t mod (floor(log2(n - 1)) + 1))) mod n. To and from a dead peer
    nothing is sent, so that the sums of x and w stay what they were; a sender and its receiver
    are a group, and both failure models are the same.

    Attributes:
        weights: (n,), w; empty before the first round.
    """

    def __init__(self) -> None:
        self._round = 0
        self.weights: Floats = np.empty(0)

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `moshpit.sim.averaging.Method`."""
        n = len(values)
        if not self._round:
            self.weights = np.ones(n)
        hop = 2 ** (self._round % max(1, (n - 1).bit_length()))
        self._round += 1
        share = np.where(alive & np.roll(alive, -hop), 0.5, 0.0)
        x, w = values * self.weights, self.weights
        self.weights = w - share * w + np.roll(share * w, hop)
        return (x - share * x + np.roll(share * x, hop)) / self.weights


@final
class PaperGrid:
    """Moshpit as the paper's experiments have it: a fixed grid of M^d cells, some of them empty.

    The peers are placed at random, once; round t averages along axis t mod d.

    Args:
        n: peers, at most M^d.
        group_size: M, the cells of a row.
        dims: d.
        rng: places.
        failure: what the others of a dead peer's row do.

    Raises:
        ConfigError: the grid has no room for n peers.
    """

    def __init__(
        self,
        n: int,
        group_size: int,
        dims: int,
        rng: Dice,
        *,
        failure: Failure = Failure.ALIVE,
    ) -> None:
        if dims < 1 or group_size < 1 or group_size**dims < n:
            raise ConfigError(
                f"{n} peers on a grid of {group_size} cells a row and {dims} axes: no room"
            )
        cells = rng.choice(group_size**dims, n, replace=False)
        self._failure = failure
        self._groups = [_rows(cells, group_size, axis) for axis in range(dims)]
        self._round = 0

    def round(self, values: Floats, alive: Bools) -> Floats:
        """Make the next round; see `moshpit.sim.averaging.Method`."""
        groups = self._groups[self._round % len(self._groups)]
        self._round += 1
        return plain_means(values, groups, attending(groups, alive, self._failure))


def _rows(cells: Ints, group_size: int, axis: int) -> Ints:
    """Return the number of each cell's row along an axis: its coordinates but that one."""
    low = group_size**axis
    return np.unique(cells // (low * group_size) * low + cells % low, return_inverse=True)[1]
