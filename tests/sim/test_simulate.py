"""Whole swarms: the invariants hold under every shipped scenario, and replays are replays."""

from __future__ import annotations

import dataclasses
import io
import os
import subprocess
import sys

import msgspec
import pytest

from moshpit.sim.scenario import load
from moshpit.sim.simulate import Result, run

SMALL = ("crash", "restart", "churn", "pause", "partition", "slow", "nat", "loss", "corrupt")
LONG = ("joiners", "storm")


def explain(result: Result) -> str:
    """Return what a person needs to replay a failure."""
    found = [f"{f.invariant}: {f.first}" for f in result.findings if not f.ok]
    return f"{result.scenario} --seed {result.seed} --peers {result.peers}\n" + "\n".join(found)


@pytest.mark.parametrize("name", [*SMALL, *LONG])
@pytest.mark.parametrize("seed", range(1))
def test_invariants_hold(name: str, seed: int) -> None:
    result = run(load(name), seed)
    assert result.ok, explain(result)
    assert all(finding.checked for finding in result.findings)
    assert result.rounds["complete"] > result.rounds["partial"]


@pytest.mark.parametrize("name", ["calm", *SMALL])
def test_invariants_hold_in_small_swarms_under_thirty_seeds(name: str) -> None:
    failed = [result for seed in range(30) if not (result := run(load(name), seed, 7)).ok]
    assert not failed, "\n".join(map(explain, failed))


@pytest.mark.parametrize("peers", [1, 2, 3, 5, 7, 13, 16, 17, 23, 50])
def test_calm_swarms_are_exact_for_every_number_of_peers(peers: int) -> None:
    result = run(load("calm"), peers, peers)
    assert result.ok, explain(result)
    checked = {finding.invariant: finding.checked for finding in result.findings}
    assert checked["E"] >= 3
    assert result.rounds["partial"] == result.rounds["failed"] == 0


def test_averaging_without_training_is_exact_too() -> None:
    calm = load("calm")
    work = msgspec.structs.replace(calm.work, mode="average", step_s=(0.1, 0.3))
    result = run(msgspec.structs.replace(calm, work=work), 4)
    assert result.ok, explain(result)
    assert result.epochs >= 3


def test_aux_peers_are_exact_from_the_first_epoch_on() -> None:
    """They know what to average once they have heard of somebody who does; the others plan with
    them before they have said so."""
    calm = load("calm")
    work = msgspec.structs.replace(calm.work, mode="average", step_s=(0.01, 0.3))
    swarm = msgspec.structs.replace(calm.swarm, peers=10, aux_share=0.3, epochs=2)
    mixed = msgspec.structs.replace(calm, work=work, swarm=swarm)
    failed = [result for seed in range(6) if not (result := run(mixed, seed)).ok]
    assert not failed, "\n".join(map(explain, failed))


def test_the_result_is_a_pure_function_of_its_arguments() -> None:
    first, second = (dataclasses.replace(run(load("crash"), 5), real_s=0.0) for _ in range(2))
    assert first == second
    assert run(load("crash"), 6).trace_hash != first.trace_hash


def test_the_log_does_not_change_the_run() -> None:
    log = io.StringIO()
    assert run(load("crash"), 5, log=log).trace_hash == run(load("crash"), 5).trace_hash
    assert "*** crash p" in log.getvalue()
    assert "-> AveragingEnded(" in log.getvalue()


def test_hash_seeds_do_not_change_the_run() -> None:
    program = (
        "from moshpit.sim.scenario import load\n"
        "from moshpit.sim.simulate import run\n"
        "print(*(run(load(n), 3).trace_hash for n in ('restart', 'nat')))\n"
    )
    hashes = [
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for hash_seed in ("1", "2")
    ]
    assert hashes[0] == hashes[1]
    assert len(hashes[0].split()) == 2


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ["calm", *SMALL, *LONG])
def test_invariants_hold_for_many_seeds(name: str) -> None:
    failed = [result for seed in range(300) if not (result := run(load(name), seed)).ok]
    assert not failed, "\n".join(map(explain, failed[:10]))


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_a_thousand_peers() -> None:
    result = run(load("thousand"), 0)
    assert result.ok, explain(result)
    assert result.epochs >= 10
