"""Many joiners at once: they serve each other, so that donors give everything about once.

A small world of the real machines: messages and pieces take a moment each, a peer's pieces go out
one after the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.events import Notice
from moshpit.protocol import stategiving, statesharing, statesync
from moshpit.protocol.machine import Emit, Send
from moshpit.protocol.stategiving import (
    DropSnapshots,
    SendPiece,
    Snapshot,
    StateGiving,
    WantSnapshot,
)
from moshpit.protocol.statesharing import StateSharing
from moshpit.protocol.statesync import Fetched, FetchFailed, ReadManifest, StateFetch
from moshpit.types import PeerId
from moshpit.wire.transfer import (
    StateAsk,
    StateDone,
    StateElsewhere,
    StateLack,
    StateOffer,
    StateRefused,
    StateWant,
)

from .test_statesync import PIECE_BYTES, hash_of, offer_of, peer, state

PIECES = 200
MESSAGE_S = 0.01
PIECE_S = 0.005


@dataclass
class Donor:
    giving: StateGiving
    offer: StateOffer
    pieces: dict[bytes, int]


@dataclass
class Joiner:
    fetch: StateFetch
    sharing: StateSharing
    lies: bool = False
    silent: bool = False
    result: Fetched | FetchFailed | None = None
    notices: list[Notice] = field(default_factory=list)


class World:
    """Donors of one state (or of states that have ``shared`` pieces in common), and joiners."""

    def __init__(self, donors: int, *, pieces: int = PIECES, shared: int | None = None) -> None:
        self.now = 0.0
        self.order = itertools.count()
        self.queue: list[tuple[float, int, tuple]] = []
        self.busy: dict[PeerId, float] = {}
        self.sent: Counter[PeerId] = Counter()
        self.dead: set[PeerId] = set()
        self.donors: dict[PeerId, Donor] = {}
        self.joiners: dict[PeerId, Joiner] = {}
        self.manifests: dict[tuple[bytes, ...], dict[bytes, int]] = {}
        for number in range(1, donors + 1):
            name = "a" if shared is None else f"of {number}"
            giving = StateGiving()
            giving.able = True
            made = Donor(giving, offer_of(name, 5), state(name, pieces, shared or 0))
            self.donors[peer(number)] = made
            self.manifests[made.offer.manifest] = made.pieces

    def join(self, number: int, *, at: float = 0.0, shares: bool = True, **what: bool) -> Joiner:
        me = peer(100 + number)
        fetch = StateFetch(
            [*self.donors, *self.joiners],  # from outside, joiners that listen look like donors
            piece_bytes_max=PIECE_BYTES,
            epoch_min=0,
            rng=Random(number),
            seq=0,
            now=at,
            shares=shares,
            reach=lambda other: other != me and other not in self.dead,
        )
        joiner = self.joiners[me] = Joiner(fetch, StateSharing(fetch, at), **what)
        self.later(at, "start", me)
        return joiner

    def later(self, at: float, *what: object) -> None:
        heapq.heappush(self.queue, (at, next(self.order), what))

    def kill(self, who: PeerId) -> None:
        self.dead.add(who)
        for me, joiner in self.joiners.items():
            if me not in self.dead:
                joiner.sharing.lost(who)
                self.took(me, joiner, joiner.fetch.lost(who, self.now))
        for me, donor in self.donors.items():
            if me not in self.dead:
                self.gave(me, donor.giving.lost(who))

    def run(self, until: float = 4000.0, kills: dict[float, PeerId] | None = None) -> None:
        kills = dict(kills or {})
        while self.queue and self.now < until:
            self.now, _, what = heapq.heappop(self.queue)
            for at in [at for at in kills if at <= self.now]:
                self.kill(kills.pop(at))
            self.event(*what)
            if all(j.result for me, j in self.joiners.items() if me not in self.dead):
                return
        raise AssertionError("not all have an end")

    def event(self, kind: str, me: PeerId, *rest: object) -> None:
        if me in self.dead:
            return
        joiner, donor = self.joiners.get(me), self.donors.get(me)
        if kind == "start":
            self.took(me, joiner, joiner.fetch.start(self.now))
            self.later(self.now + 0.5, "tick", me)
        elif kind == "tick":
            self.took(me, joiner, joiner.fetch.tick(self.now))
            if joiner.result is None:
                self.later(self.now + 0.5, "tick", me)
        elif kind == "message":
            sender, message = rest
            if donor is not None:
                self.gave(me, donor.giving.received(sender, message, 5, self.now))
            elif isinstance(message, StateWant):
                self.shared(me, joiner, joiner.sharing.wanted(sender, message.hashes, self.now))
            elif isinstance(message, StateDone):
                joiner.sharing.lost(sender)
            elif isinstance(message, StateAsk):
                self.send(me, sender, StateRefused(message.seq, "no-state"))
            else:
                self.took(me, joiner, joiner.fetch.received(sender, message, self.now))
        elif kind == "piece":
            sender, piece, fault = rest
            if joiner.fetch.expected(sender, piece[:16]) is not None:
                effects = joiner.fetch.arrived(sender, piece, fault, self.now)
                if not fault:
                    self.shared(me, joiner, joiner.sharing.arrived(piece))
                self.took(me, joiner, effects)
        else:
            self.send_piece(me, *rest)

    def send(self, me: PeerId, to: PeerId, message: object) -> None:
        self.later(self.now + MESSAGE_S, "message", to, me, message)

    def put(self, me: PeerId, to: PeerId, piece: bytes) -> None:
        """A link carries one piece after the other."""
        done = self.busy[me] = max(self.now, self.busy.get(me, 0.0)) + PIECE_S
        self.later(done, "sent", me, to, piece)

    def send_piece(self, me: PeerId, to: PeerId, piece: bytes) -> None:
        self.sent[me] += 1
        fault = ""
        if me in self.donors:
            self.donors[me].giving.sent(to)
        else:
            self.joiners[me].sharing.sent(to)
            if self.joiners[me].silent:
                return
            fault = "other bytes" if self.joiners[me].lies else ""
        self.later(self.now + MESSAGE_S, "piece", to, me, piece, fault)

    def gave(self, me: PeerId, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(peer=to, message=message):
                    self.send(me, to, message)
                case SendPiece(peer=to, piece=piece):
                    self.put(me, to, piece)
                case WantSnapshot():
                    donor = self.donors[me]
                    known = {**donor.pieces, donor.offer.manifest[0]: 0}
                    snapshot = Snapshot(0, 5, donor.offer, known)
                    self.gave(me, donor.giving.snapshot(snapshot, self.now))

    def shared(self, me: PeerId, joiner: Joiner, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(peer=to, message=message):
                    self.send(me, to, message)
                case SendPiece(peer=to, piece=piece):
                    assert joiner.fetch.has(piece)
                    self.put(me, to, piece)
                case Emit(notice=notice):
                    joiner.notices.append(notice)

    def took(self, me: PeerId, joiner: Joiner, effects: list) -> None:
        for effect in effects:
            match effect:
                case Send(peer=to, message=message):
                    self.send(me, to, message)
                case Emit(notice=notice):
                    joiner.notices.append(notice)
                case ReadManifest(offer=offer):
                    pieces = list(self.manifests[offer.manifest].items())
                    self.took(me, joiner, joiner.fetch.manifest_read(pieces, "", self.now))
                case Fetched() | FetchFailed():
                    assert joiner.result is None, "it ends once"
                    joiner.result = effect
                    complete = isinstance(effect, Fetched)
                    self.shared(me, joiner, joiner.sharing.ended(complete, self.now))


def given_by_donors(donors: int, joiners: int, **what: int) -> list[int]:
    world = World(donors, **what)
    for number in range(joiners):
        world.join(number)
    world.run()
    assert all(isinstance(j.result, Fetched) for j in world.joiners.values())
    assert not any(j.notices for j in world.joiners.values())
    return [world.sent[who] for who in world.donors]


@pytest.mark.parametrize("donors", [1, 2, 4])
def test_eight_joiners_cost_a_donor_about_as_much_as_two(donors: int) -> None:
    two, eight = (max(given_by_donors(donors, joiners)) for joiners in (2, 8))
    assert eight <= 1.25 * two
    assert eight <= 1.4 * (PIECES + 1) / donors, "all of them together give a state about once"


def test_donors_of_different_states_give_a_state_each_at_most() -> None:
    given_each = given_by_donors(3, 8, shared=PIECES // 3)
    assert max(given_each) <= 1.1 * (PIECES + 1)


def test_the_load_of_passing_on_is_shared() -> None:
    world = World(1)
    for number in range(8):
        world.join(number)
    world.run()
    passed = [world.sent[who] for who in world.joiners]
    assert sum(passed) + world.sent[peer(1)] == 8 * (PIECES + 1), "nothing came twice"
    assert max(passed) <= 2 * (PIECES + 1)


def test_those_who_come_late_are_served_by_those_who_have_it() -> None:
    world = World(1)
    for number in range(8):
        world.join(number, at=0.1 * number)
    world.run()
    assert all(isinstance(j.result, Fetched) for j in world.joiners.values())
    assert world.sent[peer(1)] <= 1.5 * (PIECES + 1)


def test_those_who_come_one_after_the_other_too() -> None:
    """Each after the one before has all of it, within the time that it is kept."""
    world = World(1)
    for number in range(5):
        world.join(number, at=4.0 * number)
    world.run()
    assert all(isinstance(j.result, Fetched) for j in world.joiners.values())
    assert world.sent[peer(1)] <= 1.2 * (PIECES + 1)


def test_a_donor_forgets_who_keeps_a_state_and_the_snapshot_after_a_while() -> None:
    giving = StateGiving()
    giving.able = True
    giving.received(peer(1), StateAsk(1, shares=True), 5, 0.0)
    giving.snapshot(Snapshot(0, 5, offer_of("a", 5), state("a")), 0.0)
    piece = next(iter(state("a")))
    giving.received(peer(1), StateWant((piece,)), 5, 0.0)
    assert giving.received(peer(1), StateDone(1, keeps=True), 5, 1.0) == []
    assert not giving.serves(peer(1))
    assert giving.wakeup == 1.0 + stategiving.KEEPS_S
    giving.received(peer(2), StateAsk(1), 5, 5.0)
    assert giving.received(peer(2), StateWant((piece,)), 5, 6.0) == [
        Send(peer(2), StateElsewhere((piece,), peer(1)))
    ]
    giving.received(peer(2), StateDone(1), 5, 7.0)
    assert giving.wakeup == 6.0 + stategiving.KEEPS_S, "it was sent somebody, so it keeps it longer"
    assert giving.tick(6.0 + stategiving.KEEPS_S) == [DropSnapshots(())]
    assert giving.wakeup is None
    assert stategiving.KEEPS_S < statesharing.LINGER_S


def test_who_cannot_be_dialled_fetches_from_others_and_is_sent_to_nobody() -> None:
    world = World(1)
    for number in range(4):
        world.join(number, shares=number == 0)
    world.run()
    assert all(isinstance(j.result, Fetched) for j in world.joiners.values())
    assert [world.sent[who] > 0 for who in world.joiners] == [True, False, False, False]


def test_a_fellow_that_lies_is_named_and_the_donor_gives_it() -> None:
    world = World(1)
    world.join(0, lies=True)
    for number in (1, 2, 3):
        world.join(number)
    world.run()
    assert all(isinstance(j.result, Fetched) for j in world.joiners.values())
    blamed = {(n.code, n.peer) for j in world.joiners.values() for n in j.notices}
    assert blamed == {("state-refused", peer(100))}


def test_a_fellow_that_hangs_costs_time_and_nothing_else() -> None:
    world = World(1)
    world.join(0, silent=True)
    other = world.join(1)
    world.run()
    assert isinstance(other.result, Fetched)
    assert world.now < 4 * statesync.FELLOW_STALL_S


@pytest.mark.parametrize("at", [0.2, 0.6, 1.0])
def test_a_fellow_that_dies_is_replaced_by_the_donor(at: float) -> None:
    world = World(1)
    for number in range(4):
        world.join(number)
    world.run(kills={at: peer(100), at + 0.1: peer(101)})
    for number in (2, 3):
        assert isinstance(world.joiners[peer(100 + number)].result, Fetched)


def test_joiners_whose_only_donor_has_died_share_what_there_is() -> None:
    """Together they have all of it: whoever gets the last piece, all others get it from there."""
    world = World(1, pieces=40)
    whole = world.join(0)
    world.run()
    assert isinstance(whole.result, Fetched)
    late = world.join(1, at=world.now)
    with pytest.raises(AssertionError, match="not all have an end"):
        world.run(until=world.now + 0.1)
    gave = world.sent[peer(1)]
    world.run(kills={world.now: peer(1)})
    if isinstance(late.result, FetchFailed):
        assert late.result.reason == "nobody is left who could give it"
    assert world.sent[peer(1)] - gave <= 40


@given(st.data())
def test_whatever_happens_everybody_has_an_end(data: st.DataObject) -> None:
    donors, joiners = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 5))
    world = World(donors, pieces=30, shared=data.draw(st.sampled_from([None, 10])))
    for number in range(joiners):
        world.join(
            number,
            at=data.draw(st.floats(0.0, 0.5)),
            shares=data.draw(st.booleans()),
            lies=data.draw(st.booleans()),
        )
    everybody = [*world.donors, *world.joiners]
    kills = data.draw(st.dictionaries(st.floats(0.0, 0.8), st.sampled_from(everybody), max_size=3))
    world.run(kills=kills)
    honest = [j for j in world.joiners.values() if j.result is not None]
    if not any(who in world.dead for who in world.donors):
        assert all(isinstance(j.result, Fetched) for j in honest)
    liars = {who for who, j in world.joiners.items() if j.lies}
    for joiner in world.joiners.values():
        named = {n.peer for n in joiner.notices if n.code == "state-refused"}
        assert named <= liars


# --- the sharing side by itself -------------------------------------------------------------


def sharing_of(pieces: dict[bytes, int]) -> tuple[StateFetch, StateSharing]:
    offer = offer_of("a", 5)
    fetch = StateFetch(
        [peer(1)], piece_bytes_max=PIECE_BYTES, epoch_min=0, rng=Random(1), seq=0, now=0.0
    )
    fetch.start(0.0)
    fetch.received(peer(1), msgspec.structs.replace(offer, seq=1), 0.0)
    fetch.arrived(peer(1), offer.manifest[0], "", 0.0)
    fetch.manifest_read(list(pieces.items()), "", 0.0)
    return fetch, StateSharing(fetch, 0.0)


def test_what_is_under_way_is_sent_when_it_comes() -> None:
    fetch, sharing = sharing_of(state("a", 3))
    one, two, three = state("a", 3)
    fetch.arrived(peer(1), one, "", 0.0)
    assert sharing.wanted(peer(5), (one, two, hash_of("x")), 0.0) == [
        SendPiece(peer(5), one),
        Send(peer(5), StateLack((hash_of("x"),))),
    ]
    fetch.arrived(peer(1), two, "", 0.0)
    assert sharing.arrived(two) == [SendPiece(peer(5), two)]
    assert sharing.arrived(two) == [], "once"
    sharing.wanted(peer(6), (three,), 0.0)
    fetch.lost(peer(1), 0.0)
    assert sharing.ended(False, 1.0) == [Send(peer(6), StateLack((three,)))]
    assert sharing.over


def test_bytes_go_when_nobody_wants_them_any_more() -> None:
    fetch, sharing = sharing_of(state("a", 1))
    (one,) = state("a", 1)
    fetch.arrived(peer(1), one, "", 0.0)
    assert sharing.ended(True, 5.0) == []
    sharing.wanted(peer(5), (one,), 9.0)
    sharing.tick(5.0 + statesharing.LINGER_S)
    assert not sharing.over, "somebody has just asked"
    assert sharing.wakeup == 9.0 + statesharing.LINGER_S
    for at in range(10, 600, 5):
        sharing.wanted(peer(5), (one,), float(at))
    sharing.tick(5.0 + statesharing.SHARE_S_MAX)
    assert sharing.over, "who never has enough does not keep them"
    assert sharing.wanted(peer(5), (one,), 700.0) == [Send(peer(5), StateLack((one,)))]


@pytest.mark.parametrize("hashes", [(), (b"x",), (bytes(32),) * 17], ids=["none", "odd", "many"])
def test_impossible_wishes_are_told(hashes: tuple[bytes, ...]) -> None:
    _, sharing = sharing_of(state("a", 3))
    (told,) = sharing.wanted(peer(5), hashes, 0.0)
    assert isinstance(told, Emit)
    assert (told.notice.code, told.notice.peer) == ("bad-state-want", peer(5))


def test_too_many_fellows_are_sent_back() -> None:
    fetch, sharing = sharing_of(state("a", 1))
    (one,) = state("a", 1)
    fetch.arrived(peer(1), one, "", 0.0)
    for number in range(statesharing.SHARED_WITH_MAX):
        assert sharing.wanted(peer(10 + number), (one,), 0.0) == [SendPiece(peer(10 + number), one)]
    assert sharing.wanted(peer(99), (one,), 0.0) == [Send(peer(99), StateLack((one,)))]


@pytest.mark.parametrize("holder", [b"", b"short", bytes(32), bytes([7]) * 1000])
def test_a_donor_that_sends_one_nowhere_is_asked_again(holder: bytes) -> None:
    pieces = state("a", 3)
    fetch, _ = sharing_of(pieces)
    asked = tuple(pieces)
    effects = fetch.received(peer(1), StateElsewhere(asked, holder), 1.0)
    (again,) = [e.message for e in effects if isinstance(e, Send)]
    assert isinstance(again, StateWant)
    assert sorted(again.hashes) == sorted(asked)
    assert fetch.received(peer(9), StateElsewhere(asked, peer(8)), 1.0) == [], "a stranger"


def test_nobody_who_shares_is_named_before_it_has_asked_for_the_piece() -> None:
    giving = StateGiving()
    giving.able = True
    one, two = list(state("a"))[:2]
    for number in (1, 2):
        giving.received(peer(number), StateAsk(1, shares=True), 5, 0.0)
    offer = offer_of("a", 5)
    giving.snapshot(Snapshot(0, 5, offer, state("a")), 0.0)
    assert giving.received(peer(1), StateWant((one,)), 5, 0.0) == [SendPiece(peer(1), one)]
    assert giving.received(peer(2), StateWant((one, two)), 5, 0.0) == [
        SendPiece(peer(2), two),
        Send(peer(2), StateElsewhere((one,), peer(1))),
    ]
    assert giving.received(peer(2), StateWant((one,)), 5, 0.0) == [SendPiece(peer(2), one)]
    assert giving.received(peer(1), StateWant((one,)), 5, 0.0) == [SendPiece(peer(1), one)], (
        "not to peer 2, which may wait for it"
    )
    giving.received(peer(1), StateDone(1), 5, 0.0)
    giving.received(peer(3), StateAsk(1), 5, 0.0)
    assert giving.received(peer(3), StateWant((two,)), 5, 0.0) == [
        Send(peer(3), StateElsewhere((two,), peer(2)))
    ]
