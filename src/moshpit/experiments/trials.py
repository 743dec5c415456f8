"""One training in virtual time, and what is learnt of it: loss or accuracy against seconds.

A *trial* trains one model on one fleet of machines by one method. All methods run in the same way:
the same script, model, data, batches and machines, and the same seed for all of these; only the
strategy differs, as it would for a user. What is looked at is the mean of all peers' parameters,
at fixed intervals of virtual time, and looking takes none.
"""

from __future__ import annotations

import itertools
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Final, final

import torch

from moshpit.config import SwarmConfig
from moshpit.errors import ConfigError, DriftError
from moshpit.experiments.virtual import Machine, VirtualCluster, VirtualPeer
from moshpit.training.optimizer import Optimizer
from moshpit.training.strategies import Strategy
from moshpit.training.strategies.merging import steps_of

MEETING_S: Final = 600.0  # virtual seconds until all peers of the start must have met


class Task(ABC):
    """What is learnt: a model, its data, and how good it is."""

    @abstractmethod
    def model(self) -> torch.nn.Module:
        """Return the model as all peers have it at the beginning; the caller sets the seed."""

    @abstractmethod
    def optimizer(self, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
        """Return the optimizer that the strategy gets, with a learning rate."""

    @abstractmethod
    def loss(self, model: torch.nn.Module, rng: Random, batch: int) -> torch.Tensor:
        """Return the loss of a batch drawn by a peer's own generator."""

    @abstractmethod
    def score(self, model: torch.nn.Module) -> float:
        """Return how good a model is, on data that nobody trains with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """One peer of a fleet, and when it is there.

    Attributes:
        machine: what it runs on.
        at_s: when it comes, in seconds from the beginning.
        until_s: when it is killed; infinite: never.
    """

    machine: Machine
    at_s: float = 0.0
    until_s: float = math.inf


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """All that a trial needs beside its task and its method.

    Attributes:
        places: the peers.
        config: their settings.
        batch: samples of one local step of one peer.
        step_s: how long that takes on a machine of slowness 1.
        seed: of everything random.
        look_s: how often the model is looked at.
        limit_s: the trial ends then.
        enough: it ends earlier, when the score is this good in two looks in a row.
        rising: whether more is better.
        unnoticed_s: how late the connections of a killed peer break.
    """

    places: tuple[Place, ...]
    config: SwarmConfig
    batch: int
    step_s: float
    seed: int
    look_s: float
    limit_s: float
    enough: float
    rising: bool
    unnoticed_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The swarm's model at one moment.

    Attributes:
        at_s: virtual seconds from the moment at which all who are there at first have made a step.
        samples: of all peers together, until then.
        epoch: the latest that any peer is in.
        score: of the mean of all living peers' parameters.
        peers: how many of these there are.
        steps: of the optimizer, at the peer that has made most; 0 where it does not count them.
    """

    at_s: float
    samples: float
    epoch: int
    score: float
    peers: int
    steps: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What came of it.

    Attributes:
        looks: in the order of time.
        enough: the score that was aimed at.
        rising: whether more is better.
        gave_up: peers that came and could not have the state that they needed.
        waited_share: the part of their time for which peers stood still for the swarm.
        bytes_carried: by all lines together.
        cpu_s: what it took here; the only figure that is not in virtual time.
    """

    looks: tuple[Look, ...]
    enough: float
    rising: bool
    gave_up: int
    waited_share: float
    bytes_carried: int
    cpu_s: float

    def reached(self, score: float | None = None) -> Look | None:
        """Return the first look at which a score was reached; None: it was not."""
        wanted = self.enough if score is None else score
        return next((k for k in self.looks if as_good(k.score, wanted, self.rising)), None)

    @property
    def seconds(self) -> float | None:
        """How long it took to what was aimed at."""
        look = self.reached()
        return None if look is None else look.at_s


def as_good(score: float, wanted: float, rising: bool) -> bool:
    """Return whether a score is as good as another one, or better."""
    return score >= wanted if rising else score <= wanted


MakeStrategy = Callable[[], Strategy]


@final
class _Board:
    """Where the peers of a trial write how far they are."""

    def __init__(self, cluster: VirtualCluster, task: Task, setting: Setting) -> None:
        self._cluster = cluster
        self._task = task
        self._setting = setting
        self._first = sum(1 for place in setting.places if place.at_s == 0.0)
        self._ready = 0
        self._peers: dict[VirtualPeer, tuple[torch.nn.Module, Optimizer]] = {}
        self._ready_s: dict[VirtualPeer, float] = {}
        self._waited_before: dict[VirtualPeer, float] = {}
        self.began_s = 0.0
        self.samples = 0.0
        self.lost = 0
        self.looks: list[Look] = []
        self._scored: tuple[list[torch.Tensor], float] | None = None

    @property
    def first(self) -> int:
        """How many peers are there at the beginning."""
        return self._first

    def ready(self, peer: VirtualPeer, model: torch.nn.Module, optimizer: Optimizer) -> None:
        """A peer has made its first step. Before, it may have had to find the others, and to take
        parameters from them that it has already."""
        self._peers[peer] = (model, optimizer)
        self._ready_s[peer] = peer.clock()
        self._waited_before[peer] = optimizer.waited_s
        self._ready += 1
        if self._ready == self._first:
            self.began_s = peer.clock()
            self.samples = 0.0
            self._look()

    def gave_up(self, peer: VirtualPeer) -> None:
        """A peer ends, since it cannot take part."""
        self.lost += 1
        self._peers.pop(peer, None)

    def waited_share(self) -> float:
        """Return for which part of their time peers stood still for the swarm."""
        waited = there = 0.0
        for peer, (_, optimizer) in self._peers.items():
            waited += optimizer.waited_s - self._waited_before[peer]
            there += min(self._cluster.now, peer.died_s) - self._ready_s[peer]
        return waited / there if there else 0.0

    def _look(self) -> None:
        now = self._cluster.now - self.began_s
        living = [pair for peer, pair in self._peers.items() if peer.alive]
        if living:
            score = self._score([model for model, _ in living])
            self.looks.append(
                Look(
                    at_s=now,
                    samples=self.samples,
                    epoch=max(optimizer.epoch for _, optimizer in living),
                    score=score,
                    peers=len(living),
                    steps=max(round(steps_of(optimizer)) for _, optimizer in living),
                )
            )
        last = self.looks[-2:]
        setting = self._setting
        good = [as_good(look.score, setting.enough, setting.rising) for look in last]
        if now >= setting.limit_s or (len(good) == 2 and all(good)):
            self._cluster.stop()
        else:
            self._cluster.at(self._cluster.now + setting.look_s, self._look)

    def _score(self, models: Sequence[torch.nn.Module]) -> float:
        mean = self._task.model()
        targets = [*mean.parameters(), *mean.buffers()]
        tensors = [[*model.parameters(), *model.buffers()] for model in models]
        with torch.no_grad():
            for target, *values in zip(targets, *tensors, strict=True):
                if target.is_floating_point():
                    target.copy_(torch.stack(values).mean(0))
            last = self._scored  # looking costs most, and between two steps nothing has changed
            if last is None or not all(map(torch.equal, targets, last[0])):
                self._scored = last = (targets, self._task.score(mean))
            return last[1]


def run(task: Task, strategy: MakeStrategy, rate: float, setting: Setting) -> Trial:
    """Run one trial.

    Args:
        task: what is learnt.
        strategy: makes each peer's strategy.
        rate: the learning rate.
        setting: everything else.

    Raises:
        ConfigError: nobody is there at the beginning, or the first peers did not meet.
    """
    began = time.process_time()
    if not any(place.at_s == 0.0 for place in setting.places):
        raise ConfigError("a trial needs peers that are there at the beginning")
    cluster = VirtualCluster(setting.seed, setting.config)
    board = _Board(cluster, task, setting)

    def script(peer: VirtualPeer) -> None:
        with peer.join() as swarm:
            if setting.places[peer.index].at_s == 0.0:
                swarm.wait_for_peers(board.first, MEETING_S)
            torch.manual_seed(setting.seed)  # pyright: ignore[reportUnknownMemberType]
            model = task.model()
            inner = task.optimizer(model, rate)
            optimizer = Optimizer(
                inner, swarm, strategy=strategy(), batch_size=setting.batch, model=model
            )
            try:
                for step in itertools.count():
                    optimizer.zero_grad()
                    torch.autograd.backward(task.loss(model, peer.rng, setting.batch))
                    peer.compute(setting.step_s)
                    optimizer.step()
                    board.samples += setting.batch
                    if step == 0:
                        board.ready(peer, model, optimizer)
            except DriftError:  # all who had the state are gone, or cannot give it in time
                board.gave_up(peer)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for place in setting.places:
            cluster.add(
                place.machine, script,
                at_s=place.at_s, until_s=place.until_s, unnoticed_s=setting.unnoticed_s,
            )  # fmt: skip
        with cluster:
            if not cluster.run(MEETING_S + 2 * setting.limit_s):
                raise ConfigError(f"the first peers did not meet within {MEETING_S:g} s")
            waited_share = board.waited_share()
    finally:
        torch.set_num_threads(threads)
    return Trial(
        looks=tuple(board.looks),
        enough=setting.enough,
        rising=setting.rising,
        gave_up=board.lost,
        waited_share=waited_share,
        bytes_carried=cluster.wire.bytes_carried,
        cpu_s=time.process_time() - began,
    )


def with_seed(setting: Setting, seed: int) -> Setting:
    """Return the same with another seed."""
    return replace(setting, seed=seed)
