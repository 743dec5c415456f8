"""What becomes of a peer's notices in its log: nobody needs to be there to read them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Final, final

from moshpit.errors import printable
from moshpit.events import Notice
from moshpit.transport.notices import NoticeLimiter
from moshpit.types import short

log = logging.getLogger("moshpit")

BEHIND_LINE_S: Final = 10.0  # guess: a latecomer follows in several steps; one line tells it
LOG_BURST: Final = 50  # guess: lines of one code in a row; then one a second, and how many more
_QUIET = frozenset(
    {"peer-joined", "peer-left", "peer-suspected", "peer-back", "behind", "bulk-lost", "takeover"}
)


@final
class NoticeLog:
    """Writes notices into the log, each at its level, and not without end.

    What a peer does is noted for each of its messages. One that sends nonsense as fast as it can,
    or a holder of the ticket that joins with a new key a thousand times a minute, must not fill a
    disk, so of each code there are `LOG_BURST` lines and then one a second.

    Args:
        clock: seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._behind_at = float("-inf")
        self._limiter = NoticeLimiter(self._write, clock, LOG_BURST)

    def __call__(self, notice: Notice) -> None:
        if notice.code == "behind":
            before, self._behind_at = self._behind_at, self._clock()
            if self._behind_at - before < BEHIND_LINE_S:
                return
        self._limiter.tell(notice.code, notice.peer, notice.detail)

    def _write(self, notice: Notice) -> None:
        level = logging.INFO if notice.code in _QUIET else logging.WARNING
        who = f" {short(notice.peer)}" if notice.peer is not None else ""
        detail = f": {printable(notice.detail)}" if notice.detail else ""
        log.log(level, "%s%s%s", notice.code, who, detail)
