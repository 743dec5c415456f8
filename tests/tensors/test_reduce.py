"""Weighted means: exact where they can be, close elsewhere, never overflowing."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.tensors.reduce import WeightedSum, is_finite


def mean_of(contributions: list[tuple[torch.Tensor, float]]) -> torch.Tensor:
    into = torch.full_like(contributions[0][0], float("nan"))
    (first, its_mass), *others = contributions
    total = WeightedSum(first.clone(), its_mass)
    for values, mass in others:
        total.add(values, mass)
    total.mean_into(into)
    assert total.mass == pytest.approx(sum(mass for _, mass in contributions))
    return into


def test_one_contribution_stays_as_it_is() -> None:
    values = torch.randn(1000)
    assert torch.equal(mean_of([(values, 0.3)]), values)


def test_two_of_equal_mass_give_the_correctly_rounded_mean() -> None:
    a, b = torch.randn(1000), torch.randn(1000)
    exact = ((a.double() + b.double()) / 2).float()
    assert torch.equal(mean_of([(a, 7.0), (b, 7.0)]), exact)


def test_equal_masses_are_a_sum_and_a_division() -> None:
    values = [torch.randn(1000) for _ in range(5)]
    total = values[0].clone()
    for other in values[1:]:
        total += other
    assert torch.equal(mean_of([(v, 0.3) for v in values]), total / 5)


@settings(max_examples=settings.default.max_examples // 3)
@given(
    st.lists(st.floats(1e-20, 1e25), min_size=1, max_size=64),
    st.integers(0, 2**31),
    st.floats(1e-20, 1e20),
)
def test_any_masses_and_sizes(masses: list[float], seed: int, size: float) -> None:
    made = torch.Generator().manual_seed(seed)
    values = [torch.randn(64, generator=made) * size for _ in masses]
    got = mean_of(list(zip(values, masses, strict=True))).double()
    weights = torch.tensor(masses, dtype=torch.float64) / sum(masses)
    stacked = torch.stack(values).double()
    exact = (stacked * weights[:, None]).sum(0)
    scale = (stacked.abs() * weights[:, None]).sum(0) + 1e-30
    assert ((got - exact).abs() <= 1e-6 * len(masses) ** 0.5 * scale + 1e-38).all()


def test_values_near_the_limit_with_millions_of_samples() -> None:
    values = torch.tensor([1e38, -1e38, 3e38, -3e38])
    assert torch.allclose(mean_of([(values, 1e6)] * 64), values, rtol=1e-6)
    assert torch.isfinite(mean_of([(values, 1e6), (-values, 1e12), (values, 1.0)])).all()
    largest = torch.full((8,), torch.finfo(torch.float32).max)
    for masses in ([3.0, 7.0, 11.0], [1e-3] * 7, [0.1, 1e9, 3.3]):
        assert torch.isfinite(mean_of([(largest, mass) for mass in masses])).all()


def test_growing_masses_do_not_lose_what_was_there() -> None:
    values = [torch.full((4,), float(i)) for i in range(20)]
    masses = [2.0**i for i in range(20)]
    exact = sum(v * m for v, m in zip(range(20), masses, strict=True)) / sum(masses)
    got = mean_of(list(zip(values, masses, strict=True)))
    assert torch.allclose(got, torch.full((4,), exact), rtol=1e-6)


@pytest.mark.parametrize("mass", [0.0, -1.0, float("nan"), float("inf")])
def test_a_mass_that_makes_no_sense_is_our_own_bug(mass: float) -> None:
    with pytest.raises(AssertionError):
        WeightedSum(torch.ones(1), mass)
    with pytest.raises(AssertionError):
        WeightedSum(torch.ones(1), 1.0).add(torch.ones(1), mass)


def test_finite_is_decided_exactly() -> None:
    assert is_finite(torch.full((100,), 3e38))  # the fast sum overflows
    assert is_finite(torch.zeros(0))
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(100)
        values[99] = bad
        assert not is_finite(values)
    assert not is_finite(torch.tensor([float("inf"), -float("inf")]))
