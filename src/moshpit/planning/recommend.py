r"""Which way to average: the rule, and the words for it.

*Allowed* is what practice supports:

- `GradientAveraging` averages after every local step: a longer period would be a larger batch,
  which is the user's decision. `LocalSGD` averages parameters at most every `LOCAL_SGD_MAX`
  steps, `DiLoCo` differences every `DILOCO_MIN` to `DILOCO_MAX` steps.
- Codecs whose error is larger than what a few steps change carry gradients and differences
  only, so `LocalSGD` has the choice of float32 and float16.
- A run should have at least `AVERAGINGS_MIN` averagings.

*Cost* is money per step where prices are known, else seconds per step. Of all that cost at most
``slack`` more than the cheapest, the one is recommended that departs least from one large
synchronous batch:

.. math:: \log_2 τ + \text{loss of the codec} + \tfrac12\,[\text{overlapped, so one epoch late}],

then the cheaper, then the one whose averaging is shorter. No cost model can know how well a
model trains: the weights are guesses, and `moshpit plan` shows what every other choice would
have cost.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moshpit.errors import ConfigError
from moshpit.planning.codecs import CODECS, CodecCost
from moshpit.planning.forecast import STRATEGIES, Choice, Forecast, PlannedRun, forecast
from moshpit.planning.schedules import SCHEDULES
from moshpit.protocol.grid import GROUP_SIZE_MAX

LOCAL_SGD_MAX = 32  # guess: post-local SGD (Lin et al. 2020) tried up to 32
DILOCO_MIN = 16  # guess: outer momentum wants a difference of many steps
DILOCO_MAX = 500  # DiLoCo (Douillard et al. 2023) uses 500; 1000 and more cost quality there
AVERAGINGS_MIN = 100  # guess
OVERLAP_LOSS = 0.5  # guess, in doublings of the period
_COARSE = 2.0  # guess: from this loss on a codec wants a trial

OVERLAPPED = ("LocalSGD", "DiLoCo")
"""Strategies that can go on training meanwhile."""

PERIODS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 80, 100, 150, 200, 300, 500)
GROUP_SIZES = (8, 16, 32)  # paper §4 uses 8 to 32


@dataclass(frozen=True, slots=True)
class Options:
    """What may be chosen from. An empty ``periods`` means those that practice supports."""

    strategies: Sequence[str] = STRATEGIES
    schedules: Sequence[str] = SCHEDULES
    codecs: Sequence[CodecCost] = CODECS
    periods: Sequence[int] = ()
    group_sizes: Sequence[int] = GROUP_SIZES
    slack: float = 0.1

    def __post_init__(self) -> None:
        for kind, given, known in (
            ("strategy", self.strategies, STRATEGIES),
            ("schedule", self.schedules, SCHEDULES),
        ):
            for name in given:
                if name not in known:
                    raise ConfigError(f"{kind} {name!r}: choose {', '.join(known)}")
        if not all(period >= 1 for period in self.periods):
            raise ConfigError("a period is a number of local steps: 1 or more")
        if not all(2 <= size <= GROUP_SIZE_MAX for size in self.group_sizes):
            raise ConfigError(f"a group has 2 to {GROUP_SIZE_MAX} peers")
        if not 0 <= self.slack < math.inf:
            raise ConfigError("slack: give 0 or more, such as 0.1 for 10 %")


@dataclass(frozen=True, slots=True)
class Recommendation:
    """What to do, and why.

    Attributes:
        best: the choice by the rule.
        why: one or two sentences.
        cheapest: what costs least of all that is allowed.
        alternatives: the best with one thing changed at a time, by the thing's name.
        notes: what the plan does not know, or what was asked for against practice.
    """

    best: Forecast
    why: str
    cheapest: Forecast
    alternatives: dict[str, list[Forecast]]
    notes: list[str] = field(default_factory=list[str])


def allowed(run: PlannedRun, options: Options) -> list[Choice]:
    """Return every choice that the options and practice leave.

    Raises:
        ConfigError: none is left.
    """
    sizes = _distinct_sizes(options.group_sizes, len(run.swarm.peers))
    choices = [
        Choice(strategy, schedule, codec, period, size, overlap)
        for strategy in options.strategies
        for period in _periods(strategy, run, options)
        for codec in options.codecs
        if strategy != "LocalSGD" or not codec.differences_only
        for size in sizes
        for schedule in _distinct_schedules(options.schedules, size, len(run.swarm.peers))
        for overlap in ((False, True) if strategy in OVERLAPPED else (False,))
    ]
    if not choices:
        raise ConfigError(
            "no choice is left: the run is too short for what was asked (a strategy with many "
            f"steps between averagings wants {AVERAGINGS_MIN} of them), or only LocalSGD was asked "
            "for, which sends parameters, with codecs that are too coarse for them (take float16)"
        )
    return choices


def _distinct_sizes(sizes: Sequence[int], peers: int) -> list[int]:
    """Leave out what makes the same groups as a smaller size: all peers in one."""
    kept: list[int] = []
    for size in sorted(dict.fromkeys(sizes)):
        if not kept or kept[-1] < peers:
            kept.append(size)
    return kept


def _distinct_schedules(schedules: Sequence[str], size: int, peers: int) -> Sequence[str]:
    """Only on two axes do they differ."""
    both = size < peers <= size**2
    return tuple(dict.fromkeys(schedules)) if both else schedules[:1]


def _periods(strategy: str, run: PlannedRun, options: Options) -> Sequence[int]:
    if strategy == "GradientAveraging":
        return (1,)
    if options.periods:
        return tuple(dict.fromkeys(options.periods))
    low, high = (1, LOCAL_SGD_MAX) if strategy == "LocalSGD" else (DILOCO_MIN, DILOCO_MAX)
    if run.steps is not None:
        high = min(high, run.steps / AVERAGINGS_MIN)
    return [period for period in PERIODS if low <= period <= high]


def departure(choice: Choice) -> float:
    """Return how far a choice is from one large synchronous batch, in doublings of the period.

    >>> from moshpit.planning.codecs import CODECS
    >>> departure(Choice("DiLoCo", "torus", CODECS[0], 64, 16, True))
    6.5
    """
    late = OVERLAP_LOSS if choice.overlap and choice.strategy != "GradientAveraging" else 0.0
    return math.log2(choice.period) + choice.codec.loss + late


def cost(run: PlannedRun, predicted: Forecast) -> float:
    """Return what is made small: money per step where prices are known, else seconds."""
    return predicted.money_per_step if run.priced else predicted.step_s


def pick(run: PlannedRun, forecasts: Sequence[Forecast], slack: float) -> Forecast:
    """Return the choice by the rule (see the module's docstring) of those given."""
    limit = (1 + slack) * min(cost(run, one) for one in forecasts)
    return min(
        (one for one in forecasts if cost(run, one) <= limit),
        key=lambda one: (departure(one.choice), cost(run, one), one.averaging.seconds),
    )


def recommend(run: PlannedRun, options: Options | None = None) -> Recommendation:
    """Predict all that is allowed, and pick one.

    Raises:
        ConfigError: the options leave nothing.
    """
    given = options or Options()
    forecasts = [forecast(run, choice) for choice in allowed(run, given)]
    best = pick(run, forecasts, given.slack)
    cheapest = min(forecasts, key=lambda one: (cost(run, one), departure(one.choice)))
    return Recommendation(
        best,
        _why(run, best, cheapest, forecasts, given.slack),
        cheapest,
        _alternatives(run, best, forecasts, given.slack),
        _notes(run, best),
    )


def _alternatives(
    run: PlannedRun, best: Forecast, forecasts: Sequence[Forecast], slack: float
) -> dict[str, list[Forecast]]:
    """Return the best with one thing changed; for another strategy, the best it can do."""
    chosen = best.choice
    changed: dict[str, list[Forecast]] = {}
    strategies = dict.fromkeys(one.choice.strategy for one in forecasts)
    changed["strategy"] = [
        pick(run, [one for one in forecasts if one.choice.strategy == name], slack)
        for name in strategies
        if name != chosen.strategy
    ]
    for thing in ("schedule", "codec", "period", "group_size", "overlap"):
        changed[thing] = [
            one
            for one in forecasts
            if one is not best and replace(one.choice, **{thing: getattr(chosen, thing)}) == chosen
        ]
    return {thing: rows for thing, rows in changed.items() if rows}


def _why(
    run: PlannedRun,
    best: Forecast,
    cheapest: Forecast,
    forecasts: Sequence[Forecast],
    slack: float,
) -> str:
    measure = "money" if run.priced else "time"
    least = cost(run, cheapest)
    extra = cost(run, best) / least - 1
    first = (
        "Nothing that practice allows costs less"
        if extra < 0.005
        else f"It costs {_percent(extra)} more {measure} than the cheapest ({describe(cheapest)}), "
        f"within the slack of {_percent(slack)}"
    )
    closer = [one for one in forecasts if departure(one.choice) < departure(best.choice)]
    if not closer:
        return f"{first}, and nothing trains closer to one large synchronous batch."
    nearest = min(closer, key=lambda one: cost(run, one))
    return (
        f"{first}. Whatever trains closer to one large synchronous batch costs at least "
        f"{_percent(cost(run, nearest) / least - 1)} more {measure} ({describe(nearest)})."
    )


def describe(one: Forecast) -> str:
    """Return a choice in a few words."""
    choice = one.choice
    every = "every step" if choice.period == 1 else f"every {choice.period} steps"
    waits = ", waiting" if choice.strategy in OVERLAPPED and not choice.overlap else ""
    return f"{choice.strategy} {every}, {choice.codec.name}{waits}"


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


def _notes(run: PlannedRun, best: Forecast) -> list[str]:
    notes: list[str] = []
    count = len(run.swarm.peers)
    choice = best.choice
    if best.averaging_share > 0.5:
        notes.append(
            "Averaging takes most of the time: these links are too slow for this model and step. "
            "Fewer peers on faster links may train more."
        )
    if choice.strategy == "GradientAveraging":
        batch = f": {run.batch * count:g} samples" if run.batch else ""
        notes.append(
            f"Every step is one batch of all {count} peers{batch}; is that a batch size "
            "at which your model trains well?"
        )
    longest = LOCAL_SGD_MAX if choice.strategy == "LocalSGD" else DILOCO_MAX
    if choice.period > longest:
        notes.append(
            f"{choice.strategy} with more than {longest} steps between averagings is longer than "
            "practice supports: expect a worse model for the same samples."
        )
    if run.steps is not None and run.steps / choice.period < AVERAGINGS_MIN:
        notes.append(
            f"The whole run has only {run.steps / choice.period:.0f} averagings; a run should "
            f"have {AVERAGINGS_MIN} or more."
        )
    if run.swarm.clients:
        notes.append(
            f"The slowest {run.swarm.clients} peers are taken for clients, which reduce nothing."
        )
    if best.choice.codec.loss >= _COARSE:
        notes.append(f"{choice.codec.name} is coarse: compare the loss with int8 on a short run.")
    return notes
