"""Any number of real processes, any weights: everybody gets the weighted mean that numpy gets."""

from __future__ import annotations

import random

import numpy as np
import pytest

from .harness import RealSwarm, real_swarm

NUMEL = 3000
AVERAGINGS = 3
ATTEMPTS_MAX = 12

SIZES = [(2, 2, 1), (5, 2, 3)]
MORE_SIZES = [
    (3, 2, 2),
    (9, 3, 2),
    (7, 16, 1),
    (7, 2, 3),
    (12, 4, 2),
    (17, 3, 3),
    (17, 5, 2),
    (33, 6, 2),
    (33, 4, 3),
]


def average_once(swarm: RealSwarm, axes: int, rng: random.Random) -> bool:
    """Average random values by random weights; False if somebody was left out.

    On a crowded machine a process can be silent for so long that the others go on without it.
    """
    seed = rng.randrange(2**31)
    weights = [rng.choice([0.0, 1.0, rng.uniform(0, 1000)]) for _ in swarm.peers]
    weights[rng.randrange(len(weights))] = 7.0
    results = swarm.average(swarm.peers, seed=seed, weights=weights)
    if any(r["outcome"] != "complete" or r["stale"] for r in results):
        return False
    assert {r["epoch"] for r in results} == {results[0]["epoch"]}
    values = [
        np.random.default_rng((seed, peer.number)).standard_normal(NUMEL, np.float32)
        for peer in swarm.peers
    ]
    wanted = np.average(np.array(values, np.float64), axis=0, weights=weights)
    # With the torus schedule, who takes nothing to a column has the row's round only.
    assert max(len({r["axis"] for r in result["rounds"]}) for result in results) == axes
    for result in results:
        assert np.abs(np.array(result["values"]) - wanted).max() < 3e-6
    return True


def check_exact(n: int, group_size: int, axes: int) -> None:
    rng = random.Random(n * 100 + group_size)
    # This preset waits longest for those that are slow, which is what a crowd of processes is.
    with real_swarm(NUMEL, "--group-size", str(group_size), "--preset", "internet") as swarm:
        swarm.start(n)
        swarm.average(swarm.peers, seed=0, weights=[1.0] * n)  # makes the connections
        done = 0
        for _ in range(ATTEMPTS_MAX):
            done += average_once(swarm, axes, rng)
            if done == AVERAGINGS:
                return
    pytest.fail(f"of {ATTEMPTS_MAX} averagings of {n} peers only {done} were complete")


@pytest.mark.parametrize(("n", "group_size", "axes"), SIZES)
def test_the_mean_is_exact(n: int, group_size: int, axes: int) -> None:
    check_exact(n, group_size, axes)


@pytest.mark.soak
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("n", "group_size", "axes"), MORE_SIZES)
def test_the_mean_is_exact_for_more_processes(n: int, group_size: int, axes: int) -> None:
    check_exact(n, group_size, axes)
