"""A picture of the swarm that many nodes of one process begin with.

A view costs some hundred bytes for every peer, so ten thousand views of ten thousand peers, which
the simulator has, would cost tens of gigabytes. Nodes that begin with the same `Known` share it:
each view keeps entries of its own only for those peers of which it has heard since. What is
believed does not differ in anything from a view that was told all these records when it began.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import inf
from typing import Final, Protocol, final

import msgspec

from moshpit.types import PeerId, Role
from moshpit.wire.messages import PeerRecord

BUCKETS: Final = 64  # by the first 6 bits of the id; guess: 16 records each at N=1000
HASH_BYTES: Final = 8
ANYTHING: Final = b"*" * 33  # what will average whatever others do; no record has so long a schema


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


def hash_of(record: PeerRecord) -> int:
    """Return the hash of a record's standing, which digests are made of."""
    standing = (
        record.peer,
        record.incarnation,
        record.role,
        record.addresses,
        record.via,
        record.schema,
        record.merges_from,
    )
    digest = hashlib.blake2b(msgspec.msgpack.encode(standing), digest_size=HASH_BYTES).digest()
    return int.from_bytes(digest, "little")


def averages(record: PeerRecord) -> bytes:
    """Return what a peer averages. An aux peer that has no schema yet takes that of the others
    as soon as it has heard of one, which those that plan with it cannot know."""
    return record.schema or (ANYTHING if record.role == Role.AUX else b"")


class Entries(Protocol):
    """The entries of a view, by peer: a dict, or `SharedEntries`."""

    def get(self, peer: bytes, /) -> Entry | None: ...
    def __getitem__(self, peer: bytes, /) -> Entry: ...
    def __setitem__(self, peer: bytes, entry: Entry, /) -> None: ...
    def __delitem__(self, peer: bytes, /) -> None: ...
    def __contains__(self, peer: object, /) -> bool: ...
    def __iter__(self) -> Iterator[bytes]: ...
    def __len__(self) -> int: ...


@final
class Known:
    """Live peers that have not trained yet, each by its signed record.

    Args:
        records: no two of one peer, all without samples and rates; they are believed as they are.

    Attributes:
        records, hashes: by peer, sorted by id.
        live: the ids, sorted.
        buckets: the digest's hash of each bucket.
        clients: those that cannot be dialled.
        schemas: how many average what (`averages`).
        epochs: how many are at which epoch.
        trainers: how many train.
    """

    def __init__(self, records: Sequence[PeerRecord]) -> None:
        ordered = sorted(records, key=lambda record: record.peer)
        self.records = {record.peer: record for record in ordered}
        self.hashes = {record.peer: hash_of(record) for record in ordered}
        self.live = [PeerId(record.peer) for record in ordered]
        self.buckets = [0] * BUCKETS
        self.clients: dict[bytes, None] = {}
        self.schemas: dict[bytes, int] = {}
        self.epochs: dict[int, int] = {}
        self.trainers = 0
        for record in ordered:
            assert record.samples == record.rate == 0.0, "who trains has a line of its own"
            self.buckets[bucket_of(record.peer)] ^= self.hashes[record.peer]
            if record.role == Role.CLIENT:
                self.clients[record.peer] = None
            schema = averages(record)
            self.schemas[schema] = self.schemas.get(schema, 0) + 1
            self.epochs[record.epoch] = self.epochs.get(record.epoch, 0) + 1
            self.trainers += record.role != Role.AUX

    def entry(self, peer: bytes, now: float) -> Entry:
        """Return what a view holds that was told of this peer at a time."""
        return Entry(self.records[peer], Status.ALIVE, now, now, self.hashes[peer])


@final
class SharedEntries:
    """Entries of which only those that were looked at are a view's own.

    Args:
        known: what the view begins with.
        now: when that was.

    Attributes:
        own: the view's own entries.
        gone: peers whose first entry was dropped: what is shared of them counts no more.
    """

    __slots__ = ("_known", "_new", "_now", "gone", "own")

    def __init__(self, known: Known, now: float) -> None:
        self._known = known
        self._now = now
        self.own: dict[bytes, Entry] = {}
        self.gone: dict[bytes, None] = {}
        self._new = 0

    def shared(self, peer: bytes) -> PeerRecord | None:
        """Return the record of a peer of which this view knows only what is shared."""
        if peer in self.own or peer in self.gone:
            return None
        return self._known.records.get(peer)

    def unchanged(self, peer: bytes) -> bool:
        """Whether the entry that this view began with was not dropped."""
        return peer in self._known.records and peer not in self.gone

    def get(self, peer: bytes) -> Entry | None:
        entry = self.own.get(peer)
        if entry is None and self.unchanged(peer):
            entry = self.own[peer] = self._known.entry(peer, self._now)
        return entry

    def __getitem__(self, peer: bytes) -> Entry:
        entry = self.get(peer)
        if entry is None:
            raise KeyError(peer)
        return entry

    def __setitem__(self, peer: bytes, entry: Entry) -> None:
        self._new += peer not in self
        self.own[peer] = entry

    def __delitem__(self, peer: bytes) -> None:
        if self.unchanged(peer):
            self.gone[peer] = None
        else:
            self._new -= 1
        self.own.pop(peer, None)

    def __contains__(self, peer: object) -> bool:
        return peer in self.own or (peer in self._known.records and peer not in self.gone)

    def __iter__(self) -> Iterator[bytes]:
        yield from (peer for peer in self._known.records if peer not in self.gone)
        yield from (peer for peer in self.own if not self.unchanged(peer))

    def __len__(self) -> int:
        return len(self._known.records) - len(self.gone) + self._new
