r"""DiLoCo: many local steps, then one outer Nesterov step on the averaged difference.

Every peer keeps two vectors that are the same at all peers: the anchor :math:`a`, from which
the local steps began, and the outer momentum :math:`m`. Peers exchange differences
:math:`a - \theta_i`; who has the complete mean :math:`g` makes the outer step (Nesterov's, as
`torch.optim.SGD` writes it)

.. math:: m \leftarrow \mu m + g, \qquad a \leftarrow a - \eta (g + \mu m).

Which is wrong as soon as one peer makes a step and another does not: from then on their
differences belong to different anchors. Nobody can exclude that (a chunk may be missing at one
member only), so it is noticed and mended, with what travels in front of each vector:

- *Numbers of agreement.* Fingerprints of anchor and momentum. Their mean is everybody's own
  value only if all hold the same. Whoever sees another makes no step, and next time sends its
  parameters instead of a difference.
- *The kind*: 0 for a difference, 1 for parameters. If the mean is in between, the vectors do not
  belong together: nobody who sees that takes the result, and all send parameters next time. They
  lie in the first chunk, and no chunk is used that holds more mass than that one.
- If all sent parameters, their mean is taken as in `LocalSGD`, partial or not: the work of all is
  in it. It is the new anchor, and momentum starts from zero. Who got it in full sends differences
  again; who did not stays with parameters, so that the others come back to them, too.
- A mean of differences that is not complete is not used. The parameters stay, so this epoch's
  difference is part of the next one, with its samples. After more than `CARRIED_MAX` such epochs
  in a row a peer asks for parameters: on a network where nothing is ever complete, DiLoCo is
  `LocalSGD`.

docs/decisions/0016-diloco.md has the reasons.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from moshpit.errors import ConfigError
from moshpit.events import EpochReport, Outcome, RoundReport
from moshpit.tensors.codecs import codec_named
from moshpit.training.strategies.base import (
    AUTO,
    Closure,
    Layouts,
    Snapshot,
    Strategy,
    keep_positive,
)
from moshpit.training.tensors import (
    Named,
    fingerprint,
    first_nonfinite,
    forget_nonfinite_statistics,
)

CARRIED_MAX = 2  # guess: epochs in a row; then differences are large and partial means better
ANCHOR_TOLERANCE = 1e-4  # guess: between rounding (1e-7) and another group's mean (1e-3)
MOMENTUM_TOLERANCE = 0.02  # guess: between a lossy codec's noise and another mean (0.1)
OUTSIDER_AGE = 0.5  # guess: a peer with less than this share of the mean age only receives
_PARAMETER_CODEC = "float16"  # where the one for differences is too coarse for parameters
_ROUNDING = 1e-6

_KIND, _ANCHOR, _MOMENTUM, _AGE = 0, slice(1, 3), slice(3, 5), 5
_HEAD = 6


@dataclass(frozen=True, slots=True)
class Nesterov:
    """The outer optimizer: SGD with Nesterov momentum on the averaged difference.

    Attributes:
        lr: outer learning rate; 1 with ``momentum=0`` is plain averaging of parameters.
        momentum: of the outer steps, from 0 to below 1.

    Raises:
        ConfigError: values that make no sense.

    Example:
        >>> Nesterov(lr=1.0, momentum=0.0)
        Nesterov(lr=1.0, momentum=0.0)

    Source: DiLoCo (arXiv 2311.08105) §3.1 uses 0.7 and 0.9.
    """

    lr: float = 0.7
    momentum: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.lr < float("inf"):
            raise ConfigError(f"outer lr: {self.lr!r}; give a positive number, such as 0.7")
        if not 0 <= self.momentum < 1:
            raise ConfigError(f"outer momentum: {self.momentum!r}; give 0 or more, below 1")

    def step(self, anchor: torch.Tensor, momentum: torch.Tensor, mean: torch.Tensor) -> None:
        """Move ``anchor`` and ``momentum`` in place by the mean difference; all (numel,)."""
        momentum.mul_(self.momentum).add_(mean)
        anchor.add_(mean, alpha=-self.lr).add_(momentum, alpha=-self.lr * self.momentum)


@final
class DiLoCo(Strategy):
    r"""Every peer trains by itself, and every epoch an outer optimizer steps along the averaged
    difference (Douillard et al., arXiv 2311.08105).

    For parameters :math:`\theta_i` after :math:`n_i` samples from the common anchor :math:`a`,
    the outer gradient is :math:`g = \sum_i n_i (a - \theta_i) / \sum_i n_i`. The step is made
    on a complete mean only; otherwise the difference is carried into the next epoch. Peers whose
    anchors or momenta differ (one missed a step, or joined late) average their parameters once,
    as `LocalSGD` does, and go on from there with a momentum of zero.

    Args:
        samples_per_epoch: samples of all peers together between two outer steps; more than
            for `LocalSGD`, typically hundreds of local steps.
        outer: the outer optimizer.
        overlap: go on training while an averaging is under way (local steps made meanwhile are
            kept, as in `LocalSGD`); otherwise ``step()`` waits.
        codec: how this peer's differences are written on the wire, such as ``"int4"`` or
            ``"topk"``; ``"auto"``: as the links ask for. What it loses is sent later
            (`ErrorFeedback`). Buffers are exact, and parameters at least float16.

    Example:
        >>> DiLoCo(samples_per_epoch=65536).outer
        Nesterov(lr=0.7, momentum=0.9)

    Source: issue 3 (8); docs/decisions/0016-diloco.md.
    """

    name = "DiLoCo"

    def __init__(
        self,
        samples_per_epoch: float,
        outer: Nesterov | None = None,
        *,
        overlap: bool = True,
        codec: str = "float32",
    ) -> None:
        super().__init__(samples_per_epoch, overlap=overlap, codec=codec)
        coarse = codec != AUTO and codec_named(codec).differences_only
        self._parameter_codec = _PARAMETER_CODEC if coarse else codec
        self.outer = outer or Nesterov()
        self.outer_steps = 0
        """Outer steps that this peer has made."""
        self.realignments = 0
        """Averagings of parameters that this peer took instead of an outer step."""
        self._main_layouts = Layouts()
        self._anchor: torch.Tensor | None = None
        self._momentum = torch.empty(0)
        self._agreement = torch.zeros(_HEAD)
        self._carried = 0.0
        self._carried_epochs = 0
        self._age = 0
        self._sends_parameters = False
        self._only_takes = False
        self._pending_is_parameters = False
        self._settled = True
        self._steps_since_snapshot = 0

    # --- the vector -------------------------------------------------------------------------

    def _head(self) -> list[Named]:
        return [Named("agreement", self._agreement)]

    def _main(self) -> slice:
        """The place of the parameters in the vector."""
        start = self._before_main()
        return slice(start, start + self._main_layouts.of(self.parameters()).numel)

    def _start(self) -> torch.Tensor:
        """Return the anchor, made of the parameters at first."""
        if self._anchor is None:
            layout = self._main_layouts.of(self.parameters())
            self._anchor = torch.empty(layout.numel)
            layout.flatten_into(self._anchor)
            self._momentum = torch.zeros(layout.numel)
        return self._anchor

    def _base(self) -> torch.Tensor:
        """Return the anchor as the parameters hold it: in float16 they round it, and that is
        no work of theirs."""
        anchor, parameters = self._start(), [p.tensor for p in self.parameters()]
        if all(p.dtype in (torch.float32, torch.float64) for p in parameters):
            return anchor
        layout, base = self._main_layouts.of(self.parameters()), torch.empty_like(anchor)
        rounded = [torch.empty_like(p, device="cpu") for p in parameters]
        layout.write_back(anchor, rounded)
        layout.flatten_into(base, rounded)
        return base

    # --- the contract -----------------------------------------------------------------------

    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        self._start()
        loss = self._inner_step(closure, samples)
        self._steps_since_snapshot += 1
        return loss

    @property
    def replays(self) -> bool:
        return True

    @property
    def merges(self) -> bool:
        return True

    def merge(self, past: float) -> None:
        """The sides' anchors differ: their parameters are averaged, and are the new anchor."""
        super().merge(past)
        self._sends_parameters, self._only_takes = True, False
        self._carried = 0.0  # it is in the past

    def snapshot(self) -> Snapshot:
        base = self._base()
        self._pending_is_parameters = self._sends_parameters
        self._agreement[_KIND] = float(self._pending_is_parameters)
        self._agreement[_ANCHOR] = fingerprint([Named("anchor", self._start())])
        self._agreement[_MOMENTUM] = fingerprint([Named("momentum", self._momentum)])
        self._agreement[_AGE] = self._age
        self._age += 1
        taken = self._collect(self.parameters())
        self._carried += taken.weight  # until somebody has it
        weight = 0.0 if taken.nonfinite is not None or self._only_takes else self._carried
        self._only_takes = False
        self._settled = True
        self._steps_since_snapshot = 0
        taken = replace(taken, weight=weight)
        if self._pending_is_parameters:
            return replace(taken, codec=self._parameter_codec)
        part = taken.vector[self._main()]
        torch.sub(base, part, out=part)
        return self._as_differences(taken)

    def accepts(self, mean: torch.Tensor, report: EpochReport) -> bool:
        whole, heard = _is_whole(report), _first_chunk_came(report)
        theirs = mean[:_HEAD]
        kind = theirs[_KIND].item()
        if self._pending_is_parameters:
            taken = heard and kind > 1 - _ROUNDING and _first_chunk_stands_for_all(report)
            self._sends_parameters = not (taken and whole)
            self._settled = taken and whole
        else:
            agreed = kind < _ROUNDING and self._agrees(theirs)
            taken = whole and agreed
            if heard and not agreed:
                self._sends_parameters = True
            self._settled = taken
        if heard:
            age = theirs[_AGE].item()
            outside = self._agreement[_AGE].item() < OUTSIDER_AGE * age
            self._only_takes = self._sends_parameters and outside
            if taken:
                self._age = max(self._age, round(age) + 1)
        return taken

    def _agrees(self, theirs: torch.Tensor) -> bool:
        off = (theirs - self._agreement).abs()
        return bool(
            (off[_ANCHOR] < ANCHOR_TOLERANCE).all() and (off[_MOMENTUM] < MOMENTUM_TOLERANCE).all()
        )

    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        main, anchor = self._main(), self._start()
        before: torch.Tensor | None = None  # only for steps made since
        same = self._steps_since_snapshot == 0 or snapshot.was_replaced_by(mean)
        if not same and snapshot.nonfinite is None:
            before = snapshot.vector
        if self._pending_is_parameters:
            anchor.copy_(mean[main])
            self._momentum.zero_()
            self.realignments += 1
            if self._feedback is not None:  # it belongs to an anchor that is gone
                self._feedback.reset()
        else:
            if before is not None:
                before = before.clone()
                torch.sub(self._base(), snapshot.vector[main], out=before[main])
            self.outer.step(anchor, self._momentum, mean[main])
            mean = mean.clone()
            mean[main] = anchor
            self.outer_steps += 1
        self._carried, self._carried_epochs = 0.0, 0
        self._move(snapshot, before, mean)

    def _move(self, snapshot: Snapshot, before: torch.Tensor | None, target: torch.Tensor) -> None:
        """Go to ``target``, with the local steps made since ``before`` if they are worth it."""
        parameters, extras = self.parameters(), self._extras()
        layout = self._layouts.of(self._in_order(parameters))
        if before is None:
            layout.write_back(target)
        else:
            layout.add_delta(target, before)
            keep_positive(extras, _HEAD, before)
        if snapshot.nonfinite is not None:
            forget_nonfinite_statistics(self.inner, parameters)

    def keep_local(self, snapshot: Snapshot) -> None:
        """Carry the difference and its samples into the next epoch."""
        self._carried_epochs += 1
        if self._carried_epochs > CARRIED_MAX:
            self._sends_parameters = True
        if snapshot.nonfinite is not None:  # there is nothing worth keeping
            parameters = self.parameters()
            if first_nonfinite(parameters) is not None:
                self._main_layouts.of(parameters).write_back(self._start())
                self._carried = 0.0
            forget_nonfinite_statistics(self.inner, parameters)

    @property
    def settled(self) -> bool:
        return self._settled

    # --- saving -----------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            **super().state_dict(),
            "anchor": None if self._anchor is None else self._anchor.clone(),
            "momentum": self._momentum.clone(),
            "outer_steps": self.outer_steps,
            "realignments": self.realignments,
            "carried": self._carried,
            "carried_epochs": self._carried_epochs,
            "age": self._age,
            "sends_parameters": self._sends_parameters,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._anchor = None if state["anchor"] is None else state["anchor"].clone()
        self._momentum = state["momentum"].clone()
        self.outer_steps = int(state["outer_steps"])
        self.realignments = int(state["realignments"])
        self._carried = float(state["carried"])
        self._carried_epochs = int(state["carried_epochs"])
        self._age = int(state["age"])
        self._sends_parameters = bool(state["sends_parameters"])

    def taken_over(self) -> None:
        super().taken_over()
        self._carried, self._carried_epochs = 0.0, 0
        if self._anchor is not None:  # that peer's local steps are its own contribution
            self._main_layouts.of(self.parameters()).write_back(self._anchor)


def _met(report: EpochReport) -> list[RoundReport]:
    """The rounds in which somebody else was there."""
    return [r for r in report.rounds if len(r.peers) > 1]


def _is_whole(report: EpochReport) -> bool:
    """Whether every chunk is the mean of everybody, as far as this peer can know: where another
    group lost a contribution, there is less mass behind the chunk."""
    if report.outcome is not Outcome.COMPLETE or any(r.missing for r in _met(report)):
        return False
    masses = report.rounds[-1].masses
    return max(masses) - min(masses) <= _ROUNDING * max(masses)


def _first_chunk_came(report: EpochReport) -> bool:
    return all(0 not in r.missing for r in _met(report))


def _first_chunk_stands_for_all(report: EpochReport) -> bool:
    """Whether who is in any chunk is in the first one, too, as far as this peer can know."""
    last = report.rounds[-1]
    seats = all(
        mask & ~last.ledger[0] == 0 for c, mask in enumerate(last.ledger) if c not in last.missing
    )
    return seats and max(last.masses) <= last.masses[0] * (1 + _ROUNDING)
