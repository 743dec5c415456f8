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

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import merge
from math import inf
from typing import final

from moshpit.protocol.known import (
    ANYTHING,
    BUCKETS,
    HASH_BYTES,
    Entries,
    Entry,
    Known,
    SharedEntries,
    Status,
    averages,
    bucket_of,
    hash_of,
)
from moshpit.types import PeerId, Role
from moshpit.wire.messages import PeerRecord


def same_standing(a: PeerRecord, b: PeerRecord) -> bool:
    """Whether two records of a peer differ in progress only (samples, rates, epoch, lineage)."""
    return (
        a.incarnation == b.incarnation
        and a.schema == b.schema
        and a.addresses == b.addresses
        and a.via == b.via
        and a.role == b.role
        and a.left == b.left
        and a.merges_from == b.merges_from
    )


@final
class LiveView:
    """One peer's view of the swarm (see the module)."""

    def __init__(self, me: PeerRecord, now: float, known: Known | None = None) -> None:
        self.generation = 0
        self.known = known
        self._shared = None if known is None else SharedEntries(known, now)
        self.entries: Entries = {} if self._shared is None else self._shared
        self._live: list[PeerId] = [] if known is None else known.live
        self._live_is_own = known is None
        self._gone: list[PeerId] = []
        """Those that are known and not alive, sorted by id."""
        self._hashes = [0] * BUCKETS if known is None else list(known.buckets)
        self._clients: dict[bytes, None] = {} if known is None else dict(known.clients)
        self._schemas: dict[bytes, int] = {} if known is None else dict(known.schemas)
        """How many of the live average what."""
        self._cuts: dict[PeerId, None] = {}
        self._averaging: tuple[int, bytes, list[PeerId]] = (-1, b"", [])
        self._watchers: list[Callable[[Entry], None]] = []
        self.links: dict[PeerId, None] = {}
        """To whom a connection exists, oldest first."""
        self._me = self._known_me(me, now) if me.peer in self.entries else self.add(me, now)

    def _known_me(self, me: PeerRecord, now: float) -> Entry:
        entry = self.entries[me.peer]
        self.renew(entry, me, now)
        return entry

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
        if self._shared is not None:
            shared = self._shared.shared(peer)
            if shared is not None:
                return shared
        entry = self.entries.get(peer)
        return None if entry is None else entry.record

    def called(self, short_id: bytes) -> list[PeerId]:
        """Return the peers, alive or not, whose ids begin like this."""
        found: list[PeerId] = []
        for ids in (self._live, self._gone):
            at = bisect_left(ids, short_id)
            while at < len(ids) and ids[at].startswith(short_id):
                found.append(ids[at])
                at += 1
        return found

    def unmoved(self, peer: bytes) -> PeerRecord | None:
        """Return the record of a peer that is alive and can be had, of which nothing has been
        heard since this view began with it: it needs no entry of its own."""
        return None if self._shared is None else self._shared.shared(peer)

    def status(self, peer: bytes) -> Status | None:
        """What is believed of a peer; None: it is not known."""
        if self.unmoved(peer) is not None:
            return Status.ALIVE
        entry = self.entries.get(peer)
        return None if entry is None else entry.status

    def reachable(self, peer: bytes) -> bool:
        """Believed alive, and not known to be cut off from this peer right now."""
        if self._shared is not None and self._shared.shared(peer) is not None:
            return True
        entry = self.entries.get(peer)
        return entry is not None and not entry.cut and entry.status.live

    def dialable(self, peer: bytes, /) -> bool:
        """Whether a peer can be dialled, as far as its record says, and so host and reduce."""
        return peer not in self._clients and peer in self.entries

    def averaging(self, schema: bytes) -> Sequence[PeerId]:
        """The live peers that average this schema, sorted by id. Not to be changed."""
        counts = self._schemas
        if counts.get(schema, 0) + counts.get(ANYTHING, 0) == len(self._live):
            return self._live
        generation, known, peers = self._averaging
        if generation != self.generation or known != schema:
            wanted, record = (schema, ANYTHING), self.record
            peers = [p for p in self._live if (r := record(p)) and averages(r) in wanted]
            self._averaging = (self.generation, schema, peers)
        return peers

    def linked(self, peer: bytes) -> bool:
        """Whether a connection to the peer exists, so that even a client can be told things."""
        return peer in self.links

    def records(self) -> Iterator[PeerRecord]:
        """All records, of the dead too, sorted by id."""
        ids = merge(self._live, self._gone)
        return (record for peer in ids if (record := self.record(peer)) is not None)

    @property
    def seen(self) -> Iterable[bytes]:
        """Of a view that began with something `known`: of whom it has entries of its own."""
        return () if self._shared is None else self._shared.own

    @property
    def forgotten(self) -> Iterable[bytes]:
        """Of such a view: whom it began with, and has dropped."""
        return () if self._shared is None else self._shared.gone

    def watch(self, watcher: Callable[[Entry], None]) -> None:
        """Have ``watcher`` called with each entry whose record or status has changed."""
        self._watchers.append(watcher)

    # --- changes, by Membership only ------------------------------------------------------

    def add(self, record: PeerRecord, now: float) -> Entry:
        """Take up a peer that is not in the view."""
        peer = PeerId(record.peer)
        entry = Entry(record, Status.ALIVE, now, now, hash_of(record))
        self.entries[peer] = entry
        insort(self._own_live(), peer)
        self._hashes[bucket_of(peer)] ^= entry.hash
        self.generation += 1
        self._count(record, 1)
        if record.role == Role.CLIENT:
            self._clients[peer] = None
        self._tell(entry)
        return entry

    def renew(self, entry: Entry, record: PeerRecord, now: float) -> None:
        """Replace a peer's record by a newer one."""
        old = entry.record
        entry.record, entry.at = record, now
        if not same_standing(old, record):
            new_hash = hash_of(record)
            if entry.status.live:
                self._hashes[bucket_of(record.peer)] ^= entry.hash ^ new_hash
            entry.hash = new_hash
        if old.role != record.role or old.schema != record.schema:
            self.generation += 1
            self._clients.pop(record.peer, None)
            if record.role == Role.CLIENT:
                self._clients[record.peer] = None
            if entry.status.live:
                self._count(old, -1)
                self._count(record, 1)
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
            live, gone = self._own_live(), self._gone
            here, there = (live, gone) if status.live else (gone, live)
            insort(here, peer)
            del there[bisect_left(there, peer)]
            self._count(entry.record, 1 if status.live else -1)
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
        self._clients.pop(peer, None)
        del self._gone[bisect_left(self._gone, peer)]
        self._tell(entry)

    def _own_live(self) -> list[PeerId]:
        """Return the list of the living, to be changed."""
        if not self._live_is_own:
            self._live, self._live_is_own = self._live.copy(), True
        return self._live

    def _count(self, record: PeerRecord, by: int) -> None:
        schema = averages(record)
        self._schemas[schema] = self._schemas.get(schema, 0) + by

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
        ids = merge(self.live_in(index), _within(self._gone, index))
        return [self.entries[peer] for peer in ids]

    def live_in(self, index: int) -> Sequence[PeerId]:
        """Return the live peers of one bucket, sorted by id."""
        return _within(self._live, index)


def _within(ids: list[PeerId], index: int) -> list[PeerId]:
    """Return those of some sorted ids that are in a bucket."""
    last = len(ids)
    if index + 1 < BUCKETS:
        last = bisect_left(ids, bytes(((index + 1) << 2,)))
    return ids[bisect_left(ids, bytes((index << 2,))) : last]
