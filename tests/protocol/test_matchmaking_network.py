"""Many matchmakers on a virtual network: all meet, and with faults every seek still ends."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import MatchmakingConfig
from moshpit.protocol import announcement
from moshpit.protocol.hosting import ASSEMBLIES_MAX
from moshpit.protocol.machine import Event, GroupReady, LinkDown, Received, SeekFailed, Tick
from moshpit.protocol.matchmaking import JOINS_MAX, Matchmaker
from moshpit.protocol.ranking import ranked
from moshpit.sim.signer import SimSigner
from moshpit.types import PeerId
from moshpit.wire.messages import (
    Call,
    CallReply,
    GroupFormed,
    GroupKey,
    Join,
    JoinAck,
    JoinRefused,
    Redirect,
    Unjoin,
)

from .harness_matchmaking import (
    MATCHMAKING,
    ROUND,
    SCHEMA,
    StaticView,
    World,
    fields,
    first_key,
    peer_id,
    record,
)

SEEK_S_MAX = 2 * MATCHMAKING.window_s_max + 5 + JOINS_MAX * MATCHMAKING.join_timeout_s
"""The documented bound of one seek."""


def assert_planned(world: World) -> None:
    """Everybody is in exactly the group that the plan says, with all of its members."""
    some = world.members[world.ids[0]]
    ranking = ranked(some.view, SCHEMA, 0, 4)
    assert ranking is not None
    plan, peers = ranking
    for peer, member in world.members.items():
        [ready] = member.groups
        assert member.failures == []
        rank = peers.index(peer)
        ranks = plan.members(0, plan.path(rank, 0))
        assert [join.peer for join in ready.formed.joins] == [peers[r] for r in ranks]
        assert ready.seat == plan.slot(rank, 0)
        following = [plan.path(r, 1) if plan.axes > 1 else () for r in ranks]
        assert list(ready.formed.next_path) == following


def assert_each_once(world: World) -> None:
    """No group holds a peer twice, and no join is in two groups."""
    used: dict[tuple[bytes, int], bytes] = {}
    for member in world.members.values():
        for ready in member.groups:
            formed = ready.formed
            assert len({join.peer for join in formed.joins}) == len(formed.joins)
            for join in formed.joins:
                assert used.setdefault((join.peer, join.nonce), formed.group) == formed.group


@pytest.mark.parametrize("count", range(1, 41))
def test_without_faults_the_groups_are_the_planned_ones(count: int) -> None:
    world = World(count, seed=count)
    world.seek_all(spread_s=0.1)
    world.run(until=30)
    assert_planned(world)
    assert_each_once(world)
    # the last arrival, a join, a call that crosses it, the announcement: 20 ms each at most
    assert max(member.ended_at for member in world.members.values()) < 0.1 + 4 * 0.02
    assert world.messages <= 5 * count


@pytest.mark.parametrize("seed", range(5))
def test_slow_arrivals_meet_too(seed: int) -> None:
    world = World(12, seed)
    for member in world.members.values():
        member.machine.ready_s = 4.0
    world.seek_all(spread_s=4.0)
    world.run(until=40)
    assert_planned(world)


@pytest.mark.parametrize("seed", range(5))
def test_clients_meet_workers(seed: int) -> None:
    world = World(12, seed, clients=frozenset({1, 5, 7}))
    world.seek_all(spread_s=1.0)
    world.run(until=40)
    assert_planned(world)


@pytest.mark.parametrize("seed", range(40))
def test_with_crashes_every_seek_ends(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randrange(2, 30)
    world = World(count, seed, delay_s=(0.001, 0.1))
    world.seek_all(spread_s=1.0)
    for peer in world.ids:
        if rng.random() < 0.3:
            world.crash(peer, when=rng.random() * 1.5, noticed_s=5.0)
    world.run(until=1.0 + SEEK_S_MAX)
    for member in world.members.values():
        if member.alive:
            assert len(member.groups) + len(member.failures) == 1
            assert member.ended_at < 15, "in practice far sooner than the bound"
            assert member.machine.wakeup is None
    assert_each_once(world)


@pytest.mark.parametrize("seed", range(10))
def test_cut_peers_and_differing_views_still_end_in_groups(seed: int) -> None:
    rng = random.Random(seed)
    world = World(16, seed)
    for member in world.members.values():
        others = [peer for peer in world.ids if peer != member.view.me.peer]
        member.view.cut(others[rng.randrange(15)])
        if rng.random() < 0.3:
            member.view.bury(others[rng.randrange(15)])
    world.seek_all(spread_s=0.2)
    world.run(until=SEEK_S_MAX)
    for member in world.members.values():
        assert len(member.groups) == 1
    assert_each_once(world)
    sizes = [len(member.groups[0].formed.joins) for member in world.members.values()]
    assert sum(sizes) / len(sizes) > 2.5, "views that differ a little still give real groups"


@pytest.mark.parametrize("seed", range(5))
def test_one_host_unknown_to_some_still_gives_one_group(seed: int) -> None:
    """Half of the peers believe the first host dead: those at its successor move to it."""
    world = World(4, seed)
    some = world.members[world.ids[0]]
    key = first_key(some.view)
    start = announcement.key_hash(SimSigner(world.ids[0]).run, key)
    host = next(announcement.candidates(some.view, start))
    for peer in [p for p in world.ids if p != host][:2]:
        world.members[peer].view.cut(host)
    world.seek_all(spread_s=0.05)
    world.run(until=10)
    groups = {member.groups[0].formed.group for member in world.members.values()}
    assert len(groups) == 1


def test_a_host_that_dies_between_two_announcements_does_no_harm() -> None:
    """A member that was not told gets the announcement from a groupmate (the node relays it)."""
    world = World(4, seed=3)
    world.seek_all(spread_s=0.01)
    world.run(until=5)
    formed = world.members[world.ids[0]].groups[0].formed
    again = World(4, seed=3)
    late = next(p for p in again.ids if p != formed.host)
    for peer in again.ids:
        # the same joins as in the first world, but the announcement to one is lost
        again.at(0.0, "seek", peer)
    again.run(until=0.0)
    member = again.members[late]
    effects = member.machine.handle(LinkDown(PeerId(formed.host), True, ""), 0.0)
    ready = [e for e in member.machine.announce(formed, 0.1) if isinstance(e, GroupReady)]
    assert [r.formed for r in ready] == [formed]
    assert not any(isinstance(e, SeekFailed) for e in effects)


# --- nothing that can be decoded raises -------------------------------------------------

PEERS = [peer_id(n) for n in range(6)]
peers = st.sampled_from([*PEERS, PeerId(b""), PeerId(b"x" * 40)])
numbers = st.one_of(st.integers(-3, 6), st.integers(-(2**63), 2**64 - 1))
paths = st.one_of(st.just((0,)), st.lists(numbers, max_size=3).map(tuple))
keys = st.one_of(st.just(GroupKey(0, 0, (0,))), st.builds(GroupKey, numbers, numbers, paths))
reals = st.one_of(st.floats(), st.sampled_from([0.0, 1.0, 1e6]))
texts = st.sampled_from(["worker", "client", "aux", "", "king", "x" * 1000])
blobs = st.one_of(st.sampled_from([b"", SCHEMA, b"o" * 16]), st.binary(max_size=80))


@st.composite
def joins(draw: st.DrawFn, peer: PeerId | None = None) -> Join:
    who = peer or draw(peers)
    sane = draw(st.booleans())
    join = Join(
        peer=who,
        key=GroupKey(0, 0, (0,)) if sane else draw(keys),
        nonce=draw(st.integers(1, 3)) if sane else draw(numbers),
        role="worker" if sane else draw(texts),
        schema=SCHEMA if sane else draw(blobs),
        vector_chunks=64 if sane else draw(numbers),
        bandwidth=1e6 if sane else draw(reals),
        weighs=draw(st.booleans()),
        origin=b"" if sane else draw(blobs),
        vector_bytes=0 if sane else draw(numbers),
        insist=draw(st.booleans()),
    )
    return SimSigner(who).sign_message(join) if draw(st.booleans()) or sane else join


@st.composite
def announcements(draw: st.DrawFn) -> GroupFormed:
    host = draw(peers)
    members = draw(st.lists(joins(), max_size=4))
    formed = GroupFormed(
        group=draw(blobs),
        host=host,
        key=draw(keys),
        joins=tuple(members),
        bounds=tuple(draw(st.lists(numbers, max_size=5))),
        next_path=tuple(draw(st.lists(paths, max_size=4))),
        deadline_s=draw(reals),
    )
    return SimSigner(host).sign_message(formed) if draw(st.booleans()) else formed


messages = st.one_of(
    joins(),
    st.builds(JoinAck, keys, numbers),
    st.builds(JoinRefused, keys, numbers, st.sampled_from(["stale", "schema", "x" * 99]),
              st.text(max_size=5), numbers),
    st.builds(Redirect, keys, numbers, st.lists(blobs | peers, max_size=9).map(tuple)),
    st.builds(Unjoin, keys),
    st.builds(Call, keys),
    st.builds(CallReply, keys, st.booleans(), reals),
    announcements(),
)  # fmt: skip


@st.composite
def events(draw: st.DrawFn) -> Event:
    kind = draw(st.integers(0, 9))
    if kind == 0:
        return Tick()
    if kind == 1:
        return LinkDown(draw(peers), draw(st.booleans()), "")
    sender = draw(peers)
    if kind < 5:
        return Received(sender, draw(joins(sender)))
    return Received(sender, draw(messages))


@given(story=st.lists(st.tuples(events(), st.floats(0, 3)), max_size=25), sought=st.booleans())
def test_nothing_that_can_be_decoded_raises(story: list[tuple[Event, float]], sought: bool) -> None:
    me = PEERS[0]
    view = StaticView(me, [record(peer) for peer in PEERS[:4]])
    machine = Matchmaker(SimSigner(me), view, MATCHMAKING, ROUND, random.Random(1))
    now = 0.0
    if sought:
        machine.seek(GroupKey(0, 0, (0,)), fields(), now)
    for event, seconds in story:
        now += seconds
        effects = machine.handle(event, now)
        for effect in effects:
            if isinstance(effect, GroupReady):
                assert effect.formed.joins[effect.seat].peer == me
                assert len(effect.formed.joins) <= MATCHMAKING.group_size_limit
                assert announcement.formed_flaw(effect.formed, SimSigner(me), 64) == ""
        assert len(machine._hosting.assembling) <= ASSEMBLIES_MAX
        msgspec.msgpack.encode([str(effect) for effect in effects])
    # Left alone, all that was begun ends.
    for _ in range(2000):
        if machine.wakeup is None:
            break
        now = max(now, machine.wakeup)
        machine.handle(Tick(), now)
    assert machine.wakeup is None
    assert machine.seeking is None


# --- determinism ------------------------------------------------------------------------

TRACE = """
import hashlib, importlib.util, sys
spec = importlib.util.spec_from_file_location("harness", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["harness"] = module
spec.loader.exec_module(module)
world = module.World(20, seed=5)
world.seek_all(1.0)
for number in (3, 8, 11):
    world.crash(world.ids[number], 0.3, 3.0)
world.run(60)
print(len(world.trace), hashlib.sha256("\\n".join(world.trace).encode()).hexdigest())
"""


def test_the_same_seed_gives_the_same_trace_under_any_hash_seed() -> None:
    harness = Path(__file__).with_name("harness_matchmaking.py")
    outputs = [
        subprocess.run(
            [sys.executable, "-c", TRACE, str(harness)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert int(outputs[0].split()[0]) > 50


def test_a_large_swarm_meets_at_little_cost() -> None:
    world = World(200, seed=1, config=MatchmakingConfig(group_size=16))
    for peer in world.ids:
        key = first_key(world.members[peer].view, group_size=16)
        world.do(peer, world.members[peer].machine.seek(key, fields(), 0.0))
    world.run(until=10)
    assert all(len(member.groups) == 1 for member in world.members.values())
    assert max(member.ended_at for member in world.members.values()) < 0.1
    assert world.messages <= 5 * 200
