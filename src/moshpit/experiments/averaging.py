"""How fast do averages form? Paper §4.1 and figure 3, for any number of peers.

Numbers, not networks: one value per peer, rounds, and peers that miss some
(`moshpit.sim.averaging`). The section also replays the released experiment, seed by seed
(`moshpit.experiments.published`).
"""

from __future__ import annotations

import csv
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from typing import Any

import numpy as np

from moshpit.errors import ConfigError
from moshpit.experiments import plots
from moshpit.experiments.published import ALGORITHMS as PUBLISHED_ALGORITHMS
from moshpit.experiments.published import FINE, PUBLISHED, ROUNDS_MAX, published_table
from moshpit.experiments.repeats import run_all
from moshpit.experiments.section import Claim, Context, Figure, Nature, Section, Table
from moshpit.protocol.grid import GROUP_SIZE_MAX
from moshpit.sim.averaging import (
    Failure,
    Floats,
    GridRounds,
    Method,
    RandomGroups,
    Spreads,
    measure,
)
from moshpit.sim.rivals import AllReduce, Gossip, PaperGrid, PushSum, ReleasedSGP

DRAWN_MIN = 1e-16  # what is below is rounding, and drawn there
CONFIDENCE = 0.95
RESAMPLES = 1000
PEERS_MAX = 10_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """One experiment.

    Attributes:
        peers: N.
        group_size: M.
        dims: d, the axes of a grid; None: as few as N peers in groups of M need.
        death: the probability that a peer misses a round.
        failure: what the others of its group do then.
        rounds: how many.
        seeds: how often all is repeated, with other values, deaths and placements.
        seed: of everything.

    Raises:
        ConfigError: numbers that make no experiment.
    """

    peers: int
    group_size: int = 32
    dims: int | None = None
    death: float = 0.0
    failure: Failure = Failure.ALIVE
    rounds: int = 10
    seeds: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if not 3 <= self.peers <= PEERS_MAX:
            raise ConfigError(f"--peers {self.peers}: 3 to {PEERS_MAX}")
        if not 2 <= self.group_size <= self.peers:
            raise ConfigError(f"--group-size {self.group_size}: 2 to the number of peers")
        if not 0 <= self.death < 1:
            raise ConfigError(f"--failure {self.death}: a probability below 1")
        if self.rounds < 1 or self.seeds < 2 or self.seed < 0:
            raise ConfigError("--rounds: at least 1, --seeds: at least 2, --seed: not below 0")
        least = _axes(self.peers, self.group_size)
        if self.dims is not None and not least <= self.dims <= 16:
            raise ConfigError(
                f"--dims {self.dims}: {self.peers} peers in groups of {self.group_size} need "
                f"{least} axes at least, and 16 are the most"
            )

    @property
    def axes(self) -> int:
        """d, as given or as few as it needs."""
        return self.dims or _axes(self.peers, self.group_size)

    def __str__(self) -> str:
        return f"N = {self.peers:,}, M = {self.group_size}, p = {self.death:g}"


def _axes(peers: int, group_size: int) -> int:
    axes = 1
    while group_size**axes < peers:
        axes += 1
    return axes


def _own_grid(setup: Setup, rng: np.random.Generator) -> Method:
    # A grid of more axes than M needs is one of smaller groups.
    size = setup.group_size
    while size > 2 and setup.dims is not None and (size - 1) ** setup.dims >= setup.peers:
        size -= 1
    return GridRounds(setup.peers, size, rng, failure=setup.failure)


@dataclass(frozen=True, slots=True)
class Algorithm:
    """A way to average, by the name that the command line has for it.

    Attributes:
        label: as figures have it.
        make: a method for one run.
    """

    label: str
    make: Callable[[Setup, np.random.Generator], Method]


ALGORITHMS: dict[str, Algorithm] = {
    "all-reduce": Algorithm("All-Reduce", lambda _setup, _rng: AllReduce()),
    "gossip": Algorithm("Gossip", lambda setup, _rng: Gossip(setup.failure)),
    "sgp": Algorithm("SGP (released)", lambda setup, _rng: ReleasedSGP(setup.peers, setup.failure)),
    "push-sum": Algorithm("Push-sum", lambda _setup, _rng: PushSum()),
    "random-groups": Algorithm(
        "Random groups",
        lambda setup, rng: RandomGroups(setup.group_size, rng, failure=setup.failure),
    ),
    "paper-grid": Algorithm(
        "Paper's grid",
        lambda setup, rng: PaperGrid(
            setup.peers, setup.group_size, setup.axes, rng, failure=setup.failure
        ),
    ),
    "moshpit": Algorithm("Moshpit", _own_grid),
}


def algorithms_named(text: str) -> list[str]:
    """Read names with commas between them.

    Raises:
        ConfigError: one that is no algorithm, or is named twice.

    Example:
        >>> algorithms_named("moshpit, gossip")
        ['moshpit', 'gossip']
    """
    names = [name.strip() for name in text.split(",")]
    unknown = [name for name in names if name not in ALGORITHMS]
    if unknown or len(dict.fromkeys(names)) < len(names):
        raise ConfigError(f"--algorithms {text!r}: of {', '.join(ALGORITHMS)}, each at most once")
    return names


@dataclass(frozen=True, slots=True)
class Curve:
    """What one algorithm did.

    Attributes:
        spreads: of all runs.
        low, high: (rounds + 1,), the 95 % confidence interval of the mean spread.
        seconds: how long the computation took.
    """

    spreads: Spreads
    low: Floats
    high: Floats
    seconds: float


def run(
    setup: Setup, algorithms: Sequence[str], say: Callable[[str], None] = lambda _: None
) -> dict[str, Curve]:
    """Measure algorithms on the same values and deaths.

    Args:
        setup: the experiment.
        algorithms: names of `ALGORITHMS`.
        say: is told which one is measured.
    """
    found: dict[str, Curve] = {}
    for name in algorithms:
        say(f"averaging, {setup}: {ALGORITHMS[name].label}")
        found[name] = _curve((setup, name))
    return found


def _curve(what: tuple[Setup, str]) -> Curve:
    """Measure an algorithm, given by its name."""
    (setup, name), began = what, time.perf_counter()
    make = ALGORITHMS[name].make
    spreads = measure(
        lambda rng: make(setup, rng),
        n=setup.peers, death=setup.death, rounds=setup.rounds, runs=setup.seeds,
        seed=setup.seed,
    )  # fmt: skip
    low, high = interval(spreads.each)
    return Curve(spreads, low, high, time.perf_counter() - began)


def interval(each: Floats) -> tuple[Floats, Floats]:
    """Return the bootstrap's confidence interval of the mean over runs, (rounds + 1,) each.

    Spreads are positive and skewed: a mean plus or minus its error would go below 0.

    Args:
        each: (runs, rounds + 1).
    """
    runs = len(each)
    draws = np.random.default_rng(0).multinomial(runs, np.full(runs, 1 / runs), RESAMPLES)
    means = draws / runs @ each
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(means, (tail, 1 - tail), axis=0)
    return low, high


def as_csv(setup: Setup, found: Mapping[str, Curve]) -> str:
    """Return every round of every algorithm as a row of CSV, with a head."""
    text = StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(
        ("algorithm", "peers", "group_size", "dims", "failure", "failure_model", "seeds", "seed",
         "round", "variance_mean", "variance_low95", "variance_high95")
    )  # fmt: skip
    for name, curve in found.items():
        for number, mean in enumerate(curve.spreads.mean):
            rows.writerow(
                (name, setup.peers, setup.group_size, setup.axes, setup.death,
                 setup.failure.value, setup.seeds, setup.seed, number,
                 f"{mean:.9g}", f"{curve.low[number]:.9g}", f"{curve.high[number]:.9g}")
            )  # fmt: skip
    return text.getvalue()


def plot(setup: Setup, found: Mapping[str, Curve]) -> Any:
    """Draw the curves; returns matplotlib's figure."""
    figure, (axes,) = plots.drawing()
    draw_curves(axes, found)
    model = "others go on" if setup.failure is Failure.ALIVE else "its group skips"
    axes.set_title(f"{setup}, {model}" if setup.death else str(setup), fontsize=10.5)
    return figure


def draw_curves(axes: Any, found: Mapping[str, Curve]) -> None:
    """Draw the curves into matplotlib's axes."""
    lines = [
        plots.Line(
            name=ALGORITHMS[name].label,
            x=np.arange(len(curve.low), dtype=float),
            y=curve.spreads.mean,
            low=curve.low,
            high=curve.high,
            style=list(ALGORITHMS).index(name),
        )
        for name, curve in found.items()
    ]
    plots.draw(axes, lines, floor=DRAWN_MIN)
    axes.set_xlabel("rounds")
    axes.set_ylabel("variance over the peers")


# --- the section of the report ------------------------------------------------------------------

_FIGURES = (
    ("A full grid without failures", Setup(peers=1024)),
    ("A full grid, half a percent of the peers miss each round", Setup(peers=1024, death=0.005)),
    ("A grid that is three quarters full", Setup(peers=768, death=0.005)),
    ("The same, and one missing peer stops its group",
     Setup(peers=768, death=0.005, failure=Failure.GROUP)),
)  # fmt: skip

_LARGE = Setup(peers=1_000_000, group_size=GROUP_SIZE_MAX, death=0.001, rounds=8, seeds=2)
"""A swarm far beyond the paper's."""


def command_of(setup: Setup, algorithms: Sequence[str] = tuple(ALGORITHMS)) -> str:
    """Return what to type to repeat an experiment."""
    dims = f" --dims {setup.dims}" if setup.dims is not None else ""
    names = "" if list(algorithms) == list(ALGORITHMS) else f" --algorithms {','.join(algorithms)}"
    return (
        f"moshpit experiment averaging --peers {setup.peers} --group-size {setup.group_size}{dims} "
        f"--failure {setup.death:g} --rounds {setup.rounds} --seeds {setup.seeds} "
        f"--failure-model {setup.failure.value}{names} --seed {setup.seed} --plot averaging.svg"
    )


def section(context: Context) -> Section:
    """Run what the report shows of this experiment, and tell it."""
    began = time.perf_counter()
    seeds = 20 if context.small else 200
    setups = [replace(setup, seeds=seeds) for _, setup in _FIGURES]
    large = replace(_LARGE, peers=100_000) if context.small else _LARGE
    parts = [(setup, name) for setup in (*setups, large) for name in ALGORITHMS]
    curves = run_all(
        _curve, parts, context.jobs,
        lambda part, _: context.say(f"averaging, {part[0]}: {ALGORITHMS[part[1]].label}, done"),
    )  # fmt: skip
    found: dict[Setup, dict[str, Curve]] = {}
    for (setup, name), curve in zip(parts, curves, strict=True):
        found.setdefault(setup, {})[name] = curve
    context.say("averaging: the released experiment, seed by seed")
    table = published_table(placements=20 if context.small else 200, jobs=context.jobs)
    figures = [
        _figure(title, setup, found[setup])
        for (title, _), setup in zip(_FIGURES, setups, strict=True)
    ]
    return Section(
        name="averaging",
        title="How fast averages form",
        text=(
            "Every peer has a number from N(0, 1). In each round every peer is dead with "
            "probability p, keeps its number, and is back in the next round; the curve is the "
            "variance over all peers. There is no network here and no time: these are the "
            "algorithms themselves, computed exactly.",
            "`Paper's grid` is Moshpit as published: a fixed grid of M × M cells, some of them "
            "empty. `Moshpit` is the schedule of this library: rows are cut to the peers that "
            "there are and values carry their mass, so that without failures the mean is exact "
            "after d rounds for every N.",
        ),
        commands=tuple(map(command_of, (*setups, large))),
        figures=tuple(figures),
        tables=(table, _large_table(large, found[large])),
        claims=_claims(table),
        seconds=time.perf_counter() - began,
    )


def _figure(title: str, setup: Setup, found: Mapping[str, Curve]) -> Figure:
    ours, grid = found["moshpit"].spreads.mean[5], found["paper-grid"].spreads.mean[5]
    return Figure(
        title=f"{title} ({setup})",
        image=plots.svg(plot(setup, found)),
        text=(
            f"Mean over {setup.seeds} seeds with its 95 % interval (bootstrap). What is below "
            f"{DRAWN_MIN:g} is rounding and drawn there."
        ),
        natures=(Nature.REAL,),
        alt=(
            f"Variance over rounds for {len(found)} algorithms, {setup}; after 5 rounds Moshpit "
            f"is at {ours:.2g}, the paper's grid at {grid:.2g}."
        ),
    )


def _claims(table: Table) -> tuple[Claim, ...]:
    cells = len(table.rows) * len(PUBLISHED_ALGORITHMS)
    claims = [
        Claim(
            what="Cells of the averaging table that come out the same",
            paper=str(cells),
            here=f"{cells - len(table.marked)} of {cells}",
            natures=(Nature.REAL,),
        )
    ]
    grid = PUBLISHED_ALGORITHMS.index("Paper's grid")
    for (peers, death), row in PUBLISHED.items():
        curve = _curve((Setup(peers=peers, death=death, rounds=ROUNDS_MAX), "moshpit"))
        claims.append(
            Claim(
                what=f"Rounds until the variance is below {FINE:g}, N = {peers}, p = {death:g}",
                paper=f"{row[grid][0]:g}, its grid",
                here=f"{curve.spreads.rounds_until(FINE).mean():.1f}, this library's schedule",
                natures=(Nature.REAL,),
            )
        )
    return tuple(claims)


def _large_table(setup: Setup, found: Mapping[str, Curve]) -> Table:
    rows = tuple(
        (
            ALGORITHMS[name].label,
            *(f"{curve.spreads.mean[number]:.2g}" for number in (1, 2, 4, 8)),
            f"{curve.seconds:.1f}",
        )
        for name, curve in found.items()
    )
    return Table(
        title=f"A large swarm ({setup}, {setup.axes} axes)",
        head=("", "1 round", "2", "4", "8", "computed in s"),
        rows=rows,
        text=f"Variance after so many rounds, mean of {setup.seeds} seeds.",
        natures=(Nature.REAL,),
    )
