r"""Whether all peers that average gradients hold the same parameters, and do the same thing.

Six numbers travel in front of the gradients, so that their mean tells everybody the same:

- Two fingerprints :math:`f` of the parameters, each as a point on a circle,
  :math:`(\cos 2\pi f/P, \sin 2\pi f/P)`. The mean of equal points lies on the circle, and that of
  points that differ inside of it: with a spread :math:`\sigma` at
  :math:`1 - \frac12 (2\pi\sigma/P)^2`. How far a peer's own parameters are from the mean's says
  less: a majority would not see a few that differ, which see that they do.
- How often these gradients were given before (0: never), and the square of that. If the mean of the
  squares is not the square of the mean, some have used a mean that others give again.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, final

import torch

from moshpit.training.tensors import Named, fingerprint

FINGERPRINT_TOLERANCE: Final = 1e-3  # guess: of values of order 1; hardware differs by rounding
PERIOD: Final = 0.1  # guess: a hundred tolerances: others seldom look alike
NUMBERS: Final = 6
ROUNDING: Final = 1e-4  # of a count; masses are float64
REPEATS_MAX: Final = 2  # guess: a death, and that of one who has taken its place


def alike(count: torch.Tensor, square: torch.Tensor) -> bool:
    """Return whether a mean of whole numbers and the mean of their squares are those of equal
    numbers."""
    whole = torch.round(count)
    return bool((count - whole).abs() < ROUNDING and (square - whole**2).abs() < ROUNDING)


@final
class Agreement:
    """What one peer says of itself in front of its gradients.

    Attributes:
        head: what travels: (6,).
        repeats: how often the gradients were given before.
    """

    def __init__(self) -> None:
        self.head = torch.zeros(NUMBERS)
        self.repeats = 0

    def note(self, parameters: Sequence[Named]) -> None:
        """Fill the head."""
        angles = fingerprint(parameters).double() * (2 * math.pi / PERIOD)
        counts = torch.tensor([self.repeats, self.repeats**2])
        self.head[:] = torch.cat([angles.cos(), angles.sin(), counts])

    def judge(self, head: torch.Tensor) -> bool:
        """Look at the mean of all heads, and return whether gradients belong together. Who has
        given nothing itself hears how often they were given."""
        radius = torch.hypot(head[0:2].double(), head[2:4].double())
        spread = PERIOD / (2 * math.pi) * (2 * (1 - radius)).clamp(min=0).sqrt()
        # Two halves that differ by the tolerance have half of it for spread.
        if bool((spread > FINGERPRINT_TOLERANCE / 2).any()) or not alike(head[4], head[5]):
            return False
        self.repeats = round(head[4].item())
        return True
