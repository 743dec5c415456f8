"""Real processes on machines between which the network is cut: both sides train on, and merge."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import pytest

from moshpit.identity.tickets import RunKey
from moshpit.types import Address

from .harness import Child, Event
from .namespaces import Machine, internet, needs_namespaces


class Peer(Child):
    """A process of `tests.real.divided` on a machine, and what it has said."""

    def __init__(self, machine: Machine, ticket: str, place: float) -> None:
        command = [sys.executable, "-m", "tests.real.divided", ticket, machine.address, str(place)]
        self.averagings: list[tuple[Event, Event]] = []
        """What it gave, and what came of it."""
        super().__init__(machine.inside(*command))

    def heard(self, event: Event) -> None:
        if event["event"] == "averaged":
            self.averagings.append((self.latest["gave"], event))

    def tell(self, line: object) -> None:
        self.write(f"{line}")

    def until_with(self, peers: int, count: int) -> None:
        """Wait for so many averagings with so many peers."""
        while count:
            count -= self.expect("averaged")["peers"] == peers


@contextlib.contextmanager
def ended(peers: list[Peer]) -> Iterator[list[Peer]]:
    try:
        yield peers
    finally:
        for peer in peers:
            peer.stop()


@pytest.mark.soak
@needs_namespaces
def test_sides_train_on_while_the_network_is_cut_and_merge_by_what_they_have_done() -> None:
    with internet() as net, contextlib.ExitStack() as stack:
        machines = [net.machine() for _ in range(3)]
        first = Address(machines[0].address, 7000)
        ticket = RunKey.generate().invite().ticket((first,)).encode()
        peers = stack.enter_context(ended([]))
        for place, machine in enumerate(machines):
            peers.append(Peer(machine, ticket, place))
            peers[-1].expect("joined")
        for peer in peers:
            peer.tell(3)
        for peer in peers:
            peer.until_with(3, 2)
        net.cut(machines[:2], machines[2:])
        peers[0].until_with(2, 3)
        peers[1].until_with(2, 3)
        peers[2].until_with(1, 2)
        net.heal()
        for peer in peers:
            peer.until_with(3, 1)
        epochs = [{a["epoch"]: (g, a) for g, a in p.averagings if a["peers"]} for p in peers]
        together = [epoch for epoch, (_, averaged) in epochs[0].items() if averaged["peers"] == 3]
        *_, before, merged = together
        assert merged > before + 3
        seen = [at[merged][0]["samples"] - at[before][0]["samples"] for at in epochs]
        # What a snapshot says that was taken before its peer heard of the merging is made up for.
        assert all(at[merged][0]["weight"] <= n for at, n in zip(epochs, seen, strict=True))
        for k, value in enumerate(epochs[0][merged][1]["values"]):
            given = [at[merged][0]["values"][k] for at in epochs]
            mean = sum(n * v for n, v in zip(seen, given, strict=True)) / sum(seen)
            assert value == pytest.approx(mean, abs=1e-6)
        for at in epochs[1:]:
            assert at[merged][1]["values"] == epochs[0][merged][1]["values"]
        for peer in peers:
            peer.tell("finish")
            assert peer.expect("left")["caught_up"] == 0
