"""What is still to be told to others: rumours, and pages of records.

A rumour (a peer's newest record, or a suspicion of it) is sent a bounded number of times,
fewest sends first and among those the newest first. The first time it is told in full; after
that it is only mentioned, and whoever lacks it asks for it (`mentions`, decision 0036). What a
rumour misses, the exchange of digests repairs. (Counting what is heard from others as sent saves
a quarter of the bytes, but leaves three times as many peers without the news: measured with 24
and 100 peers.)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import ceil, log10
from typing import Final

from moshpit.protocol.view import Entry, Status
from moshpit.wire.messages import NO_GOSSIP, Gossip, Mention, PeerRecord, Suspicion

QUEUE_MAX: Final = 4096  # guess: rumours kept; the most often sent are dropped first
PAGE_ITEMS: Final = 256  # × judge.RECORD_BYTES_MAX stays below the frame limit of 1 MiB
SHORT_ID_BYTES: Final = 6  # of a mentioned peer's id: two of 10,000 alike are one in 10^6
SUSPECT, DEAD = -1, -2  # in the place of a version

Rumor = PeerRecord | Suspicion
Key = tuple[bytes, bool]


class Rumors:
    """The queue of rumours.

    Args:
        retransmit_multiplier: how often each is sent, times log10 of the swarm's size.
        per_message_max: how many a message carries.
        me: whose own record is always told in full: nobody can have it from elsewhere yet.
    """

    def __init__(self, retransmit_multiplier: float, per_message_max: int, me: bytes = b"") -> None:
        self._me = me
        self._multiplier = retransmit_multiplier
        self._per_message_max = per_message_max
        self._levels: list[dict[Key, Rumor]] = [{}]  # by number of sends, oldest first
        self._level_of: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._level_of)

    def add(self, rumor: Rumor) -> None:
        """Queue a rumour; it replaces an older one of the same kind about the same peer."""
        key = (rumor.peer, isinstance(rumor, Suspicion))
        level = self._level_of.pop(key, None)
        if level is not None:
            del self._levels[level][key]
        elif len(self._level_of) >= QUEUE_MAX:
            self._drop_stalest()
        self._levels[0][key] = rumor
        self._level_of[key] = 0

    def drop(self, peer: bytes, suspicion: bool) -> None:
        """Forget a rumour that is no longer true."""
        level = self._level_of.pop((peer, suspicion), None)
        if level is not None:
            del self._levels[level][(peer, suspicion)]

    def pick(self, peers: int, *, fresh: int | None = None) -> Gossip:
        """Return what the next message should carry.

        Args:
            peers: how many there are in the swarm.
            fresh: only what was sent less often than this; nothing: whatever is to be told. While
                many things change, pushes that did not do so would repeat all of it at once.
        """
        if not self._level_of:
            return NO_GOSSIP
        sends_max = max(1, ceil(self._multiplier * log10(peers + 1)))
        picked: list[tuple[Key, int, Rumor]] = []
        for level, queue in enumerate(self._levels[:fresh]):
            for key in reversed(queue):
                if len(picked) >= self._per_message_max:
                    break
                picked.append((key, level, queue[key]))
        for key, level, _ in picked:
            if level + 1 >= sends_max:
                del self._levels[level][key], self._level_of[key]
            else:
                self._raise(key, level)
        told: list[Rumor] = []
        mentions: list[Mention] = []
        for _, level, rumor in picked:
            first = level == 0 and (fresh is None or isinstance(rumor, Suspicion))
            if first or rumor.peer == self._me:
                told.append(rumor)
            else:
                mentions.append(mention_of(rumor))
        full = gossip_of(told)
        return Gossip(full.records, full.suspicions, tuple(mentions)) if mentions else full

    def _raise(self, key: Key, level: int) -> None:
        if level + 1 == len(self._levels):
            self._levels.append({})
        self._levels[level + 1][key] = self._levels[level].pop(key)
        self._level_of[key] = level + 1

    def _drop_stalest(self) -> None:
        for queue in reversed(self._levels):
            if queue:
                key = next(iter(queue))
                del queue[key], self._level_of[key]
                return


def mention_of(rumor: Rumor) -> Mention:
    """Return what only says that there is this rumour."""
    short_id = rumor.peer[:SHORT_ID_BYTES]
    if isinstance(rumor, PeerRecord):
        return Mention(short_id, rumor.incarnation, rumor.version)
    return Mention(short_id, rumor.incarnation, DEAD if rumor.dead else SUSPECT)


def gossip_of(rumors: Iterable[Rumor]) -> Gossip:
    """Sort rumours into the two lists of a message, keeping their order."""
    records: list[PeerRecord] = []
    suspicions: list[Suspicion] = []
    for rumor in rumors:
        if isinstance(rumor, PeerRecord):
            records.append(rumor)
        else:
            suspicions.append(rumor)
    return Gossip(tuple(records), tuple(suspicions))


def beliefs(entry: Entry, by: bytes) -> Iterator[Rumor]:
    """Return what to tell another peer about an entry, in an exchange of views.

    The dead are told of as rumours only: who does not know them need not learn of them.
    """
    record = entry.record
    if entry.status.live or entry.status is Status.LEFT:
        yield record
    if entry.status is Status.DEAD or entry.status is Status.SUSPECT:
        yield suspicion_of(entry, by)


def suspicion_of(entry: Entry, by: bytes) -> Suspicion:
    """Return the rumour that says what is believed of a suspected or dead peer."""
    record = entry.record
    return Suspicion(record.peer, record.incarnation, entry.status is Status.DEAD, by)


def pages(rumors: Iterable[Rumor]) -> Iterator[Gossip]:
    """Cut what is to be told into messages of a bounded size; at least one."""
    page: list[Rumor] = []
    sent = False
    for rumor in rumors:
        if len(page) == PAGE_ITEMS:
            yield gossip_of(page)
            page, sent = [], True
        page.append(rumor)
    if page or not sent:
        yield gossip_of(page)
