"""Sides of a swarm that were cut off from each other, trained on, and become one again.

Real optimizers, swarms and protocol in virtual time (`moshpit.experiments.virtual`), on a quadratic
problem. The net between the sides is cut: nothing arrives, as with a router that has died.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest
import torch

import moshpit
from moshpit.events import EpochReport
from moshpit.experiments.virtual import Machine, VirtualCluster, VirtualPeer
from moshpit.experiments.virtual_net import Line
from moshpit.training.averager import Averaging
from moshpit.training.strategies import Strategy
from moshpit.training.strategies.merging import ParameterMerge
from moshpit.training.tensors import Named
from moshpit.transport.memory import Exchange, Wire
from moshpit.types import PeerId

BATCH = 8
STEP_S = 0.5
NUMEL = 40
STATISTICS = 2  # of AdamW, each of which is merged by itself


class CutWire(Wire):
    """A wire that carries nothing between the sides while it is cut."""

    def __init__(self, exchange: Exchange) -> None:
        self.exchange = exchange
        self.inner = exchange.wire
        self.side: dict[PeerId, int] = {}

    def apart(self, source: PeerId, target: PeerId) -> bool:
        return self.side.get(source, 0) != self.side.get(target, 0)

    def cut(self, *sides: list[VirtualPeer]) -> None:
        self.side = {p.peer_id: number for number, side in enumerate(sides, 1) for p in side}

    def heal(self) -> None:
        """End the cut. Connections that were silent for long are gone."""
        sides, self.side = self.side, {}
        there = list(self.exchange.listening.values())
        for i, one in enumerate(there):
            for other in there[:i]:
                if sides.get(one.peer, 0) != sides.get(other.peer, 0):
                    self.exchange.break_link(one, other)

    def dial_s(self, source: PeerId, target: PeerId | None) -> float:
        return self.inner.dial_s(source, target)

    def message(self, source: PeerId, target: PeerId, deliver: Callable[[], None]) -> None:
        if not self.apart(source, target):
            self.inner.message(source, target, deliver)

    def chunk(self, source, target, size, sent, deliver) -> None:
        if not self.apart(source, target):
            self.inner.chunk(source, target, size, sent, deliver)


@dataclass
class Given:
    """What a peer brought to an averaging, and what came of it."""

    samples: float
    values: torch.Tensor
    weight: float
    averaging: Averaging
    after: torch.Tensor | None = None
    """The parameters once it has ended."""

    @property
    def report(self) -> EpochReport:
        return self.averaging.report


class Place(torch.nn.Linear):
    """How far samples are from this peer's place."""

    def forward(self, numbers: torch.Tensor) -> torch.Tensor:
        return self.weight - numbers


@dataclass
class Trainee:
    """A quadratic problem: every peer draws samples around its own place."""

    peer: VirtualPeer
    swarm: moshpit.Swarm
    strategy: Strategy
    given: list[Given] = field(default_factory=list)
    samples: float = 0.0

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = Place(NUMEL, 1, bias=False)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.03)
        self.optimizer = moshpit.Optimizer(
            inner, self.swarm, self.strategy, batch_size=BATCH, model=self.model
        )
        begin = self.swarm.begin_averaging

        def watched(vector, weight, **how):
            values = self.model.weight.detach().flatten().clone()
            averaging = begin(vector, weight, **how)
            self.given.append(Given(self.samples, values, weight, averaging))
            return averaging

        self.swarm.begin_averaging = watched

    def step(self) -> None:
        rng, place = self.peer.rng, math.sin(self.peer.index)
        numbers = torch.tensor(
            [[rng.gauss(place, 1.0) for _ in range(NUMEL)] for _ in range(BATCH)]
        )
        self.optimizer.zero_grad()
        self.samples += BATCH  # the backward pass may give them already
        self.model(numbers).square().sum(1).mean().backward()
        self.peer.compute(1.0)
        self.optimizer.step()
        for given in self.given[-STATISTICS - 1 :]:
            if given.averaging.done() and given.after is None:
                given.after = self.values.clone()

    @property
    def values(self) -> torch.Tensor:
        return self.model.weight.detach().flatten()


def train(
    make: Callable[[], Strategy],
    sides: tuple[int, ...],
    *,
    cut_s: float,
    heal_s: float,
    epochs: int,
    seed: int = 1,
    step_s: float = STEP_S,
) -> list[Trainee]:
    """Train, cut the sides off from each other for a while, train on together."""
    size = sum(sides)
    cluster = VirtualCluster(seed)
    wire = cluster.exchange.wire = CutWire(cluster.exchange)
    trainees: list[Trainee] = []

    def script(peer: VirtualPeer) -> None:
        with peer.join() as swarm:
            swarm.wait_for_peers(size)
            trainee = Trainee(peer, swarm, make())
            trainees.append(trainee)
            while trainee.optimizer.epoch < epochs:
                trainee.step()
            trainee.optimizer.finish()

    for index in range(size):
        cluster.add(Machine(Line(1e6, 1e6), slowness=step_s * (1.0 + 0.1 * index)), script)
    starts = [sum(sides[:i]) for i in range(len(sides))]
    parts = [cluster.peers[at : at + n] for at, n in zip(starts, sides, strict=True)]
    cluster.at(cut_s, lambda: wire.cut(*parts))
    cluster.at(heal_s, wire.heal)
    with cluster:
        assert cluster.run(1e4)
    return sorted(trainees, key=lambda t: t.peer.index)


def by_epoch(trainees: list[Trainee]) -> dict[int, list[Given]]:
    """What all brought to each epoch's averaging in which all took part together."""
    epochs: dict[int, list[Given]] = {}
    for trainee in trainees:
        for given in trainee.given:
            if given.after is not None and not given.report.stale:
                epochs.setdefault(given.report.epoch, []).append(given)
    return {e: g for e, g in sorted(epochs.items()) if len(g) == len(trainees) and together(g)}


def together(given: list[Given]) -> bool:
    return all(len(g.report.rounds[-1].peers) == len(given) for g in given)


def merge_of(trainees: list[Trainee]) -> tuple[list[Given], list[Given]]:
    """The last averaging of all before the cut, and the first after it."""
    common = by_epoch(trainees)
    gaps = [(common[a], common[b]) for a, b in pairwise(common) if b > a + 1]
    assert len(gaps) == 1, sorted(common)
    return gaps[0]


def mean_of(merged: list[Given], seen: list[float]) -> torch.Tensor:
    return sum(n * g.values.double() for n, g in zip(seen, merged, strict=True)) / sum(seen)


def seen_between(before: list[Given], merged: list[Given]) -> list[float]:
    return [after.samples - at.samples for at, after in zip(before, merged, strict=True)]


def alone(trainees: list[Trainee], before: list[Given], merged: list[Given]) -> list[int]:
    """How many averagings each has had between the two."""
    first, last = before[0].report.epoch, merged[0].report.epoch
    return [sum(first < g.report.epoch < last for g in t.given) for t in trainees]


def check_all_are_one(trainees: list[Trainee]) -> None:
    for trainee in trainees:
        assert trainee.optimizer.caught_up == 0, "nobody has thrown anything away"
        assert torch.equal(trainee.values, trainees[0].values)


STRATEGIES = {
    "local": lambda n: moshpit.LocalSGD(n, overlap=False),
    "diloco": lambda n: moshpit.DiLoCo(n, overlap=False),
    "gradients": moshpit.GradientAveraging,
    "overlapped": lambda n: moshpit.OverlappedGradientAveraging(accumulate=3),
}


def test_the_merged_parameters_are_the_mean_weighted_by_what_each_side_has_seen() -> None:
    n = 7 * BATCH * 4
    trainees = train(
        lambda: STRATEGIES["local"](n), (5, 2), cut_s=12.0, heal_s=50.0, epochs=13, step_s=0.7
    )
    before, merged = merge_of(trainees)
    averagings = alone(trainees, before, merged)
    assert min(averagings[:5]) > max(averagings[5:]) > 1, "both sides went on, at other paces"
    seen = seen_between(before, merged)
    assert [g.weight for g in merged] == seen
    mean = mean_of(merged, seen)
    for given in merged:
        torch.testing.assert_close(given.after.double(), mean, rtol=0, atol=1e-6)
    check_all_are_one(trainees)


@pytest.mark.parametrize(
    ("kind", "epochs"), [("diloco", 14), ("gradients", 14), ("overlapped", 28)]
)
def test_strategies_whose_peers_share_more_than_an_epoch(kind: str, epochs: int) -> None:
    trainees = train(
        lambda: STRATEGIES[kind](3 * BATCH * 3), (2, 1), cut_s=8.0, heal_s=34.0, epochs=epochs
    )
    before, merged = merge_of(trainees)
    assert min(alone(trainees, before, merged)) > 1
    seen = seen_between(before, merged)
    assert [g.weight for g in merged] == seen
    mean = mean_of(merged, seen)
    for given in merged:
        torch.testing.assert_close(given.after.double(), mean, rtol=0, atol=1e-6)
    check_all_are_one(trainees)
    first, *others = trainees
    if kind == "diloco":
        anchors = [t.strategy.state_dict()["anchor"] for t in trainees]
        assert all(torch.equal(anchor, anchors[0]) for anchor in anchors)
        assert [t.strategy.realignments for t in trainees] == [1] * 3
    else:  # the optimizer's state is one, too
        mine = first.optimizer.state[first.model.weight]
        for other in others:
            theirs = other.optimizer.state[other.model.weight]
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


def test_where_factors_are_averaged_the_side_that_is_behind_takes_the_others_state(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "moshpit.training")
    trainees = train(
        lambda: moshpit.GradientAveraging(3 * BATCH * 3, powersgd_rank=2),
        (2, 1), cut_s=8.0, heal_s=34.0, epochs=32,
    )  # fmt: skip
    assert [t.optimizer.caught_up for t in trainees] == [0, 0, 1]
    assert all(torch.equal(t.values, trainees[0].values) for t in trainees)
    assert "what this peer did without the others, up to its epoch" in caplog.text


@pytest.mark.soak
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("sides", [(5, 2), (2, 2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("seed", range(2))
def test_all_sides_become_one(kind: str, sides: tuple[int, ...], seed: int) -> None:
    """Three sides, too; and a single peer (a laptop that is closed, and trains on)."""
    rng = Random(seed)
    size = sum(sides)
    cut_s = rng.uniform(6.0, 15.0)
    trainees = train(
        lambda: STRATEGIES[kind](size * BATCH * 4),
        sides,
        cut_s=cut_s,
        heal_s=cut_s + rng.uniform(20.0, 60.0),
        epochs=40,
        seed=seed,
    )
    merged = by_epoch(trainees)
    last = max(merged)
    assert last - min(e for e in merged if e > last - 8) == 7, "together to the end"
    for trainee in trainees:
        assert torch.equal(trainee.values, trainees[0].values)


@pytest.mark.parametrize("stepped", [(True, False), (True, True), (False, False)])
def test_who_keeps_nothing_yet_and_who_does_go_through_the_same_averagings(
    stepped: tuple[bool, bool],
) -> None:
    """An optimizer that has made no step has no statistics. Otherwise one peer gave these, and the
    other gradients, again and again."""
    merges, optimizers, named = [], [], []
    for has_stepped in stepped:
        weight = torch.nn.Parameter(torch.ones(3))
        optimizers.append(torch.optim.AdamW([weight]))
        if has_stepped:
            weight.grad = torch.ones(3)
            optimizers[-1].step()
        named.append([Named("weight", weight)])
        merges.append(ParameterMerge())
        merges[-1].begin()
    given: list[int] = []
    while any(merge.under_way for merge in merges):
        for merge, optimizer, mine in zip(merges, optimizers, named, strict=True):
            assert len(merge.tensors(optimizer, mine)) == 1
        mean = (merges[0].head + merges[1].head) / 2
        given.append(round(mean[0].item()))
        for merge, optimizer, mine in zip(merges, optimizers, named, strict=True):
            assert merge.judge(mean)
            merge.taken(optimizer, mine, mean)
        assert len(given) < 5
    assert given == ([1, 2, 3] if all(stepped) else [1])
