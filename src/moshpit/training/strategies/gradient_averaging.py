"""Average gradients: one large synchronous batch."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, final

import torch

from moshpit.errors import ConfigError, DriftError
from moshpit.training.strategies.base import Closure, Snapshot, Strategy
from moshpit.training.tensors import Named, fingerprint, first_nonfinite

FINGERPRINT_TOLERANCE = 1e-3  # guess: of values of order 1; kinds of hardware differ by rounding
_NORM_PIECE = 1 << 20  # numbers made float64 at a time

log = logging.getLogger("moshpit.training")


def starting_schema(schema: bytes, parameters: Sequence[Named]) -> bytes:
    """Return a schema that is another one for peers that begin with other parameters."""
    start = torch.round(fingerprint(parameters) / FINGERPRINT_TOLERANCE)
    text = " ".join(str(int(number.item())) for number in start).encode()
    return hashlib.blake2b(schema + text, digest_size=8).digest()


def check_fingerprint(mean: torch.Tensor, mine: torch.Tensor) -> None:
    """Raise `DriftError` if the peers' fingerprints differ from this one's."""
    if not torch.allclose(mean, mine, rtol=0, atol=FINGERPRINT_TOLERANCE):
        raise DriftError(
            "the peers hold different parameters, so their gradients do not belong together: "
            "some have made steps without the others. Start them again from one checkpoint or "
            "with the same torch.manual_seed, and let them find each other before the first "
            "step: swarm.wait_for_peers(n)"
        )


def norm_of(vector: torch.Tensor) -> float:
    """Return the norm, summed in float64 piece by piece."""
    starts = range(0, vector.numel(), _NORM_PIECE)
    pieces = [vector[at : at + _NORM_PIECE] for at in starts]
    return math.sqrt(sum(piece.double().square().sum().item() for piece in pieces))


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

    With `torch.amp.GradScaler`, what is averaged is unscaled, so each peer may have a scale of
    its own. A batch that overflows at one peer is left out there; if the mean does (it is more
    than the parameters' dtype can hold), all peers skip the same step.

    Args:
        target_batch_size: samples of all peers together per optimizer step.
        max_grad_norm: clip the averaged gradient to this norm (before averaging, clipping
            would depend on the micro-batch).
        codec: how this peer's gradients are written on the wire, such as ``"int8"`` or
            ``"topk"``; ``"auto"``: as the links ask for. What it loses is sent later
            (`ErrorFeedback`). Buffers are exact.

    Example:
        >>> GradientAveraging(target_batch_size=1024, max_grad_norm=1.0).overlap
        False
    """

    name = "GradientAveraging"
    same_parameters = True

    def __init__(
        self,
        target_batch_size: float,
        *,
        max_grad_norm: float | None = None,
        codec: str = "float32",
    ) -> None:
        super().__init__(target_batch_size, overlap=False, codec=codec)
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm: {max_grad_norm!r}; give a positive number or None")
        self.max_grad_norm = max_grad_norm
        self.skipped_steps = 0
        """Steps that all peers have skipped because the mean gradient was not finite."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._fingerprint = torch.zeros(2)

    def _head(self) -> list[Named]:
        return [Named("fingerprint", self._fingerprint)]

    def layout(self) -> tuple[bytes, int]:
        schema, numel = super().layout()
        return starting_schema(schema, self.parameters()), numel

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
            log.warning("the gradient of %s is not finite: this batch is left out", bad)
            self.skip_batch()
            return
        for named in parameters:
            if named.tensor.grad is not None:
                self._sum_of(named.tensor).add_(named.tensor.grad, alpha=samples)
        self.samples += samples
        self._clear_gradients()

    def skip_batch(self) -> None:
        super().skip_batch()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for named in self.parameters():
            named.tensor.grad = None

    def snapshot(self) -> Snapshot:
        self._fingerprint.copy_(fingerprint(self.parameters()))
        sums = [Named(p.name, self._sum_of(p.tensor)) for p in self.parameters()]
        for named in sums:
            named.tensor.div_(max(self.samples, 1e-30))
        taken = self._collect(sums)
        for named in sums:
            named.tensor.zero_()
        return self._as_differences(taken)

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        parameters = self.parameters()
        means = [Named(p.name, torch.empty_like(p.tensor)) for p in parameters]
        mine = self._fingerprint.clone()
        layout = self._layouts.of(self._in_order(means))
        layout.write_back(self._clipped(mean, means))
        check_fingerprint(self._fingerprint, mine)
        bad = first_nonfinite(means)
        if bad is not None:
            if snapshot.feedback is not None:  # what is left of such numbers would spoil others
                snapshot.feedback.undo()
            self._skip_step(f"the mean gradient of {bad} is more than its dtype can hold")
            return
        for named, gradient in zip(parameters, means, strict=True):
            # A parameter that nobody used keeps its None, as without Moshpit.
            used = bool(gradient.tensor.any().item())
            named.tensor.grad = gradient.tensor if used else None
        self.inner.step()
        self._clear_gradients()

    def _clipped(self, mean: torch.Tensor, gradients: Sequence[Named]) -> torch.Tensor:
        """Return the mean with its gradients clipped: in float32, before they are rounded to
        the parameters' dtypes, whose own norm might overflow."""
        if self.max_grad_norm is None:
            return mean
        stop = mean.numel()
        start = stop - sum(g.tensor.numel() for g in gradients)
        norm = norm_of(mean[start:stop])
        if norm <= self.max_grad_norm:
            return mean
        clipped = mean.clone()
        clipped[start:stop].mul_(self.max_grad_norm / norm)
        return clipped

    def _skip_step(self, why: str) -> None:
        self.skipped_steps += 1
        log.warning("%s: all peers skip this step", why)

    def overflowed(self, snapshot: Snapshot) -> None:
        """Make no step: all peers see the same mean, and parameters must stay the same."""
        self._skip_step("the mean gradient holds NaN or infinity")

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

    def taken_over(self) -> None:
        super().taken_over()
        for total in self._sums.values():
            total.zero_()
