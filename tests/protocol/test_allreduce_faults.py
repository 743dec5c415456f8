"""Whole rounds in virtual time: nobody's death stalls or corrupts the others.

`World.check` proves single counting (S1), that one name means one value (S2), and that every
round ends and closes in time (L1), for each run here; the tests add what must hold besides.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path
from random import Random

import msgspec
import pytest

from moshpit.events import Outcome
from moshpit.wire.messages import Takeover

from .harness_allreduce import CONFIG, DEADLINE_S, World

SOON_S = 3.0  # detection (1.25 s), a takeover, and the chunks again


def random_group(rng: Random, size: int, chunks: int) -> tuple[list[str], list[list[float]]]:
    """Roles and masses: workers, clients and aux peers, weights 0 and others, mixed chunks."""
    roles = [rng.choice(["worker"] * 3 + ["client", "aux"]) for _ in range(size)]
    if all(role == "client" for role in roles):
        roles[rng.randrange(size)] = "worker"
    masses: list[list[float]] = []
    for role in roles:
        kind = rng.random()
        if (role == "aux" and kind < 0.8) or kind < 0.08:
            masses.append([0.0] * chunks)
        elif kind < 0.2:
            masses.append([float(rng.choice([0, 1, 3])) for _ in range(chunks)])
        else:
            masses.append([float(rng.randrange(1, 9))] * chunks)
    return roles, masses


def random_world(seed: int, *, slow: bool = False) -> World:
    """A round of 2 to 8 members that start at different times, over uneven links."""
    rng = Random(seed)
    size, chunks = rng.randrange(2, 9), rng.randrange(1, 14)
    roles, masses = random_group(rng, size, chunks)
    origins = None
    if rng.random() < 0.3:
        origins = [rng.choice([b"", b"x" * 16, b"y" * 16]) for _ in range(size)]
    slow_seat = rng.randrange(size) if slow and rng.random() < 0.5 else -1
    spread = rng.choice([0.001, 0.02, 0.2])
    return World(
        seed,
        chunks,
        roles,
        masses,
        origins=origins,
        starts=[0.0 if rng.random() < 0.8 else rng.random() * 0.8 for _ in range(size)],
        delay=lambda a, b: 1e-4 + spread * rng.random(),
        chunk_delay=lambda a, b: (0.4 if a == slow_seat else 0.001) + spread * rng.random(),
    )


@pytest.mark.parametrize("size", range(1, 9))
def test_without_faults_everybody_has_the_weighted_mean(size: int) -> None:
    for seed in range(25):
        rng = Random(seed)
        chunks = rng.randrange(1, 12)
        roles, masses = random_group(rng, size, chunks)
        masses = [[row[0]] * chunks for row in masses]
        World(seed, chunks, roles, masses).run().check().check_exact().check_agreement()


def test_a_member_whose_announcement_was_lost_gets_it_from_a_groupmate() -> None:
    starts = [0.0, 0.0, float("inf")]
    world = World(4, 6, ["worker"] * 3, [[1.0] * 6] * 3, starts=starts).run()
    world.check().check_exact()


@pytest.mark.parametrize(
    ("roles", "stride"),
    [
        (["worker"] * 3, 1),
        (["worker", "client", "aux", "worker"], 1),
        (["worker"] * 5, 7),
    ],
)
@pytest.mark.parametrize("told", [0.01, None], ids=["reset", "silent"])
def test_the_death_of_any_seat_at_any_moment(
    roles: list[str], stride: int, told: float | None
) -> None:
    size = len(roles)
    chunks = size + 2
    masses = [[0.0 if role == "aux" else seat + 1.0] * chunks for seat, role in enumerate(roles)]
    steps = World(7, chunks, roles, masses).run().steps
    for victim in range(size):
        for moment in range(0, steps, stride):
            world = World(7, chunks, roles, masses)

            def die(w: World, victim: int = victim, moment: int = moment) -> None:
                if w.steps == moment:
                    w.kill(victim, refused_after=told)

            world.on_step = die
            world.run().check().check_agreement().check_nothing_missing()
            assert all(p.ended_at is not None and p.ended_at < SOON_S for p in world.survivors)
            for process in world.survivors:
                assert process.report is not None
                assert process.report.outcome is not Outcome.FAILED
                everybody = all(
                    mask.bit_count() == len(_weighers(masses)) for mask in process.report.ledger
                )
                assert (process.report.outcome is Outcome.COMPLETE) == everybody


def _weighers(masses: list[list[float]]) -> list[int]:
    return [seat for seat, row in enumerate(masses) if any(row)]


def test_the_death_of_the_only_other_member() -> None:
    for moment in range(14):
        world = World(2, 4, ["worker"] * 2, [[1.0] * 4, [2.0] * 4])

        def die(w: World, moment: int = moment) -> None:
            if w.steps == moment:
                w.kill(1)

        world.on_step = die
        world.run().check()
        report = world.processes[0].report
        assert report is not None
        shared = [chunk for chunk, mask in enumerate(report.ledger) if mask == 0b11]
        assert (report.outcome is Outcome.FAILED) == (not shared)


def test_deaths_of_up_to_three_at_random_moments() -> None:
    for seed in range(300):
        world, rng = random_world(seed), Random(seed + 1)
        for victim in rng.sample(range(world.size), min(world.size, rng.randrange(1, 4))):
            told = rng.choice([0.01, None])
            at = rng.random() * rng.choice([0.1, 0.5, 2.0])
            world.at(at, lambda v=victim, w=world, t=told: w.kill(v, refused_after=t))
        world.run().check()
        for process in world.survivors:
            assert process.ended_at is not None
            assert process.ended_at < 8.0, (seed, process.seat)  # each death costs a detection


def test_one_death_leaves_the_others_with_the_same_bytes() -> None:
    for seed in range(200):
        world, rng = random_world(seed), Random(seed + 1)
        victim, told = rng.randrange(world.size), rng.choice([0.01, None])
        world.at(rng.random() * 0.4, lambda w=world, v=victim, t=told: w.kill(v, refused_after=t))
        world.run().check().check_agreement()


def test_a_pause_costs_the_others_a_moment_and_does_not_confuse_them() -> None:
    for seed in range(200):
        world, rng = random_world(seed), Random(seed + 1)
        sleeper, seconds = rng.randrange(world.size), rng.choice([0.3, 1.5, 5.0, 40.0])
        world.at(rng.random() * 0.4, lambda w=world, s=sleeper, t=seconds: w.pause(s, t))
        world.run().check()
        others = [p for p in world.processes if p.seat != sleeper]
        identities = [world.identity(p) for p in others]
        assert all(i == identities[0] for i in identities), seed
        assert all(p.ended_at is not None and p.ended_at < 5.0 for p in others), seed


def test_a_paused_seat_gets_what_the_others_made_if_they_are_still_there() -> None:
    """Seat 2 of four sleeps for 2.5 s; a slow sender keeps the others in the round meanwhile."""
    world = World(
        5,
        24,
        ["worker"] * 4,
        [[1.0] * 24] * 4,
        chunk_delay=lambda a, b: 0.6 if a == 1 else 0.01,
    )
    world.at(0.05, lambda: world.pause(2, 2.5))
    world.run().check()
    sleeper = world.processes[2].report
    assert sleeper is not None
    assert sleeper.missing == ()
    assert len({tuple(world.identity(p)) for p in world.processes if p.seat != 2}) == 1


def test_a_cut_between_two_who_both_see_others() -> None:
    for seed in range(200):
        world, rng = random_world(seed), Random(seed + 1)
        dialable = [s for s in range(world.size) if world.roles[s] != "client"]
        a = rng.choice(dialable)
        b = rng.choice([s for s in range(world.size) if s != a])
        # Somebody who reduces must see both, or there is no way round the cut.
        if not [s for s in dialable if s not in (a, b)]:
            continue
        tell = rng.random() < 0.5
        world.at(rng.random() * 0.2, lambda w=world, a=a, b=b, t=tell: w.cut(a, b, tell=t))
        world.run().check().check_agreement()
        # A reducer that somebody still hears is not replaced.
        assert not any("Redo(" in line for line in world.trace), seed
        for process in world.processes:
            assert process.ended_at is not None
            assert process.ended_at < 6.0, (seed, process.seat)


def test_anything_at_once() -> None:
    _anything(range(300))


@pytest.mark.soak
def test_anything_at_once_for_long() -> None:
    _anything(range(300, 12_000))


def _anything(seeds: range) -> None:
    for seed in seeds:
        world, rng = random_world(seed, slow=True), Random(seed + 1)
        for _ in range(rng.randrange(1, 5)):
            kind = rng.choice(["kill", "silent", "pause", "cut"])
            at = rng.random() * rng.choice([0.1, 0.5, 3.0])
            a = rng.randrange(world.size)
            b = (a + rng.randrange(1, world.size)) % world.size
            seconds, tell = rng.choice([0.3, 1.5, 5.0, 40.0]), rng.random() < 0.5
            action = {
                "kill": lambda w=world, a=a: w.kill(a),
                "silent": lambda w=world, a=a: w.kill(a, refused_after=None),
                "pause": lambda w=world, a=a, s=seconds: w.pause(a, s),
                "cut": lambda w=world, a=a, b=b, t=tell: w.cut(a, b, tell=t),
            }[kind]
            world.at(at, action)
        world.run().check()


def test_a_slow_sender_is_waited_for() -> None:
    """Its chunks come for 2 s, twice stall_s; the others' for 1 s."""
    world = World(
        6,
        40,
        ["worker"] * 4,
        [[1.0] * 40] * 4,
        chunk_delay=lambda a, b: 0.2 if a == 3 else 0.1,
    )
    world.run().check().check_exact()
    assert all(p.ended_at is not None and p.ended_at > 2 * CONFIG.stall_s for p in world.survivors)


def test_a_sender_that_is_far_too_slow_is_left_out() -> None:
    world = World(
        6,
        40,
        ["worker"] * 4,
        [[1.0] * 40] * 4,
        chunk_delay=lambda a, b: 3.0 if (a, b) == (3, 0) else 0.01,
    )
    world.run().check()
    report = world.processes[0].report
    assert report is not None
    assert [(b.peer[0], b.reason) for b in report.blames] == [(3, "lagging")]
    assert report.ledger[0] == 0b0111
    world.check_agreement().check_nothing_missing()
    # Nor do seat 3's own results come over the slow link: seat 0 has them from others.
    assert all(p.ended_at is not None and p.ended_at < 2 * SOON_S for p in world.survivors)


def test_two_senders_that_hang_do_not_cost_the_round_its_results() -> None:
    """They live, but their chunks to seat 0 do not come: half the deadline, then without."""
    world = World(
        6,
        8,
        ["worker"] * 4,
        [[1.0] * 8] * 4,
        chunk_delay=lambda a, b: 1e3 if a >= 2 and b == 0 else 0.01,
    )
    world.run(until=60).check_agreement().check_nothing_missing()
    assert {p.report and p.report.ledger[0] for p in world.processes} == {0b0011}


def test_the_lost_contributions_are_named() -> None:
    world = World(9, 6, ["worker"] * 3, [[1.0] * 6] * 3)
    world.at(0.03, lambda: world.kill(2))
    world.run().check().check_agreement()
    for process in world.survivors:
        report = process.report
        assert report is not None
        assert [b.peer[0] for b in report.blames] == [2]
        assert report.outcome is Outcome.PARTIAL
    assert any(Takeover.__name__ in line for line in world.trace)


def test_the_same_seed_gives_the_same_story_under_any_hash_seed() -> None:
    program = (
        "import importlib.util, sys, hashlib, pathlib\n"
        "spec = importlib.util.spec_from_file_location('harness', sys.argv[1])\n"
        "harness = importlib.util.module_from_spec(spec)\n"
        "sys.modules['harness'] = harness\n"
        "spec.loader.exec_module(harness)\n"
        "w = harness.World(3, 9, ['worker'] * 4 + ['client'], [[1.0] * 9] * 5)\n"
        "w.at(0.04, lambda: w.kill(2, refused_after=None))\n"
        "w.run().check()\n"
        "print(hashlib.sha256('\\n'.join(w.trace).encode()).hexdigest())\n"
    )
    harness = Path(__file__).with_name("harness_allreduce.py")
    prints = set[str]()
    for hash_seed in ("1", "77"):
        done = subprocess.run(
            [sys.executable, "-c", program, str(harness)],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            capture_output=True,
            text=True,
            check=True,
        )
        prints.add(done.stdout)
    world = World(3, 9, ["worker"] * 4 + ["client"], [[1.0] * 9] * 5)
    world.at(0.04, lambda: world.kill(2, refused_after=None))
    world.run()
    prints.add(hashlib.sha256("\n".join(world.trace).encode()).hexdigest() + "\n")
    assert len(prints) == 1


def test_a_reducer_that_hangs_towards_everybody_is_replaced_before_the_deadline() -> None:
    """Seat 2 lives and beats, but no result of its own comes out of it."""
    world = World(
        11,
        8,
        ["worker"] * 4,
        [[1.0] * 8] * 4,
        chunk_delay=lambda a, b: 1e3 if a == 2 else 0.01,
    )
    world.run(until=60)
    honest = [p for seat, p in enumerate(world.processes) if seat != 2]
    identities = [world.identity(p) for p in honest]
    assert all(i == identities[0] for i in identities)
    for process in honest:
        assert process.report is not None
        assert process.report.missing == ()
        assert process.report.outcome is Outcome.PARTIAL
        assert [b.peer[0] for b in process.report.blames] == [2]
        assert process.ended_at is not None
        assert process.ended_at < 0.7 * DEADLINE_S


def slow_seat(said: dict[str, float]) -> World:
    """Seat 3 takes 4 s for its slice of seat 0's part; the others take 0.1 s."""
    world = World(
        6,
        40,
        ["worker"] * 4,
        [[1.0] * 40] * 4,
        chunk_delay=lambda a, b: 0.4 if a == 3 else 0.01,
    )
    joins = [
        msgspec.structs.replace(join, vector_bytes=40_000, **(said if seat == 3 else {}))
        for seat, join in enumerate(world.formed.joins)
    ]
    world.formed = msgspec.structs.replace(world.formed, joins=tuple(joins))
    return world


@pytest.mark.parametrize("said", [{"bandwidth": 15e3}, {"fill_s": 2.0}, {}])
def test_a_sender_that_has_announced_to_be_slow_is_given_its_time(said: dict[str, float]) -> None:
    world = slow_seat(said).run().check()
    report = world.processes[0].report
    assert report is not None
    lagging = [b.peer[0] for b in report.blames if b.reason == "lagging"]
    assert lagging == ([] if said else [3])
    if said:
        world.check_exact()
