"""`moshpit bench`: how fast this machine averages, beside other tools."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
import typer

from moshpit.cli import output
from moshpit.config import preset as settings_of
from moshpit.errors import ConfigError

if TYPE_CHECKING:
    from moshpit.cli.bench_run import Plan

PEERS_MAX = 64
MB_MAX = 16_384.0

bench_app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Measure Moshpit on this machine, beside other tools, in the same run and in turn.",
)


class Schedule(StrEnum):
    """How the rounds of a grid move the vector."""

    AUTO = "auto"
    GRID = "grid"
    TORUS = "torus"


@bench_app.callback()
def bench() -> None:
    """Keep `averaging` a command of its own, though it is the only one."""


@bench_app.command()
def averaging(  # noqa: PLR0917 - typer reads the parameters
    peers: Annotated[
        int, typer.Option(min=2, max=PEERS_MAX, help="How many processes average.")
    ] = 4,
    group_size: Annotated[
        int | None,
        typer.Option(
            min=2, metavar="M", help="Members of a group at most. Without it: all peers in one."
        ),
    ] = None,
    mb: Annotated[
        float,
        typer.Option(
            metavar="SIZE", help="The vector's size as float32, in MB of 1,048,576 bytes."
        ),
    ] = 64.0,
    codec: Annotated[
        str,
        typer.Option(
            metavar="C", help="How numbers travel: float32, int8, …, auto. Rivals' as float32."
        ),
    ] = "float32",
    schedule: Annotated[
        Schedule | None,
        typer.Option(help="How the rounds of a grid move the vector. Without it: the preset's."),
    ] = None,
    copy: Annotated[
        bool,
        typer.Option(
            "--copy",
            help="Call `average`, which makes new tensors, instead of `average_`, which changes "
            "them in place, as gloo does.",
        ),
    ] = False,
    plaintext: Annotated[
        bool, typer.Option("--plaintext", help="Do not encrypt bulk data. Rivals never do.")
    ] = False,
    preset: Annotated[
        str, typer.Option(metavar="NAME", help="Settings: local, lan or internet.")
    ] = "lan",
    link_mbit: Annotated[
        str | None,
        typer.Option(
            metavar="B[,B…]",
            help="Shape each peer's link, both ways, to so many Mbit/s: one number, or one per "
            "peer (1000,500,200,100). Makes network namespaces, which needs root, and deletes "
            "them. The peers are told their bandwidth. Without it: loopback.",
        ),
    ] = None,
    untold: Annotated[
        bool,
        typer.Option(
            "--untold", help="Do not tell the peers their bandwidth: they have to measure it."
        ),
    ] = False,
    loss: Annotated[
        float,
        typer.Option(
            min=0.0, max=50.0, metavar="PERCENT", help="Lose so many packets; with --link-mbit."
        ),
    ] = 0.0,
    compare: Annotated[
        str | None,
        typer.Option(
            metavar="R[,R]",
            help="Measure rivals in turn with Moshpit: gloo (`torch.distributed.all_reduce`, on "
            "the same grid), hivemind (where it is installed).",
        ),
    ] = None,
    hivemind_python: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="The Python that has hivemind 1.1.11, if it is another one."
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How many averagings are measured.")] = 10,
    warmup: Annotated[int, typer.Option(min=1, help="How many come before, unmeasured.")] = 2,
    json: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Write the numbers there.")
    ] = None,
) -> None:
    """Measure how fast peers average a vector, and check every mean.

    Every peer is a process with one thread for arithmetic. It joins by ticket and calls
    `swarm.average_`. In each round all start together; the round lasts as long as its slowest
    peer. Rivals run in the same session, by turns, while the others wait at a pipe.

    Exit status 1: some mean was wrong, or not that of all peers.

    **Examples**

        moshpit bench averaging --peers 4 --mb 64 --compare gloo
        moshpit bench averaging --peers 16 --group-size 4 --compare gloo --json out.json
        sudo moshpit bench averaging --peers 4 --mb 16 --link-mbit 1000,500,200,100
    """
    # Heavy, and of no use to the other commands.
    from moshpit.cli.bench_processes import ending_in_order
    from moshpit.cli.bench_report import Shown, machine, result_of
    from moshpit.cli.bench_run import Plan, measure

    settings = settings_of(preset)
    plan = Plan(
        peers=peers,
        group_size=peers if group_size is None else group_size,
        mb=mb,
        codec=codec,
        schedule=settings.matchmaking.schedule if schedule is None else schedule.value,
        in_place=not copy,
        plaintext=plaintext,
        preset=preset,
        link_mbit=_speeds(link_mbit, peers),
        told=not untold,
        loss_percent=loss,
        rounds=rounds,
        warmup=warmup,
        compare=_names(compare),
        hivemind_python=hivemind_python,
    )
    _check(plan, json)
    where = machine()
    with ending_in_order(), output.stderr().status("starting") as status:
        measured = measure(plan, status.update)
    result = result_of(plan, where, measured)
    if json is not None:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    output.stdout().print(Shown(result), soft_wrap=True)
    for words in result.failures:
        output.report_error(words)
    if result.failures:
        raise typer.Exit(1)


def _names(text: str | None) -> tuple[str, ...]:
    names = [name.strip() for name in (text or "").split(",")]
    return tuple(dict.fromkeys(name for name in names if name))


def _speeds(text: str | None, peers: int) -> tuple[float, ...]:
    """Return each peer's Mbit/s; none if nothing is shaped."""
    if text is None:
        return ()
    try:
        speeds = [float(word) for word in text.split(",")]
    except ValueError:
        speeds = []
    if not speeds or not all(0.1 <= speed <= 100_000 for speed in speeds):
        raise ConfigError(f"--link-mbit {text!r}: write numbers from 0.1 to 100000, such as 100")
    if len(speeds) == 1:
        speeds *= peers
    if len(speeds) != peers:
        raise ConfigError(
            f"--link-mbit {text!r}: {len(speeds)} numbers for {peers} peers; give one, or {peers}"
        )
    return tuple(speeds)


def _check(plan: Plan, json: Path | None) -> None:
    """Say what makes no sense before anything is started."""
    from moshpit.cli.bench_links import check_root
    from moshpit.cli.bench_rivals import check_rivals
    from moshpit.runtime.autocodec import codec_or_auto

    codec_or_auto(plan.codec)
    if not 0 < plan.mb <= MB_MAX:
        raise ConfigError(f"--mb {plan.mb:g}: choose more than 0 and at most {MB_MAX:g}")
    limit = settings_of(plan.preset).matchmaking.group_size_limit
    if plan.group_size >= limit:
        raise ConfigError(f"a group of {plan.group_size}: choose --group-size 2 to {limit - 1}")
    if json is not None and not json.resolve().parent.is_dir():
        raise ConfigError(f"--json {json}: there is no folder {json.resolve().parent}")
    if plan.loss_percent and not plan.link_mbit:
        raise ConfigError("--loss needs --link-mbit: the loopback loses nothing")
    if not plan.told and not plan.link_mbit:
        raise ConfigError("--untold needs --link-mbit: on loopback nobody is told a bandwidth")
    if plan.link_mbit:
        check_root(loss=plan.loss_percent > 0)
    check_rivals(plan.compare, plan.hivemind_python)
