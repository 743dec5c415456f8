"""State transfer's two machines, and donors that die, lie and dawdle."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from random import Random

import msgspec
import pytest

from moshpit.events import Notice
from moshpit.protocol import stategiving, statesync
from moshpit.protocol.machine import Emit, Send
from moshpit.protocol.stategiving import (
    DropSnapshots,
    SendPiece,
    Snapshot,
    StateGiving,
    WantSnapshot,
)
from moshpit.protocol.statesync import Fetched, FetchFailed, ReadManifest, StateFetch
from moshpit.types import PeerId
from moshpit.wire.transfer import (
    StateAsk,
    StateComing,
    StateDone,
    StateLack,
    StateOffer,
    StateRefused,
    StateWant,
)

ME = PeerId(bytes(32))
PIECE_BYTES = 4096


def peer(number: int) -> PeerId:
    return PeerId(bytes([number]) * 32)


def hash_of(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=32).digest()


def state(name: str, size: int = 12, shared: int = 0) -> dict[bytes, int]:
    """Pieces (hash, length) of a state; the first ``shared`` are in every state."""
    names = [f"shared {i}" if i < shared else f"{name} {i}" for i in range(size)]
    return {hash_of(n): PIECE_BYTES for n in names}


def offer_of(name: str, epoch: int, pieces: int = 1) -> StateOffer:
    manifest = tuple(hash_of(f"manifest {name} {i}") for i in range(pieces))
    return StateOffer(0, epoch, b"s" * 16, manifest, pieces * PIECE_BYTES - 10, PIECE_BYTES)


@dataclass
class FakeDonor:
    """A donor's behaviour: what it has, and what is wrong with it."""

    offer: StateOffer
    pieces: dict[bytes, int]
    coming: bool = True
    offers: bool = True
    sends: bool = True
    lies: bool = False
    served: list[bytes] = field(default_factory=list)


class Bench:
    """A fetch against such donors; time passes only in `pass_time`."""

    def __init__(self, donors: dict[PeerId, FakeDonor], epoch_min: int = 0) -> None:
        self.donors = donors
        self.now = 0.0
        self.notices: list[Notice] = []
        self.result: Fetched | FetchFailed | None = None
        self.manifests: dict[tuple[bytes, ...], dict[bytes, int] | str] = {
            d.offer.manifest: d.pieces for d in donors.values()
        }
        self.done: list[PeerId] = []
        self.queue: list[object] = []
        self.taken = 0
        self.fetch = StateFetch(
            list(donors),
            piece_bytes_max=PIECE_BYTES,
            epoch_min=epoch_min,
            rng=Random(3),
            seq=0,
            now=0.0,
        )
        self.queue += self.fetch.start(self.now)

    def run(self, effects_max: int = 100_000) -> None:
        """Execute effects until there are no more, or so many were."""
        while self.queue and effects_max > 0:
            effects_max -= 1
            self.execute(self.queue.pop(0))

    def execute(self, effect: object) -> None:
        match effect:
            case Send(peer=to, message=message):
                self.answer(to, message)
            case Emit(notice=notice):
                self.notices.append(notice)
            case ReadManifest(offer=offer):
                known = self.manifests[offer.manifest]
                pieces, fault = ((), known) if isinstance(known, str) else (known.items(), "")
                self.queue += self.fetch.manifest_read(list(pieces), fault, self.now)
            case Fetched() | FetchFailed():
                assert self.result is None, "it ends once"
                self.result = effect

    def answer(self, to: PeerId, message: object) -> None:
        donor = self.donors[to]
        match message:
            case StateAsk(seq=seq):
                if donor.coming:
                    self.queue += self.fetch.received(to, StateComing(seq), self.now)
                if donor.offers:
                    offer = msgspec.structs.replace(donor.offer, seq=seq)
                    self.queue += self.fetch.received(to, offer, self.now)
            case StateWant(hashes=hashes):
                self.want(to, donor, hashes)
            case StateDone():
                self.done.append(to)

    def want(self, to: PeerId, donor: FakeDonor, hashes: tuple[bytes, ...]) -> None:
        for piece in hashes:
            if piece not in donor.pieces and piece not in donor.offer.manifest:
                self.queue += self.fetch.received(to, StateLack((piece,)), self.now)
            elif donor.sends:
                expected = self.fetch.expected(to, piece[:16])
                if expected is None:
                    continue  # it was taken back
                assert expected[0] == piece
                donor.served.append(piece)
                fault = "other bytes" if donor.lies else ""
                self.queue += self.fetch.arrived(to, piece, fault, self.now)

    def pass_time(self, seconds: float) -> None:
        end = self.now + seconds
        while self.now < end and self.result is None:
            self.now = max(self.now, self.fetch.wakeup)
            self.queue += self.fetch.tick(self.now)
            self.run()

    @property
    def blamed(self) -> list[tuple[str, PeerId | None]]:
        return [(n.code, n.peer) for n in self.notices]


def alike(count: int, **what: object) -> dict[PeerId, FakeDonor]:
    return {
        peer(i): FakeDonor(offer_of("a", 5, 2), state("a", 40), **what) for i in range(1, count + 1)
    }


def test_alike_donors_share_the_work() -> None:
    bench = Bench(alike(3))
    bench.run()
    assert isinstance(bench.result, Fetched)
    served = [piece for d in bench.donors.values() for piece in d.served]
    assert sorted(served) == sorted([*state("a", 40), *offer_of("a", 5, 2).manifest]), "once each"
    assert all(len(d.served) > 5 for d in bench.donors.values())
    assert sorted(bench.done) == sorted(bench.donors), "all are told that it is over"


def test_a_liar_is_named_and_its_pieces_come_from_others() -> None:
    donors = alike(3)
    donors[peer(2)].lies = True
    bench = Bench(donors)
    bench.run()
    assert isinstance(bench.result, Fetched)
    assert bench.blamed == [("state-refused", peer(2))]


def test_one_that_dies_is_replaced_and_nothing_is_fetched_twice() -> None:
    bench = Bench(alike(2))
    bench.run(14)
    assert bench.result is None
    bench.queue += bench.fetch.lost(peer(1), bench.now)
    bench.run()
    assert isinstance(bench.result, Fetched)
    one, two = (bench.donors[peer(i)].served for i in (1, 2))
    assert one, "it had begun"
    assert not set(one) & set(two)


def test_a_slow_one_is_given_up_and_the_other_finishes() -> None:
    donors = alike(2)
    donors[peer(1)].sends = False
    bench = Bench(donors)
    bench.run()
    assert bench.result is None, "some pieces wait for the silent one"
    bench.pass_time(3 * statesync.STALL_S)
    assert isinstance(bench.result, Fetched)


@pytest.mark.parametrize("how", ["coming", "offers", "sends"])
def test_silence_of_all_is_a_failure_in_time(how: str) -> None:
    silent = {"coming": False, "offers": False} if how == "coming" else {how: False}
    bench = Bench(alike(2, **silent))
    bench.run()
    bench.pass_time(2 * statesync.OFFER_S)
    assert isinstance(bench.result, FetchFailed)
    assert sorted(bench.blamed) == [("state-silent", peer(1)), ("state-silent", peer(2))]
    assert bench.fetch.ended


@pytest.mark.parametrize("lost", ["ask", "offer"])
def test_what_was_lost_on_the_way_is_asked_for_again(lost: str) -> None:
    donors = alike(1, offers=False)
    bench = Bench(donors)
    bench.run()
    donors[peer(1)].offers = True
    bench.pass_time(statesync.REMIND_S - 1.0)
    assert bench.result is None, "it has promised one, and has its time"
    donors[peer(1)].coming = lost == "ask"  # a donor that has heard of it before says no more
    bench.pass_time(2.0)
    assert isinstance(bench.result, Fetched)
    assert bench.now < statesync.OFFER_S
    assert bench.notices == []


def test_refusals_lead_to_the_next_donors() -> None:
    donors = alike(statesync.DONORS_MAX + 2, coming=False, offers=False)
    bench = Bench(donors)
    bench.run()
    asked = list(bench.fetch._donors)
    assert len(asked) == statesync.DONORS_MAX
    for seq, donor in enumerate(asked, start=1):
        bench.queue += bench.fetch.received(donor, StateRefused(seq, "busy"), 0.0)
    bench.run()
    assert len(bench.fetch._donors) == statesync.DONORS_MAX + 2


def test_the_newest_epoch_wins_and_common_pieces_are_kept() -> None:
    old = FakeDonor(offer_of("old", 5), state("old", 12, shared=6))
    new = FakeDonor(offer_of("new", 6), state("new", 12, shared=6), offers=False)
    bench = Bench({peer(1): old, peer(2): new})
    bench.run(9)
    assert old.served
    assert bench.result is None
    seq = bench.fetch._donors[peer(2)].seq
    late = msgspec.structs.replace(new.offer, seq=seq)
    bench.queue += bench.fetch.received(peer(2), late, bench.now)
    bench.run()
    assert isinstance(bench.result, Fetched)
    assert bench.result.offer.manifest == new.offer.manifest
    assert not set(old.served) & set(new.served)


def test_what_only_a_dead_donor_had_makes_another_state_take_its_place() -> None:
    one = FakeDonor(offer_of("one", 5), state("one", 12, shared=4))
    two = FakeDonor(offer_of("two", 5), state("two", 12, shared=4))
    bench = Bench({peer(1): one, peer(2): two})
    bench.run(8)
    assert bench.result is None
    assert one.served or two.served
    assert bench.fetch._offer is not None
    gone = peer(1) if bench.fetch._offer.manifest == one.offer.manifest else peer(2)
    bench.queue += bench.fetch.lost(gone, bench.now)
    bench.run()
    assert isinstance(bench.result, Fetched)
    other = two if gone == peer(1) else one
    assert bench.result.offer.manifest == other.offer.manifest


def test_the_same_state_may_be_offered_again_by_one_that_has_it() -> None:
    bad, good = alike(2, offers=False).values()
    bad.offers, bad.lies = True, True
    bench = Bench({peer(1): bad, peer(2): good})
    bench.run()
    assert bench.result is None, "the other one may still make an offer"
    seq = bench.fetch._donors[peer(2)].seq
    again = msgspec.structs.replace(good.offer, seq=seq)
    bench.queue += bench.fetch.received(peer(2), again, bench.now)
    bench.run()
    assert isinstance(bench.result, Fetched)


def test_a_manifest_that_cannot_be_used_is_blamed_on_all_who_offered_it() -> None:
    donors = alike(2)
    good = FakeDonor(offer_of("good", 5), state("good"))
    bench = Bench({**donors, peer(3): good})
    bench.manifests[donors[peer(1)].offer.manifest] = "not a manifest"
    bench.run()
    assert isinstance(bench.result, Fetched)
    assert bench.result.offer.manifest == good.offer.manifest
    alone = Bench(alike(2))
    alone.manifests[donors[peer(1)].offer.manifest] = "not a manifest"
    alone.run()
    assert isinstance(alone.result, FetchFailed)
    assert sorted(alone.blamed) == [("state-refused", peer(1)), ("state-refused", peer(2))]


@pytest.mark.parametrize(
    "wrong",
    [
        {"epoch": -1},
        {"epoch": 1 << 80},
        {"manifest": ()},
        {"manifest": (b"short",)},
        {"manifest_bytes": -5},
        {"manifest_bytes": 1 << 60},
        {"piece_bytes": 0},
        {"piece_bytes": PIECE_BYTES + 1},
        {"schema": bytes(1000)},
        {"manifest": (bytes(32),) * 5000, "manifest_bytes": 5000 * PIECE_BYTES},
    ],
    ids=str,
)
def test_impossible_offers_are_refused_by_name(wrong: dict[str, object]) -> None:
    donor = FakeDonor(msgspec.structs.replace(offer_of("a", 5), **wrong), state("a"))
    bench = Bench({peer(1): donor})
    bench.run()
    assert isinstance(bench.result, FetchFailed)
    assert bench.blamed == [("state-refused", peer(1))]


def test_earlier_epochs_and_strangers_are_of_no_use() -> None:
    bench = Bench(alike(1), epoch_min=6)
    bench.run()
    assert isinstance(bench.result, FetchFailed)
    other = Bench(alike(1, offers=False))
    other.run()
    assert other.fetch.received(peer(9), offer_of("a", 9), 0.0) == []
    assert other.fetch.expected(peer(9), bytes(16)) is None


# --- the donor ------------------------------------------------------------------------------


def snapshot(number: int, epoch: int, name: str = "a") -> Snapshot:
    offer = offer_of(name, epoch)
    return Snapshot(number, epoch, offer, {**state(name), offer.manifest[0]: 0})


def test_one_snapshot_serves_all_who_ask_in_an_epoch() -> None:
    giving = StateGiving()
    giving.able = True
    first = giving.received(peer(1), StateAsk(7), 5, 0.0)
    assert first == [Send(peer(1), StateComing(7)), WantSnapshot()]
    assert giving.received(peer(2), StateAsk(8), 5, 0.0) == [Send(peer(2), StateComing(8))]
    offered = giving.snapshot(snapshot(0, 6), 1.0)
    assert [(e.peer, e.message.seq) for e in offered if isinstance(e, Send)] == [
        (peer(1), 7),
        (peer(2), 8),
    ]
    third = giving.received(peer(3), StateAsk(9), 6, 2.0)
    assert [type(e.message) for e in third if isinstance(e, Send)] == [StateComing, StateOffer]
    piece = next(iter(state("a")))
    assert giving.received(peer(3), StateWant((piece,)), 6, 2.0) == [SendPiece(peer(3), piece)]
    for number in (1, 2, 3):
        last = giving.received(peer(number), StateDone(6 + number), 6, 3.0)
    assert last == [DropSnapshots(())], "nobody needs it, so it is freed"


def test_later_askers_get_a_newer_snapshot_and_two_are_kept() -> None:
    giving = StateGiving()
    giving.able = True
    for number in range(3):
        asked = giving.received(peer(number), StateAsk(1), number, float(number))
        assert isinstance(asked[-1], WantSnapshot)
        dropped = giving.snapshot(snapshot(number, number, str(number)), float(number))[-1]
    assert dropped == DropSnapshots((1, 2))
    old = next(iter(state("0")))
    assert giving.received(peer(0), StateWant((old,)), 3, 3.0) == [Send(peer(0), StateLack((old,)))]


def test_nothing_to_give_and_too_many_askers_are_refused_at_once() -> None:
    giving = StateGiving()
    refused = giving.received(peer(1), StateAsk(1), 0, 0.0)
    assert refused == [Send(peer(1), StateRefused(1, "no-state"))]
    giving.able = True
    for number in range(stategiving.ASKERS_MAX):
        giving.received(peer(number), StateAsk(1), 0, 0.0)
    full = giving.received(peer(99), StateAsk(1), 0, 0.0)
    assert full == [Send(peer(99), StateRefused(1, "busy"))]
    told = [e.message for e in giving.unable() if isinstance(e, Send)]
    assert told == [StateRefused(1, "no-state")] * stategiving.ASKERS_MAX


def test_who_keeps_silent_is_forgotten() -> None:
    giving = StateGiving()
    giving.able = True
    giving.received(peer(1), StateAsk(1), 0, 0.0)
    giving.snapshot(snapshot(0, 0), 0.0)
    assert giving.wakeup == stategiving.ASKER_SILENT_S
    assert giving.tick(giving.wakeup) == [DropSnapshots(())]
    assert giving.wakeup is None


@pytest.mark.parametrize(
    "hashes", [(), (b"x",), (bytes(32),) * (stategiving.QUEUE_MAX + 1)], ids=["none", "odd", "many"]
)
def test_impossible_wishes_end_the_service(hashes: tuple[bytes, ...]) -> None:
    giving = StateGiving()
    giving.able = True
    giving.received(peer(1), StateAsk(1), 0, 0.0)
    giving.snapshot(snapshot(0, 0), 0.0)
    told = giving.received(peer(1), StateWant(hashes), 0, 0.0)
    assert isinstance(told[0], Emit)
    assert told[0].notice.peer == peer(1)
    piece = next(iter(state("a")))
    later = giving.received(peer(1), StateWant((piece,)), 0, 0.0)
    assert later == [Send(peer(1), StateLack((piece,)))]


def test_a_donor_has_few_pieces_under_way_with_one_asker() -> None:
    giving = StateGiving()
    giving.able = True
    giving.received(peer(1), StateAsk(1), 0, 0.0)
    giving.snapshot(snapshot(0, 0), 0.0)
    pieces = tuple(state("a"))
    sent = []
    for _ in range(4):
        sent += giving.received(peer(1), StateWant(pieces), 0, 0.0)
    assert len(sent) == stategiving.QUEUE_MAX
    giving.sent(peer(1))
    assert len(giving.received(peer(1), StateWant(pieces), 0, 0.0)) == 1
