"""Moshpit: train PyTorch models on many unreliable machines, without a master.

>>> import moshpit
>>> moshpit.preset("local").round.heartbeat_s
0.25
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from moshpit.config import SwarmConfig, preset
    from moshpit.errors import MoshpitError
    from moshpit.events import EpochReport, Outcome, RoundReport
    from moshpit.identity.tickets import Ticket
    from moshpit.runtime.join import join
    from moshpit.runtime.leaving import Leaving
    from moshpit.runtime.swarm import Swarm
    from moshpit.training.checkpoint import Checkpoint
    from moshpit.training.optimizer import Optimizer
    from moshpit.training.strategies import (
        DiLoCo,
        GradientAveraging,
        LocalSGD,
        Nesterov,
        OverlappedGradientAveraging,
    )

__version__ = "0.1.0"

__all__ = [
    "Checkpoint",
    "DiLoCo",
    "EpochReport",
    "GradientAveraging",
    "Leaving",
    "LocalSGD",
    "MoshpitError",
    "Nesterov",
    "Optimizer",
    "Outcome",
    "OverlappedGradientAveraging",
    "RoundReport",
    "Swarm",
    "SwarmConfig",
    "Ticket",
    "join",
    "preset",
]

_HOME = {
    "Checkpoint": "training.checkpoint",
    "DiLoCo": "training.strategies",
    "EpochReport": "events",
    "GradientAveraging": "training.strategies",
    "Leaving": "runtime.leaving",
    "LocalSGD": "training.strategies",
    "MoshpitError": "errors",
    "Nesterov": "training.strategies",
    "Optimizer": "training.optimizer",
    "Outcome": "events",
    "OverlappedGradientAveraging": "training.strategies",
    "RoundReport": "events",
    "Swarm": "runtime.swarm",
    "SwarmConfig": "config",
    "Ticket": "identity.tickets",
    "join": "runtime.join",
    "preset": "config",
}


def __getattr__(name: str) -> object:
    """Import public names on first use, so that `import moshpit` does not import torch."""
    if name == "baselines":  # a package of its own, so that one can compare without an import
        return import_module("moshpit.baselines")
    if name not in _HOME:
        raise AttributeError(f"module 'moshpit' has no attribute {name!r}")
    value = getattr(import_module(f"moshpit.{_HOME[name]}"), name)
    globals()[name] = value
    return value
