"""What Moshpit is compared with, against references that are written another way: slowly, peer by
peer, from the definitions in the docstrings; and against the published numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.errors import ConfigError
from moshpit.protocol import grid
from moshpit.sim.averaging import Failure, GridRounds, Method, RandomGroups, measure
from moshpit.sim.rivals import AllReduce, Gossip, PaperGrid, PushSum, ReleasedSGP

Round = Callable[[list[float], list[bool], int], list[float]]
"""A reference: the values, who lives, and the number of the round from 0; the new values."""


def mean(numbers: list[float]) -> float:
    return math.fsum(numbers) / len(numbers)


def by_groups(
    values: list[float], alive: list[bool], groups: list[list[int]], failure: Failure
) -> list[float]:
    """Every group by itself: its living average, or nobody does if one is missing."""
    after = list(values)
    for group in groups:
        there = [peer for peer in group if alive[peer]]
        if not there or (failure is Failure.GROUP and len(there) < len(group)):
            continue
        for peer in there:
            after[peer] = mean([values[other] for other in there])
    return after


def slow_all_reduce(values: list[float], alive: list[bool], _: int) -> list[float]:
    return [mean(values)] * len(values) if all(alive) else values


def slow_gossip(failure: Failure) -> Round:
    def one(values: list[float], alive: list[bool], _: int) -> list[float]:
        n, after = len(values), list(values)
        for peer in range(n):
            near = [peer, (peer + 1) % n, (peer - 1) % n]
            there = [other for other in near if alive[other]]
            if alive[peer] and (failure is Failure.ALIVE or len(there) == 3):
                after[peer] = mean([values[other] for other in there])
        return after

    return one


def slow_sgp(failure: Failure) -> Round:
    """The matrix of the released program, entry by entry: a hop moves along the flat matrix."""

    def one(values: list[float], alive: list[bool], number: int) -> list[float]:
        n = len(values)
        h = (number + 1) % math.floor(math.log2(n - 1))
        matrix = [[0] * n for _ in range(n)]
        for hop in (0, 2**h, 2 ** (h + 1)):
            for peer in range(n):
                row, column = divmod((peer * n + peer + hop) % (n * n), n)
                matrix[row][column] += 1
        after = list(values)
        for peer, row in enumerate(matrix):
            total = sum(weight for other, weight in enumerate(row) if alive[other])
            if alive[peer] and (failure is Failure.ALIVE or total == sum(row)):
                parts = [w * values[o] / total for o, w in enumerate(row) if alive[o]]
                after[peer] = math.fsum(parts)
        return after

    return one


class SlowPushSum:
    """Letters in boxes."""

    def __init__(self, n: int) -> None:
        self.weights = [1.0] * n

    def __call__(self, values: list[float], alive: list[bool], number: int) -> list[float]:
        n = len(values)
        hops = math.floor(math.log2(n - 1)) + 1 if n > 2 else 1
        box: list[list[tuple[float, float]]] = [[] for _ in range(n)]
        for peer in range(n):
            x, w = values[peer] * self.weights[peer], self.weights[peer]
            to = (peer + 2 ** (number % hops)) % n
            if alive[peer] and alive[to]:
                box[peer].append((x / 2, w / 2))
                box[to].append((x / 2, w / 2))
            else:
                box[peer].append((x, w))
        self.weights = [math.fsum(w for _, w in letters) for letters in box]
        sums = [math.fsum(x for x, _ in letters) for letters in box]
        return [x / w for x, w in zip(sums, self.weights, strict=True)]


def slow_random_groups(group_size: int, rng: np.random.Generator, failure: Failure) -> Round:
    def one(values: list[float], alive: list[bool], _: int) -> list[float]:
        n = len(values)
        dealt = [peer for peer in range(n) if alive[peer] or failure is Failure.GROUP]
        shuffled = rng.permutation(dealt).tolist()
        count = max(1, len(shuffled) // group_size)
        groups = [shuffled[k * group_size : (k + 1) * group_size] for k in range(count)]
        for number, peer in enumerate(shuffled[count * group_size :]):
            groups[number % count].append(peer)
        return by_groups(values, alive, groups, failure)

    return one


def slow_paper_grid(
    n: int, group_size: int, dims: int, rng: np.random.Generator, failure: Failure
) -> Round:
    cells = [
        np.unravel_index(cell, (group_size,) * dims)[::-1]
        for cell in rng.choice(group_size**dims, n, replace=False)
    ]

    def one(values: list[float], alive: list[bool], number: int) -> list[float]:
        rows: dict[tuple[int, ...], list[int]] = {}
        for peer, cell in enumerate(cells):
            others = tuple(int(at) for axis, at in enumerate(cell) if axis != number % dims)
            rows.setdefault(others, []).append(peer)
        return by_groups(values, alive, list(rows.values()), failure)

    return one


class SlowGrid:
    """Moshpit's own rounds, one peer after another, in fractions of whole numbers.

    docs/internals/protocol.md "Grid": a value weighs the mass behind it, divided by how many of
    the new group's living bring the same one.
    """

    def __init__(self, ids: list[bytes], group_size: int, failure: Failure) -> None:
        self.ids, self.failure = ids, failure
        self.plan = grid.plan(len(ids), group_size)

    def __call__(self, values: list[float], alive: list[bool], number: int) -> list[float]:
        epoch, axis = divmod(number, self.plan.axes)
        if axis == 0:
            self.masses = [Fraction(1)] * len(values)
            self.made_by: list[object] = [None] * len(values)
            start = epoch * 5 % 32
            ranked = sorted(range(len(values)), key=lambda p: (self.ids[p][start:], self.ids[p]))
            self.rank = {peer: rank for rank, peer in enumerate(ranked)}
        members: dict[tuple[int, ...], list[int]] = {}
        for peer in range(len(values)):
            members.setdefault(self.plan.path(self.rank[peer], axis), []).append(peer)
        after = list(values)
        for path, group in members.items():
            there = [peer for peer in group if alive[peer]]
            if self.failure is Failure.GROUP and len(there) < len(group):
                continue
            makers = [self.made_by[p] for p in there]
            kin = [1 if m is None else makers.count(m) for m in makers]
            weights = [self.masses[p] / k for p, k in zip(there, kin, strict=True)]
            total = sum(weights, Fraction(0))
            for peer in there:
                after[peer] = math.fsum(
                    float(w / total) * values[p] for p, w in zip(there, weights, strict=True)
                )
                self.masses[peer] = total
                self.made_by[peer] = (axis, path)
        return after


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, int, int, Failure, float, int]:
    n = draw(st.integers(3, 24))
    group_size = draw(st.integers(2, n))
    dims = math.ceil(math.log(n) / math.log(group_size) - 1e-9) + draw(st.integers(0, 1))
    failure, death = draw(st.sampled_from(Failure)), draw(st.sampled_from([0.0, 0.05, 0.3, 0.8]))
    return n, group_size, max(1, dims), failure, death, draw(st.integers(0, 2**32))


def pair(name: str, case: tuple[int, int, int, Failure, float, int]) -> tuple[Method, Round]:
    """A method, and its reference with the same dice."""
    n, group_size, dims, failure, _, seed = case
    dice = [np.random.default_rng(seed) for _ in range(2)]
    match name:
        case "all-reduce":
            return AllReduce(), slow_all_reduce
        case "gossip":
            return Gossip(failure), slow_gossip(failure)
        case "sgp":
            return ReleasedSGP(n, failure), slow_sgp(failure)
        case "push-sum":
            return PushSum(), SlowPushSum(n)
        case "random-groups":
            fast = RandomGroups(group_size, dice[0], failure=failure)
            return fast, slow_random_groups(group_size, dice[1], failure)
        case "paper-grid":
            fast_grid = PaperGrid(n, group_size, dims, dice[0], failure=failure)
            return fast_grid, slow_paper_grid(n, group_size, dims, dice[1], failure)
        case _:
            own = GridRounds(n, group_size, dice[0], failure=failure)
            return own, SlowGrid([bytes(peer) for peer in own.peers], group_size, failure)


NAMES = ["all-reduce", "gossip", "sgp", "push-sum", "random-groups", "paper-grid", "moshpit"]


@pytest.mark.parametrize("name", NAMES)
@settings(max_examples=settings.default.max_examples // 2)
@given(cases())
def test_every_round_is_what_the_definition_says(
    name: str, case: tuple[int, int, int, Failure, float, int]
) -> None:
    n, *_, death, seed = case
    world = np.random.default_rng((seed, 1))
    fast, slow = pair(name, case)
    values = world.standard_normal(n)
    wanted: list[float] = values.tolist()
    for number in range(7):
        alive = world.random(n) >= death
        values = fast.round(values, alive)
        wanted = slow(wanted, alive.tolist(), number)
        assert np.abs(values - wanted).max() < 1e-12, f"round {number}"


@pytest.mark.parametrize("death", [0.0, 0.2])
def test_push_sum_loses_nothing(death: float) -> None:
    rng = np.random.default_rng(1)
    method, values = PushSum(), rng.standard_normal(37)
    total = values.sum()
    for _ in range(60):
        values = method.round(values, rng.random(37) >= death)
        assert method.weights.sum() == pytest.approx(37)
        assert (method.weights * values).sum() == pytest.approx(total)
    assert values.var() < 1e-3


@pytest.mark.parametrize("n", [4, 16, 64, 1024])
def test_push_sum_is_exact_on_powers_of_two(n: int) -> None:
    rng = np.random.default_rng(n)
    method, values = PushSum(), rng.standard_normal(n)
    start = values.mean()
    for _ in range(n.bit_length() - 1):
        values = method.round(values, np.ones(n, bool))
    assert np.abs(values - start).max() < 1e-14


def test_order_is_the_protocols() -> None:
    """In every epoch, also when ids agree in many bytes."""
    method = GridRounds(50, 8, np.random.default_rng(0))
    method.ids = method.ids % 2
    peers = method.peers
    method._sorted = np.array(sorted(range(50), key=lambda p: peers[p]))
    for epoch in range(40):
        method._epoch = epoch
        method._begin()
        ranked = [peers[index] for index in np.argsort(method._rank)]
        assert ranked == grid.order(peers, epoch)


def test_a_missing_peer_that_stops_its_group_costs_orders_of_magnitude() -> None:
    """paper.md §5: after 5 rounds, N = 1024, p = .005, about 4e-10 against 1e-4."""
    found = {
        failure: measure(
            lambda rng, failure=failure: PaperGrid(1024, 32, 2, rng, failure=failure),
            n=1024, death=0.005, rounds=5, runs=40, seed=0,
        ).each[:, 5]
        for failure in Failure
    }  # fmt: skip
    median = {failure: float(np.median(each)) for failure, each in found.items()}
    assert 1e-11 < median[Failure.ALIVE] < 4e-9
    assert 2e-5 < median[Failure.GROUP] < 5e-4


@pytest.mark.parametrize("wrong", [(5, 2, 2), (2, 1, 3), (4, 2, 0)])
def test_a_grid_without_room_is_refused(wrong: tuple[int, int, int]) -> None:
    with pytest.raises(ConfigError):
        PaperGrid(*wrong, np.random.default_rng(0))


def test_two_peers_have_no_released_sgp() -> None:
    with pytest.raises(ConfigError):
        ReleasedSGP(2)
