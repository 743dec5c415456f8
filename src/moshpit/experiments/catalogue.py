"""Which experiments there are, in the order of the report.

To add one: write a function of a `Context` that returns a `Section`, and name it here. Modules
are imported when they are run, so that one experiment's needs are not another's.
"""

from __future__ import annotations

from importlib import import_module
from typing import cast

from moshpit.errors import ConfigError
from moshpit.experiments.section import Experiment

CATALOGUE: dict[str, str] = {
    "averaging": "moshpit.experiments.averaging:section",
    "protocol": "moshpit.experiments.agreement:section",
    "vision": "moshpit.experiments.comparison:section",
    "language": "moshpit.experiments.preemptible:section",
}
"""By name, where the function is: ``module:function``."""


def experiment(name: str) -> Experiment:
    """Return an experiment by its name.

    Raises:
        ConfigError: there is none of that name.

    Example:
        >>> experiment("averaging").__module__
        'moshpit.experiments.averaging'
    """
    place = CATALOGUE.get(name)
    if place is None:
        raise ConfigError(f"experiment {name!r}: there are {', '.join(CATALOGUE)}")
    module, function = place.split(":")
    return cast(Experiment, getattr(import_module(module), function))
