r"""How peers that average gradients become one again after their parameters have parted.

Gradients at other parameters do not belong together, so what is averaged then is the parameters
themselves, in the vector's place for gradients; and, since the next steps must be the same
everywhere, what the optimizer keeps per parameter (momenta, second moments), in one averaging for
each. All with the same masses; so the merged optimizer's state is the mean of both, too.

Four numbers travel in front of each vector: which of these averagings it is for (0: gradients),
the square of that, how many steps the optimizer has made, and whether it keeps anything per
parameter yet (1: yes). Who has made no step has nothing to give: then nothing is averaged but
parameters; if that makes the next steps differ, all have something when they merge again. If the
mean of the squares is not the square of the mean, vectors were mixed that do not belong together:
somebody has not heard of the merging. Nobody who sees that uses the mean, and all who see it give
parameters the next time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

import torch

from moshpit.training.tensors import Named, statistics_of

HEAD: Final = 4  # numbers
_GRADIENTS, _PARAMETERS = 0, 1
_ROUNDING = 1e-4  # of a stage; masses are float64


@final
class ParameterMerge:
    """Where a peer stands in such a merging.

    Attributes:
        head: what travels in front: (4,).
        weight: the mass in each of its averagings.
        mixed: the latest mean was of vectors that do not belong together.
    """

    def __init__(self) -> None:
        self.head = torch.zeros(HEAD)
        self.weight = 0.0
        self.mixed = False
        self._stage = _GRADIENTS

    @property
    def under_way(self) -> bool:
        """Whether the next snapshot is one for it."""
        return self._stage != _GRADIENTS

    @property
    def begun(self) -> bool:
        """Whether parameters are merged, and statistics not yet."""
        return self._stage > _PARAMETERS

    def begin(self) -> None:
        """The next snapshot is of parameters."""
        self._stage = _PARAMETERS

    def part(self, weight: float) -> None:
        """The latest mean, to which this peer gave with so much weight, was of gradients at
        different parameters: nobody uses it."""
        self.begin()
        self.weight = weight
        self.mixed = True

    def end(self) -> None:
        """The next snapshot is of gradients."""
        self._stage = _GRADIENTS
        self.weight = 0.0

    def weigh(self, weight: float) -> float:
        """Return the mass of a snapshot: with what an attempt before has not brought home."""
        if not self.begun:
            self.weight += weight
        return self.weight

    def tensors(self, optimizer: torch.optim.Optimizer, parameters: Sequence[Named]) -> list[Named]:
        """Return what is averaged now, in the order of the parameters; and fill the head."""
        kinds, steps = self._kinds(optimizer, parameters), steps_of(optimizer)
        self.head[:] = torch.tensor([self._stage, self._stage**2, steps, min(kinds, 1)])
        if self._stage <= _PARAMETERS:
            return list(parameters)
        return statistics_of(optimizer, parameters)[self._stage - _PARAMETERS - 1 :: kinds]

    def judge(self, head: torch.Tensor) -> bool:
        """Look at the mean of all heads, and return whether the vector's mean can be used: as what
        all have given it for, who gave anything."""
        stage = round(head[0].item())
        pure = abs(head[0] - stage) < _ROUNDING and abs(head[1] - stage**2) < _ROUNDING
        self.mixed = not pure or (stage == _GRADIENTS and self.under_way)
        self._stage = _PARAMETERS if self.mixed else stage
        return not self.mixed

    def taken(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[Named],
        head: torch.Tensor,
    ) -> None:
        """The mean has taken its place: go on to the next averaging, if there is one."""
        all_keep_some = bool(head[3] > 1 - _ROUNDING)
        if all_keep_some and self._stage <= self._kinds(optimizer, parameters):
            self._stage += 1
            return
        _count_steps(optimizer, round(head[2].item()))
        self.end()

    @staticmethod
    def _kinds(optimizer: torch.optim.Optimizer, parameters: Sequence[Named]) -> int:
        return len(statistics_of(optimizer, parameters)) // len(parameters)


def steps_of(optimizer: torch.optim.Optimizer) -> float:
    """Return how many steps an optimizer has made; 0 where it does not count them."""
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    return max(counts, default=0.0)


def _count_steps(optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Let the optimizer have made so many steps; parameters that were used less often stay so."""
    more = steps - steps_of(optimizer)
    for state in optimizer.state.values():
        if "step" in state:
            state["step"] = state["step"] + more
