"""The command line: `moshpit ticket`, `run`, `peers`, `doctor`, `sim` and `demo`."""

from __future__ import annotations


def main() -> None:
    """Run the command that the arguments name; the entry point of ``moshpit``."""
    from moshpit.cli.app import run_app

    run_app()
