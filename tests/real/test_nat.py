"""Real processes behind routers with NAT, in network namespaces."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from moshpit.identity.tickets import RunKey
from moshpit.types import Address, Role

from .gateway import forwarded, needs_gateway, upnp
from .harness import Event, RealPeer
from .namespaces import Internet, Machine, internet, needs_namespaces

NUMEL = 100_000
PORT = 7000


class Scene:
    """A run on a little internet."""

    def __init__(self, net: Internet) -> None:
        self.net = net
        self._key = RunKey.generate()
        self._first = net.machine()
        self.ticket = self.invite(*Role)
        self.peers: list[RealPeer] = []
        self.add(self._first)

    def invite(self, *roles: Role) -> str:
        first = Address(self._first.address, PORT)
        return self._key.invite(roles).ticket((first,)).encode()

    def add(self, at: Machine, *args: str) -> RealPeer:
        listen = () if "client" in args else ("--listen", f"0.0.0.0:{PORT}")
        number = len(self.peers)
        common = ("--preset", "local", "--notices", "--reach-s", "0.3", *listen, *args)
        peer = RealPeer(self.ticket, number, NUMEL, *common, at=at)
        self.peers.append(peer)
        return peer

    def meet(self) -> None:
        for peer in self.peers:
            if not peer.name:
                peer.joined()
        for peer in self.peers:
            peer.tell("wait", peers=len(self.peers))
        for peer in self.peers:
            peer.expect("ready")

    def averaged(self) -> list[Event]:
        """Have all average."""
        numbers = {p.name: p.number for p in self.peers}
        for peer in self.peers:
            peer.tell("average", numbers=numbers)
        return [peer.expect("averaged") for peer in self.peers]

    def average(self) -> list[Event]:
        """Have all average; check that everybody gets the exact mean."""
        results = self.averaged()
        assert {r["outcome"] for r in results} == {"complete"}, results
        assert len({r["digest"] for r in results}) == 1
        assert max(r["mean_error"] for r in results) < 1e-4
        for result in results:
            assert set(result["rounds"][0]["contributors"]) == {p.name for p in self.peers}
        return results


@contextlib.contextmanager
def scene() -> Iterator[Scene]:
    with internet() as net:
        there = Scene(net)
        try:
            yield there
        finally:
            for peer in there.peers:
                peer.end()


def noticed(peer: RealPeer, code: str) -> str:
    """Wait for a notice; return its text."""
    while True:
        event = peer.expect("notice")
        if event["code"] == code:
            return event["detail"]


def records(peer: RealPeer) -> dict[str, tuple[str, list[list[object]]]]:
    peer.tell("peers")
    return peer.expect("peers")["records"]


@needs_namespaces
def test_peers_behind_routers_train_as_equals() -> None:
    with scene() as there:
        one, two = there.net.router(silent=True), there.net.router()
        there.add(there.net.machine())
        client = there.add(one.machine(), "--role", "client")
        inside = two.machine()
        hidden = there.add(inside)  # with the default role
        there.meet()

        # Nobody can dial it: it is told, and a client from now on.
        told = noticed(hidden, "unreachable")
        assert "It goes on as a client" in told
        assert f"forward TCP port {PORT}" in told
        assert f"{two.address}:{PORT} refused" in told
        results = there.average()
        for peer in there.peers:
            role, addresses = records(peer)[hidden.name]
            assert (role, addresses) == ("client", [])
        assert all(r["rounds"][0]["bytes_sent"] for r in results)

        # Somebody opens the port: it is a worker again, at the address that others have found.
        two.forward(PORT, inside)
        assert f"{two.address}:{PORT}" in noticed(hidden, "address-found")
        noticed(hidden, "reachable")
        there.averaged()  # the others hear of it about now, and may meet by different views
        there.average()
        role, addresses = records(hidden)[hidden.name]
        assert (role, addresses[0]) == ("worker", [two.address, PORT])
        assert records(client)[client.name][0] == "client"


@pytest.mark.soak
@needs_namespaces
def test_who_cannot_become_a_client_says_what_to_do() -> None:
    with scene() as there:
        router = there.net.router()
        there.add(there.net.machine())
        aux = there.add(router.machine(), "--role", "aux")
        there.ticket = there.invite(Role.WORKER)
        worker = there.add(router.machine())
        for peer in there.peers:
            peer.joined()
        assert "An aux peer is of no use like this. To be dialled" in noticed(aux, "unreachable")
        assert "Its ticket allows no clients. To be dialled" in noticed(worker, "unreachable")
        known = records(there.peers[0])
        assert (known[aux.name][0], known[worker.name][0]) == ("aux", "worker")


TAKE_A_PORT = """
import miniupnpc, sys
router = miniupnpc.UPnP()
router.discoverdelay = 500
router.discover()
router.selectigd()
router.addportmapping(int(sys.argv[1]), "TCP", router.lanaddr, 9, "a game", "", 600)
"""


@pytest.mark.soak
@needs_gateway
@needs_namespaces
def test_routers_are_asked_for_ports(tmp_path: Path) -> None:
    with scene() as there:
        router, deaf = there.net.router(silent=True), there.net.router()
        with upnp(router, tmp_path):
            game = router.machine()
            game.run(sys.executable, "-c", TAKE_A_PORT, str(PORT))
            assert forwarded(router) == {PORT: f"{game.address}:9"}
            mine = router.machine()
            one = there.add(mine, "--upnp")
            other = there.add(deaf.machine(), "--upnp")  # whose router knows nothing of it
            there.meet()
            assert f"{router.address}:{PORT + 1} leads here" in noticed(one, "upnp")
            assert forwarded(router)[PORT + 1] == f"{mine.address}:{PORT}"
            assert "UPnP" not in noticed(other, "unreachable")
            there.average()
            known = records(there.peers[0])
            assert known[one.name][0] == "worker"
            assert known[one.name][1][0] == [router.address, PORT + 1]
            assert known[other.name] == ["client", []]

            # Leaving takes the mapping back.
            assert one.end() == 0
            there.peers.remove(one)
            assert list(forwarded(router)) == [PORT]
