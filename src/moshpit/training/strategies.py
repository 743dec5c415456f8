"""What a peer does between two averagings, and what it exchanges in them.

A strategy is told about every local step, hands out a snapshot when the swarm averages, and
takes what comes back. When to begin, whether to wait, and what to do about a stale or failed
averaging is decided once, for all strategies, in `moshpit.training.optimizer`.

Every strategy keeps these promises (they are the conformance suite, tests/training):
alone it is the wrapped optimizer; with others and no faults all peers end `finish` with the
same bytes; an averaging that brings nothing leaves this peer's own values standing; a peer
with non-finite values gives nothing and takes the mean.
"""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import torch

from moshpit.errors import ConfigError, DriftError
from moshpit.tensors.layout import VectorLayout
from moshpit.training.tensors import (
    Named,
    buffers_of,
    fingerprint,
    first_nonfinite,
    forget_nonfinite_statistics,
    is_finite,
    parameters_of,
    statistics_of,
)

FINGERPRINT_TOLERANCE = 1e-3  # guess: of values of order 1; kinds of hardware differ by rounding

log = logging.getLogger("moshpit.training")

Closure = Callable[[], Any]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this peer brings to one averaging: (numel,) float32 on the CPU, and its mass."""

    vector: torch.Tensor
    weight: float
    nonfinite: str | None = None
    """The first tensor that holds NaN or infinity; then the weight is 0."""


class Strategy(ABC):
    """The contract between the wrapping optimizer and a way to train together.

    Attributes:
        samples_per_epoch: the samples of all peers together after which they average.
        overlap: whether training goes on while an averaging is under way.
        same_parameters: whether all peers must hold the same parameters all the time.
    """

    name: str = ""
    same_parameters: bool = False

    def __init__(self, samples_per_epoch: float, *, overlap: bool) -> None:
        if not 0 < samples_per_epoch < float("inf"):
            raise ConfigError(
                f"samples per epoch: {samples_per_epoch!r}; give a positive number, the samples "
                "of all peers together between two averagings"
            )
        self.samples_per_epoch = float(samples_per_epoch)
        self.overlap = overlap
        self.samples: float = 0.0
        """Samples of this peer since its last snapshot."""
        self._layouts = _Layouts()
        self._inner: torch.optim.Optimizer | None = None
        self._model: torch.nn.Module | None = None

    def bind(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        """Take the optimizer to drive; once, since a strategy holds that optimizer's state."""
        if self._inner is not None:
            raise ConfigError("this strategy already belongs to an optimizer; make a new one")
        self._inner, self._model = optimizer, model

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        assert self._inner is not None, "bind() comes first"
        return self._inner

    def parameters(self) -> list[Named]:
        """The parameters that are trained."""
        return parameters_of(self.inner, self._model)

    @property
    def layout_known(self) -> bool:
        """Whether `layout` can be asked for already, before the first step."""
        return True

    def layout(self) -> tuple[bytes, int]:
        """Return the schema (8 bytes) and length of the vectors that are exchanged. Peers of
        different strategies or models have different schemas, so they never meet."""
        layout = self._layouts.of(self.parameters() + self._extras())
        schema = hashlib.blake2b(self.name.encode() + layout.schema, digest_size=8)
        return schema.digest(), layout.numel

    @abstractmethod
    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        """Do the work of one ``step()``; ``samples()`` tells its size, after the closure."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Copy out what to average; local work from here on belongs to the next epoch."""

    @abstractmethod
    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        """Take the mean that came for ``snapshot``."""

    @abstractmethod
    def keep_local(self, snapshot: Snapshot) -> None:
        """Go on without the others: this epoch's averaging brought nothing usable."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beyond the wrapped optimizer's state."""
        return {"name": self.name, "samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; raises `ConfigError` for another strategy's."""
        if state["name"] != self.name:
            raise ConfigError(
                f"this state was saved by {state['name']}, and {self.name} cannot load it"
            )
        self.samples = float(state["samples"])

    def _extras(self) -> list[Named]:
        """What is averaged beside the parameters or gradients; comes after them in the vector."""
        return buffers_of(self._model)

    def _collect(self, main: list[Named]) -> Snapshot:
        """Copy ``main`` and the extras into a new vector, and look for non-finite values.

        New each time: groupmates may still ask for the last one after its averaging.
        """
        tensors = main + self._extras()
        layout = self._layouts.of(tensors)
        vector = torch.empty(layout.numel, dtype=torch.float32)
        layout.flatten_into(vector)
        weight, self.samples = self.samples, 0.0
        if is_finite(vector):
            return Snapshot(vector, weight)
        return Snapshot(vector, 0.0, first_nonfinite(tensors) or "a value beyond float32")


@torch.no_grad()
def _keep_positive(extras: list[Named], snapshot: torch.Tensor) -> None:
    """Clear what a difference made negative in tensors that had nothing negative: a second
    moment or a variance that has decayed since the snapshot may be moved below zero."""
    at = snapshot.numel()
    for named in reversed(extras):
        start = at - named.tensor.numel()
        if bool((snapshot[start:at] >= 0).all().item()):
            named.tensor.clamp_(min=0)
        at = start


class _Layouts:
    """Makes layouts, and keeps the last one as long as the tensors are the very same. (Loading
    a state replaces the optimizer's tensors.)"""

    def __init__(self) -> None:
        self._tensors: list[Named] = []
        self._layout: VectorLayout | None = None

    def of(self, tensors: list[Named]) -> VectorLayout:
        same = len(tensors) == len(self._tensors) and all(
            a.tensor is b.tensor for a, b in zip(tensors, self._tensors, strict=True)
        )
        if self._layout is None or not same:
            self._tensors = tensors
            self._layout = VectorLayout([(t.name, t.tensor) for t in tensors])
        return self._layout


@final
class LocalSGD(Strategy):
    r"""Every peer trains by itself, and every epoch the parameters are averaged (the paper's
    Moshpit SGD).

    The mean over peers is weighted by their samples, :math:`\bar\theta = \sum_i n_i \theta_i
    / \sum_i n_i`. It arrives while training goes on, and is applied as a difference,
    :math:`\theta \leftarrow \theta + \bar\theta - \theta_{\text{snapshot}}`, so that the steps
    made in between survive; where none was made, the mean itself is assigned.

    Args:
        samples_per_epoch: samples of all peers together between two averagings.
        average_statistics: also average what the optimizer keeps per parameter (momenta,
            second moments), in the same way. Step counts stay each peer's own.
        overlap: go on training while an averaging is under way; otherwise ``step()`` waits.

    Example:
        >>> LocalSGD(samples_per_epoch=4096).overlap
        True
    """

    name = "LocalSGD"

    def __init__(
        self,
        samples_per_epoch: float,
        *,
        average_statistics: bool = False,
        overlap: bool = True,
    ) -> None:
        super().__init__(samples_per_epoch, overlap=overlap)
        self.average_statistics = average_statistics
        self._steps_since_snapshot = 0
        self._stepped = False

    @property
    def layout_known(self) -> bool:
        return self._stepped or not self.average_statistics

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        if closure is None:
            count = samples()  # first: an unknown size must not leave a step half made
            loss = self.inner.step()
        else:
            loss = self.inner.step(closure)
            count = samples()
        self.samples += count
        self._steps_since_snapshot += 1
        self._stepped = True
        return loss

    def snapshot(self) -> Snapshot:
        taken = self._collect(self.parameters())
        self._steps_since_snapshot = 0
        return taken

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        extras = self._extras()
        layout = self._layouts.of(self.parameters() + extras)
        if self._steps_since_snapshot == 0 or snapshot.nonfinite is not None:
            layout.write_back(mean)
        else:
            layout.add_delta(mean, snapshot.vector)
            _keep_positive(extras, snapshot.vector)
        if snapshot.nonfinite is not None:
            forget_nonfinite_statistics(self.inner, self.parameters())

    def keep_local(self, snapshot: Snapshot) -> None:
        """The local parameters simply stay."""

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "stepped": self._stepped}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._stepped = bool(state["stepped"])

    def _extras(self) -> list[Named]:
        extras = super()._extras()
        if self.average_statistics:
            if not self._stepped:
                raise ConfigError(
                    "average_statistics: the optimizer has no statistics before its first step"
                )
            extras += statistics_of(self.inner, self.parameters())
        return extras


@final
class GradientAveraging(Strategy):
    r"""One large synchronous batch, made by all peers together.

    ``step()`` accumulates the gradient, weighted by its samples, and leaves the parameters
    alone until the swarm has ``target_batch_size`` samples. Then the mean gradient
    :math:`\sum_i n_i g_i / \sum_i n_i` is put into ``.grad`` and every peer makes the same
    optimizer step. Peers must start from the same parameters. Since ``step()`` consumes the
    gradients (``.grad`` is cleared), ``zero_grad()`` in between does neither harm nor good.

    The parameters that a peer begins with (when its optimizer is wrapped: load a checkpoint
    before) are part of its schema, so peers that begin with others never meet (`LayoutError`). A
    fingerprint of the parameters travels with the gradients; if the peers' differ, the averaging
    raises `DriftError` and no step is made.

    Where an averaging brings nothing, the accumulated local gradient is applied. Then, or when
    it missed an epoch or joins late, this peer's parameters are not the others' any more, and
    its gradients would harm them: the next ``step()`` raises `DriftError`.

    Args:
        target_batch_size: samples of all peers together per optimizer step.
        max_grad_norm: clip the averaged gradient to this norm (before averaging, clipping
            would depend on the micro-batch).

    Example:
        >>> GradientAveraging(target_batch_size=1024, max_grad_norm=1.0).overlap
        False
    """

    name = "GradientAveraging"
    same_parameters = True

    def __init__(self, target_batch_size: float, *, max_grad_norm: float | None = None) -> None:
        super().__init__(target_batch_size, overlap=False)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm: {max_grad_norm!r}; give a positive number or None")
        self.max_grad_norm = max_grad_norm
        self.skipped_batches = 0
        """Batches that were left out because their gradient was not finite."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._fingerprint = torch.zeros(2)

    def _extras(self) -> list[Named]:
        return [*super()._extras(), Named("fingerprint", self._fingerprint)]

    def layout(self) -> tuple[bytes, int]:
        schema, numel = super().layout()
        start = torch.round(fingerprint(self.parameters()) / FINGERPRINT_TOLERANCE)
        text = " ".join(str(int(number.item())) for number in start).encode()
        return hashlib.blake2b(schema + text, digest_size=8).digest(), numel

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._accumulate(samples())
        return loss

    @torch.no_grad()
    def _accumulate(self, samples: float) -> None:
        parameters = self.parameters()
        gradients = [Named(p.name, p.tensor.grad) for p in parameters if p.tensor.grad is not None]
        bad = first_nonfinite(gradients)
        if bad is not None:
            self.skipped_batches += 1
            log.warning("the gradient of %s is not finite: this batch is left out", bad)
        else:
            for named in parameters:
                if named.tensor.grad is not None:
                    self._sum_of(named.tensor).add_(named.tensor.grad, alpha=samples)
            self.samples += samples
        for named in parameters:
            named.tensor.grad = None

    def snapshot(self) -> Snapshot:
        self._fingerprint.copy_(fingerprint(self.parameters()))
        sums = [Named(p.name, self._sum_of(p.tensor)) for p in self.parameters()]
        for named in sums:
            named.tensor.div_(max(self.samples, 1e-30))
        taken = self._collect(sums)
        for named in sums:
            named.tensor.zero_()
        return taken

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        parameters = self.parameters()
        means = [Named(p.name, torch.empty_like(p.tensor)) for p in parameters]
        mine = self._fingerprint.clone()
        self._layouts.of(means + self._extras()).write_back(mean)
        if not torch.allclose(self._fingerprint, mine, rtol=0, atol=FINGERPRINT_TOLERANCE):
            raise DriftError(
                "the peers hold different parameters, so their gradients do not belong together: "
                "some have made steps without the others. Start them again from one checkpoint or "
                "with the same torch.manual_seed, and let them find each other before the first "
                "step: swarm.wait_for_peers(n)"
            )
        for named, gradient in zip(parameters, means, strict=True):
            # A parameter that nobody used keeps its None, as without Moshpit.
            used = bool(gradient.tensor.any().item())
            named.tensor.grad = gradient.tensor if used else None
        if self.max_grad_norm is not None:
            torch.nn.utils.clip_grad_norm_([p.tensor for p in parameters], self.max_grad_norm)
        self.inner.step()
        for named in parameters:
            named.tensor.grad = None

    def keep_local(self, snapshot: Snapshot) -> None:
        if snapshot.weight > 0:
            self.adopt(snapshot, snapshot.vector)

    def _sum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._sums[parameter]

    def state_dict(self) -> dict[str, Any]:
        sums = {p.name: self._sum_of(p.tensor).clone() for p in self.parameters()}
        return {**super().state_dict(), "gradient_sums": sums}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        for named in self.parameters():
            self._sum_of(named.tensor).copy_(state["gradient_sums"][named.name])
