"""How fast this peer's link is, seen from what rounds really moved over it.

Only the sender's kernel knows whether the network held data back, and not the program at one end
(`Flow.limited_s`). So what is measured is *up*: bytes acknowledged per second, in windows in which
the network was the limit nearly all the time. Where the receivers' links were the limit, a window
says less than the link can do; so the estimate is a high one of the recent windows. What came in
is a lower bound of *down*, since others' links may have been the limit; down counts as up if less
was seen.

Connections within one machine say nothing about links and are left out, and so are windows in
which this thread was busy: then the processor was the limit. All links from `FAST` on count as
equal, and a figure that changes little is not told again: parts that follow noise cost more than
they gain (`protocol.partition.levelled`).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Final, final

from moshpit.transport.base import Flow

FAST: Final = 125e6  # bytes/s: 1 Gbit/s; guess: above, processors are the limit as often as links
LOOK_S: Final = 0.05  # guess: how often the counters are read while rounds are under way
WINDOW_S_MIN: Final = 0.05  # guess
WINDOW_S_MAX: Final = 1.0  # guess: a window ends after this, however little was moved
WINDOW_BYTES: Final = 512 << 10  # guess: some times the bursts that shapers let through
WINDOW_BYTES_MIN: Final = 64 << 10  # guess: less says nothing
WINDOWS: Final = 64  # guess: how many of the latest are remembered
LIMITED: Final = 0.8  # guess: share of a window in which the network was the limit
BUSY: Final = 0.8  # guess: share of a window that this thread computed
CHANGE: Final = 0.2  # guess: a smaller change is not told
TELL_S: Final = 3.0  # guess: the shortest time between two changes


@final
class Meter:
    """Estimates a link's two directions from counters. It reads no clock."""

    def __init__(self) -> None:
        self._start: tuple[float, Flow, float] | None = None
        self._full = False  # whether the window before was limited by the network
        self._up: deque[float] = deque(maxlen=WINDOWS)
        self._down: deque[float] = deque(maxlen=WINDOWS)

    def pause(self) -> None:
        """Nothing is moved for a while: the present window does not count."""
        self._start = None
        self._full = False

    def sample(self, now: float, flow: Flow, busy_s: float) -> None:
        """Take the counters.

        Args:
            now: seconds, on any clock.
            flow: the transport's.
            busy_s: seconds that this thread has computed so far.
        """
        if self._start is None:
            self._start = (now, flow, busy_s)
            return
        began, before, busy_before = self._start
        took_s = now - began
        moved = max(flow.sent - before.sent, flow.received - before.received)
        if took_s < WINDOW_S_MIN or (moved < WINDOW_BYTES and took_s < WINDOW_S_MAX):
            return
        self._start = (now, flow, busy_s)
        if took_s > 2 * WINDOW_S_MAX or busy_s - busy_before > BUSY * took_s:
            return
        full, self._full = self._full, flow.limited_s - before.limited_s >= LIMITED * took_s
        if full and self._full:  # the first such window holds what a shaper lets through at once
            _keep(self._up, flow.sent - before.sent, took_s)
        _keep(self._down, flow.received - before.received, took_s)

    def estimate(self) -> tuple[float, float]:
        """Return up and down in bytes per second; 0 and 0 while up is not known."""
        up = _high(self._up)
        return (up, max(up, _high(self._down))) if up else (0.0, 0.0)


def _keep(windows: deque[float], moved: int, took_s: float) -> None:
    if moved >= WINDOW_BYTES_MIN:
        windows.append(moved / took_s)


def _high(windows: deque[float]) -> float:
    """The second highest: the highest may hold a burst, or what others had kept back."""
    return min(FAST, sorted(windows)[-2]) if len(windows) > 1 else 0.0


@final
class LinkWatch:
    """Reads the counters while rounds are under way, and tells what has changed.

    Args:
        flow: reads them; None where nobody counts.
        told: up and down, in bytes per second, when they are news.
        given: what the user says of the link; if that is not 0, nothing is measured.
    """

    def __init__(
        self, flow: Callable[[], Flow | None], told: Callable[[float, float], None], given: float
    ) -> None:
        self._flow = flow
        self._told = told
        self._measures = not given
        self._loop = asyncio.get_running_loop()
        self._meter = Meter()
        self._timer: asyncio.TimerHandle | None = None
        self._known = (0.0, 0.0)
        self._told_at = 0.0

    def start(self) -> None:
        """Rounds are under way."""
        if self._measures and self._timer is None:
            self._look()

    def stop(self) -> None:
        """No round is under way."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._meter.pause()

    def tell(self) -> None:
        """Tell what was measured, if it is news; called where it is about to be used."""
        up, down = self._meter.estimate()
        now = self._loop.time()
        first = not self._known[0]
        if up and (first or (now - self._told_at >= TELL_S and self._is_news(up, down))):
            self._known, self._told_at = (up, down), now
            self._told(up, down)

    def _is_news(self, up: float, down: float) -> bool:
        pairs = zip(self._known, (up, down), strict=True)
        return any(abs(new - old) > CHANGE * old for old, new in pairs)

    def _look(self) -> None:
        flow = self._flow()
        if flow is None:  # this transport, or this system, does not count
            self._measures = False
            self._timer = None
            return
        self._meter.sample(self._loop.time(), flow, time.thread_time())
        self._timer = self._loop.call_later(LOOK_S, self._look)
