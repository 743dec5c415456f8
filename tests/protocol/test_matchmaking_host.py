"""Conversations of a host, event by event, with whole lists of effects."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from moshpit.config import MatchmakingConfig
from moshpit.protocol import announcement
from moshpit.protocol.hosting import ASSEMBLIES_MAX, CALLS_MAX
from moshpit.protocol.machine import (
    Emit,
    GroupReady,
    LinkDown,
    Send,
    Tick,
)
from moshpit.protocol.matchmaking import Matchmaker
from moshpit.sim.signer import SimSigner
from moshpit.wire.messages import (
    Call,
    CallReply,
    GroupFormed,
    GroupKey,
    JoinAck,
    JoinRefused,
    Message,
    Redirect,
    Unjoin,
)

from .harness_joins import (
    KEY,
    STRANGER,
    A,
    B,
    C,
    H,
    formed_in,
    got,
    join,
    make,
    sent,
    view_of,
)
from .harness_matchmaking import MATCHMAKING, ROUND, StaticView, fields, record

# --- the host's side ----------------------------------------------------------------------


def test_the_happy_path_at_the_host_needs_no_timer() -> None:
    host = make(H, (H, A, B))
    assert got(host, A, join(A)) == [
        Send(A, JoinAck(KEY, 1)),
        *[Send(p, Call(KEY)) for p in sorted((H, B)) if p != H],
    ]
    assert host.called == KEY, "the host itself is expected, and is told so without a message"
    assert got(host, B, CallReply(KEY, True, 0.5)) == []
    assert got(host, B, join(B)) == [Send(B, JoinAck(KEY, 1))]
    effects = host.seek(KEY, fields(), 0.0)
    ready = effects[-1] if isinstance(effects[-1], GroupReady) else None
    ready = ready or next(e for e in effects if isinstance(e, GroupReady))
    formed = ready.formed
    assert sorted(map(repr, effects)) == sorted(
        map(repr, [ready, Send(A, formed), Send(B, formed)])
    )
    assert [j.peer for j in formed.joins] == sorted((H, A, B))
    assert formed.joins[ready.seat].peer == H
    assert formed.bounds == (0, 22, 43, 64)
    assert formed.next_path == ((), (), ())
    assert formed.deadline_s == ROUND.deadline_s_min
    assert announcement.formed_flaw(formed, SimSigner(A), 64) == ""
    assert host.wakeup is None


def test_a_group_of_one_is_formed_at_once() -> None:
    alone = make(A, ())
    [ready] = alone.seek(KEY, fields(), 0.0)
    assert isinstance(ready, GroupReady)
    assert ready.formed.bounds == (0, 64)
    assert alone.seeking is None


def test_group_ids_differ_for_every_group_of_a_host() -> None:
    host = make(H, ())
    ids = []
    for _ in range(3):
        [ready] = host.seek(KEY, fields(), 0.0)
        assert isinstance(ready, GroupReady)
        ids.append(ready.formed.group)
    assert len(set(ids)) == 3


def test_an_unexpected_newcomer_is_welcome_and_sits_behind_the_planned() -> None:
    host = make(H, (H, A))
    got(host, A, join(A))
    assert got(host, STRANGER, join(STRANGER)) == [Send(STRANGER, JoinAck(KEY, 1))]
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    assert [j.peer for j in formed.joins] == [*sorted((H, A)), STRANGER]


def test_a_newcomer_takes_the_slot_of_an_expected_peer_that_is_dead() -> None:
    host = make(H, (H, A, B))
    view_of(host).cut(B)
    got(host, STRANGER, join(STRANGER))
    got(host, A, join(A))
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    seats = [STRANGER if p == B else p for p in sorted((H, A, B))]
    assert [j.peer for j in formed.joins] == seats


def test_unreachable_peers_are_not_called_nor_waited_for() -> None:
    host = make(H, (H, A, B))
    view_of(host).cut(B)
    got(host, A, join(A))
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    assert [j.peer for j in formed.joins] == sorted((H, A))


def test_a_peer_whose_link_goes_down_is_not_waited_for_any_more() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    host.seek(KEY, fields(), 0.0)
    effects = host.handle(LinkDown(B, True, ""), 0.1)
    assert [j.peer for j in formed_in(effects).joins] == sorted((H, A))


def test_a_death_in_the_view_ends_the_waiting_at_the_next_tick() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    host.seek(KEY, fields(), 0.0)
    got(host, B, CallReply(KEY, True, 20.0))
    view_of(host).bury(B)
    assert [j.peer for j in formed_in(host.handle(Tick(), 0.1)).joins] == sorted((H, A))


def test_a_called_peer_that_declines_is_not_waited_for() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    host.seek(KEY, fields(), 0.0)
    effects = got(host, B, CallReply(KEY, False, -1.0))
    assert [j.peer for j in formed_in(effects).joins] == sorted((H, A))


def test_a_silent_peer_is_called_again_and_then_given_up() -> None:
    host = make(H, (H, A, B))
    calls = len(sent(got(host, A, join(A)), B))
    host.seek(KEY, fields(), 0.0)
    now, formed = 0.0, None
    while formed is None:
        assert host.wakeup is not None
        now = host.wakeup
        effects = host.handle(Tick(), now)
        calls += sum(isinstance(m, Call) for m in sent(effects, B))
        formed = next((e.formed for e in effects if isinstance(e, GroupReady)), None)
    assert calls == CALLS_MAX
    assert now == pytest.approx(1.5 * MATCHMAKING.call_timeout_s)
    assert [j.peer for j in formed.joins] == sorted((H, A))


@pytest.mark.parametrize(
    ("ready_s", "latest"),
    [(0.0, 10.0), (2.0, 10.0), (8.0, 16.5), (1e9, 30.0), (-1.0, 10.0), (math.nan, 10.0)],
)
def test_peers_that_say_they_come_are_waited_for_up_to_the_window(
    ready_s: float, latest: float
) -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    host.seek(KEY, fields(), 0.0)
    got(host, B, CallReply(KEY, True, ready_s))
    now, formed = 0.0, None
    while formed is None:
        assert host.wakeup is not None
        now = max(host.wakeup, now)
        effects = host.handle(Tick(), now)
        if Send(B, Call(KEY)) in effects:
            effects += got(host, B, CallReply(KEY, True, ready_s), now)
        formed = next((e.formed for e in effects if isinstance(e, GroupReady)), None)
    assert now == pytest.approx(latest)


def test_members_are_acknowledged_again_while_the_group_assembles() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    got(host, B, CallReply(KEY, True, -1.0))
    acks = [
        t / 100 for t in range(1, 106) if Send(A, JoinAck(KEY, 1)) in host.handle(Tick(), t / 100)
    ]
    assert len(acks) == 3
    assert acks[0] <= MATCHMAKING.join_timeout_s / 2


def test_the_window_follows_the_measured_spread() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A), 0.0)
    got(host, B, CallReply(KEY, True, -1.0), 0.0)
    got(host, B, join(B), 0.4)
    host.seek(KEY, fields(), 0.4)
    key = GroupKey(0, 0, (0,))
    got(host, A, join(A, 2), 100.0)
    host.seek(key, fields(), 100.0)
    got(host, B, CallReply(KEY, True, -1.0), 100.0)
    now = 100.0
    while host.seeking:
        assert host.wakeup is not None
        now = host.wakeup
        for effect in host.handle(Tick(), now):
            if effect == Send(B, Call(KEY)):
                got(host, B, CallReply(KEY, True, -1.0), now)
    assert now == pytest.approx(100 + 4 * 0.4 + 1)


def test_a_group_closes_at_the_size_limit() -> None:
    host = make(H, (H, A, B), MatchmakingConfig(group_size=4, group_size_limit=2))
    got(host, A, join(A))
    formed = formed_in(got(host, STRANGER, join(STRANGER)))
    assert [j.peer for j in formed.joins] == [A, STRANGER]


def test_the_same_join_again_is_answered_with_the_same_group() -> None:
    host = make(H, (H, A))
    first = got(host, A, join(A))
    assert got(host, A, join(A)) == [e for e in first if e.peer == A]  # type: ignore[union-attr]
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    assert [j.peer for j in formed.joins] == sorted((H, A))
    assert got(host, A, join(A)) == [Send(A, formed)]


def test_a_newer_join_replaces_the_older_and_an_older_one_is_refused() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A, 5))
    got(host, A, join(A, 6, bandwidth=7.0))
    [refusal] = got(host, A, join(A, 4))
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, JoinRefused)
    assert refusal.message.reason == "replayed"
    got(host, B, join(B))
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    assert [(j.nonce, j.bandwidth) for j in formed.joins if j.peer == A] == [(6, 7.0)]


def test_an_unjoined_member_is_called_back_once_and_then_let_go() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    host.seek(KEY, fields(), 0.0)
    assert got(host, A, Unjoin(KEY)) == [Send(A, Call(KEY))]
    assert got(host, A, CallReply(KEY, False, -1.0)) == []
    effects = got(host, B, join(B))
    assert [j.peer for j in formed_in(effects).joins] == sorted((H, B))


def test_clients_are_waited_for_without_being_called() -> None:
    roles = {B: "client"}
    host = make(H, (H, A, B), roles=roles)
    assert sent(got(host, A, join(A)), B) == []
    host.seek(KEY, fields(), 0.0)
    assert host.handle(LinkDown(B, False, "no address"), 0.1) == []
    formed = formed_in(got(host, B, join(B, role="client"), 0.2))
    assert [j.peer for j in formed.joins] == sorted((H, A, B))
    seat = [j.peer for j in formed.joins].index(B)
    assert formed.bounds[seat] == formed.bounds[seat + 1]


def test_a_client_with_a_connection_to_the_host_is_called_and_may_decline() -> None:
    host = make(H, (H, A, B), roles={B: "client"})
    view_of(host).links[B] = True
    assert sent(got(host, A, join(A)), B) == [Call(KEY)]
    host.seek(KEY, fields(), 0.0)
    formed = formed_in(got(host, B, CallReply(KEY, False, -1.0), 0.1))
    assert [j.peer for j in formed.joins] == sorted((H, A))


def test_a_called_client_whose_connection_is_lost_is_not_waited_for() -> None:
    host = make(H, (H, A, B), roles={B: "client"})
    view_of(host).links[B] = True
    got(host, A, join(A))
    host.seek(KEY, fields(), 0.0)
    formed = formed_in(host.handle(LinkDown(B, False, "no address"), 0.1))
    assert [j.peer for j in formed.joins] == sorted((H, A))


def test_nobody_is_waited_for_who_is_known_to_be_at_a_later_epoch() -> None:
    host = make(H, (H, A, B), roles={B: "client"})
    view_of(host).bury(B)
    view_of(host).learn(msgspec.structs.replace(record(B, "client"), epoch=KEY.epoch + 1))
    got(host, A, join(A))
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    assert [j.peer for j in formed.joins] == sorted((H, A))


def test_a_group_of_clients_only_is_refused_with_what_to_start() -> None:
    roles = {A: "client", B: "client"}
    host = make(H, (H, A, B), roles=roles)
    host.declines = True
    got(host, A, join(A, role="client"))
    effects = got(host, B, join(B, role="client"))
    for peer in (A, B):
        [message] = [m for m in sent(effects, peer) if isinstance(m, JoinRefused)]
        assert message.reason == "no-reducer"
        assert "start at least one" in message.detail


def test_an_auxiliary_peer_is_a_member() -> None:
    host = make(H, (H, A), roles={A: "aux"})
    got(host, A, join(A, role="aux", weighs=False))
    formed = formed_in(host.seek(KEY, fields(), 0.0))
    assert [(j.peer, j.role) for j in formed.joins if j.peer == A] == [(A, "aux")]


def test_auxiliary_peers_take_over_reducing_by_bandwidth() -> None:
    slow, fast = 2e6, 100e6
    roles = {A: "aux", B: "client"}
    host = make(H, (H, A, B, C), roles=roles)
    got(host, A, join(A, role="aux", weighs=False, bandwidth=fast))
    got(host, B, join(B, role="client", bandwidth=fast))
    got(host, C, join(C, bandwidth=slow))
    formed = formed_in(host.seek(KEY, fields(bandwidth=slow), 0.0))
    seats = {j.peer: seat for seat, j in enumerate(formed.joins)}
    parts = {p: formed.bounds[s + 1] - formed.bounds[s] for p, s in seats.items()}
    assert parts == {A: 64, B: 0, C: 0, H: 0}

    # Among equals everybody that can be dialled has a part, and the client has none.
    host = make(H, (H, A, B, C), roles=roles)
    got(host, A, join(A, role="aux", weighs=False, bandwidth=slow))
    got(host, B, join(B, role="client", bandwidth=fast))
    got(host, C, join(C, bandwidth=slow))
    formed = formed_in(host.seek(KEY, fields(bandwidth=slow), 0.0))
    parts = {j.peer: formed.bounds[s + 1] - formed.bounds[s] for s, j in enumerate(formed.joins)}
    assert parts[B] == 0
    assert min(parts[A], parts[C], parts[H]) >= 21


def test_the_deadline_has_time_for_the_slowest_to_fill_its_vector() -> None:
    host = make(H, (H, A))
    got(host, A, join(A, fill_s=40.0))
    formed = formed_in(host.seek(KEY, fields(fill_s=3.0), 0.0))
    assert formed.deadline_s == 2 * 40.0 + ROUND.deadline_s_min
    assert announcement.formed_flaw(formed, SimSigner(A), 64) == ""


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"schema": b"other..."}, "schema"),
        ({"bandwidth": math.nan}, "malformed"),
        ({"bandwidth": -1.0}, "malformed"),
        ({"bandwidth": math.inf}, "malformed"),
        ({"fill_s": math.nan}, "malformed"),
        ({"fill_s": -1.0}, "malformed"),
        ({"fill_s": 1e9}, "malformed"),
        ({"role": "king"}, "malformed"),
        ({"role": "client"}, "role"),
        ({"schema": b""}, "malformed"),
        ({"schema": b"x" * 65}, "malformed"),
        ({"vector_chunks": 0}, "malformed"),
        ({"vector_chunks": 1 << 40}, "malformed"),
        ({"vector_bytes": -1}, "malformed"),
        ({"nonce": 0}, "malformed"),
        ({"nonce": 1 << 63}, "malformed"),
        ({"origin": b"short"}, "malformed"),
        ({"key": GroupKey(-1, 0, (0,))}, "malformed"),
        ({"key": GroupKey(0, 0, ())}, "malformed"),
        ({"key": GroupKey(0, 1, (0,))}, "malformed"),
        ({"key": GroupKey(0, 10**9, (0,))}, "malformed"),
        ({"key": GroupKey(0, 0, (-1,))}, "malformed"),
        ({"key": GroupKey(99, 0, (0,))}, "early"),
    ],
)
def test_joins_that_make_no_sense_are_refused_by_name(
    changes: dict[str, object], reason: str
) -> None:
    host = make(H, (H, A))
    bad = join(A, **changes)  # type: ignore[arg-type]
    notice, refusal = got(host, A, bad)
    assert isinstance(notice, Emit)
    assert (notice.notice.code, notice.notice.peer) == ("refused", A)
    assert reason in notice.notice.detail
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, JoinRefused)
    assert refusal == Send(A, JoinRefused(bad.key, bad.nonce, reason, refusal.message.detail, 0))
    assert host.wakeup is None


def test_forged_joins_are_refused_and_the_sender_is_named() -> None:
    host = make(H, (H, A, B))
    for forged in (join(B), msgspec.structs.replace(join(A), bandwidth=5.0, signature=b"?")):
        notice, refusal = got(host, A, forged)
        assert isinstance(notice, Emit)
        assert notice.notice.peer == A
        assert "forged" in notice.notice.detail
        assert isinstance(refusal, Send)
        assert refusal.peer == A


def test_a_join_of_another_cut_is_refused_while_the_first_assembles() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    notice, refusal = got(host, B, join(B, vector_chunks=65))
    assert isinstance(notice, Emit)
    assert notice.notice.peer == B
    assert isinstance(refusal, Send)
    assert isinstance(refusal.message, JoinRefused)
    assert refusal.message.reason == "schema"
    assert "64" in refusal.message.detail


def test_a_join_of_an_epoch_that_is_over_is_refused_with_the_swarms_epoch() -> None:
    host = make(H, (H, A, B))
    got(host, A, join(A))
    host.epoch = 3
    assert got(host, B, join(B)) == [Send(B, JoinAck(KEY, 1))], "it assembles already"
    late = GroupKey(2, 0, (0,))
    [refusal] = got(host, B, join(B, 2, key=late))
    assert refusal == Send(B, JoinRefused(late, 2, "stale", "epoch 2 is over", 3))


def test_groups_that_a_fault_has_held_up_may_still_finish_the_epoch() -> None:
    """Their host was quicker: its own groups had no dead member to wait for."""

    def at_epoch(before: int, now: int) -> Matchmaker:
        made = make(H, (H, A, B))
        made.epoch = before
        made.advance(now, now=10.0)
        return made

    late, long_over = GroupKey(2, 1, (0, 0)), GroupKey(1, 1, (0, 0))
    [formed] = sent(got(at_epoch(2, 3), A, join(A, 2, key=late), 10.1), A)
    assert isinstance(formed, GroupFormed)
    for key, now in ((GroupKey(2, 0, (0,)), 10.1), (long_over, 10.1), (late, 99.0)):
        [refusal] = sent(got(at_epoch(2, 3), B, join(B, 3, key=key), now), B)
        assert isinstance(refusal, JoinRefused), f"{key} at {now}"
        assert refusal.reason == "stale"
    [refusal] = sent(got(at_epoch(2, 5), B, join(B, 3, key=GroupKey(4, 1, (0, 0))), 10.1), B)
    assert isinstance(refusal, JoinRefused), "who has jumped took no part in that epoch"


def test_the_host_redirects_to_a_better_host_unless_the_joiner_insists() -> None:
    second = make(A, (H, A, B))
    assert got(second, B, join(B, 7)) == [Send(B, Redirect(KEY, 7, (H,)))]
    assert got(second, B, join(B, 8, insist=True))[0] == Send(B, JoinAck(KEY, 8))
    view_of(second).cut(H)
    third = make(B, (H, A, B, C))
    assert got(third, C, join(C)) == [Send(C, Redirect(KEY, 1, (H, A)))]


def test_two_hosts_merge_at_the_better_one() -> None:
    # A assembles because B could not find H; then a member says that H assembles too.
    second = make(A, (H, A, B, C))
    second.seek(KEY, fields(), 0.0)
    view_of(second).cut(H)
    got(second, B, join(B))
    view_of(second)._cut.clear()
    effects = got(second, C, Redirect(KEY, 0, (H,)))
    assert Send(B, Redirect(KEY, 1, (H,))) in effects
    assert second.wakeup is not None  # it still seeks, at H


def test_the_number_of_assemblies_is_bounded() -> None:
    host = make(H, (H, A, B))
    last: list[Message] = []
    for epoch in range(ASSEMBLIES_MAX + 1):
        host.epoch = epoch
        last = sent(got(host, A, join(A, epoch + 1, key=GroupKey(epoch, 0, (0,)), insist=True)), A)
        assert any(isinstance(m, JoinAck) for m in last) == (epoch < ASSEMBLIES_MAX)
    [refusal] = last
    assert isinstance(refusal, JoinRefused)
    assert refusal.reason == "full"


def test_a_host_that_knows_of_fewer_peers_than_its_joiner_waits_for_the_news() -> None:
    view = StaticView(H, [record(peer) for peer in (H, A)])
    host = Matchmaker(SimSigner(H), view, MATCHMAKING, ROUND, random.Random(0))
    got(host, A, join(A, planned=3))
    assert host.seek(KEY, fields(), 0.0) == [], "all that the view has are here; one is missing"
    assert host.wakeup is not None
    assert host.wakeup <= MATCHMAKING.call_timeout_s

    view.learn(record(B))
    assert host.handle(Tick(), 0.01) == [Send(B, Call(KEY))]
    effects = got(host, B, join(B, planned=3), 0.02)
    assert {e.peer for e in effects if isinstance(e, Send)} == {A, B}
    [ready] = [e for e in effects if isinstance(e, GroupReady)]
    assert sorted(j.peer for j in ready.formed.joins) == sorted((A, B, H))


def test_news_that_do_not_come_are_not_waited_for_long() -> None:
    host = make(H, (H, A))
    got(host, A, join(A, planned=3))
    host.seek(KEY, fields(), 0.0)
    now, sizes = 0.0, []
    while not sizes:
        assert host.wakeup is not None
        now = max(now, host.wakeup)
        effects = host.handle(Tick(), now)
        sizes = [len(e.formed.joins) for e in effects if isinstance(e, GroupReady)]
    assert sizes == [2]
    assert 0.0 < now < MATCHMAKING.call_timeout_s


def test_a_member_that_still_waits_at_a_dead_host_is_waited_for() -> None:
    view = StaticView(A, [record(peer) for peer in (H, A, B)])
    host = Matchmaker(SimSigner(A), view, MATCHMAKING, ROUND, random.Random(0))
    view.cut(H)  # the first host has died; B has not seen it yet
    host.seek(KEY, fields(), 0.0)
    assert got(host, B, Redirect(KEY, 0, (H,)), 0.01) == []
    assert host.wakeup is not None, "it is not given up"
    effects = got(host, B, join(B), 0.02)
    [ready] = [e for e in effects if isinstance(e, GroupReady)]
    assert sorted(j.peer for j in ready.formed.joins) == sorted((A, B))
