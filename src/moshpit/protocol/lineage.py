"""With whom a peer has averaged, epoch by epoch: how two sides of a swarm know that they are two.

Every averaging has a *label*, made of the epoch and one of those who took part: the first on the
ring of ids at or after the epoch's point. All peers of one swarm find the same one, without a word
to each other; the sides of a partition, which have no peer in common, find two. Views that differ
in a few peers seldom differ in that one, and where they do, only for an epoch.

A peer remembers the labels of many epochs, and what it gave to each. In its record it shows a few:
the newest, those around losses of peers (where sides may have parted), and of older ones some at
round numbers. Whoever compares them with what it remembers sees the last averaging that both
have from the same swarm. What a peer has given since then is its part of what its side has done.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from moshpit.types import PeerId

LABEL_BYTES: Final = 2  # a false match costs accuracy once in 65536 times, and nothing else
EPOCH_BYTES: Final = 4
ENTRY_BYTES: Final = EPOCH_BYTES + LABEL_BYTES
SHOWN_MAX: Final = 16  # entries in a record: 96 bytes
NEWEST_SHOWN: Final = 4  # guess: records come an epoch or two late
LOSSES_SHOWN: Final = 3  # guess: the latest two, and the one in which most peers were lost
REMEMBERED_MAX: Final = 4096  # guess: epochs; 300 KB
_ROUND_BITS: Final = 32


@dataclass(frozen=True, slots=True)
class Fork:
    """Another peer's lineage and one's own have parted.

    Attributes:
        first: the first epoch that they are known not to have averaged together.
        depth: how many epochs there are from the last that they have to the last known.
    """

    first: int
    depth: int


def label_of(epoch: int, company: Sequence[PeerId], here: Callable[[PeerId], bool]) -> bytes:
    """Return the label of an averaging.

    Args:
        epoch: its epoch.
        company: who was to take part, sorted by id; not empty.
        here: whether a peer is still there. Of those who are, one makes the label.
    """
    point = hashlib.blake2b(epoch.to_bytes(8, "little"), digest_size=32).digest()
    start = bisect_left(company, point)
    found = company[start % len(company)]
    for offset in range(len(company)):
        peer = company[(start + offset) % len(company)]
        if here(peer):
            found = peer
            break
    return hashlib.blake2b(point + found, digest_size=LABEL_BYTES).digest()


@final
class Lineage:
    """What one peer remembers of its averagings."""

    def __init__(self) -> None:
        self._labels: dict[int, bytes] = {}  # by epoch, oldest first
        self._samples: dict[int, float] = {}
        self._losses: list[tuple[int, int]] = []  # (epoch, how many were lost before it)
        self._shown: bytes | None = None
        self._compared: dict[bytes, Fork | None] = {}
        self.newest = -1
        """The epoch of the latest averaging; -1: there was none."""

    # --- what is remembered ---------------------------------------------------------------

    def gave(self, epoch: int, samples: float) -> None:
        """Note work of an epoch that is in this peer's values."""
        if samples > 0:
            self._samples[epoch] = self._samples.get(epoch, 0.0) + samples
            if len(self._samples) > REMEMBERED_MAX:
                del self._samples[next(iter(self._samples))]

    def averaged(self, epoch: int, label: bytes, lost: int) -> None:
        """Note an averaging; ``lost``: how many peers were lost since the one before."""
        if epoch >= 1 << 8 * EPOCH_BYTES or epoch < self.newest:
            return
        self._labels[epoch] = label
        self.newest = epoch
        if lost:
            self._losses.append((epoch, lost))
            latest, earlier = self._losses[-2:], self._losses[:-2]
            earlier.sort(key=lambda loss: -loss[1])
            self._losses = sorted(earlier[: LOSSES_SHOWN - 2]) + latest
        if len(self._labels) > REMEMBERED_MAX:
            del self._labels[next(iter(self._labels))]
        self._shown = None
        self._compared.clear()

    def since(self, epoch: int) -> float:
        """Return what this peer has given from an epoch on, in samples."""
        return sum(samples for at, samples in self._samples.items() if at >= epoch)

    # --- what is shown, and compared ------------------------------------------------------

    def shown(self) -> bytes:
        """Return what the record says of it, newest first."""
        if self._shown is None:
            entries = [e.to_bytes(EPOCH_BYTES, "big") + self._labels[e] for e in self._chosen()]
            self._shown = b"".join(entries)
        return self._shown

    def _chosen(self) -> list[int]:
        newest = self.newest
        wanted = dict.fromkeys(range(newest, newest - NEWEST_SHOWN, -1))
        for epoch, _ in reversed(self._losses):
            # A loss may be noticed one averaging after the first that went without those peers.
            wanted.update(dict.fromkeys((epoch, epoch - 1, epoch - 2)))
        for bits in range(2, _ROUND_BITS):
            last = newest >> bits << bits
            wanted.update(dict.fromkeys((last, last - (1 << bits))))
        there = [epoch for epoch in wanted if epoch in self._labels]
        return sorted(there[:SHOWN_MAX], reverse=True)

    def compare(self, shown: bytes) -> Fork | None:
        """Return where another peer's lineage parts from this one; None: nowhere, as far as it
        shows (it may be behind, or ahead)."""
        if shown not in self._compared:
            if len(self._compared) >= REMEMBERED_MAX:
                self._compared.clear()
            self._compared[shown] = self._parted(shown)
        return self._compared[shown]

    def _parted(self, shown: bytes) -> Fork | None:
        common, first, last = -1, -1, -1
        for at in range(len(shown) - ENTRY_BYTES, -1, -ENTRY_BYTES):  # oldest first
            epoch = int.from_bytes(shown[at : at + EPOCH_BYTES], "big")
            mine = self._labels.get(epoch)
            if mine is None:
                continue
            if mine == shown[at + EPOCH_BYTES : at + ENTRY_BYTES]:
                common, first = epoch, -1
            else:
                first, last = (epoch if first < 0 else first), epoch
        if first < 0:
            return None
        if common < 0:  # not as far as this peer remembers
            first = common = next(iter(self._labels))
        while first > common + 1 and first - 1 not in self._labels:
            first -= 1  # a mean that was not of all may have been the first without them
        return Fork(first, last - common)

    def leads(self, shown: bytes) -> bool:
        """Whether another peer's latest averaging is one of this peer's."""
        epoch = int.from_bytes(shown[:EPOCH_BYTES], "big")
        label = shown[EPOCH_BYTES:ENTRY_BYTES]
        return bool(shown) and self._labels.get(epoch) == label


def lineage_flaw(shown: bytes) -> str | None:
    """Return why a lineage cannot be believed, or None."""
    if len(shown) > SHOWN_MAX * ENTRY_BYTES or len(shown) % ENTRY_BYTES:
        return "lineage of a wrong length"
    return None
