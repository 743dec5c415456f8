"""The torus schedule between real processes: exact means, for the bytes of a ring."""

from __future__ import annotations

import signal

import pytest

from .harness import Event, RealPeer, real_swarm

NUMEL = 1_000_000
PATIENT = ("--preset", "internet")  # a loaded machine must not look like a dead peer


def judge(result: Event) -> None:
    assert result["outcome"] == "complete", result
    assert result["mean_error"] < 1e-4
    column, row = result["rounds"]
    assert (column["axis"], row["axis"]) == (1, 0)
    assert len(column["peers"]) == len(row["peers"]) == 4
    first, end = column["span"]
    assert 4 * (end - first) == len(row["ledger"])
    assert set(row["reach"]) == {2}  # the whole column's mean, everywhere


def bulk(peers: list[RealPeer]) -> list[Event]:
    """What each has moved on bulk connections so far: headers, payloads and tags."""
    for peer in peers:
        peer.tell("bulk")
    return [peer.expect("bulk") for peer in peers]


@pytest.mark.timeout(400)
def test_sixteen_processes_hold_the_exact_mean_for_the_bytes_of_a_ring() -> None:
    with real_swarm(NUMEL, "--group-size", "4", "--schedule", "torus", *PATIENT) as swarm:
        swarm.start(16)
        swarm.average(swarm.peers)  # makes the connections
        before = bulk(swarm.peers)
        results = swarm.average(swarm.peers)
        after = bulk(swarm.peers)
        for result in results:
            judge(result)
        assert len({r["digest"] for r in results}) == 1
        limit = 1.05 * 2 * (1 - 1 / 16) * 4 * NUMEL
        for way in ("sent", "received"):
            moved = [b[way] - a[way] for a, b in zip(before, after, strict=True)]
            assert max(moved) <= limit, (way, moved)
            assert min(moved) > 0.95 * 2 * (1 - 1 / 16) * 4 * NUMEL, (way, moved)


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_rows_and_columns_that_are_not_full_are_exact_too() -> None:
    with real_swarm(50_000, "--group-size", "3", "--schedule", "torus", *PATIENT) as swarm:
        swarm.start(7)  # rows of 3, 2 and 2: two slices, one peer without a part
        swarm.average(swarm.peers)
        results = swarm.average(swarm.peers)
        for result in results:
            assert result["outcome"] == "complete", result
            assert result["mean_error"] < 1e-4
        assert len({r["digest"] for r in results}) == 1
        assert sorted(len(r["rounds"]) for r in results) == [1, 2, 2, 2, 2, 2, 2]


@pytest.mark.soak
@pytest.mark.timeout(400)
def test_a_peer_that_is_killed_costs_its_slice_the_columns_mean_at_most() -> None:
    with real_swarm(4_000_000, "--group-size", "3", "--schedule", "torus", *PATIENT) as swarm:
        swarm.start(9)
        swarm.average(swarm.peers)
        *others, victim = swarm.peers
        swarm.begin(swarm.peers)
        victim.expect("averaging")
        victim.signal(signal.SIGKILL)
        for result in [peer.expect("averaged", 120.0) for peer in others]:
            assert not result["stale"]
            assert result["outcome"] != "failed", result
            row = next(r for r in result["rounds"] if not r["span"])
            assert row["missing"] == []  # degraded at worst, never lost
