"""`moshpit experiment training`: methods and fleets compared by training in virtual time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from moshpit.cli import output
from moshpit.errors import ConfigError

if TYPE_CHECKING:
    from moshpit.experiments import section


def training(  # noqa: PLR0917 - typer reads the parameters
    which: Annotated[
        str,
        typer.Option(
            "--preset",
            metavar="NAME",
            help="vision: Moshpit against its rivals; language: preemptible machines against "
            "reliable ones.",
        ),
    ] = "vision",
    methods: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="vision: which methods, with commas. Default: all."),
    ] = None,
    fleets: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="vision: homogeneous, heterogeneous, failures. Default: all, the latter with "
            "peers that die.",
        ),
    ] = None,
    peers: Annotated[
        int | None,
        typer.Option(metavar="N", help="How many (the preemptible ones). Default: 16; 32."),
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(metavar="S", help="How often all is repeated. Default: 5; 3.")
    ] = None,
    seed: Annotated[int, typer.Option(metavar="S", help="The first of them.")] = 0,
    target: Annotated[
        float | None, typer.Option(metavar="X", help="Until which accuracy, or loss.")
    ] = None,
    limit: Annotated[
        float | None, typer.Option(metavar="S", help="vision: end after so many virtual seconds.")
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="vision: the learning rate. Default: each method's own."),
    ] = None,
    period: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="vision: local steps between averagings, where a method has such. Default: 4.",
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(metavar="N", help="language: end after the time of so many steps.")
    ] = None,
    slowness: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="language: how many times as long as a reliable machine the kinds of preemptible "
            "ones compute. Default: 1.6,2,2.5.",
        ),
    ] = None,
    prices: Annotated[
        str | None,
        typer.Option(
            metavar="A,B",
            help="language: USD an hour of a reliable machine, and of a preemptible one. Default: "
            "3.06,0.2.",
        ),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(metavar="J", help="Runs at a time. Default: one for each processor."),
    ] = None,
    csv_file: Annotated[
        Path | None,
        typer.Option("--csv", metavar="FILE", help="Write all that was seen as CSV."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw the (first) fleet's curves; needs matplotlib."),
    ] = None,
) -> None:
    """Train by several methods, or on several fleets, in virtual time (paper §4.2, §4.3).

    Models, gradients, strategies and the protocol are real; seconds come from a simulated network
    and a stated model of computing, so that they do not depend on this machine.

    **Examples**

        moshpit experiment training --fleets heterogeneous --plot vision.svg
        # how do eight peers do with these two, twice?
        moshpit experiment training --methods moshpit,ad-psgd --seeds 2 --peers 8
        # what if the cheap machines were three times as slow, and cost 30 cents?
        moshpit experiment training --preset language --slowness 3 --prices 3.06,0.3
    """
    jobs = jobs if jobs is not None else os.cpu_count() or 1
    if jobs < 1 or (seeds is not None and seeds < 1):
        raise ConfigError("--jobs and --seeds: give 1 or more")
    only = {
        "vision": {
            "--methods": methods, "--fleets": fleets, "--limit": limit, "--rate": rate,
            "--period": period,
        },
        "language": {"--steps": steps, "--slowness": slowness, "--prices": prices},
    }  # fmt: skip
    for preset, options in only.items():
        strange = [name for name, value in options.items() if value is not None]
        if strange and preset != which and which in only:
            raise ConfigError(f"{', '.join(strange)}: for --preset {preset}, not for {which}")
    output.check_place("--csv", csv_file)
    output.check_place("--plot", plot)
    if which == "vision":
        given = _given(seed=seed, peers=peers, enough=target, limit_s=limit)
        given |= _given(rate=rate, period=period)
        found = _vision(methods, fleets, given, (seeds or 5, jobs))
    elif which == "language":
        given = _given(seed=seed, preemptible=peers, enough=target, steps=steps)
        found = _language(given | _machines(slowness, prices), (seeds or 3, jobs))
    else:
        raise ConfigError(f"--preset {which!r}: vision or language")
    tables, csv_text, draw = found
    if csv_file is not None:
        _write(csv_file, csv_text)
    if plot is not None:
        from moshpit.experiments import plots

        plots.write(draw(), plot)
    for table in tables:
        _show(table)


def _given(**values: float | None) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def _machines(slowness: str | None, prices: str | None) -> dict[str, Any]:
    given: dict[str, Any] = {}
    if slowness is not None:
        given["slowness"] = _numbers("--slowness", slowness)
    if prices is not None:
        both = _numbers("--prices", prices)
        if len(both) != 2:
            raise ConfigError(f"--prices {prices!r}: give two numbers, such as 3.06,0.2")
        given |= {"reliable_usd": both[0], "preemptible_usd": both[1]}
    return given


def _numbers(option: str, text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"{option} {text!r}: numbers with commas between them") from None


def _vision(
    methods: str | None, fleets: str | None, given: dict[str, Any], size: tuple[int, int]
) -> tuple[list[section.Table], str, Any]:
    from moshpit.experiments import comparison

    (seeds, jobs), plan = size, comparison.Plan(**given)
    chosen = _names(methods, comparison.METHODS)
    where = _names(fleets, comparison.FLEETS)
    results = comparison.run_study(
        plan, methods=chosen, fleets=where, seeds=seeds, jobs=jobs, say=output.explain
    )
    tables = [comparison.table_of(results, fleet, plan, seeds) for fleet in where]
    return tables, comparison.as_csv(results), lambda: comparison.plot(results, where[0])


def _language(given: dict[str, Any], size: tuple[int, int]) -> tuple[list[section.Table], str, Any]:
    from moshpit.experiments import preemptible

    (seeds, jobs), plan = size, preemptible.Plan(**given)
    results = preemptible.run_study(plan, seeds=seeds, jobs=jobs, say=output.explain)
    tables = list(preemptible.tables_of(plan, results))
    return tables, preemptible.as_csv(results), lambda: preemptible.plot(results)


def _names(text: str | None, known: Any) -> list[str]:
    return list(known) if text is None else [name.strip() for name in text.split(",")]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--csv {path}: {error}") from error


def _show(table: section.Table) -> None:
    shown = Table(title=table.title, box=None, pad_edge=False, header_style="bold")
    for number, name in enumerate(table.head):
        shown.add_column(name, justify="right" if number else "left")
    for row in table.rows:
        shown.add_row(*row)
    console = output.stdout()
    console.print(shown)
    console.print(table.text, soft_wrap=True, markup=False)
    console.print()
