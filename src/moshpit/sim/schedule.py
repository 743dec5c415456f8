"""Virtual time: one heap, one clock, one order.

Entries are plain tuples ``(time, number, function, x, y)``; the number rises with every entry,
so that ties are broken by the order of scheduling and nothing else is ever compared.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

Action = Callable[[Any, Any], None]


class Schedule:
    """A clock that jumps from one entry to the next."""

    __slots__ = ("_heap", "_number", "_stopped", "now")

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Action, Any, Any]] = []
        self._number = 0
        self._stopped = False

    @property
    def entries(self) -> int:
        """How many entries were ever scheduled: the work that a run has cost."""
        return self._number

    def at(self, time: float, action: Action, x: Any = None, y: Any = None) -> None:
        """Call ``action(x, y)`` at this time, or now where it has passed."""
        now = self.now
        self._number += 1
        heappush(self._heap, (time if time > now else now, self._number, action, x, y))

    def stop(self) -> None:
        """End `run` after the entry that is being worked on."""
        self._stopped = True

    def run(self, until: float) -> bool:
        """Work until the time, the last entry, or `stop`; return whether it was stopped."""
        heap = self._heap
        self._stopped = False
        while heap and heap[0][0] <= until:
            self.now, _, action, x, y = heappop(heap)
            action(x, y)
            if self._stopped:
                return True
        self.now = max(self.now, until)
        return False
