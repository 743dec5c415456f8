"""Stochastic gradient push: gossip over a directed graph, with weights that undo its bias."""

from __future__ import annotations

from collections import deque
from typing import Any, final

import torch

from moshpit.baselines import handover
from moshpit.baselines.base import PATIENCE_S, Synchronous
from moshpit.baselines.kinds import Kind
from moshpit.baselines.world import Regroup, World
from moshpit.errors import RemoteError
from moshpit.tensors.parcel import Parcel
from moshpit.training.strategies.base import Snapshot
from moshpit.training.tensors import is_finite
from moshpit.types import PeerId, short


def exponential_hop(step: int, size: int) -> int:
    r"""Return how far the one-peer exponential graph reaches in a step:
    :math:`2^{k \bmod (\lfloor\log_2(n-1)\rfloor+1)}`.

    >>> [exponential_hop(step, 8) for step in range(4)]
    [1, 2, 4, 1]
    """
    return 1 << step % (size - 1).bit_length()


@final
class SGP(Synchronous):
    r"""Stochastic gradient push (push-sum) on the one-peer exponential graph.

    Each peer has a numerator :math:`x_i` and a weight :math:`w_i` (1 at first), and its model is
    :math:`z_i = x_i / w_i`. In step k it takes a gradient at :math:`z_i`, moves :math:`x_i` as its
    optimizer says, sends :math:`(x_i/2, w_i/2)` to the peer
    :math:`2^{k \bmod (\lfloor\log_2(n-1)\rfloor+1)}` further on, keeps the other half, and adds
    what arrives. :math:`\sum_i x_i` and :math:`\sum_i w_i` are conserved by this.

    A peer that dies takes its mass with it; who waits for it goes on when it is found dead. One
    that comes begins with another's model and the weight 1.

    Args:
        samples_per_epoch: how `Optimizer.epoch` counts.
        overlap: add what was sent in step k only in step k + 1, so that it travels while the next
            gradient is computed (overlapped SGP with a delay of one step).
        peers: how many workers there are at least when training begins.
        patience_s: how long a step waits for a peer that is alive and silent.

    Raises:
        ConfigError: settings that make no sense.

    Example:
        >>> SGP(4096, overlap=True).delay
        1

    Source: paper.md §7 (SGP); Assran et al. 2019, arXiv 1811.10792.
    """

    name = "SGP"

    def __init__(
        self,
        samples_per_epoch: float,
        *,
        overlap: bool = False,
        peers: int = 1,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(samples_per_epoch, peers=peers, patience_s=patience_s)
        self.delay = int(overlap)
        """After how many steps what was sent to this peer must be there."""
        self._x: torch.Tensor | None = None
        self._w = 1.0
        self._sent = -1
        self._owed: deque[tuple[World, int, PeerId]] = deque()
        self._ever: dict[PeerId, None] = {}  # who was in any world
        self._earlier = 0.0  # the weights of the run that this one goes on from

    @property
    def numerator(self) -> torch.Tensor:
        """The vector x, (numel,) float32; made of the parameters at first."""
        if self._x is None:
            self._x = self._flat()
        return self._x

    @property
    def weight(self) -> float:
        """The weight w."""
        return self._w

    def _exchange(self, samples: float, usable: bool) -> None:
        x = self.numerator
        x += self._move(usable)
        self._together(self._gossip)
        self._completed += 1
        self._set(self.numerator / self._w)
        world = self.muster.world
        self._counted(samples * (world.size if world is not None else 1))

    def _gossip(self, world: World) -> None:
        """Send a half, add what is due. In a new world all send anew: one exchange more."""
        step = self._completed
        for late in self.muster.left_over(Kind.MASS):
            self._add(late)
        if world.size > 1 and self._sent < step:
            hop = exponential_hop(step, world.size)
            to = world.members[(world.rank + hop) % world.size]
            self._owed.append((world, step, world.members[(world.rank - hop) % world.size]))
            self._sent = step
            self._w /= 2
            half = self.numerator.div_(2)
            self.swarm.parcels.send(to, world.tag(Kind.MASS, step), half, self._w)
        while len(self._owed) > self.delay:
            self._receive_next()

    @property
    def _all_weights(self) -> float:
        """What the weights of all peers add up to at most: each has begun with 1."""
        return self._earlier + len(self._ever)

    def _receive_next(self) -> None:
        """Take in what has been owed longest. A bad parcel was it, too: nothing else will come."""
        try:
            self._receive(self._owed[0])
        except RemoteError:
            self._owed.popleft()
            raise
        self._owed.popleft()

    def _receive(self, owed: tuple[World, int, PeerId]) -> None:
        world, step, sender = owed
        self._add(self.muster.take(world.tag(Kind.MASS, step), sender))

    def _add(self, parcel: Parcel) -> None:
        """Add a half, if it can be one; otherwise this peer's x and w stay as they are.

        Raises:
            RemoteError: it cannot.
        """
        x = self.numerator
        wrong = ""
        if parcel.vector.numel() != x.numel():
            wrong = f"{parcel.vector.numel()} numbers, not {x.numel()}"
        elif not 0 < parcel.weight <= self._all_weights:
            wrong = f"a weight of {parcel.weight:g}; all together have had {self._all_weights:g}"
        else:
            total = x + parcel.vector
            if is_finite(total):
                self._x, self._w = total, self._w + parcel.weight
                return
            wrong = "its numbers are too large to be added"
        raise RemoteError(short(parcel.sender), "bad-parcel", wrong)

    def _enter(self, world: World, before: World | None) -> None:
        self._ever.update(dict.fromkeys(world.members))
        self._owed.clear()  # who owed it is dead, or it is among what has come
        for parcel in self.muster.left_over(Kind.MASS):
            self._add(parcel)
        self.muster.left_over(Kind.HANDOVER)
        outside = [rank for rank in range(world.size) if not world.insiders[rank]]
        self._sent = -1
        if world.rank == world.donor and outside:
            self._set(self.numerator / self._w)
            handover.give(self.swarm.parcels, world, outside, self.parameters(), self.inner)
        elif world.rank in outside:
            handover.take(self.muster, world, self.parameters(), self.inner)
            self._x, self._w = self._flat(), 1.0

    # --- the end ----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        """Take in what is on its way; then the mean of z with the weights w is that of x."""
        self._settle()
        return super().snapshot()

    def _settle(self) -> None:
        while self._owed:
            try:
                self._receive_next()
            except Regroup:  # it died; what it has sent before is here
                self._owed.popleft()
        if self._x is not None:
            self._set(self._x / self._w)

    def _final_weight(self) -> float:
        return self._w

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        super().adopt(snapshot, mean)
        self._x, self._w = self._flat(), 1.0

    def state_dict(self) -> dict[str, Any]:
        self._settle()
        x = None if self._x is None else self._x.clone()
        weights = {"weight": self._w, "weights": self._all_weights}
        return {**super().state_dict(), "numerator": x, **weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._x = None if state["numerator"] is None else state["numerator"].clone()
        self._w, self._earlier = float(state["weight"]), float(state["weights"])
