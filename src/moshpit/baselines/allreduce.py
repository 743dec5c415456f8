"""Exact all-reduce over all peers: of gradients in every step, or of parameters now and then."""

from __future__ import annotations

from typing import Any, final

import torch

from moshpit.baselines import handover
from moshpit.baselines.base import PATIENCE_S, Synchronous
from moshpit.baselines.kinds import Kind
from moshpit.baselines.world import Muster, World
from moshpit.errors import ConfigError, RemoteError
from moshpit.training.parcels import Parcels
from moshpit.training.tensors import is_finite
from moshpit.types import short


def ring_all_reduce(
    parcels: Parcels, muster: Muster, step: int, vector: torch.Tensor, weight: float
) -> tuple[torch.Tensor, float]:
    r"""Return :math:`\sum_i w_i x_i / \sum_i w_i` over the world, the same bytes at all members,
    and the sum of the weights; zeros if that is 0.

    Reduce-scatter, then all-gather, around a ring: :math:`2(n-1)` messages of a :math:`n`-th each,
    each of which waits for the one before. Whoever is late or dead stalls all.

    Args:
        parcels, muster: where; in its present world.
        step: for which step.
        vector: (numel,) float32.
        weight: of this peer, at least 0.

    Raises:
        Regroup: somebody is dead.

    Source: paper.md §4 (ring).
    """
    world = muster.current()
    if world.size == 1:
        return (vector.clone() if weight > 0 else torch.zeros_like(vector)), weight
    n, me = world.size, world.rank
    numel = vector.numel()
    bounds = [max(numel, n) * i // n for i in range(n + 1)]
    sums = torch.zeros(max(numel, n))
    if weight > 0:
        sums[:numel] = vector * weight
    weights = [weight] * n
    right, left = world.members[(me + 1) % n], world.members[(me - 1) % n]

    def pass_on(hop: int, sent: int) -> tuple[torch.Tensor, float, int]:
        """Send a piece to the right, and take the one before it from the left."""
        tag = world.tag(Kind.RING, step, hop)
        parcels.send(right, tag, sums[bounds[sent] : bounds[sent + 1]], weights[sent])
        got = (sent - 1) % n
        parcel = muster.take(tag, left)
        if parcel.vector.numel() != bounds[got + 1] - bounds[got]:
            raise RemoteError(short(left), "bad-parcel", f"a piece of {parcel.vector.numel()}")
        return parcel.vector, parcel.weight, got

    for hop in range(n - 1):
        piece, mass, got = pass_on(hop, (me - hop) % n)
        sums[bounds[got] : bounds[got + 1]] += piece
        if not is_finite(sums[bounds[got] : bounds[got + 1]]):
            raise RemoteError(short(left), "bad-parcel", "its numbers are too large to be added")
        weights[got] += mass
    own = (me + 1) % n
    total = weights[own]
    sums[bounds[own] : bounds[own + 1]] /= total if total > 0 else 1.0
    for hop in range(n - 1):
        piece, mass, got = pass_on(n - 1 + hop, (own - hop) % n)
        sums[bounds[got] : bounds[got + 1]] = piece
        weights[got] = mass
    return sums[:numel], total


class _Exact(Synchronous):
    """Peers that hold the same parameters at the front of every world."""

    _gone = False
    """What this peer has in hand belongs to parameters that it does not have any more."""

    def _enter(self, world: World, before: World | None) -> None:
        parameters = self.parameters()
        behind = [
            rank
            for rank in range(world.size)
            if rank != world.donor and (world.front == 0 or not world.at_front(rank))
        ]
        self.muster.left_over(Kind.RING)
        self.muster.left_over(Kind.HANDOVER)
        if world.rank == world.donor and behind:
            handover.give(self.swarm.parcels, world, behind, parameters, self.inner)
        elif world.rank in behind:
            before_it = self._flat()
            handover.take(self.muster, world, parameters, self.inner)
            self._gone = not torch.equal(before_it, self._flat())


@final
class AllReduceSGD(_Exact):
    r"""Synchronous data parallelism: the mean gradient of all peers in every step (AR-SGD).

    :math:`x \leftarrow \mathrm{opt}(x, \sum_i n_i g_i / \sum_i n_i)` with a ring all-reduce, as
    `torch.nn.parallel.DistributedDataParallel` does. All begin with the parameters of the first
    peer. A peer that is late stalls all; one that dies stalls them until it is found dead, then
    the others do the step again without it; one that comes is given the state.

    Args:
        samples_per_epoch: how `Optimizer.epoch` counts.
        peers: how many workers there are at least when training begins.
        patience_s: how long a step waits for a peer that is alive and silent.

    Raises:
        ConfigError: settings that make no sense.

    Example:
        >>> AllReduceSGD(4096, peers=16).name
        'AllReduceSGD'

    Source: paper.md §7 (AR-SGD); Goyal et al. 2017, arXiv 1706.02677.
    """

    name = "AllReduceSGD"

    def _exchange(self, samples: float, usable: bool) -> None:
        gradient = self._flat_gradient()
        self._gone = False

        def work(world: World) -> tuple[torch.Tensor, float]:
            weight = samples if usable and not self._gone else 0.0
            return ring_all_reduce(
                self.swarm.parcels, self.muster, self._completed, gradient, weight
            )

        mean, total = self._together(work)
        self._completed += 1
        if total > 0:
            self._set_gradient(mean)
            self._move(usable=True)
        self._counted(total)


@final
class AllReduceLocalSGD(_Exact):
    r"""Local SGD with exact averaging: ``period`` local steps, then the mean of all parameters,
    weighted by samples, by a ring all-reduce over all peers.

    What Moshpit's `LocalSGD` approximates where peers fail. Dead and late peers stall it in every
    averaging, as they do `AllReduceSGD` in every step.

    Args:
        samples_per_epoch: how `Optimizer.epoch` counts.
        period: local steps between two averagings.
        peers, patience_s: as for `AllReduceSGD`.

    Raises:
        ConfigError: settings that make no sense.

    Example:
        >>> AllReduceLocalSGD(4096, period=8).period
        8

    Source: paper.md §7 (Local SGD); Stich 2019, arXiv 1805.09767.
    """

    name = "AllReduceLocalSGD"

    def __init__(
        self,
        samples_per_epoch: float,
        *,
        period: int = 8,
        peers: int = 1,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(samples_per_epoch, peers=peers, patience_s=patience_s)
        if period < 1:
            raise ConfigError(f"period: {period!r}; give a number of local steps, 1 or more")
        self.period = period
        self._since = 0.0
        self._steps = 0

    def _exchange(self, samples: float, usable: bool) -> None:
        if self._completed == 0:
            self._together(lambda world: None)  # all begin with the same parameters
        self._move(usable)
        self._since += samples if usable else 0.0
        self._steps += 1
        if self._steps < self.period:
            return
        self._gone = False

        def work(world: World) -> tuple[torch.Tensor, float]:
            weight = 0.0 if self._gone else self._since
            return ring_all_reduce(
                self.swarm.parcels, self.muster, self._completed, self._flat(), weight
            )

        mean, total = self._together(work)
        self._completed += 1
        self._steps, self._since = 0, 0.0
        if total > 0:
            self._set(mean)
        self._counted(total)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "steps": self._steps, "since": self._since}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._steps, self._since = int(state["steps"]), float(state["since"])
