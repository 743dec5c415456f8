"""Gradients of earlier batches, for steps that are made of several."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch

from moshpit.training.tensors import Named, first_nonfinite

log = logging.getLogger("moshpit.training")


@final
class Gathered:
    """The sums of this peer's gradients since its last step, weighted by their samples.

    Attributes:
        batches: how many there are.
        samples: how many samples are behind them.
    """

    def __init__(self) -> None:
        self._sums: dict[torch.Tensor, torch.Tensor] = {}
        self.batches = 0
        self.samples = 0.0

    def add(self, parameters: Sequence[Named], samples: float) -> bool:
        """Take a batch's gradients out of the parameters. False if one was not finite."""
        gradients = [Named(p.name, p.tensor.grad) for p in parameters if p.tensor.grad is not None]
        self.batches += 1
        bad = first_nonfinite(gradients)
        if bad is not None:
            log.warning("the gradient of %s is not finite: this batch is left out", bad)
            return False
        for named in parameters:
            if named.tensor.grad is not None:
                self.sum_of(named.tensor).add_(named.tensor.grad, alpha=samples)
            named.tensor.grad = None
        self.samples += samples
        return True

    def sum_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return the sum for a parameter."""
        if parameter not in self._sums:
            self._sums[parameter] = torch.zeros_like(parameter, dtype=torch.float32)
        return self._sums[parameter]

    def known(self, parameter: torch.Tensor) -> torch.Tensor | None:
        """Return the sum for a parameter, if it has had a gradient."""
        return self._sums.get(parameter)

    def nonfinite(self, parameters: Sequence[Named]) -> str | None:
        """Return the name of a parameter whose sum is not finite, and forget all of them then."""
        bad = first_nonfinite([Named(p.name, self.sum_of(p.tensor)) for p in parameters])
        if bad is not None:
            self._sums.clear()
            self.samples = 0.0
        return bad

    def clear(self) -> None:
        """Begin the next step."""
        for total in self._sums.values():
            total.zero_()
        self.batches, self.samples = 0, 0.0

    def state_dict(self, parameters: Sequence[Named]) -> dict[str, Any]:
        """Return what a resumed run needs of it."""
        sums = {p.name: self._sums[p.tensor] for p in parameters if p.tensor in self._sums}
        sums = {name: total.clone() for name, total in sums.items()}
        return {"batches": self.batches, "gathered": self.samples, "gradient_sums": sums}

    def load_state_dict(
        self, state: Mapping[str, Any], parameters: Sequence[Named], batches_max: int
    ) -> None:
        """Restore `state_dict`, with so many batches at most."""
        self.batches = min(int(state["batches"]), batches_max)
        self.samples = float(state["gathered"])
        self._sums.clear()
        for named in parameters:
            if named.name in state["gradient_sums"]:
                self.sum_of(named.tensor).copy_(state["gradient_sums"][named.name])
