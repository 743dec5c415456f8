"""The object that a training script holds: a normal optimizer that trains with the swarm.

One ``step()`` is: local work (the strategy's), then at most one thing that concerns the swarm:
take the result of an averaging that has ended, or begin one that is due. Never both, so that a
loop ``while optimizer.epoch < n`` sees every epoch, and peers that leave it at the same epoch
meet again in `Optimizer.finish`.
"""

from __future__ import annotations

import contextlib
import logging
from dataclasses import replace
from typing import Any, NoReturn

import torch

from moshpit.errors import ClosedError, ConfigError, LocalError, MoshpitError
from moshpit.events import EpochReport, Outcome
from moshpit.runtime import leaving
from moshpit.runtime.ambient import get_resume
from moshpit.tensors.reduce import is_finite
from moshpit.training.averager import Averager, Averaging
from moshpit.training.checkpoint import Checkpoint
from moshpit.training.exchange import Exchange
from moshpit.training.samples import BatchWatcher
from moshpit.training.scaling import unscale
from moshpit.training.standing import LOOK_S, Standing
from moshpit.training.stats import Pace, TrainingStats
from moshpit.training.strategies import Closure, Snapshot, Strategy
from moshpit.training.strategies.base import Handle
from moshpit.types import short

log = logging.getLogger("moshpit.training")

_STATE_KEY = "moshpit"
_NO_CHECKPOINT = (
    "--resume: this script makes no moshpit.Checkpoint; give one to the optimizer: "
    "moshpit.Optimizer(..., checkpoint=moshpit.Checkpoint(DIR))"
)
_FINISH_AGAIN_MAX = 3  # two heal a disagreement; guess: one more may meet a fault


class Optimizer(torch.optim.Optimizer):
    """Wraps a `torch.optim.Optimizer`, so that its steps train together with the swarm.

    It shares ``param_groups`` and ``state`` with the wrapped optimizer, so learning rate
    schedulers, gradient clipping and hooks work as usual, and so does ``torch.amp.GradScaler``:
    each peer has a scale of its own, since what is exchanged is never scaled.

    Args:
        optimizer: the optimizer that makes the steps.
        swarm: the `moshpit.Swarm` (or another `Averager`).
        strategy: what is exchanged and when, such as ``LocalSGD(samples_per_epoch=4096)``.
        batch_size: samples of one ``step()`` of this peer. If neither this nor
            ``step(samples=...)`` says it, it is the first dimension of the first tensor given
            to the model's forward passes since the last step (`BatchWatcher`).
        model: names the parameters in messages; its floating point buffers (the running
            statistics of batch normalisation) are averaged too. Without it, buffers stay each
            peer's own.
        checkpoint: saves this peer's training as it goes, and brings it, here and now, into the
            state to begin with.
        catch_up: when the swarm is ahead (this peer joined late, was paused or cut off), fetch
            its state in ``step()``, whose batch then is left out; see docs/howto/joining.md.

    Example:
        >>> import moshpit
        >>> from moshpit.identity.tickets import RunKey
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> ticket = RunKey.generate().invite().ticket(()).encode()
        >>> with moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as swarm:
        ...     strategy = moshpit.LocalSGD(samples_per_epoch=64)
        ...     optimizer = moshpit.Optimizer(inner, swarm, strategy=strategy)
        ...     while optimizer.epoch < 2:
        ...         model(torch.ones(32, 4)).square().mean().backward()
        ...         optimizer.step()
        ...         optimizer.zero_grad()
        ...     report = optimizer.finish()
        >>> str(report.outcome)
        'complete'
    """

    # Asks torch.amp.GradScaler to call step() for batches that overflowed, too: this peer still
    # has to take part, and to forget their samples.
    _step_supports_amp_scaling = True

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        swarm: Averager,
        strategy: Strategy,
        *,
        batch_size: float | None = None,
        model: torch.nn.Module | None = None,
        checkpoint: Checkpoint | None = None,
        catch_up: bool = True,
    ) -> None:
        if batch_size is not None and not 0 < batch_size < float("inf"):
            raise ConfigError(f"batch_size: {batch_size!r}; give a positive number of samples")
        self._ready = False
        self._stepped = False
        super().__init__(optimizer.param_groups, optimizer.defaults)
        self.inner = optimizer
        self._share()
        self._ready = True
        self._swarm = swarm
        self._strategy = strategy
        strategy.bind(optimizer, model)
        self._batch_size = batch_size
        self._watcher: BatchWatcher | None = None
        if batch_size is None:
            self._watcher = BatchWatcher((p.tensor for p in strategy.parameters()), model)
        self._exchange = Exchange(swarm, strategy)
        self._pending: tuple[Averaging, Snapshot] | None = None
        self._pace = Pace()
        self._standing = Standing(
            self, swarm, strategy, model=model, checkpoint=checkpoint, catch_up=catch_up
        )
        behind = self._standing.behind
        strategy.connect(
            Handle(self._begin_early, self.flush, self._expected, behind, swarm, self._note_wait)
        )
        self._epoch = 0
        self._stats = TrainingStats()
        self._last_report: EpochReport | None = None
        self._waited_s = 0.0
        self._longest_wait_s = 0.0
        self._checkpoint = checkpoint
        if checkpoint is not None:
            checkpoint.attach(self, model, short(swarm.peer_id), getattr(swarm, "states", None))
        elif get_resume() is not None:
            raise ConfigError(_NO_CHECKPOINT)
        self._standing.attach_early()

    # --- what is normal about it ------------------------------------------------------------

    def _share(self) -> None:
        """Point at the wrapped optimizer's own groups and state (loading replaces them)."""
        self.param_groups = self.inner.param_groups
        self.state = self.inner.state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters, as long as no step was made.

        Raises:
            ConfigError: the swarm already averages the present ones.
        """
        if not self._ready:
            super().add_param_group(param_group)
            return
        if self._stepped:
            raise ConfigError(
                "add_param_group after the first step: the swarm already averages this set of "
                "parameters; add all groups before training"
            )
        self.inner.add_param_group(param_group)
        self._share()
        if self._standing.attached:
            self._standing.attached = False
            self._attach()
        if self._watcher is not None:
            self._watcher.own(param_group["params"])

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients; what `GradientAveraging` has accumulated stays."""
        self.inner.zero_grad(set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """Return the wrapped optimizer's state, plus the epoch and the strategy's own."""
        if self._strategy.begins_itself:
            self.flush()
        own = {"epoch": self._epoch, "strategy": self._strategy.state_dict()}
        return {**self.inner.state_dict(), _STATE_KEY: own}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a `state_dict`, of this class or of the wrapped optimizer alone.

        ``epoch`` goes on from the saved one, unless the swarm is already further.
        """
        if self._pending is not None:
            raise LocalError("load_state_dict while an averaging is under way: call finish() first")
        state = dict(state_dict)
        own = state.pop(_STATE_KEY, None)
        if own is not None:  # first: it refuses another strategy's
            self._strategy.load_state_dict(own["strategy"])
        self.inner.load_state_dict(state)
        self._share()
        if own is not None:
            epoch = int(own["epoch"])
            self._standing.loaded(epoch)
            self._epoch = max(self._swarm.epoch, epoch)

    def __getstate__(self) -> NoReturn:
        raise LocalError(
            "a moshpit.Optimizer is tied to a live swarm and cannot be pickled or copied; "
            "save its state_dict() instead"
        )

    def __repr__(self) -> str:
        return f"moshpit.Optimizer({self._strategy.name}, epoch {self.epoch}, {self.inner!r})"

    # --- what there is to know --------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The epoch that this peer's training is in; changes in `step` and `finish` only."""
        return self._epoch if self._strategy.own_epoch is None else self._strategy.own_epoch

    @property
    def last_report(self) -> EpochReport | None:
        """The report of the last averaging that has ended."""
        return self._last_report

    @property
    def waited_s(self) -> float:
        """Seconds that training stood still for the swarm, inside `step` and `finish`: waiting,
        but also copying snapshots out and means in."""
        return self._waited_s

    @property
    def longest_wait_s(self) -> float:
        """The longest such stop."""
        return self._longest_wait_s

    @property
    def stats(self) -> TrainingStats:
        """Counts of what has happened so far."""
        return self._stats

    @property
    def caught_up(self) -> int:
        """How often this peer was behind the swarm and has fetched its state."""
        return self._standing.caught_up

    # --- training ---------------------------------------------------------------------------

    def step(self, closure: Closure | None = None, *, samples: float | None = None) -> Any:
        """Make one local step, and take part in the swarm's averaging where it is due.

        Args:
            closure: as for any optimizer.
            samples: the samples behind this step, if they differ from ``batch_size``.

        Raises:
            ConfigError: the number of samples is not known, or makes no sense.
            DriftError: the strategy needs the swarm's parameters, and this peer has others.
            Leaving: the process was asked to end, under `moshpit run`; all is in order.
        """
        leaving.looping(True, self._checkpoint)
        self._standing.between_steps(self._note_wait)
        came = self._come_in()
        self._share()
        self._stepped = True
        before = self._strategy.samples
        loss = None
        if came and closure is None:
            self._drop_batch()
        elif unscale(self, self._strategy):
            loss = self._strategy.local_step(closure, lambda: self._count(samples))
        else:
            self._skip_batch()
        started = self._swarm.clock()
        done = self._strategy.samples - before
        self._stats = replace(self._stats, samples=self._stats.samples + done)
        self._pace.stepped(done, started)
        try:
            self._take_part()
        finally:
            self._pace.resume(self._note_wait(started))
        if self._pending is None:
            self._standing.serve(self._standing.next_epoch, boundary=False)
        self._leave_if_asked()
        return loss

    def finish(self) -> EpochReport:
        """Average a last time and wait for it, so that all peers end with the same bytes.

        Holds for the peers that finish at the same epoch; one that trains on takes part in
        the averaging but moves on from it. Every peer of the run should call this once.

        Raises:
            DriftError, Leaving: as `step`.
        """
        self._standing.between_steps(self._note_wait)
        started = self._swarm.clock()
        try:
            self._come_in()
            self._attach()
            if self._pending is not None:
                self._wait()
            self._begin(waits=True)
            report = self._wait()
            for _ in range(_FINISH_AGAIN_MAX):
                if self._strategy.settled:
                    break
                self._begin(waits=True)
                report = self._wait()
            self._standing.finished()
            if self._checkpoint is not None:
                self._checkpoint.finish()
            leaving.looping(False)
            return report
        finally:
            self._pace.resume(self._note_wait(started))

    def flush(self) -> None:
        """Wait for the averaging under way and take its mean, if ``step()`` has begun one."""
        if self._pending is not None and self._strategy.filled:
            started = self._swarm.clock()
            self._wait()
            self._note_wait(started)

    def _leave_if_asked(self) -> None:
        departure = leaving.departure()
        if departure is not None and departure.asked:
            self._leave(departure)

    def _leave(self, departure: leaving.Departure) -> NoReturn:
        """Finish the averaging under way if its time suffices, tell the swarm, save, end."""
        departure.unwind()
        try:
            if self._pending is not None:
                self._pending[0].wait(departure.left_s(leaving.ROUND_SHARE))
                self._collect()
        except TimeoutError:
            log.warning("the averaging under way has not ended in time; the others go on with it")
        except MoshpitError as error:
            log.warning("the averaging under way is lost: %s", error)
        with contextlib.suppress(ClosedError):
            self._swarm.leave()
        if self._checkpoint is not None:
            self._checkpoint.save(departure.left_s())
        raise leaving.Leaving

    def close(self) -> None:
        """Stop watching the model. The swarm is closed by its owner."""
        leaving.looping(False)
        self._strategy.close()
        if self._watcher is not None:
            self._watcher.close()

    def _drop_batch(self) -> None:
        """Its gradients belong to the parameters that this peer had before it caught up."""
        if self._watcher is not None:
            self._watcher.forget()
        self.inner.zero_grad()

    def _skip_batch(self) -> None:
        if self._watcher is not None:
            self._watcher.forget()
        self._strategy.skip_batch()
        self._stats = replace(self._stats, skipped=self._stats.skipped + 1)

    def _count(self, samples: float | None) -> float:
        if samples is None:
            expected = self._expected()
            if self._watcher is not None:
                self._watcher.take()
            return expected
        if not 0 <= samples < float("inf"):
            raise ConfigError(f"step(samples={samples!r}): give a number of samples, 0 or more")
        if self._watcher is not None:
            self._watcher.forget()
        return float(samples)

    def _expected(self) -> float:
        if self._batch_size is not None:
            return float(self._batch_size)
        assert self._watcher is not None
        return float(self._watcher.seen)

    def _note_wait(self, started: float) -> float:
        now = self._swarm.clock()
        self._waited_s += now - started
        self._longest_wait_s = max(self._longest_wait_s, now - started)
        return now

    # --- averaging --------------------------------------------------------------------------

    def _attach(self) -> None:
        self._standing.attach()

    def _come_in(self) -> bool:
        """Be at the swarm's parameters, or raise; return whether they had to be fetched."""
        if self._pending is not None:
            return False
        came = False
        if self._standing.behind():
            started = self._swarm.clock()
            self._epoch = max(self._epoch, self._swarm.epoch + self._standing.offset)
            came = self._standing.catch_up(self._leave_if_asked)
            self._pace.resume(self._note_wait(started))
        self._standing.check()
        return came

    def _take_part(self) -> None:
        self._attach()
        if self._pending is not None:
            if self._pending[0].done():
                self._collect()
            elif self._strategy.begins_itself:  # whoever is done first: all count alike
                self._epoch = self._standing.next_epoch + 1 + self._standing.offset
            return
        self._epoch = self._swarm.epoch + self._standing.offset
        self._swarm.report_progress(self._strategy.samples, self._pace.rate, self._pace.step_s)
        if self._swarm.averaging_due and self._strategy.answers:
            self._begin(waits=not self._strategy.overlap)
            if not self._strategy.overlap:
                self._wait()
            while self._strategy.halfway and self._pending is None:
                self._begin(waits=True)
                self._wait()

    def _begin(self, *, waits: bool) -> None:
        self._pending = self._exchange.begin(self._pace.rate, waits=waits)
        snapshot = self._pending[1]
        if snapshot.nonfinite is not None:
            log.warning(
                "%s holds NaN or infinity: this peer gives nothing to epoch %d and takes the "
                "others' mean",
                snapshot.nonfinite,
                self._epoch,
            )
            self._stats = replace(self._stats, nonfinite=self._stats.nonfinite + 1)

    def _begin_early(self) -> None:
        """The strategy begins an averaging, in the backward pass."""
        if self._pending is None and not self._strategy.halfway:
            self._standing.check()
        self._attach()
        self._swarm.report_progress(self._strategy.samples, self._pace.rate, self._pace.step_s)
        self._begin(waits=False)

    def _wait(self) -> EpochReport:
        assert self._pending is not None
        departure = leaving.departure()
        if departure is None:
            self._pending[0].wait()
        while not self._pending[0].done():
            try:
                self._pending[0].wait(LOOK_S)
            except TimeoutError:
                if departure is not None and departure.asked:
                    self._leave(departure)
        return self._collect()

    def _collect(self) -> EpochReport:
        """Take the result of the averaging that has ended, if it is worth something."""
        assert self._pending is not None
        averaging, snapshot = self._pending
        self._pending = None
        report = averaging.report
        self._last_report = report
        stats = replace(self._stats, averagings=self._stats.averagings + 1)
        alone = all(len(r.peers) <= 1 for r in report.rounds)
        if report.stale:
            stats = replace(stats, stale=stats.stale + 1)
            log.warning("epoch %d came too late for the swarm; local values stay", report.epoch)
        elif alone:
            stats = replace(stats, alone=stats.alone + 1)
        elif report.outcome is Outcome.FAILED:
            stats = replace(stats, failed=stats.failed + 1)
            log.warning(
                "epoch %d averaged nothing; local values stay%s", report.epoch, _why(report)
            )
        elif report.outcome is Outcome.PARTIAL:
            stats = replace(stats, partial=stats.partial + 1)
            log.info("epoch %d is the mean of a part of the group%s", report.epoch, _why(report))
        whole = not report.stale and not any(r.missing for r in report.rounds if len(r.peers) > 1)
        self._standing.averaged(report.epoch, whole=whole)
        useless = alone or report.outcome is Outcome.FAILED
        used = False
        if useless or not any(mass > 0 for mass in report.rounds[-1].masses):
            self._strategy.keep_local(snapshot)
        elif not is_finite(averaging.mean):
            stats = replace(stats, overflowed=stats.overflowed + 1)
            log.warning("the mean of epoch %d holds NaN or infinity; nobody uses it", report.epoch)
            self._strategy.overflowed(snapshot)
        elif self._strategy.accepts(averaging.mean, report):
            self._strategy.adopt(snapshot, averaging.mean)
            used = True
        else:
            stats = replace(stats, carried=stats.carried + 1)
            log.info("the mean of epoch %d is not used; this work goes into the next", report.epoch)
            self._strategy.keep_local(snapshot)
        self._exchange.ended(averaging, snapshot, used=used)
        self._stats = stats
        self._epoch = max(self._swarm.epoch, report.epoch + 1) + self._standing.offset
        if self._checkpoint is not None:
            self._checkpoint.epoch_ended()
        if not report.stale and not self._strategy.halfway:
            self._standing.serve(report.epoch + 1, boundary=True)
        return report


def _why(report: EpochReport) -> str:
    """Say who was left out, for the log."""
    names = [f"{short(b.peer)} ({b.reason})" for r in report.rounds for b in r.blames]
    return f": left out {', '.join(names)}" if names else ""
