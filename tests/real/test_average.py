"""`Swarm.average` between real processes: exact means, every time."""

from __future__ import annotations

import pytest

from .harness import real_swarm


@pytest.mark.timeout(600)
def test_sixteen_processes_in_groups_of_four_hold_the_exact_weighted_mean() -> None:
    with real_swarm(10_000, "--group-size", "4") as swarm:
        swarm.start(16)
        swarm.average(swarm.peers)  # makes the 120 connections, all at once on a few cores
        for _ in range(3):
            results = swarm.average(swarm.peers)
            for result in results:
                assert result["outcome"] == "complete", result
                assert len(result["rounds"]) == 2
                assert all(len(r["peers"]) == 4 for r in result["rounds"])
                assert result["mean_error"] < 1e-4
            assert {r["epoch"] for r in results} == {results[0]["epoch"]}


@pytest.mark.timeout(600)
@pytest.mark.parametrize("rounds", [25, pytest.param(100, marks=pytest.mark.soak)])
def test_a_group_of_sixteen_meets_again_and_again_without_a_failure(rounds: int) -> None:
    """How fast it does is for benchmarks/meeting.py to say."""
    with real_swarm(1_000) as swarm:
        swarm.start(16)
        for _ in range(rounds):
            results = swarm.average(swarm.peers)
            reports = [r["rounds"][0] for r in results]
            assert {r["outcome"] for r in reports} == {"complete"}
            assert {len(r["peers"]) for r in reports} == {16}
            assert len({r["digest"] for r in results}) == 1


def test_a_peer_alone_averages_with_itself() -> None:
    with real_swarm(1_000) as swarm:
        swarm.start(1)
        (result,) = swarm.average(swarm.peers)
        assert result["outcome"] == "complete"
        assert result["rounds"] == []
        assert result["mean_error"] < 1e-6
