"""One peer holds the parameters; the others send it gradients and fetch parameters from it."""

from __future__ import annotations

import copy
import threading
from typing import Any, Final, final

import torch

from moshpit.baselines import handover
from moshpit.baselines.base import PATIENCE_S, Synchronous
from moshpit.baselines.kinds import Kind
from moshpit.baselines.world import World, workers
from moshpit.errors import PeerLostError, RemoteError, WaitTimeoutError
from moshpit.tensors.parcel import Parcel
from moshpit.training.parcels import Parcels
from moshpit.training.strategies.base import Snapshot
from moshpit.training.tensors import is_finite, parameters_of
from moshpit.types import PeerId, short

LOOK_S: Final = 1.0  # guess: how soon a worker looks whether another peer is the server now


@final
class ParameterServer(Synchronous):
    r"""A parameter server: the first worker (by id) holds the parameters, and trains as well.

    Synchronous: in each step the server waits for all workers' gradients, makes the optimizer's
    step with their mean, weighted by samples, and sends the parameters to all. Asynchronous: it
    makes a step with each gradient as it comes, however old the parameters are that it was taken
    at, and answers with the new ones; nobody waits for anybody but the server.

    A dead worker stalls the synchronous server until it is found dead, and the asynchronous one
    not at all. If the server dies, the next peer takes its place with the parameters that it has;
    what only the server's optimizer knew is lost.

    Args:
        samples_per_epoch: how `Optimizer.epoch` counts.
        asynchronous: see above.
        peers: how many workers there are at least when training begins.
        patience_s: how long a step waits for a peer that is alive and silent.

    Raises:
        ConfigError: settings that make no sense.

    Example:
        >>> ParameterServer(4096, asynchronous=True).name
        'ParameterServer async'

    Source: Li et al. 2014 (OSDI); Dean et al. 2012 (Downpour SGD) for the asynchronous one.
    """

    def __init__(
        self,
        samples_per_epoch: float,
        *,
        asynchronous: bool = False,
        peers: int = 1,
        patience_s: float = PATIENCE_S,
    ) -> None:
        super().__init__(samples_per_epoch, peers=peers, patience_s=patience_s)
        self.asynchronous = asynchronous
        self.name = "ParameterServer async" if asynchronous else "ParameterServer"
        self.applied = 0
        """Gradients that this peer has applied as the asynchronous server."""
        self._lock = threading.Lock()  # the network's thread makes steps, too
        self._held: torch.optim.Optimizer | None = None
        self._restored: tuple[dict[str, Any], torch.Tensor] | None = None
        self._seen: dict[PeerId, int] = {}
        self._number = 0
        self._gone = False

    def _begin(self, parcels: Parcels) -> None:
        super()._begin(parcels)
        if self.asynchronous:
            parcels.serve(Kind.GRADIENT, self._asked)

    def _exchange(self, samples: float, usable: bool) -> None:
        gradient = self._flat_gradient() if usable else torch.zeros_like(self._flat())
        weight = samples if usable else 0.0
        if self.asynchronous:
            self._gather()
            self._push_and_pull(gradient, weight)
            self._counted(samples * len(workers(self.swarm)))
            return
        self._gone = False
        total = self._together(lambda world: self._in_step(world, gradient, weight))
        self._completed += 1
        self._counted(total)

    # --- synchronous ------------------------------------------------------------------------

    def _in_step(self, world: World, gradient: torch.Tensor, weight: float) -> float:
        step, server = self._completed, world.members[0]
        weight = 0.0 if self._gone else weight
        if world.rank == 0:
            return self._serve(world, gradient * weight, weight)
        self.swarm.parcels.send(server, world.tag(Kind.GRADIENT, step), gradient, weight)
        parcel = self.muster.take(world.tag(Kind.PARAMETERS, step), server)
        self._judge(parcel, gradient.numel())
        self._set(parcel.vector)
        return parcel.weight

    def _serve(self, world: World, total: torch.Tensor, weight: float) -> float:
        for member in world.members[1:]:
            parcel = self.muster.take(world.tag(Kind.GRADIENT, self._completed), member)
            self._judge(parcel, total.numel())
            total += parcel.vector * parcel.weight
            if not is_finite(total):
                wrong = "its numbers are too large to be added"
                raise RemoteError(short(member), "bad-parcel", wrong)
            weight += parcel.weight
        if weight > 0:
            self._set_gradient(total.div_(weight))
            self._move(usable=True)
        parameters, tag = self._flat(), world.tag(Kind.PARAMETERS, self._completed)
        for member in world.members[1:]:
            self.swarm.parcels.send(member, tag, parameters, weight)
        return weight

    def _judge(self, parcel: Parcel, numel: int) -> None:
        if parcel.vector.numel() != numel:
            detail = f"{parcel.vector.numel()} numbers, not {numel}"
            raise RemoteError(short(parcel.sender), "bad-parcel", detail)

    def _enter(self, world: World, before: World | None) -> None:
        for kind in (Kind.GRADIENT, Kind.PARAMETERS, Kind.HANDOVER):
            self.muster.left_over(kind)
        behind = [
            rank
            for rank in range(world.size)
            if rank != world.donor and (world.front == 0 or not world.at_front(rank))
        ]
        if world.rank == world.donor and behind:
            handover.give(self.swarm.parcels, world, behind, self.parameters(), self.inner)
        elif world.rank in behind:
            old = self._flat()
            handover.take(self.muster, world, self.parameters(), self.inner)
            self._gone = not torch.equal(old, self._flat())

    # --- asynchronous -----------------------------------------------------------------------

    def _push_and_pull(self, gradient: torch.Tensor, weight: float) -> None:
        self._number += 1
        while self.swarm.parcels.poll(Kind.PARAMETERS) is not None:
            pass  # nobody was asked with this number yet: from a server that was given up
        since, asked = self.swarm.clock(), None
        try:
            while True:
                server = workers(self.swarm)[0]
                if server == self.swarm.peer_id:
                    with self._lock:
                        if weight > 0:
                            self._apply(gradient)
                        self._set(self._held_flat())
                    return
                if server != asked:  # once: on a thin line, asking again would delay all answers
                    tag = (Kind.GRADIENT, self._number)
                    self.swarm.parcels.send(server, tag, gradient, weight)
                    asked = server
                try:
                    if self._pull(server, gradient.numel(), since):
                        return
                except PeerLostError:
                    asked = None
                    self._pause()
        finally:
            self._waited(since)

    def _pull(self, server: PeerId, numel: int, since: float) -> bool:
        """Wait for the parameters; False if none came for a while.

        Raises:
            PeerLostError: the server is dead.
            WaitTimeoutError: it is alive, and silent for too long.
        """
        try:
            parcel = self.swarm.parcels.take(
                (Kind.PARAMETERS, self._number), sender=server, timeout_s=LOOK_S
            )
        except WaitTimeoutError:
            if self.swarm.clock() - since > self._patience_s:
                raise
            return False
        self._judge(parcel, numel)
        with self._lock:
            self._set(parcel.vector)
        return True

    def _asked(self, parcel: Parcel) -> None:
        """The server: make a step with a gradient. In the network's thread."""
        with self._lock:
            values = self._held_flat()
            if values.numel() != parcel.vector.numel():
                self._refuse(parcel, f"{parcel.vector.numel()} numbers, not {values.numel()}")
                return
            again = self._seen.get(parcel.sender) == parcel.tag[1]
            self._seen[parcel.sender] = parcel.tag[1]
            if parcel.weight > 0 and not again:
                self._apply(parcel.vector)
                values = self._held_flat()
        self.swarm.parcels.send(parcel.sender, (Kind.PARAMETERS, parcel.tag[1]), values)

    def _holder(self) -> torch.optim.Optimizer:
        """Return the optimizer that moves the held parameters: a copy of the wrapped one and its
        parameters, since training computes with its own meanwhile."""
        if self._held is None:
            self._held = copy.deepcopy(self.inner)
            if self._restored is not None:
                state, values = self._restored
                self._held.load_state_dict(state)
                self._load(self._held, values)
                self._restored = None
        pairs = zip(self._held.param_groups, self.inner.param_groups, strict=True)
        for held, own in pairs:  # a scheduler may have changed the rate
            held.update({key: value for key, value in own.items() if key != "params"})
        return self._held

    def _held_flat(self) -> torch.Tensor:
        held = parameters_of(self._holder(), None)
        return torch.cat([p.tensor.detach().float().reshape(-1).cpu() for p in held])

    @torch.no_grad()
    def _load(self, holder: torch.optim.Optimizer, values: torch.Tensor) -> None:
        at = 0
        for named in parameters_of(holder, None):
            size = named.tensor.numel()
            named.tensor.copy_(values[at : at + size].view(named.tensor.shape))
            at += size

    @torch.no_grad()
    def _apply(self, gradient: torch.Tensor) -> None:
        holder, at = self._holder(), 0
        held = [named.tensor for named in parameters_of(holder, None)]
        before = [tensor.clone() for tensor in held]
        for tensor in held:
            part = gradient[at : at + tensor.numel()].view(tensor.shape)
            tensor.grad = part.to(tensor, copy=True)
            at += tensor.numel()
        holder.step()
        if not all(is_finite(tensor) for tensor in held):
            self._left_out()
            for tensor, old in zip(held, before, strict=True):
                tensor.copy_(old)
                holder.state.pop(tensor, None)
        self.applied += 1

    # --- the end ----------------------------------------------------------------------------

    def snapshot(self) -> Snapshot:
        taken = super().snapshot()
        if self.asynchronous:
            with self._lock:
                self._held = None  # who goes on training begins with what this peer then has
        return taken

    def state_dict(self) -> dict[str, Any]:
        with self._lock:
            held = None
            if self._held is not None:
                held = copy.deepcopy(self._held.state_dict()), self._held_flat()
        return {**super().state_dict(), "held": held, "number": self._number}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._restored, self._held = state["held"], None
        self._number = int(state["number"])
