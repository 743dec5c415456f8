"""What peers that average gradients while they are computed must agree on: the first numbers of the
vector, which every piece of it waits for.

Two are a fingerprint of the parameters, one says how much of the mass has a gradient that is not
finite, and the others what the vector is of (`ParameterMerge`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Final, final

import torch

from moshpit.training.piecewise import GlobalStep
from moshpit.training.strategies.gradient_averaging import same_fingerprint
from moshpit.training.strategies.merging import HEAD, ParameterMerge
from moshpit.training.tensors import Named, fingerprint

log = logging.getLogger("moshpit.training")

OWN: Final = 3
NUMBERS: Final = OWN + HEAD
_PRINT, _SPOILED, _MERGE = slice(0, 2), 2, slice(OWN, NUMBERS)


@final
class Accord:
    """What one peer says of itself in front of its vectors.

    Attributes:
        merge: where it stands in a merging of parameters.
        gave: the weight of its latest gradients.
    """

    def __init__(self) -> None:
        self._own = torch.zeros(OWN)
        self.merge = ParameterMerge()
        self.gave = 0.0

    @property
    def tensors(self) -> list[Named]:
        """What travels in front."""
        return [Named("agreement", self._own), Named("merge", self.merge.head)]

    def note(self, parameters: Sequence[Named]) -> None:
        """Say at which parameters this peer is."""
        self._own[_PRINT] = fingerprint(parameters)
        self._own[_SPOILED] = 0.0

    def write(self, vector: torch.Tensor) -> None:
        """Put it in front of a vector of gradients."""
        self.merge.head.zero_()
        vector[:OWN] = self._own
        vector[_MERGE] = 0.0

    @staticmethod
    def spoil(vector: torch.Tensor) -> None:
        """Say that a gradient is not finite."""
        vector[_SPOILED] = 1.0

    def judge(self, step: GlobalStep) -> bool:
        """Look whether all have given the same thing, at the same parameters. If not, all who see
        that skip the step, and give parameters the next time.

        Args:
            step: learns whether it is skipped, and whether its mean is one of parameters.

        Returns:
            Whether all skip it because a gradient is not finite.
        """
        first = step.means(0, NUMBERS)
        if step.weight == 0:  # perhaps nobody had anything
            step.skipped = not any(m > 0 for r in step.report().rounds for m in r.masses)
        if not step.skipped:
            self._compare(step, first)
        if step.skipped or not bool((first[_SPOILED] > 0).item()):
            return False
        step.skipped = True
        log.warning("a gradient is not finite, here or at another peer: all skip this step")
        return True

    def _compare(self, step: GlobalStep, first: torch.Tensor) -> None:
        if not self.merge.judge(first[_MERGE]):
            log.warning("parameters and gradients were mixed: all give parameters the next time")
            step.skipped = True
        elif self.merge.under_way:
            step.merges = True
        elif not same_fingerprint(first[_PRINT], self._own[_PRINT]):
            log.warning(
                "the peers hold different parameters, so their gradients do not belong together: "
                "all give parameters the next time"
            )
            self.merge.part(self.gave)
            step.skipped = True

    def taken(
        self, inner: torch.optim.Optimizer, parameters: Sequence[Named], first: torch.Tensor
    ) -> None:
        """A mean of parameters or statistics has taken its place."""
        self.merge.taken(inner, parameters, first[_MERGE])
