"""Two living processes with one key, seen in what they say of themselves.

Where peers are connected to both, they refuse the second one (`moshpit.runtime.doubles`). In a
large swarm the two may be known to different peers, which refuse nobody. But records reach
everybody: each of the two hears of a record that it has not made, and outdoes it by a higher
incarnation; the other one outdoes that; and so on, as fast as news travel.

A process that was started again under its key outdoes what is left of an earlier life once, or a
few times where its peers knew different records of that, and never again. So who has to do it
again and again has a living twin.

Which of the two has to go? The one whose duel begins soon after itself is the newcomer. It gives
up first. Clocks are not compared, and neither says anything of this to the other: each only
stands for a number of rounds that depends on what it is. Of two newcomers, or two that have long
been there (sides of a swarm that were cut off from each other), the addresses decide, which both
records show.
"""

from __future__ import annotations

from math import inf
from typing import Final, final

from moshpit.wire.messages import PeerRecord

NEW_S: Final = 15.0  # guess: a duel that begins so soon after a process is about that one
QUIET_S: Final = 60.0  # guess: after so long without a round, it is another duel
ROUNDS: Final = {(True, True): 6, (True, False): 9, (False, True): 14, (False, False): 20}
"""How many rounds a process stands, by whether it is new, and whether its addresses come last.
Guess: an earlier life leaves fewer different records, and the rounds of one who goes are over,
wherever news of them are, before the next number."""


@final
class Twins:
    """Counts the rounds of a duel of this process with another one that has its key.

    Args:
        now: when this process began, seconds.
    """

    def __init__(self, now: float) -> None:
        self._here_since = now
        self._began = -inf
        self._latest = -inf
        self._rounds = 0

    def outdone(self, mine: PeerRecord, theirs: PeerRecord, now: float) -> bool:
        """Take a record of this peer that it has not made, and that counts more than its own;
        return whether this process has to go.

        Args:
            mine: its record until now.
            theirs: the other one.
            now: seconds.
        """
        if now - self._latest > QUIET_S:
            self._began, self._rounds = now, 0
        self._latest = now
        self._rounds += 1
        new = self._began - self._here_since <= NEW_S
        return self._rounds >= ROUNDS[new, mine.addresses >= theirs.addresses]
