"""Parts by bandwidth: the closed form is optimal, and chunks are dealt out completely."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.protocol import partition


def round_time(bandwidths: list[float], reduces: list[bool], parts: list[float]) -> float:
    """Return the round's time in vectors (paper.md §3)."""
    size = len(bandwidths)
    return max(
        (1 + (size - 2) * part) / b
        for b, able, part in zip(bandwidths, reduces, parts, strict=True)
        if able
    )


def best_time(bandwidths: list[float], reduces: list[bool]) -> float:
    """Return the least possible time, by bisection: within ξ, i takes (ξ b_i - 1)/(M - 2)."""
    size = len(bandwidths)
    able = [b for b, r in zip(bandwidths, reduces, strict=True) if r]
    low, high = 1 / min(able), size / min(able)
    for _ in range(200):
        middle = (low + high) / 2
        if sum((middle * b - 1) / (size - 2) for b in able) >= 1:
            high = middle
        else:
            low = middle
    return high


def test_parts_are_optimal_on_random_groups() -> None:
    rng = random.Random(7)
    clients = 0
    for _ in range(300):
        size = rng.randrange(3, 20)
        bandwidths = [10 ** rng.uniform(4, 9) for _ in range(size)]
        reduces = [rng.random() < 0.7 for _ in range(size)]
        reduces[rng.randrange(size)] = True
        parts = partition.fractions(bandwidths, reduces)
        assert parts is not None
        assert math.isclose(sum(parts), 1)
        assert all(part >= 0 for part in parts)
        assert all(part == 0 for part, able in zip(parts, reduces, strict=True) if not able)
        best = best_time(bandwidths, reduces)
        assert math.isclose(round_time(bandwidths, reduces, parts), best, rel_tol=1e-6)
        clients += not all(reduces)
    assert clients > 100


def test_special_groups() -> None:
    assert partition.fractions([5.0], [True]) == [1.0]
    assert partition.fractions([5.0], [False]) == [1.0]
    assert partition.fractions([3.0, 1.0], [True, True]) == [0.75, 0.25]
    assert partition.fractions([3.0, 1.0], [False, True]) == [0.0, 1.0]
    assert partition.fractions([1.0] * 4, [True] * 4) == pytest.approx([0.25] * 4)
    assert partition.fractions([0.0] * 4, [True] * 4) == pytest.approx([0.25] * 4)
    assert partition.fractions([1.0, 2.0, 3.0], [False] * 3) is None


def test_one_fast_peer_becomes_a_parameter_server() -> None:
    parts = partition.fractions([1e9, 1e6, 1e6, 1e6], [True] * 4)
    assert parts is not None
    assert parts[0] > 0.99


def test_unknown_bandwidths_take_the_mean_of_the_known() -> None:
    assert partition.known([4.0, 0.0, 2.0]) == [4.0, 3.0, 2.0]
    nonsense = [4.0, math.nan, math.inf, -1.0, 2.0]
    assert partition.known(nonsense) == [4.0, 3.0, 3.0, 3.0, 2.0]
    assert partition.known([0.0, 0.0]) == [1.0, 1.0]


@given(
    members=st.lists(
        st.tuples(st.floats(allow_nan=True, allow_infinity=True), st.booleans()),
        min_size=1,
        max_size=64,
    ),
    chunks=st.integers(0, 10_000),
)
def test_any_claims_give_valid_parts(members: list[tuple[float, bool]], chunks: int) -> None:
    bandwidths = [b for b, _ in members]
    reduces = [r for _, r in members]
    parts = partition.fractions(bandwidths, reduces)
    if parts is None:
        assert len(members) > 1
        assert not any(reduces)
        return
    assert math.isclose(sum(parts), 1)
    edges = partition.bounds(parts, chunks)
    assert len(edges) == len(members) + 1
    assert edges[0] == 0
    assert edges[-1] == chunks
    for seat, part in enumerate(parts):
        count = edges[seat + 1] - edges[seat]
        assert count >= 0
        assert abs(count - part * chunks) < 1.001
        assert part > 0 or count == 0
    seconds = partition.seconds(bandwidths, parts, 1e9, 1e6)
    assert math.isfinite(seconds)
    assert seconds > 0


def test_bounds_by_largest_remainders() -> None:
    assert partition.bounds([0.5, 0.0, 0.5], 5) == (0, 3, 3, 5)
    assert partition.bounds([0.25] * 4, 2) == (0, 1, 2, 2, 2)
    assert partition.bounds([0.1, 0.6, 0.3], 10) == (0, 1, 7, 10)
    assert partition.bounds([1.0], 0) == (0, 0)


def test_predicted_seconds_are_of_the_slowest_member() -> None:
    # 4 equal peers: each moves 1 + 2/4 vectors; a client moves one.
    assert partition.seconds([1e6] * 4, [0.25] * 4, 1e6, 1.0) == pytest.approx(1.5)
    assert partition.seconds([1e6, 1e6, 1e4], [0.5, 0.5, 0.0], 1e6, 1e3) == pytest.approx(100)
    assert partition.seconds([0.0, 0.0], [0.5, 0.5], 1e6, 1e6) == pytest.approx(1.0)
    assert partition.seconds([1e-300, 1e6], [0.5, 0.5], 1e6, 1e6) == pytest.approx(100)
