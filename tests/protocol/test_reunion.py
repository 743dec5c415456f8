"""Peers that resume agree on an epoch, whoever comes first, late, never, or lies."""

from __future__ import annotations

import heapq
import itertools

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.protocol import reunion
from moshpit.protocol.machine import Emit, Send
from moshpit.protocol.reunion import Chosen, Reunion, Why
from moshpit.types import PeerId
from moshpit.wire.transfer import StateHeld

from .harness_matchmaking import StaticView, peer_id, record

MESSAGE_S = 0.05


class World:
    """Peers that see each other as soon as both have started, and messages that take a moment."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order = itertools.count()
        self.queue: list[tuple[float, int, tuple]] = []
        self.held: dict[int, tuple[tuple[int, ...], int, float]] = {}
        self.machines: dict[int, Reunion] = {}
        self.chosen: dict[int, Chosen] = {}
        self.notices: list = []
        self.numbers: dict[PeerId, int] = {}
        self.running: dict[int, int] = {}
        self.cut: set[tuple[int, int]] = set()

    def peer(
        self, number: int, *held: int, company: int = 0, at: float = 0.0, wait_s: float = 20.0
    ) -> None:
        self.held[number] = (held, company, wait_s)
        self.numbers[peer_id(number)] = number
        self.later(at, "start", number)

    def later(self, at: float, *what: object) -> None:
        heapq.heappush(self.queue, (at, next(self.order), what))

    def view(self, number: int) -> StaticView:
        there = [record(peer_id(n), schema=b"") for n in (number, *self.machines)]
        there += [
            msgspec.structs.replace(record(peer_id(n)), epoch=epoch)
            for n, epoch in self.running.items()
        ]
        unique = {r.peer: r for r in there}
        return StaticView(peer_id(number), [unique[p] for p in sorted(unique)])

    def see(self) -> None:
        for number, machine in self.machines.items():
            machine._view = self.view(number)

    def run(self, until: float = 60.0) -> dict[int, int]:
        while self.queue and self.now < until:
            self.now, _, what = heapq.heappop(self.queue)
            self.event(*what)
        assert sorted(self.chosen) == sorted(self.machines), "all have an end"
        return {number: chosen.epoch for number, chosen in self.chosen.items()}

    def event(self, kind: str, number: int, *rest: object) -> None:
        if kind == "start":
            held, company, wait_s = self.held[number]
            view = self.view(number)
            machine = self.machines[number] = Reunion(view, held, company, wait_s, self.now)
            self.see()
            self.take(number, machine.start(self.now))
            self.later(self.now + reunion.BEAT_S, "tick", number)
        elif kind == "tick":
            machine = self.machines[number]
            self.take(number, machine.tick(self.now))
            if machine.wakeup is not None:
                self.later(machine.wakeup, "tick", number)
        else:
            sender, message = rest
            effects = self.machines[number].received(peer_id(sender), message, self.now)
            self.take(number, effects)

    def take(self, number: int, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(peer=to, message=message):
                    target = self.numbers.get(to)
                    if target in self.machines and (number, target) not in self.cut:
                        self.later(self.now + MESSAGE_S, "message", target, number, message)
                case Emit(notice=notice):
                    self.notices.append(notice)
                case Chosen():
                    assert number not in self.chosen, "it ends once"
                    self.chosen[number] = effect


def test_the_newest_epoch_that_all_hold() -> None:
    world = World()
    world.peer(0, 40, 38, 36, company=3)
    world.peer(1, 38, 36, company=3, at=1.5)
    world.peer(2, 40, 38, company=3, at=4.0)
    assert set(world.run().values()) == {38}
    assert world.now < 5.0, "nobody waited for more"
    by = {chosen.by for chosen in world.chosen.values()}
    assert len(by) == 1
    (decided,) = (c for n, c in world.chosen.items() if peer_id(n) in by)
    assert (decided.why, decided.peers, decided.newest) == (Why.COMMON, 3, 40)


def test_who_holds_none_leaves_the_choice_to_the_others() -> None:
    world = World()
    world.peer(0, 40, 38, company=2)
    world.peer(1, 38, 36, company=2)
    world.peer(2)
    assert set(world.run().values()) == {38}


def test_no_common_epoch_is_the_newest_of_all() -> None:
    world = World()
    world.peer(0, 40, company=2)
    world.peer(1, 38, 36, company=2)
    assert set(world.run().values()) == {40}
    assert Why.NEWEST in {chosen.why for chosen in world.chosen.values()}


def test_a_beginning_waits_for_nobody_and_together_hardly() -> None:
    world = World()
    world.peer(0)
    world.peer(1, at=0.0)
    assert set(world.run().values()) == {0}
    assert world.now < reunion.ANSWER_S + 1.0
    alone = World()
    alone.peer(0, 7, company=1)
    assert alone.run() == {0: 7}
    assert alone.now == 0.0 or alone.now <= reunion.BEAT_S
    assert alone.chosen[0] == Chosen(7, Why.COMMON, 1, 7, peer_id(0))


def test_who_never_comes_is_waited_for_so_long_and_no_longer() -> None:
    world = World()
    world.peer(0, 9, 8, company=3, wait_s=5.0)
    world.peer(1, 8, company=3, wait_s=5.0)
    assert set(world.run().values()) == {8}
    assert 5.0 <= world.now < 6.0


@pytest.mark.parametrize("late", [0, 2])
def test_who_comes_late_is_told(late: int) -> None:
    """Whether its id is the lowest or not: what was decided is not decided again."""
    world = World()
    for number in {0, 1, 2} - {late}:
        world.peer(number, 40, 38, company=2)
    world.peer(late, 38, 36, company=3, at=10.0)
    assert set(world.run().values()) == {40}
    assert world.chosen[late].why is Why.TOLD
    assert world.chosen[late].by in {peer_id(n) for n in {0, 1, 2} - {late}}


def test_a_run_under_way_is_joined_at_once() -> None:
    world = World()
    world.running = {7: 50}
    world.peer(0, 40, 38, company=4)
    assert world.run() == {0: 50}
    assert world.chosen[0].why is Why.UNDER_WAY
    behind = World()
    behind.running = {7: 3}
    behind.peer(0, 40, 38, company=4, wait_s=2.0)
    assert behind.run() == {0: 40}, "its work is not thrown away for one that began anew"


def test_one_that_is_cut_off_decides_in_the_end() -> None:
    world = World()
    world.peer(0, 40, 38, company=2, wait_s=3.0)
    world.peer(1, 38, company=2, wait_s=3.0)
    world.cut = {(0, 1), (1, 0)}
    assert world.run() == {0: 40, 1: 38}
    assert world.now <= 3.0 + reunion.GRACE_S + 1.0


@pytest.mark.parametrize(
    "wrong",
    [
        {"epochs": (-1,)},
        {"epochs": (1 << 63,)},
        {"epochs": (0,)},
        {"epochs": tuple(range(1, 1000))},
        {"company": -1},
        {"company": 1 << 40},
        {"chosen": -2},
        {"chosen": 1 << 63},
    ],
    ids=str,
)
def test_what_makes_no_sense_is_told_by_name(wrong: dict[str, object]) -> None:
    view = StaticView(peer_id(0), [record(peer_id(0)), record(peer_id(1), schema=b"")])
    machine = Reunion(view, (5,), 2, 10.0, 0.0)
    machine.start(0.0)
    held = StateHeld(**{"epochs": (5,), "company": 2, **wrong})
    (told,) = machine.received(peer_id(1), held, 1.0)
    assert isinstance(told, Emit)
    assert (told.notice.code, told.notice.peer) == ("bad-state-held", peer_id(1))
    assert machine.choice is None


def test_a_choice_that_nobody_holds_does_not_count() -> None:
    there = [record(peer_id(n), schema=b"") for n in range(3)]
    me = max(r.peer for r in there)
    liar, honest = sorted(r.peer for r in there if r.peer != me)
    machine = Reunion(StaticView(me, there), (5, 4), 3, 10.0, 0.0)
    machine.start(0.0)
    machine.received(liar, StateHeld((), 0, chosen=0), 0.5)
    machine.received(liar, StateHeld((), 0, chosen=99), 0.6)
    assert machine.choice is None
    machine.received(honest, StateHeld((4,), 3), 0.7)
    assert machine.choice is None
    (told,) = [e for e in machine.tick(10.0 + reunion.GRACE_S) if isinstance(e, Emit)]
    assert (told.notice.code, told.notice.peer) == ("bad-state-held", liar)
    assert machine.choice is not None
    assert machine.choice.epoch == 4


@given(st.data())
def test_all_choose_alike_and_what_somebody_holds(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 5))
    epochs = st.lists(st.integers(1, 6), max_size=4)
    world = World()
    lists = [tuple(data.draw(epochs)) for _ in range(count)]
    for number, held in enumerate(lists):
        world.peer(number, *held, company=count, at=data.draw(st.floats(0.0, 10.0)))
    choices = set(world.run().values())
    held_by_any = {epoch for held in lists for epoch in held}
    assert len(choices) == 1
    (epoch,) = choices
    holders = [set(held) for held in lists if held]
    common = set.intersection(*holders) if holders else set()
    assert epoch == max(common or held_by_any or {0})
