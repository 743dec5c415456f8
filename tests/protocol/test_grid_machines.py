"""The protocol's own plan, announcements and rounds give the exact weighted mean to everybody."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.sim.averaging import GridRounds

from .harness_grid import Averaging


def some_weights(rng: random.Random, n: int) -> list[float]:
    """Samples of peers, some of which have none; of like or of very different sizes."""
    sigma = rng.choice([0.0, 0.5, 5.0])
    idle = rng.choice([0.0, 0.2, 0.9])
    return [0.0 if rng.random() < idle else math.exp(rng.gauss(3.0, sigma)) for _ in range(n)]


def average(n: int, group_size: int, chunks: int, seed: int, clients: int = 0) -> Averaging:
    """Average random values and check the result."""
    rng = random.Random(seed)
    weights = some_weights(rng, n)
    values = [[rng.gauss(0.0, 1.0) for _ in range(chunks)] for _ in range(n)]
    done = Averaging(
        group_size, weights, values, rng, epoch=rng.randrange(100), clients=clients
    ).run()
    assert {peer.rounds for peer in done.peers} == {done.plan.axes}
    total = math.fsum(weights)
    got = np.array([peer.values for peer in done.peers])
    if total:
        parts = [[w * v for v in row] for w, row in zip(weights, values, strict=True)]
        wanted = [math.fsum(column) / total for column in zip(*parts, strict=True)]
        assert np.abs(got - wanted).max() <= 1e-11
        assert np.abs(got - got[0]).max() <= 1e-11
    else:
        assert got.tolist() == values
    for peer in done.peers:
        assert peer.masses == pytest.approx([total] * chunks, rel=1e-9)
    return done


@st.composite
def swarms(draw: st.DrawFn) -> tuple[int, int]:
    """N and M, each number of axes up to four as likely as any other."""
    axes = draw(st.integers(1, 4))
    group_size = draw(st.integers(2, (40, 12, 5, 3)[axes - 1]))
    return draw(st.integers(group_size ** (axes - 1) + 1, group_size**axes)), group_size


@settings(max_examples=settings.default.max_examples // 3)
@given(swarms(), st.integers(1, 9), st.integers(0, 2**32))
def test_exact_for_any_peers_group_size_chunks_and_weights(
    swarm: tuple[int, int], chunks: int, seed: int
) -> None:
    n, group_size = swarm
    done = average(n, group_size, chunks, seed)
    axes = done.plan.axes
    assert group_size ** (axes - 1) < n <= group_size**axes


@settings(max_examples=settings.default.max_examples // 10)
@given(st.integers(2, 60), st.integers(2, 16), st.data())
def test_exact_with_clients_that_reduce_nothing(
    n: int, group_size: int, data: st.DataObject
) -> None:
    clients = data.draw(st.integers(0, n // 2))
    average(n, group_size, 3, data.draw(st.integers(0, 2**32)), clients)


@pytest.mark.parametrize(
    ("n", "group_size", "axes"), [(777, 32, 2), (1024, 32, 2), (1000, 10, 3), (4096, 16, 3)]
)
def test_exact_for_thousands(n: int, group_size: int, axes: int) -> None:
    assert average(n, group_size, 2, n).plan.axes == axes


@pytest.mark.soak
@pytest.mark.parametrize(("n", "group_size"), [(4096, 64), (4095, 63), (4097, 64), (4096, 8)])
def test_exact_for_more_and_larger_groups(n: int, group_size: int) -> None:
    average(n, group_size, 4, n)


@pytest.mark.parametrize("missing", [0.0, 0.05, 0.5])
@pytest.mark.parametrize(("n", "group_size"), [(7, 3), (50, 8), (53, 4), (200, 6)])
def test_whole_array_steps_are_what_the_machines_do(
    n: int, group_size: int, missing: float
) -> None:
    """`sim.averaging` keeps values and masses as the protocol does, after every single round."""
    rng, dice = random.Random(n), np.random.default_rng(n)
    weights = some_weights(rng, n)
    arrays = GridRounds(n, group_size, dice, np.array(weights))
    now = dice.standard_normal(n)
    machines = Averaging(group_size, weights, now[:, None].tolist(), rng, ids=arrays.peers)
    for axis in range(arrays.axes):
        alive = dice.random(n) >= missing
        now = arrays.round(now, alive)
        machines.run_axis(axis, np.flatnonzero(~alive).tolist())
        assert np.abs(now - [peer.values[0] for peer in machines.peers]).max() < 1e-12
        assert arrays.masses == pytest.approx([peer.masses[0] for peer in machines.peers])
