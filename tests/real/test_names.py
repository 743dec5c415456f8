"""Processes with one key: a restarted one replaces its ghost, a second one is told to go."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from .harness import RealPeer, RealSwarm, real_swarm

NUMEL = 20_000
ATTEMPTS = 50


def exact(swarm: RealSwarm, peers: list[RealPeer]) -> None:
    """Average until all are in the mean, as newcomers and busy machines are not at once."""
    names = {p.name for p in peers}
    for _ in range(ATTEMPTS):
        results = swarm.average(peers)
        if all(r["rounds"] and set(r["rounds"][0]["contributors"]) == names for r in results):
            break
        time.sleep(0.1)  # the news of what it averages is on its way
    assert {r["outcome"] for r in results} == {"complete"}, results
    assert max(r["mean_error"] for r in results) < 1e-4


def known(peer: RealPeer) -> set[str]:
    peer.tell("peers")
    return set(peer.expect("peers")["peers"])


def test_of_two_processes_with_one_key_the_second_is_told(tmp_path: Path) -> None:
    key = ("--identity", str(tmp_path / "key"))
    with real_swarm(NUMEL, "--preset", "local") as swarm:
        first, other, third = swarm.add(), swarm.add(*key, "--notices"), swarm.add()
        for peer in swarm.peers:
            peer.joined()
        swarm.meet(swarm.peers)
        exact(swarm, swarm.peers)

        # Both live: who comes second goes, and nobody else notices anything.
        second = swarm.add(*key)
        told = second.expect("failed")
        assert told["kind"] == "KeyInUseError"
        assert "--identity new" in told["text"]
        assert second.end() == 0
        swarm.peers.remove(second)
        exact(swarm, swarm.peers)

        # The first is stopped, so that it answers nobody: its successor takes its place.
        other.signal(signal.SIGSTOP)
        successor = swarm.add(*key)
        successor.joined()
        assert successor.name == other.name
        living = [first, third, successor]
        swarm.meet(living)
        exact(swarm, living)

        # The ghost wakes up: it is told, ends by itself, and does no harm.
        other.signal(signal.SIGCONT)
        while "--identity new" not in other.expect("notice")["detail"]:
            pass
        other.tell("average", numbers={})
        assert other.expect("failed")["kind"] == "KeyInUseError"
        assert other.end() == 0
        swarm.peers.remove(other)
        exact(swarm, living)
        assert all(known(peer) == {p.name for p in living} for peer in living)


@pytest.mark.soak
def test_a_killed_process_comes_back_under_its_key(tmp_path: Path) -> None:
    key = ("--identity", str(tmp_path / "key"))
    with real_swarm(NUMEL, "--preset", "local") as swarm:
        first, victim = swarm.add(), swarm.add(*key)
        for peer in swarm.peers:
            peer.joined()
        swarm.meet(swarm.peers)
        for _ in range(2):
            exact(swarm, swarm.peers)
            victim.process.kill()
            victim.end()
            swarm.peers.remove(victim)
            back = swarm.add(*key)
            back.joined()
            assert back.name == victim.name
            swarm.meet([first, back])
            victim = back
        exact(swarm, swarm.peers)
