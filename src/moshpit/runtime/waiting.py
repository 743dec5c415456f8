"""How long something takes, and how a thread waits: with the machine's clock, or another one.

Training and network ask here and nowhere else, so that a swarm may also live in virtual time
(`moshpit.experiments.virtual`), where a clock goes on only when everybody waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final, Protocol, final


class Event(Protocol):
    """Of `threading.Event`, what is used here."""

    def is_set(self) -> bool:
        """Whether it has happened."""
        ...

    def set(self) -> None:
        """It has happened: nobody waits any more."""
        ...

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has, ``timeout`` seconds at most; return whether it has."""
        ...


class Condition(Protocol):
    """Of `threading.Condition`, what is used here."""

    def __enter__(self) -> bool: ...
    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
        /,
    ) -> None: ...
    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until the predicate holds, ``timeout`` seconds at most; return whether it does."""
        ...

    def notify_all(self) -> None:
        """Something has changed: look again."""
        ...


class Waiting(Protocol):
    """A clock, and waits that end by it."""

    def clock(self) -> float:
        """Return the time in seconds; only differences mean anything."""
        ...

    def event(self) -> Event:
        """Return an event that has not happened."""
        ...

    def condition(self) -> Condition:
        """Return a condition with a lock of its own."""
        ...


@final
class RealTime:
    """The machine's clock, and real threads."""

    def clock(self) -> float:
        """See `Waiting.clock`."""
        return time.monotonic()

    def event(self) -> Event:
        """See `Waiting.event`."""
        return threading.Event()

    def condition(self) -> Condition:
        """See `Waiting.condition`."""
        return threading.Condition()


REAL_TIME: Final[Waiting] = RealTime()
