"""News that is only mentioned: who asks for it, whom, when again, and who does not."""

from __future__ import annotations

from collections import Counter
from typing import Any

import msgspec
import pytest

from moshpit.events import Notice
from moshpit.protocol.gossip import DEAD, PAGE_ITEMS, SUSPECT, mention_of
from moshpit.protocol.machine import Effect, Emit, Received, Send
from moshpit.protocol.membership import Membership
from moshpit.protocol.mentions import ASKED_MAX
from moshpit.protocol.view import Status
from moshpit.types import PeerId
from moshpit.wire.messages import Gossip, Mention, Message, News, NewsAsk, PeerRecord, Suspicion

from .harness_membership import QUIET, Net, knowing, peer_id, record_of, signed

ME, A, B, C = (peer_id(n) for n in range(4))
RECORD = signed(record_of(3, version=5))
MENTION = mention_of(RECORD)
ASKS = NewsAsk((C[:6],))
ANSWER_S = QUIET.probe_timeout_s


def told(made: Membership, peer: PeerId, now: float, *mentions: Mention) -> list[Effect]:
    return made.handle(Received(peer, News(Gossip((), (), mentions))), now)


def asked(made: Membership, *peers: PeerId) -> list[Effect]:
    return made.handle(Received(A, NewsAsk(tuple(peer[:6] for peer in peers))), 1.0)


def test_a_mention_says_which_news_it_is_in_a_dozen_bytes() -> None:
    assert mention_of(RECORD) == Mention(C[:6], 0, 5)
    assert mention_of(Suspicion(C, 7, False, A)) == Mention(C[:6], 7, SUSPECT)
    assert mention_of(Suspicion(C, 7, True, A)) == Mention(C[:6], 7, DEAD)
    assert len(msgspec.msgpack.encode(MENTION)) <= 14
    assert len(msgspec.msgpack.encode(RECORD)) > 300


def test_who_lacks_it_asks_one_peer_at_a_time_and_takes_the_answer() -> None:
    made = knowing(1, 2)
    assert told(made, A, 1.0, MENTION) == [Send(A, ASKS)]
    assert told(made, B, 1.1, MENTION) == []  # under way
    assert told(made, B, 1.01 + ANSWER_S, MENTION) == [Send(B, ASKS)]  # it was lost
    made.handle(Received(B, News(Gossip((RECORD,)))), 2.0)
    assert made.view.record(C) == RECORD
    assert Send(A, ASKS) not in told(made, A, 9.0, MENTION)


@pytest.mark.parametrize(
    ("mention", "asks"),
    [
        (Mention(C[:6], 1, 4), False),  # older
        (Mention(C[:6], 1, 5), False),  # the same
        (Mention(C[:6], 0, 99), False),  # of an earlier life
        (Mention(C[:6], 1, 6), True),
        (Mention(C[:6], 2, 0), True),
        (Mention(C[:6], 1, SUSPECT), True),
        (Mention(C[:6], 1, DEAD), True),
        (Mention(C[:6], 0, DEAD), False),  # it lives again
        (Mention(C[:6], 2, DEAD), False),  # its record comes first
    ],
)
def test_only_what_is_news_is_asked_for(mention: Mention, asks: bool) -> None:
    made = knowing(1, 2)
    record = signed(record_of(3, incarnation=1, version=5))
    made.handle(Received(B, News(Gossip((record,)))), 0.9)
    effects = told(made, B, 1.2, mention)
    assert (Send(B, ASKS) in effects) is asks


def test_the_dead_are_asked_about_only_for_a_new_life() -> None:
    made = knowing(1, 2, 3)
    made.handle(Received(A, News(Gossip((), (Suspicion(C, 0, True, A),)))), 0.9)
    assert made.view.status(C) is Status.DEAD
    for version in (DEAD, SUSPECT, 0, 9):
        assert Send(B, ASKS) not in told(made, B, 1.2, Mention(C[:6], 0, version))
    assert Send(B, ASKS) in told(made, B, 1.2, Mention(C[:6], 1, 0))


def test_nobody_asks_about_the_death_of_somebody_unknown() -> None:
    made = knowing(1, 2)
    assert told(made, A, 1.0, Mention(C[:6], 0, DEAD), Mention(C[:6], 0, SUSPECT)) == []


def test_whoever_is_asked_tells_what_it_believes() -> None:
    made = knowing(1, 2, 3)
    made.handle(Received(A, News(Gossip((), (Suspicion(C, 0, True, A),)))), 0.9)
    assert asked(made, B, C) == [
        Send(A, News(Gossip((signed(record_of(2)),), (Suspicion(C, 0, True, ME),))))
    ]
    assert asked(made, peer_id(77)) == []


def test_asking_for_the_same_twice_brings_it_once() -> None:
    made = knowing(1, 2)
    assert asked(made, B, B, B) == [Send(A, News(Gossip((signed(record_of(2)),))))]


@pytest.mark.parametrize(
    ("message", "words"),
    [
        (News(Gossip((), (), (Mention(b"12345", 0, 0),))), "short id of a wrong length"),
        (News(Gossip((), (), (Mention(C, 0, 0),))), "short id of a wrong length"),
        (News(Gossip((), (), (Mention(C[:6], -1, 0),))), "counter out of range"),
        (News(Gossip((), (), (Mention(C[:6], 0, -3),))), "counter out of range"),
        (News(Gossip((), (), (Mention(C[:6], 1 << 60, 0),))), "counter out of range"),
        (News(Gossip((), (), (MENTION,) * (PAGE_ITEMS + 1))), "too many mentions"),
        (NewsAsk((b"",)), "short id of a wrong length"),
        (NewsAsk((A[:6],) * (PAGE_ITEMS + 1)), "too many mentions"),
    ],
)
def test_impossible_mentions_are_refused(message: Any, words: str) -> None:
    made = knowing(1, 2)
    assert made.handle(Received(A, message), 1.0) == [Emit(Notice("refused", A, words))]


def test_a_liar_cannot_make_a_peer_ask_without_end() -> None:
    made = knowing(1, 2)
    asks = 0
    for start in range(0, 2 * ASKED_MAX, PAGE_ITEMS):
        mentions = [Mention((start + n).to_bytes(6, "big"), 0, 1) for n in range(1, PAGE_ITEMS + 1)]
        for effect in told(made, A, 1.0, *mentions):
            assert isinstance(effect, Send)
            assert isinstance(effect.message, NewsAsk)
            asks += len(effect.message.peers)
    assert asks == ASKED_MAX


class Listening(Net):
    """Counts what arrives of the records of one peer."""

    def __init__(self, seed: int, number: int) -> None:
        super().__init__(seed)
        self.about = peer_id(number)
        self.bodies: Counter[PeerId] = Counter()

    def _send(self, a: PeerId, b: PeerId, message: Message) -> None:
        gossip = getattr(message, "gossip", None)
        if gossip is not None and b != self.about:
            records: tuple[PeerRecord, ...] = gossip.records
            self.bodies[b] += sum(record.peer == self.about for record in records)
        super()._send(a, b, message)


@pytest.mark.parametrize("seed", [1, 2])
def test_everybody_gets_a_newcomers_record_about_once(seed: int) -> None:
    net = Listening(seed, 60)
    net.grow(60)
    net.run_until(lambda: net.agree(list(range(60))), 30.0)
    net.run(20.0)
    net.add(60)
    net.dial(60, 7)
    assert net.run_until(lambda: net.everywhere(60, Status.ALIVE), 10.0, 0.05) <= 2.5
    net.run(20.0)
    got = [net.bodies[peer_id(n)] for n in range(60)]
    assert min(got) >= 1
    assert sum(got) / 60 < 2.5  # told in full each time it was 7 to 9
