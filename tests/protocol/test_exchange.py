"""Views that differ become alike by few bytes, whoever begins; liars are named and get nothing."""

from __future__ import annotations

import random
from collections import Counter, deque

import msgspec
import pytest

from moshpit.config import MembershipConfig
from moshpit.protocol.known import Known
from moshpit.protocol.machine import Effect, Emit, LinkUp, Received, Send
from moshpit.protocol.membership import Membership
from moshpit.sim.process import Host, Process, first_record, peer_id
from moshpit.sim.signer import SimSigner
from moshpit.types import PeerId, Role
from moshpit.wire.messages import Digest, Gossip, News, Outline, PeerRecord

RECORD_BYTES = 330


def record(number: int) -> PeerRecord:
    host = Host(number, 0, 1e6, 1e6, nat=False)
    process = Process(number, peer_id(1, number), host, Role.WORKER, born=0.0, offset=0.0)
    return SimSigner(process.peer).sign_message(first_record(process, b"schema", 7000))


RECORDS = [record(number) for number in range(400)]


class Wire:
    """Some peers whose messages arrive at once, and how many bytes they were."""

    def __init__(self, *views: list[PeerRecord]) -> None:
        self.peers: dict[PeerId, Membership] = {}
        self.bytes: Counter[str] = Counter()
        self.notices: list[str] = []
        for records in views:
            me = records[0]
            signer = SimSigner(PeerId(me.peer))
            self.peers[signer.peer] = Membership(
                signer, me, MembershipConfig(), random.Random(1), 0.0, known=Known(records)
            )

    def link(self, a: PeerRecord, b: PeerRecord) -> None:
        """Connect two; what they want said is said."""
        queue: deque[tuple[PeerId, Effect]] = deque()
        for one, other in ((a, b), (b, a)):
            sender, peer = PeerId(one.peer), PeerId(other.peer)
            queue += [(sender, e) for e in self.peers[sender].handle(LinkUp(peer), 0.0)]
        self._run(queue)

    def say(self, sender: PeerRecord, peer: PeerRecord, message: Digest | Outline | News) -> None:
        """Have one say something to another."""
        self._run(deque([(PeerId(sender.peer), Send(PeerId(peer.peer), message))]))

    def _run(self, queue: deque[tuple[PeerId, Effect]]) -> None:
        while queue:
            sender, effect = queue.popleft()
            if isinstance(effect, Emit):
                self.notices.append(f"{effect.notice.code}: {effect.notice.detail}")
            elif isinstance(effect, Send) and effect.peer in self.peers:
                name = type(effect.message).__name__
                self.bytes[name] += len(msgspec.msgpack.encode(effect.message))
                peer = effect.peer
                answers = self.peers[peer].handle(Received(sender, effect.message), 0.0)
                queue += [(peer, answer) for answer in answers]

    def live(self, peer: PeerRecord) -> list[PeerId]:
        return list(self.peers[PeerId(peer.peer)].view.live)


def compare(wire: Wire, a: PeerRecord, b: PeerRecord) -> None:
    """Let a compare its view with b's, as it does now and then."""
    machine = wire.peers[PeerId(a.peer)]
    machine._exchanges.begin(PeerId(b.peer), 0.0)
    sends, machine._roster.out = machine._roster.out, []
    wire._run(deque((PeerId(a.peer), send) for send in sends))


def test_views_that_differ_in_a_few_records_exchange_those() -> None:
    """Each lacks three that the other has; a view holds three hundred."""
    shared = RECORDS[2:300]
    a = [RECORDS[0], RECORDS[1], *shared, *RECORDS[300:303]]
    b = [RECORDS[1], RECORDS[0], *shared, *RECORDS[303:306]]
    for first, second in ((a, b), (b, a)):
        wire = Wire(a, b)
        compare(wire, first[0], second[0])
        assert wire.live(a[0]) == wire.live(b[0])
        assert len(wire.live(a[0])) == 306
        assert wire.bytes["Difference"] < 8 * RECORD_BYTES * 1.5
        assert wire.bytes.total() < 0.1 * 300 * RECORD_BYTES
        assert not [n for n in wire.notices if n.startswith("refused")]


def test_a_newcomer_that_meets_three_peers_gets_the_swarm_once() -> None:
    swarm = RECORDS[1:]
    olds = [[swarm[n], *swarm[:n], *swarm[n + 1 :]] for n in range(3)]
    wire = Wire([RECORDS[0]], *olds)
    queue: deque[tuple[PeerId, Effect]] = deque()
    for old in olds:
        for one, other in ((RECORDS[0], old[0]), (old[0], RECORDS[0])):
            sender = PeerId(one.peer)
            up = LinkUp(PeerId(other.peer))
            queue += [(sender, e) for e in wire.peers[sender].handle(up, 0.0)]
    wire._run(queue)
    assert wire.live(RECORDS[0]) == sorted(PeerId(r.peer) for r in RECORDS)
    assert wire.bytes["Difference"] < 1.2 * len(swarm) * 420
    assert all(PeerId(RECORDS[0].peer) in wire.live(old[0]) for old in olds)


def test_who_is_dead_here_is_told_to_those_that_hold_it_for_alive() -> None:
    wire = Wire(RECORDS[:200], [RECORDS[1], RECORDS[0], *RECORDS[2:200]])
    a = wire.peers[PeerId(RECORDS[0].peer)]
    dead = [PeerId(r.peer) for r in RECORDS[50:120]]
    for peer in dead:
        a._roster.declare_dead(a.view.entries[peer], a._me, 0.0)
    a._roster.out = []
    compare(wire, RECORDS[0], RECORDS[1])
    left = wire.live(RECORDS[1])
    assert not [peer for peer in dead if peer in left]
    assert len(left) == 130


def test_an_outline_that_nobody_asked_for_is_refused_by_name() -> None:
    wire = Wire(RECORDS[:100], [RECORDS[1], RECORDS[0]])
    wire.say(RECORDS[1], RECORDS[0], Outline((3,), (b"\1" * 6,)))
    assert wire.notices == ["refused: an outline that nobody asked for"]


@pytest.mark.parametrize(
    ("outline", "words"),
    [
        (Outline((64,), (b"",)), "bucket out of range"),
        (Outline((-1,), (b"",)), "bucket out of range"),
        (Outline((1, 1), (b"", b"")), "bucket out of range"),
        (Outline((1, 2), (b"",)), "outline of a wrong size"),
        (Outline((1,), (b"12345",), asks=True), "outline of a wrong size"),
    ],
)
def test_impossible_outlines_are_refused(outline: Outline, words: str) -> None:
    wire = Wire(RECORDS[:100], [RECORDS[1], RECORDS[0]])
    wire.say(RECORDS[1], RECORDS[0], outline)
    assert wire.notices == [f"refused: {words}"]


def test_who_asks_for_what_is_not_there_gets_nothing() -> None:
    wire = Wire(RECORDS[:100], [RECORDS[1], RECORDS[0]])
    wire.say(RECORDS[1], RECORDS[0], Outline((1, 2), (b"x" * 600, b""), asks=True))
    assert set(wire.bytes) == {"Outline"}
    assert not wire.notices


def test_small_swarms_send_records_at_once() -> None:
    wire = Wire(RECORDS[:3], RECORDS[3:6])
    wire.link(RECORDS[0], RECORDS[3])
    assert "Outline" not in wire.bytes
    assert wire.live(RECORDS[0]) == wire.live(RECORDS[3])
    assert len(wire.live(RECORDS[0])) == 6


def test_news_of_a_stranger_is_not_lost() -> None:
    wire = Wire(RECORDS[:100], [RECORDS[1], RECORDS[0]])
    wire.say(RECORDS[1], RECORDS[0], News(Gossip((RECORDS[200],))))
    assert PeerId(RECORDS[200].peer) in wire.live(RECORDS[0])
