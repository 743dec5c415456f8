"""Which piece of a state is asked of whom: the bookkeeping of `statesync`.

A piece that is wanted is *free*, or *flying* (one source was asked for it), or *owed* (a donor
has sent this peer to a fellow for it, who will be asked when there is room).

Donors that offer the same state share it out by a rule that all who fetch from them follow: each
piece has a donor of its own, by the highest hash of both. So every donor is asked for the same
pieces by all, and can send the later ones to the earlier. Who has had no such piece to give for
`IDLE_S` is asked for those of the others, which are slower.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from moshpit.protocol.machine import Rng
from moshpit.types import PeerId
from moshpit.wire.transfer import StateOffer

IDLE_S: Final = 1.0  # guess: shorter than what a slow donor costs, longer than some round trips
_RANK_BYTES: Final = 8


@dataclass(slots=True)
class Source:
    """What a peer that was asked owes: a donor, or a fellow, which fetches the same itself."""

    seq: int
    heard: float
    fellow: bool = False
    coming: bool = False
    offer: StateOffer | None = None
    flying: dict[bytes, None] = field(default_factory=dict[bytes, None])
    owed: dict[bytes, None] = field(default_factory=dict[bytes, None])
    lacks: dict[bytes, None] = field(default_factory=dict[bytes, None])
    idle_since: float | None = None
    stalls: int = 0
    reminded: float = 0.0
    refused: bool = False
    refused: bool = False
    out: bool = False

    @property
    def gives(self) -> bool:
        """Whether it can be asked for pieces."""
        return not self.out and (self.fellow or self.offer is not None)


@final
class Wishes:
    """The pieces that are wanted, and from whom.

    Args:
        rng: where in the list to begin, so that not all who fetch begin with the same.
    """

    def __init__(self, rng: Rng) -> None:
        self._rng = rng
        self.wanted: dict[bytes, None] = {}
        """Not there yet."""
        self.have: dict[bytes, None] = {}
        self._free: dict[bytes, None] = {}
        self._donors: tuple[PeerId, ...] = ()
        self._first: dict[bytes, PeerId] = {}
        self._own_done: dict[PeerId, None] = {}
        """Donors that have no piece of their own left."""

    def want(self, pieces: Sequence[bytes], sources: Iterable[Source]) -> None:
        """Want these pieces, those that are there already excepted, and no others."""
        start = self._rng.randrange(0, len(pieces)) if len(pieces) > 1 else 0
        turned = (*pieces[start:], *pieces[:start])
        self.wanted = {piece: None for piece in turned if piece not in self.have}
        self._free = dict(self.wanted)
        for source in sources:
            for asked in (source.flying, source.owed):
                for piece in list(asked):
                    if piece in self.wanted:
                        self._free.pop(piece, None)
                    else:
                        del asked[piece]
        self._donors = ()
        self._own_done = {}

    def got(self, piece: bytes) -> None:
        """A piece is there."""
        self.wanted.pop(piece, None)
        self._free.pop(piece, None)
        self._first.pop(piece, None)
        self.have[piece] = None

    def release(self, pieces: Iterable[bytes]) -> None:
        """These pieces do not come from whom they were asked of."""
        for piece in pieces:
            if piece in self.wanted:
                self._free[piece] = None
                self._own_done.pop(self._first.get(piece, PeerId(b"")), None)

    def share_out(self, donors: Sequence[PeerId]) -> None:
        """Say who offers the state that is fetched."""
        if self._donors != tuple(donors):
            self._donors = tuple(donors)
            wanted = self.wanted if donors else ()
            self._first = {p: max(donors, key=lambda d: _rank(p, d)) for p in wanted}
            self._own_done = {}

    def next(self, peer: PeerId, source: Source, room: int, now: float) -> list[bytes]:
        """Return what to ask of a source now, and note that it is under way."""
        if room <= 0:
            return []
        if source.fellow:
            found = list(source.owed)[:room]
            if not self._donors:  # nobody else has it any more
                found += self._any(source, room - len(found))
        elif peer not in self._donors:
            found = self._any(source, room)
        else:
            found = self._own(peer, source, room)
            if found:
                source.idle_since = None
            elif source.idle_since is None and not source.flying:
                source.idle_since = now
            if not found and self._helps(source, now):
                found = self._any(source, room)
        for piece in found:
            self._free.pop(piece, None)
            source.owed.pop(piece, None)
            source.flying[piece] = None
        return found

    def _helps(self, source: Source, now: float) -> bool:
        """Whether a donor has nothing of its own to do for so long that others must be slow."""
        if len(self._donors) == 1:
            return True
        return source.idle_since is not None and now - source.idle_since >= IDLE_S

    def _any(self, source: Source, room: int) -> list[bytes]:
        lacking = (piece for piece in self._free if piece not in source.lacks)
        return list(itertools.islice(lacking, room))

    def _own(self, peer: PeerId, source: Source, room: int) -> list[bytes]:
        if peer in self._own_done:
            return []
        found: list[bytes] = []
        for piece in self._free:
            if self._first.get(piece) == peer and piece not in source.lacks:
                found.append(piece)
                if len(found) == room:
                    return found
        self._own_done[peer] = None
        return found

    def nobody_has_one(self, sources: Sequence[Source]) -> bool:
        """Whether one of the wanted pieces is lacked by all of these."""
        if not sources:
            return bool(self.wanted)
        fewest = min(sources, key=lambda source: len(source.lacks))
        return any(
            piece in self.wanted and all(piece in source.lacks for source in sources)
            for piece in fewest.lacks
        )


def _rank(piece: bytes, donor: PeerId) -> bytes:
    return hashlib.blake2b(piece + donor, digest_size=_RANK_BYTES).digest()
