"""Real kills and pauses of real processes in the middle of real rounds (invariants S1, S2, L1)."""

from __future__ import annotations

import random
import signal
import statistics

import pytest

from .harness import Event, RealPeer, RealSwarm, crowding, real_swarm

NUMEL = 16 * 1024 * 1024  # 64 MB
PEERS = 4


def undisturbed(swarm: RealSwarm, rounds: int = 3) -> float:
    """Seconds that an ordinary round takes here and now."""
    seconds: list[float] = []
    for _ in range(rounds):
        results = swarm.average(swarm.peers)
        assert {r["outcome"] for r in results} == {"complete"}
        assert len({r["digest"] for r in results}) == 1
        assert max(r["ledger_error"] for r in results) < 1e-4
        seconds.append(max(r["seconds"] for r in results))
    return statistics.median(seconds)


def check_survivors(results: list[Event], survivors: list[RealPeer], usual_s: float) -> None:
    told = [(r["outcome"], r["seconds"], r["ledger_error"], r["rounds"]) for r in results]
    assert not any(r["stale"] for r in results), told
    assert all(r["outcome"] in ("complete", "partial") for r in results), told
    assert len({r["digest"] for r in results}) == 1, told
    assert max(r["ledger_error"] for r in results) < 1e-4, told
    assert all(r["rounds"][0]["missing"] == [] for r in results), told
    names = {p.name for p in survivors}
    for result in results:
        assert names <= set(result["rounds"][0]["contributors"]), told
    assert max(r["seconds"] for r in results) <= usual_s + 2.0 * crowding(), (usual_s, told)


def hit(swarm: RealSwarm, victim: RealPeer, moment_s: float, sign: signal.Signals) -> list[Event]:
    """Signal a peer at a moment of a round; return what the others say of the round."""
    swarm.begin(swarm.peers)
    for peer in swarm.peers:
        peer.expect("averaging")
    try:
        victim.process.wait(moment_s)
    except Exception:  # the wait is only an exact delay
        victim.signal(sign)
    return [p.expect("averaged") for p in swarm.peers if p is not victim]


def kill_moments(moments: int, seed: int) -> None:
    rng = random.Random(seed)
    with real_swarm(NUMEL) as swarm:
        swarm.start(PEERS)
        usual_s = undisturbed(swarm)
        for moment in range(moments):
            # The first victim is the peer whose address is in the ticket.
            victim = swarm.peers[0] if moment == 0 else rng.choice(swarm.peers)
            results = hit(swarm, victim, rng.uniform(0, 1.1 * usual_s), signal.SIGKILL)
            survivors = [p for p in swarm.peers if p is not victim]
            check_survivors(results, survivors, usual_s)
            if moment + 1 < moments:
                swarm.replace(victim)


def stop_moments(moments: int, seed: int) -> None:
    rng = random.Random(seed)
    with real_swarm(NUMEL) as swarm:
        swarm.start(PEERS)
        usual_s = undisturbed(swarm)
        for moment in range(moments):
            victim = swarm.peers[moment % PEERS]
            results = hit(swarm, victim, rng.uniform(0, 0.9 * usual_s), signal.SIGSTOP)
            survivors = [p for p in swarm.peers if p is not victim]
            check_survivors(results, survivors, usual_s)
            # The others go on without it; woken, its round is over, and it finds back.
            again = swarm.average(survivors)
            assert len({r["digest"] for r in again}) == 1
            victim.signal(signal.SIGCONT)
            woken = victim.expect("averaged")
            if woken["digest"] != results[0]["digest"]:
                alone = all(len(r["peers"]) == 1 for r in woken["rounds"])
                assert woken["stale"] or woken["outcome"] != "complete" or alone, woken
            swarm.meet(swarm.peers)
            together = swarm.average(swarm.peers)
            if len({r["digest"] for r in together}) != 1:  # it was an epoch behind when asked
                together = swarm.average(swarm.peers)
            assert len({r["digest"] for r in together}) == 1, together
            assert {r["outcome"] for r in together} == {"complete"}, together


@pytest.mark.timeout(600)
def test_a_kill_at_any_moment_costs_the_others_a_moment() -> None:
    kill_moments(5, seed=1)


@pytest.mark.timeout(600)
def test_a_stop_at_any_moment_costs_the_others_a_moment() -> None:
    stop_moments(4, seed=2)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_kills_at_25_random_moments() -> None:
    kill_moments(25, seed=3)


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_stops_at_25_random_moments() -> None:
    stop_moments(25, seed=4)
