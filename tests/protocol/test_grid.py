"""The grid gives everybody the exact weighted global mean, for every n and every weights."""

from __future__ import annotations

import random
from collections import defaultdict
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.errors import ConfigError
from moshpit.protocol import grid
from moshpit.types import PeerId

EXCESS = {1: 0, 2: 1, 3: 2}
"""By how much the largest group may exceed M, by number of axes; 3 with more axes."""


def means_after_all_axes(
    plan: grid.Plan, weights: list[int], values: list[int], extra: dict[int, int] | None = None
) -> tuple[list[Fraction | None], list[Fraction]]:
    """Run the averaging by the protocol's rule, in exact numbers.

    Peers are the planned ranks, then unplanned ones: ``extra`` says beside which rank each
    of those joins on axis 0. From then on everybody goes where its group's host sends it.
    """
    extra = extra or {}
    peers = plan.n + len(extra)
    value: list[Fraction | None] = [
        Fraction(v) if w else None for v, w in zip(values, weights, strict=True)
    ]
    mass = [Fraction(w) for w in weights]
    origin: list[object] = [None] * peers
    path = [plan.path(extra.get(peer, peer), 0) for peer in range(peers)]
    for axis in range(plan.axes):
        groups: defaultdict[grid.Path, list[int]] = defaultdict(list)
        for peer in range(peers):
            groups[path[peer]].append(peer)
        for key, members in groups.items():
            planned = plan.members(axis, key)
            assert [peer for peer in members if peer < plan.n] == sorted(planned)
            seated = [*planned, *(peer for peer in members if peer >= plan.n)]
            total, weighted = Fraction(0), Fraction(0)
            for peer in members:
                share = sum(origin[p] == origin[peer] for p in members) if axis else 1
                total += mass[peer] / share
                if value[peer] is not None:
                    weighted += mass[peer] / share * value[peer]
            for slot, peer in enumerate(seated):
                path[peer] = plan.next_path(axis, key, slot)
                mass[peer] = total
                value[peer] = weighted / total if total else None
        origin = [(axis, peer_path) for peer_path in _groups_of(groups, peers)]
    assert all(p == () for p in path)
    return value, mass


def _groups_of(groups: dict[grid.Path, list[int]], peers: int) -> list[grid.Path]:
    """Return each peer's group."""
    result: list[grid.Path] = [()] * peers
    for key, members in groups.items():
        for peer in members:
            result[peer] = key
    return result


def assert_exact(
    plan: grid.Plan, weights: list[int], values: list[int], extra: dict[int, int] | None = None
) -> None:
    value, mass = means_after_all_axes(plan, weights, values, extra)
    total = sum(weights)
    expected = (
        Fraction(sum(w * v for w, v in zip(weights, values, strict=True)), total) if total else None
    )
    assert value == [expected] * len(value)
    assert mass == [total] * len(mass)


@pytest.mark.parametrize("group_size", [2, 3, 4, 7, 16])
def test_exact_for_every_number_of_peers(group_size: int) -> None:
    for n in [*range(1, 70), *range(70, 301, 23)]:
        rng = random.Random(n)
        weights = [rng.randrange(5) for _ in range(n)]
        values = [rng.randrange(-99, 99) for _ in range(n)]
        assert_exact(grid.plan(n, group_size), weights, values)


@settings(max_examples=settings.default.max_examples // 3)
@given(
    n=st.integers(1, 300),
    group_size=st.integers(2, 20),
    newcomers=st.integers(0, 6),
    seed=st.integers(0, 2**32),
)
def test_exact_with_unplanned_newcomers(n: int, group_size: int, newcomers: int, seed: int) -> None:
    rng = random.Random(seed)
    weights = [rng.randrange(1000) for _ in range(n + newcomers)]
    values = [rng.randrange(-999, 999) for _ in range(n + newcomers)]
    extra = {n + i: rng.randrange(n) for i in range(newcomers)}
    assert_exact(grid.plan(n, group_size), weights, values, extra)


@pytest.mark.parametrize("group_size", [2, 3, 4, 5, 8, 16, 32])
def test_axes_are_fewest_and_groups_near_the_size_asked_for(group_size: int) -> None:
    edges = [group_size**d + e for d in (1, 2, 3) for e in (-1, 0, 1)]
    for n in [*range(1, 100), *(edge for edge in edges if edge <= 5000)]:
        plan = grid.plan(n, group_size)
        assert group_size**plan.axes >= n
        assert plan.axes == 1 or group_size ** (plan.axes - 1) < n
        assert plan.largest <= group_size + EXCESS.get(plan.axes, 3), n


def test_one_axis_is_one_group_and_full_grids_are_cubes() -> None:
    assert grid.plan(1, 16).axes == 1
    assert grid.plan(1, 16).members(0, (0,)) == (0,)
    assert grid.plan(16, 16).members(0, (0,)) == tuple(range(16))
    square = grid.plan(16, 4)
    assert square.members(0, (2,)) == (8, 9, 10, 11)
    assert square.members(1, (2, 0)) == (2, 6, 10, 14)
    assert grid.plan(27, 3).largest == 3


def test_every_rank_is_once_on_every_axis_where_the_plan_says() -> None:
    plan = grid.plan(53, 4)
    for axis in range(plan.axes):
        seen: list[int] = []
        for path in sorted({plan.path(rank, axis) for rank in range(plan.n)}):
            assert len(path) == axis + 1
            members = plan.members(axis, path)
            seen += members
            assert [plan.slot(rank, axis) for rank in members] == list(range(len(members)))
            if axis + 1 < plan.axes:
                following = [plan.next_path(axis, path, s) for s in range(len(members))]
                assert following == [plan.path(rank, axis + 1) for rank in members]
        assert sorted(seen) == list(range(53))


@given(
    axis=st.integers(-2, 9),
    path=st.lists(st.integers(-(2**63), 2**63), max_size=5).map(tuple),
    slot=st.integers(0, 10**9),
)
def test_paths_that_are_not_planned_still_lead_somewhere(
    axis: int, path: grid.Path, slot: int
) -> None:
    plan = grid.plan(100, 4)
    following = plan.next_path(axis, path, slot)
    if 0 <= axis < plan.axes - 1:
        assert plan.members(axis + 1, following)
    else:
        assert following == ()


def test_order_moves_with_the_epoch_and_is_stable() -> None:
    rng = random.Random(1)
    peers = sorted(PeerId(rng.randbytes(32)) for _ in range(200))
    orders = [grid.order(peers, epoch) for epoch in range(33)]
    assert all(sorted(ranked) == peers for ranked in orders)
    assert all(orders[0] != ranked for ranked in orders[1:32])
    assert orders[32] == orders[0]
    assert grid.order(list(reversed(peers)), 7) == orders[7]
    without = grid.order([p for p in peers if p != peers[50]], 7)
    assert without == [p for p in orders[7] if p != peers[50]]
    assert grid.order([], 3) == []


@pytest.mark.parametrize(("n", "group_size"), [(0, 4), (-1, 4), (5, 1)])
def test_nonsense_is_refused(n: int, group_size: int) -> None:
    with pytest.raises(ConfigError):
        grid.plan(n, group_size)


@pytest.mark.parametrize("group_size", [4, 5, 16])
@pytest.mark.parametrize("n", [3, 15, 17, 40, 64, 100])
def test_every_group_has_a_peer_that_reduces_wherever_that_can_be(n: int, group_size: int) -> None:
    peers = [PeerId(bytes([(i * 37) % 251]) * 32) for i in range(n)]
    for count in sorted({1, 2, n // 4 + 1, n // 2, n}):
        dialable = dict.fromkeys(peers[:count])
        for epoch in (0, 3):
            plan, ranked = grid.arrange(peers, epoch, group_size, lambda p, d=dialable: p in d)
            assert sorted(ranked) == sorted(peers)
            lacking = [
                (axis, path)
                for axis in range(plan.axes)
                for path in {plan.path(rank, axis): None for rank in range(n)}
                if not any(ranked[rank] in dialable for rank in plan.members(axis, path))
            ]
            assert not lacking or len(plan.keystones) > count
            assert not lacking or plan.group_size == grid.GROUP_SIZE_MAX
            if n <= grid.GROUP_SIZE_MAX:
                assert not lacking


def test_without_clients_the_arrangement_is_the_plain_one() -> None:
    peers = [PeerId(bytes([i]) * 32) for i in range(40)]
    plan, ranked = grid.arrange(peers, 2, 4, lambda p: True)
    assert plan is grid.plan(40, 4)
    assert ranked == grid.order(peers, 2)
