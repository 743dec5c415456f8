"""Merging: who declares it, how long a peer holds, what it weighs; and what a liar can do."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from moshpit.protocol.lineage import Lineage, label_of
from moshpit.protocol.machine import BeginAveraging
from moshpit.protocol.merging import HOLD_PROBES, HOLDS_MAX, Merging
from moshpit.protocol.view import LiveView, Status
from moshpit.types import PeerId

from .harness_membership import peer_id, record_of

SIDE = [peer_id(0), peer_id(1)]
OTHER = [peer_id(2), peer_id(3)]
ALL = sorted((*SIDE, *OTHER))
PROBE_S = 1.0
HOLD_S = HOLD_PROBES * PROBE_S


class Swarm:
    """Peer 0's view of a swarm of four."""

    def __init__(self) -> None:
        self.view = LiveView(record_of(0), 0.0)
        self.merging = Merging(self.view, PROBE_S)
        self.merging.able = True
        for number in (1, 2, 3):
            self.put(number)

    def put(self, number: int, **fields: Any) -> None:
        entry = self.view.entries.get(peer_id(number))
        if entry is None:
            self.view.add(record_of(number, **fields), 0.0)
            return
        version = entry.record.version + 1
        self.view.renew(
            entry, msgspec.structs.replace(entry.record, version=version, **fields), 0.0
        )

    def mark(self, number: int, status: Status) -> None:
        self.view.mark(self.view.entries[peer_id(number)], status, 0.0)

    def average(self, epoch: int, company: list[PeerId], samples: float = 10.0) -> None:
        self.merging.gave(epoch, request(samples))
        self.merging.ended(epoch, company)

    def part(self, epochs: int) -> None:
        """Two epochs together, and so many without the other side."""
        for epoch in range(2):
            self.average(epoch, ALL)
        for number in (2, 3):
            self.mark(number, Status.DEAD)
        for epoch in range(2, 2 + epochs):
            self.average(epoch, SIDE)

    def come_back(self, epochs: int, **fields: Any) -> None:
        """The other side is there again, after so many epochs of its own."""
        for number in (2, 3):
            self.mark(number, Status.ALIVE)
            shown = lineage((2, ALL), (epochs, OTHER))
            self.put(number, epoch=2 + epochs, lineage=shown, **fields)


def lineage(*lives: tuple[int, list[PeerId]]) -> bytes:
    made, epoch = Lineage(), 0
    for epochs, company in lives:
        for _ in range(epochs):
            made.averaged(epoch, label_of(epoch, company, lambda _: True), int(epoch == 2))
            epoch += 1
    return made.shown()


def request(weight: float, **how: Any) -> BeginAveraging:
    return BeginAveraging(weight, b"schema..", 4, 100, **how)


def test_a_side_that_comes_back_is_seen_declared_and_waited_for() -> None:
    swarm = Swarm()
    swarm.part(3)
    assert not swarm.merging.look(5, 50.0)
    swarm.come_back(6)
    assert swarm.merging.look(8, 50.0), "it is at epoch 8, and so shall we be"
    assert swarm.merging.fields()["merges_from"] == 2
    swarm.merging.skipped(3)
    assert not swarm.merging.stale(8), "what it has missed it has something for"
    assert swarm.merging.past == 30.0
    assert swarm.merging.holding(50.0 + HOLD_S / 2)
    assert not swarm.merging.holding(50.0 + HOLD_S)
    assert swarm.merging.takes(request(35.0, earlier=30.0, merges=True), 60.0)
    swarm.average(8, ALL)
    assert swarm.merging.past is None
    assert swarm.merging.fields()["merges_from"] == -1
    assert not swarm.merging.look(9, 60.0), "until they show something else they are one"


def test_who_only_stood_still_is_no_side_and_is_stale() -> None:
    swarm = Swarm()
    for epoch in range(3):
        swarm.average(epoch, ALL)
    for number in (1, 2, 3):
        swarm.put(number, epoch=12, lineage=lineage((12, ALL)))
    assert not swarm.merging.look(12, 50.0)
    swarm.merging.skipped(9)
    assert swarm.merging.stale(12)
    assert swarm.merging.past is None


def test_who_stood_still_while_others_merge_gives_nothing_old() -> None:
    swarm = Swarm()
    for epoch in range(3):
        swarm.average(epoch, ALL)
    for number in (1, 2, 3):
        swarm.put(number, epoch=12, lineage=lineage((12, ALL)), merges_from=8)
    assert swarm.merging.look(12, 50.0), "it declares it, as all do"
    swarm.merging.skipped(9)
    assert swarm.merging.stale(12)
    assert swarm.merging.past is None


def test_one_mean_without_somebody_is_no_parting() -> None:
    swarm = Swarm()
    swarm.average(0, ALL)
    swarm.average(1, SIDE)
    swarm.put(2, epoch=2, lineage=lineage((1, ALL), (1, OTHER)))
    assert not swarm.merging.look(2, 50.0)


def test_a_declaration_spreads_to_who_sees_nothing_itself() -> None:
    swarm = Swarm()
    for epoch in range(5):
        swarm.average(epoch, ALL)
    swarm.put(1, epoch=5, lineage=lineage((5, ALL)), merges_from=3)
    assert swarm.merging.look(5, 50.0)
    assert swarm.merging.past == 20.0
    assert not swarm.merging.look(5, 50.1), "said once"
    swarm.put(2, epoch=5, lineage=lineage((5, ALL)), merges_from=1)
    assert swarm.merging.look(5, 50.2), "an earlier parting is news"
    assert swarm.merging.past == 40.0


def test_a_declaration_of_an_epoch_that_is_over_counts_no_more() -> None:
    swarm = Swarm()
    for epoch in range(5):
        swarm.average(epoch, ALL)
    swarm.put(1, epoch=4, merges_from=3)
    assert not swarm.merging.look(5, 50.0)


def test_only_who_has_declared_too_can_call_earlier() -> None:
    swarm = Swarm()
    swarm.part(3)
    swarm.come_back(3)
    swarm.merging.look(5, 50.0)
    assert swarm.merging.declines(peer_id(2), 5, 50.1)
    swarm.put(2, merges_from=2)
    assert not swarm.merging.declines(peer_id(2), 5, 50.2)
    assert not swarm.merging.holding(50.2)


def test_a_snapshot_that_does_not_know_is_asked_for_again_and_waits() -> None:
    swarm = Swarm()
    swarm.part(3)
    swarm.come_back(3)
    swarm.merging.look(5, 50.0)
    assert swarm.merging.takes(request(5.0), 50.1) is False
    knows = request(35.0, earlier=30.0, merges=True)
    assert swarm.merging.takes(knows, 50.2) is None
    assert swarm.merging.ready(50.3) is None
    assert swarm.merging.ready(50.0 + HOLD_S) is knows
    assert swarm.merging.ready(50.0 + HOLD_S) is None


def test_training_that_never_heeds_it_is_not_asked_forever() -> None:
    swarm = Swarm()
    swarm.part(3)
    swarm.come_back(3)
    swarm.merging.look(5, 50.0)
    assert swarm.merging.takes(request(5.0), 60.0) is False
    assert swarm.merging.takes(request(5.0), 60.0) is True


def test_training_that_cannot_merge_says_nothing_and_heeds_nothing() -> None:
    swarm = Swarm()
    swarm.merging.able = False
    swarm.part(3)
    swarm.come_back(3, merges_from=2)
    assert swarm.merging.fields() == {"lineage": b"", "merges_from": -1}
    assert not swarm.merging.look(5, 50.0)
    assert swarm.merging.takes(request(5.0), 50.0)


def test_a_state_that_came_from_elsewhere_has_no_past() -> None:
    swarm = Swarm()
    swarm.part(3)
    swarm.merging.replaced(0)
    swarm.come_back(3)
    assert not swarm.merging.look(5, 50.0)
    assert swarm.merging.fields() == {"lineage": b"", "merges_from": -1}


@pytest.mark.parametrize("first", [0, 4, 1 << 40])
def test_a_peer_that_always_declares_costs_a_bounded_time(first: int) -> None:
    swarm = Swarm()
    held, now = 0.0, 100.0
    for epoch in range(200):
        swarm.put(1, epoch=epoch, lineage=lineage((3, ALL)), merges_from=first)
        swarm.merging.look(epoch, now)
        began = now
        while swarm.merging.holding(now):
            now += 0.5
        held += now - began
        assert swarm.merging.past is not None
        assert swarm.merging.past >= 0.0
        swarm.average(epoch, ALL)
        now += 0.1
    assert held <= (HOLDS_MAX + 1) * HOLD_S
    assert now < 200.0
