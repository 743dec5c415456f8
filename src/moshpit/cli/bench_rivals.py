"""What Moshpit is measured beside, and how the benchmark starts each."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from moshpit.cli import bench_worker
from moshpit.cli.bench_links import INTERFACE
from moshpit.errors import ConfigError

MOSHPIT = "moshpit"
RIVALS = ("gloo", "hivemind")
_IMPORT_S = 120.0


def check_rivals(names: Sequence[str], hivemind_python: Path | None) -> None:
    """Say early which rival cannot be had.

    Raises:
        ConfigError: an unknown name, or one that is not installed.
    """
    for name in names:
        if name not in RIVALS:
            raise ConfigError(f"--compare {name!r}: choose from {', '.join(RIVALS)}")
    if "gloo" in names:
        import torch.distributed as dist

        if not dist.is_available() or not dist.is_gloo_available():
            raise ConfigError("--compare gloo: this PyTorch was built without gloo")
    if "hivemind" in names:
        _check_hivemind(hivemind_python)


_HIVEMIND_WORKS = """
import pathlib, subprocess, hivemind, torch
daemon = pathlib.Path(hivemind.__file__).parent / "hivemind_cli" / "p2pd"
subprocess.run([daemon, "--help"], capture_output=True)
"""
"""It talks through a program that its wheels carry along, and not always for this system."""


def _check_hivemind(python: Path | None) -> None:
    command = [str(python or sys.executable), "-c", _HIVEMIND_WORKS]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_IMPORT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"--hivemind-python {python}: {error}") from None
    if done.returncode:
        said = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(
            f"--compare hivemind: not installed for {command[0]}, or not for this system ({said}); "
            "docs/howto/benchmark.md says how to give it an environment of its own"
        )


def command_of(engine: str, hivemind_python: Path | None) -> list[str]:
    """Return the command that starts one process of an engine."""
    if engine == MOSHPIT:
        return [sys.executable, "-m", "moshpit.cli.bench_peer"]
    python = str(hivemind_python or sys.executable) if engine == "hivemind" else sys.executable
    # As a script, since there may be no Moshpit there; -P, or the files beside it could be
    # taken for modules of the same name.
    return [python, "-P", bench_worker.__file__]


def environment(*, shaped: bool) -> dict[str, str]:
    """Return the environment of every process: one thread for arithmetic, one interface."""
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    interface = INTERFACE if shaped else loopback
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": interface}
