"""The schedule of a chaos run: the same for a seed, and within its rules for every seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .schedule import AMOUNT, TAKES_AWAY, Fault, Kind, Place, Setup, draw, places

ROOT = Path(__file__).parents[2]
SHORT = Setup(peers=4, seconds=20.0, first_s=2.0, calm_s=8.0, gap_s=1.5)
SETUPS = [SHORT, Setup(), Setup(peers=16, gap_s=3.0)]
SEEDS = range(60)


def hit(fault: Fault, setup: Setup) -> tuple[int, ...]:
    return fault.peers or tuple(range(setup.peers + setup.late))


def test_a_seed_is_a_schedule_in_every_process() -> None:
    words = "from tests.chaos.schedule import Setup, draw; print(*draw(3, Setup()), sep='\\n')"
    command = [sys.executable, "-c", words]
    shown = [
        subprocess.run(
            command,
            cwd=ROOT,
            env={"PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        ).stdout
        for seed in ("1", "2")
    ]
    assert shown[0] == shown[1]
    assert len(shown[0].splitlines()) > 20
    assert draw(3, SHORT) == draw(3, SHORT)
    assert draw(3, SHORT) != draw(4, SHORT)


@pytest.mark.parametrize("setup", SETUPS)
def test_everything_is_over_before_the_calm(setup: Setup) -> None:
    for seed in SEEDS:
        faults = draw(seed, setup)
        assert list(faults) == sorted(faults, key=lambda f: f.at_s)
        for fault in faults:
            assert setup.first_s <= fault.at_s <= fault.until_s <= setup.seconds - setup.calm_s
            assert all(0 <= p < setup.peers + setup.late for p in fault.peers)
            assert len(set(fault.peers)) == len(fault.peers)
            if fault.kind in AMOUNT:
                least, most = AMOUNT[fault.kind]
                assert least <= fault.amount <= most


@pytest.mark.parametrize("setup", SETUPS)
def test_half_of_the_swarm_is_always_there(setup: Setup) -> None:
    for seed in SEEDS:
        away = [f for f in draw(seed, setup) if f.kind in TAKES_AWAY]
        for fault in away:
            then = [f for f in away if f.at_s <= fault.at_s < f.back_s]
            gone = [p for f in then for p in f.peers]
            assert len(gone) == len(set(gone)), "nobody is hit twice"
            assert len(gone) <= setup.peers // 2


@pytest.mark.parametrize("setup", SETUPS)
def test_a_setting_is_set_once_at_a_time(setup: Setup) -> None:
    settings = [k for k in Kind if k not in TAKES_AWAY and k not in (Kind.JOIN, Kind.BLACKOUT)]
    for seed in SEEDS:
        faults = draw(seed, setup)
        for kind in settings:
            same = [f for f in faults if f.kind is kind]
            for fault in same:
                then = [f for f in same if f.at_s <= fault.at_s < f.until_s]
                assert sum(p in f.peers for f in then for p in fault.peers) == len(fault.peers)


def test_nobody_is_hit_before_it_has_come_and_the_blackout_is_alone() -> None:
    setup = Setup()
    dark = 0
    for seed in SEEDS:
        faults = draw(seed, setup)
        joins = {f.peers[0]: f.at_s for f in faults if f.kind is Kind.JOIN}
        for fault in faults:
            assert all(fault.at_s >= joins[p] for p in fault.peers if p in joins)
            assert all(p < setup.peers or p in joins for p in fault.peers)
        for blackout in (f for f in faults if f.kind is Kind.BLACKOUT):
            dark += 1
            others = [f for f in faults if f is not blackout]
            assert not [
                f for f in others if f.at_s <= blackout.until_s and blackout.at_s <= f.until_s
            ]
    assert 0.2 < dark / len(SEEDS) < 0.8


def test_all_kinds_come_and_only_those_that_are_asked_for() -> None:
    drawn = {f.kind for seed in SEEDS for f in draw(seed, Setup())}
    assert drawn == set(Kind)
    some = Setup(kinds=(Kind.KILL, Kind.LOSS))
    assert {f.kind for seed in SEEDS for f in draw(seed, some)} == {Kind.KILL, Kind.LOSS}


def test_delays_are_for_those_at_the_end_of_a_long_line() -> None:
    for seed in SEEDS:
        where = places(seed, Setup())
        assert where[0] is Place.PUBLIC, "somebody can always be dialled"
        assert (where.count(Place.HIDDEN), where.count(Place.FAR)) == (2, 1)
        delayed = [f.peers for f in draw(seed, Setup()) if f.kind is Kind.DELAY]
        assert all(where[p] is Place.FAR for (p,) in delayed)
