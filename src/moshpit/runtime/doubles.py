"""Two processes with one key: which of them has to go, and how it learns that.

A peer that is connected to a process refuses another one with the same key (``duplicate-key``),
if the first one still answers. So whoever comes second is refused by those whom the first one
knows, and the first by nobody, or by the few that only met the second. Each counts who refuses
it and who is connected to it. Two witnesses are needed, and more than are connected; where
nobody is connected, one will do: nothing can be lost then.

A ghost (a process that was stopped, or whose machine slept) answers nobody, so its successor is
taken in everywhere; when it wakes up, it is the one that is refused.
"""

from __future__ import annotations

from typing import Final, final

from moshpit.types import PeerId

WITNESSES: Final = 2
WINDOW_S: Final = 60.0  # guess: refusals are counted for so long


@final
class Doubles:
    """Counts the peers that refuse this process as the second one with its key."""

    def __init__(self) -> None:
        self._refusals: dict[PeerId, float] = {}

    def refused(self, by: PeerId, connected: int, now: float) -> bool:
        """Take a refusal; return whether this process has to go.

        Args:
            by: who refuses it.
            connected: how many others have a connection to this process.
            now: seconds.

        Example:
            >>> doubles = Doubles()
            >>> [doubles.refused(PeerId(bytes([i])), connected=2, now=0.0) for i in range(4)]
            [False, False, True, True]
        """
        self._refusals[by] = now
        self._refusals = {p: at for p, at in self._refusals.items() if now - at <= WINDOW_S}
        count = len(self._refusals)
        return not connected or (count >= WITNESSES and count > connected)
