"""The picture of the swarm: one entry per peer, kept sorted, summed up in a digest.

`LiveView` implements `moshpit.protocol.machine.View` for the other machines; `Membership`
alone changes it. Everything that is asked often is kept, not computed: the sorted ids, the
generation, and for the digest one hash per bucket of ids (the exclusive or of a hash per live
record), so that a change costs the same in a swarm of ten as in one of ten thousand.

The hash of a record covers its standing (who, where, what, in which life), not its progress:
while a swarm trains, some progress is always under way, and digests that showed it would make
two peers exchange everything whenever they compare.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left, insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, final

import msgspec

from moshpit.types import PeerId, Role
from moshpit.wire.messages import PeerRecord

BUCKETS: Final = 64  # by the first 6 bits of the id; guess: 16 records each at N=1000
HASH_BYTES: Final = 8
_DIALABLE: Final = frozenset(role.value for role in Role if role.reduces)


class Status(StrEnum):
    """What is believed of a peer."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    """It did not answer; it counts as live until it had time to refute."""
    DEAD = "dead"
    LEFT = "left"

    @property
    def live(self) -> bool:
        return self is Status.ALIVE or self is Status.SUSPECT


@dataclass(slots=True)
class Entry:
    """What is known of one peer. ``record`` is always the newest that was accepted."""

    record: PeerRecord
    status: Status
    since: float
    """When the status began."""
    at: float
    """When the record came."""
    hash: int
    cut: bool = False
    """Not to be had from here right now."""
    refused_at: float = -inf
    """When its machine last said that nobody listens."""
    deadline: float = inf
    """Of a suspicion."""
    first_hand: bool = False
    """This peer's own probe failed, so its suspicion does not rest on hearsay."""
    accusers: tuple[bytes, ...] = ()
    told_at: float = -inf
    """When it was last told what is believed of it here."""


def bucket_of(peer: bytes) -> int:
    """Return the digest bucket of a peer."""
    return peer[0] >> 2


def same_standing(a: PeerRecord, b: PeerRecord) -> bool:
    """Whether two records of a peer differ in progress only (samples, rates, epoch)."""
    return (
        a.incarnation == b.incarnation
        and a.schema == b.schema
        and a.addresses == b.addresses
        and a.via == b.via
        and a.role == b.role
        and a.left == b.left
    )


def _hash(record: PeerRecord) -> int:
    standing = (
        record.peer,
        record.incarnation,
        record.role,
        record.addresses,
        record.via,
        record.schema,
    )
    digest = hashlib.blake2b(msgspec.msgpack.encode(standing), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


@final
class LiveView:
    """One peer's view of the swarm (see the module)."""

    def __init__(self, me: PeerRecord, now: float) -> None:
        self.generation = 0
        self.entries: dict[bytes, Entry] = {}
        self._live: list[PeerId] = []
        self._ids: list[PeerId] = []
        self._hashes = [0] * BUCKETS
        self._dialable: dict[bytes, None] = {}
        self.dialable: Callable[[bytes], bool] = self._dialable.__contains__
        """Whether a peer can be dialled, as far as its record says, and so host and reduce."""
        self._cuts: dict[PeerId, None] = {}
        self._averaging: tuple[int, bytes, list[PeerId]] = (-1, b"", [])
        self._watchers: list[Callable[[Entry], None]] = []
        self.links: dict[PeerId, None] = {}
        """To whom a connection exists, oldest first."""
        self._me = self.add(me, now)

    @property
    def me(self) -> PeerRecord:
        """This peer's own record."""
        return self._me.record

    @property
    def live(self) -> Sequence[PeerId]:
        """All peers believed alive, this one included, sorted by id. Not to be changed."""
        return self._live

    def record(self, peer: bytes) -> PeerRecord | None:
        """What is known of a peer, alive or not."""
        entry = self.entries.get(peer)
        return None if entry is None else entry.record

    def status(self, peer: bytes) -> Status | None:
        """What is believed of a peer; None: it is not known."""
        entry = self.entries.get(peer)
        return None if entry is None else entry.status

    def reachable(self, peer: bytes) -> bool:
        """Believed alive, and not known to be cut off from this peer right now."""
        entry = self.entries.get(peer)
        return entry is not None and not entry.cut and entry.status.live

    def averaging(self, schema: bytes) -> Sequence[PeerId]:
        """The live peers that average this schema, sorted by id. Not to be changed."""
        generation, known, peers = self._averaging
        if generation != self.generation or known != schema:
            entries = self.entries
            peers = [peer for peer in self._live if entries[peer].record.schema == schema]
            self._averaging = (self.generation, schema, peers)
        return peers

    def linked(self, peer: bytes) -> bool:
        """Whether a connection to the peer exists, so that even a client can be told things."""
        return peer in self.links

    def records(self) -> Iterator[PeerRecord]:
        """All records, of the dead too, sorted by id."""
        return (self.entries[peer].record for peer in self._ids)

    def watch(self, watcher: Callable[[Entry], None]) -> None:
        """Have ``watcher`` called with each entry whose record or status has changed."""
        self._watchers.append(watcher)

    # --- changes, by Membership only ------------------------------------------------------

    def add(self, record: PeerRecord, now: float) -> Entry:
        """Take up a peer that is not in the view."""
        peer = PeerId(record.peer)
        entry = Entry(record, Status.ALIVE, now, now, _hash(record))
        self.entries[peer] = entry
        insort(self._ids, peer)
        insort(self._live, peer)
        self._hashes[bucket_of(peer)] ^= entry.hash
        self.generation += 1
        if record.role in _DIALABLE:
            self._dialable[peer] = None
        self._tell(entry)
        return entry

    def renew(self, entry: Entry, record: PeerRecord, now: float) -> None:
        """Replace a peer's record by a newer one."""
        old = entry.record
        entry.record, entry.at = record, now
        if not same_standing(old, record):
            new_hash = _hash(record)
            if entry.status.live:
                self._hashes[bucket_of(record.peer)] ^= entry.hash ^ new_hash
            entry.hash = new_hash
        if old.role != record.role or old.schema != record.schema:
            self.generation += 1
            self._dialable.pop(record.peer, None)
            if record.role in _DIALABLE:
                self._dialable[record.peer] = None
        self._tell(entry)

    def mark(self, entry: Entry, status: Status, now: float) -> None:
        """Change what is believed of a peer."""
        was_live = entry.status.live
        entry.status, entry.since = status, now
        if status is not Status.SUSPECT:
            entry.deadline, entry.first_hand, entry.accusers = inf, False, ()
        if was_live != status.live:
            peer = PeerId(entry.record.peer)
            self._hashes[bucket_of(peer)] ^= entry.hash
            if status.live:
                insort(self._live, peer)
            else:
                del self._live[bisect_left(self._live, peer)]
            self.generation += 1
        self._tell(entry)

    def cut(self, entry: Entry, cut: bool) -> None:
        """Note whether a peer can be reached from here."""
        if entry.cut != cut and entry is not self._me:
            entry.cut = cut
            self.generation += 1
            if cut:
                self._cuts[PeerId(entry.record.peer)] = None
            else:
                self._cuts.pop(PeerId(entry.record.peer), None)

    def next_cut(self) -> Entry | None:
        """Return one of the live that cannot be had from here, another one each time."""
        while self._cuts:
            peer = next(iter(self._cuts))
            del self._cuts[peer]
            entry = self.entries.get(peer)
            if entry is not None and entry.status.live:
                self._cuts[peer] = None
                return entry
        return None

    def forget(self, entry: Entry) -> None:
        """Drop a peer that is dead."""
        peer = PeerId(entry.record.peer)
        del self.entries[peer]
        self._dialable.pop(peer, None)
        del self._ids[bisect_left(self._ids, peer)]
        self._tell(entry)

    def _tell(self, entry: Entry) -> None:
        for watcher in self._watchers:
            watcher(entry)

    # --- the digest -----------------------------------------------------------------------

    def digest(self) -> tuple[bytes, ...]:
        """Return a hash of the live records of each bucket."""
        return tuple(value.to_bytes(HASH_BYTES, "little") for value in self._hashes)

    def differing(self, digest: Sequence[bytes]) -> list[int]:
        """Return the buckets in which another peer's digest differs from this view."""
        return [i for i, theirs in enumerate(self.digest()) if theirs != digest[i]]

    def bucket(self, index: int) -> list[Entry]:
        """Return the entries of one bucket, of the dead too, sorted by id."""
        first = bisect_left(self._ids, bytes((index << 2,)))
        last = len(self._ids)
        if index + 1 < BUCKETS:
            last = bisect_left(self._ids, bytes(((index + 1) << 2,)))
        return [self.entries[peer] for peer in self._ids[first:last]]
