"""What the benchmark found: figures, ratios and whether the means were right."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import torch
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

import moshpit
from moshpit.cli.bench_rivals import MOSHPIT
from moshpit.cli.bench_run import Plan, Round
from moshpit.cli.bench_worker import SLICE, coefficients, expected, fill
from moshpit.cli.parse import human_bytes, human_s
from moshpit.runtime.autocodec import AutoCodec, codec_or_auto
from moshpit.tensors.codecs import codec_named

TOLERANCE = 1e-5
"""How far a mean may be off by float32's rounding, relative to the largest true number."""


class Spread(msgspec.Struct, frozen=True):
    """A median over rounds, and the quartiles."""

    median: float
    q1: float
    q3: float


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One engine in numbers; medians over rounds.

    Attributes:
        seconds: of the slowest process.
        meeting_s, moving_s, rest_s: where that process's time went: finding its group, moving
            chunks, everything else (copies, threads). None for rivals.
        cpu_s: user and system, of all processes together.
        extra_copies: memory above the tensor's own at the worst moment of the worst process,
            in vectors. None where the system does not tell.
        sent_copies: payload bytes of the process that sent most, in vectors. None for rivals.
        link_share: the physical limit / `seconds`. None without shaped links.
        error: the worst difference from the true mean, relative to its largest number.
        rounds_s: `seconds` of each round.
    """

    seconds: Spread
    meeting_s: float | None
    moving_s: float | None
    rest_s: float | None
    cpu_s: float
    extra_copies: float | None
    sent_copies: float | None
    link_share: float | None
    error: float
    rounds_s: list[float]


class Ratio(msgspec.Struct, frozen=True):
    """Moshpit's median through a rival's."""

    seconds: float
    cpu_s: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it was measured.

    Attributes:
        cpus: cores that the benchmark may use.
        load_before: processes that wanted to run in the minute before it.
        congestion: TCP's congestion control where a socket asks for no other; gloo asks for
            none, Moshpit's settings for BBR.
        system, python, torch, moshpit: versions.
    """

    cpus: int
    load_before: float
    congestion: str
    system: str
    python: str
    torch: str
    moshpit: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The benchmark in numbers; the keys of ``--json``.

    Attributes:
        date: when, UTC.
        machine: where.
        peers, group_size, codec, schedule, in_place, plaintext, preset, rounds, warmup: as asked
            for.
        vector_bytes: of the float32 vector.
        link_mbit: of each peer; empty on loopback.
        told: whether the peers were told so.
        loss_percent: of the packets that arrive at each peer.
        rival_rows: the rows of gloo's grid; 1 if it averages in one group.
        limit_s: the least time that the links allow; None on loopback.
        engines: Moshpit's and the rivals' figures.
        ratios: Moshpit through each rival.
        failures: what was wrong with means; empty if all is well.
    """

    date: str
    machine: Machine
    peers: int
    group_size: int
    vector_bytes: int
    codec: str
    schedule: str
    in_place: bool
    plaintext: bool
    preset: str
    link_mbit: list[float]
    told: bool
    loss_percent: float
    rounds: int
    warmup: int
    rival_rows: int
    limit_s: float | None
    engines: dict[str, Figures]
    ratios: dict[str, Ratio]
    failures: list[str]


def machine() -> Machine:
    """Describe this machine; call it before the benchmark adds to the load."""
    affinity = getattr(os, "sched_getaffinity", None)
    return Machine(
        cpus=len(affinity(0)) if affinity is not None else os.cpu_count() or 1,
        load_before=os.getloadavg()[0],
        congestion=_default_congestion(),
        system=f"{platform.system()} {platform.release()} {platform.machine()}",
        python=platform.python_version(),
        torch=str(torch.__version__),
        moshpit=moshpit.__version__,
    )


def _default_congestion() -> str:
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return "unknown"


def result_of(plan: Plan, where: Machine, measured: Mapping[str, Sequence[Round]]) -> Result:
    """Put the measured rounds together."""
    engines = {name: figures_of(plan, rounds) for name, rounds in measured.items()}
    ours = engines[MOSHPIT]
    return Result(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=where,
        peers=plan.peers,
        group_size=plan.group_size,
        vector_bytes=plan.vector_bytes,
        codec=plan.codec,
        schedule=plan.schedule,
        in_place=plan.in_place,
        plaintext=plan.plaintext,
        preset=plan.preset,
        link_mbit=list(plan.link_mbit),
        told=plan.told and bool(plan.link_mbit),
        loss_percent=plan.loss_percent,
        rounds=plan.rounds,
        warmup=plan.warmup,
        rival_rows=plan.rival_rows,
        limit_s=plan.limit_s,
        engines=engines,
        ratios={
            name: Ratio(
                ours.seconds.median / rival.seconds.median,
                ours.cpu_s / rival.cpu_s if rival.cpu_s else float("inf"),
            )
            for name, rival in engines.items()
            if name != MOSHPIT
        },
        failures=failures_of(plan, measured),
    )


def figures_of(plan: Plan, rounds: Sequence[Round]) -> Figures:
    """Return the medians of one engine."""
    seconds = spread([r.seconds for r in rounds])
    return Figures(
        seconds=seconds,
        meeting_s=_median([r.meeting_s for r in rounds]),
        moving_s=_median([r.moving_s for r in rounds]),
        rest_s=_median([_rest_s(r) for r in rounds]),
        cpu_s=statistics.median(r.cpu_s for r in rounds),
        extra_copies=_worst([r.extra_bytes for r in rounds], plan.vector_bytes),
        sent_copies=_worst([r.bytes_sent for r in rounds], plan.vector_bytes),
        link_share=None if plan.limit_s is None else plan.limit_s / seconds.median,
        error=max(r.error for r in rounds),
        rounds_s=[r.seconds for r in rounds],
    )


def spread(values: Sequence[float]) -> Spread:
    """Return median and quartiles.

    >>> spread([4.0, 1.0, 2.0, 3.0])
    Spread(median=2.5, q1=1.75, q3=3.25)
    """
    if len(values) == 1:
        return Spread(values[0], values[0], values[0])
    q1, median, q3 = statistics.quantiles(values, n=4, method="inclusive")
    return Spread(median, q1, q3)


def _rest_s(one: Round) -> float | None:
    if one.meeting_s is None or one.moving_s is None:
        return None
    return max(0.0, one.seconds - one.meeting_s - one.moving_s)


def _median(values: Sequence[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.median(known) if known else None


def _worst(values: Sequence[int | None], unit: int) -> float | None:
    known = [v for v in values if v is not None]
    return max(known) / unit if known else None


def failures_of(plan: Plan, measured: Mapping[str, Sequence[Round]]) -> list[str]:
    """Return a line for each round whose mean was wrong or not everybody's."""
    wrong: list[str] = []
    for name, rounds in measured.items():
        tolerance = tolerance_of(plan) if name == MOSHPIT else TOLERANCE
        for number, one in enumerate(rounds, 1):
            if not one.error <= tolerance or one.problems:
                said = "; ".join(one.problems) or "no report says why"
                wrong.append(
                    f"{name}, round {number}: the mean is off by {one.error:.2g} of its largest "
                    f"number (at most {tolerance:.2g} is right): {said}"
                )
    return wrong


def tolerance_of(plan: Plan) -> float:
    """Return how far a mean may be off, relative to its largest number.

    With e the most that the codec changes any of the peers' values (or any that "auto" chooses
    from): contributions are off by at most e, and so is their mean, which is then encoded
    again; so 2e for each axis of the grid.
    Codecs that leave out most numbers have an e as large as the values: with them only the
    reports say whether everybody is in.
    """
    chosen = codec_or_auto(plan.codec)
    names = chosen.names if isinstance(chosen, AutoCodec) else (chosen.name,)
    codecs = [codec_named(name) for name in names]
    if all(codec.in_place for codec in codecs):
        return TOLERANCE
    values, number = torch.empty(SLICE), 0
    changed = 0.0
    pairs = [coefficients(index, number) for index in range(plan.peers)]
    for a, b in pairs:
        fill(values, a, b)
        for codec in codecs:
            off = (codec.decode(codec.encode(values)) - values).abs().max().item()
            changed = max(changed, off)
    a, b = expected(plan.peers, number)
    axes = 1
    while plan.group_size**axes < plan.peers:
        axes += 1
    return TOLERANCE + 2 * axes * changed / (abs(a) + abs(b))


# --- for people --------------------------------------------------------------------------------


class Shown:
    """A result as a line and a table; `rich` prints it."""

    def __init__(self, result: Result) -> None:
        self._result = result

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield what is printed."""
        yield headline(self._result)
        yield self._table()

    def _table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("per round", no_wrap=True)
        for name in self._result.engines:
            table.add_column(name, justify="right", no_wrap=True)
        for name in self._result.ratios:
            table.add_column(f"/ {name}", justify="right", no_wrap=True)
        for label, show in _ROWS:
            cells = [show(figures) for figures in self._result.engines.values()]
            if not any(cells):
                continue
            ratios = [""] * len(self._result.ratios)
            if label in _RATIOS:
                ratios = [f"{_RATIOS[label](r):.2f} ×" for r in self._result.ratios.values()]
            table.add_row(label, *cells, *ratios)
        return table


def headline(result: Result) -> str:
    """Say in a line what was measured."""
    grid = f", groups of {result.group_size}" if result.peers > result.group_size else ""
    links = "loopback"
    if result.link_mbit:
        speeds = [f"{mbit:g}" for mbit in result.link_mbit]
        links = f"links of {speeds[0] if len(set(speeds)) == 1 else ', '.join(speeds)} Mbit/s"
    if result.loss_percent:
        links += f" with {result.loss_percent:g} % loss"
    sealed = "plaintext" if result.plaintext else "encrypted"
    return (
        f"{result.peers} peers{grid}, {human_bytes(result.vector_bytes)} of float32, "
        f"codec {result.codec}, {sealed}, {links}; {result.rounds} rounds in turn after "
        f"{result.warmup}, {result.machine.cpus} cores"
    )


def _time(value: float | None) -> str:
    return "" if value is None else human_s(value)


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


_ROWS: tuple[tuple[str, Callable[[Figures], str]], ...] = (
    ("median", lambda f: human_s(f.seconds.median)),
    ("  of it meeting", lambda f: _time(f.meeting_s)),
    ("  moving", lambda f: _time(f.moving_s)),
    ("  the rest", lambda f: _time(f.rest_s)),
    ("lower quartile", lambda f: human_s(f.seconds.q1)),
    ("upper quartile", lambda f: human_s(f.seconds.q3)),
    ("CPU of all peers", lambda f: human_s(f.cpu_s)),
    ("memory, vectors", lambda f: _plain(f.extra_copies)),
    ("sent, vectors", lambda f: _plain(f.sent_copies)),
    ("share of the link", lambda f: "" if f.link_share is None else f"{f.link_share:.1%}"),
    ("largest error", lambda f: f"{f.error:.1e}"),
)
_RATIOS: dict[str, Callable[[Ratio], float]] = {
    "median": lambda r: r.seconds,
    "CPU of all peers": lambda r: r.cpu_s,
}
