"""Moshpit against its rivals, training in virtual time (paper §4.2).

Real training of a small network (`moshpit.experiments.vision`) by every method on the same fleet
of machines. What learning rates were tried, and what came of them, is in experiments/README.md.
"""

from __future__ import annotations

import csv
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from io import StringIO
from random import Random
from typing import Any, Final

import numpy as np

from moshpit.baselines import (
    ADPSGD,
    DPSGD,
    SGP,
    AllReduceLocalSGD,
    AllReduceSGD,
    ParameterServer,
)
from moshpit.config import SwarmConfig, preset
from moshpit.errors import ConfigError
from moshpit.experiments import plots, trials
from moshpit.experiments.fleets import HICCUP_S, RESNET_50, SLOWNESS, heterogeneous, homogeneous
from moshpit.experiments.repeats import Estimate, mean_of, ratio_of, run_all
from moshpit.experiments.section import Claim, Context, Figure, Nature, Section, Table
from moshpit.experiments.trials import Place, Setting, Trial
from moshpit.experiments.vision import Digits, network
from moshpit.training.strategies import LocalSGD, Strategy

LOOK_S: Final = 2.5
DEATHS_SHARE: Final = 0.25  # of the peers, in the fleet with failures; a stated choice
DEATHS_S: Final = (10.0, 60.0)  # when they die; a stated choice


@dataclass(frozen=True, slots=True)
class Method:
    """A way to train together.

    Attributes:
        label: what people read.
        make: returns the strategy for so many peers, samples of all of them in a step, and local
            steps between two averagings where the method has such.
        rate: the learning rate.
        style: how it is drawn.
    """

    label: str
    make: Callable[[int, float, int], Strategy]
    rate: float
    style: int


METHODS: Final[dict[str, Method]] = {
    "moshpit": Method(
        "Moshpit", lambda peers, step, period: LocalSGD(samples_per_epoch=step * period), 0.05, 0
    ),
    "moshpit-half": Method(
        "Moshpit, float16",
        lambda peers, step, period: LocalSGD(samples_per_epoch=step * period, codec="float16"),
        0.05,
        10,
    ),
    "ar-sgd": Method(
        "AR-SGD", lambda peers, step, period: AllReduceSGD(step, peers=peers), 0.05, 1
    ),
    "ar-local": Method(
        "AR local SGD",
        lambda peers, step, period: AllReduceLocalSGD(step, period=period, peers=peers),
        0.05,
        6,
    ),
    "sgp": Method("SGP", lambda peers, step, period: SGP(step, peers=peers), 0.05, 2),
    "sgp-overlap": Method(
        "SGP, overlapped",
        lambda peers, step, period: SGP(step, peers=peers, overlap=True),
        0.05,
        4,
    ),
    "ad-psgd": Method("AD-PSGD", lambda peers, step, period: ADPSGD(step), 0.05, 3),
    "ad-psgd-free": Method(
        "AD-PSGD, never waiting", lambda peers, step, period: ADPSGD(step, atomic=False), 0.05, 7
    ),
    "d-psgd": Method("D-PSGD", lambda peers, step, period: DPSGD(step, peers=peers), 0.05, 5),
    "parameter-server": Method(
        "Parameter server", lambda peers, step, period: ParameterServer(step, peers=peers), 0.05, 8
    ),
    "parameter-server-async": Method(
        "Async server",
        lambda peers, step, period: ParameterServer(step, asynchronous=True, peers=peers),
        0.05,
        9,
    ),
}
PUBLISHED: Final = {
    "ar-sgd": "about 1.5",
    "sgp": "1.3 (the gossip methods)",
    "sgp-overlap": "1.3 (the gossip methods)",
    "ad-psgd": "1.3 (the gossip methods)",
}
"""Paper §4.2: how many times as long these take to the same accuracy."""
FLEETS: Final = ("homogeneous", "heterogeneous", "failures")


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        method: of `METHODS`.
        fleet: of `FLEETS`.
        seed: of everything.
        peers: how many.
        group_size: of Moshpit's groups.
        batch: of one peer's step.
        period: local steps between averagings, for methods that have such.
        gbit_s: each peer's line, as ResNet-50 would have it.
        enough: the accuracy that is aimed at.
        limit_s: virtual seconds after which the run ends without it.
        rate: the learning rate; None: the method's own.

    Raises:
        ConfigError: a name that there is not, or numbers that make no run.
    """

    method: str = "moshpit"
    fleet: str = "homogeneous"
    seed: int = 0
    peers: int = 16
    group_size: int = 4
    batch: int = 16
    period: int = 4
    gbit_s: float = 1.0
    enough: float = 0.97
    limit_s: float = 500.0
    rate: float | None = None

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(f"method {self.method!r}: there are {', '.join(METHODS)}")
        if self.fleet not in FLEETS:
            raise ConfigError(f"fleet {self.fleet!r}: there are {', '.join(FLEETS)}")
        if self.peers < 2 or self.batch < 1 or self.period < 1 or self.group_size < 2:
            raise ConfigError(
                f"{self.peers} peers, groups of {self.group_size}, batches of {self.batch}, "
                f"{self.period} local steps: give at least 2, 2, 1 and 1"
            )
        if not (0 < self.enough <= 1 and self.limit_s > 0 and self.gbit_s > 0):
            raise ConfigError("accuracy from 0 to 1, limit and line above 0")
        if self.rate is not None and not 0 < self.rate < math.inf:
            raise ConfigError(f"learning rate {self.rate}: give a positive number")


def setting_of(plan: Plan) -> Setting:
    """Return machines, times and limits of a run."""
    numel = sum(p.numel() for p in network().parameters())
    rate = RESNET_50.rate(plan.gbit_s, numel)
    machines = (homogeneous if plan.fleet == "homogeneous" else heterogeneous)(plan.peers, rate)
    places = [Place(machine=machine) for machine in machines]
    if plan.fleet == "failures":
        rng = Random(f"{plan.seed}/deaths")
        for index in sorted(rng.sample(range(plan.peers), int(DEATHS_SHARE * plan.peers))):
            places[index] = replace(places[index], until_s=rng.uniform(*DEATHS_S))
    return Setting(
        places=tuple(places),
        config=config_of(plan.group_size),
        batch=plan.batch,
        step_s=RESNET_50.step_s,
        seed=plan.seed,
        look_s=LOOK_S,
        limit_s=plan.limit_s,
        enough=plan.enough,
        rising=True,
    )


def config_of(group_size: int) -> SwarmConfig:
    """Return the peers' settings: the defaults, with groups of this size."""
    config = preset("lan")
    return replace(config, matchmaking=replace(config.matchmaking, group_size=group_size))


def run(plan: Plan) -> Trial:
    """Run one plan."""
    method = METHODS[plan.method]
    step = plan.peers * plan.batch

    def strategy() -> Strategy:
        return method.make(plan.peers, float(step), plan.period)

    rate = method.rate if plan.rate is None else plan.rate
    return trials.run(Digits(), strategy, rate, setting_of(plan))


Results = Mapping[tuple[str, str], Sequence[Trial]]
"""By fleet and method: one trial for each seed."""


def run_study(
    plan: Plan,
    *,
    methods: Sequence[str],
    fleets: Sequence[str],
    seeds: int,
    jobs: int,
    say: Callable[[str], None],
) -> dict[tuple[str, str], list[Trial]]:
    """Run all methods on all fleets, with the seeds from ``plan.seed`` on."""
    plans = [
        replace(plan, fleet=fleet, method=method, seed=plan.seed + number)
        for fleet in fleets
        for method in methods
        for number in range(seeds)
    ]

    def told(plan: Plan, trial: Trial) -> None:
        came = "not reached" if trial.seconds is None else f"{trial.seconds:.0f} virtual s"
        say(
            f"{plan.fleet}, {METHODS[plan.method].label}, seed {plan.seed}: "
            f"{plan.enough:.0%} after {came} ({trial.cpu_s:.0f} CPU s here)"
        )

    found: dict[tuple[str, str], list[Trial]] = {}
    for done, trial in zip(plans, run_all(run, plans, jobs, told), strict=True):
        found.setdefault((done.fleet, done.method), []).append(trial)
    return found


# --- what it says ---------------------------------------------------------------------------


def _seconds(trials_: Sequence[Trial]) -> list[float] | None:
    """Return the seconds to what was aimed at; None if some run did not come there."""
    seconds = [trial.seconds for trial in trials_]
    known = [s for s in seconds if s is not None]
    return known if len(known) == len(seconds) else None


def slower(results: Results, fleet: str, method: str) -> Estimate | None:
    """Return how many times as long a method takes as Moshpit, in pairs of one seed; None: one of
    them did not come there in some run."""
    ours, theirs = _seconds(results[fleet, "moshpit"]), _seconds(results[fleet, method])
    return None if ours is None or theirs is None else ratio_of(theirs, ours)


def words(estimate: Estimate, digits: int = 0) -> str:
    """Write an estimate with its interval."""
    if estimate.runs == 1:
        return f"{estimate.mean:.{digits}f}"
    return f"{estimate.mean:.{digits}f} ({estimate.low:.{digits}f} to {estimate.high:.{digits}f})"


HEAD: Final = (
    "method", "seconds to it", "times Moshpit's", "samples to it", "samples/s", "waiting",
)  # fmt: skip


def rows_of(results: Results, fleet: str) -> list[tuple[str, ...]]:
    """Return the table of a fleet, one row for each method."""
    rows: list[tuple[str, ...]] = []
    for (where, name), runs in results.items():
        if where != fleet:
            continue
        seconds = _seconds(runs)
        reached = [look for look in (trial.reached() for trial in runs) if look is not None]
        ratio = slower(results, fleet, name) if (fleet, "moshpit") in results else None
        pace = [trial.looks[-1].samples / trial.looks[-1].at_s for trial in runs]
        missed = f"{len(reached)} of {len(runs)} runs reached it"
        rows.append(
            (
                METHODS[name].label,
                missed if seconds is None else words(mean_of(seconds)),
                "" if ratio is None or name == "moshpit" else words(ratio, 2),
                f"{mean_of([look.samples for look in reached]).mean:,.0f}" if reached else "",
                f"{mean_of(pace).mean:.0f}",
                f"{mean_of([trial.waited_share for trial in runs]).mean:.0%}",
            )
        )
    return rows


def as_csv(results: Results) -> str:
    """Return every look of every run as CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    head = ("fleet", "method", "run", "virtual_s", "samples", "epoch", "peers", "accuracy")
    writer.writerow(head)
    for (fleet, name), runs in results.items():
        for number, trial in enumerate(runs):
            for look in trial.looks:
                accuracy = f"{look.score:.4f}"
                when = (f"{look.at_s:.3f}", f"{look.samples:.0f}", look.epoch, look.peers)
                writer.writerow((fleet, name, number, *when, accuracy))
    return text.getvalue()


def plot(results: Results, fleet: str) -> Any:
    """Return a figure: accuracy over virtual seconds, mean and range over the seeds."""
    figure, [axes] = plots.drawing()
    lines: list[plots.Line] = []
    for (where, name), runs in results.items():
        if where == fleet:
            lines.append(_line(METHODS[name], runs))
    longest = max(float(line.x[-1]) for line in lines)
    axes.set_xlim(0.0, longest)
    axes.set_ylim(0.0, 1.0)
    axes.axhline(runs_goal(results), color="#888888", linewidth=0.8, linestyle=(0, (2, 2)))
    axes.set_xlabel("virtual seconds")
    axes.set_ylabel("accuracy of the mean model")
    plots.draw(axes, lines)
    return figure


def runs_goal(results: Results) -> float:
    """Return the accuracy that was aimed at."""
    return next(iter(results.values()))[0].enough


def _line(method: Method, runs: Sequence[Trial]) -> plots.Line:
    """Return a method's curve, for as long as all of its runs lasted."""
    length = min(len(trial.looks) for trial in runs)
    scores = np.array([[look.score for look in trial.looks[:length]] for trial in runs])
    times = np.array([look.at_s for look in runs[0].looks[:length]])
    return plots.Line(
        name=method.label, x=times, y=scores.mean(0),
        low=scores.min(0), high=scores.max(0), style=method.style,
    )  # fmt: skip


def command_of(plan: Plan, methods: Sequence[str], fleets: Sequence[str], seeds: int) -> str:
    """Return what to type in a shell to repeat a study."""
    return (
        f"moshpit experiment training --preset vision --fleets {','.join(fleets)} "
        f"--methods {','.join(methods)} --peers {plan.peers} --seeds {seeds} "
        f"--target {plan.enough:g} --limit {plan.limit_s:g}"
    )


SMALL: Final = Plan(peers=8, group_size=4, enough=0.8, limit_s=300.0)


def section(context: Context) -> Section:
    """Run what the report shows of this experiment, and tell it."""
    began = time.perf_counter()
    plan = SMALL if context.small else Plan()
    methods = ("moshpit", "ar-sgd", "sgp", "ad-psgd") if context.small else tuple(METHODS)
    fleets = ("heterogeneous",) if context.small else FLEETS
    seeds = 1 if context.small else 5
    results = run_study(
        plan, methods=methods, fleets=fleets, seeds=seeds,
        jobs=context.jobs, say=context.say,
    )  # fmt: skip
    return Section(
        name="vision",
        title="Training, against the rivals",
        text=explained(plan, seeds),
        commands=(command_of(plan, methods, fleets, seeds),),
        figures=tuple(_figure(results, fleet, plan, seeds) for fleet in fleets),
        tables=tuple(table_of(results, fleet, plan, seeds) for fleet in fleets),
        claims=tuple(
            _claim(results, method, paper)
            for method, paper in PUBLISHED.items()
            if ("heterogeneous", method) in results
        ),
        seconds=time.perf_counter() - began,
    )


def _claim(results: Results, method: str, paper: str) -> Claim:
    ratio = slower(results, "heterogeneous", method)
    return Claim(
        what=f"Time to an accuracy, {METHODS[method].label} over Moshpit, heterogeneous fleet",
        paper=paper,
        here="no comparison: a run did not come there" if ratio is None else words(ratio, 2),
        natures=(Nature.SIMULATED,),
    )


def explained(plan: Plan, seeds: int) -> tuple[str, ...]:
    """Say what is real and what is not, in paragraphs."""
    numel = sum(p.numel() for p in network().parameters())
    vector_s = 4 * numel / RESNET_50.rate(plan.gbit_s, numel)
    return (
        f"{plan.peers} peers train a residual network of {numel:,} numbers to read handwritten "
        f"digits; the curve is the accuracy, on {len(Digits().held)} held-out images, of the mean "
        "of all peers' parameters. Gradients, models, strategies and the whole protocol are real; "
        "time is virtual.",
        f"The ratio of computing to sending is that of {RESNET_50.name} ({RESNET_50.source}): a "
        f"step of a machine of slowness 1 takes {RESNET_50.step_s:.2f} s, and sending the vector "
        f"over one line {vector_s:.2f} s, so lines have {plan.gbit_s:g} Gb/s scaled by "
        f"{numel:,} / {RESNET_50.numbers:,}. The first burst that a peer sends after computing is "
        f"Exp({1000 * HICCUP_S:.0f} ms) later. Heterogeneous: slowness "
        f"{', '.join(f'{s:g}' for s in SLOWNESS)}, a quarter of the peers each. Failures: the "
        f"same, and {DEATHS_SHARE:.0%} of the peers die between {DEATHS_S[0]:g} and "
        f"{DEATHS_S[1]:g} s, and do not come back.",
        "AD-PSGD averages atomically, as its source does: an active peer applies its next gradient "
        "when its partner's answer has come, and at this ratio that is what it waits for. The "
        "variant that never waits is ours: it shows what the pairs alone would do.",
        f"Batches of {plan.batch}; SGD with Nesterov momentum 0.9 and weight decay 1e-4; Moshpit "
        f"in groups of {plan.group_size}, every {plan.period} local steps on average, while "
        "training goes on; its variant with parameters as float16 on the wire has no counterpart "
        "among the others, which send float32. The learning rate is 0.05 for all: what else was "
        f"tried is in experiments/README.md. {seeds} seeds.",
    )


def _figure(results: Results, fleet: str, plan: Plan, seeds: int) -> Figure:
    ratio = slower(results, fleet, "ar-sgd")
    said = "" if ratio is None else f"; AR-SGD takes {ratio.mean:.1f} times as long as Moshpit"
    return Figure(
        title=f"Accuracy over time, {fleet} fleet of {plan.peers}",
        image=plots.svg(plot(results, fleet)),
        text=(
            f"Mean over {seeds} seeds, band from the lowest to the highest. A curve ends when its "
            f"first run has reached {plan.enough:.0%} twice in a row, or at {plan.limit_s:g} s."
        ),
        natures=(Nature.SIMULATED,),
        alt=f"Accuracy over virtual seconds for the methods, {fleet} fleet{said}.",
    )


def table_of(results: Results, fleet: str, plan: Plan, seeds: int) -> Table:
    """Return what a fleet's runs say."""
    return Table(
        title=f"Time to {plan.enough:.0%}, {fleet} fleet of {plan.peers}",
        head=HEAD,
        rows=tuple(rows_of(results, fleet)),
        text=(
            f"Virtual seconds, mean over {seeds} seeds with Student's 95 % interval; ratios are "
            "geometric means over pairs of the same seed. Samples are those of all peers."
        ),
        natures=(Nature.SIMULATED,),
    )
