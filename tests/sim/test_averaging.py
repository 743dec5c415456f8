"""The schedule itself, in whole-array steps: exact for every N, and no worse than random groups
when peers miss rounds (issue: "the spread after each further round falls at least as fast")."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.errors import ConfigError
from moshpit.protocol import grid
from moshpit.sim.averaging import GridRounds, RandomGroups, Spreads, group_means, measure

N_MAX = 4096
ROUNDS = 6
RUNS = 50


# --- without failures -----------------------------------------------------------------------


@st.composite
def swarms(draw: st.DrawFn) -> tuple[int, int]:
    """N and M, each number of axes as likely as any other."""
    axes = draw(st.integers(1, 4))
    group_size = draw(st.integers(2, 64 if axes <= 2 else 16 if axes == 3 else 8))
    low, high = group_size ** (axes - 1) + 1, min(group_size**axes, N_MAX)
    return draw(st.integers(low, high)), group_size


WEIGHTS = {
    "equal": lambda rng, n: np.ones(n),
    "samples": lambda rng, n: rng.integers(1, 1000, n).astype(float),
    "some-nothing": lambda rng, n: rng.integers(0, 3, n).astype(float),
    "one-has-all": lambda rng, n: np.eye(n)[rng.integers(n)],
    "any-size": lambda rng, n: np.exp(rng.normal(0.0, 8.0, n)),
    "nobody": lambda rng, n: np.zeros(n),
}


def assert_exact_after_all_axes(n: int, group_size: int, kind: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    weights, values = WEIGHTS[kind](rng, n), rng.standard_normal(n) * 10.0 ** rng.integers(-9, 9)
    method = GridRounds(n, group_size, rng, weights)
    assert group_size ** (method.axes - 1) < n <= group_size**method.axes
    wanted = values
    if weights.any():
        wanted = np.full(n, math.fsum(weights * values) / math.fsum(weights))
    scale = np.abs(values).max()
    for _ in range(2):  # two epochs: the second averages what is equal already
        averaged = values
        for _ in range(method.axes):
            averaged = method.round(averaged, np.ones(n, bool))
        assert np.abs(averaged - wanted).max() <= 1e-12 * scale
        assert method.masses == pytest.approx(np.full(n, weights.sum()), rel=1e-9)


@given(swarms(), st.sampled_from(sorted(WEIGHTS)), st.integers(0, 2**32))
def test_exact_for_any_number_of_peers_any_group_size_and_any_weights(
    swarm: tuple[int, int], kind: str, seed: int
) -> None:
    assert_exact_after_all_axes(*swarm, kind, seed)


@pytest.mark.parametrize(
    ("n", "group_size", "axes"),
    [(4096, 64, 2), (4096, 16, 3), (4096, 8, 4), (4095, 64, 2), (4097, 64, 3), (3000, 55, 2)],
)
@pytest.mark.parametrize("kind", WEIGHTS)
def test_exact_for_thousands(n: int, group_size: int, axes: int, kind: str) -> None:
    assert grid.plan(n, group_size).axes == axes
    assert_exact_after_all_axes(n, group_size, kind, n)


def test_without_shares_the_mean_would_be_wrong() -> None:
    """The test above can fail: members of one row in one column must count once."""
    rng = np.random.default_rng(1)
    values, everybody = rng.standard_normal(5), np.ones(5, bool)
    groups, nothing = np.array([0, 0, 0, 1, 1]), np.full(5, -1)
    rows, masses = group_means(values, np.ones(5), groups, everybody, nothing)
    columns = np.array([0, 1, 0, 0, 1])
    for origins, exact in ((groups, True), (nothing, False)):
        means, _ = group_means(rows, masses, columns, everybody, origins)
        assert np.allclose(means, values.mean(), atol=1e-12) is exact


def test_random_groups_mix_as_the_theorem_says() -> None:
    """E[v1] = v0 (r-1)/(N-1) for r groups of any sizes (paper.md §1, the exact form)."""
    found = measure(
        lambda rng: RandomGroups(1, rng, groups=4), n=16, death=0.0, rounds=1, runs=4000, seed=5
    )
    theory = (1 - 1 / 16) * np.array([1.0, 3 / 15])  # variance, not its unbiased estimate
    assert (np.abs(found.mean - theory) <= 4 * found.error).all()


# --- with failures --------------------------------------------------------------------------


@cache
def ours(n: int, group_size: int, death: float) -> Spreads:
    return measure(
        lambda rng: GridRounds(n, group_size, rng),
        n=n, death=death, rounds=ROUNDS, runs=RUNS, seed=1,
    )  # fmt: skip


def random_groups(n: int, group_size: int, death: float, groups: int | None) -> Spreads:
    return measure(
        lambda rng: RandomGroups(group_size, rng, groups=groups),
        n=n, death=death, rounds=ROUNDS, runs=RUNS, seed=1,
    )  # fmt: skip


def excess(one: Spreads, other: Spreads, first: int) -> str:
    """Say after which rounds one spread is above another, by more than two standard errors."""
    above = one.mean - other.mean > 2 * np.hypot(one.error, other.error)
    return ", ".join(
        f"round {r}: {one.mean[r]:.3g} ± {one.error[r]:.1g} against {other.mean[r]:.3g} ± "
        f"{other.error[r]:.1g}"
        for r in np.flatnonzero(above)
        if r >= first
    )


SIZES = [100, 512, 768, 900, 1000]


@pytest.mark.parametrize("death", [0.005, 0.05])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("group_size", [10, 32])
def test_failures_cost_no_more_than_with_random_groups_of_the_same_size(
    n: int, group_size: int, death: float
) -> None:
    """After every round, against as many random groups as the grid has rows.

    The first is left out: there, both are a random split.
    """
    rows = GridRounds(n, group_size, np.random.default_rng(0)).rows
    found = excess(ours(n, group_size, death), random_groups(n, group_size, death, rows), 2)
    assert not found, found


@pytest.mark.parametrize("death", [0.005, 0.05])
@pytest.mark.parametrize(
    ("n", "group_size"), [(n, m) for m in (10, 32) for n in SIZES if n >= 10 * m]
)
def test_failures_cost_no_more_than_with_random_groups_of_m(
    n: int, group_size: int, death: float
) -> None:
    """After every round from the d-th on, against the paper's groups of M.

    A grid that is far from full has smaller groups than M, which cost less and mix less in one
    round: (100, 32) is 10 rows of 10 and is compared above.
    """
    axes = grid.plan(n, group_size).axes
    found = excess(ours(n, group_size, death), random_groups(n, group_size, death, None), axes)
    assert not found, found


def test_one_missed_round_costs_little() -> None:
    """Who was away for the row's round goes on with its own value, and counts once."""
    rng = np.random.default_rng(3)
    values = rng.standard_normal(900)
    method = GridRounds(900, 30, rng)
    away = np.ones(900, bool)
    away[7] = False
    after = method.round(method.round(values, away), np.ones(900, bool))
    assert after.var() < 1e-4 * values.var()
    assert abs(after[7] - values.mean()) < 0.1


@pytest.mark.parametrize(
    "wrong", [{"n": 0}, {"death": 1.0}, {"death": -0.1}, {"rounds": 0}, {"runs": 1}]
)
def test_no_experiment_is_refused(wrong: dict[str, float]) -> None:
    sound = {"n": 4, "death": 0.0, "rounds": 1, "runs": 2, "seed": 0}
    with pytest.raises(ConfigError):
        measure(lambda rng: RandomGroups(2, rng), **(sound | wrong))
