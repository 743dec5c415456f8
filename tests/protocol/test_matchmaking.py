"""Conversations of a peer that seeks, event by event, with whole lists of effects."""

from __future__ import annotations

import math
import random

import msgspec
import pytest

from moshpit.config import MatchmakingConfig
from moshpit.events import Notice
from moshpit.identity.keys import KeySigner, PeerKey
from moshpit.protocol import announcement
from moshpit.protocol.machine import (
    Emit,
    GroupReady,
    LinkDown,
    SeekFailed,
    Send,
    Silent,
    Tick,
)
from moshpit.protocol.matchmaking import JoinFields, Matchmaker
from moshpit.sim.signer import SimSigner
from moshpit.types import PeerId, RunId
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

from .harness_joins import (
    KEY,
    STRANGER,
    A,
    B,
    C,
    H,
    got,
    group_of,
    join,
    make,
    sent,
    view_of,
)
from .harness_matchmaking import MATCHMAKING, ROUND, StaticView, fields, peer_id, record

# --- the seeker's side --------------------------------------------------------------------


def seeking(me: PeerId = A, others: tuple[PeerId, ...] = (H, A, B), **said: object) -> Matchmaker:
    """Return a peer that has just joined at H."""
    machine = make(me, others)
    [effect] = machine.seek(KEY, fields(**said), 0.0)  # type: ignore[arg-type]
    assert effect == Send(H, join(me, **said))
    return machine


def test_the_happy_path_of_a_member() -> None:
    member = seeking()
    assert got(member, H, JoinAck(KEY, 1), 0.1) == []
    assert member.wakeup == pytest.approx(1.1)
    formed = group_of(join(A), join(B))
    assert got(member, H, formed, 0.2) == [GroupReady(formed, 0)]
    assert member.seeking is None
    assert member.wakeup is None
    assert got(member, H, formed, 0.3) == [], "a second announcement is ignored"


def test_a_host_that_dies_is_replaced_by_its_successor_at_once() -> None:
    member = make(B, (H, A, B))
    assert member.seek(KEY, fields(), 0.0) == [Send(H, join(B))]
    assert member.handle(LinkDown(H, True, "refused"), 0.1) == [
        Emit(Notice("host-passed-over", H, "lost")),
        Send(A, join(B, 2)),
    ]


def test_a_silent_host_is_passed_over() -> None:
    member = make(B, (H, A, B))
    member.seek(KEY, fields(), 0.0)
    got(member, H, JoinAck(KEY, 1), 0.5)
    assert member.handle(Tick(), 1.0) == []
    assert member.handle(Tick(), 1.5) == [
        Emit(Notice("host-passed-over", H, "silent")),
        Silent(H),
        Send(H, Unjoin(KEY)),
        Send(A, join(B, 2)),
    ]


def test_after_the_hosts_death_a_groupmate_passes_its_announcement_on() -> None:
    member = seeking(B)
    member.handle(LinkDown(H, True, "refused"), 0.1)
    formed = group_of(join(B), join(C))
    assert member.announce(formed, 0.2) == [GroupReady(formed, 0), Send(A, Unjoin(KEY))]


def test_a_seek_with_no_host_left_fails() -> None:
    member = make(A, (H, A), roles={A: "client"})
    member.epoch = 0
    assert member.seek(KEY, fields(role="client"), 0.0) == [Send(H, join(A, role="client"))]
    effects = member.handle(LinkDown(H, True, "refused"), 0.1)
    assert effects[-1] == SeekFailed("lost", 0)
    assert member.seeking is None


def test_a_client_alone_has_no_host() -> None:
    member = make(A, (), roles={A: "client"})
    assert member.seek(KEY, fields(role="client"), 0.0)[-1] == SeekFailed("no-host", 0)


def test_redirects_are_followed_twice_and_then_the_joiner_insists() -> None:
    member = make(C, (H, A, B, C))
    member.seek(KEY, fields(), 0.0)
    assert got(member, H, Redirect(KEY, 1, (A, B))) == [Send(A, join(C, 2))]
    assert got(member, A, Redirect(KEY, 2, (B,))) == [Send(B, join(C, 3, insist=True))]
    assert got(member, H, Redirect(KEY, 1, (A,))) == [], "an answer to an old join"


def test_a_redirect_to_nobody_i_can_reach_makes_me_insist() -> None:
    member = seeking()
    effects = got(member, H, Redirect(KEY, 1, (STRANGER, b"", b"x" * 500)))
    assert effects == [Send(H, join(A, 2, insist=True))]


def test_refusals() -> None:
    member = seeking(B)
    effects = got(member, H, JoinRefused(KEY, 1, "full", "64 groups here", 0))
    assert effects[-1] == Send(A, join(B, 2))
    member = seeking(B)
    assert got(member, H, JoinRefused(KEY, 1, "stale", "", 9))[-1] == SeekFailed("stale", 9)
    member = seeking(B)
    lie = got(member, H, JoinRefused(KEY, 1, "stale", "", 0))
    assert lie[-1] == Send(A, join(B, 2)), "not later than my own epoch: the next host decides"
    member = seeking(B)
    got(member, H, JoinRefused(KEY, 1, "schema", "", 0))
    assert got(member, A, JoinRefused(KEY, 2, "schema", "", 0))[-1] == SeekFailed("schema", 0)
    member = seeking(B)
    alone = got(member, H, JoinRefused(KEY, 1, "no-reducer", "", 0))
    assert alone[-1] == SeekFailed("no-reducer", 0)


def bad_groups() -> dict[str, GroupFormed]:
    """Return announcements that a member A of nonce 1 must refuse, by what is wrong."""
    good = group_of(join(A), join(B))
    mine, other = join(A), join(B)
    return {
        "without me": group_of(other),
        "an old join": group_of(join(A, 9), other),
        "altered join": group_of(join(A, 1, bandwidth=1.0), other),
        "unsigned": msgspec.structs.replace(good, signature=b""),
        "another's signature": SimSigner(B).sign_message(good),
        "another host": group_of(mine, other, host=C),
        "forged join": group_of(mine, msgspec.structs.replace(other, signature=b"")),
        "twice": group_of(mine, other, other),
        "another vector": group_of(mine, join(B, 1, vector_chunks=65)),
        "another key": group_of(mine, join(B, 1, key=GroupKey(0, 0, (1,)))),
        "nan": group_of(mine, join(B, 1, bandwidth=math.nan)),
        "gap": group_of(mine, other, bounds=(0, 60)),
        "short": group_of(mine, other, bounds=(0, 10, 63)),
        "falling": group_of(mine, other, bounds=(0, 65, 64)),
        "negative": group_of(mine, other, bounds=(0, -1, 64)),
        "client": group_of(mine, join(B, 1, role="client"), bounds=(0, 60, 64)),
        "few paths": group_of(mine, other, next_path=((),)),
        "long path": group_of(mine, other, next_path=((1, 2, 3), (1, 2))),
        "one path": group_of(mine, other, next_path=((1, 2), ())),
        "deadline": group_of(mine, other, deadline_s=math.nan),
        "no deadline": group_of(mine, other, deadline_s=0.0),
        "id": group_of(mine, other, group=b"short"),
    }


@pytest.mark.parametrize("what", list(bad_groups()))
def test_announcements_that_break_a_rule_are_refused_and_the_seek_goes_on(what: str) -> None:
    member = make(A, (H, A, B, C), roles={A: "worker"})
    member.seek(KEY, fields(), 0.0)
    effects = got(member, H, bad_groups()[what])
    assert isinstance(effects[0], Emit)
    assert (effects[0].notice.code, effects[0].notice.peer) == ("refused", H)
    assert not any(isinstance(e, GroupReady) for e in effects)
    assert member.seeking == KEY
    assert Send(H, Unjoin(KEY)) in effects
    elsewhere = member.announce(bad_groups()[what], 0.1)
    assert [type(e) for e in elsewhere] == [Emit]


def test_an_announcement_of_many_is_refused() -> None:
    member = make(A, (H, A), MatchmakingConfig(group_size=4, group_size_limit=4))
    member.seek(KEY, fields(), 0.0)
    joins = [join(A), *(join(peer_id(50 + n)) for n in range(4))]
    effects = got(member, H, group_of(*joins))
    assert effects[0] == Emit(Notice("refused", H, "group: 5 members"))


def test_calls_are_answered_with_what_the_node_says() -> None:
    idle = make(A, (H, A, B))
    idle.epoch = 5
    idle.ready_s = 1.25
    now_key = GroupKey(5, 0, (0,))
    assert got(idle, H, Call(now_key)) == [Send(H, CallReply(now_key, True, 1.25))]
    assert idle.called == now_key
    old, far = GroupKey(4, 0, (0,)), GroupKey(50, 0, (0,))
    assert got(idle, H, Call(old)) == [Send(H, CallReply(old, False, -1.0))]
    assert got(idle, H, Call(far)) == [Send(H, CallReply(far, False, -1.0))]
    assert idle.called == now_key
    newer = GroupKey(6, 1, (0, 0))
    got(idle, H, Call(newer))
    assert idle.called == newer
    idle.declines = True
    assert got(idle, H, Call(now_key)) == [Send(H, CallReply(now_key, False, -1.0))]
    idle.epoch = 7
    assert idle.called is None


def test_a_call_is_forgotten_when_its_key_is_sought() -> None:
    idle = make(A, (H, A, B))
    got(idle, H, Call(KEY))
    assert idle.called == KEY
    idle.seek(KEY, fields(), 0.0)
    assert idle.called is None


def test_calls_for_groups_that_i_cannot_come_to_any_more_are_declined() -> None:
    member = seeking()
    elsewhere = GroupKey(0, 0, (1,))
    assert got(member, B, Call(elsewhere)) == [Send(B, CallReply(elsewhere, False, -1.0))]
    later = GroupKey(0, 1, (0, 0))
    assert got(member, B, Call(later)) == [Send(B, CallReply(later, True, -1.0))]
    got(member, H, group_of(join(A), join(B)))
    assert got(member, B, Call(KEY)) == [Send(B, CallReply(KEY, False, -1.0))]


def test_a_call_from_my_own_host_is_confirmed() -> None:
    member = seeking()
    assert got(member, H, Call(KEY)) == [Send(H, CallReply(KEY, True, 0.0))]


def test_a_call_from_a_better_host_moves_me_there() -> None:
    member = make(B, (H, A, B))
    member.seek(KEY, fields(), 0.0)
    member.handle(LinkDown(H, True, "refused"), 0.1)
    assert got(member, H, Call(KEY), 0.2) == [
        Send(A, Unjoin(KEY)),
        Send(H, join(B, 3, insist=True)),
    ]


def test_a_call_from_a_lesser_host_is_declined_while_mine_lives() -> None:
    member = seeking(B)
    got(member, H, JoinAck(KEY, 1), 0.0)
    assert got(member, A, Call(KEY), 0.1) == [Send(A, Redirect(KEY, 0, (H,)))]
    assert got(member, A, Call(KEY), 0.75) == [Send(A, CallReply(KEY, True, 0.25))]
    assert got(member, H, JoinAck(KEY, 1), 0.8) == [Send(A, CallReply(KEY, False, -1.0))]


def test_cancel_and_a_second_seek_leave_the_first_host() -> None:
    member = seeking()
    other = GroupKey(0, 0, (0,))
    assert member.cancel(0.1) == [Send(H, Unjoin(KEY))]
    assert member.cancel(0.1) == []
    member.seek(other, fields(), 0.2)
    assert Send(H, Unjoin(other)) in member.seek(KEY, fields(), 0.3)


def test_nonces_rise_over_restarts() -> None:
    view = StaticView(A, [record(A), record(H)])
    view._records[A] = msgspec.structs.replace(view._records[A], incarnation=3)
    again = Matchmaker(SimSigner(A), view, MATCHMAKING, ROUND, random.Random(1))
    [effect] = again.seek(KEY, fields(), 0.0)
    assert isinstance(effect, Send)
    assert isinstance(effect.message, Join)
    assert effect.message.nonce == 3 << 32 | 1


def test_a_host_that_only_acknowledges_is_passed_over_in_the_end() -> None:
    member = make(B, (H, A, B))
    member.seek(KEY, fields(), 0.0)
    now = 0.0
    while now < 100:
        now += 0.5
        got(member, H, JoinAck(KEY, 1), now)
        if any(isinstance(m, Join) for m in sent(member.handle(Tick(), now), A)):
            break
    assert now == pytest.approx(MATCHMAKING.window_s_max + 5)


def test_fields_are_what_the_join_says() -> None:
    said = JoinFields("worker", b"schema..", 3, 99, 5.0, False, b"o" * 16, 7, 2.5)
    member = make(A, (H, A))
    [effect] = member.seek(KEY, said, 0.0)
    assert isinstance(effect, Send)
    assert effect.message == join(
        A,
        1,
        vector_chunks=3,
        vector_bytes=99,
        bandwidth=5.0,
        weighs=False,
        origin=b"o" * 16,
        planned=7,
        fill_s=2.5,
    )


def test_a_host_that_called_is_joined_even_if_the_view_gave_it_up() -> None:
    member = make(B, (H, A, B))
    view_of(member).bury(H)
    assert got(member, H, Call(KEY)) == [Send(H, CallReply(KEY, True, -1.0))]
    assert got(member, A, Call(KEY)) == [Send(A, CallReply(KEY, True, -1.0))]
    assert member.seek(KEY, fields(), 0.0) == [Send(H, join(B))]
    assert member.handle(LinkDown(H, True, ""), 0.1)[-1] == Send(A, join(B, 2))


def test_a_slow_host_that_others_believe_in_has_a_second_chance() -> None:
    member = make(B, (H, A, B))
    member.seek(KEY, fields(), 0.0)
    member.handle(Tick(), 1.0)
    assert got(member, A, Redirect(KEY, 2, (H,)), 1.1) == [Send(H, join(B, 3))]
    assert Send(A, join(B, 4)) in member.handle(Tick(), 2.1)
    assert got(member, A, Redirect(KEY, 4, (H,)), 2.2) == [Send(A, join(B, 5, insist=True))]


def test_no_host_can_alter_or_invent_what_members_signed() -> None:
    """With real keys: the signatures cover what they should."""
    run = PeerKey.generate().peer
    keys = [KeySigner(PeerKey.generate(), RunId(run)) for _ in range(3)]
    host = keys[0]
    joined = [
        key.sign_message(msgspec.structs.replace(join(key.peer), signature=b"")) for key in keys
    ]
    formed = announcement.form(host, joined, [(0, 1), (0, 2), (0, 3)], ROUND, b"")
    assert formed is not None
    assert announcement.formed_flaw(formed, keys[1], 16) == ""
    altered = [
        msgspec.structs.replace(joined[2], **change)
        for change in ({"bandwidth": 1.0}, {"nonce": 2}, {"weighs": False}, {"origin": b"o" * 16})
    ]
    for lie in altered:
        forged = msgspec.structs.replace(formed, joins=(*joined[:2], lie), signature=b"")
        flaw = announcement.formed_flaw(host.sign_message(forged), keys[1], 16)
        assert flaw == "a join that its peer did not sign"
    for change in ({"deadline_s": 99.0}, {"bounds": (0, 1, 2, 64)}, {"joins": tuple(joined[::-1])}):
        relayed = msgspec.structs.replace(formed, **change)
        flaw = announcement.formed_flaw(relayed, keys[1], 16)
        assert flaw == "a signature that is not its host's"
