"""Does the protocol do what the mathematics says? Both, with the same crashes, in one figure.

The protocol: the real machines (membership, meeting, group all-reduce) of hundreds of peers in the
simulator, one after another for several seeds. The model: the array steps of `GridRounds`, for
hundreds of runs.

What happens in both: each peer has values from N(0, 1) and weight 1. An epoch is d rounds, one per
axis. When its round has ended a peer crashes with probability p, for good: the groups of this
epoch that planned with it go on without it, and the next epoch is planned for those that are
left. Measured is the variance over the living, after every round.

The band says that both are alike on average. Besides, every simulated swarm is replayed by
arithmetic (`moshpit.experiments.replay`): each value of each peer after each round must be what its
groups make of it, to rounding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from moshpit.experiments import plots
from moshpit.experiments.crashing import Case, Observed
from moshpit.experiments.repeats import run_all
from moshpit.experiments.replay import furthest_apart
from moshpit.experiments.section import Context, Figure, Nature, Section, Table
from moshpit.sim.averaging import Floats, GridRounds

BAND = 0.99
DRAWS = 20_000
DRAWN_MIN = 1e-16
APART_MAX = 1e-9  # values are about 1; what differs by less was rounded in another order


# --- the model ------------------------------------------------------------------------------------


def predicted(case: Case) -> Floats:
    """Run the model; returns (runs, rounds + 1), the spread before the first round and after each.

    The spread is the mean, over a peer's values, of the variance over the living peers.
    """
    return np.array([_model_run(case, run) for run in range(case.runs)])


def _model_run(case: Case, run: int) -> Floats:
    dice = np.random.default_rng((case.peers, run))
    values = dice.standard_normal((case.peers, case.values))
    spreads: list[float] = [_spread(values)]
    for epoch in range(case.epochs):
        n = len(values)
        columns = [  # of one order of the peers: they differ in nothing but the values
            GridRounds(n, case.group_size, np.random.default_rng((case.peers, run, epoch)))
            for _ in range(case.values)
        ]
        alive = np.ones(n, bool)
        for _axis in range(case.axes):
            values = np.stack(
                [column.round(values[:, at], alive) for at, column in enumerate(columns)], 1
            )
            spreads.append(_spread(values[alive]))
            alive &= dice.random(n) >= case.death
        values = values[alive]
    return np.array(spreads)


def _spread(values: Floats) -> float:
    middle: Floats = values.mean(0)
    apart: Floats = (values - middle) ** 2
    return float(apart.mean())


# --- the protocol ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Simulated:
    """What one simulated swarm did.

    Attributes:
        spreads: (rounds + 1,), as of the model.
        apart: by how much a peer's value was off what the arithmetic of its groups gives, at most;
            see `moshpit.experiments.replay`.
        crashes: how many peers died.
        violated: invariants that did not hold, in words.
        seconds: how long it took.
    """

    spreads: Floats
    apart: float
    crashes: int
    violated: tuple[str, ...]
    seconds: float


def simulated(case: Case, seed: int) -> Simulated:
    """Simulate one swarm."""
    began = time.perf_counter()
    world = Observed(case, seed)
    world.run()
    rounds = [world.after[epoch, axis] for epoch in range(case.epochs) for axis in range(case.axes)]
    spreads = [_spread(np.array(list(values.values()))) for values in (world.first, *rounds)]
    violated = [f"{v.name}: {v.first}" for v in world.checkers.verdicts.values() if not v.ok]
    if not world.finished:
        violated.append("the time limit came first")
    apart = furthest_apart(case, world)
    seconds = time.perf_counter() - began
    return Simulated(np.array(spreads), apart, world.crashes, tuple(violated), seconds)


# --- both -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Compared:
    """The protocol beside the model; arrays are (rounds + 1,).

    Attributes:
        case: what was compared.
        protocol: the mean spread of the simulated swarms.
        model: the mean spread of the model.
        low, high: where the mean of as many runs of the model as swarms were simulated is, after
            every round, in 99 of 100 cases.
        apart: by how much a peer's value was off what the arithmetic of its groups gives, at most.
        crashes: in all simulated swarms together.
        violated: invariants that did not hold in the simulator.
        seconds: how long the simulator took, one swarm after another.
    """

    case: Case
    protocol: Floats
    model: Floats
    low: Floats
    high: Floats
    apart: float
    crashes: int
    violated: tuple[str, ...]
    seconds: float

    @property
    def outside(self) -> list[int]:
        """The rounds after which the protocol is outside the band."""
        apart = (self.protocol < self.low) | (self.protocol > self.high)
        apart &= np.maximum(self.protocol, self.high) > DRAWN_MIN  # rounding is no difference
        return [int(number) for number in np.flatnonzero(apart)]

    @property
    def agrees(self) -> bool:
        """Whether nothing speaks against the protocol."""
        return not self.outside and not self.violated and self.apart <= APART_MAX


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of work: a swarm by its seed, or the model."""

    case: Case
    seed: int | None

    def __str__(self) -> str:
        what = "the model" if self.seed is None else f"swarm {self.seed + 1} of {self.case.seeds}"
        return f"protocol, {self.case}: {what}"


def _do(part: _Part) -> Simulated | Floats:
    return predicted(part.case) if part.seed is None else simulated(part.case, part.seed)


def compare(
    cases: Sequence[Case], *, jobs: int = 1, say: Callable[[str], None] = lambda _: None
) -> list[Compared]:
    """Run both, for each case.

    Args:
        cases: what is compared.
        jobs: how many processes work at a time.
        say: is told what is done.
    """
    parts = [_Part(case, seed) for case in cases for seed in (*range(case.seeds), None)]
    done = run_all(_do, parts, jobs, lambda part, _: say(f"{part}: done"))
    found: list[Compared] = []
    for case in cases:
        results = [result for part, result in zip(parts, done, strict=True) if part.case is case]
        swarms = [result for result in results if isinstance(result, Simulated)]
        (model,) = (result for result in results if not isinstance(result, Simulated))
        found.append(_compared(case, swarms, model))
    return found


def _compared(case: Case, swarms: Sequence[Simulated], model: Floats) -> Compared:
    low, high = band(model, case.seeds)
    return Compared(
        case=case,
        protocol=np.mean([swarm.spreads for swarm in swarms], axis=0),
        model=model.mean(0),
        low=low,
        high=high,
        apart=max(swarm.apart for swarm in swarms),
        crashes=sum(swarm.crashes for swarm in swarms),
        violated=tuple(text for swarm in swarms for text in swarm.violated),
        seconds=sum(swarm.seconds for swarm in swarms),
    )


def band(model: Floats, count: int) -> tuple[Floats, Floats]:
    """Return where the mean of ``count`` of the model's runs is, after all rounds together, with
    probability `BAND` at least: each round has its share of what may be outside.

    Args:
        model: (runs, rounds + 1).
        count: how many are averaged.
    """
    chosen = np.random.default_rng(0).integers(len(model), size=(DRAWS, count))
    tail = (1 - BAND) / 2 / max(1, model.shape[1] - 1)
    low, high = np.quantile(model[chosen].mean(1), (tail, 1 - tail), axis=0)
    return low, high


def plot(found: Compared) -> Any:
    """Draw the protocol's points on the model's band; returns matplotlib's figure."""
    figure, (axes,) = plots.drawing()
    rounds = np.arange(len(found.model), dtype=float)
    plots.draw(
        axes,
        [
            plots.Line(
                name="Model", x=rounds, y=found.model, low=found.low, high=found.high, style=0
            ),
            plots.Line(name="Protocol", x=rounds, y=found.protocol, style=1, dots=True),
        ],
        floor=DRAWN_MIN,
    )
    axes.set_title(f"{found.case}, {found.crashes} crashes", fontsize=10.5)
    axes.set_xlabel("rounds")
    axes.set_ylabel("variance over the living peers")
    return figure


# --- the section of the report ------------------------------------------------------------------

_CASES = (Case(peers=512), Case(peers=768))
_SMALL_CASES = (
    Case(peers=96, group_size=10, death=0.03, values=10),
    Case(peers=150, group_size=16, death=0.03, values=16),
)


def command_of(case: Case) -> str:
    """Return what to type to repeat a comparison."""
    return (
        f"moshpit experiment protocol --peers {case.peers} --group-size {case.group_size} "
        f"--failure {case.death:g} --epochs {case.epochs} --values {case.values} "
        f"--seeds {case.seeds} --plot protocol.svg"
    )


def section(context: Context) -> Section:
    """Run what the report shows of this experiment, and tell it."""
    began = time.perf_counter()
    cases = _SMALL_CASES if context.small else _CASES
    found = compare(cases, jobs=context.jobs, say=context.say)
    return Section(
        name="protocol",
        title="The protocol does what the mathematics says",
        text=(
            "The same crashes, twice. The points are the real protocol (membership, meeting, group "
            "all-reduce; the code that runs on the internet) with hundreds of peers in the "
            "simulator; the band is the arithmetic of the schedule alone.",
            "A peer that has ended a round crashes with probability p and never comes back. Its "
            "next groups go on without it; the next averaging is planned for those that are left. "
            "The band is where the mean of as many runs of the model as swarms were simulated is, "
            f"after all rounds together, in {100 * BAND:g} of 100 cases.",
            "And exactly: given who was in which group, arithmetic says what every value of every "
            "peer must be after every round. The table's note has the largest difference.",
        ),
        commands=tuple(command_of(case) for case in cases),
        figures=tuple(_figure(one) for one in found),
        tables=(_table(found),),
        seconds=time.perf_counter() - began,
    )


def _figure(found: Compared) -> Figure:
    case = found.case
    said = f"{case.rounds - len(found.outside)} of {case.rounds} rounds"
    return Figure(
        title=f"Protocol and model ({case})",
        image=plots.svg(plot(found)),
        text=(
            f"{case.seeds} simulated swarms, each peer with {case.values} values; the model ran "
            f"{case.runs} times. Below {DRAWN_MIN:g} everything is rounding and drawn there."
        ),
        natures=(Nature.SIMULATED, Nature.REAL),
        alt=f"Variance over rounds, {case}: protocol in the model's band after {said}.",
    )


def _figure_of(spread: float) -> str:
    return f"{spread:.2g}" if spread > DRAWN_MIN else f"< {DRAWN_MIN:g}"


def _table(found: list[Compared]) -> Table:
    rows: list[tuple[str, ...]] = []
    marked: list[tuple[int, int]] = []
    for one in found:
        for number in range(1, one.case.rounds + 1):
            if number in one.outside:
                marked.append((len(rows), 2))
            cells = (one.protocol[number], one.model[number], one.low[number], one.high[number])
            protocol, model, low, high = map(_figure_of, cells)
            rows.append((str(one.case), str(number), protocol, model, f"{low} to {high}"))
    outside = sum(len(one.outside) for one in found)
    wrong = [text for one in found for text in one.violated]
    invariants = f"Violated: {'; '.join(wrong)}." if wrong else "No invariant was violated."
    apart = max(one.apart for one in found)
    return Table(
        title="Variance after each round",
        head=("swarm", "round", "protocol", "model", "99 % band"),
        rows=tuple(rows),
        text=f"{len(rows) - outside} of {len(rows)} are in the band. No value of any peer was "
        f"further than {apart:.1g} from what the arithmetic of its groups gives. {invariants}",
        natures=(Nature.SIMULATED, Nature.REAL),
        marked=frozenset(marked),
    )
