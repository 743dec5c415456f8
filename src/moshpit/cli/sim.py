"""`moshpit sim`: a swarm in the simulator, with faults, from a seed."""

from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from moshpit.cli import output
from moshpit.errors import ConfigError
from moshpit.sim.scenario import Scenario, load, shipped
from moshpit.sim.simulate import Result
from moshpit.sim.simulate import run as simulate

SEEDS_MAX = 100_000


def sim(  # noqa: PLR0917 - typer reads the parameters
    scenario: Annotated[
        str | None,
        typer.Argument(metavar="SCENARIO", help="A shipped scenario's name, or a TOML file."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="Where all randomness comes from.")] = 0,
    seeds: Annotated[
        str | None, typer.Option(metavar="A..B", help="Run all these seeds and show a table.")
    ] = None,
    peers: Annotated[
        int | None, typer.Option(metavar="N", help="How many peers, instead of the scenario's.")
    ] = None,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the results as JSON; - is stdout."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Write every event and effect, to read a failure as a story."
        ),
    ] = None,
) -> None:
    """Run a swarm in the simulator and check what must always hold.

    The machines are the ones that run on the internet; network, clock and faults are
    simulated. The same seed gives the same run, so a failure can be replayed. Without a
    SCENARIO the shipped ones are listed. Exit status 1: some invariant was violated.
    """
    if scenario is None:
        for name in shipped():
            typer.echo(name)
        return
    loaded = load(scenario)
    wanted = [seed] if seeds is None else _span(seeds)
    if trace is not None and len(wanted) > 1:
        raise ConfigError("--trace is of one run: give one --seed with it")
    quiet = json_file is not None and str(json_file) == "-"
    results = _run_all(loaded, wanted, peers, trace, quiet=quiet)
    if json_file is not None:
        _write(json_file, [result.to_builtins() for result in results])
    if not all(result.ok for result in results):
        raise typer.Exit(1)


def _span(text: str) -> list[int]:
    first, dots, last = text.partition("..")
    try:
        span = range(int(first), int(last) + 1)
    except ValueError:
        span = range(0)
    if not dots or not 0 < len(span) <= SEEDS_MAX:
        raise ConfigError(f"--seeds {text!r}: expected A..B with A ≤ B, such as 0..29")
    return list(span)


def _run_all(
    scenario: Scenario, seeds: list[int], peers: int | None, trace: Path | None, *, quiet: bool
) -> list[Result]:
    results: list[Result] = []
    for seed in seeds:
        with trace.open("w", encoding="utf-8") if trace is not None else nullcontext() as log:
            result = simulate(scenario, seed, peers, log)
        results.append(result)
        if not quiet and len(seeds) == 1:
            _show(result)
        elif not result.ok:
            for line in _violations(result):
                output.explain(f"seed {seed}: {line}")
    if not quiet and len(seeds) > 1:
        _show_table(results)
    return results


def _violations(result: Result) -> list[str]:
    return [
        f"{f.invariant} violated {f.violations} times, first {f.first}"
        for f in result.findings
        if not f.ok
    ]


def _show(result: Result) -> None:
    console = output.stdout()
    rounds = ", ".join(f"{count} {name}" for name, count in result.rounds.items())
    console.print(
        f"{result.scenario}, seed {result.seed}, {result.peers} peers: {result.epochs} epochs in "
        f"{result.virtual_s:.1f} virtual and {result.real_s:.1f} real seconds",
        soft_wrap=True,
    )
    console.print(f"rounds: {rounds}; averagings that came too late: {result.stale}")
    console.print(
        f"per peer: {result.bulk_bytes / 1e6:.2f} MB of chunks an epoch; membership "
        f"{result.membership_messages:.1f} messages/s, {result.membership_bytes / 1e3:.1f} KB/s; "
        f"other control {result.control_messages:.1f} messages/s",
        soft_wrap=True,
    )
    for finding in result.findings:
        state = "[green]holds[/]" if finding.ok else "[bold red]VIOLATED[/]"
        console.print(f"{finding.invariant:<3} {state}, looked at {finding.checked} times")
    for line in _violations(result):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"trace {result.trace_hash}")


def _show_table(results: list[Result]) -> None:
    names = [finding.invariant for finding in results[0].findings]
    table = Table(box=None, pad_edge=False)
    outcomes = ("complete", "partial", "failed")
    for column in ("seed", *names, "epochs", *outcomes, "stale", "virtual", "real"):
        table.add_column(column, justify="right")
    for r in results:
        marks = ["[green]ok[/]" if f.ok else f"[bold red]{f.violations}[/]" for f in r.findings]
        counts = [str(r.rounds[name]) for name in outcomes]
        times = (f"{r.virtual_s:.0f} s", f"{r.real_s:.1f} s")
        table.add_row(str(r.seed), *marks, str(r.epochs), *counts, str(r.stale), *times)
    output.stdout().print(table)
    failed = [str(result.seed) for result in results if not result.ok]
    end = f": {' '.join(failed)}" if failed else ""
    text = f"{len(results)} seeds, {len(failed)} with violations{end}"
    output.stdout().print(text, soft_wrap=True)


def _write(path: Path, results: list[dict[str, object]]) -> None:
    text = json.dumps(results[0] if len(results) == 1 else results, indent=2)
    if str(path) == "-":
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error}") from error
