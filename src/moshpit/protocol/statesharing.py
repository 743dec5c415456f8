"""Passing on the pieces of a state that this peer fetches, or has just fetched, itself.

Rules. A donor sends those who ask late to those who asked before (`stategiving`), so a
`StateWant` may come from somebody who has never asked this peer for a state. What has come is
sent; what is under way is sent when it is there; for the rest the answer is `StateLack` at once,
and the asker goes back to the donor. Only pieces whose bytes have been judged are passed on. When
the fetch is complete, its pieces stay until nobody has wanted any for `LINGER_S`; when it has
failed, all who wait are told. At most `SHARED_WITH_MAX` peers are served, each with at most
`QUEUE_MAX` pieces, and none for longer than `SHARE_S_MAX` after the fetch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, final

from moshpit.events import Notice
from moshpit.protocol.machine import Emit, Send
from moshpit.protocol.stategiving import HASH_BYTES, KEEPS_S, QUEUE_MAX, SendPiece
from moshpit.protocol.statesync import StateFetch
from moshpit.types import PeerId
from moshpit.wire.transfer import StateLack

SHARED_WITH_MAX: Final = 16  # guess: as many as a donor serves
LINGER_S: Final = KEEPS_S + 2.0  # donors send others here until shortly before
SHARE_S_MAX: Final = 600.0  # guess: against askers that never have enough

ShareEffect = Send | Emit | SendPiece


@dataclass(slots=True)
class _Fellow:
    queued: int = 0
    waits: dict[bytes, None] = field(default_factory=dict[bytes, None])


@final
class StateSharing:
    """What a peer that fetches gives to others that fetch.

    Args:
        fetch: its own fetch.
        now: seconds.
    """

    def __init__(self, fetch: StateFetch, now: float) -> None:
        self._fetch = fetch
        self._fellows: dict[PeerId, _Fellow] = {}
        self._heard = now
        self._ended_at: float | None = None
        self.over = False
        """Whether nothing more will be passed on: the bytes can go."""

    @property
    def wakeup(self) -> float | None:
        """When a `tick` is due."""
        if self._ended_at is None or self.over:
            return None
        return min(max(self._heard, self._ended_at) + LINGER_S, self._ended_at + SHARE_S_MAX)

    def wanted(self, peer: PeerId, hashes: tuple[bytes, ...], now: float) -> list[ShareEffect]:
        """Somebody wants pieces."""
        wrong = any(len(piece) != HASH_BYTES for piece in hashes)
        if not hashes or len(hashes) > QUEUE_MAX or wrong:
            detail = f"{len(hashes)} pieces wanted at once, or hashes of odd lengths"
            self._fellows.pop(peer, None)
            return [Emit(Notice("bad-state-want", peer, detail))]
        fellow = self._fellows.get(peer)
        if fellow is None and (self.over or len(self._fellows) >= SHARED_WITH_MAX):
            return [Send(peer, StateLack(hashes))]
        if fellow is None:
            fellow = self._fellows[peer] = _Fellow()
        self._heard = now
        effects: list[ShareEffect] = []
        lacking: list[bytes] = []
        for piece in hashes:
            full = fellow.queued + len(fellow.waits) >= QUEUE_MAX
            if self._fetch.has(piece) and not full:
                fellow.queued += 1
                effects.append(SendPiece(peer, piece))
            elif self._fetch.coming(piece) and not full:
                fellow.waits[piece] = None
            else:
                lacking.append(piece)
        if lacking:
            effects.append(Send(peer, StateLack(tuple(lacking))))
        return effects

    def arrived(self, piece: bytes) -> list[ShareEffect]:
        """A piece of the fetch is there, and is what its hash says."""
        effects: list[ShareEffect] = []
        for peer, fellow in self._fellows.items():
            if piece in fellow.waits:
                del fellow.waits[piece]
                fellow.queued += 1
                effects.append(SendPiece(peer, piece))
        return effects

    def ended(self, complete: bool, now: float) -> list[ShareEffect]:
        """The fetch has ended."""
        self._ended_at = now
        effects: list[ShareEffect] = []
        for peer, fellow in self._fellows.items():
            if fellow.waits:
                effects.append(Send(peer, StateLack(tuple(fellow.waits))))
                fellow.waits.clear()
        if not complete:
            self._end()
        return effects

    def sent(self, peer: PeerId) -> None:
        """A piece is on its way."""
        fellow = self._fellows.get(peer)
        if fellow is not None:
            fellow.queued = max(0, fellow.queued - 1)

    def lost(self, peer: PeerId) -> None:
        """A peer is gone, or needs nothing more."""
        self._fellows.pop(peer, None)

    def tick(self, now: float) -> None:
        """Time has passed."""
        if self.wakeup is not None and now >= self.wakeup:
            self._end()

    def _end(self) -> None:
        self.over = True
        self._fellows.clear()
