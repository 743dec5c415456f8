"""`moshpit plan`: what a run will cost, and which way to average."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Annotated

import msgspec
import typer
from rich.table import Table

from moshpit.cli import output
from moshpit.cli.parse import count_of, human_bytes, human_s, seconds_of
from moshpit.errors import ConfigError
from moshpit.planning.codecs import CODECS, codec_named
from moshpit.planning.forecast import STRATEGIES, Choice, Forecast, PlannedRun
from moshpit.planning.recommend import GROUP_SIZES, Options, Recommendation, recommend
from moshpit.planning.schedules import SCHEDULES
from moshpit.planning.swarm import PlannedSwarm, swarm_of
from moshpit.protocol.grid import plan as grid_plan

_BYTES_PER_MBIT = 1e6 / 8

Classes = list[tuple[int, float, float]]
"""Of each class of peers: how many, bytes per second up, and down."""


def plan(  # noqa: PLR0917 - typer reads the parameters
    params: Annotated[str, typer.Option(metavar="N", help="Parameters of the model: 350M, 1.3B.")],
    step_time: Annotated[
        str,
        typer.Option(
            metavar="TIME", help="One local step without averaging, as you measured it: 0.8, 300ms."
        ),
    ],
    mbit: Annotated[
        str,
        typer.Option(
            metavar="LINKS",
            help="Mbit/s of each peer, down/up where they differ: 200 or 100/20. Or classes of "
            "peers, 8x1000,16x100/20, which together are all peers.",
        ),
    ],
    peers: Annotated[
        int | None, typer.Option(metavar="N", help="How many peers; not needed with classes.")
    ] = None,
    clients: Annotated[
        int, typer.Option(metavar="K", help="So many, the slowest, cannot be dialled.")
    ] = 0,
    latency_ms: Annotated[
        float, typer.Option(metavar="MS", help="The round trip between two peers.")
    ] = 50.0,
    batch: Annotated[
        str | None,
        typer.Option(metavar="N", help="Samples (or tokens) of one local step of one peer."),
    ] = None,
    samples: Annotated[
        str | None,
        typer.Option(metavar="N", help="Samples (or tokens) of the whole run; needs --batch."),
    ] = None,
    price: Annotated[float, typer.Option(metavar="MONEY", help="Of one peer for an hour.")] = 0.0,
    traffic_price: Annotated[
        float, typer.Option(metavar="MONEY", help="Of a GB (10⁹ bytes) that a peer sends.")
    ] = 0.0,
    strategy: Annotated[
        str, typer.Option(metavar="LIST", help="Strategies to choose from.")
    ] = ",".join(STRATEGIES),
    schedule: Annotated[
        str, typer.Option(metavar="LIST", help="Schedules to choose from.")
    ] = ",".join(SCHEDULES),
    codec: Annotated[str, typer.Option(metavar="LIST", help="Codecs to choose from.")] = ",".join(
        codec.name for codec in CODECS
    ),
    period: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Local steps between two averagings; by default what practice supports.",
        ),
    ] = None,
    group_size: Annotated[
        str, typer.Option(metavar="LIST", help="Group sizes to choose from.")
    ] = ",".join(map(str, GROUP_SIZES)),
    slack: Annotated[
        float,
        typer.Option(
            metavar="SHARE",
            help="How much more than the cheapest way may cost, for training closer to one big "
            "batch.",
        ),
    ] = 0.1,
    dtype: Annotated[
        str, typer.Option(metavar="DTYPE", help="Of weights, gradients and moments: for memory.")
    ] = "float32",
    json: Annotated[bool, typer.Option("--json", help="Print it as JSON instead.")] = False,
) -> None:
    """Predict what a run will cost, and recommend a way to average.

    Nothing is run or measured: a model of links, bytes and time compares every strategy,
    schedule, codec, period and group size, and says which to take and why. Faults, stragglers
    and how well the model will train are not in it.

    **Examples**

        moshpit plan --params 1.3B --step-time 0.8 --peers 24 --mbit 200
        # eight in a data centre, sixteen homes of which four cannot be dialled; with prices
        moshpit plan --params 350M --step-time 300ms --mbit 8x1000,16x100/20 --clients 4 \\
            --price 0.35 --traffic-price 0.02
        # only averaging of parameters, every 8 or 32 steps
        moshpit plan --params 50M --step-time 0.2 --peers 8 --mbit 100 --strategy LocalSGD \\
            --period 8,32
    """  # fmt: skip
    if samples is not None and batch is None:
        raise ConfigError("--samples needs --batch, the samples of one local step of one peer")
    swarm = swarm_of(classes_of(mbit, peers), clients, latency_ms / 1e3)
    run = PlannedRun(
        params=round(count_of(params)),
        step_s=seconds_of(step_time),
        swarm=swarm,
        batch=count_of(batch) if batch is not None else None,
        samples=count_of(samples) if samples is not None else None,
        price_per_hour=price,
        price_per_gb=traffic_price,
        dtype=dtype,
    )
    options = Options(
        strategies=_words(strategy, "--strategy"),
        schedules=_words(schedule, "--schedule"),
        codecs=[codec_named(name) for name in _words(codec, "--codec")],
        periods=_whole(period, "--period") if period is not None else (),
        group_sizes=_whole(group_size, "--group-size"),
        slack=slack,
    )
    found = recommend(run, options)
    if json:
        typer.echo(msgspec.json.format(msgspec.json.encode(as_data(run, found))).decode())
    else:
        show(run, found)


def classes_of(links: str, peers: int | None) -> Classes:
    """Read ``--mbit`` and ``--peers``.

    Raises:
        ConfigError: it is none of the forms, or the two do not agree.

    Example:
        >>> classes_of("8", 2), classes_of("1x80,2x16/8", None)
        ([(2, 1000000.0, 1000000.0)], [(1, 10000000.0, 10000000.0), (2, 1000000.0, 2000000.0)])
    """
    found: Classes = []
    for word in _words(links, "--mbit"):
        form = re.fullmatch(r"(?:(\d{1,6})x)?([\d.]+)(?:/([\d.]+))?", word)
        if form is None or (form[1] is None and "," in links):
            raise ConfigError(
                f"--mbit {word!r}: write 200, or 100/20 for down/up, or classes such as "
                "8x1000,16x100/20"
            )
        if form[1] is None and peers is None:
            raise ConfigError("--peers: say how many, or give classes such as --mbit 24x200")
        down = _speed(form[2], word)
        up = _speed(form[3], word) if form[3] is not None else down
        found.append((int(form[1]) if form[1] is not None else peers or 0, up, down))
    count = sum(number for number, _, _ in found)
    if peers is not None and count != peers:
        raise ConfigError(f"--mbit {links} is of {count} peers, --peers says {peers}")
    return found


def _speed(text: str, word: str) -> float:
    try:
        return float(text) * _BYTES_PER_MBIT
    except ValueError:
        raise ConfigError(f"--mbit {word!r}: {text!r} is no number") from None


def _words(text: str, option: str) -> list[str]:
    words = [word.strip() for word in text.split(",")]
    if not all(words):
        raise ConfigError(f"{option} {text!r}: write one or more, with commas between them")
    return words


def _whole(text: str, option: str) -> list[int]:
    words = _words(text, option)
    if not all(re.fullmatch(r"\d{1,9}", word) for word in words):
        raise ConfigError(f"{option} {text!r}: write whole numbers, with commas between them")
    return [int(word) for word in words]


# --- what is printed ----------------------------------------------------------------------------


def as_data(run: PlannedRun, found: Recommendation) -> dict[str, object]:
    """Return the plan, for programs."""
    return {
        "params": run.params,
        "peers": len(run.swarm.peers),
        "clients": run.swarm.clients,
        "recommended": row_of(found.best),
        "why": found.why,
        "notes": found.notes,
        "cheapest": row_of(found.cheapest),
        "alternatives": {
            thing: [row_of(one) for one in rows] for thing, rows in found.alternatives.items()
        },
    }


def row_of(one: Forecast) -> dict[str, object]:
    """Return one forecast, for programs; units are in the names."""
    choice, averaging = one.choice, one.averaging
    return {
        "strategy": choice.strategy,
        "schedule": choice.schedule,
        "codec": choice.codec.name,
        "period_steps": choice.period,
        "group_size": choice.group_size,
        "overlap": choice.overlap,
        "step_s": one.step_s,
        "epoch_s": one.epoch_s,
        "averaging_share": one.averaging_share,
        "averaging_s": averaging.seconds,
        "meeting_s": averaging.meeting_s,
        "link_share": one.link_share,
        "cpu_s_max": averaging.cpu_s,
        "peer_bytes_per_epoch": one.bytes_per_peer,
        "peer_bytes_per_epoch_max": averaging.bytes_max,
        "swarm_bytes_per_epoch": one.swarm_bytes,
        "memory_bytes": one.memory_bytes,
        "money_per_epoch": one.money_per_epoch,
        "money_per_step": one.money_per_step,
        "run_s": one.run_s,
        "money_per_run": one.money_per_run,
    }


def show(run: PlannedRun, found: Recommendation) -> None:
    """Print the recommendation, and what else there is."""
    console = output.stdout()
    for line in summary(run, found):
        console.print(line, markup=False, soft_wrap=True)
    console.print()
    console.print(_table(run, found))
    console.print("(step: all included. share: of the time, for averaging.)")
    for note in found.notes:
        console.print(f"Note: {note}", markup=False, soft_wrap=True)


def summary(run: PlannedRun, found: Recommendation) -> list[str]:
    """Return the recommendation in a few lines."""
    best, choice, averaging = found.best, found.best.choice, found.best.averaging
    how = "while training goes on" if choice.overlap else "while training waits"
    lines = [
        f"Recommended: {choice.strategy}, averaging {_every(choice)} {how}; codec "
        f"{choice.codec.name}, {_groups(run.swarm, choice.schedule, choice.group_size)}.",
        found.why,
        f"A step takes {human_s(best.step_s)} with everything ({human_s(run.step_s)} without "
        f"averaging), an epoch {human_s(best.epoch_s)}, one averaging "
        f"{human_s(averaging.seconds)}. Averaging costs {_share(best)} of the time.",
        f"Each epoch a peer sends {human_bytes(best.bytes_per_peer)} on average (at most "
        f"{human_bytes(averaging.bytes_max)}), the swarm {human_bytes(best.swarm_bytes)}. A peer "
        f"needs {human_bytes(best.memory_bytes)} of memory, activations not included.",
    ]
    if run.priced:
        lines.append(
            f"Money: {best.money_per_epoch:.4g} per epoch, {1000 * best.money_per_step:.4g} "
            "per 1000 steps."
        )
    if best.run_s is not None and best.money_per_run is not None:
        money = f" and {best.money_per_run:.4g} of money" if run.priced else ""
        lines.append(f"The whole run: {human_s(best.run_s)}{money}.")
    return lines


def _groups(swarm: PlannedSwarm, schedule: str, size: int) -> str:
    axes = grid_plan(len(swarm.peers), size).axes
    if axes == 1:
        return f"all {len(swarm.peers)} peers in one group (group size {size})"
    return f"schedule {schedule}, groups of {size}"


def _every(choice: Choice) -> str:
    return "every step" if choice.period == 1 else f"every {choice.period} steps"


def _share(one: Forecast) -> str:
    return f"{100 * one.averaging_share:.1f} %"


def _table(run: PlannedRun, found: Recommendation) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("", no_wrap=True)
    table.add_column("instead of that", overflow="fold")
    names = ("step", "share", "sends/epoch", "memory")
    for name in (*names, *(("money/1000",) if run.priced else ())):
        table.add_column(name, justify="right", no_wrap=True)
    best = _cells(run, "recommended", found.best)
    table.add_row("", *best, style="bold")
    for thing, rows in found.alternatives.items():
        for place, one in enumerate(rows):
            name_it = _CHANGED.get(thing)
            whole = _whole_choice(one.choice, len(run.swarm.peers))
            changed = name_it(one.choice) if name_it else whole
            name = "" if place or thing == "overlap" else thing.replace("_", " ")
            table.add_row(name, *_cells(run, changed, one))
    return table


def _whole_choice(choice: Choice, peers: int) -> str:
    groups = f"{choice.schedule} of {choice.group_size}"
    if grid_plan(peers, choice.group_size).axes == 1:
        groups = "one group"
    waits = "" if choice.overlap else ", waiting"
    return f"{choice.strategy}, {_every(choice)}, {choice.codec.name}, {groups}{waits}"


_CHANGED: dict[str, Callable[[Choice], str]] = {
    "schedule": lambda choice: choice.schedule,
    "codec": lambda choice: choice.codec.name,
    "period": _every,
    "group_size": lambda choice: str(choice.group_size),
    "overlap": lambda choice: "training goes on" if choice.overlap else "training waits",
}
"""How to name what a row of the table has changed; another strategy changes everything."""


def _cells(run: PlannedRun, name: str, one: Forecast) -> list[str]:
    cells = [
        name,
        human_s(one.step_s),
        _share(one),
        human_bytes(one.bytes_per_peer),
        human_bytes(one.memory_bytes),
    ]
    if run.priced:
        cells.append(f"{1000 * one.money_per_step:.4g}")
    return cells
