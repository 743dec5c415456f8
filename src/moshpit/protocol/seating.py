"""The seats of one round: who is there, who is done, who is not to be waited for any more.

Sets of seats and of chunks are bit masks in ints, and are walked in a fixed order.

From a seat's point of view another seat of its group is
- *alive*: a full partner; at first everybody is,
- *lost*: silent for too long, or its connection is gone; whatever it sends later is late,
- *estranged*: it told us that it holds us for lost, so it neither contributes nor waits for us,
  but it still serves results,
- *over*: it has nothing to do with this round any more.
Two clients cannot reach and do not need each other; neither is alive to the other.
"""

from __future__ import annotations

from collections.abc import Iterator

from moshpit.types import PeerId, Role
from moshpit.wire.messages import GroupFormed


def bits(mask: int) -> Iterator[int]:
    """Yield the numbers in a bit mask, from the smallest.

    >>> list(bits(0b1010))
    [1, 3]
    """
    data = mask.to_bytes((mask.bit_length() + 7) // 8, "little")
    for index, byte in enumerate(data):
        if byte:
            for bit in range(8):
                if byte >> bit & 1:
                    yield index * 8 + bit


def span(start: int, stop: int) -> int:
    """Return the bit mask of the numbers from ``start`` up to ``stop``.

    >>> bin(span(1, 3))
    '0b110'
    """
    return (1 << stop) - (1 << start)


class Seating:
    """What one seat knows of the seats of its group.

    Args:
        formed: the announcement, already judged.
        me: this peer's seat.
        now: when the round began here.
    """

    def __init__(self, formed: GroupFormed, me: int, now: float) -> None:
        joins = formed.joins
        self.size = len(joins)
        self.me = me
        self.peers = tuple(PeerId(join.peer) for join in joins)
        self.seat_of = {peer: seat for seat, peer in enumerate(self.peers)}
        self.order = tuple((me + step) % self.size for step in range(1, self.size))
        self.clients = sum(1 << s for s, join in enumerate(joins) if join.role == Role.CLIENT)
        self.reducers = span(0, self.size) & ~self.clients
        self.weighers = sum(1 << s for s, join in enumerate(joins) if join.weighs)
        self.others = span(0, self.size) & ~(1 << me)
        if self.clients >> me & 1:
            self.others &= ~self.clients
        origin = joins[me].origin
        same = sum(join.weighs and join.origin == origin for join in joins)
        self.share = max(1, same) if origin else 1
        """How many members bring the same value as this one."""
        self.present = 0
        self.lost = 0
        self.estranged = 0
        self.over = 0
        self.done = 0
        self.heard = [now] * self.size
        self.present_at = [now] * self.size

    @property
    def alive(self) -> int:
        """The other seats that are full partners."""
        return self.others & ~(self.lost | self.estranged | self.over)

    @property
    def servers(self) -> int:
        """The other seats that may still serve results."""
        return self.others & ~(self.lost | self.over)

    def seats(self, mask: int) -> Iterator[int]:
        """Yield the other seats in a mask, from the one after this peer's, round the group."""
        return (seat for seat in self.order if mask >> seat & 1)

    def can_send(self, seat: int) -> bool:
        """Whether a message can go there: clients must come to us first."""
        return bool((self.present | ~self.clients) >> seat & 1)
