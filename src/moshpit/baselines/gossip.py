"""Gossip with doubly stochastic weights: on a ring in step, or in pairs whenever it suits."""

from __future__ import annotations

import threading
from random import Random
from typing import Any, final

import torch

from moshpit.baselines import handover
from moshpit.baselines.base import PATIENCE_S, Baseline, Synchronous
from moshpit.baselines.kinds import Kind
from moshpit.baselines.world import World, workers
from moshpit.errors import PeerLostError, RemoteError, WaitTimeoutError
from moshpit.tensors.parcel import Parcel
from moshpit.training.parcels import Parcels
from moshpit.training.strategies.base import Snapshot
from moshpit.training.tensors import is_finite
from moshpit.types import PeerId, short


@final
class DPSGD(Synchronous):
    r"""Decentralized parallel SGD on a ring (D-PSGD): in every step the weighted mean of one's own
    parameters and both neighbours', then the local step.

    :math:`x_i \leftarrow \sum_j W_{ij} x_j + \Delta_i`, where :math:`\Delta_i` is the optimizer's
    step for the gradient at the old :math:`x_i`, and W has 1/3 for oneself and each neighbour
    (1/2 with two peers). It is doubly stochastic, so the mean is conserved. Parameters are sent as
    soon as they are known, and travel while the next gradient is computed.

    A dead neighbour stalls its neighbours, and in time all, until it is found dead; then the rest
    close the ring. A peer that comes begins with another's parameters.

    Args:
        samples_per_epoch: how `Optimizer.epoch` counts.
        peers: how many workers there are at least when training begins.
        patience_s: how long a step waits for a peer that is alive and silent.

    Raises:
        ConfigError: settings that make no sense.

    Example:
        >>> DPSGD(4096, peers=16).regroups
        0

    Source: paper.md §7 (D-PSGD); Lian et al. 2017, arXiv 1705.09056.
    """

    name = "DPSGD"

    def __init__(
        self, samples_per_epoch: float, *, peers: int = 1, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(samples_per_epoch, peers=peers, patience_s=patience_s)
        self._sent = (-1, -1)  # the world's round, and the step
        self._came = False

    def _exchange(self, samples: float, usable: bool) -> None:
        before = self._flat()
        moved = self._move(usable)
        self._came = False
        mixed = self._together(lambda world: self._mix(world, before))
        self._completed += 1
        self._set(mixed if self._came else mixed + moved)
        world = self.muster.world
        if world is not None:
            self._push(world, self._flat())
        self._counted(samples * (world.size if world is not None else 1))

    def _mix(self, world: World, before: torch.Tensor) -> torch.Tensor:
        own = self._flat() if self._came else before
        neighbours = _neighbours(world)
        if self._sent != (world.round, self._completed):
            self._push(world, own)
        mixed = own / (1 + len(neighbours))
        for neighbour in neighbours:
            tag = world.tag(Kind.NEIGHBOUR, self._completed)
            parcel = self.muster.take(tag, neighbour)
            if parcel.vector.numel() != own.numel():
                detail = f"{parcel.vector.numel()} numbers, not {own.numel()}"
                raise RemoteError(short(neighbour), "bad-parcel", detail)
            mixed += parcel.vector / (1 + len(neighbours))  # before the sum: that could overflow
        return mixed

    def _push(self, world: World, own: torch.Tensor) -> None:
        tag = world.tag(Kind.NEIGHBOUR, self._completed)
        for neighbour in _neighbours(world):
            self.swarm.parcels.send(neighbour, tag, own)
        self._sent = (world.round, self._completed)

    def _enter(self, world: World, before: World | None) -> None:
        for kind in (Kind.NEIGHBOUR, Kind.HANDOVER):
            self.muster.left_over(kind)
        outside = [rank for rank in range(world.size) if not world.insiders[rank]]
        if world.rank == world.donor and outside:
            handover.give(self.swarm.parcels, world, outside, self.parameters(), self.inner)
        elif world.rank in outside:
            handover.take(self.muster, world, self.parameters(), self.inner)
            self._came = True


def _neighbours(world: World) -> list[PeerId]:
    """Return who is next to this peer on the ring; one with two peers, nobody alone."""
    ranks = [(world.rank - 1) % world.size, (world.rank + 1) % world.size]
    return [world.members[r] for r in dict.fromkeys(ranks) if r != world.rank]


@final
class ADPSGD(Baseline):
    r"""Asynchronous decentralized parallel SGD (AD-PSGD): nobody waits for anybody's gradient.

    Every second worker (by id) is active, the others are passive, so that the graph is bipartite.
    After each of its steps an active worker picks a random passive one, and both set their
    parameters to :math:`(x_i + x_j)/2`; the passive one's are averaged at once, whatever it
    computes, and its gradient, taken at older parameters, is applied when it is ready. So the mean
    over all peers is conserved by each averaging, and gradients are stale.

    Averaging is atomic: the active worker's parameters stand still from the moment at which they
    are sent until the mean is there. Meanwhile it computes its next gradient, and applies it then;
    where sending takes longer than computing, this is what it waits for. (The released program
    does the same with a gradient more in hand, and sends all the time.)

    A dead peer stalls nobody for longer than it takes to find that out: an averaging with it is
    given up. One that comes begins with its own parameters.

    Args:
        samples_per_epoch: how `Optimizer.epoch` counts.
        overlap: an active worker computes its next gradient while its averaging is under way;
            otherwise it waits for it first.
        atomic: if not, an overlapped averaging stops nobody: the active worker steps on, and what
            the averaging has changed is added when it comes, which conserves the mean, too. This is
            not in the source; it costs staleness and never waits.
        seed: of the choice of partners, together with the peer's id.
        peers: how many workers there are at least when training begins.
        patience_s: how long an active worker waits for the answer of a partner.

    Raises:
        ConfigError: settings that make no sense.

    Example:
        >>> ADPSGD(4096).overlap_pairs
        True

    Source: paper.md §7 (AD-PSGD); Lian et al. 2018, arXiv 1710.06952; how it is released:
    facebookresearch/stochastic_gradient_push, ``ad_psgd.py`` and ``BilatPushPull``.
    """

    name = "ADPSGD"

    def __init__(
        self,
        samples_per_epoch: float,
        *,
        overlap: bool = True,
        atomic: bool = True,
        seed: int = 0,
        peers: int = 1,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(samples_per_epoch, peers=peers, patience_s=patience_s)
        self.overlap_pairs = overlap
        self.atomic = atomic
        self.averagings = 0
        """How often this peer has averaged with another."""
        self._seed = seed
        self._lock = threading.Lock()  # the network's thread averages, too
        self._x: torch.Tensor | None = None
        self._pending: tuple[int, PeerId, torch.Tensor] | None = None
        self._asked_at = 0.0
        self._number = 0

    def _begin(self, parcels: Parcels) -> None:
        self._rng = Random(f"{self._seed} {self.swarm.peer_id.hex()}")
        parcels.serve(Kind.PAIR, self._asked)
        if not self._waits:
            parcels.serve(Kind.PAIRED, self._answered)

    @property
    def _waits(self) -> bool:
        """Whether an averaging is waited for before the next step is applied."""
        return self.atomic or not self.overlap_pairs

    def _exchange(self, samples: float, usable: bool) -> None:
        self._gather()
        self._wait()
        self._set(self._current())
        moved = self._move(usable)
        with self._lock:
            assert self._x is not None, "made above"
            self._x += moved
        present = workers(self.swarm)
        self._seek(present)
        self._set(self._current())
        self._counted(samples * len(present))

    def _current(self) -> torch.Tensor:
        with self._lock:
            if self._x is None:
                self._x = self._flat()
            return self._x.clone()

    def _seek(self, present: list[PeerId]) -> None:
        """Begin an averaging, if this worker is active and none is under way."""
        me, passive = self.swarm.peer_id, present[1::2]
        now = self.swarm.clock()
        with self._lock:
            late = now - self._asked_at > self._patience_s
            if self._pending is not None and (late or self._pending[1] not in present):
                self._pending = None  # nobody waits for it here
        if me in passive or not passive or self._pending is not None:
            return
        partner = self._rng.choice(passive)
        self._number += 1
        self._asked_at = now
        with self._lock:
            assert self._x is not None, "made in _exchange"
            sent = self._x.clone()
            self._pending = (self._number, partner, sent)
        self.swarm.parcels.send(partner, (Kind.PAIR, self._number), sent)
        if not self.overlap_pairs:
            self._wait()

    def _wait(self) -> None:
        """End the averaging under way, if it is one that is waited for."""
        if self._pending is None or not self._waits:
            return
        number, partner, _ = self._pending
        since = self.swarm.clock()
        try:
            parcel = self.swarm.parcels.take(
                (Kind.PAIRED, number), sender=partner, timeout_s=self._patience_s
            )
            self._answered(parcel)
        except (PeerLostError, WaitTimeoutError):
            self._pending = None
        finally:
            self._waited(since)

    def _asked(self, parcel: Parcel) -> None:
        """The passive side: average at once. In the network's thread."""
        with self._lock:
            if self._x is None:
                mean = parcel.vector  # training has not begun here: the other keeps what it has
            elif self._x.numel() != parcel.vector.numel():
                self._refuse(parcel, f"{parcel.vector.numel()} numbers, not {self._x.numel()}")
                return
            else:
                mean = self._x / 2 + parcel.vector / 2  # before the sum: that could overflow
                self._x.copy_(mean)
                self.averagings += 1
        self.swarm.parcels.send(parcel.sender, (Kind.PAIRED, parcel.tag[1]), mean)

    def _answered(self, parcel: Parcel) -> None:
        """The active side: what was sent becomes the mean; steps made since stay."""
        with self._lock:
            pending = self._pending
            if pending is None or (pending[0], pending[1]) != (parcel.tag[1], parcel.sender):
                return
            self._pending = None
            if self._x is None or self._x.numel() != parcel.vector.numel():
                self._refuse(parcel, f"{parcel.vector.numel()} numbers")
                return
            moved = self._x + (parcel.vector - pending[2])
            if not is_finite(moved):
                self._refuse(parcel, "its numbers are too large to be added")
                return
            self._x = moved
            self.averagings += 1

    # --- the end ----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        self._wait()
        if self._x is not None:
            self._set(self._current())
        return super().snapshot()

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        super().adopt(snapshot, mean)
        with self._lock:
            self._x = self._flat()

    def state_dict(self) -> dict[str, Any]:
        self._wait()
        with self._lock:
            x = None if self._x is None else self._x.clone()
        state = {"x": x, "number": self._number, "rng": self._rng.getstate()}
        return {**super().state_dict(), **state}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        with self._lock:
            self._x = None if state["x"] is None else state["x"].clone()
        self._number = int(state["number"])
        version, numbers, gauss = state["rng"]
        self._rng.setstate((version, tuple(numbers), gauss))
