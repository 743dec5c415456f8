"""The simulated training loop: steps of a certain length, samples, and values that drift.

It does what `moshpit.training` does: it tells its node how far it is, snapshots at the first
step boundary after `AveragingDue`, waits for `AveragingEnded`, and works on.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from moshpit.protocol.machine import BeginAveraging, Event, LocalProgress
from moshpit.sim.schedule import Schedule

SCHEMA = b"simvalue"


class Phase(Enum):
    """What a trainer does."""

    IDLE = auto()
    """Nothing yet, or nothing any more, or an aux peer between averagings."""
    WORKING = auto()
    DUE = auto()
    """Asked for a snapshot; finishing its step."""
    AVERAGING = auto()
    CATCHING_UP = auto()
    """Fetching the state of others."""


@dataclass(frozen=True, slots=True)
class Job:
    """What is the same for all trainers of a run."""

    chunks: int
    vector_bytes: int
    drift: float
    report_s: float
    average_only: bool
    rests: bool = False
    """Nobody trains and nobody averages: there is only a swarm."""


class Trainer:
    """One peer's training.

    Args:
        job: what is trained.
        schedule: the world's clock.
        rng: this trainer's own randomness.
        hand: gives an event to the peer's node, now.
        batch, step_s: samples of a step, and its length on an undisturbed machine; 0 samples:
            an aux peer, which only reduces.
        slowness: by how much its machine is slower at the moment.
        between: called after every step; returns whether training stops there for now.
        merging: returns what the node says of a merging of sides (`Node.merging`).

    Attributes:
        epoch: what the values are of.
    """

    __slots__ = (
        "_batch", "_between", "_due_epoch", "_hand", "_job", "_life", "_merging", "_reported",
        "_rng", "_schedule", "_slowness", "_step_s", "epoch", "phase", "samples", "values",
        "weight",
    )  # fmt: skip

    def __init__(
        self,
        job: Job,
        schedule: Schedule,
        rng: random.Random,
        hand: Callable[[Event], None],
        *,
        batch: float,
        step_s: float,
        slowness: Callable[[], float],
        between: Callable[[], bool] = lambda: False,
        merging: Callable[[], float | None] = lambda: None,
    ) -> None:
        self._job = job
        self._schedule = schedule
        self._rng = rng
        self._hand = hand
        self._batch = batch
        self._step_s = step_s
        self._slowness = slowness
        self._between = between
        self._merging = merging
        self.epoch = 0
        self._life = 0
        self._reported = -1.0
        self._due_epoch: int | None = None
        self.phase = Phase.IDLE
        self.samples = 0.0
        self.weight = 0.0
        """The mass of the latest snapshot."""
        self.values = [rng.gauss(0.0, 1.0) for _ in range(job.chunks)]

    def work(self) -> None:
        """Begin an epoch's work."""
        self.samples = 0.0
        self._life += 1
        if self._job.average_only:
            self.phase = Phase.WORKING
            pause = self._step_s * self._slowness() * self._rng.random()
            self._schedule.at(self._schedule.now + pause, self._stepped, self._life, pause)
        elif self._batch > 0.0 and not self._job.rests:
            self.phase = Phase.WORKING
            self._next_step()
        else:
            self.phase = Phase.IDLE

    def catch_up(self) -> None:
        """Stand by while the state of others is fetched."""
        self._life += 1
        self._due_epoch = None
        self.phase = Phase.CATCHING_UP

    def rest(self) -> None:
        """Begin no epoch of its own any more; come to those of others when called."""
        self._life += 1
        self.phase = Phase.IDLE

    def stop(self) -> None:
        """Do nothing any more: the process has ended or stands still."""
        self._life += 1

    def resume(self, paused_s: float) -> None:
        """Go on with the step that a pause has interrupted."""
        if self.phase in (Phase.WORKING, Phase.DUE):
            self._life += 1
            step_s = self._step_s * self._slowness()
            self._schedule.at(
                self._schedule.now + step_s * self._rng.random(),
                self._stepped, self._life, step_s + paused_s,
            )  # fmt: skip

    def due(self, epoch: int) -> None:
        """The node wants a snapshot of this epoch."""
        if self.phase is Phase.AVERAGING or self.phase is Phase.CATCHING_UP:
            return
        self._due_epoch = epoch
        if self.phase is Phase.IDLE:
            self._life += 1
            self._schedule.at(self._schedule.now, self._stepped, self._life, 0.0)
        self.phase = Phase.DUE

    def _next_step(self) -> None:
        step_s = self._step_s * self._slowness()
        self._schedule.at(self._schedule.now + step_s, self._stepped, self._life, step_s)

    def _stepped(self, life: int, step_s: float) -> None:
        if life != self._life:
            return
        self.samples += self._batch
        if self._between():
            return
        if self.phase is Phase.DUE or self._job.average_only:
            self._snapshot()
            return
        now = self._schedule.now
        self._next_step()
        if now - self._reported >= self._job.report_s:
            self._reported = now
            self._hand(LocalProgress(self.samples, self._batch / step_s, step_s))

    def _snapshot(self) -> None:
        job = self._job
        if job.drift and self._batch > 0.0:
            self.values = [v + self._rng.gauss(0.0, job.drift) for v in self.values]
        self.phase = Phase.AVERAGING
        earlier = self._merging()
        self.weight = self.samples + (earlier or 0.0)
        due, self._due_epoch = self._due_epoch, None
        self._hand(
            BeginAveraging(
                self.weight, SCHEMA, job.chunks, job.vector_bytes, due, job.average_only,
                earlier=earlier or 0.0, merges=earlier is not None,
            )
        )  # fmt: skip
