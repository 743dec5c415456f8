"""Flows to several groupmates at once end at the same time (docs/decisions/0040).

In a round everybody sends to everybody, and TCP shares a link unevenly: one flow of seven may be
twice as fast as another for seconds. Whoever waits for the slowest flow then waits at the end,
when most links carry nothing any more. So whatever is ahead is held back a little, by pacing in
the kernel, and its share goes to the flows that are behind: each flow that would end before the
time at which all could end together is paced to end then. What is behind is never paced, so a
link stays full, and no bandwidth needs to be known.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Final, final

from moshpit.transport.base import Bulk
from moshpit.types import PeerId

LOOK_S: Final = 0.03  # measured: 0.2 s is as bad as nothing, 0.1 s half as good
MEMORY_S: Final = 0.15  # guess: over how long a flow's speed is averaged
AHEAD: Final = 1.01  # guess: a flow is paced that is so much faster than it has to be
BEHIND: Final = 0.9  # guess: a paced flow slower than so much of its pace is free again
START_S: Final = 0.2  # guess: connections find out how fast they can be
RISE: Final = 1.2  # guess: what a paced flow may gain from one look to the next


@final
class Evener:
    """Says how fast each flow may be. It reads no clock."""

    def __init__(self) -> None:
        self._began = math.inf
        self._at: float | None = None
        self._sent: dict[PeerId, int] = {}
        self._speed: dict[PeerId, float] = {}
        self._paced: set[PeerId] = set()

    def look(
        self, now: float, left: Mapping[PeerId, float], sent: Mapping[PeerId, int]
    ) -> Mapping[PeerId, float]:
        """Take what is known of the flows; return new paces.

        Args:
            now: seconds, on any clock.
            left: bytes that are still to be sent, for flows that have any.
            sent: bytes that have been, since any time.

        Returns:
            Bytes per second, for each flow whose pace changes; infinite: it is free.
        """
        if self._began == math.inf and left:
            self._began = now
        self._measure(now, sent)
        flows = [peer for peer in left if peer in self._speed]
        total, speed = sum(left[peer] for peer in flows), sum(self._speed.values())
        together = len(flows) > 1 and speed > 0 and now - self._began >= START_S
        paces = {peer: math.inf for peer in self._paced if not together or peer not in left}
        for peer in flows if together else ():
            fair = speed * left[peer] / total
            if self._speed[peer] > AHEAD * fair:
                paces[peer] = fair
            elif peer in self._paced:
                paces[peer] = math.inf if self._speed[peer] < BEHIND * fair else RISE * fair
        for peer, pace in paces.items():
            (self._paced.discard if math.isinf(pace) else self._paced.add)(peer)
        return paces

    def _measure(self, now: float, sent: Mapping[PeerId, int]) -> None:
        took_s = math.inf if self._at is None else now - self._at
        self._at = now
        share = 1 - math.exp(-took_s / MEMORY_S)
        speeds: dict[PeerId, float] = {}
        for peer, count in sent.items():
            before = self._sent.get(peer)
            if before is None or not 0 < took_s < math.inf:
                continue
            latest = max(0, count - before) / took_s
            old = self._speed.get(peer, latest)
            speeds[peer] = old + share * (latest - old)
        self._speed = speeds
        self._sent = dict(sent)


@final
class Evenness:
    """Paces the bulk connections to other machines while chunks wait to be sent.

    Args:
        bulk: returns the connections to a peer (`Transport.bulk`).
        waiting: yields how many bytes wait for each (`Outbox.waiting`).
    """

    def __init__(
        self,
        bulk: Callable[[PeerId], Bulk | None],
        waiting: Callable[[], Iterable[tuple[PeerId, float]]],
    ) -> None:
        self._bulk = bulk
        self._waiting = waiting
        self._loop = asyncio.get_running_loop()
        self._evener = Evener()
        self._timer: asyncio.TimerHandle | None = None
        self._paced: dict[PeerId, Bulk] = {}

    def start(self) -> None:
        """Rounds are under way."""
        if self._timer is None:
            self._look()

    def stop(self) -> None:
        """No round is under way: every flow is free."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        for bulk in self._paced.values():
            bulk.pace(math.inf)
        self._paced.clear()
        self._evener = Evener()

    def _look(self) -> None:
        left: dict[PeerId, float] = {}
        sent: dict[PeerId, int] = {}
        far: dict[PeerId, Bulk] = {}
        for peer, waiting in self._waiting():
            bulk = self._bulk(peer)
            if bulk is None or not bulk.far:
                continue
            far[peer] = bulk
            sent[peer] = bulk.flow().sent
            if waiting:
                left[peer] = waiting + bulk.backlog
        for peer, pace in self._evener.look(self._loop.time(), left, sent).items():
            bulk = far.get(peer) or self._paced.get(peer)
            if bulk is None:
                continue
            bulk.pace(pace)
            if math.isinf(pace):
                self._paced.pop(peer, None)
            else:
                self._paced[peer] = bulk
        self._timer = self._loop.call_later(LOOK_S, self._look)
