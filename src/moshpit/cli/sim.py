"""`moshpit sim`: a swarm in the simulator, with faults, from a seed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

from moshpit.cli import output
from moshpit.errors import ConfigError
from moshpit.sim.scenario import Scenario, load, shipped
from moshpit.sim.simulate import Result, run_all
from moshpit.sim.simulate import run as simulate
from moshpit.sim.traffic import Load, measure

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
    jobs: Annotated[
        int, typer.Option(metavar="J", min=1, max=256, help="Run seeds in so many processes.")
    ] = 1,
    membership: Annotated[
        str | None,
        typer.Option(
            metavar="N,N,...",
            help="Instead: measure what it costs a peer to know who is there, in swarms of these "
            "sizes.",
        ),
    ] = None,
    half_life: Annotated[
        float,
        typer.Option(
            metavar="SECONDS",
            help="With --membership: after which half of the peers have gone and others have come; "
            "0: only quiet swarms.",
        ),
    ] = 600.0,
    seconds: Annotated[
        float, typer.Option(metavar="SECONDS", help="With --membership: how long to count.")
    ] = 30.0,
) -> None:
    """Run a swarm in the simulator and check what must always hold.

    The machines are the ones that run on the internet; network, clock and faults are
    simulated. The same seed gives the same run, so a failure can be replayed. Without a
    SCENARIO the shipped ones are listed. Exit status 1: some invariant was violated.
    """
    if membership is not None:
        loads = _measure(_sizes(membership), half_life, seconds, seed)
        if json_file is None or str(json_file) != "-":
            _show_loads(loads)
        if json_file is not None:
            _write(json_file, [one.to_builtins() for one in loads])
        return
    if scenario is None:
        for name in shipped():
            typer.echo(name)
        return
    loaded = load(scenario)
    wanted = [seed] if seeds is None else _span(seeds)
    if trace is not None and len(wanted) > 1:
        raise ConfigError("--trace is of one run: give one --seed with it")
    quiet = json_file is not None and str(json_file) == "-"
    results = _run_all(loaded, wanted, peers, trace, jobs, quiet=quiet)
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
    scenario: Scenario,
    seeds: list[int],
    peers: int | None,
    trace: Path | None,
    jobs: int,
    *,
    quiet: bool,
) -> list[Result]:
    if trace is not None:
        with trace.open("w", encoding="utf-8") as log:
            made = iter([simulate(scenario, seeds[0], peers, log)])
    else:
        made = run_all(scenario, seeds, peers, min(jobs, len(seeds)))
    results: list[Result] = []
    for seed, result in zip(seeds, made, strict=True):
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
    if result.states:
        console.print(f"training states fetched from others: {result.states}")
    if result.heal_epochs is not None:
        console.print(
            f"averagings after the last fault that left peers apart: {result.heal_epochs}"
        )
    console.print(
        f"per peer: {result.bulk_bytes / 1e6:.2f} MB of chunks an epoch; membership "
        f"{result.membership_messages:.1f} messages/s, {result.membership_bytes / 1e3:.1f} KB/s; "
        f"other control {result.control_messages:.1f} messages/s",
        soft_wrap=True,
    )
    for finding in result.findings:
        console.print(f"{finding.invariant:<3}", end=" ")
        console.print(_mark(finding.ok, "holds", "VIOLATED"), end="")
        console.print(f", looked at {finding.checked} times")
    for line in _violations(result):
        console.print(line, markup=False, soft_wrap=True)
    console.print(f"trace {result.trace_hash}")


def _mark(ok: bool, good: str, bad: str) -> Text:
    return Text(good, "green") if ok else Text(bad, "bold red")


def _show_table(results: list[Result]) -> None:
    names = [finding.invariant for finding in results[0].findings]
    table = Table(box=None, pad_edge=False)
    outcomes = ("complete", "partial", "failed")
    shown = ("epoch", "compl.", "part.", "fail", "stale", "heal", "virt. s", "real s")
    for column in ("seed", *names, *shown):
        table.add_column(column, justify="right")
    for r in results:
        marks = [_mark(f.ok, "ok", str(f.violations)) for f in r.findings]
        counts = [str(r.rounds[name]) for name in outcomes]
        heals = "-" if r.heal_epochs is None else str(r.heal_epochs)
        times = (f"{r.virtual_s:.0f}", f"{r.real_s:.1f}")
        table.add_row(str(r.seed), *marks, str(r.epochs), *counts, str(r.stale), heals, *times)
    output.stdout().print(table)
    failed = [str(result.seed) for result in results if not result.ok]
    end = f": {' '.join(failed)}" if failed else ""
    text = f"{len(results)} seeds, {len(failed)} with violations{end}"
    output.stdout().print(text, soft_wrap=True)


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes:
        raise ConfigError(f"--membership {text!r}: expected numbers of peers, such as 100,1000")
    return sizes


def _measure(sizes: list[int], half_life_s: float, seconds: float, seed: int) -> list[Load]:
    loads: list[Load] = []
    for peers in sizes:
        quiet = measure(peers, half_life_s=0.0, seconds=seconds, seed=seed, quiet=0.0)
        loads.append(quiet)
        if half_life_s:
            loads.append(
                measure(
                    peers, half_life_s=half_life_s, seconds=seconds, seed=seed, quiet=quiet.bytes
                )
            )
    return loads


def _show_loads(loads: list[Load]) -> None:
    table = Table(box=None, pad_edge=False)
    for column in (
        "peers", "changes/s", "messages/s", "bytes/s", "bytes of a change", "views right after",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for one in loads:
        late = "not yet" if one.healed_s is None else f"{one.healed_s:.1f} s"
        table.add_row(
            str(one.peers),
            f"{one.changes:.2f}",
            f"{one.messages:.2f}",
            f"{one.bytes:.0f}",
            f"{one.bytes_per_change:.0f}" if one.changes else "-",
            late if one.changes else "-",
        )
    output.stdout().print("sent by each peer for membership:")
    output.stdout().print(table)


def _write(path: Path, results: list[dict[str, Any]]) -> None:
    text = json.dumps(results[0] if len(results) == 1 else results, indent=2)
    if str(path) == "-":
        typer.echo(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {error}") from error
