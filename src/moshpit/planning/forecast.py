r"""What an averaging makes of a step and an epoch: time, bytes, memory, money.

With steps of t seconds, a period of τ steps, an averaging of A seconds and copies (snapshot
and write back) of C seconds, an epoch takes

.. math:: \tau t + A + C \quad\text{or, overlapped,}\quad \max(\tau t, A) + C.

The rest over τt is what the averaging costs. In overlapped mode nobody stands still while A
is longer than τt: peers go on training and the period becomes A/t. That this is longer than
what was asked for is counted as if they stood still.

`GradientAveraging` can hide its averaging only behind one step, not behind the whole epoch,
since the next gradients need the new parameters.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from moshpit.errors import ConfigError
from moshpit.planning.codecs import RAW_BYTES, CodecCost
from moshpit.planning.swarm import PlannedSwarm
from moshpit.planning.wire import AveragingCost, Costs, averaging_cost

COPY_BYTES_PER_S = 5e9  # guess: a bus or memory, 7 to 12 GB/s measured on one core
STRATEGIES = ("GradientAveraging", "LocalSGD", "DiLoCo")
DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}

_GB = 1e9


@dataclass(frozen=True, slots=True)
class PlannedRun:
    """What is to be trained, and what it costs.

    Attributes:
        params: numbers in the model.
        step_s: seconds of one local step, averaging not included.
        swarm: who trains.
        batch: samples (or tokens) of one local step of one peer; None if it does not matter.
        samples: samples of the whole run; None if unknown.
        price_per_hour: of one peer.
        price_per_gb: of what a peer sends.
        dtype: of weights, gradients and AdamW's two moments.
        costs: of machines and network.

    Raises:
        ConfigError: some number is not positive.
    """

    params: int
    step_s: float
    swarm: PlannedSwarm
    batch: float | None = None
    samples: float | None = None
    price_per_hour: float = 0.0
    price_per_gb: float = 0.0
    dtype: str = "float32"
    costs: Costs = field(default_factory=Costs)

    def __post_init__(self) -> None:
        positive = (self.params, self.step_s, self.batch or 1.0, self.samples or 1.0)
        if not all(0 < number < math.inf for number in positive):
            raise ConfigError("parameters, step time, batch and samples must be above 0")
        if not all(0 <= p < math.inf for p in (self.price_per_hour, self.price_per_gb)):
            raise ConfigError("a price must be 0 or more")
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype {self.dtype!r}: choose {', '.join(DTYPES)}")

    @property
    def priced(self) -> bool:
        """Whether money is known."""
        return self.price_per_hour > 0 or self.price_per_gb > 0

    @property
    def steps(self) -> float | None:
        """Local steps of each peer in the whole run."""
        if self.samples is None or self.batch is None:
            return None
        return self.samples / (self.batch * len(self.swarm.peers))


@dataclass(frozen=True, slots=True)
class Choice:
    """One way to average.

    Attributes:
        strategy: of `STRATEGIES`.
        schedule: ``grid`` or ``torus``.
        codec: how numbers are written on the wire.
        period: local steps between two averagings.
        group_size: M.
        overlap: whether training goes on meanwhile.
    """

    strategy: str
    schedule: str
    codec: CodecCost
    period: int
    group_size: int
    overlap: bool


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a choice will come to.

    Attributes:
        choice: of what.
        averaging: one averaging by itself.
        epoch_s: seconds from one averaging to the next.
        step_s: seconds per local step, all included.
        averaging_share: the share of the time that averaging costs.
        link_share: the share of the time in which the network is busy.
        bytes_per_peer: sent by a peer in an epoch, on average.
        swarm_bytes: sent by all in an epoch.
        memory_bytes: of a peer: the model's training state and what averaging needs.
        money_per_epoch: all peers' time and traffic.
        money_per_step: the same for one local step of all peers.
        run_s: seconds of the whole run; None where its length is unknown.
        money_per_run: of the whole run; None likewise.
    """

    choice: Choice
    averaging: AveragingCost
    epoch_s: float
    step_s: float
    averaging_share: float
    link_share: float
    bytes_per_peer: float
    swarm_bytes: float
    memory_bytes: float
    money_per_epoch: float
    money_per_step: float
    run_s: float | None
    money_per_run: float | None


def forecast(run: PlannedRun, choice: Choice) -> Forecast:
    """Predict what a choice comes to (see the module's docstring)."""
    one = _averaging(run, choice)
    compute_s = choice.period * run.step_s
    copies_s = 2 * RAW_BYTES * run.params / COPY_BYTES_PER_S
    if not choice.overlap:
        epoch_s = compute_s + one.seconds
    elif choice.strategy == "GradientAveraging":
        epoch_s = compute_s - run.step_s + max(run.step_s, one.seconds)
    else:
        epoch_s = max(compute_s, one.seconds)
    epoch_s += copies_s
    hours = len(run.swarm.peers) * epoch_s / 3600
    money = hours * run.price_per_hour + one.swarm_bytes / _GB * run.price_per_gb
    epochs = run.steps / choice.period if run.steps is not None else None
    return Forecast(
        choice=choice,
        averaging=one,
        epoch_s=epoch_s,
        step_s=epoch_s / choice.period,
        averaging_share=1 - compute_s / epoch_s,
        link_share=min(1.0, one.seconds / epoch_s),
        bytes_per_peer=one.bytes_mean,
        swarm_bytes=one.swarm_bytes,
        memory_bytes=_memory(run, choice, one.part_share),
        money_per_epoch=money,
        money_per_step=money / choice.period,
        run_s=epochs * epoch_s if epochs is not None else None,
        money_per_run=epochs * money if epochs is not None else None,
    )


def _averaging(run: PlannedRun, choice: Choice) -> AveragingCost:
    return _cached(
        run.swarm,
        run.params,
        choice.codec,
        choice.schedule,
        group_size=choice.group_size,
        costs=run.costs,
    )


_cached = lru_cache(maxsize=1024)(averaging_cost)  # strategies and periods share them


def _memory(run: PlannedRun, choice: Choice, part: float) -> float:
    """Return the bytes of memory that the busiest peer needs, activations not included."""
    training = 4 * DTYPES[run.dtype]  # weights, gradients, two moments of AdamW
    averaging = 2 * RAW_BYTES + RAW_BYTES * part  # snapshot, mean, the sums of its own part
    if choice.codec.loss:
        averaging += choice.codec.bytes_per_number  # the encoded copy
    if choice.codec.biased:
        averaging += RAW_BYTES  # error feedback
    if choice.strategy == "DiLoCo":
        averaging += 2 * RAW_BYTES  # the outer parameters and momentum
    if choice.strategy == "GradientAveraging":
        averaging += RAW_BYTES  # the gradients' sums
    return run.params * (training + averaging)
