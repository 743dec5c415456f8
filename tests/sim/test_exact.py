"""Whole simulated swarms, with membership and meeting, hold the exact weighted mean (invariant E)
for random numbers of peers, group sizes and weights."""

from __future__ import annotations

import math
import random

import msgspec
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.sim.process import Process
from moshpit.sim.scenario import Scenario, load
from moshpit.sim.trainer import Trainer
from moshpit.sim.world import World


class Weighted(World):
    """A world whose peers average with given weights, by process."""

    def __init__(self, scenario: Scenario, seed: int, weights: list[float]) -> None:
        self.weights = weights
        super().__init__(scenario, seed)

    def _trainer(self, process: Process) -> Trainer:
        trainer = super()._trainer(process)
        trainer._batch = self.weights[process.index]
        return trainer


def scenario(name: str, peers: int, group_size: int, chunks: int) -> Scenario:
    """A shipped scenario without its faults: one averaging, checked for exactness."""
    replace, base = msgspec.structs.replace, load(name)
    return replace(
        base,
        churn=None,
        swarm=replace(base.swarm, peers=peers, group_size=group_size, epochs=1),
        work=replace(base.work, mode="average", step_s=(0.01, 0.2), chunks=chunks),
        checks=replace(base.checks, exact=True, drain_s=4.0),
    )


def some_weights(rng: random.Random, n: int) -> list[float]:
    """Samples of peers, some of which have none; of like or of very different sizes."""
    sigma = rng.choice([0.0, 0.5, 5.0])
    idle = rng.choice([0.0, 0.2, 0.7])
    weights = [0.0 if rng.random() < idle else math.exp(rng.gauss(3.0, sigma)) for _ in range(n)]
    weights[rng.randrange(n)] = 1.0  # somebody has something
    return weights


def assert_exact(name: str, n: int, group_size: int, chunks: int, seed: int) -> None:
    weights = some_weights(random.Random(seed), n)
    world = Weighted(scenario(name, n, group_size, chunks), seed, weights)
    world.run()
    found = [f"{v.name}: {v.first}" for v in world.checkers.verdicts.values() if not v.ok]
    assert not found, "\n".join(found)
    assert world.checkers.verdicts["E"].checked >= 1
    rounds = world.checkers.outcomes
    assert rounds["partial"] == rounds["failed"] == 0
    assert n == 1 or rounds["complete"] >= n


@st.composite
def swarms(draw: st.DrawFn) -> tuple[int, int]:
    """N and M, each number of axes up to three as likely as any other."""
    axes = draw(st.integers(1, 3))
    group_size = draw(st.integers(2, (16, 5, 3)[axes - 1]))
    return draw(st.integers(group_size ** (axes - 1) + 1, group_size**axes)), group_size


@settings(max_examples=settings.default.max_examples // 12)
@given(swarms(), st.integers(1, 20), st.integers(0, 2**32))
def test_exact_for_random_swarms(swarm: tuple[int, int], chunks: int, seed: int) -> None:
    assert_exact("calm", *swarm, chunks, seed)


@pytest.mark.parametrize(("n", "group_size"), [(64, 8), (81, 3)])
def test_exact_for_dozens(n: int, group_size: int) -> None:
    assert_exact("calm", n, group_size, 4, n)


@pytest.mark.soak
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("n", "group_size"), [(1024, 32), (1500, 16), (4096, 16)])
def test_exact_for_thousands(n: int, group_size: int) -> None:
    """Slow: every peer has a view of every other, about 640 bytes each."""
    if psutil.virtual_memory().available < 700 * n * n:
        pytest.skip(f"{n} simulated peers need {700 * n * n >> 30} GB of memory")
    assert_exact("thousand", n, group_size, 1, n)
