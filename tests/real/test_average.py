"""`Swarm.average` between real processes: exact means, quick meetings, cheap idling."""

from __future__ import annotations

import statistics
import time

import pytest

from .harness import real_swarm


@pytest.mark.timeout(180)
def test_sixteen_processes_in_groups_of_four_hold_the_exact_weighted_mean() -> None:
    with real_swarm(10_000, "--group-size", "4") as swarm:
        swarm.start(16)
        for _ in range(3):
            results = swarm.average(swarm.peers)
            for result in results:
                assert result["outcome"] == "complete", result
                assert len(result["rounds"]) == 2
                assert all(len(r["peers"]) == 4 for r in result["rounds"])
                assert result["mean_error"] < 1e-4
            assert {r["epoch"] for r in results} == {results[0]["epoch"]}


@pytest.mark.timeout(240)
def test_groups_of_sixteen_meet_at_once_and_idle_for_nothing() -> None:
    with real_swarm(1_000) as swarm:
        swarm.start(16)
        delays: list[float] = []
        for _ in range(100):
            swarm.begin(swarm.peers)
            arrivals = [p.expect("averaging")["at"] for p in swarm.peers]
            results = [p.expect("averaged") for p in swarm.peers]
            rounds = [r["rounds"][0] for r in results]
            assert {r["outcome"] for r in rounds} == {"complete"}
            assert {len(r["peers"]) for r in rounds} == {16}
            formed = [a + r["meeting_s"] for a, r in zip(arrivals, rounds, strict=True)]
            delays.append(max(formed) - max(arrivals))
        assert statistics.median(delays) < 0.05, sorted(delays)

        # One more peer waits alone for nobody, the others idle: what does it cost?
        before = [_cpu(p) for p in swarm.peers]
        time.sleep(10.0)  # the measured span, not a hope
        after = [_cpu(p) for p in swarm.peers]
        shares = [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(before, after, strict=True)]
        assert statistics.mean(shares) < 0.02, shares


def _cpu(peer: object) -> tuple[float, float]:
    peer.tell("cpu")  # type: ignore[attr-defined]
    event = peer.expect("cpu")  # type: ignore[attr-defined]
    return event["process_s"], event["at"]


def test_a_peer_alone_averages_with_itself() -> None:
    with real_swarm(1_000) as swarm:
        swarm.start(1)
        (result,) = swarm.average(swarm.peers)
        assert result["outcome"] == "complete"
        assert result["rounds"] == []
        assert result["mean_error"] < 1e-6
