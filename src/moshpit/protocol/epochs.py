"""The epoch that a peer works on: when it is due, when it ends, and whom it follows.

- What makes an epoch due: the swarm's samples have reached the target, or a host has called.
- A peer that sees the swarm at a later epoch goes there.
- In a large swarm a sample of the peers tells the rest of a new epoch.
"""

from __future__ import annotations

from typing import Final, final

from moshpit.config import SwarmConfig
from moshpit.events import Notice
from moshpit.protocol.clock import past, sooner
from moshpit.protocol.machine import AveragingDue, Effect, Emit, LocalProgress, Rng
from moshpit.protocol.matchmaking import Matchmaker
from moshpit.protocol.membership import Membership
from moshpit.protocol.merging import Merging
from moshpit.protocol.progress import Progress

PUBLISH_ALWAYS: Final = 64  # guess: up to so many peers, all publish a new epoch
PUBLISHERS: Final = 16  # guess: how many do in a larger swarm


@final
class Epochs:
    """A peer's place in the swarm's epochs. Effects are appended to the lists given.

    Args:
        membership: whose view counts, and who publishes this peer's record.
        matchmaker: who is told of each epoch, and says who has called.
        config: settings.
        rng: who tells of a new epoch, in a large swarm.
        target: samples per epoch of the whole swarm; 0: an epoch is never due by itself.
        now: the time.

    Attributes:
        now_at: the epoch.
        merging: whether sides of the swarm become one.
    """

    def __init__(
        self,
        membership: Membership,
        matchmaker: Matchmaker,
        config: SwarmConfig,
        rng: Rng,
        *,
        target: float,
        now: float,
    ) -> None:
        self._membership = membership
        self._matchmaker = matchmaker
        self._view = membership.view
        self._rng = rng
        self._progress = Progress(self._view, config.progress, target, now)
        self._due: int | None = None
        self._latest: LocalProgress | None = None
        self._incarnation = -1
        self.now_at = 0
        self.merging = Merging(self._view, config.membership.probe_interval_s)

    def retarget(self, target: float) -> None:
        """An epoch has so many samples."""
        self._progress.target = target

    # --- from epoch to epoch --------------------------------------------------------------

    def begun(self) -> None:
        """There is a snapshot of this epoch."""
        self._due = None

    def advance(self, epoch: int, effects: list[Effect], now: float) -> None:
        """Begin another epoch."""
        self.now_at = epoch
        self._due = None
        last = self._latest
        if last is not None:  # its samples were the epoch's before
            self._latest = LocalProgress(0.0, last.rate, last.step_s)
        self._matchmaker.advance(epoch, now)
        self._progress.advance(epoch, now)
        live = len(self._view.live)
        # In a large swarm a sample of the peers tells the rest; the others extrapolate.
        seldom = live > PUBLISH_ALWAYS and self._rng.random() >= PUBLISHERS / live
        if not seldom or self.merging.declared or self._view.me.merges_from >= 0:
            self._publish(self._progress.pace(), effects, now)

    def go_to(self, epoch: int, effects: list[Effect], now: float) -> None:
        """Follow the swarm to a later epoch without having averaged the ones between."""
        effects.append(
            Emit(Notice("behind", None, f"swarm is at epoch {epoch}, this peer at {self.now_at}"))
        )
        self.merging.skipped(epoch - self.now_at)
        self.advance(epoch, effects, now)

    def follow(self, effects: list[Effect], now: float) -> None:
        """No averaging is under way: become due, or go to the swarm's epoch."""
        called = self._matchmaker.called
        swarm_epoch = self._progress.swarm_epoch()
        if called is not None and called.epoch > swarm_epoch:
            swarm_epoch = called.epoch
        declares = self.merging.look(max(swarm_epoch, self.now_at), now)
        if declares:
            effects.append(Emit(self.merging.notice()))
        if swarm_epoch > self.now_at:
            self.go_to(swarm_epoch, effects, now)
        elif declares:
            self._publish({}, effects, now)
        if self._due == self.now_at or self.merging.holding(now):
            return
        is_called = called is not None and called.epoch == self.now_at
        if self._view.me.schema and (is_called or self._progress.due(now)):
            self._due = self.now_at
            effects.append(AveragingDue(self.now_at))

    # --- what the record says -------------------------------------------------------------

    def local(
        self, event: LocalProgress, averaging: bool, effects: list[Effect], now: float
    ) -> None:
        """Take this peer's own progress, and tell it where it is worth it."""
        self._latest = event
        self._matchmaker.ready_s = event.step_s if event.step_s > 0 else -1.0
        if averaging:
            return  # these samples are the next epoch's
        fields = self._progress.local(event.samples, event.rate, event.step_s, now)
        if fields is not None:
            self._publish(fields, effects, now)

    def tell_again(self, effects: list[Effect], now: float) -> None:
        """After a new incarnation: who held this peer for dead is to know what it has done."""
        if self._view.me.incarnation != self._incarnation:
            self._incarnation = self._view.me.incarnation
            self._publish({}, effects, now)

    def _publish(self, fields: dict[str, object], effects: list[Effect], now: float) -> None:
        fields = {"epoch": self.now_at, **self.merging.fields(), **fields}
        effects += self._membership.publish(now, **fields)

    # --- time -----------------------------------------------------------------------------

    def tick(self, averaging: bool, effects: list[Effect], now: float) -> None:
        """Time has passed."""
        if self._latest is not None and past(self._progress.wakeup, now):
            self.local(self._latest, averaging, effects, now)

    def wakeup(self, averaging: bool) -> float | None:
        """When a `Tick` is due."""
        if averaging:
            return None  # what is held, and progress, are looked at when it has ended
        soonest = self.merging.held_until
        held = soonest is not None
        asks = self._latest or (self._view.me.schema and not held)  # else nobody looks at it
        if asks and self._due is None:
            soonest = sooner(soonest, self._progress.wakeup)
        return soonest
