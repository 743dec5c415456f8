"""Few enough notices of each kind, whatever others do: they cannot fill a disk."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, final

from moshpit.events import Notice
from moshpit.types import PeerId

KEY_IN_USE: Final = "key-in-use"
"""The code of a notice: the peer named refuses this process as the second one with its key."""
BURST: Final = 10  # guess: notices of one code in a row
PER_SECOND: Final = 1.0  # guess: and then


@dataclass(slots=True)
class _Bucket:
    tokens: float
    since: float
    suppressed: int = 0


@final
class NoticeLimiter:
    """Passes on at most ``burst`` and then `PER_SECOND` notices of each code; counts the rest."""

    def __init__(
        self, emit: Callable[[Notice], None], clock: Callable[[], float], burst: int = BURST
    ) -> None:
        self._burst = burst
        self._emit = emit
        self._clock = clock
        self._buckets: dict[str, _Bucket] = {}

    def tell(self, code: str, peer: PeerId | None, detail: str) -> None:
        """Emit a notice, or count it if there were too many of its code."""
        now = self._clock()
        bucket = self._buckets.setdefault(code, _Bucket(self._burst, now))
        bucket.tokens = min(self._burst, bucket.tokens + (now - bucket.since) * PER_SECOND)
        bucket.since = now
        if bucket.tokens < 1:
            bucket.suppressed += 1
            return
        bucket.tokens -= 1
        if bucket.suppressed:
            detail = f"{detail} (and {bucket.suppressed} more before)".lstrip()
            bucket.suppressed = 0
        self._emit(Notice(code, peer, detail))
