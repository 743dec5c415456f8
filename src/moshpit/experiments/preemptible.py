"""Many cheap machines that come and go against a few good ones (paper §4.3).

Real training of a small masked language model (`moshpit.experiments.language`) in virtual time,
in large synchronous batches: on a few fast machines in one room that nobody takes away, and on
many slow ones on lines of all kinds, which are preempted and replaced. The target batch is the
same, so a step does the same for the model, and what differs are time and money.
"""

from __future__ import annotations

import csv
import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from random import Random
from statistics import fmean
from typing import Any, Final

import numpy as np

from moshpit.config import SwarmConfig
from moshpit.errors import ConfigError
from moshpit.experiments import plots, trials
from moshpit.experiments.comparison import config_of, words
from moshpit.experiments.fleets import NOISE, Original
from moshpit.experiments.language import MaskedText, SharedLayers
from moshpit.experiments.preemptions import HOUR_S, Bathtub, comings_and_goings
from moshpit.experiments.repeats import mean_of, ratio_of, run_all
from moshpit.experiments.section import Claim, Context, Figure, Nature, Section, Table
from moshpit.experiments.trials import Place, Setting, Trial
from moshpit.experiments.virtual import Machine
from moshpit.experiments.virtual_net import Line
from moshpit.training.strategies import GradientAveraging, Strategy

ALBERT_LARGE: Final = Original(
    name="ALBERT-large",
    numbers=17_683_968,
    batch=4096,
    samples_s=10.7,
    source="paper §4.3: global batch 4096, sequences of 512; Lan et al. 2019: 18 M parameters; "
    "NVIDIA's figures for BERT-large, which computes as much: about 85 sequences of 512 a second "
    "on 8 V100",
)
FLEETS: Final = ("reliable", "preemptible")
ROOM_GBIT_S: Final = 100.0  # within one machine or one rack; a stated choice
NEAR_S, FAR_S = 0.0001, 0.05  # one way to the middle: a room, continents; a stated choice
GROUP_SIZE: Final = 8  # paper §4.3
PIECE_BYTES: Final = 16 << 10
NORM_MAX: Final = 1.0  # of the mean gradient, as usual for such models
LOOKS: Final = 4  # in the time of a step of the reliable fleet: so that no step is passed over


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One run.

    Attributes:
        fleet: of `FLEETS`.
        seed: of everything.
        reliable: how many fast machines there are, of slowness 1.
        preemptible: how many places there are for slow ones.
        slowness: of these: the kinds, as many of each.
        mbit_s: their lines: the lowest and the highest, drawn evenly on a logarithmic scale.
        target: samples of a global step.
        batch: of one peer's micro-step.
        steps: global steps after which the run ends, at the pace of the reliable fleet.
        tub: how long preemptible machines live.
        replaced_s: how long a preempted one is missing on average.
        reliable_usd, preemptible_usd: the price of a machine and an hour.
        rate: the learning rate.
        codec: how gradients are written on the wire, in both fleets.
        enough: the loss that is aimed at, in nats a character.

    Raises:
        ConfigError: numbers that make no run.
    """

    fleet: str = "reliable"
    seed: int = 0
    reliable: int = 8
    preemptible: int = 32
    slowness: tuple[float, ...] = (1.6, 2.0, 2.5)
    mbit_s: tuple[float, float] = (100.0, 1500.0)
    target: int = 256
    batch: int = 1
    steps: int = 40
    tub: Bathtub = field(default_factory=Bathtub)
    replaced_s: float = 300.0
    reliable_usd: float = 3.06
    preemptible_usd: float = 0.2
    rate: float = 0.04
    codec: str = "int8"
    enough: float = 2.6

    def __post_init__(self) -> None:
        if self.fleet not in FLEETS:
            raise ConfigError(f"fleet {self.fleet!r}: there are {', '.join(FLEETS)}")
        if self.reliable < 2 or self.preemptible < 2 or not self.slowness:
            raise ConfigError("at least 2 machines of each kind, and their slowness")
        if not 1 <= self.batch <= self.target or self.steps < 1:
            raise ConfigError(
                f"micro-batch {self.batch}, target {self.target}, {self.steps} steps: give at "
                "least 1, no less than the micro-batch, and 1"
            )
        if not 0 < self.mbit_s[0] <= self.mbit_s[1]:
            raise ConfigError(f"lines of {self.mbit_s} Mb/s: give a low and a high rate")

    @property
    def step_s(self) -> float:
        """How long a micro-step takes on a machine of slowness 1: as long as the share of the
        original's batch that it stands for."""
        return ALBERT_LARGE.step_s * self.batch / self.target

    @property
    def pace_s(self) -> float:
        """How long the reliable fleet computes for a global step."""
        return ALBERT_LARGE.step_s / self.reliable

    @property
    def computing(self) -> float:
        """How many times as much the preemptible fleet computes in a second, if nobody is
        missing and nobody waits."""
        return self.preemptible * float(np.mean([1.0 / s for s in self.slowness])) / self.reliable


def setting_of(plan: Plan) -> Setting:
    """Return machines, times and limits of a run."""
    numel = sum(p.numel() for p in SharedLayers().parameters())
    limit_s = plan.steps * plan.pace_s
    rng = Random(f"{plan.seed}/fleet")
    if plan.fleet == "reliable":
        rate = ALBERT_LARGE.rate(ROOM_GBIT_S, numel)
        line = Line(rate, rate, NEAR_S)
        places = [Place(machine=Machine(line, noise=NOISE)) for _ in range(plan.reliable)]
    else:
        machines = [_slow_machine(plan, index, numel, rng) for index in range(plan.preemptible)]
        places = comings_and_goings(
            machines, plan.tub, replaced_s=plan.replaced_s, until_s=limit_s, rng=rng
        )
    return Setting(
        places=tuple(places),
        config=_config(),
        batch=plan.batch,
        step_s=plan.step_s,
        seed=plan.seed,
        look_s=plan.pace_s / LOOKS,
        limit_s=limit_s,
        enough=plan.enough,
        rising=False,
    )


def _config() -> SwarmConfig:
    """Return the peers' settings: the defaults, with the paper's groups, and with pieces of a state
    that are as much shorter as lines are thinner, about: no peer waits forever for one."""
    config = config_of(GROUP_SIZE)
    return replace(config, transport=replace(config.transport, chunk_bytes=PIECE_BYTES))


def _slow_machine(plan: Plan, index: int, numel: int, rng: Random) -> Machine:
    low, high = np.log(plan.mbit_s)
    gbit_s = float(np.exp(rng.uniform(low, high))) / 1000.0
    rate = ALBERT_LARGE.rate(gbit_s, numel)
    line = Line(rate, rate, rng.uniform(NEAR_S, FAR_S))
    return Machine(line, plan.slowness[index % len(plan.slowness)], NOISE)


def run(plan: Plan) -> Trial:
    """Run one plan."""

    def strategy() -> Strategy:
        return GradientAveraging(
            target_batch_size=plan.target, max_grad_norm=NORM_MAX, codec=plan.codec
        )

    return trials.run(MaskedText(), strategy, plan.rate, setting_of(plan))


Results = Mapping[str, Sequence[Trial]]
"""By fleet: one trial for each seed."""


def run_study(
    plan: Plan, *, seeds: int, jobs: int, say: Callable[[str], None]
) -> dict[str, list[Trial]]:
    """Run both fleets, with the seeds from ``plan.seed`` on."""
    plans = [
        replace(plan, fleet=fleet, seed=plan.seed + number)
        for fleet in FLEETS
        for number in range(seeds)
    ]

    def told(plan: Plan, trial: Trial) -> None:
        came = "not reached" if trial.seconds is None else f"{trial.seconds:.0f} virtual s"
        say(
            f"{plan.fleet} fleet, seed {plan.seed}: loss {plan.enough:g} after {came}; "
            f"{trial.looks[-1].steps} steps ({trial.cpu_s:.0f} CPU s here)"
        )

    found: dict[str, list[Trial]] = {}
    for done, trial in zip(plans, run_all(run, plans, jobs, told), strict=True):
        found.setdefault(done.fleet, []).append(trial)
    return found


# --- what it says ---------------------------------------------------------------------------


def cost_usd(plan: Plan, trial: Trial) -> float | None:
    """Return what the machines cost until the loss was reached: those that were there."""
    end = trial.reached()
    if end is None:
        return None
    price = plan.reliable_usd if trial_is_reliable(plan) else plan.preemptible_usd
    looks = [look for look in trial.looks if look.at_s <= end.at_s]
    machine_s = sum(
        (after.at_s - before.at_s) * (after.peers + before.peers) / 2.0
        for before, after in itertools.pairwise(looks)
    )
    return price * machine_s / HOUR_S


def trial_is_reliable(plan: Plan) -> bool:
    """Return whether a plan is of the reliable fleet."""
    return plan.fleet == "reliable"


def loss_at_step(trial: Trial, step: int) -> float | None:
    """Return the loss at the first look in a global step or later; None: it did not come there."""
    return next((look.score for look in trial.looks if look.steps >= step), None)


def steps_of_all(results: Results) -> int:
    """Return how many steps all runs have made."""
    return min(trial.looks[-1].steps for runs in results.values() for trial in runs)


def differences(results: Results, steps: Sequence[int]) -> list[list[float]]:
    """Return for each seed how much more the loss of the preemptible fleet is at these steps."""
    found: list[list[float]] = []
    for theirs, ours in zip(results["reliable"], results["preemptible"], strict=True):
        pairs = [(loss_at_step(ours, step), loss_at_step(theirs, step)) for step in steps]
        found.append([a - b for a, b in pairs if a is not None and b is not None])
    return found


def tables_of(plan: Plan, results: Results) -> tuple[Table, ...]:
    """Return time and money, and the loss per step."""
    rows: list[tuple[str, ...]] = []
    seconds: dict[str, list[float]] = {}
    for fleet, runs in results.items():
        here = replace(plan, fleet=fleet)
        reached = [trial.seconds for trial in runs if trial.seconds is not None]
        costs = [cost for cost in (cost_usd(here, trial) for trial in runs) if cost is not None]
        seconds[fleet] = reached
        peers = mean_of([look.peers for trial in runs for look in trial.looks]).mean
        step_s = [trial.looks[-1].at_s / max(1, trial.looks[-1].steps) for trial in runs]
        whole = len(reached) == len(runs)
        rows.append(
            (
                fleet,
                f"{peers:.1f}",
                words(mean_of(step_s), 1),
                words(mean_of(reached)) if whole else f"{len(reached)} of {len(runs)} came there",
                words(mean_of(costs), 2) if whole else "",
                f"{mean_of([trial.waited_share for trial in runs]).mean:.0%}",
            )
        )
    text = "no comparison: a run did not come there"
    if all(len(seconds[fleet]) == len(results[fleet]) for fleet in FLEETS):
        faster = ratio_of(seconds["reliable"], seconds["preemptible"])
        text = (
            f"The preemptible fleet is {words(faster, 2)} times as fast; it computes "
            f"{plan.computing:.2f} times as much in a second when all are there and nobody waits."
        )
    time_table = Table(
        title=f"Time and money to a loss of {plan.enough:g}",
        head=("fleet", "peers there", "s per step", "virtual s to it", "USD to it", "waiting"),
        rows=tuple(rows),
        text=f"{text} Prices per machine and hour: {plan.reliable_usd:g} and "
        f"{plan.preemptible_usd:g} USD, parameters of the experiment.",
        natures=(Nature.SIMULATED, Nature.MODELLED),
    )
    return (time_table, _steps_table(results))


def _steps_table(results: Results) -> Table:
    last = steps_of_all(results)
    steps = sorted({max(1, last * k // 5) for k in range(1, 6)})
    apart = differences(results, steps)
    rows: list[tuple[str, ...]] = []
    for number, step in enumerate(steps):
        cells: list[str] = []
        for fleet in FLEETS:
            losses = [loss_at_step(trial, step) for trial in results[fleet]]
            cells.append(words(mean_of([loss for loss in losses if loss is not None]), 3))
        rows.append((str(step), *cells, words(mean_of([row[number] for row in apart]), 3)))
    overall = mean_of([fmean(row) for row in differences(results, range(1, last + 1))])
    verdict = ""
    if overall.runs > 1:
        equal = overall.low <= 0 <= overall.high
        verdict = ": equal within noise" if equal else ": not equal within noise"
    return Table(
        title="Loss per step",
        head=("global step", *FLEETS, "difference"),
        rows=tuple(rows),
        text="Loss on held-out text in nats per hidden character, at the first look in this step; "
        "mean over the seeds with Student's 95 % interval, differences in pairs of one seed. The "
        f"mean difference over the steps from 1 to {last} is {words(overall, 3)}{verdict}.",
        natures=(Nature.REAL,),
    )


def plot(results: Results) -> Any:
    """Return a figure: the loss over virtual time, and over steps."""
    figure, axes = plots.drawing(wide=2)
    for side, (axis, name) in enumerate(
        zip(axes, ("virtual seconds", "global steps"), strict=True)
    ):
        lines: list[plots.Line] = []
        for style, (fleet, runs) in enumerate(results.items()):
            length = min(len(trial.looks) for trial in runs)
            looks = [trial.looks[:length] for trial in runs]
            scores = np.array([[look.score for look in row] for row in looks])
            at = [[look.steps if side else look.at_s for look in row] for row in looks]
            lines.append(
                plots.Line(
                    name=fleet, x=np.array(at, dtype=float).mean(0), y=scores.mean(0),
                    low=scores.min(0), high=scores.max(0), style=style,
                )
            )  # fmt: skip
        axis.set_xlabel(name)
        plots.draw(axis, lines)
    axes[0].set_ylabel("loss, nats a character")
    return figure


def as_csv(results: Results) -> str:
    """Return every look of every run as CSV."""
    text = StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("fleet", "run", "virtual_s", "samples", "step", "peers", "loss"))
    for fleet, runs in results.items():
        for number, trial in enumerate(runs):
            for look in trial.looks:
                when = (f"{look.at_s:.3f}", f"{look.samples:.0f}", look.steps, look.peers)
                writer.writerow((fleet, number, *when, f"{look.score:.5f}"))
    return text.getvalue()


def command_of(plan: Plan, seeds: int) -> str:
    """Return what to type in a shell to repeat a study."""
    return (
        f"moshpit experiment training --preset language --seeds {seeds} --steps {plan.steps} "
        f"--target {plan.enough:g}"
    )


SMALL: Final = Plan(target=64, batch=2, preemptible=8, reliable=3, steps=12, enough=3.2)


def section(context: Context) -> Section:
    """Run what the report shows of this experiment, and tell it."""
    began = time.perf_counter()
    plan, seeds = (SMALL, 1) if context.small else (Plan(), 3)
    results = run_study(plan, seeds=seeds, jobs=context.jobs, say=context.say)
    return Section(
        name="language",
        title="Preemptible machines against reliable ones",
        text=explained(plan),
        commands=() if context.small else (command_of(plan, seeds),),
        figures=(
            Figure(
                title="Loss over time and over steps",
                image=plots.svg(plot(results)),
                text=f"Mean over {seeds} seeds, band from the lowest to the highest.",
                natures=(Nature.SIMULATED,),
                alt="Loss of the two fleets over virtual seconds and over global steps.",
            ),
        ),
        tables=tables_of(plan, results),
        claims=(_claim(plan, results),),
        seconds=time.perf_counter() - began,
    )


def _claim(plan: Plan, results: Results) -> Claim:
    seconds = {
        fleet: [trial.seconds for trial in runs if trial.seconds is not None]
        for fleet, runs in results.items()
    }
    here = "no comparison: a run did not come there"
    if all(len(seconds[fleet]) == len(results[fleet]) for fleet in FLEETS):
        faster = ratio_of(seconds["reliable"], seconds["preemptible"])
        here = f"{words(faster, 2)}, where {plan.computing:.2f} is what they compute"
    return Claim(
        what="Times as fast to a loss on preemptible machines as on reliable ones",
        paper="1.5 (66 against 8 GPUs)",
        here=here,
        natures=(Nature.SIMULATED,),
    )


def explained(plan: Plan) -> tuple[str, ...]:
    """Say what is real and what is not, in paragraphs."""
    numel = sum(p.numel() for p in SharedLayers().parameters())
    low, high = plan.mbit_s
    return (
        f"A masked language model of {numel:,} numbers, one transformer layer applied three times, "
        "learns Python's own documentation, character by character, in global batches of "
        f"{plan.target} sequences (`GradientAveraging`, gradients as {plan.codec}, LAMB with a "
        f"rate of {plan.rate:g}). Model, gradients, strategy and protocol, with state transfer to "
        "those who come, are real; time is virtual.",
        f"It stands for {ALBERT_LARGE.name} ({ALBERT_LARGE.source}): a global batch stands for "
        f"{ALBERT_LARGE.batch}, the lines are scaled by {numel:,} / {ALBERT_LARGE.numbers:,}. "
        f"Reliable: {plan.reliable} machines of slowness 1 in one room ({ROOM_GBIT_S:g} Gb/s). "
        f"Preemptible: {plan.preemptible} machines of slowness "
        f"{', '.join(f'{s:g}' for s in plan.slowness)} on lines of {low:g} to {high:g} Mb/s, up "
        f"to {1000 * FAR_S:.0f} ms from the middle of the net.",
        "They are taken back without a word, after lifetimes drawn from the bathtub of Kadupitiya, "
        f"Jadhao and Sharma (HPDC 2020; A = {plan.tub.early:g}, τ1 = {plan.tub.early_h:g} h, "
        f"τ2 = {plan.tub.late_h:g} h, b = {plan.tub.limit_h:g} h), and replaced after "
        f"{plan.replaced_s:g} s on average; who comes fetches the state from the others.",
    )
