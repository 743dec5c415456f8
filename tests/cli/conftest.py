"""The command line as people call it: a process of its own, with a state directory of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

Moshpit = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def moshpit(tmp_path: Path) -> Moshpit:
    """Return a function that runs ``moshpit`` with arguments, and gives what it said."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOSHPIT_")}
    environment |= {"XDG_STATE_HOME": str(tmp_path / "state"), "COLUMNS": "100", "NO_COLOR": "1"}

    def call(*args: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "moshpit", *args],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
            cwd=tmp_path,
            env=environment | more,
        )

    return call
