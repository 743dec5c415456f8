"""How two peers compare their views, so that what rumours have missed is told after all.

One sends a `Digest`, a hash for each of 64 buckets of peers. The other answers for the buckets
that differ: with its records, where they are few; else with an `Outline`, a short hash of each
live record in them. Whoever gets an outline asks for the records that it lacks, by their hashes
and of one peer at a time, and says who of them is dead or has left. So two views of ten thousand
that differ in a few records exchange those and some kilobytes, and a newcomer that greets three
peers gets the swarm's records once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from typing import Final, final

from moshpit.protocol.gossip import Rumor, beliefs, pages
from moshpit.protocol.machine import Send
from moshpit.protocol.roster import Roster
from moshpit.protocol.view import BUCKETS, Entry
from moshpit.types import PeerId
from moshpit.wire.messages import Difference, Digest, Gossip, Message, News, Outline

DIRECT_MAX: Final = 8  # guess: so many records travel without an outline first
SHORT_BYTES: Final = 6  # of a record's hash: two of a bucket's alike are one in 10^10
DIGESTS_MAX: Final = 1024  # guess: digests sent whose answers are remembered to be due
ASKED_MAX: Final = 32_768  # guess: records asked for that are remembered to be due
DIGEST_ANSWER_S: Final = 2.0  # guess: how long an answer may be under way
OUTLINE_S: Final = 10.0  # guess: until then an outline is taken from who was sent a digest


@final
class Exchanges:
    """One peer's comparisons with others.

    Args:
        roster: what it believes. Effects go into its ``out``.
        probe_interval_s: how often a stranger is asked, at most.
    """

    def __init__(self, roster: Roster, probe_interval_s: float) -> None:
        self._roster = roster
        self._view = roster.view
        self._probe_interval_s = probe_interval_s
        self._digests: dict[PeerId, float] = {}  # to whom one was sent, and when
        self._asked: dict[bytes, float] = {}  # records (short hashes), and when

    # --- beginning ------------------------------------------------------------------------

    def begin(self, peer: PeerId, now: float) -> None:
        """Send a digest."""
        self._expect(peer, now)
        self._send(peer, Digest(self._view.digest()))

    def greet(self, peer: PeerId, now: float) -> None:
        """Say who this is to somebody unknown, and compare."""
        self._send(peer, News(Gossip((self._view.me,))))
        self.begin(peer, now)

    def ask_stranger(self, peer: PeerId, now: float) -> None:
        """Somebody unknown speaks: its record was lost, or is not believed here."""
        if now - self._digests.get(peer, -inf) >= self._probe_interval_s:
            self.begin(peer, now)

    # --- answering ------------------------------------------------------------------------

    def digest(self, peer: PeerId, message: Digest, now: float) -> None:
        """Answer a digest."""
        if len(message.buckets) != BUCKETS:
            self._roster.refuse(peer, "digest of a wrong size")
            return
        differing = self._view.differing(message.buckets)
        if not differing:
            return
        # Who was sent a digest answers with what it has anyway: no need to ask for it.
        asked = now - self._digests.get(peer, -inf) <= DIGEST_ANSWER_S
        if not asked:
            self._expect(peer, now)
        if self._are_few(differing):
            self.send_views(peer, differing, () if asked else tuple(differing))
        else:
            self._send_outline(peer, differing, back=not asked)

    def difference(self, peer: PeerId, reply: tuple[int, ...]) -> None:
        """Answer what somebody wants back for its records."""
        if not reply:
            return
        buckets = sorted(dict.fromkeys(reply))
        if buckets[0] < 0 or buckets[-1] >= BUCKETS:
            self._roster.refuse(peer, "bucket out of range")
        elif self._are_few(buckets):
            self.send_views(peer, buckets)
        else:
            self._send_outline(peer, buckets, back=False)

    def outline(self, peer: PeerId, message: Outline, now: float) -> None:
        """Answer an outline, or send the records that one asks for."""
        flaw = _flaw(message)
        if not flaw and not message.asks and now - self._digests.get(peer, -inf) > OUTLINE_S:
            flaw = "an outline that nobody asked for"
        if flaw:
            self._roster.refuse(peer, flaw)
            return
        if message.back:
            self._send_outline(peer, message.buckets, back=False)
        told: list[Rumor] = []
        lacking: list[tuple[int, bytes]] = []
        for index, hashes in zip(message.buckets, message.hashes, strict=True):
            theirs = dict.fromkeys(_cut(hashes))
            entries = self._view.bucket(index)
            wanted = message.asks
            told += [
                rumor
                for entry in entries
                if _short(entry) in theirs and (wanted or not entry.status.live)
                for rumor in beliefs(entry, self._roster.me)
            ]
            if not wanted:
                known = {_short(entry): None for entry in entries}
                lacks = b"".join(h for h in theirs if h not in known and self._may_ask(h, now))
                if lacks:
                    lacking.append((index, lacks))
        if lacking:
            buckets, hashes = zip(*lacking, strict=True)
            self._send(peer, Outline(buckets, hashes, asks=True))
        if told:
            self._send_told(peer, told, ())

    def send_views(self, peer: PeerId, buckets: Iterable[int], reply: tuple[int, ...] = ()) -> None:
        """Send everything that is believed of the peers in some buckets."""
        told = (
            rumor
            for index in buckets
            for entry in self._view.bucket(index)
            for rumor in beliefs(entry, self._roster.me)
        )
        self._send_told(peer, told, reply)

    def _are_few(self, buckets: Sequence[int]) -> bool:
        return sum(len(self._view.live_in(index)) for index in buckets) <= DIRECT_MAX

    # --- parts ----------------------------------------------------------------------------

    def _send_told(self, peer: PeerId, told: Iterable[Rumor], reply: tuple[int, ...]) -> None:
        for gossip in pages(told):
            self._send(peer, Difference(gossip, reply))
            reply = ()

    def _send_outline(self, peer: PeerId, buckets: Sequence[int], *, back: bool) -> None:
        hashes = tuple(
            b"".join(_short(entry) for entry in self._view.bucket(index) if entry.status.live)
            for index in buckets
        )
        self._send(peer, Outline(tuple(buckets), hashes, back=back))

    def _may_ask(self, short: bytes, now: float) -> bool:
        """Whether a record is not on its way from somebody else; it is from now on."""
        if now - self._asked.get(short, -inf) <= DIGEST_ANSWER_S:
            return False
        if len(self._asked) >= ASKED_MAX:
            self._asked.clear()
        self._asked[short] = now
        return True

    def _expect(self, peer: PeerId, now: float) -> None:
        if len(self._digests) >= DIGESTS_MAX:
            self._digests.clear()
        self._digests[peer] = now

    def _send(self, peer: PeerId, message: Message) -> None:
        self._roster.out.append(Send(peer, message))


def _short(entry: Entry) -> bytes:
    return entry.hash.to_bytes(8, "little")[:SHORT_BYTES]


def _cut(hashes: bytes) -> Iterable[bytes]:
    return (hashes[at : at + SHORT_BYTES] for at in range(0, len(hashes), SHORT_BYTES))


def _flaw(message: Outline) -> str:
    buckets = message.buckets
    if len(dict.fromkeys(buckets)) != len(buckets) or not all(0 <= b < BUCKETS for b in buckets):
        return "bucket out of range"
    odd = any(len(hashes) % SHORT_BYTES for hashes in message.hashes)
    if len(message.hashes) != len(buckets) or odd:
        return "outline of a wrong size"
    return ""
