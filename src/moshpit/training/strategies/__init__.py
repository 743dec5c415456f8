"""The ways to train together; `moshpit.training.strategies.base` has what they share."""

from moshpit.training.strategies.adaptive_period import AdaComm
from moshpit.training.strategies.base import Closure, Snapshot, Strategy
from moshpit.training.strategies.diloco import DiLoCo, Nesterov
from moshpit.training.strategies.gradient_averaging import GradientAveraging
from moshpit.training.strategies.local_sgd import LocalSGD
from moshpit.training.strategies.overlapped import OverlappedGradientAveraging

__all__ = [
    "AdaComm",
    "Closure",
    "DiLoCo",
    "GradientAveraging",
    "LocalSGD",
    "Nesterov",
    "OverlappedGradientAveraging",
    "Snapshot",
    "Strategy",
]
