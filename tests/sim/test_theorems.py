"""The theorems of the paper as tests: paper.md §1 says which, and in which form they hold."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.protocol import grid
from moshpit.sim.averaging import Failure, Floats, GridRounds, Method, RandomGroups, measure
from moshpit.sim.rivals import PaperGrid

SIGMAS = 4.0  # a test on fixed seeds; 1 in 16000 for each comparison


# --- Theorem 3.2: random groups ---------------------------------------------------------------


def factor(n: int, r: int) -> Fraction:
    """What a random split into r groups leaves of the variance, in expectation; exact."""
    return Fraction(r - 1, n - 1)


def bound(n: int, r: int) -> Fraction:
    """What the paper says it leaves."""
    return Fraction(r - 1, n) + Fraction(r, n**2)


@pytest.mark.parametrize("sizes", [(3, 3), (4, 2), (5, 1), (2, 2, 2), (3, 2, 1), (2, 1, 1, 1)])
def test_the_factor_is_exact_for_any_sizes_of_groups(sizes: tuple[int, ...]) -> None:
    """All splits of a few numbers, in fractions: no luck, no rounding."""
    values = [Fraction(v) for v in (3, -1, 4, -1, 5, -9)][: sum(sizes)]
    n = len(values)
    average = sum(values) / n
    edges = [sum(sizes[:k]) for k in range(len(sizes) + 1)]
    left = Fraction(0)
    splits = list(permutations(values))
    for split in splits:
        for start, size in zip(edges, sizes, strict=False):
            left += size * (sum(split[start : start + size]) / size - average) ** 2
    start_spread = sum((v - average) ** 2 for v in values)
    assert left / len(splits) == factor(n, len(sizes)) * start_spread


@pytest.mark.parametrize(("n", "r"), [(16, 4), (17, 4), (100, 3), (9, 8)])
def test_the_factor_by_monte_carlo(n: int, r: int) -> None:
    """Round after round: ((r - 1)/(N - 1))^t, within the interval of 1200 runs."""
    rounds = 2
    each = measure(
        lambda rng: RandomGroups(1, rng, groups=r), n=n, death=0.0, rounds=rounds, runs=1200, seed=n
    ).each
    ratios: Floats = each[:, 1:] / each[:, :1]  # the factor holds for any values
    error = ratios.std(0, ddof=1) / math.sqrt(len(ratios))
    wanted = np.array([float(factor(n, r)) ** t for t in range(1, rounds + 1)])
    assert (np.abs(ratios.mean(0) - wanted) <= SIGMAS * error).all(), (ratios.mean(0), wanted)
    assert (error < 0.1 * wanted).all(), "too few runs to see anything"


def test_the_papers_form_is_a_bound() -> None:
    for n in range(2, 80):
        for r in range(1, n + 1):
            assert factor(n, r) <= bound(n, r)
            assert (factor(n, r) == bound(n, r)) is (r == n)


# --- the grid ---------------------------------------------------------------------------------


def everybody(n: int) -> np.ndarray:
    return np.ones(n, bool)


@pytest.mark.parametrize(("m", "d"), [(2, 1), (2, 7), (3, 5), (8, 3), (10, 2), (32, 2), (5, 4)])
def test_a_full_grid_is_exact_after_d_rounds_and_not_before(m: int, d: int) -> None:
    n = m**d
    rng = np.random.default_rng(n)
    methods: list[Method] = [PaperGrid(n, m, d, rng), GridRounds(n, m, rng)]
    for method in methods:
        values = rng.standard_normal(n)
        wanted = values.mean()
        for _ in range(d - 1):
            values = method.round(values, everybody(n))
        assert d == 1 or values.var() > 1e-9
        values = method.round(values, everybody(n))
        assert np.abs(values - wanted).max() < 1e-13


@pytest.mark.parametrize("n", [300, 512, 768, 900])
def test_empty_cells_cost_what_the_formulas_say(n: int) -> None:
    """d = 2, fill f = N/M²: v1/v0 = (M-1)/(N-1) or a little less, since no row may be empty;
    v2/v1 ≈ (1-f)/(fM); later ratios are larger, up to 4(1-f)/(fM)."""
    m, f = 32, n / 32**2
    found = measure(
        lambda rng: PaperGrid(n, m, 2, rng), n=n, death=0.0, rounds=6, runs=300, seed=n
    ).mean
    ratios = found[1:] / found[:-1]
    assert ratios[0] == pytest.approx((m - 1) / (n - 1), rel=0.05)
    step = (1 - f) / (f * m)
    assert ratios[1] == pytest.approx(step, rel=0.25)
    assert (ratios[2:] > step).all()
    assert (ratios[2:] < 4 * step).all()


def assert_d_rounds_are_enough(n: int, group_size: int, rng: np.random.Generator) -> None:
    method = GridRounds(n, group_size, rng)
    assert method.axes == math.ceil(math.log(n) / math.log(group_size) - 1e-9)
    values = rng.standard_normal(n)
    wanted = values.mean()
    for _ in range(method.axes):
        values = method.round(values, everybody(n))
    assert np.abs(values - wanted).max() < 1e-12
    assert values.var() < 1e-9


@pytest.mark.parametrize(
    ("group_size", "n_max"), [(2, 40), (3, 60), (5, 120), (16, 200), (32, 200)]
)
def test_our_schedule_needs_d_rounds_for_every_number_of_peers(group_size: int, n_max: int) -> None:
    rng = np.random.default_rng(group_size)
    for n in range(2, n_max + 1):
        assert_d_rounds_are_enough(n, group_size, rng)


@pytest.mark.soak
@pytest.mark.parametrize(("group_size", "n_max"), [(2, 300), (3, 600), (32, 1100), (64, 4200)])
def test_and_for_very_many(group_size: int, n_max: int) -> None:
    rng = np.random.default_rng(group_size)
    for n in range(2, n_max + 1):
        assert_d_rounds_are_enough(n, group_size, rng)


@settings(max_examples=settings.default.max_examples // 4)
@given(st.integers(300, 4000), st.integers(10, 64), st.integers(0, 2**32))
def test_and_for_any_larger_one(n: int, group_size: int, seed: int) -> None:
    assert_d_rounds_are_enough(n, group_size, np.random.default_rng(seed))


# --- Theorem 3.1: with peers that drop out ------------------------------------------------------


def random_groups(n: int, rng: np.random.Generator) -> Method:
    return RandomGroups(8, rng)


def paper_grid(n: int, rng: np.random.Generator) -> Method:
    return PaperGrid(n, 8, 2, rng)


def ours(n: int, rng: np.random.Generator) -> Method:
    return GridRounds(n, 8, rng)


def ours_skipping(n: int, rng: np.random.Generator) -> Method:
    return GridRounds(n, 8, rng, failure=Failure.GROUP)


@pytest.mark.parametrize(
    ("make", "rounds"),
    [(random_groups, 200), (paper_grid, 400), (ours, 200), (ours_skipping, 1000)],
)
def test_all_agree_in_the_end_if_each_has_a_chance_in_every_round(make, rounds: int) -> None:
    """Whatever the chances: one peer is there in one round of five, others nearly always."""
    n = 37
    for seed in range(3):
        rng = np.random.default_rng(seed)
        chances = rng.uniform(0.7, 1.0, n)
        chances[0] = 0.2
        method, values = make(n, rng), rng.standard_normal(n)
        low, high = values.min(), values.max()
        for _ in range(rounds):
            values = method.round(values, rng.random(n) < chances)
            assert low - 1e-12 <= values.min()
            assert values.max() <= high + 1e-12
            low, high = values.min(), values.max()
        assert high - low < 1e-9, f"seed {seed}: still {high - low}"


@pytest.mark.parametrize("make", [random_groups, paper_grid])
@pytest.mark.parametrize("death", [0.01, 0.3])
def test_what_they_agree_on_is_the_mean(make, death: float) -> None:
    """A group mean of equal weights leaves the sum over all peers as it was."""
    rng = np.random.default_rng(2)
    values = rng.standard_normal(50)
    wanted, method = values.mean(), make(50, rng)
    for _ in range(300):
        values = method.round(values, rng.random(50) >= death)
        assert values.mean() == pytest.approx(wanted, abs=1e-12)
    assert np.abs(values - wanted).max() < 1e-9


@pytest.mark.parametrize(("n", "group_size"), [(100, 16), (512, 32), (768, 32)])
@pytest.mark.parametrize("death", [0.005, 0.05])
def test_our_mean_moves_little_and_to_no_side(n: int, group_size: int, death: float) -> None:
    """Weights that make every N exact let the mean move when peers are missing: by less than
    the error of the mean that a random p of the peers did not take part in at all."""
    moved: list[float] = []
    for run in range(60):
        rng = np.random.default_rng((n, run))
        method, values = GridRounds(n, group_size, rng), rng.standard_normal(n)
        start = values.mean()
        for _ in range(8):
            values = method.round(values, rng.random(n) >= death)
        moved.append(float(values.mean() - start))
    spread = float(np.std(moved, ddof=1))
    assert abs(float(np.mean(moved))) <= SIGMAS * spread / math.sqrt(len(moved))
    assert spread < 3 * math.sqrt(death / n), spread / math.sqrt(death / n)


# --- ours against random groups, for N that are nobody's favourites -----------------------------


@pytest.mark.parametrize(
    ("n", "group_size", "death"),
    [(137, 16, 0.02), (333, 32, 0.001), (601, 32, 0.01), (997, 32, 0.1), (640, 9, 0.005)],
)
def test_with_failures_ours_falls_no_slower_than_random_groups(
    n: int, group_size: int, death: float
) -> None:
    """After every whole epoch, of as many groups as the grid has rows (geometric means)."""
    rows = len(grid.plan(n, group_size).rows)
    axes = grid.plan(n, group_size).axes
    kinds = {
        "ours": lambda rng: GridRounds(n, group_size, rng),
        "random": lambda rng: RandomGroups(group_size, rng, groups=rows),
    }
    logs = {
        kind: np.log(
            np.maximum(
                measure(make, n=n, death=death, rounds=2 * axes, runs=60, seed=n).each, 1e-30
            )
        )
        for kind, make in kinds.items()
    }
    for number in (axes, 2 * axes):
        one, other = logs["ours"][:, number], logs["random"][:, number]
        error = math.hypot(one.std(ddof=1), other.std(ddof=1)) / math.sqrt(60)
        assert one.mean() - other.mean() <= 2 * error, f"round {number}"
