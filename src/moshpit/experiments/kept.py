"""Sections on disk, so that a report that was interrupted goes on where it was.

One file per section and size, in the folder of the report. What another version of this package
has written, or is broken, counts as not there.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import msgspec

from moshpit.errors import ConfigError
from moshpit.experiments.section import Section

FOLDER = "sections"


class _Kept(msgspec.Struct, frozen=True):
    made_by: str
    section: Section


def keep(report: Path, name: str, small: bool, section: Section) -> None:
    """Write a section.

    Args:
        report: the folder of the report.
        name: of the catalogue.
        small: which size it is of.
        section: what is to be kept.

    Raises:
        ConfigError: it cannot be written there.
    """
    file = _file(report, name, small)
    part = file.with_name(f".{file.name}.part")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        part.write_bytes(msgspec.msgpack.encode(_Kept(version("moshpit"), section)))
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"--report {report}: {error}") from error


def kept(report: Path, name: str, small: bool) -> Section | None:
    """Return what `keep` has written with these arguments; None where there is no such section."""
    try:
        found = msgspec.msgpack.decode(_file(report, name, small).read_bytes(), type=_Kept)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
    return found.section if found.made_by == version("moshpit") else None


def _file(report: Path, name: str, small: bool) -> Path:
    return report / FOLDER / (f"{name}-small.msgpack" if small else f"{name}.msgpack")
