"""How often to average, by how far training has come (ADACOMM)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch

from moshpit.errors import ConfigError
from moshpit.training.tensors import Named


@dataclass(frozen=True, slots=True)
class AdaComm:
    r"""Average rarely at first, which is cheap, and often later, which is exact.

    After each averaging the samples until the next one become

    .. math:: \tau_l = \sqrt{\frac{\eta_0}{\eta_l} \cdot \frac{F(x_l)}{F(x_0)}} \; \tau_0

    with :math:`\tau_0` the strategy's ``samples_per_epoch``, :math:`F` the mean loss of all peers
    in an epoch (it is averaged with the parameters, so that all peers find the same), and
    :math:`\eta` the learning rate.

    Attributes:
        least: never average after fewer samples than this.

    Raises:
        ConfigError: a value that makes no sense.

    Source: paper.md §8; Wang and Joshi 2019, arXiv 1810.08313, without rounding up to local steps
    (the swarm counts samples, not one peer's steps).
    """

    least: float

    def __post_init__(self) -> None:
        if not 0 < self.least < math.inf:
            raise ConfigError(f"least: {self.least!r}; give a positive number of samples")


@final
class Period:
    """The samples of an epoch as `AdaComm` has them.

    Args:
        rule: the rule.
        first: the samples of the first epoch.
    """

    def __init__(self, rule: AdaComm, first: float) -> None:
        if rule.least > first:
            raise ConfigError(
                f"least: {rule.least:g} samples are more than those of the first epoch, {first:g}"
            )
        self._rule = rule
        self._first = first
        self._start: tuple[float, float] | None = None  # loss and rate of the first epoch
        self._sum = 0.0
        self._samples = 0.0
        self.head = torch.zeros(1)
        """The loss, to be averaged with the parameters."""

    def note(self, loss: float, samples: float) -> None:
        """A batch had this loss. What is not finite is not counted."""
        if math.isfinite(loss):
            self._sum += loss * samples
            self._samples += samples

    def named(self) -> Named:
        """Return the head for the vector."""
        return Named("loss", self.head)

    def close(self) -> None:
        """The epoch's batches are in: put their mean loss into the head."""
        self.head[0] = self._sum / self._samples if self._samples else 0.0
        self._sum = self._samples = 0.0

    def next(self, loss: float, rate: float) -> float:
        """Return the samples of the next epoch.

        Args:
            loss: the mean loss of the last one.
            rate: the learning rate.
        """
        if not (math.isfinite(loss) and loss > 0 and rate > 0):
            return self._rule.least if loss == 0 else self._first
        if self._start is None:
            self._start = (loss, rate)
        first_loss, first_rate = self._start
        wanted = self._first * math.sqrt(first_rate / rate * loss / first_loss)
        return max(self._rule.least, wanted)

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs."""
        return {"start": self._start, "sum": self._sum, "samples": self._samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`."""
        start = state["start"]
        self._start = None if start is None else (float(start[0]), float(start[1]))
        self._sum, self._samples = float(state["sum"]), float(state["samples"])
