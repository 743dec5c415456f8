"""Single conversations of one membership machine, whole lists of effects compared."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import MembershipConfig
from moshpit.errors import ConfigError
from moshpit.events import Notice
from moshpit.protocol.gossip import PAGE_ITEMS, Rumors, mention_of, pages
from moshpit.protocol.judge import RECORD_BYTES_MAX, record_flaw
from moshpit.protocol.machine import Effect, Emit, LinkDown, LinkUp, Received, Send, Tick
from moshpit.protocol.view import BUCKETS, Status
from moshpit.types import short
from moshpit.wire.messages import (
    NO_GOSSIP,
    Ack,
    Admission,
    Difference,
    Digest,
    Goodbye,
    Gossip,
    News,
    PeerRecord,
    Ping,
    PingReq,
    Suspicion,
    ViewAsk,
)

from .harness_membership import QUIET, knowing, machine, peer_id, record_of, signed, tick

CONFIG = QUIET
ME, A, B, C = (peer_id(n) for n in range(4))


def pinged(effects: list[Effect]) -> Ping:
    [send] = [e for e in effects if isinstance(e, Send) and isinstance(e.message, Ping)]
    assert isinstance(send.message, Ping)
    return send.message


def suspicion(number: int, by: int = 0, dead: bool = False, incarnation: int = 0) -> Suspicion:
    return Suspicion(peer_id(number), incarnation, dead, peer_id(by))


def test_a_ping_is_answered_by_its_number() -> None:
    made = knowing(1)
    assert made.handle(Received(A, Ping(7)), 1.0) == [Send(A, Ack(7))]


def test_strangers_that_meet_exchange_their_views() -> None:
    made = machine(0)
    effects = made.handle(LinkUp(A), 0.0)
    me = made.view.me
    assert effects == [Send(A, News(Gossip((me,)))), Send(A, Digest(made.view.digest()))]

    theirs = machine(1)
    [emit, *_] = theirs.handle(Received(ME, News(Gossip((me,)))), 0.0)
    assert emit == Emit(Notice("peer-joined", ME))
    assert list(theirs.view.live) == sorted([ME, A])


def test_an_equal_digest_is_not_answered_and_another_only_where_it_differs() -> None:
    made, other = knowing(1, 2), knowing(1)
    assert made.handle(Received(A, Digest(made.view.digest())), 1.0) == []
    bucket = B[0] >> 2
    assert made.handle(Received(A, Digest(other.view.digest())), 1.0) == [
        Send(A, Difference(Gossip((signed(record_of(2)),)), (bucket,)))
    ]
    assert other.handle(Received(A, Difference(NO_GOSSIP, (bucket,))), 1.0) == [
        Send(A, Difference(NO_GOSSIP))
    ]


def test_whoever_was_sent_a_digest_is_not_asked_again() -> None:
    made = knowing(1, 2)
    made.handle(LinkUp(C), 1.0)
    [send] = made.handle(Received(C, Digest(machine(3).view.digest())), 1.1)
    assert isinstance(send, Send)
    assert isinstance(send.message, Difference)
    assert send.message.reply == ()


def test_progress_does_not_show_in_a_digest() -> None:
    made = machine(0)
    before = made.view.digest()
    made.publish(0.0, samples=100.0, rate=3.0, epoch=2)
    assert made.view.digest() == before
    made.publish(0.0, schema=b"another.")
    assert made.view.digest() != before


def test_silence_leads_to_helpers_then_suspicion_then_death() -> None:
    made = knowing(1, 2)
    at, effects = tick(made)
    [ping] = effects
    assert isinstance(ping, Send)
    target, other = (A, B) if ping.peer == A else (B, A)
    number = 1 if target == A else 2
    seq = pinged(effects).seq
    assert effects == [Send(target, Ping(seq))]

    effects = made.handle(Tick(), at + CONFIG.probe_timeout_s)
    assert effects == [Send(other, PingReq(seq, target))]
    assert made.view.reachable(target)

    late = at + 3 * CONFIG.probe_timeout_s
    effects = made.handle(Tick(), late)
    rumor = suspicion(number)
    assert effects[:2] == [
        Emit(Notice("peer-suspected", target)),
        Send(target, News(Gossip((), (rumor,)))),
    ]
    assert made.view.status(target) is Status.SUSPECT
    assert target in made.view.live
    assert not made.view.reachable(target)

    notices: list[Effect] = []
    now = late
    while made.view.status(target) is Status.SUSPECT:
        assert now < late + 5.0
        now, effects = tick(made)
        notices += [e for e in effects if isinstance(e, Emit)]
        for effect in effects:  # the other peer is well
            if isinstance(effect, Send) and effect.peer == other:
                message = effect.message
                if isinstance(message, Ping):
                    notices += made.handle(Received(other, Ack(message.seq)), now)
    assert Emit(Notice("peer-dead", target)) in notices
    assert target not in made.view.live
    # 4 · log10(4) intervals of 1 s
    assert now - late == pytest.approx(2.408, abs=0.01)


def test_an_answer_through_a_helper_averts_suspicion() -> None:
    made = knowing(1, 2)
    at, effects = tick(made)
    [send] = effects
    assert isinstance(send, Send)
    helper = B if send.peer == A else A
    seq = pinged(effects).seq
    made.handle(Tick(), at + 0.5)
    assert made.handle(Received(C, Ack(seq)), at + 0.6) != []  # a stranger is asked who it is
    made.handle(Received(helper, Ack(seq)), at + 0.7)
    made.handle(Tick(), at + 1.6)
    assert made.view.status(send.peer) is Status.ALIVE


def test_a_relayed_probe_is_answered_to_whom_asked() -> None:
    made = knowing(1, 2)
    effects = made.handle(Received(A, PingReq(33, B)), 1.0)
    seq = pinged(effects).seq
    assert effects == [Send(B, Ping(seq))]
    assert made.handle(Received(A, Ack(seq)), 1.1) == []  # only the target can answer
    assert made.handle(Received(B, Ack(seq)), 1.1) == [Send(A, Ack(33))]
    assert made.handle(Received(B, Ack(seq)), 1.1) == []


def test_two_refusals_are_death_at_once() -> None:
    made = knowing(1, 2, 3)
    effects = made.handle(LinkDown(C, True, "refused"), 1.0)
    assert {type(e.message) for e in effects if isinstance(e, Send)} == {PingReq}
    assert {e.peer for e in effects if isinstance(e, Send)} == {A, B}
    assert not made.view.reachable(C)
    assert made.view.status(C) is Status.ALIVE
    effects = made.handle(Received(A, News(Gossip((), (suspicion(3, by=1),)))), 1.01)
    assert effects[0] == Emit(Notice("peer-dead", C, f"by {short(A)}"))
    assert made.view.status(C) is Status.DEAD


def test_a_refusal_and_no_other_witness_is_death_when_the_helpers_fail() -> None:
    made = knowing(1)
    made.handle(LinkDown(A, True, "refused"), 1.0)
    assert made.view.status(A) is Status.ALIVE
    assert made.handle(Tick(), 2.0)[-1:] != []
    assert made.view.status(A) is Status.DEAD


def test_a_helper_reports_a_refusal_at_once() -> None:
    made = knowing(1, 2)
    witness = Send(A, News(Gossip((), (suspicion(2, by=0),))))
    made.handle(Received(A, PingReq(5, B)), 1.0)
    assert witness in made.handle(LinkDown(B, True, "refused"), 1.01)
    assert made.handle(Received(A, PingReq(6, B)), 1.02) == [witness]


def test_a_lost_link_is_no_death_when_a_helper_gets_an_answer() -> None:
    made = knowing(1, 2)
    generation = made.view.generation
    effects = made.handle(LinkDown(B, False, "timed out"), 1.0)
    [send] = effects
    assert isinstance(send, Send)
    assert isinstance(send.message, PingReq)
    assert send.peer == A
    assert not made.view.reachable(B)
    assert made.view.generation > generation
    made.handle(Received(A, Ack(send.message.seq)), 1.1)
    made.handle(Tick(), 2.5)
    assert made.view.status(B) is Status.ALIVE
    assert not made.view.reachable(B)
    made.handle(Received(B, Ping(1)), 2.6)
    assert made.view.reachable(B)


def test_a_suspicion_of_oneself_is_refuted_by_a_higher_incarnation() -> None:
    made = knowing(1)
    effects = made.handle(Received(A, News(Gossip((), (suspicion(0, by=1),)))), 1.0)
    me = made.view.me
    assert (me.incarnation, me.version) == (1, 1)
    assert effects[0] == Send(A, News(Gossip((me,))))
    # Old news of it is answered by what is new, and nothing rises any more.
    effects = made.handle(Received(A, News(Gossip((), (suspicion(0, by=1),)))), 1.01)
    assert effects == [Send(A, News(Gossip((me,))))]
    # Nobody can push the incarnation up without this peer's signature.
    assert made.handle(Received(A, News(Gossip((), (suspicion(0, incarnation=99),)))), 1.02) == []
    assert made.view.me == me


def test_refutation_brings_a_suspect_and_a_dead_peer_back() -> None:
    for dead in (False, True):
        made = knowing(1, 2)
        made.handle(Received(A, News(Gossip((), (suspicion(2, by=1, dead=dead),)))), 1.0)
        assert made.view.status(B) is (Status.DEAD if dead else Status.SUSPECT)
        same_life = signed(record_of(2, version=5))
        made.handle(Received(A, News(Gossip((same_life,)))), 1.1)
        assert made.view.status(B) is not Status.ALIVE
        new_life = signed(record_of(2, incarnation=1, version=1))
        effects = made.handle(Received(A, News(Gossip((new_life,)))), 1.2)
        assert effects[0] == Emit(Notice("peer-back", B))
        assert made.view.status(B) is Status.ALIVE
        assert list(made.view.live) == sorted([ME, A, B])


def test_a_dead_peer_that_speaks_is_told_so_that_it_can_refute() -> None:
    made = knowing(1, 2)
    made.handle(Received(A, News(Gossip((), (suspicion(2, by=1, dead=True),)))), 1.0)
    effects = made.handle(Received(B, Ping(9)), 2.0)
    told = Suspicion(B, 0, True, ME)
    assert effects[0] == Send(B, News(Gossip((signed(record_of(2)),), (told,))))
    answer = effects[-1]
    assert isinstance(answer, Send)
    assert isinstance(answer.message, Ack)
    assert answer.message.gossip.suspicions[0] == told


def test_hearsay_alone_kills_nobody() -> None:
    made = knowing(1, 2)
    made.handle(Received(A, News(Gossip((), (suspicion(2, by=1),)))), 1.0)
    now = 1.0
    while now < 12.0:  # B answers this peer, but is slow to refute
        now, effects = tick(made)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Ping):
                made.handle(Received(effect.peer, Ack(effect.message.seq)), now + 0.01)
    assert made.view.status(B) is Status.SUSPECT


def test_own_records_of_an_earlier_life_are_outdone() -> None:
    made = machine(0, addresses=(("10.9.9.9", 1),))
    earlier = signed(record_of(0, incarnation=4, version=9))
    made.handle(Received(A, News(Gossip((earlier,)))), 0.0)
    assert made.view.me.incarnation == 5
    assert made.view.me.version > 0
    assert made.view.me.addresses == (("10.9.9.9", 1),)


def test_a_restart_at_the_same_version_is_noticed_by_its_content() -> None:
    made = knowing(1)
    again = signed(record_of(1, addresses=(("10.9.9.9", 1),)))
    effects = made.handle(Received(A, News(Gossip((again,)))), 1.0)
    assert effects == [Send(A, News(Gossip((signed(record_of(1)),))))]
    restarted = machine(1, addresses=(("10.9.9.9", 1),))
    restarted.handle(Received(ME, News(Gossip((signed(record_of(1)),)))), 1.0)
    assert restarted.view.me.incarnation == 1


def test_publishing_progress_sends_nothing_and_publishing_a_change_pushes() -> None:
    made = knowing(1, 2)
    made.handle(Tick(), 5.0)
    assert made.publish(5.0, samples=10.0, rate=2.0) == []
    assert made.publish(5.0, samples=10.0) == []
    assert made.view.me.samples == 10.0
    effects = made.publish(5.0, schema=b"another.")
    assert effects
    for effect in effects:
        assert isinstance(effect, Send)
        assert effect.message == News(Gossip((made.view.me,)))
    # At most one push in a tenth of a second; the wake-up says when the next may go.
    assert made.publish(5.01, schema=b"a third.") == []
    assert made.wakeup == pytest.approx(5.1)
    assert made.handle(Tick(), 5.1) != []


def test_leaving_is_said_to_all_links_and_ends_the_machine() -> None:
    made = knowing(1, 2)
    made.handle(LinkUp(A), 1.0)
    effects = made.leave(2.0)
    goodbye = Goodbye(made.view.me)
    assert made.view.me.left
    assert sorted(e.peer for e in effects if isinstance(e, Send)) == sorted([A, B])
    assert all(isinstance(e, Send) and e.message == goodbye for e in effects)
    assert made.wakeup is None
    assert made.handle(Received(A, Ping(1)), 3.0) == []

    other = machine(1)
    other.handle(Received(ME, News(Gossip((signed(record_of(0)),)))), 0.0)
    effects = other.handle(Received(ME, goodbye), 1.0)
    assert effects[0] == Emit(Notice("peer-left", ME))
    assert other.view.status(ME) is Status.LEFT


def test_nobody_can_say_goodbye_for_another() -> None:
    made = knowing(1, 2)
    gone = signed(record_of(2, version=1, left=True))
    effects = made.handle(Received(A, Goodbye(gone)), 1.0)
    assert effects == [Emit(Notice("refused", A, "goodbye for somebody else"))]
    assert made.view.status(B) is Status.ALIVE


def test_the_dead_are_remembered_for_a_while() -> None:
    made = knowing(1, 2, config=MembershipConfig(dead_kept_s=60.0))
    made.handle(Received(A, News(Gossip((), (suspicion(2, by=1, dead=True),)))), 1.0)
    ghost = News(Gossip((signed(record_of(2, version=3)),)))
    made.handle(Received(A, ghost), 50.0)
    assert made.view.status(B) is Status.DEAD
    made.handle(Tick(), 61.5)
    assert made.view.status(B) is None
    assert [r.peer for r in made.view.records()] == sorted([ME, A])


def test_the_whole_view_comes_in_pages_below_the_frame_limit() -> None:
    made = machine(0)
    count = 700
    admission = Admission(b"i" * 32, ("worker", "client", "aux"), 1 << 40, b"s" * 64, b"p" * 64)
    for number in range(1, count):
        big = record_of(number, addresses=(("h" * 253, 65535),) * 8)
        made.view.add(msgspec.structs.replace(big, admission=admission, signature=b"x" * 64), 0.0)
    effects = made.handle(Received(A, ViewAsk()), 1.0)
    assert len(effects) == -(-count // PAGE_ITEMS)
    sizes = [len(msgspec.msgpack.encode(e.message)) for e in effects if isinstance(e, Send)]
    assert max(sizes) < 1 << 20
    got = [r for e in effects if isinstance(e, Send) for r in e.message.gossip.records]  # type: ignore[attr-defined]
    assert sorted(r.peer for r in got) == [r.peer for r in made.view.records()]


def test_the_longest_record_that_is_believed_fits_its_bound() -> None:
    longest = PeerRecord(
        b"p" * 32, (1 << 48) - 1, (1 << 48) - 1, "worker", (("h" * 253, 65535),) * 8,
        (b"v" * 32,) * 8, 1e13, 1e13, b"s" * 32, (1 << 48) - 1, 1e15, 1e9,
        ((1 << 48) - 1,) * 16, 1e7, False,
        Admission(b"i" * 32, ("r" * 16,) * 8, (1 << 48) - 1, b"s" * 64, b"p" * 64), b"s" * 64,
        b"l" * 96, (1 << 48) - 1,
    )  # fmt: skip
    assert record_flaw(longest) is None
    assert len(msgspec.msgpack.encode(longest)) <= RECORD_BYTES_MAX
    assert RECORD_BYTES_MAX * PAGE_ITEMS < (1 << 20)


def test_clients_are_probed_over_their_links_or_through_their_friends() -> None:
    made = knowing(1, 2)
    client = signed(record_of(3, role="client", addresses=(), via=(B,)))
    made.handle(Received(A, News(Gossip((client,)))), 1.0)
    seen: list[type] = []
    now = 1.0
    while now < 5.0:
        now, effects = tick(made)
        for effect in effects:
            assert isinstance(effect, Send)
            assert effect.peer != C
            if isinstance(effect.message, Ping):
                made.handle(Received(effect.peer, Ack(effect.message.seq)), now)
            if isinstance(effect.message, PingReq):
                assert (effect.peer, effect.message.target) == (B, C)
                seen.append(PingReq)
                made.handle(Received(B, Ack(effect.message.seq)), now)
    assert seen
    made.handle(LinkUp(C), 5.0)
    sent: list[object] = []
    while now < 9.0:
        now, effects = tick(made)
        for effect in effects:
            if isinstance(effect, Send) and isinstance(effect.message, Ping):
                sent.append(effect.peer)
                made.handle(Received(effect.peer, Ack(effect.message.seq)), now)
    assert C in sent


def test_a_client_publishes_the_dialable_peers_it_has_links_with() -> None:
    made = machine(0, role="client", addresses=())
    for number in (1, 2, 3, 4):
        record = record_of(number, role="client" if number == 2 else "worker")
        made.handle(Received(peer_id(number), News(Gossip((signed(record),)))), 0.0)
        made.handle(LinkUp(peer_id(number)), 0.0)
    assert made.view.me.via == (A, C, peer_id(4))
    made.handle(LinkDown(A, False, ""), 1.0)
    assert made.view.me.via == (C, peer_id(4))


def test_own_failures_make_a_peer_patient() -> None:
    made = knowing(1)
    waits: list[float] = []
    now = 1.0
    for _ in range(3):
        made.handle(Received(A, Ping(1)), now)
        made.handle(
            Received(A, News(Gossip((signed(record_of(1, incarnation=len(waits) + 1)),)))), now
        )
        while True:
            now, effects = tick(made)
            if any(isinstance(e, Send) and isinstance(e.message, Ping) for e in effects):
                break
        began = now
        while made.view.status(A) is Status.ALIVE:
            now, _ = tick(made)
        waits.append(now - began)
    assert waits == pytest.approx([1.5, 3.0, 3.0])


def test_unbelievable_own_records_are_a_local_error() -> None:
    with pytest.raises(ConfigError, match="number out of range"):
        machine(0, rate=float("nan"))
    with pytest.raises(ConfigError, match="number out of range"):
        knowing(1).publish(1.0, samples=-1.0)


def test_rumors_go_least_sent_first_newest_first_and_end() -> None:
    rumors = Rumors(retransmit_multiplier=3.0, per_message_max=2)
    one, two, three = (signed(record_of(n)) for n in (1, 2, 3))
    for record in (one, two, three):
        rumors.add(record)
    # ceil(3 · log10(3+1)) = 2 sends each
    assert rumors.pick(3) == Gossip((three, two))
    # Told in full once, mentioned after that.
    assert rumors.pick(3) == Gossip((one,), (), (mention_of(two),))
    assert rumors.pick(3) == Gossip((), (), (mention_of(one), mention_of(three)))
    assert rumors.pick(3) is NO_GOSSIP
    rumors.add(one)
    assert rumors.pick(3) == Gossip((one,))
    assert rumors.pick(3) == Gossip((), (), (mention_of(one),))
    assert len(rumors) == 0


@given(st.integers(0, 3 * PAGE_ITEMS))
def test_pages_lose_nothing(count: int) -> None:
    rumors = [suspicion(1, by=n % 200) for n in range(count)]
    cut = list(pages(rumors))
    assert [s for page in cut for s in page.suspicions] == rumors
    assert len(cut) == max(1, -(-count // PAGE_ITEMS))
    assert all(len(page.suspicions) <= PAGE_ITEMS for page in cut)
    assert BUCKETS == 64
