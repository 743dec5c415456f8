"""`moshpit run`: a user's script as a peer, in this process."""

from __future__ import annotations

import contextlib
import logging
import runpy
import signal
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Annotated, Literal

import typer

from moshpit.cli import output
from moshpit.cli.parse import duration_s
from moshpit.errors import ConfigError, MoshpitError
from moshpit.identity.tickets import Ticket
from moshpit.runtime.ambient import JoinSettings, set_ambient, set_resume
from moshpit.runtime.leaving import Leaving, last_words, on_signals
from moshpit.types import Address, Role

Preset = Literal["local", "lan", "internet"]

LOOK_S = 1.0
"""How often an aux peer looks whether it has failed; signals interrupt it at once."""

_log = logging.getLogger("moshpit")


def run(  # noqa: PLR0917 - typer reads the parameters
    script: Annotated[
        Path | None,
        typer.Argument(
            metavar="[SCRIPT]", help="The training script. A peer of role aux needs none."
        ),
    ] = None,
    args: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGS]...", help="What the script gets.")
    ] = None,
    ticket: Annotated[
        str | None,
        typer.Option(metavar="TICKET", help="Admits to a run: from `moshpit ticket new`."),
    ] = None,
    role: Annotated[
        Role | None,
        typer.Option(
            metavar="worker|client|aux",
            help="**worker** trains and averages; **client** trains but cannot be dialled (behind "
            "a router); **aux** only averages. Without it: worker.",
        ),
    ] = None,
    listen: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Where to listen; port 0 takes a free one."),
    ] = None,
    advertise: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT", help="Where others can dial this peer, if not at --listen."
        ),
    ] = None,
    upnp: Annotated[
        bool,
        typer.Option(
            "--upnp",
            help="Ask the router, by UPnP, to let others dial this peer. Needs "
            "`pip install 'moshpit[upnp]'`.",
        ),
    ] = False,
    preset: Annotated[
        Preset | None,
        typer.Option(
            metavar="local|lan|internet",
            help="The kind of network between the peers. Without it: lan.",
        ),
    ] = None,
    plaintext: Annotated[
        bool,
        typer.Option(
            "--plaintext",
            help="Do not encrypt tensors. Only for networks that you trust; all peers of the run "
            "must agree. Keys and admission are proved all the same.",
        ),
    ] = False,
    identity: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keeps this peer's key, so that it stays the same peer."),
    ] = None,
    grace: Annotated[
        str,
        typer.Option(
            metavar="TIME",
            help="How long leaving may take after SIGTERM or Ctrl-C, at most: the averaging under "
            "way, a checkpoint, the script's `finally` blocks.",
        ),
    ] = "30s",
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Begin with a good checkpoint in DIR, if there is one: of the newest epoch that "
            "all peers hold who resume. The script saves with `moshpit.Checkpoint`.",
        ),
    ] = None,
    resume_wait: Annotated[
        str | None,
        typer.Option(
            metavar="TIME",
            help="How long to wait, when resuming, for the peers that trained when the newest "
            "checkpoint was saved. Without it: 20s.",
        ),
    ] = None,
) -> None:
    """Run a training script as a peer of a run.

    The script runs in this process, as `python SCRIPT ARGS` would run it; its
    `moshpit.join()` needs no arguments. What the script says in the call outranks what is
    said here. Its exit code is passed on, and its tracebacks show its own frames only.

    **Examples**

        moshpit run --ticket $T train.py --lr 3e-4
        # behind a router that lets nobody in
        moshpit run --ticket $T --role client train.py
        # lend bandwidth, without training
        moshpit run --ticket $T --role aux --listen 0.0.0.0:7000
        # listen at one address, be dialled at another
        moshpit run --ticket $T --listen 0.0.0.0:7000 \\
            --advertise my.host:7000 train.py
        # go on where the last run on this machine has ended, and leave within 20 s
        moshpit run --ticket $T --resume ckpt --grace 20s train.py
    """
    for address in (listen, advertise):
        if address is not None:
            Address.parse(address)
    if ticket is not None:
        Ticket.decode(ticket)  # now, not when the script has loaded its data and joins
    set_ambient(
        JoinSettings(
            ticket=ticket,
            role=role,
            listen=listen,
            advertise=advertise,
            preset=preset,
            plaintext=plaintext or None,
            identity=identity,
            upnp=upnp or None,
        )
    )
    if resume is not None and resume.exists() and not resume.is_dir():
        raise ConfigError(f"--resume {resume}: not a directory")
    set_resume(resume, None if resume_wait is None else duration_s(resume_wait))
    on_signals(duration_s(grace))
    if script is not None:
        run_script(script, args or [])
    elif role is Role.AUX:
        serve()
    else:
        raise ConfigError("nothing to run: name a script, or use --role aux to average only")


def serve() -> None:
    """Average for the others until SIGTERM or SIGINT."""
    import moshpit

    with moshpit.join() as swarm, contextlib.suppress(SystemExit, KeyboardInterrupt):
        _log.info("%r averages for others until SIGTERM", swarm)
        while True:
            time.sleep(LOOK_S)
            swarm.ensure()


def run_script(path: Path, args: list[str]) -> None:
    """Run a script as ``__main__`` of this process, as ``python path args`` would.

    Raises:
        ConfigError: there is no such file.
        SystemExit: the script ended with a code, or with an exception (1; Ctrl-C: 130).
    """
    if not path.is_file():
        raise ConfigError(f"no script at {path}")
    sys.argv = [str(path), *args]
    sys.path.insert(0, str(path.resolve().parent))
    try:
        runpy.run_path(str(path), run_name="__main__")
    except MoshpitError as error:
        if _log.isEnabledFor(logging.DEBUG):
            raise
        output.report_error(f"{output.message_of(error)}{_place(path, error)}")
        raise SystemExit(output.USAGE_ERROR) from None
    except Leaving as error:
        last_words(error)
        raise
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None
    except Exception as error:
        error.__traceback__ = own_frames(path, error.__traceback__)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(1) from None


def own_frames(path: Path, tb: TracebackType | None) -> TracebackType | None:
    """Return the traceback from the script's first frame on; None if it never ran (syntax)."""
    while tb is not None and tb.tb_frame.f_code.co_filename != str(path):
        tb = tb.tb_next
    return tb


def _place(path: Path, error: MoshpitError) -> str:
    """Return the script's line that the error came from."""
    lines = [
        frame.lineno
        for frame in traceback.extract_tb(error.__traceback__)
        if frame.filename == str(path)
    ]
    return f" ({path}:{lines[-1]})" if lines else ""
