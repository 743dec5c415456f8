"""What a membership machine makes of lies, forgeries and nonsense: a refusal with a name."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import MembershipConfig
from moshpit.events import Notice
from moshpit.identity.keys import KeySigner, PeerKey
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.protocol.machine import Emit, LinkDown, LinkUp, Received, Send, Tick
from moshpit.protocol.membership import Membership
from moshpit.protocol.view import BUCKETS
from moshpit.types import PeerId, Role
from moshpit.wire.framing import decode_message, encode_message
from moshpit.wire.messages import (
    Ack,
    Admission,
    AnyMessage,
    Difference,
    Digest,
    Goodbye,
    Gossip,
    Mention,
    News,
    NewsAsk,
    Outline,
    PeerRecord,
    Ping,
    PingReq,
    Suspicion,
    ViewAsk,
)

from .harness_membership import machine, peer_id, record_of, signed


class Person:
    """Somebody with a real key, admitted by a ticket."""

    def __init__(self, ticket: Ticket) -> None:
        self.key = PeerKey.generate()
        self.peer = self.key.peer
        self.signer = KeySigner(self.key, ticket.run)
        self.record = self.sign(
            record_of(0, peer=self.peer, admission=ticket.admit(self.peer), version=1)
        )

    def sign(self, record: PeerRecord) -> PeerRecord:
        return self.signer.sign_message(record)


TICKET = RunKey.generate().invite().ticket(())
ANN, BOB, EVE = (Person(TICKET) for _ in range(3))


def anns() -> Membership:
    """Ann's machine, which knows Bob and Eve."""
    made = Membership(ANN.signer, ANN.record, MembershipConfig(), random.Random(0), 0.0)
    for who in (BOB, EVE):
        made.handle(Received(who.peer, News(Gossip((who.record,)))), 0.0)
    for _ in range(10):
        for who in (BOB, EVE):
            made.handle(Received(who.peer, Ping(1)), 0.2)
    assert made.handle(Received(EVE.peer, Ping(1)), 0.2) == [Send(EVE.peer, Ack(1))]
    assert len(made.view.live) == 3
    return made


def refused(made: Membership, record: PeerRecord, sender: PeerId = EVE.peer) -> str:
    """Hand in a record; it must change nothing; return why it was refused."""
    before = list(made.view.records()), list(made.view.live), made.view.generation
    effects = made.handle(Received(sender, News(Gossip((record,)))), 0.5)
    after = list(made.view.records()), list(made.view.live), made.view.generation
    assert before == after
    [notice] = [e.notice for e in effects if isinstance(e, Emit)]
    assert (notice.code, notice.peer) == ("refused", sender)
    return notice.detail


def test_honest_records_are_taken() -> None:
    made = anns()
    newer = BOB.sign(msgspec.structs.replace(BOB.record, version=2, samples=5.0))
    made.handle(Received(EVE.peer, News(Gossip((newer,)))), 0.5)
    assert made.view.record(BOB.peer) == newer


def test_nobody_can_alter_or_forge_the_record_of_another() -> None:
    made = anns()
    altered = msgspec.structs.replace(BOB.record, version=7, addresses=(("6.6.6.6", 666),))
    assert refused(made, altered) == "bad signature"
    assert refused(made, EVE.sign(altered)) == "bad signature"
    assert refused(made, msgspec.structs.replace(altered, signature=b"")) == "bad signature"
    # Without a new version there is nothing to look at.
    same = msgspec.structs.replace(altered, version=1)
    assert made.handle(Received(EVE.peer, News(Gossip((same,)))), 0.6) == []
    assert made.view.record(BOB.peer) == BOB.record


def test_nobody_can_forge_this_peers_own_record() -> None:
    made = anns()
    forged = msgspec.structs.replace(ANN.record, incarnation=9)
    assert refused(made, EVE.sign(forged)) == "bad signature"
    assert made.view.me == ANN.record


def test_only_the_admitted_are_taken() -> None:
    made = anns()
    other_run = RunKey.generate().invite().ticket(())
    assert refused(made, Person(other_run).record) == "not admitted"
    mallory = Person(TICKET)
    stolen = mallory.sign(msgspec.structs.replace(mallory.record, admission=EVE.record.admission))
    assert refused(made, stolen) == "not admitted"
    client = RunKey.generate()
    only_clients = client.invite((Role.CLIENT,)).ticket(())
    worker = Person(only_clients)
    machine_of_run = Membership(
        KeySigner(ANN.key, client.run), ANN.record, MembershipConfig(), random.Random(0), 0.0
    )
    assert refused(machine_of_run, worker.record, worker.peer) == "not admitted"


NAN, INF = float("nan"), float("inf")
UNBELIEVABLE: list[dict[str, Any]] = [
    *({name: bad} for name in ("samples", "rate", "step_s", "up", "down")
      for bad in (NAN, INF, -INF, -1.0, 1e300)),
    {"incarnation": -1},
    {"incarnation": 1 << 63},
    {"version": 1 << 60},
    {"epoch": -1},
    {"epoch": 1 << 62},
    {"role": "king"},
    {"role": ""},
    {"addresses": (("h", 1),) * 9},
    {"addresses": (("h" * 300, 1),)},
    {"addresses": (("", 1),)},
    {"addresses": (("h\n", 1),)},
    {"addresses": (("h", 0),)},
    {"addresses": (("h", 1 << 16),)},
    {"via": (b"v" * 32,) * 9},
    {"via": (b"short",)},
    {"schema": b"s" * 33},
    {"group_key": (0,) * 17},
    {"group_key": (-1,)},
    {"peer": b""},
    {"peer": b"p" * 33},
    {"signature": b"s" * 65},
    {"admission": Admission(b"i" * 33, (), 0, b"", b"")},
    {"admission": Admission(b"i" * 32, ("r",) * 9, 0, b"", b"")},
    {"admission": Admission(b"i" * 32, ("r" * 17,), 0, b"", b"")},
    {"admission": Admission(b"i" * 32, (), -1, b"", b"")},
    {"admission": Admission(b"i" * 32, (), 0, b"s" * 65, b"")},
    {"admission": Admission(b"i" * 32, (), 0, b"", b"s" * 65)},
]  # fmt: skip


@pytest.mark.parametrize("fields", UNBELIEVABLE, ids=str)
def test_nonsense_is_refused_even_when_it_is_signed(fields: dict[str, Any]) -> None:
    made = machine(0)
    for number in (1, 2):
        made.handle(Received(peer_id(number), News(Gossip((signed(record_of(number)),)))), 0.0)
    bad = signed(record_of(2, version=1))
    bad = msgspec.structs.replace(bad, **fields)
    if "version" not in fields and "incarnation" not in fields:
        assert bad.version > 0
    if fields.get("incarnation") == -1:
        bad = msgspec.structs.replace(bad, peer=peer_id(9))  # else it is merely old
    before = list(made.view.records())
    effects = made.handle(Received(peer_id(1), News(Gossip((bad,)))), 0.5)
    assert list(made.view.records()) == before
    [notice] = [e.notice for e in effects if isinstance(e, Emit)]
    assert (notice.code, notice.peer) == ("refused", peer_id(1))


def test_a_view_has_a_bound() -> None:
    made = machine(0, config=MembershipConfig(peers_max=3))
    for number in range(1, 6):
        made.handle(Received(peer_id(1), News(Gossip((signed(record_of(number)),)))), 0.0)
    assert len(made.view.live) == 3
    effects = made.handle(Received(peer_id(1), News(Gossip((signed(record_of(5)),)))), 0.5)
    assert Emit(Notice("refused", peer_id(1), "too many peers")) in effects
    assert made.view.record(peer_id(5)) is None


def test_a_message_full_of_nonsense_makes_few_notices() -> None:
    made = machine(0)
    bad = Gossip(tuple(record_of(n, rate=-1.0) for n in range(1, 200)))
    effects = made.handle(Received(peer_id(1), News(bad)), 0.5)
    assert len([e for e in effects if isinstance(e, Emit)]) == 8


def test_digests_and_buckets_of_a_wrong_shape_are_refused() -> None:
    made = anns()
    for message in (Digest(()), Digest((b"",) * 5), Difference(Gossip(), (BUCKETS,)),
                    Difference(Gossip(), (-1, 3))):  # fmt: skip
        effects = made.handle(Received(EVE.peer, message), 1.0)
        [notice] = [e.notice for e in effects if isinstance(e, Emit)]
        assert (notice.code, notice.peer) == ("refused", EVE.peer)


def test_asking_for_a_bucket_many_times_gets_it_once() -> None:
    made = anns()
    effects = made.handle(Received(EVE.peer, Difference(Gossip(), tuple(range(64)) * 50)), 1.0)
    assert len(effects) == 1


def test_rumours_about_strangers_and_other_lives_change_nothing() -> None:
    made = anns()
    for rumor in (
        Suspicion(b"x" * 32, 0, True, EVE.peer),
        Suspicion(BOB.peer, 1, True, EVE.peer),
        Suspicion(BOB.peer, (1 << 48) - 1, True, EVE.peer),
    ):
        assert made.handle(Received(EVE.peer, News(Gossip((), (rumor,)))), 1.0) == []
    for rumor in (Suspicion(b"x", 0, True, EVE.peer), Suspicion(BOB.peer, -1, True, EVE.peer),
                  Suspicion(BOB.peer, 0, True, b"")):  # fmt: skip
        effects = made.handle(Received(EVE.peer, News(Gossip((), (rumor,)))), 1.0)
        assert [e.notice.code for e in effects if isinstance(e, Emit)] == ["refused"]
    assert len(made.view.live) == 3


# --- nothing that can be decoded makes a machine raise ----------------------------------------

peers = st.one_of(st.integers(0, 5).map(peer_id), st.binary(max_size=40))
counters = st.one_of(st.integers(-2, 4), st.integers(-(2**63), 2**64 - 1))
numbers = st.one_of(st.floats(), st.integers(0, 100).map(float))
admissions = st.one_of(
    st.just(record_of(0).admission),
    st.builds(
        Admission, st.binary(max_size=40), st.lists(st.text(max_size=20), max_size=10).map(tuple),
        counters, st.binary(max_size=70), st.binary(max_size=70),
    ),
)  # fmt: skip
records = st.builds(
    PeerRecord, peers, counters, counters, st.sampled_from(["worker", "client", "aux", "x"]),
    st.lists(st.tuples(st.text(max_size=5), counters), max_size=3).map(tuple),
    st.lists(peers, max_size=3).map(tuple), numbers, numbers, st.binary(max_size=40), counters,
    numbers, numbers, st.lists(counters, max_size=3).map(tuple), numbers, st.booleans(),
    admissions, st.binary(max_size=10),
)  # fmt: skip
plausible = st.builds(
    lambda number, fields: signed(record_of(number, **fields)),
    st.integers(0, 5),
    st.fixed_dictionaries(
        {},
        optional={
            "incarnation": st.integers(0, 3),
            "version": st.integers(0, 3),
            "role": st.sampled_from(["worker", "client", "aux"]),
            "left": st.booleans(),
            "via": st.lists(st.integers(0, 5).map(peer_id), max_size=3).map(tuple),
            "epoch": st.integers(0, 3),
        },
    ),
)
any_record = st.one_of(records, plausible)
suspicions = st.builds(Suspicion, peers, counters, st.booleans(), peers)
short_ids = st.one_of(st.integers(0, 6).map(lambda n: peer_id(n)[:6]), st.binary(max_size=8))
mentions = st.builds(Mention, short_ids, counters, counters)
gossip = st.builds(
    Gossip,
    st.lists(any_record, max_size=4).map(tuple),
    st.lists(suspicions, max_size=4).map(tuple),
    st.lists(mentions, max_size=4).map(tuple),
)
messages: st.SearchStrategy[AnyMessage] = st.one_of(
    st.builds(Ping, counters, gossip),
    st.builds(Ack, counters, gossip),
    st.builds(PingReq, counters, peers, gossip),
    st.builds(News, gossip),
    st.builds(Digest, st.lists(st.binary(max_size=9), max_size=70).map(tuple)),
    st.builds(Digest, st.lists(st.binary(max_size=9), min_size=64, max_size=64).map(tuple)),
    st.builds(Difference, gossip, st.lists(counters, max_size=5).map(tuple)),
    st.just(ViewAsk()),
    st.builds(
        Outline,
        st.lists(st.integers(-1, 65), max_size=4).map(tuple),
        st.lists(st.binary(max_size=13), max_size=4).map(tuple),
        st.booleans(),
        st.booleans(),
    ),
    st.builds(Goodbye, any_record),
    st.builds(NewsAsk, st.lists(short_ids, max_size=4).map(tuple)),
)
senders = st.integers(1, 5).map(peer_id)
events = st.one_of(
    st.builds(Received, senders, messages),
    st.builds(LinkUp, senders),
    st.builds(LinkDown, senders, st.booleans(), st.just("")),
    st.just(Tick()),
)


def through_the_wire(event: Any) -> Any:
    if not isinstance(event, Received):
        return event
    return Received(event.peer, decode_message(encode_message(event.message)[4:], "somebody"))


@given(
    st.lists(st.tuples(events, st.floats(0, 3)), max_size=25), st.sampled_from(["worker", "client"])
)
def test_no_message_makes_a_machine_raise_or_hold_nonsense(
    story: list[tuple[Any, float]], role: str
) -> None:
    made = machine(0, role=role)
    now = 0.0
    for event, later in story:
        now += later
        made.handle(through_the_wire(event), now)
        assert made.wakeup is not None
        live = list(made.view.live)
        assert live == sorted(dict.fromkeys(live))
        assert made.view.me.peer in live
        for entry in made.view.entries.values():
            assert 0 <= entry.record.rate < 1e10
            assert entry.status.live == (entry.record.peer in live)
        for _ in range(3):
            made.handle(Tick(), max(now, made.wakeup))
