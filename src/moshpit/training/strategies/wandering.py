"""Local steps away from a common place, and back: what makes differences into pseudo-gradients."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import final

import torch

from moshpit.errors import ConfigError
from moshpit.training.tensors import Named


@final
class Wandering:
    """Plain SGD steps of a peer's own, undone before the swarm's step.

    Args:
        rate: their learning rate.

    Raises:
        ConfigError: a rate that makes no sense.
    """

    def __init__(self, rate: float) -> None:
        if not 0 < rate < math.inf:
            raise ConfigError(f"local_lr: {rate!r}; give a positive number or None")
        self._rate = rate
        self._start: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, parameters: Sequence[Named]) -> None:
        """Go against the gradients."""
        if not self._start:
            self._start = [named.tensor.clone() for named in parameters]
        for named in parameters:
            if named.tensor.grad is not None:
                named.tensor.add_(named.tensor.grad, alpha=-self._rate)

    @torch.no_grad()
    def back(self, parameters: Sequence[Named]) -> None:
        """Be where the first step began."""
        if self._start:
            for named, start in zip(parameters, self._start, strict=True):
                named.tensor.copy_(start)
            self._start = []

    def state_dict(self) -> list[torch.Tensor]:
        """Return where the first step began."""
        return [start.clone() for start in self._start]

    def load_state_dict(self, state: Sequence[torch.Tensor]) -> None:
        """Restore `state_dict`."""
        self._start = [start.clone() for start in state]
