"""Clients behind a router and aux peers, as real processes."""

from __future__ import annotations

import time

from .harness import RealPeer, RealSwarm, crowding, real_swarm

NUMEL = 200_000


def start(swarm: RealSwarm, *roles: str) -> list[RealPeer]:
    peers = [swarm.add("--role", role) for role in roles]
    for peer in peers:
        peer.joined()
    swarm.meet(peers)
    return peers


def test_a_client_gives_and_takes_without_being_dialled() -> None:
    with real_swarm(NUMEL) as swarm:
        peers = start(swarm, "worker", "worker", "client")
        assert peers[2].addresses == []
        for _ in range(3):
            results = swarm.average(peers)
            assert {r["outcome"] for r in results} == {"complete"}
            assert len({r["digest"] for r in results}) == 1
            assert max(r["mean_error"] for r in results) < 1e-4
        received = results[2]["rounds"][0]
        assert set(received["contributors"]) == {p.name for p in peers}


def test_an_aux_peer_reduces_and_weighs_nothing() -> None:
    with real_swarm(NUMEL) as swarm:
        *trainers, aux = start(swarm, "worker", "worker", "aux")
        results = swarm.average(trainers)  # the first one attaches; aux learns what is averaged
        for _ in range(3):
            results = swarm.average(trainers)
            assert {r["outcome"] for r in results} == {"complete"}, results
            assert len({r["digest"] for r in results}) == 1
            assert max(r["mean_error"] for r in results) < 1e-4
        last = results[0]["rounds"][0]
        assert aux.name in last["peers"]
        assert aux.name not in last["contributors"]


def test_two_clients_have_an_aux_peer_between_them() -> None:
    with real_swarm(NUMEL) as swarm:
        aux, *clients = start(swarm, "aux", "client", "client")
        swarm.average(clients)
        for _ in range(2):
            results = swarm.average(clients)
            assert {r["outcome"] for r in results} == {"complete"}, results
            assert len({r["digest"] for r in results}) == 1
            assert max(r["mean_error"] for r in results) < 1e-4
        assert aux.name in results[0]["rounds"][0]["peers"]


def test_the_clients_of_a_dead_aux_peer_say_what_to_start() -> None:
    with real_swarm(NUMEL, "--notices", "--reach-s", "0.5") as swarm:
        aux, *clients = start(swarm, "aux", "client", "client")
        swarm.average(clients)
        aux.process.kill()
        aux.process.wait()
        began = time.monotonic()
        swarm.begin(clients)
        results = [c.expect("averaged") for c in clients]
        assert time.monotonic() - began < 30.0 * crowding()
        for result in results:
            assert result["outcome"] in ("failed", "complete")
            for r in result["rounds"]:
                assert r["contributors"] in ([], [result["rounds"][0]["peers"][0]])
        for client in clients:
            said = client.expect("notice")
            while said["code"] != "no-reducer":
                said = client.expect("notice")
            assert "--role aux --listen 0.0.0.0:7000" in said["detail"]


DAY_S = 86400.0


def test_nobody_needs_the_right_time() -> None:
    with real_swarm(NUMEL, expires_at=int(time.time() + 2 * DAY_S)) as swarm:
        peers = [swarm.add(clock_s=shift) for shift in (0.0, DAY_S, -DAY_S)]
        late = swarm.add(clock_s=3 * DAY_S)
        for peer in peers:
            peer.joined()
        swarm.meet(peers)
        for _ in range(2):
            results = swarm.average(peers)
            assert {r["outcome"] for r in results} == {"complete"}, results
            assert max(r["mean_error"] for r in results) < 1e-4
            assert {len(r["rounds"][0]["contributors"]) for r in results} == {3}
        now, ahead, behind = (r["at"] for r in results)
        assert ahead - now > DAY_S / 2 < now - behind, "the clocks were wrong"
        # Only tickets end by a clock; and whose own is wrong is told so.
        told = late.expect("failed")
        assert told["kind"] == "TicketError"
        assert "check this machine's clock" in told["text"]
