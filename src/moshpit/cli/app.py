"""The app: which commands there are, and how errors end."""

from __future__ import annotations

import logging
import os
import sys
from typing import Annotated

import typer

from moshpit.cli import output
from moshpit.cli.bench import bench_app
from moshpit.cli.demo import demo
from moshpit.cli.doctor import doctor
from moshpit.cli.experiment import experiment_app
from moshpit.cli.peers import peers
from moshpit.cli.plan import plan
from moshpit.cli.run import run
from moshpit.cli.sim import sim
from moshpit.cli.ticket import ticket_app
from moshpit.errors import MoshpitError

ROOT_HELP = """
Train one PyTorch model on many unreliable machines, without a master.

**See it work** (about two minutes, on this machine alone):

    moshpit demo

**Train your own script** on as many machines as you like:

    # make a run; whoever has the ticket T may join it
    T=$(moshpit ticket new --address my.host:7000)
    # on my.host, then on every other machine
    moshpit run --ticket $T --listen 0.0.0.0:7000 train.py
    moshpit run --ticket $T train.py
    # who is there?
    moshpit peers --ticket $T

In `train.py`, two lines change: `swarm = moshpit.join()`, and the optimizer is wrapped in
`moshpit.Optimizer(optimizer, swarm, strategy=moshpit.LocalSGD(samples_per_epoch=4096))`.

**Something is wrong?** `moshpit doctor` checks this machine and says what to do.
"""

app = typer.Typer(
    name="moshpit",
    help=ROOT_HELP,
    rich_markup_mode="markdown",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(ticket_app, name="ticket")
app.command(no_args_is_help=True, context_settings={"allow_interspersed_args": False})(run)

app.command(no_args_is_help=True)(peers)
app.command(no_args_is_help=True)(plan)
app.command()(doctor)
app.command()(sim)
app.command()(demo)
app.add_typer(bench_app, name="bench")
app.add_typer(experiment_app, name="experiment")


class _Global:
    debug = False


def _show_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        typer.echo(f"moshpit {version('moshpit')}")
        raise typer.Exit


@app.callback()
def options(
    debug: Annotated[
        bool, typer.Option("--debug", help="Show tracebacks and debug logs instead of one line.")
    ] = False,
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Show the version and leave.", callback=_show_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of every command."""
    _Global.debug = debug
    log_to_stderr(logging.DEBUG if debug else logging.INFO)


def log_to_stderr(level: int) -> None:
    """Show Moshpit's own log; the root logger stays as it is, for the user's script to set up."""
    log = logging.getLogger("moshpit")
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s", datefmt="%H:%M:%S"))
    log.handlers = [handler]
    log.propagate = False
    log.setLevel(level)


def run_app() -> None:
    """Run the app; errors of Moshpit end as one line and exit code 2."""
    try:
        app()
    except MoshpitError as error:
        if _Global.debug:
            raise
        output.fail(output.message_of(error))
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
