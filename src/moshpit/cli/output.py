"""How the command line speaks: results on stdout, everything else on stderr."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NoReturn

from rich.console import Console

from moshpit.errors import ConfigError, MoshpitError, RemoteError

USAGE_ERROR = 2
"""The exit code of every error that is ours to explain."""


def stdout() -> Console:
    """Return a console for results; made when it is used, since tests swap the streams.

    Without markup: ``[fd00::1]:7000`` is an address and no style.
    """
    return Console(file=sys.stdout, highlight=False, markup=False)


def stderr() -> Console:
    """Return a console for explanations, warnings and errors."""
    return Console(file=sys.stderr, highlight=False, markup=False)


def explain(text: str) -> None:
    """Say something beside the result, in the terminal's own words and without markup."""
    stderr().print(text, soft_wrap=True)


def message_of(error: MoshpitError) -> str:
    """Return what an error says, and what to do about it."""
    remedy = error.remedy if isinstance(error, RemoteError) else ""
    return f"{error}; {remedy}" if remedy else str(error)


def fail(message: str) -> NoReturn:
    """End with one line on stderr and the exit code for errors that are ours to explain."""
    report_error(message)
    raise SystemExit(USAGE_ERROR)


def report_error(message: str) -> None:
    """Print an error as one line on stderr."""
    line = " ".join(message.split())
    stderr().print("error:", style="bold red", end=" ")
    stderr().print(line, soft_wrap=True)


def check_place(option: str, path: Path | None) -> None:
    """Say at once that a file cannot be written where nobody has made a folder, not after hours.

    Args:
        option: by which the path was given.
        path: of the file; None or ``-``: there is nothing to check.

    Raises:
        ConfigError: there is no such folder.
    """
    if path is not None and str(path) != "-" and not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}")
