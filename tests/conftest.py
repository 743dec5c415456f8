"""What every test has: examples, and a logger as it was.

How hypothesis looks for examples: the same ones always, or ever new ones.

In ``make test`` and in CI a property is checked on the same examples every time, wherever and
however slowly it runs: a failure is there for everybody, or for nobody. In ``make soak`` it is
checked on many new ones. ``--hypothesis-profile`` says which; without it, the soak profile goes
with a selection of soak tests (``-m soak``).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# On a busy machine anything may be slow, and that says nothing about the code under test.
PATIENT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

settings.register_profile("test", parent=PATIENT, max_examples=100, derandomize=True, database=None)
settings.register_profile("soak", parent=PATIENT, max_examples=3000, print_blob=True)


def pytest_configure(config: pytest.Config) -> None:
    """Choose the profile before any test is imported: decorators copy it."""
    if config.getoption("--hypothesis-profile"):
        return  # hypothesis has loaded, or will load, what was asked for
    chosen = str(config.getoption("markexpr")).replace("not soak", "")
    settings.load_profile("soak" if "soak" in chosen else "test")


@pytest.fixture(autouse=True)
def log_as_before() -> Iterator[None]:
    """Undo what a command does to Moshpit's logger when a test calls it in this process."""
    log = logging.getLogger("moshpit")
    before = (log.handlers, log.propagate, log.level)
    yield
    log.handlers, log.propagate, level = before
    log.setLevel(level)
