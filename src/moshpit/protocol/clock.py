"""A peer's own running time: the driver's clock without the pauses of this process.

When a handler is called long after its wake-up was due, this process did not run (SIGSTOP, a
laptop's lid, an overloaded machine). The parts of a node see a clock without the gap, so that a
paused peer does not believe that everybody else fell silent.
"""

from __future__ import annotations

PAUSE_MIN_S = 0.4  # guess: a wake-up later than this is a pause of this process


class OwnClock:
    """Turns the driver's times into a node's own, and its wake-ups back.

    Args:
        now: the driver's clock, seconds.

    Attributes:
        wakeup: when a `Tick` is due, on the driver's clock.
    """

    def __init__(self, now: float) -> None:
        self._skew = 0.0
        self._own_now = now
        self._own_wakeup = now
        self.wakeup: float | None = now

    def peek(self, now: float) -> float:
        """Return the own time, without looking for a pause."""
        return now - self._skew

    def read(self, now: float) -> float:
        """Return the own time. It never jumps back, and a wake-up that is due is due, whatever
        rounding takes."""
        if self.wakeup is not None and now - self.wakeup > PAUSE_MIN_S:
            self._skew += now - self.wakeup
        own = max(self._own_now, now - self._skew)
        if self.wakeup is not None and now >= self.wakeup:
            own = max(own, self._own_wakeup)
        self._own_now = own
        return own

    def wake_at(self, own: float | None) -> None:
        """Set the next wake-up, on the own clock."""
        if own is not None:
            self._own_wakeup = own
            own += self._skew
        self.wakeup = own


def sooner(a: float | None, b: float | None) -> float | None:
    """Return the earlier of two times; None is never."""
    return b if a is None or (b is not None and b < a) else a


def past(wakeup: float | None, now: float) -> bool:
    """Whether a time has come; None never comes."""
    return wakeup is not None and wakeup <= now
