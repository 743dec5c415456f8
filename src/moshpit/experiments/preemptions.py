"""When preemptible machines come and go.

A lifetime is drawn from the bathtub that Kadupitiya, Jadhao and Sharma found for Google's
preemptible machines (HPDC 2020, arXiv 1911.05160), which live a day at most:

    F(t) = A (1 - exp(-t/τ1) + exp((t - b)/τ2)),   t in hours, below b = 24

Many are taken back in their first hours, few later, and the rest at the end of the day. The
numbers here are of the size of those that the authors fitted; they differ between regions and
types of machines. What is taken back is replaced after a while.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Final

from moshpit.errors import ConfigError
from moshpit.experiments.trials import Place
from moshpit.experiments.virtual import Machine

HOUR_S: Final = 3600.0
_HALVINGS: Final = 60  # of an interval of hours: below a nanosecond


@dataclass(frozen=True, slots=True, kw_only=True)
class Bathtub:
    """How long a preemptible machine lives.

    Attributes:
        early: A, about the share that is taken back in the first hours.
        early_h: τ1, how long these first hours last.
        late_h: τ2, how long the last ones do.
        limit_h: b, when all have ended.

    Example:
        >>> tub = Bathtub()
        >>> [round(tub.ended(t), 2) for t in (0.0, 1.0, 12.0, 23.0, 24.0)]
        [0.0, 0.28, 0.45, 0.58, 1.0]
    """

    early: float = 0.45
    early_h: float = 1.0
    late_h: float = 0.8
    limit_h: float = 24.0

    def __post_init__(self) -> None:
        if not (0 < self.early <= 1 and min(self.early_h, self.late_h, self.limit_h) > 0):
            raise ConfigError(f"{self}: a share, and times above 0")

    def ended(self, hours: float) -> float:
        """Return F: which share has ended after so many hours."""
        if hours >= self.limit_h:
            return 1.0
        rise = math.exp((hours - self.limit_h) / self.late_h)
        zero = math.exp(-self.limit_h / self.late_h)  # so that F(0) is exactly 0
        share = self.early * (1.0 - math.exp(-hours / self.early_h) + rise - zero)
        return min(1.0, share)

    def lifetime_s(self, rng: Random) -> float:
        """Draw a lifetime in seconds."""
        share, low, high = rng.random(), 0.0, self.limit_h
        for _ in range(_HALVINGS):
            middle = (low + high) / 2.0
            low, high = (low, middle) if self.ended(middle) >= share else (middle, high)
        return high * HOUR_S


def comings_and_goings(
    machines: Sequence[Machine],
    tub: Bathtub,
    *,
    replaced_s: float,
    until_s: float,
    rng: Random,
    quicker: float = 1.0,
) -> list[Place]:
    """Return when machines of a fleet are there.

    Args:
        machines: the fleet as it begins; each has a place, which is filled again and again.
        tub: how long they live.
        replaced_s: the mean of the time (exponentially distributed) until one that was taken back
            is replaced by another one of its kind, which has started and loaded everything.
        until_s: nobody comes after that.
        rng: of all this.
        quicker: lifetimes and replacements are so many times shorter.
    """
    places: list[Place] = []
    for machine in machines:
        at_s = 0.0
        while at_s < until_s:
            end_s = at_s + tub.lifetime_s(rng) / quicker
            places.append(Place(machine=machine, at_s=at_s, until_s=end_s))
            at_s = end_s + rng.expovariate(quicker / replaced_s)
    # Those of the beginning first: the others are added to the cluster later.
    return sorted(places, key=lambda place: place.at_s)
