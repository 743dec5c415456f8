"""Giving this peer's training state to those that ask for it (`statesync` is their side).

Rules. Whoever asks has an answer at once. A snapshot is taken when training comes to a place
for it (`WantSnapshot`; the driver calls `snapshot`), one for all who ask in the same epoch, and
at most `SNAPSHOTS_MAX` are kept, so that this costs memory for so many states. At most
`ASKERS_MAX` peers are served, each with at most `QUEUE_MAX` pieces under way. Who keeps silent
for `ASKER_SILENT_S` is forgotten, and with the last asker the snapshots are. An impossible
wish is told with its sender's name, who gets nothing more for it.

*Many askers cost little more than one.* A piece is given once. Who asks for it later is sent to
one that asked before and shares (`StateAsk.shares`, `StateElsewhere`); those who were given a
piece or sent to somebody for it form a tree in the order in which they came, so each passes it on
twice at most. Who asks again for the same piece gets it from here: whoever it was sent to may be
gone, or slow. Who has all of it and keeps it (`StateDone.keeps`) is sent others for `KEEPS_S`, and
so long its snapshot stays.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, final

import msgspec

from moshpit.events import Notice
from moshpit.protocol.machine import Emit, Send
from moshpit.types import PeerId
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

ASKERS_MAX: Final = 16  # guess
SNAPSHOTS_MAX: Final = 2  # one that is fetched, and a newer one
QUEUE_MAX: Final = 16  # guess: four windows
ASKER_SILENT_S: Final = 150.0  # guess: longer than an asker waits for an offer
KEEPS_S: Final = 8.0  # guess: joiners that are started together come within so many seconds
PASSED_ON: Final = 2  # to so many a sharer passes a piece on, so 8 askers are 3 steps deep
SEQ_MAX: Final = 1 << 62
HASH_BYTES: Final = 32
NAME_BYTES: Final = 16


class WantSnapshot(msgspec.Struct, frozen=True):
    """Take a snapshot when training comes to a place for it."""


class SendPiece(msgspec.Struct, frozen=True):
    """Send a piece; call `StateGiving.sent` when it is on its way."""

    peer: PeerId
    piece: bytes


class DropSnapshots(msgspec.Struct, frozen=True):
    """Free all snapshots but those of these numbers."""

    kept: tuple[int, ...]


GiveEffect = Send | Emit | WantSnapshot | SendPiece | DropSnapshots


@dataclass(slots=True)
class Snapshot:
    """What is known of a snapshot here.

    Attributes:
        number: the driver's.
        epoch: of it.
        offer: what askers are told, with their own number in it.
        pieces: the hashes of all pieces, of the manifest too.
    """

    number: int
    epoch: int
    offer: StateOffer
    pieces: Mapping[bytes, object]


@dataclass(slots=True)
class _Asker:
    seq: int
    heard: float
    shares: bool = False
    offered: bool = False
    done: bool = False
    queued: int = 0
    asked: dict[bytes, None] = field(default_factory=dict[bytes, None])
    """What it has asked for, and was given or sent on for."""

    @property
    def until(self) -> float:
        """When it is forgotten if nothing is heard of it."""
        return self.heard + (KEEPS_S if self.done else ASKER_SILENT_S)


@final
class StateGiving:
    """Who asks this peer for its state, and what they get."""

    def __init__(self) -> None:
        self._askers: dict[PeerId, _Asker] = {}
        self._snapshots: list[Snapshot] = []
        self._holders: dict[bytes, list[tuple[PeerId, int]]] = {}
        """For each piece, who was given it or sent on for it, and by which ask."""
        self._wanted = False
        self.able = False
        """Whether there is a training that a snapshot can be taken of."""
        self.wakeup: float | None = None

    def received(
        self, peer: PeerId, message: StateMessage, epoch: int, now: float
    ) -> list[GiveEffect]:
        """Take an asker's message; ``epoch`` is the one that training is in."""
        effects: list[GiveEffect] = []
        asker = self._askers.get(peer)
        match message:
            case StateAsk():
                self._asked(peer, message, epoch, effects, now)
            case StateWant(hashes=hashes):
                self._want(peer, asker, hashes, effects, now)
            case StateDone(seq=seq, keeps=keeps) if asker is not None and asker.seq == seq:
                if keeps and asker.shares and asker.offered:
                    asker.done, asker.heard = True, now
                else:
                    effects += self.lost(peer)
            case _:
                pass
        self._arm()
        return effects

    def snapshot(self, snapshot: Snapshot, now: float) -> list[GiveEffect]:
        """A snapshot was taken."""
        self._wanted = False
        effects: list[GiveEffect] = []
        self._snapshots.append(snapshot)
        del self._snapshots[:-SNAPSHOTS_MAX]
        for peer, asker in self._askers.items():
            if not asker.offered:
                self._offer(peer, asker, snapshot, effects, now)
        self._drop_unused(effects)
        return effects

    def unable(self) -> list[GiveEffect]:
        """No snapshot can be taken any more: those who wait for one are told."""
        self.able = self._wanted = False
        effects: list[GiveEffect] = []
        for peer, asker in list(self._askers.items()):
            if not asker.offered:
                effects.append(Send(peer, StateRefused(asker.seq, "no-state")))
                effects += self.lost(peer)
        return effects

    def serves(self, peer: PeerId) -> bool:
        """Whether a peer has asked for a state, and is not done."""
        asker = self._askers.get(peer)
        return asker is not None and not asker.done

    def sent(self, peer: PeerId) -> None:
        """A piece is on its way."""
        asker = self._askers.get(peer)
        if asker is not None:
            asker.queued = max(0, asker.queued - 1)

    def lost(self, peer: PeerId) -> list[GiveEffect]:
        """A peer is gone, or needs nothing more."""
        effects: list[GiveEffect] = []
        if self._askers.pop(peer, None) is not None:
            self._drop_unused(effects)
        return effects

    def tick(self, now: float) -> list[GiveEffect]:
        """Time has passed."""
        effects: list[GiveEffect] = []
        for peer, asker in list(self._askers.items()):
            if now >= asker.until:
                effects += self.lost(peer)
        self._arm()
        return effects

    def _arm(self) -> None:
        self.wakeup = min((asker.until for asker in self._askers.values()), default=None)

    def _asked(
        self, peer: PeerId, ask: StateAsk, epoch: int, effects: list[GiveEffect], now: float
    ) -> None:
        seq = ask.seq
        if not 0 <= seq < SEQ_MAX:
            effects.append(Emit(Notice("bad-state-ask", peer, f"number {seq}")))
            return
        served = sum(self.serves(asker) for asker in self._askers if asker != peer)
        full = served >= ASKERS_MAX
        if full or not self.able:
            effects.append(Send(peer, StateRefused(seq, "busy" if full else "no-state")))
            return
        asker = self._askers[peer] = _Asker(seq, now, ask.shares)
        effects.append(Send(peer, StateComing(seq)))
        newest = self._snapshots[-1] if self._snapshots else None
        if newest is not None and newest.epoch >= epoch:
            self._offer(peer, asker, newest, effects, now)
        elif not self._wanted:
            self._wanted = True
            effects.append(WantSnapshot())

    def _offer(
        self,
        peer: PeerId,
        asker: _Asker,
        snapshot: Snapshot,
        effects: list[GiveEffect],
        now: float,
    ) -> None:
        offer = msgspec.structs.replace(snapshot.offer, seq=asker.seq)
        effects.append(Send(peer, offer))
        asker.offered = True
        asker.heard = now

    def _want(
        self,
        peer: PeerId,
        asker: _Asker | None,
        hashes: tuple[bytes, ...],
        effects: list[GiveEffect],
        now: float,
    ) -> None:
        wrong = any(len(piece) != HASH_BYTES for piece in hashes)
        if not hashes or len(hashes) > QUEUE_MAX or wrong:
            detail = f"{len(hashes)} pieces wanted at once, or hashes of odd lengths"
            effects.append(Emit(Notice("bad-state-want", peer, detail)))
            effects += self.lost(peer)
            return
        if asker is None:
            effects.append(Send(peer, StateLack(hashes)))
            return
        asker.heard = now
        lacking: list[bytes] = []
        elsewhere: dict[PeerId, list[bytes]] = {}
        for piece in hashes:
            if not any(piece in snapshot.pieces for snapshot in self._snapshots):
                lacking.append(piece)
                continue
            holder = self._holder(peer, asker, piece)
            if holder is not None:
                if self._askers[holder].done:
                    self._askers[holder].heard = now  # it is wanted, so it keeps it longer
                elsewhere.setdefault(holder, []).append(piece)
            elif asker.queued < QUEUE_MAX:
                asker.queued += 1
                effects.append(SendPiece(peer, piece))
            else:
                continue
            if asker.shares and piece not in asker.asked:
                self._holders.setdefault(piece, []).append((peer, asker.seq))
            asker.asked[piece] = None
        for holder, pieces in elsewhere.items():
            effects.append(Send(peer, StateElsewhere(tuple(pieces), holder)))
        if lacking:
            effects.append(Send(peer, StateLack(tuple(lacking))))

    def _holder(self, peer: PeerId, asker: _Asker, piece: bytes) -> PeerId | None:
        """Return who can give a piece to an asker in this peer's place."""
        if piece in asker.asked:  # those that came after it may wait for it
            return None
        line = [
            holder
            for holder, seq in self._holders.get(piece, ())
            if holder != peer and (there := self._askers.get(holder)) and there.seq == seq
        ]
        return line[(len(line) - 1) // PASSED_ON] if line else None

    def _drop_unused(self, effects: list[GiveEffect]) -> None:
        if not self._askers:
            self._holders.clear()
            self._snapshots.clear()
            self._wanted = False
        effects.append(DropSnapshots(tuple(s.number for s in self._snapshots)))
