"""`moshpit experiment`: the paper's figures and ours, by commands that anyone can run."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from moshpit.cli import output
from moshpit.cli.experiment_training import training
from moshpit.cli.parse import human_s
from moshpit.errors import ConfigError, MoshpitError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from moshpit.experiments.agreement import Compared
    from moshpit.experiments.averaging import Curve, Setup
    from moshpit.experiments.section import Context, Experiment, Section
    from moshpit.sim.averaging import Spreads

experiment_app = typer.Typer(
    help="Repeat the paper's experiments, and see ours beside them.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

experiment_app.command("training")(training)

FINE, COARSE = 1e-9, 1e-4  # paper §4.1: averaged, and nearly so


@experiment_app.command("averaging")
def averaging(  # noqa: PLR0917 - typer reads the parameters
    peers: Annotated[int, typer.Option(metavar="N", help="How many peers.")] = 1024,
    group_size: Annotated[
        int, typer.Option(metavar="M", help="Peers in a group; cells in a row of the grid.")
    ] = 32,
    dims: Annotated[
        int | None,
        typer.Option(metavar="D", help="Axes of the grid. Default: as few as N and M need."),
    ] = None,
    failure: Annotated[
        float, typer.Option(metavar="P", help="The probability that a peer misses a round.")
    ] = 0.0,
    rounds: Annotated[int, typer.Option(metavar="T", help="How many rounds.")] = 10,
    seeds: Annotated[int, typer.Option(metavar="S", help="How often all is repeated.")] = 10,
    failure_model: Annotated[
        str,
        typer.Option(
            metavar="MODEL",
            help="What the group of a missing peer does: alive, the others average; group, nobody "
            "does.",
        ),
    ] = "alive",
    algorithms: Annotated[
        str, typer.Option(metavar="LIST", help="Which, with commas between them.")
    ] = "all-reduce,gossip,sgp,push-sum,random-groups,paper-grid,moshpit",
    seed: Annotated[int, typer.Option(metavar="S", help="Where all randomness comes from.")] = 0,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write every round as CSV; - is stdout."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the curves: .svg, .png or .pdf; needs matplotlib."),
    ] = None,
) -> None:
    """Average one number per peer, and see how fast the peers agree (paper §4.1, figure 3).

    No network and no time: the algorithms themselves, in whole-array steps, also for a million
    peers. The variance is over all peers; the table says after how many rounds it is
    below 1e-4 and 1e-9.

    **Examples**

        moshpit experiment averaging --peers 768 --failure 0.005 --plot averaging.svg
        # what does a peer cost that makes its whole group skip the round?
        moshpit experiment averaging --failure 0.005 --failure-model group \\
            --algorithms random-groups,paper-grid,moshpit
    """  # fmt: skip
    from moshpit.experiments import averaging as experiment
    from moshpit.experiments import plots
    from moshpit.sim.averaging import Failure

    try:
        model = Failure(failure_model)
    except ValueError:
        raise ConfigError(f"--failure-model {failure_model!r}: alive or group") from None
    setup = experiment.Setup(
        peers=peers, group_size=group_size, dims=dims, death=failure, failure=model,
        rounds=rounds, seeds=seeds, seed=seed,
    )  # fmt: skip
    names = experiment.algorithms_named(algorithms)
    output.check_place("--csv", csv_file)
    output.check_place("--plot", plot)
    found = experiment.run(setup, names, output.explain)
    to_stdout = csv_file is not None and str(csv_file) == "-"
    if csv_file is not None:
        _write_text("--csv", csv_file, experiment.as_csv(setup, found))
    if plot is not None:
        plots.write(experiment.plot(setup, found), plot)
    if not to_stdout:
        _show_averaging(setup, found)


def _write_text(option: str, path: Path, text: str) -> None:
    if str(path) == "-":
        typer.echo(text, nl=False)
        return
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{option} {path}: {error}") from error


def _show_averaging(setup: Setup, found: Mapping[str, Curve]) -> None:
    from moshpit.experiments.averaging import ALGORITHMS

    console = output.stdout()
    console.print(
        f"{setup}, {setup.axes} axes, {setup.seeds} seeds; variance over the peers, and rounds "
        "until it is below a threshold",
        soft_wrap=True,
    )
    shown = sorted({number for number in (1, 2, 3, 5, 10, setup.rounds) if number <= setup.rounds})
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("after round", no_wrap=True)
    for number in shown:
        table.add_column(str(number), justify="right", no_wrap=True)
    for threshold in (COARSE, FINE):
        table.add_column(f"to {threshold:.0e}", justify="right", no_wrap=True)
    for name, curve in found.items():
        spreads = curve.spreads
        table.add_row(
            ALGORITHMS[name].label,
            *(f"{spreads.mean[number]:.1e}" for number in shown),
            *(_rounds_until(spreads, threshold) for threshold in (COARSE, FINE)),
        )
    console.print(table)


def _rounds_until(spreads: Spreads, threshold: float) -> str:
    """Say after how many rounds, on average; ``>`` where not every run came there."""
    missed = bool((spreads.each.min(1) >= threshold).any())
    return f"{'>' if missed else ''}{spreads.rounds_until(threshold).mean():.1f}"


@experiment_app.command("protocol")
def protocol(  # noqa: PLR0917 - typer reads the parameters
    peers: Annotated[int, typer.Option(metavar="N", help="How many peers.")] = 512,
    group_size: Annotated[int, typer.Option(metavar="M", help="Peers in a group.")] = 32,
    failure: Annotated[
        float, typer.Option(metavar="P", help="The probability that a peer crashes in a round.")
    ] = 0.005,
    epochs: Annotated[int, typer.Option(metavar="E", help="Averagings, of d rounds each.")] = 3,
    values: Annotated[int, typer.Option(metavar="K", help="Numbers that each peer has.")] = 32,
    seeds: Annotated[int, typer.Option(metavar="S", help="How many swarms to simulate.")] = 4,
    runs: Annotated[int, typer.Option(metavar="R", help="How often to run the model.")] = 300,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="J", help="Swarms at a time. Default: one for each processor."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw both: .svg, .png or .pdf; needs matplotlib."),
    ] = None,
) -> None:
    """Set the real protocol, in the simulator, beside the arithmetic of its schedule.

    Peers crash for good, with the same probability in both. Every value of every peer is compared
    with what arithmetic makes of its groups, too. Exit status 1: after some round the protocol is
    outside the model's 99 % band, a value is off, or an invariant was violated. 512 peers take
    minutes, 48 take seconds.

    **Example**

        moshpit experiment protocol --peers 48 --group-size 7 --failure 0.02 --values 7
    """
    from moshpit.experiments import agreement, plots

    case = agreement.Case(
        peers=peers, group_size=group_size, death=failure, epochs=epochs, values=values,
        seeds=seeds, runs=runs,
    )  # fmt: skip
    output.check_place("--plot", plot)
    (found,) = agreement.compare([case], jobs=_jobs(jobs), say=output.explain)
    if plot is not None:
        plots.write(agreement.plot(found), plot)
    _show_agreement(found)
    if not found.agrees:
        raise typer.Exit(1)


def _show_agreement(found: Compared) -> None:
    console = output.stdout()
    console.print(
        f"{found.case}: {found.case.seeds} swarms with {found.crashes} crashes, simulated in "
        f"{human_s(found.seconds)}",
        soft_wrap=True,
    )
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("round", "protocol", "model", "low", "high", ""):
        table.add_column(name, justify="right", no_wrap=True)
    for number, (value, *model) in enumerate(
        zip(found.protocol, found.model, found.low, found.high, strict=True)
    ):
        said = "outside" if number in found.outside else ""
        table.add_row(str(number), *(f"{cell:.2e}" for cell in (value, *model)), said)
    console.print(table)
    console.print(f"no value is further than {found.apart:.1g} from its groups' arithmetic")
    for text in found.violated:
        console.print(text, markup=False, soft_wrap=True)


@experiment_app.command("all")
def all_(
    report: Annotated[
        Path, typer.Option(metavar="DIR", help="Where report.html is to be written.")
    ],
    small: Annotated[
        bool, typer.Option("--small", help="Fewer seeds and smaller swarms: minutes, not hours.")
    ] = False,
    only: Annotated[
        str | None, typer.Option(metavar="LIST", help="These experiments alone, with commas.")
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="J", help="Processes at a time. Default: one for each processor."),
    ] = None,
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Take what an earlier run has kept in DIR, of this size."),
    ] = False,
) -> None:
    """Run every experiment and write one page with all figures and tables.

    The page holds its figures and needs no network. An experiment that fails is named on it, the
    others are there, and the exit status is 1. Each that is done is kept in DIR: if the run
    is interrupted, the same command with `--resume` goes on from there.
    """
    from moshpit.experiments import report as pages
    from moshpit.experiments.catalogue import CATALOGUE, experiment
    from moshpit.experiments.kept import keep, kept
    from moshpit.experiments.section import Context

    began = time.perf_counter()
    names = [name.strip() for name in only.split(",")] if only is not None else list(CATALOGUE)
    chosen = {name: experiment(name) for name in names}
    pages.make_folder(report)
    command = f"moshpit experiment all --report {report}" + (" --small" if small else "")
    context = Context(small, output.explain, _jobs(jobs))
    sections: list[Section] = []
    failed: list[pages.Failed] = []
    again: list[str] = []
    for name, run in chosen.items():
        found = kept(report, name, small) if resume else None
        if found is not None:
            again.append(name)
            sections.append(found)
            continue
        try:
            found = _timed(run, context)
        except MoshpitError as error:
            failed.append(pages.Failed(name, str(error)))
            output.report_error(f"experiment {name}: {error}")
            continue
        sections.append(replace(found, commands=(*found.commands, f"{command} --only {name}")))
        keep(report, name, small, sections[-1])
    command += f" --only {only}" if only is not None else ""
    facts = pages.facts_here(time.perf_counter() - began, human_s)
    if again:
        facts["kept from an earlier run"] = ", ".join(again)
    file = pages.write(report, pages.page(sections, failed, facts, command))
    output.stdout().print(f"wrote {file}", markup=False, soft_wrap=True)
    if failed:
        raise typer.Exit(1)


def _jobs(given: int | None) -> int:
    """Return how many processes may work at a time.

    Raises:
        ConfigError: none.
    """
    if given is not None and given < 1:
        raise ConfigError(f"--jobs {given}: give 1 or more")
    return given if given is not None else os.cpu_count() or 1


def _timed(run: Experiment, context: Context) -> Section:
    """Run an experiment, and note its time and what it has computed, in its processes too."""
    began, before = time.perf_counter(), os.times()
    section = run(context)
    after = os.times()
    cpu_s = sum(after[:4]) - sum(before[:4])
    return replace(section, seconds=time.perf_counter() - began, cpu_s=cpu_s)
