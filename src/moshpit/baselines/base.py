"""What the baselines share: the flat vector of parameters, epochs, and steps in a world.

A baseline is a `Strategy` that exchanges parcels with single peers in every step, and takes part
in no averaging of the swarm but the last one, in `Optimizer.finish`, which gives all peers
the same bytes. So a researcher compares it with `LocalSGD` by changing one argument.
"""

from __future__ import annotations

import contextlib
import logging
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch

from moshpit.baselines.kinds import Kind
from moshpit.baselines.world import SLICE_S, Muster, Regroup, World, too_few, workers
from moshpit.errors import ConfigError, WaitTimeoutError
from moshpit.tensors.parcel import Parcel
from moshpit.training.parcels import Parcels, ParcelSwarm
from moshpit.training.strategies.base import Closure, Handle, Layouts, Snapshot, Strategy
from moshpit.training.tensors import (
    Named,
    first_nonfinite,
    forget_nonfinite_statistics,
    is_finite,
)
from moshpit.types import PeerId, short

T = TypeVar("T")

log = logging.getLogger("moshpit")

PATIENCE_S = 60.0  # guess: much longer than any step, so that only a real stop ends a run


class Baseline(Strategy):
    """A method that sends parcels, and what it needs of the optimizer and the swarm.

    One ``step()`` is one step of the method, also for a batch whose gradient is not finite: the
    others may wait for this peer, so it takes part with what it has.

    Args:
        samples_per_epoch: of all peers together; how `Optimizer.epoch` counts, nothing more.
        peers: how many workers there are at least when training begins.
        patience_s: how long a step waits for a peer that is alive and silent.
    """

    def __init__(
        self, samples_per_epoch: float, *, peers: int = 1, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(samples_per_epoch, overlap=False)
        if peers < 1:
            raise ConfigError(f"peers: {peers!r}; give how many workers there are, 1 or more")
        if not 0 < patience_s < float("inf"):
            raise ConfigError(f"patience_s: {patience_s!r}; give a positive number of seconds")
        self._per_epoch = self.samples_per_epoch
        self.samples_per_epoch = 0.0  # for the swarm: no averaging is ever due by itself
        self._peers = peers
        self._patience_s = patience_s
        self._all_samples = 0.0
        self._gathered = False
        self._refused: dict[PeerId, None] = {}
        self._swarm: ParcelSwarm | None = None
        self._waited: Callable[[float], object] = lambda since: None
        self._flat_layouts = Layouts()

    def connect(self, handle: Handle) -> None:
        swarm = handle.swarm
        if not hasattr(swarm, "parcels"):
            raise ConfigError(f"{self.name} sends vectors to single peers; this swarm cannot")
        self._swarm = cast(ParcelSwarm, swarm)
        self._waited = handle.waited
        self._begin(self._swarm.parcels)

    def _begin(self, parcels: Parcels) -> None:
        """The swarm is known; parcels can be served."""

    @property
    def swarm(self) -> ParcelSwarm:
        """The swarm."""
        assert self._swarm is not None, "connect() comes first"
        return self._swarm

    # --- the contract with the optimizer ----------------------------------------------------

    @property
    def answers(self) -> bool:
        return False

    @property
    def catches_up(self) -> bool:
        return False

    @property
    def own_epoch(self) -> int:
        return int(self._all_samples // self._per_epoch)

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        count = samples()
        usable = first_nonfinite(self._gradients()) is None
        if not usable:
            self._left_out()
        self.samples += count
        self._exchange(count, usable)
        return loss

    def _left_out(self) -> None:
        """A gradient or a step was not finite."""
        self.skipped_batches += 1

    def skip_batch(self) -> None:
        super().skip_batch()
        self._exchange(0.0, False)

    @abstractmethod
    def _exchange(self, samples: float, usable: bool) -> None:
        """Make one step of the method.

        Args:
            samples: behind this peer's gradient.
            usable: whether that is finite.
        """

    def _gather(self) -> None:
        """Wait until there are enough peers to begin with; for methods without a world.

        Raises:
            WaitTimeoutError: they did not come.
        """
        since = self.swarm.clock()
        while not self._gathered:
            here = len(workers(self.swarm))
            self._gathered = here >= self._peers
            if self.swarm.clock() - since > self._patience_s:
                raise WaitTimeoutError(too_few(here, self._peers, self._patience_s))
            if not self._gathered:
                self._pause()

    def _pause(self) -> None:
        """Wait a moment, by the swarm's clock; for methods without a world."""
        with contextlib.suppress(WaitTimeoutError):  # nobody calls
            self.swarm.parcels.take((Kind.MUSTER, 0), timeout_s=SLICE_S)

    def _refuse(self, parcel: Parcel, wrong: str) -> None:
        """Say, once for each sender, that a parcel of it was not used; for what is served in the
        network's thread, where nothing can be raised to training."""
        if parcel.sender not in self._refused:
            self._refused[parcel.sender] = None
            log.warning("bad-parcel %s: %s", short(parcel.sender), wrong)

    def _counted(self, samples: float) -> None:
        """So many samples of all peers were used in this step."""
        self._all_samples += samples

    def snapshot(self) -> Snapshot:
        taken = self._collect(self.parameters())
        return replace(taken, weight=0.0 if taken.nonfinite is not None else self._final_weight())

    def _final_weight(self) -> float:
        """This peer's weight in the mean with which training ends."""
        return 1.0

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        self._layouts.of(self._in_order(self.parameters())).write_back(mean)

    def keep_local(self, snapshot: Snapshot) -> None:
        """The local parameters stay."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "all_samples": self._all_samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._all_samples = float(state["all_samples"])

    # --- flat vectors -----------------------------------------------------------------------

    def _gradients(self) -> list[Named]:
        return [
            Named(p.name, p.tensor.grad) for p in self.parameters() if p.tensor.grad is not None
        ]

    def _flat(self, tensors: Sequence[Named] | None = None) -> torch.Tensor:
        """Return a copy of the parameters (or others) as one vector."""
        layout = self._flat_layouts.of(list(tensors or self.parameters()))
        vector = torch.empty(layout.numel, dtype=torch.float32)
        layout.flatten_into(vector)
        return vector

    def _flat_gradient(self) -> torch.Tensor:
        """Return the gradient as one vector; zeros where a parameter has none."""
        return torch.cat(
            [
                (torch.zeros_like(p.tensor) if p.tensor.grad is None else p.tensor.grad)
                .detach()
                .to("cpu", torch.float32)
                .reshape(-1)
                for p in self.parameters()
            ]
        )

    def _set(self, vector: torch.Tensor) -> None:
        """Put a vector into the parameters."""
        self._flat_layouts.of(self.parameters()).write_back(vector)

    @torch.no_grad()
    def _set_gradient(self, vector: torch.Tensor) -> None:
        """Put a vector into the gradients; a parameter that nobody used keeps its None."""
        at = 0
        for named in self.parameters():
            part = vector[at : at + named.tensor.numel()].view(named.tensor.shape)
            at += named.tensor.numel()
            if named.tensor.grad is not None:
                named.tensor.grad.copy_(part)
            elif bool(part.any().item()):
                named.tensor.grad = part.to(named.tensor)

    def _move(self, usable: bool) -> torch.Tensor:
        """Let the wrapped optimizer make its step; return by how much it moves the parameters.

        Where that is not finite, nothing moves, and the statistics that caused it begin anew.
        """
        before = self._flat()
        if not usable:
            return torch.zeros_like(before)
        self.inner.step()
        moved = self._flat().sub_(before)
        if not is_finite(moved):
            self._left_out()
            self._set(before)
            forget_nonfinite_statistics(self.inner, self.parameters())
            moved.zero_()
        return moved


class Synchronous(Baseline):
    """A baseline whose steps are made in a world (`moshpit.baselines.world`).

    A peer that dies stalls those that wait for it until it is found dead; then the others agree
    on who is left and go on. One that comes later is given the parameters.

    Args:
        samples_per_epoch, peers, patience_s: as for `Baseline`.
    """

    def __init__(
        self, samples_per_epoch: float, *, peers: int = 1, patience_s: float = PATIENCE_S
    ) -> None:
        super().__init__(samples_per_epoch, peers=peers, patience_s=patience_s)
        self._muster: Muster | None = None
        self._completed: int = 0
        self.regroups = 0
        """How often the peers had to agree anew on who is there."""

    def _begin(self, parcels: Parcels) -> None:
        self._muster = Muster(self.swarm, self._peers, self._patience_s)

    @property
    def muster(self) -> Muster:
        """Who waits for parcels."""
        assert self._muster is not None, "connect() comes first"
        return self._muster

    def _together(self, work: Callable[[World], T]) -> T:
        """Do a step's work in the world, again if that changes meanwhile."""
        since = self.swarm.clock()
        try:
            while True:
                try:
                    return work(self.muster.current())
                except Regroup:
                    self._regroup()
        finally:
            self._waited(since)

    def _regroup(self) -> None:
        """Agree on a world, and bring all to its front."""
        while True:
            before = self.muster.world
            try:
                world = self.muster.agree(self._completed)
                self.regroups += before is not None
                self._enter(world, before)
                self._completed = max(1, int(world.front))  # 0: this peer was in no world yet
                self.muster.settle(world)
                return
            except Regroup:
                continue

    @abstractmethod
    def _enter(self, world: World, before: World | None) -> None:
        """Come to the front of a new world; raises `Regroup` if it has changed already."""

    def snapshot(self) -> Snapshot:
        self.muster.finish()
        return super().snapshot()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "completed": self._completed}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._completed = int(state["completed"])
