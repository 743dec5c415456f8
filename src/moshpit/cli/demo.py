"""`moshpit demo`: a swarm on this machine, one peer killed, and whether it mattered."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Annotated

import msgspec
import typer

from moshpit.cli import output
from moshpit.errors import ConfigError

EPOCHS = 20
SAMPLES_PER_EPOCH = 1024
BATCH_SIZE = 32
PEERS_MAX = 16


def demo(  # noqa: PLR0917 - typer reads the parameters
    peers: Annotated[
        int, typer.Option(min=2, max=PEERS_MAX, help="How many processes train together.")
    ] = 4,
    kill: Annotated[
        int, typer.Option(min=0, help="How many of them are killed halfway (SIGKILL).")
    ] = 1,
    epochs: Annotated[int, typer.Option(min=4, help="How often they average.")] = EPOCHS,
    samples_per_epoch: Annotated[
        int, typer.Option(min=1, help="Samples of all peers between two averagings.")
    ] = SAMPLES_PER_EPOCH,
    seed: Annotated[
        int | None, typer.Option(help="Chooses who is killed, and the data. Without it: anew.")
    ] = None,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="Draw the losses there (PNG).")
    ] = None,
    plain: Annotated[
        bool, typer.Option("--plain", help="Print plain lines, as where there is no terminal.")
    ] = False,
) -> None:
    """See it work: train a small transformer with several processes, and kill one halfway.

    The processes find each other over 127.0.0.1 with one ticket, encrypted, as machines
    would. Then one process alone trains on as many samples, for comparison. Takes about two
    minutes. Ends with 0 only if everything that it shows really holds.

    **Examples**

        moshpit demo
        moshpit demo --peers 6 --kill 2 --plot losses.png --json result.json
    """
    if kill > peers - 2:
        raise ConfigError(f"--kill {kill} of {peers} peers: at least two must survive")
    if samples_per_epoch < peers * BATCH_SIZE:
        raise ConfigError(
            f"--samples-per-epoch {samples_per_epoch}: {peers} peers with batches of "
            f"{BATCH_SIZE} need at least {peers * BATCH_SIZE}"
        )
    # Heavy, and of no use to the other commands.
    from moshpit.cli.demo_report import check_plot_path, failed_checks, plot_losses, summary
    from moshpit.cli.demo_show import Plan, Show

    check_plot_path(plot)
    if json is not None and not json.resolve().parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {json.resolve().parent}")
    show = Show(
        Plan(
            peers=peers,
            kill=kill,
            epochs=epochs,
            samples_per_epoch=samples_per_epoch,
            batch_size=BATCH_SIZE,
            seed=seed if seed is not None else Random().randrange(1_000_000),
        ),
        plain=plain,
    )
    result = show.run()
    failed = failed_checks(result, kill=kill)
    result = msgspec.structs.replace(result, failed_checks=failed)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    if plot is not None:
        plot_losses(plot, show.traces, show.steps, result)
    typer.echo("\n" + summary(result))
    for words in failed:
        output.report_error(words)
    if failed:
        raise typer.Exit(1)
    typer.echo("All of it holds.")
