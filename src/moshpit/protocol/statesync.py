"""Fetching the swarm's training state from several donors, and believing none of them.

Theory of operation. A state is a list of *pieces*, each known by the hash of its bytes. One
donor's manifest says which; any peer may give any piece. `StateFetch`

- asks a few live peers that train the same at the newest epoch (`donors_in`). They take a
  snapshot when their training comes to a place for it, and offer it;
- fetches the manifest of the newest offer, piece by piece, and then what it names, from all
  who have made an offer: each piece from one donor at a time, a few pieces under way with each;
- asks again those that have promised an offer, now and then: what they have said may be lost;
- goes on with others where a donor dies, keeps silent, refuses, or lacks a piece. What has
  come stays. Where nobody has the rest of a state any more, another offer takes its place;
- goes where a donor sends it (`StateElsewhere`): to a *fellow*, which fetches the same and was
  given the piece before. What does not come from there is asked of the donor again;
- ends complete, or failed when nobody is left to ask, and always after `FETCH_S_MAX`.

A piece with other bytes than its hash says, or an impossible offer, is told with its sender's
name, and that peer is asked for nothing more. Bytes are the driver's: it judges what comes and
says so (`arrived`), and it reads the manifest (`ReadManifest`, then `manifest_read`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, final

import msgspec

from moshpit.events import Notice
from moshpit.protocol.machine import Emit, Rng, Send, View
from moshpit.protocol.statewishes import Source, Wishes
from moshpit.types import PeerId, Role
from moshpit.wire.transfer import (
    StateAsk,
    StateComing,
    StateDone,
    StateElsewhere,
    StateLack,
    StateMessage,
    StateOffer,
    StateRefused,
    StateWant,
)

DONORS_MAX: Final = 4  # guess: more bring little on one link, and each takes a snapshot
WINDOW: Final = 4  # guess: pieces under way with one donor, 2 MB
ANSWER_S: Final = 3.0  # guess: an answer needs no training step
OFFER_S: Final = 120.0  # guess: a step, and the hashing of some gigabytes
REMIND_S: Final = 10.0  # guess: an ask or its offer may have gone with a connection
STALL_S: Final = 5.0  # guess: for a window of pieces beside an averaging on a thin link
FELLOW_STALL_S: Final = 15.0  # guess: it may wait for the piece itself
STALLS_MAX: Final = 2
FELLOWS_MAX: Final = 16  # guess: as many as a donor serves
FETCH_S_MAX: Final = 3600.0  # guess
BEAT_S: Final = 0.5
HASH_BYTES: Final = 32
SCHEMA_BYTES_MAX: Final = 64
MANIFEST_PIECES_MAX: Final = 4096  # guess: 2 GB of manifest is nobody's
EPOCH_MAX: Final = 1 << 62


class ReadManifest(msgspec.Struct, frozen=True):
    """All pieces of the manifest are there: read it, and call `StateFetch.manifest_read`."""

    offer: StateOffer


class Fetched(msgspec.Struct, frozen=True):
    """Every piece of the state that ``offer`` names is there."""

    offer: StateOffer


class FetchFailed(msgspec.Struct, frozen=True):
    """There is nobody left to ask."""

    reason: str


FetchEffect = Send | Emit | ReadManifest | Fetched | FetchFailed


def donors_in(
    view: View, me: PeerId, epoch_min: int, numel: bytes = b"", schema: bytes = b""
) -> list[PeerId]:
    """Return the live peers that may have a state of an epoch or a later one, sorted by id.

    Args:
        view: who there is.
        me: not this one.
        epoch_min: the epoch.
        numel: how the schemas of those end that exchange vectors of the right length.
        schema: the whole schema, where it is known already.
    """
    found: list[PeerId] = []
    for peer in view.live:
        record = view.record(peer)
        if (
            record is not None
            and peer != me
            and record.schema
            and record.schema.endswith(numel)
            and (not schema or record.schema == schema)
            and record.epoch >= epoch_min
            and record.role != Role.AUX.value
            and view.reachable(peer)
            and (view.dialable(peer) or view.linked(peer))
        ):
            found.append(peer)
    return found


@final
class StateFetch:
    """One attempt to get a state.

    Args:
        candidates: whom to ask.
        piece_bytes_max: how long a piece may be.
        epoch_min: states of earlier epochs are of no use.
        rng: in which order to ask.
        seq: the first number for `StateAsk`.
        now: seconds.
        shares: whether others can be sent to this peer for what it was given.
        reach: whether another peer can be asked; without it no fellows are.
    """

    def __init__(
        self,
        candidates: Sequence[PeerId],
        *,
        piece_bytes_max: int,
        epoch_min: int,
        rng: Rng,
        seq: int,
        now: float,
        shares: bool = False,
        reach: Callable[[PeerId], bool] | None = None,
    ) -> None:
        self._untried = list(candidates)
        rng.shuffle(self._untried)
        self._piece_bytes_max = piece_bytes_max
        self._epoch_min = epoch_min
        self._seq = seq
        self._began = now
        self._shares = shares
        self._reach = reach
        self._donors: dict[PeerId, Source] = {}
        self._offer: StateOffer | None = None
        self._lengths: dict[bytes, int] = {}  # of all pieces that are or were wanted
        self._wishes = Wishes(rng)
        self._reading = False
        self._refused: list[tuple[bytes, ...]] = []  # manifests that are no use
        self._incomplete: list[tuple[bytes, ...]] = []  # of states that nobody has in full
        self.ended = False
        self.wakeup = now + BEAT_S

    # --- what drivers ask -------------------------------------------------------------------

    def expected(self, peer: PeerId, name: bytes) -> tuple[bytes, int] | None:
        """Return the hash and length of a piece that a peer was asked for, by its name, which
        is the beginning of its hash; None if it was not."""
        donor = self._donors.get(peer)
        for piece in donor.flying if donor is not None else ():
            if piece.startswith(name):
                return piece, self._lengths[piece]
        return None

    def has(self, piece: bytes) -> bool:
        """Whether a piece is there."""
        return piece in self._wishes.have

    def coming(self, piece: bytes) -> bool:
        """Whether somebody was asked for a piece, or will be soon."""
        return not self.ended and any(
            piece in source.flying or piece in source.owed for source in self._donors.values()
        )

    # --- events -----------------------------------------------------------------------------

    def start(self, now: float) -> list[FetchEffect]:
        """Ask the first donors."""
        effects: list[FetchEffect] = []
        self._go_on(effects, now)
        return effects

    def received(self, peer: PeerId, message: StateMessage, now: float) -> list[FetchEffect]:
        """Take a donor's answer; what nobody has asked for is not looked at."""
        effects: list[FetchEffect] = []
        donor = self._donors.get(peer)
        if self.ended or donor is None or donor.out:
            return effects
        match message:
            case StateComing(seq=seq) if seq == donor.seq and not donor.coming:
                donor.coming = True
                donor.heard = now
            case StateOffer(seq=seq) if seq == donor.seq and donor.offer is None:
                self._offered(peer, donor, message, effects, now)
            case StateLack(hashes=hashes):
                for piece in _taken_back(donor, hashes):
                    donor.lacks[piece] = None
                    donor.heard = now
                    self._wishes.release((piece,))
            case StateElsewhere(hashes=hashes, holder=holder) if not donor.fellow:
                self._sent_on(donor, _taken_back(donor, hashes), holder, now)
            case StateRefused(seq=seq) if seq == donor.seq:
                donor.refused = True
                self._give_up(donor)
            case _:
                return effects
        self._go_on(effects, now)
        return effects

    def arrived(self, peer: PeerId, piece: bytes, fault: str, now: float) -> list[FetchEffect]:
        """A piece came that was `expected`; ``fault``: what is wrong with it, or empty."""
        effects: list[FetchEffect] = []
        donor = self._donors.get(peer)
        if self.ended or donor is None or piece not in donor.flying:
            return effects
        del donor.flying[piece]
        if fault:
            self._wishes.release((piece,))
            self._blame(peer, donor, fault, effects)
        else:
            donor.heard = now
            donor.stalls = 0
            self._wishes.got(piece)
        self._go_on(effects, now)
        return effects

    def manifest_read(
        self, pieces: Sequence[tuple[bytes, int]], fault: str, now: float
    ) -> list[FetchEffect]:
        """The manifest was read: these pieces (hash, length) make the state; or it cannot be
        used, and ``fault`` says why."""
        effects: list[FetchEffect] = []
        offer = self._offer
        assert offer is not None, "this answers ReadManifest"
        if self.ended:
            return effects
        if fault:
            self._refused.append(offer.manifest)
            for peer, donor in self._donors.items():
                if donor.offer is not None and donor.offer.manifest == offer.manifest:
                    self._blame(peer, donor, fault, effects)
            self._offer = None
        else:
            self._reading = False
            self._lengths.update(pieces)
            self._wishes.want([piece for piece, _ in pieces], self._donors.values())
        self._go_on(effects, now)
        return effects

    def lost(self, peer: PeerId, now: float) -> list[FetchEffect]:
        """A peer is gone."""
        effects: list[FetchEffect] = []
        donor = self._donors.get(peer)
        if not self.ended and donor is not None and not donor.out:
            self._give_up(donor)
            self._go_on(effects, now)
        return effects

    def tick(self, now: float) -> list[FetchEffect]:
        """Time has passed."""
        effects: list[FetchEffect] = []
        if self.ended:
            return effects
        self.wakeup = now + BEAT_S
        for peer, donor in self._donors.items():
            if donor.out:
                continue
            silent_s = now - donor.heard
            if donor.offer is None and not donor.fellow:
                if silent_s > (OFFER_S if donor.coming else ANSWER_S):
                    effects.append(Emit(Notice("state-silent", peer, "it promised no state")))
                    self._give_up(donor)
                elif donor.coming and now - max(donor.heard, donor.reminded) > REMIND_S:
                    donor.reminded = now
                    effects.append(Send(peer, StateAsk(donor.seq, self._shares)))
            elif donor.flying and silent_s > (patience_s := _patience_s(donor)):
                donor.stalls += 1
                self._let_go(donor)
                donor.heard = now
                if donor.stalls >= STALLS_MAX:
                    detail = f"no piece of its state within {STALLS_MAX * patience_s:g} s"
                    effects.append(Emit(Notice("state-silent", peer, detail)))
                    self._give_up(donor)
        if now - self._began > FETCH_S_MAX:
            self._fail(f"not complete after {FETCH_S_MAX:g} s", effects)
        self._go_on(effects, now)
        return effects

    def stop(self) -> list[FetchEffect]:
        """Nobody wants the state any more."""
        effects: list[FetchEffect] = []
        if not self.ended:
            self._end(effects)
        return effects

    # --- what follows -----------------------------------------------------------------------

    def _sent_on(self, donor: Source, pieces: list[bytes], holder: bytes, now: float) -> None:
        """A donor sends this peer to another for pieces, which are asked of it again otherwise."""
        donor.heard = now
        fellow = self._donors.get(PeerId(holder))
        if fellow is not None and fellow.refused:  # it has no state of its own to give
            fellow = None
        if fellow is None and self._reach is not None and self._reach(PeerId(holder)):
            fellows = sum(source.fellow for source in self._donors.values())
            if fellows < FELLOWS_MAX:
                fellow = self._donors[PeerId(holder)] = Source(0, now, fellow=True)
        for piece in pieces:
            if fellow is not None and fellow.fellow and fellow.gives and piece not in fellow.lacks:
                fellow.owed[piece] = None
            else:
                self._wishes.release((piece,))

    def _offered(
        self, peer: PeerId, donor: Source, offer: StateOffer, effects: list[FetchEffect], now: float
    ) -> None:
        fault = self._offer_fault(offer)
        if fault:
            self._blame(peer, donor, fault, effects)
            return
        donor.offer = offer
        donor.heard = now
        if offer.manifest in self._incomplete:
            self._incomplete.remove(offer.manifest)
        if offer.epoch < self._epoch_min or offer.manifest in self._refused:
            self._give_up(donor)

    def _offer_fault(self, offer: StateOffer) -> str:
        pieces, size = len(offer.manifest), offer.piece_bytes
        if not 0 <= offer.epoch < EPOCH_MAX or len(offer.schema) > SCHEMA_BYTES_MAX:
            return f"an offer of epoch {offer.epoch}, schema of {len(offer.schema)} bytes"
        if not 0 < size <= self._piece_bytes_max or not 0 < pieces <= MANIFEST_PIECES_MAX:
            return f"a manifest in {pieces} pieces of {size} bytes"
        if not (pieces - 1) * size < offer.manifest_bytes <= pieces * size:
            return f"a manifest of {offer.manifest_bytes} bytes in {pieces} pieces of {size}"
        if any(len(piece) != HASH_BYTES for piece in offer.manifest):
            return "a hash of an odd length"
        return ""

    def _go_on(self, effects: list[FetchEffect], now: float) -> None:
        if self.ended:
            return
        self._ask_more(effects, now)
        self._choose()
        if self._offer is not None and not self._wishes.wanted:
            if self._reading:
                if not any(isinstance(e, ReadManifest) for e in effects):
                    effects.append(ReadManifest(self._offer))
                return
            effects.append(Fetched(self._offer))
            self._end(effects, keeps=self._shares)
            return
        self._request(effects, now)
        donors = [d for d in self._donors.values() if not d.fellow and not d.out]
        fellows = [d for d in self._donors.values() if d.fellow and d.gives]
        hopes = any(d.offer is None for d in donors)
        rest = self._offer is not None and not self._wishes.nobody_has_one(fellows)
        if not (donors or rest) or (self._offer is None and not hopes):
            self._fail("nobody is left who could give it", effects)

    def _ask_more(self, effects: list[FetchEffect], now: float) -> None:
        active = sum(not donor.out and not donor.fellow for donor in self._donors.values())
        while self._untried and active < DONORS_MAX:
            peer = self._untried.pop(0)
            self._seq += 1
            self._donors[peer] = Source(self._seq, now)
            effects.append(Send(peer, StateAsk(self._seq, self._shares)))
            active += 1

    def _choose(self) -> None:
        """Take the newest offer; of one epoch, stay with the one at hand while it can be had."""
        mine = self._offer
        if mine is not None and self._stuck():
            self._incomplete.append(mine.manifest)
            self._offer = mine = None
            self._wishes.want((), self._donors.values())
        offers = [
            d.offer
            for d in self._donors.values()
            if d.offer is not None and not d.out and d.offer.manifest not in self._incomplete
        ]
        best = max(offers, key=lambda offer: offer.epoch, default=None)
        if best is None or (mine is not None and mine.epoch >= best.epoch):
            return
        self._offer = best
        self._reading = True
        last = best.manifest_bytes - (len(best.manifest) - 1) * best.piece_bytes
        lengths = [best.piece_bytes] * (len(best.manifest) - 1) + [last]
        self._lengths.update(zip(best.manifest, lengths, strict=True))
        self._wishes.want(best.manifest, self._donors.values())

    def _stuck(self) -> bool:
        """Whether a piece is wanted that nobody has who has made an offer."""
        active = [d for d in self._donors.values() if d.offer is not None and not d.out]
        return bool(active) and self._wishes.nobody_has_one(active)

    def _request(self, effects: list[FetchEffect], now: float) -> None:
        """Keep the windows of all sources full."""
        offer = self._offer
        self._wishes.share_out(
            [
                peer
                for peer, donor in self._donors.items()
                if donor.offer is not None
                and not donor.out
                and offer is not None
                and donor.offer.manifest == offer.manifest
            ]
        )
        for peer, source in self._donors.items():
            if not source.gives:
                continue
            room = (1 if source.stalls else WINDOW) - len(source.flying)
            idle = not source.flying
            ask = self._wishes.next(peer, source, room, now)
            if ask:
                if idle:
                    source.heard = max(source.heard, self.wakeup - BEAT_S)
                effects.append(Send(peer, StateWant(tuple(ask))))

    def _let_go(self, source: Source) -> None:
        """Ask others for what a source was asked for."""
        pieces = [*source.flying, *source.owed]
        source.flying.clear()
        source.owed.clear()
        self._wishes.release(pieces)

    def _give_up(self, donor: Source) -> None:
        donor.out = True
        self._let_go(donor)

    def _blame(self, peer: PeerId, donor: Source, fault: str, effects: list[FetchEffect]) -> None:
        effects.append(Emit(Notice("state-refused", peer, fault)))
        self._give_up(donor)

    def _fail(self, reason: str, effects: list[FetchEffect]) -> None:
        self._end(effects)
        effects.append(FetchFailed(reason))

    def _end(self, effects: list[FetchEffect], *, keeps: bool = False) -> None:
        self.ended = True
        for peer, donor in self._donors.items():
            if not donor.out:
                effects.append(Send(peer, StateDone(donor.seq, keeps)))
            donor.flying.clear()


def _taken_back(source: Source, hashes: Sequence[bytes]) -> list[bytes]:
    """Take back those of some pieces that a source was asked for."""
    found = [piece for piece in hashes[: 2 * WINDOW] if piece in source.flying]
    for piece in found:
        del source.flying[piece]
    return found


def _patience_s(source: Source) -> float:
    return FELLOW_STALL_S if source.fellow else STALL_S
