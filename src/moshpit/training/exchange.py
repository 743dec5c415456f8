"""The strategy's vectors on their way to the swarm and back: their memory, how long they may take,
and what their codec has lost.
"""

from __future__ import annotations

from typing import Any

from moshpit.training.averager import Averager, Averaging
from moshpit.training.strategies import Snapshot, Strategy


class Exchange:
    """Begins averagings of a strategy's snapshots, and clears up after them.

    Args:
        swarm: who averages.
        strategy: whose snapshots.
    """

    def __init__(self, swarm: Averager, strategy: Strategy) -> None:
        self._swarm = swarm
        self._strategy = strategy
        self._last: tuple[Averaging, Snapshot] | None = None
        self._share: float | None = None
        self._counts = True  # whether the last weight was this epoch's work

    def begin(self, rate: float, *, waits: bool) -> tuple[Averaging, Snapshot]:
        """Take a snapshot and begin its averaging.

        Args:
            rate: this peer's samples per second of local work; 0: unknown.
            waits: training stands still until the averaging has ended.
        """
        hidden_s = 0.0 if waits else self._epoch_s(rate)
        states = getattr(self._swarm, "states", None) if self._strategy.merges else None
        past: float | None = None if states is None else states.merging
        if past is not None:
            self._strategy.merge(past)
        fresh = self._strategy.fresh
        last, self._last = self._last, None
        if last is not None and last[0].settled:
            self._strategy.reuse(last[1].vector)
        snapshot = self._strategy.snapshot()
        earlier = max(0.0, snapshot.weight - fresh) if self._strategy.merges else 0.0
        self._counts = earlier == 0
        told: dict[str, Any] = {}
        if earlier or past is not None:  # not every swarm knows of it
            told = {"earlier": earlier, "merges": past is not None}
        averaging = self._swarm.begin_averaging(
            snapshot.vector,
            snapshot.weight,
            codec=snapshot.codec,
            feedback=snapshot.feedback,
            # With feedback, what is sent is not the values, and those are wanted if all fails.
            in_place=waits and snapshot.feedback is None and snapshot.fill_s is None,
            differences=snapshot.differences,
            hidden_s=hidden_s,
            exact_head=snapshot.exact_head,
            fill_s=snapshot.fill_s,
            **told,
        )
        self._strategy.begun(averaging)
        return averaging, snapshot

    def ended(self, averaging: Averaging, snapshot: Snapshot, *, used: bool) -> None:
        """The strategy has taken what came of an averaging, or has gone on without it.

        Args:
            averaging: the one that has ended.
            snapshot: what this peer gave.
            used: the mean was adopted. Otherwise the same work is given again, or nobody gets it:
                then nothing was lost of it on the way, either.
        """
        self._last = (averaging, snapshot)
        if snapshot.feedback is not None:
            if used:
                snapshot.feedback.settle()
            else:
                snapshot.feedback.undo()
        masses = averaging.report.rounds[-1].masses if averaging.report.rounds else ()
        mass = max(masses, default=0.0)
        if self._counts and 0 < snapshot.weight <= mass:
            self._share = snapshot.weight / mass

    def _epoch_s(self, rate: float) -> float:
        """Return how long an epoch's local work takes, at this peer's pace and with its share of
        the samples in the last epoch: so long an averaging may take. Not how long the last epoch
        took: an averaging that is slow would allow the next one to be slow."""
        if rate <= 0:
            return 0.0
        target = self._strategy.samples_per_epoch
        if self._share is None:
            return min(self._strategy.samples, target) / rate
        return target * self._share / rate
