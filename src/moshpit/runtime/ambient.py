"""What `moshpit run` knows and a script need not say again.

`moshpit run --ticket T train.py` runs the script in this process; its bare `moshpit.join()`
takes from here what it is not given. What is said in the call outranks what is said on the
command line, field by field. The environment variable `MOSHPIT_TICKET` comes last, is used
for the ticket only, and a log line says when it was.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass, fields, replace
from pathlib import Path

from moshpit.types import Role

TICKET_VARIABLE = "MOSHPIT_TICKET"

_log = logging.getLogger("moshpit")


@dataclass(frozen=True, slots=True, kw_only=True)
class JoinSettings:
    """How to join a swarm; None is "not said".

    Attributes:
        ticket: the ticket's string.
        role: worker, client or aux.
        listen: ``host:port`` to listen at; port 0 takes a free one.
        advertise: ``host:port`` at which others can dial this peer, where it differs.
        preset: the name of the settings for this kind of network.
        plaintext: whether bulk data goes unencrypted.
        identity: the file that keeps this peer's key.
        upnp: whether the router is asked to let others in.
    """

    ticket: str | None = None
    role: Role | None = None
    listen: str | None = None
    advertise: str | None = None
    preset: str | None = None
    plaintext: bool | None = None
    identity: Path | None = None
    upnp: bool | None = None

    def or_else(self, other: JoinSettings) -> JoinSettings:
        """Return these settings, with what they do not say taken from another.

        >>> JoinSettings(preset="lan").or_else(JoinSettings(preset="local", plaintext=True))
        JoinSettings(..., preset='lan', plaintext=True, identity=None, upnp=None)
        """
        unsaid = {f.name: getattr(other, f.name) for f in fields(self) if self._lacks(f.name)}
        return replace(self, **unsaid)

    def _lacks(self, name: str) -> bool:
        return getattr(self, name) is None


class _Ambient:
    settings = JoinSettings()
    resume: Path | None = None
    resume_wait_s: float | None = None


def get_ambient() -> JoinSettings:
    """Return what `moshpit run` set for this process; all None without it."""
    return _Ambient.settings


def set_ambient(settings: JoinSettings) -> None:
    """Set what a bare `moshpit.join()` in this process takes."""
    _Ambient.settings = settings


def get_resume() -> Path | None:
    """Return the directory that `moshpit run --resume` named for this process, if it did."""
    return _Ambient.resume


def get_resume_wait_s() -> float | None:
    """Return how long `moshpit run --resume-wait` lets this process wait, if it says so."""
    return _Ambient.resume_wait_s


def set_resume(directory: Path | None, wait_s: float | None = None) -> None:
    """Set where a `moshpit.Checkpoint` in this process finds what to begin with, and how long it
    waits for the others."""
    _Ambient.resume = directory
    _Ambient.resume_wait_s = wait_s


def resolve(said: JoinSettings) -> JoinSettings:
    """Return what holds for a call of `moshpit.join` that says this much."""
    settings = said.or_else(get_ambient())
    ticket = os.environ.get(TICKET_VARIABLE)
    if settings.ticket is None and ticket:
        _log.info("taking the ticket from the environment variable %s", TICKET_VARIABLE)
        settings = replace(settings, ticket=ticket)
    return settings
