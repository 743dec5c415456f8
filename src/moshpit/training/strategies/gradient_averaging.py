"""Average gradients: one large synchronous batch."""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, final

import torch

from moshpit.errors import ConfigError, DriftError
from moshpit.events import EpochReport
from moshpit.training.strategies.agreement import (
    FINGERPRINT_TOLERANCE,
    NUMBERS,
    REPEATS_MAX,
    Agreement,
)
from moshpit.training.strategies.base import Closure, Layouts, Snapshot, Strategy
from moshpit.training.strategies.low_rank import LowRank
from moshpit.training.strategies.merging import HEAD, ParameterMerge
from moshpit.training.strategies.wandering import Wandering
from moshpit.training.tensors import Named, fingerprint, first_nonfinite

_AGREEMENT, _MERGE = slice(0, NUMBERS), slice(NUMBERS, NUMBERS + HEAD)  # of the vector
_NORM_PIECE = 1 << 20  # numbers made float64 at a time

DRIFT = (
    "the peers hold different parameters, so their gradients do not belong together: some have "
    "made steps without the others. Start them again from one checkpoint or with the same "
    "torch.manual_seed, and let them find each other before the first step: "
    "swarm.wait_for_peers(n)"
)

log = logging.getLogger("moshpit.training")


def starting_schema(schema: bytes, parameters: Sequence[Named]) -> bytes:
    """Return a schema that is another one for peers that begin with other parameters."""
    start = torch.round(fingerprint(parameters) / FINGERPRINT_TOLERANCE)
    text = " ".join(str(int(number.item())) for number in start).encode()
    return hashlib.blake2b(schema + text, digest_size=8).digest()


def same_fingerprint(mean: torch.Tensor, mine: torch.Tensor) -> bool:
    """Return whether the peers' fingerprints are this one's."""
    return torch.allclose(mean, mine, rtol=0, atol=FINGERPRINT_TOLERANCE)


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
    fingerprint of the parameters travels with the gradients; if the peers' differ, nobody makes a
    step, and the next averaging is of parameters. (With ``powersgd_rank`` it raises `DriftError`.)

    Where an averaging brings nothing, the accumulated local gradient is applied. Then, or when
    it missed an epoch or joins late, this peer's parameters are not the others' any more, and
    its gradients would harm them: the next ``step()`` fetches the swarm's state, or, where nobody
    can give it, raises `DriftError`.

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
        powersgd_rank: send factors of the gradients, of so many columns, and keep what they lose
            for later (PowerSGD, Vogels et al. 2019); 4 is about 16 times smaller than float32.
            Each step then takes two averagings, so that the epoch number rises by two. Not with
            codecs that need feedback of their own.

        local_lr: between two averagings, also make plain SGD steps of this rate, and undo them
            before the swarm's step. Its gradient is then the averaged difference of parameters,
            divided by this rate and the number of steps: a pseudo-gradient, taken along each
            peer's own way (Reddi et al. 2021, arXiv 2003.00295). For optimizers such as LAMB, whose
            statistics then see what the whole swarm has found.

    Raises:
        ConfigError: settings that make no sense.

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
        powersgd_rank: int | None = None,
        local_lr: float | None = None,
    ) -> None:
        super().__init__(target_batch_size, overlap=False, codec=codec)
        if powersgd_rank is not None and powersgd_rank < 1:
            raise ConfigError(f"powersgd_rank: {powersgd_rank!r}; give 1 or more, such as 4")
        if powersgd_rank is not None and self._needs_feedback:
            raise ConfigError(
                f"powersgd_rank with codec {codec!r}: factors would need a feedback of their own; "
                "use float32, float16 or bfloat16"
            )
        self.powersgd_rank = powersgd_rank
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"max_grad_norm: {max_grad_norm!r}; give a positive number or None")
        self.max_grad_norm = max_grad_norm
        self._wandering: Wandering | None = None
        if local_lr is not None:
            self._wandering = Wandering(local_lr)
            self.name = "GradientAveraging with local steps"
        self.skipped_steps = 0
        """Steps that all peers have skipped because the mean gradient was not finite."""
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self._given: dict[torch.Tensor, torch.Tensor] = {}
        """The gradients of the last snapshot, until it is known what comes of them."""
        self._gave = 0.0
        self._retaken = 0.0
        self._repeats = False
        self._agreement = Agreement()
        self._low_rank: LowRank | None = None
        self._merge = ParameterMerge()
        self._flat_layouts = Layouts()

    def _head(self) -> list[Named]:
        head = [Named("agreement", self._agreement.head), Named("merge", self._merge.head)]
        return head if self._low_rank is None else [*head, Named("phase", self._low_rank.head)]

    @property
    def replays(self) -> bool:
        return self.powersgd_rank is None  # whose two averagings belong together

    @property
    def merges(self) -> bool:
        return self.powersgd_rank is None  # whose vector has no room for parameters

    def merge(self, past: float) -> None:
        """Parameters have parted: they are averaged next, instead of gradients."""
        super().merge(past)
        self._merge.begin()

    def layout(self) -> tuple[bytes, int]:
        schema, numel = super().layout()
        low_rank = self._factors()
        if low_rank is not None:
            schema += f"PowerSGD {self.powersgd_rank}".encode()
            numel = self._before_main() + low_rank.factors.numel()
        return starting_schema(schema, self.parameters()), numel

    def _factors(self) -> LowRank | None:
        """Return the factors, made of the parameters' shapes at first; None without PowerSGD."""
        if self._low_rank is None and self.powersgd_rank is not None:
            schema, _ = super().layout()
            self._low_rank = LowRank(self.powersgd_rank, self.parameters(), schema)
        return self._low_rank

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
        if self._wandering is not None:
            self._wandering.step(parameters)
        self._clear_gradients()

    def skip_batch(self) -> None:
        super().skip_batch()
        self._clear_gradients()

    def _clear_gradients(self) -> None:
        for named in self.parameters():
            named.tensor.grad = None

    def snapshot(self) -> Snapshot:
        if self._wandering is not None:
            self._wandering.back(self.parameters())
        self._agreement.note(self.parameters())
        self._repeats, self._retaken = False, 0.0
        sums = [Named(p.name, self._sum_of(p.tensor)) for p in self.parameters()]
        if self._merge.under_way:
            return self._of_parameters(sums)
        self._merge.head.zero_()
        low_rank = self._factors()
        if low_rank is not None and low_rank.halfway:
            return self._of_factors(low_rank, None)
        for named in sums:
            named.tensor.div_(max(self.samples, 1e-30))
        if low_rank is not None:
            bad = first_nonfinite(sums)
            self._flat_layouts.of(sums).flatten_into(low_rank.gradient)
            if bad is not None:
                low_rank.gradient.zero_()
            low_rank.begin(0.0 if bad is not None else self.samples)
            self.samples = 0.0
            for named in sums:
                named.tensor.zero_()
            return self._of_factors(low_rank, bad)
        taken = self._as_differences(self._collect(sums))
        self._gave = taken.weight
        self._given, self._sums = self._sums, {}
        return taken

    def _of_parameters(self, sums: Sequence[Named]) -> Snapshot:
        """Return parameters, or what the optimizer keeps of them. The gradients since the last
        step belong to parameters that will be others."""
        for named in sums:
            named.tensor.zero_()
        return self._collect_parted(self._merge)

    def _of_factors(self, low_rank: LowRank, bad: str | None) -> Snapshot:
        """Return P or Q; the samples since are the next step's."""
        since, self.samples = self.samples, low_rank.weight
        taken = self._collect([Named("factors", low_rank.factors)])
        self.samples = since
        low_rank.weight = taken.weight
        return taken if bad is None else replace(taken, nonfinite=bad)

    def accepts(self, mean: torch.Tensor, report: EpochReport) -> bool:
        """What not all peers have got is for nobody: all give the same again, at once. A mean of P
        that is not whole is no ground for a Q; one of parameters and gradients is none for
        anything."""
        if self.merges and not self._belong_together(mean):
            return False
        missing = report.stale or any(r.missing for r in report.rounds if len(r.peers) > 1)
        if report.parted and not missing and self._agreement.repeats < REPEATS_MAX:
            self._repeat(report.epoch)
            return False
        return self._low_rank is None or self._low_rank.halfway or not missing

    def _belong_together(self, mean: torch.Tensor) -> bool:
        """Look whether all have given the same thing, at the same parameters."""
        if not self._merge.judge(mean[_MERGE]):
            log.warning("parameters and gradients were mixed: all give parameters the next time")
            return False
        if self._merge.under_way or self._agreement.judge(mean[_AGREEMENT]):
            return True
        log.warning(
            "the peers hold different parameters, so their gradients do not belong together: all "
            "give parameters the next time"
        )
        self._merge.part(self._gave)
        return False

    def _repeat(self, epoch: int) -> None:
        """Nobody takes this mean, all give the same again."""
        log.info("epoch %d: not all peers have the same mean; all give the same again", epoch)
        self._repeats = True
        self._agreement.repeats += 1
        if self._low_rank is not None:
            self._take_back(self._low_rank)
        elif not self._merge.under_way and self._gave > 0:
            for parameter, gradient in self._given.items():
                self._sum_of(parameter).add_(gradient, alpha=self._gave)
            self.samples += self._gave
            self._retaken = self._gave
        self._drop_given()

    def _drop_given(self) -> None:
        """It is known what has come of the gradients of the last snapshot."""
        for gradient in self._given.values():
            gradient.zero_()
        if not self._sums:  # new memory is slow
            self._sums = self._given
        self._given = {}

    @property
    def fresh(self) -> float:
        return self.samples - self._retaken

    @property
    def halfway(self) -> bool:
        if self._repeats or self._merge.begun:
            return True
        return self._low_rank is not None and self._low_rank.halfway

    @property
    def reunites(self) -> bool:
        return self._merge.under_way and not self._merge.begun

    @property
    def settled(self) -> bool:
        return not (self.halfway or self._merge.under_way)

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        self._settle()
        if self._merge.under_way:
            self._adopt_parameters(mean)
        elif self._low_rank is None:
            self._step(snapshot, mean)
        else:
            self._adopt_factors(self._low_rank, snapshot, mean)

    def _settle(self) -> None:
        """What was given is not given again."""
        self._drop_given()
        if self._low_rank is None or self._low_rank.halfway:  # Q is of the same gradients as P
            self._agreement.repeats = 0

    def _adopt_parameters(self, mean: torch.Tensor) -> None:
        self._write_parted(self._merge, mean)
        self._merge.taken(self.inner, self.parameters(), mean[_MERGE])

    def _adopt_factors(self, low_rank: LowRank, snapshot: Snapshot, mean: torch.Tensor) -> None:
        head = low_rank.head.clone()
        layout = self._layouts.of(self._in_order([Named("factors", low_rank.received)]))
        layout.write_back(mean)
        theirs = low_rank.head.clone()
        low_rank.head.copy_(head)
        if not self._agreement.judge(mean[_AGREEMENT]):
            raise DriftError(DRIFT)
        if not low_rank.agrees(theirs):
            log.warning("factors that do not belong together: all make this step anew")
            self._take_back(low_rank)
        elif not low_rank.halfway:
            low_rank.take_p()
        else:
            self._step(snapshot, low_rank.take_q(), flat=True)

    def _take_back(self, low_rank: LowRank) -> None:
        """Give up; the gradient goes back into the sums."""
        sums = [Named(p.name, self._sum_of(p.tensor)) for p in self.parameters()]
        layout, given = self._flat_layouts.of(sums), low_rank.gradient * low_rank.weight
        layout.add_delta(given, torch.zeros_like(given))
        self.samples += low_rank.weight
        low_rank.give_up()

    def _step(self, snapshot: Snapshot, mean: torch.Tensor, *, flat: bool = False) -> None:
        """Make a step with the mean gradient; ``flat``: that is all of the mean."""
        parameters = self.parameters()
        means = [Named(p.name, torch.empty_like(p.tensor)) for p in parameters]
        layout = self._layouts.of(means if flat else self._in_order(means))
        layout.write_back(self._clipped(mean, means))
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
        self._settle()
        self._merge.end()
        if self._low_rank is not None:
            self._low_rank.give_up()
        self._skip_step("the mean gradient holds NaN or infinity")

    def keep_local(self, snapshot: Snapshot) -> None:
        if self._repeats:
            return
        self._settle()
        if self._merge.mixed:  # so nobody makes a step
            self._merge.mixed = False
        elif self._merge.under_way:  # there is nobody
            self._merge.end()
        elif self._low_rank is not None:
            self._low_rank.give_up()
            if self._low_rank.weight > 0:
                self._step(snapshot, self._low_rank.gradient, flat=True)
        elif snapshot.weight > 0:
            self.adopt(snapshot, snapshot.vector)

    def _sum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._sums[parameter]

    def state_dict(self) -> dict[str, Any]:
        sums = {p.name: self._sum_of(p.tensor).clone() for p in self.parameters()}
        low_rank = None if self._low_rank is None else self._low_rank.state_dict()
        away = [] if self._wandering is None else self._wandering.state_dict()
        own = {"gradient_sums": sums, "low_rank": low_rank, "wandering": away}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self._wandering is not None:
            self._wandering.load_state_dict(state["wandering"])
        self._agreement.repeats = 0
        for named in self.parameters():
            self._sum_of(named.tensor).copy_(state["gradient_sums"][named.name])
        low_rank, saved = self._factors(), state.get("low_rank")
        if low_rank is not None and saved is not None:
            low_rank.load_state_dict(saved)

    def taken_over(self) -> None:
        super().taken_over()
        if self._wandering is not None:
            self._wandering.back(self.parameters())
        if self._low_rank is not None:
            self._low_rank.taken_over()
        self._merge.end()
        self._drop_given()
        self._repeats, self._retaken = False, 0.0
        for total in self._sums.values():
            total.zero_()
