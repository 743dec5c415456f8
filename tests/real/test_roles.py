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
    with real_swarm(NUMEL) as swarm:
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
