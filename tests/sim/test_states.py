"""State transfer in the simulator: whole states of one epoch, from donors that die or lie."""

from __future__ import annotations

import random

import msgspec
import pytest

from moshpit.config import preset
from moshpit.protocol.machine import Received, Tick
from moshpit.protocol.node import Node
from moshpit.sim.process import Host, Process, first_record, peer_id
from moshpit.sim.scenario import Scenario, load, parse
from moshpit.sim.signer import SimSigner
from moshpit.sim.simulate import run
from moshpit.sim.states import Image, name_of
from moshpit.sim.store import Piece
from moshpit.sim.trainer import SCHEMA, Phase
from moshpit.sim.world import World
from moshpit.types import Role
from moshpit.wire.messages import Gossip, News

LATE = """
title = "late"
[swarm]
peers = 6
group_size = 3
epochs = 9
[work]
epoch_s = 3.0
chunks = 4
[transfer]
[[faults]]
kind = "join"
at_epoch = 3
count = 2
"""


def explain(world: World) -> str:
    return "\n".join(f"{v.name}: {v.first}" for v in world.checkers.verdicts.values() if not v.ok)


def checked(scenario: Scenario, seed: int) -> World:
    world = World(scenario, seed)
    world.run()
    assert not explain(world), explain(world)
    return world


def test_late_joiners_fetch_a_whole_state_and_take_part_with_weight() -> None:
    world = checked(parse(LATE, "late"), 1)
    assert world.checkers.states is not None
    assert world.checkers.states.fetched_states == 2
    joined = [process.trainer.epoch for process in world.processes[6:]]
    assert len(joined) == 2
    assert min(joined) >= 9


@pytest.mark.parametrize("seed", range(3))
def test_joiners_among_donors_that_die_pause_and_lie(seed: int) -> None:
    world = checked(load("joiners"), seed)
    assert world.checkers.states is not None
    assert world.checkers.states.fetched_states >= 4


def test_a_torn_state_is_seen() -> None:
    """The checker compares with what was given, whatever the hashes say."""
    world = World(parse(LATE, "late"), 1)
    assert world.checkers.states is not None
    image = Image(4, [1.0, 2.0])
    world.checkers.states.gave(image.manifest, image.values)
    host = Host(0, 0, 1e6, 1e6, nat=False)
    process = Process(0, peer_id(1, 0), host, Role.WORKER, born=0.0, offset=0.0)
    world.checkers.states.fetched(1.0, process, image.manifest, 4, [1.0, 2.0])
    assert not explain(world)
    world.checkers.states.fetched(1.0, process, image.manifest, 5, [1.0, 2.0])
    assert "of nobody's" in explain(world)
    other = World(parse(LATE, "late"), 1)
    assert other.checkers.states is not None
    other.checkers.states.gave(image.manifest, image.values)
    other.checkers.states.fetched(1.0, process, image.manifest, 4, [1.0, 2.5])
    assert "torn" in explain(other)


class Idle(World):
    """Whoever has fetched a state does nothing with it."""

    def restored(self, process: Process, values: list[float] | None) -> None:
        if values is None:
            super().restored(process, values)


def test_who_has_a_state_and_takes_no_part_is_seen() -> None:
    world = Idle(parse(LATE, "late"), 1)
    world.run()
    assert "never averaged" in world.checkers.verdicts["T"].first


class Liar(World):
    """Its first peer gives other bytes than it has promised."""

    def start(self, host: Host, *, same_key: bool) -> None:
        super().start(host, same_key=same_key)
        if host.index < 6 and host.process is not None:
            self.corrupt(host.process, "non-finite" if host.index == 0 else "")


def test_pieces_with_other_bytes_are_blamed_on_their_sender_and_fetched_from_others() -> None:
    blamed = 0
    for seed in range(3):
        world = Liar(parse(LATE, "late"), seed)
        world.run()
        assert world.checkers.verdicts["T"].ok, world.checkers.verdicts["T"].first
        assert world.checkers.states is not None
        blamed += world.checkers.states.blamed
        assert all(p.trainer.phase is not Phase.CATCHING_UP for p in world.living())
    assert blamed >= 1


def test_a_state_is_named_by_what_is_in_it() -> None:
    a, b, c = Image(3, [1.0, 2.0]), Image(3, [1.0, 2.0]), Image(4, [1.0, 2.0])
    assert a.manifest == b.manifest
    assert name_of(a.manifest) != name_of(c.manifest)
    assert list(a.pieces)[:2] == list(c.pieces)[:2]
    assert name_of(Piece(0, 1.0)) != name_of(Piece(1, 1.0))


def test_runs_with_state_transfer_are_replays_too() -> None:
    assert run(load("joiners"), 3).trace_hash == run(load("joiners"), 3).trace_hash


def test_a_peer_that_averages_nothing_wants_no_tick_for_the_progress_of_others() -> None:
    """Found here: who had stepped back to fetch a state was woken without end once the others'
    target was met."""
    host = Host(0, 0, 1e6, 1e6, nat=False)
    me, other = (Process(n, peer_id(1, n), host, Role.WORKER, born=0.0, offset=0.0) for n in (0, 1))
    config = preset("lan")
    record = first_record(me, SCHEMA, 7000)
    node = Node(SimSigner(me.peer), record, config, random.Random(1), 0.0, target=10.0)
    told = first_record(other, SCHEMA, 7000)
    busy = SimSigner(other.peer).sign_message(msgspec.structs.replace(told, version=2, rate=5.0))
    node.handle(Received(other.peer, News(Gossip((busy,)))), 0.0)
    node.attach(b"", 10.0, 0.0)
    for _ in range(200):
        assert node.wakeup is not None
        if node.wakeup > 10.0:
            break
        node.handle(Tick(), node.wakeup)
    else:
        pytest.fail(f"wants ticks without end at {node.wakeup}")
