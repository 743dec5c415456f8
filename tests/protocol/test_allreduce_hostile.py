"""Rounds with members that send nonsense: it is refused by name, and nothing is ever raised."""

from __future__ import annotations

from fractions import Fraction
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.events import Outcome
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.machine import ChunkArrived, Effect, Event, LinkDown, Received, Tick
from moshpit.sim.signer import SimSigner
from moshpit.types import PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import (
    Beat,
    GroupAsk,
    Held,
    MemberDone,
    Message,
    Ping,
    Redo,
    Refusal,
    RoundOver,
    Takeover,
    Want,
)

from .harness_allreduce import CONFIG, DEADLINE_S, GROUP, Value, World, group_of, peer_of
from .test_allreduce_faults import random_world

HEADERS = {
    "bad mass": {"mass": float("nan")},
    "negative mass": {"mass": -5.0},
    "infinite mass": {"mass": float("inf")},
    "chunk out of range": {"chunk": 10**6},
    "absurd ballot": {"ballot": 60_000},
}


def _replace(header: ChunkHeader, **changes: object) -> ChunkHeader:
    fields = {name: getattr(header, name) for name in header.__struct_fields__}
    return ChunkHeader(**{**fields, **changes})


@pytest.mark.parametrize("flaw", [*HEADERS, "non-finite", "wrong-size", "undecodable"])
@pytest.mark.parametrize("kind", [ChunkKind.CONTRIBUTION, ChunkKind.RESULT])
def test_a_member_whose_chunks_are_bad_hurts_nobody_but_itself(flaw: str, kind: ChunkKind) -> None:
    world = World(3, 8, ["worker"] * 4, [[1.0] * 8] * 4)

    def tamper(source: int, target: int, header: ChunkHeader) -> tuple[ChunkHeader, str]:
        if source != 1 or header.kind is not kind:
            return header, ""
        if flaw in HEADERS:
            return _replace(header, **HEADERS[flaw]), ""
        return header, flaw

    world.tamper = tamper
    world.run().check()
    honest = [p for p in world.processes if p.seat != 1]
    for process in honest:
        report = process.report
        assert report is not None
        assert report.missing == ()
        assert process.ended_at is not None
        assert process.ended_at < 5.0
        if kind is ChunkKind.CONTRIBUTION:
            # Where it reduces itself, its own value counts; elsewhere it is out.
            outside = [c for c in range(8) if c not in (2, 3)]
            assert all(report.ledger[c] == 0b1101 for c in outside)
    blamed = {b.peer[0] for p in honest for b in (p.report.blames if p.report else ())}
    assert blamed == {1}
    assert len({tuple(world.identity(p)) for p in honest}) == 1


def test_one_bad_chunk_leaves_what_is_in_and_keeps_the_rest_out() -> None:
    world = World(3, 8, ["worker"] * 2, [[1.0] * 8] * 2)
    seen: list[int] = []

    def tamper(source: int, target: int, header: ChunkHeader) -> tuple[ChunkHeader, str]:
        if source == 1 and header.kind is ChunkKind.CONTRIBUTION:
            seen.append(header.chunk)
            if len(seen) == 3:
                return header, "non-finite"
        return header, ""

    world.tamper = tamper
    world.run().check()
    report = world.processes[0].report
    assert report is not None
    assert report.ledger[:4] == (0b11, 0b11, 0b01, 0b01)
    assert report.outcome is Outcome.PARTIAL
    assert [(b.peer[0], b.reason) for b in report.blames] == [(1, "non-finite")]


def test_chunks_that_are_nobodys_business_change_nothing() -> None:
    """A member sends, at any moment, results that it neither made nor was asked for, and
    contributions again: what the others hold is what was made."""
    for seed in range(150):
        world, rng = random_world(seed), Random(seed + 1)
        forger = rng.randrange(world.size)
        for _ in range(30):
            target = rng.choice([s for s in range(world.size) if s != forger])
            if world.roles[target] == world.roles[forger] == "client":
                continue
            header = ChunkHeader(
                rng.choice(list(ChunkKind)),
                rng.randrange(world.size),
                rng.randrange(world.chunks),
                4,
                0,
                GROUP,
                world.processes[forger].masses[0] or 1.0,
                1 << rng.randrange(world.size),
            )
            world.at(
                rng.random() * 0.5, lambda w=world, h=header, t=target, f=forger: _forge(w, h, t, f)
            )
        world.run().check()


def _forge(world: World, header: ChunkHeader, target: int, forger: int) -> None:
    process = world.processes[target]
    machine = process.machine
    if machine is None or machine.closed:
        return
    value = Value(Fraction(777_777), forger)
    part = machine._ledger.part_of(header.chunk)
    if header.kind is ChunkKind.RESULT:
        mine = (part + header.ballot) % world.size == forger or machine._round.acting(
            part
        ) == forger
        if mine or machine._serving.asked[forger] >> header.chunk & 1:
            return  # a reducer can lie about its own part; that is not what is tested
    else:
        share = machine._round.formed.joins[forger]
        value = Value(world.processes[forger].local[header.chunk], forger)
        if not share.weighs or share.origin:
            return
    event = ChunkArrived(peer_of(forger), header, "")
    world.deliver(process, event, value)


masks = st.one_of(st.binary(max_size=4), st.binary(min_size=200, max_size=300))
numbers = st.one_of(st.integers(-3, 9), st.integers(-(2**63), 2**63 - 1))
messages: st.SearchStrategy[Message] = st.one_of(
    st.just(Beat(GROUP)),
    st.just(GroupAsk(GROUP)),
    st.just(MemberDone(GROUP)),
    st.builds(Takeover, st.just(GROUP), numbers, numbers),
    st.builds(Held, st.just(GROUP), numbers, numbers, masks),
    st.builds(Redo, st.just(GROUP), numbers, numbers, masks),
    st.builds(Want, st.just(GROUP), masks),
    st.builds(RoundOver, st.just(GROUP), numbers),
    st.builds(Refusal, st.just(GROUP), st.sampled_from(["lost", "", "x" * 999]), st.text()),
    st.builds(Ping, numbers),
)
headers = st.builds(
    ChunkHeader,
    kind=st.sampled_from(ChunkKind),
    ballot=st.one_of(st.integers(0, 5), st.integers(0, 65535)),
    chunk=st.one_of(st.integers(0, 8), st.integers(0, 2**32 - 1)),
    length=st.just(4),
    codec=st.integers(0, 255),
    group=st.just(GROUP),
    mass=st.one_of(st.just(1.0), st.floats()),
    seats=st.one_of(st.integers(0, 31), st.integers(0, 2**64 - 1)),
)
peers = st.one_of(st.integers(0, 4).map(peer_of), st.just(PeerId(b"?" * 32)))
events: st.SearchStrategy[Event] = st.one_of(
    st.builds(Received, peers, messages),
    st.builds(Received, peers, st.just(Beat(GROUP))),
    st.builds(ChunkArrived, peers, headers, st.sampled_from(["", "", "non-finite"])),
    st.builds(LinkDown, peers, st.booleans(), st.text(max_size=5)),
    st.just(Tick()),
)


@given(
    st.lists(st.tuples(events, st.floats(0.0, 0.4)), max_size=60),
    st.integers(0, 4),
    st.lists(st.sampled_from(["worker", "client", "aux"]), min_size=5, max_size=5),
)
def test_whatever_arrives_nothing_is_raised_and_the_round_ends(
    story: list[tuple[Event, float]], seat: int, roles: list[str]
) -> None:
    if set(roles) == {"client"}:
        roles = ["worker", *roles[1:]]
    formed = group_of(7, roles, weighs=[role != "aux" for role in roles])
    masses = [0.0 if roles[seat] == "aux" else 1.0] * 7
    machine = AllReduce(formed, seat, masses, SimSigner(peer_of(seat)), CONFIG, 0.0)
    effects: list[Effect] = machine.start(0.0)
    now = 0.0
    for event, pause in story:
        now += pause
        effects += machine.handle(event, now)
    while machine.wakeup is not None:
        assert now <= DEADLINE_S + CONFIG.linger_s + 1.0
        now = max(now, machine.wakeup)
        effects += machine.handle(Tick(), now)
    assert machine.ended
    assert machine.closed
    assert machine.report is not None
    assert len(machine.masses_after) == 7
    assert machine.report.contributors() is not None
