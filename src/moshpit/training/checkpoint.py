"""`Checkpoint`: saves a peer's training as it goes, and takes it up again.

When an epoch's averaging has been adopted, and a checkpoint is due, the tensors are copied at
the end of that ``step()``. At the next one, when the loop has moved its schedulers on, the rest
is taken, and a thread writes it all; training only ever waits for the copy. If the disk is
slower than that, epochs are left out; if it fails, a warning says so, what was saved before
stays, and the next epoch tries again.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeVar, final

import torch

from moshpit.errors import ConfigError, LocalError, StateError
from moshpit.protocol.reunion import Chosen
from moshpit.runtime.ambient import get_resume, get_resume_wait_s
from moshpit.runtime.states import StateSync
from moshpit.training.resuming import RESUME_WAIT_S, agree, others_hold, wait_for_others
from moshpit.training.shelf import Saved, prune, read, saved_in, sweep, try_out, write
from moshpit.training.state import Capture, Stateful, TrainingState
from moshpit.training.tree import TreeWriter

log = logging.getLogger("moshpit.training")

T = TypeVar("T", bound=Stateful)

REPEAT_S = 60.0  # guess: how soon the same failure to save is said again


@final
class Checkpoint:
    """Where and how often to save, given to `moshpit.Optimizer`.

    What is saved is enough to go on to the bit: parameters, buffers, the optimizer's and the
    strategy's state, the epoch, learning rates, random generators, and whatever is added. Each
    checkpoint is a directory with ``state.safetensors``, which anything can read
    (``safetensors.torch.load_file``), and ``manifest.json``.

    Args:
        directory: where; made if it does not exist. Several peers may share it.
        every: epochs from one checkpoint to the next.
        keep: how many epochs' checkpoints to keep. Older ones are removed when the new one is
            safely on the disk.
        resume: begin with the newest good checkpoint, of this directory (True) or of another
            one. Without it: where ``moshpit run --resume DIR`` says, if it does.
        resume_wait_s: how long to wait, when resuming, for the peers that trained when the newest
            checkpoint was saved. All who resume start from the newest epoch that all hold. Without
            it: as ``moshpit run --resume-wait`` says, or 20.
        generators: whether the states of torch's, Python's and numpy's global random generators
            are saved; they are restored where a peer finds a checkpoint of its own.

    Raises:
        ConfigError: a number that makes no sense.

    Example:
        >>> import tempfile, moshpit
        >>> from moshpit.identity.tickets import RunKey
        >>> model = torch.nn.Linear(4, 2)
        >>> inner = torch.optim.AdamW(model.parameters(), lr=3e-4)
        >>> ticket = RunKey.generate().invite().ticket(()).encode()
        >>> with (
        ...     tempfile.TemporaryDirectory() as directory,
        ...     moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as swarm,
        ... ):
        ...     checkpoint = moshpit.Checkpoint(directory, every=5, keep=3)
        ...     strategy = moshpit.LocalSGD(samples_per_epoch=64)
        ...     optimizer = moshpit.Optimizer(
        ...         inner, swarm, strategy, model=model, checkpoint=checkpoint
        ...     )
        ...     schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        ...     schedule = checkpoint.add("schedule", schedule)
        ...     while optimizer.epoch < 5:
        ...         model(torch.ones(32, 4)).square().mean().backward()
        ...         optimizer.step()
        ...         schedule.step()
        ...     report = optimizer.finish()
        ...     checkpoint.latest().name[:14]
        'epoch-00000006'
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        every: int = 1,
        keep: int = 3,
        resume: bool | str | Path | None = None,
        resume_wait_s: float | None = None,
        generators: bool = True,
    ) -> None:
        if every < 1 or keep < 1:
            raise ConfigError(f"every={every!r}, keep={keep!r}: give numbers of epochs, 1 or more")
        if resume_wait_s is None:
            resume_wait_s = get_resume_wait_s()
        if resume_wait_s is None:
            resume_wait_s = RESUME_WAIT_S
        if not 0 <= resume_wait_s < float("inf"):
            raise ConfigError(f"resume_wait_s={resume_wait_s!r}: give seconds, 0 or more")
        self.directory = Path(directory)
        self.every = every
        self.keep = keep
        self.resumed: Path | None = None
        """The checkpoint that training began with."""
        self._resume = _resume_from(resume, self.directory)
        self._resume_wait_s = resume_wait_s
        self._sync: StateSync | None = None
        self._generators = generators
        self._added: dict[str, Stateful] = {}
        self._optimizer: torch.optim.Optimizer | None = None
        self._model: torch.nn.Module | None = None
        self._owner = ""
        self._loaded: TrainingState | None = None
        self._taken: Capture | None = None
        self._writer: threading.Thread | None = None
        self._last: Saved | None = None
        self._begun_epoch = 0
        self._saved_epoch = 0
        self._failure = ""
        self._failure_at = 0.0

    # --- what users call --------------------------------------------------------------------

    def add(self, name: str, thing: T) -> T:
        """Save something else with it: a scheduler, a ``GradScaler``, whatever has
        ``state_dict`` and ``load_state_dict``. Returns it.

        What the checkpoint that training begins with has under this name is loaded at once, and
        the optimizer's learning rates with it, which a new scheduler sets to its first.

        Raises:
            ConfigError: the name is taken; or steps were made since the checkpoint was loaded.
            StateError: what it consists of cannot be saved.
        """
        if name in self._added:
            raise ConfigError(f"something was added as {name!r} already")
        TreeWriter().take(thing.state_dict(), name)  # an hour later would be too late to say so
        if self._optimizer is not None and self.resumed is not None and self._loaded is None:
            raise ConfigError(f"add {name!r} before the first step, so that it can be restored")
        self._added[name] = thing
        if self._loaded is not None and self._optimizer is not None:
            self._restore_added(self._loaded, name)
            self._loaded.restore_options(self._optimizer)
        return thing

    def save(self, timeout_s: float | None = None) -> Path | None:
        """Save now, between two steps, and wait until it is on the disk. None if it is not:
        the disk failed (a warning says how), or ``timeout_s`` seconds were not enough."""
        if self._optimizer is None:
            raise LocalError("give the checkpoint to a moshpit.Optimizer first")
        self._join(timeout_s)
        if self._writer is not None and self._writer.is_alive():
            return None
        self._take()
        before = self._last
        self.between_steps()
        self._join(timeout_s)
        return self._last.path if self._last is not None and self._last != before else None

    def latest(self) -> Path | None:
        """Return the newest checkpoint in the directory that is whole, or None."""
        for saved in saved_in(self.directory, self._owner):
            try:
                read(saved.path)
            except (StateError, OSError) as error:
                log.warning("%s cannot be used: %s", saved.path, error)
            else:
                return saved.path
        return None

    # --- what moshpit.Optimizer calls -------------------------------------------------------

    @property
    def added(self) -> Mapping[str, Stateful]:
        """What was added, by name."""
        return self._added

    def attach(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        owner: str,
        sync: StateSync | None = None,
    ) -> None:
        """Belong to an optimizer, and bring it into the state to begin with.

        Args:
            optimizer: what to save; has an attribute ``epoch``.
            model: where the parameters are.
            owner: the peer's short name.
            sync: by which the others are asked what they begin with.

        Raises:
            ConfigError: there was an optimizer already, the strategy is another one, or the
                directory cannot be read.
            StateError: there are checkpoints to resume from, and none can be used.
        """
        if self._optimizer is not None:
            raise ConfigError("this Checkpoint already belongs to an optimizer; make a new one")
        self._optimizer, self._model, self._owner = optimizer, model, owner
        self._sync = sync
        try:
            sweep(self.directory, owner)
            here = saved_in(self.directory)
            found = saved_in(self._resume, owner) if self._resume is not None else []
        except OSError as error:
            raise ConfigError(f"checkpoints cannot be read: {error}") from error
        self._try_out()
        if self._resume is not None:
            self._load(self._resume, found)
        elif here:
            log.warning(
                "%s holds checkpoints, and this run does not begin with them; to go on from the "
                "newest: moshpit run --resume %s, or Checkpoint(..., resume=True)",
                self.directory,
                self.directory,
            )

    def between_steps(self) -> None:
        """The loop has come around: what was taken at the end of the last step is complete."""
        self._loaded = None
        if self._taken is not None:
            state = self._complete(self._taken)
            self._writer = threading.Thread(
                target=self._write, args=(state,), name="moshpit-checkpoint"
            )
            self._writer.start()

    def epoch_ended(self) -> None:
        """The optimizer has begun another epoch: save, if it is time."""
        if self._epoch() - self._begun_epoch < self.every:
            return
        if self._writer is not None and self._writer.is_alive():
            log.info("the last checkpoint is still being written; epoch %d has none", self._epoch())
            return
        self._take()

    def finish(self) -> None:
        """Training is over: save its end, and wait until everything is on the disk."""
        self._join(None)
        if self._taken is not None or self._epoch() > self._saved_epoch:
            self.save()

    # --- saving -----------------------------------------------------------------------------

    def _try_out(self) -> None:
        """Say now, and not when hours of training are to be saved, that they cannot be."""
        try:
            try_out(self.directory)
        except OSError as error:
            log.warning(
                "checkpoints cannot be saved in %s: %s; give a directory that this user may "
                "write in. Training goes on, and each epoch tries again",
                self.directory,
                error.strerror or error,
            )

    def _say_unsaved(self, epoch: int, error: Exception) -> None:
        """An epoch may take a second, and a disk may be full for a day: say it now and then."""
        now = time.monotonic()
        kind = (isinstance(error, OSError) and error.strerror) or str(error)  # without the file
        again = kind == self._failure and now - self._failure_at < REPEAT_S
        if not again:
            self._failure, self._failure_at = kind, now
        log.log(
            logging.DEBUG if again else logging.WARNING,
            "epoch %d could not be saved in %s: %s; %s stays, the next epoch tries again",
            *(epoch, self.directory, error),
            self._last.path.name if self._last is not None else "what was there",
        )

    def _epoch(self) -> int:
        return int(getattr(self._optimizer, "epoch", 0))

    def _take(self) -> None:
        assert self._optimizer is not None
        epoch = self._epoch()
        if self._taken is None:
            atexit.register(self._write_last)
        self._taken = Capture(
            self._optimizer,
            self._model,
            epoch=epoch,
            generators=self._generators,
            owner=self._owner,
            company=self._sync.company if self._sync is not None else 1,
        )
        self._begun_epoch = epoch

    def _complete(self, taken: Capture) -> TrainingState:
        self._taken = None
        atexit.unregister(self._write_last)
        return taken.finish(self._added)

    def _write_last(self) -> None:
        """The script has ended without another step."""
        if self._taken is not None:
            self._write(self._complete(self._taken))

    def _write(self, state: TrainingState) -> None:
        try:
            self._last = write(self.directory, self._owner, state.image())
        except (OSError, StateError) as error:
            self._begun_epoch = self._saved_epoch
            self._say_unsaved(state.epoch, error)
            return
        self._saved_epoch, self._failure = state.epoch, ""
        log.info("saved %s", self._last.path)
        try:
            prune(self.directory, self.keep, self._last)
        except OSError as error:
            log.warning("old checkpoints could not be removed: %s", error)

    def _join(self, timeout_s: float | None) -> None:
        if self._writer is not None:
            self._writer.join(timeout_s)

    # --- resuming ---------------------------------------------------------------------------

    def _load(self, directory: Path, found: list[Saved]) -> None:
        choice: Chosen | None = None
        if self._sync is not None:
            found, choice = agree(self._sync, found, directory, self._resume_wait_s)
        epoch = self._load_newest(found)
        if self._sync is not None and choice is not None and others_hold(choice, epoch):
            wait_for_others(self._sync, choice)
            return
        if not found:
            log.warning("no checkpoint in %s to resume from: starting anew", directory)
        elif epoch is None:
            raise StateError(
                f"none of the {len(found)} checkpoints in {directory} can be used (see the "
                "warnings); to start anew, do not resume"
            )

    def _load_newest(self, found: list[Saved]) -> int | None:
        """Load the first that is good; return its epoch."""
        assert self._optimizer is not None
        for saved in found:
            try:
                state = read(saved.path)
                state.check(self._optimizer, self._model)
            except (StateError, OSError) as error:
                log.warning("%s cannot be used: %s", saved.path, error)
                continue
            mine = state.owner == self._owner
            state.restore(self._optimizer, self._model, generators=self._generators and mine)
            self._loaded, self.resumed = state, saved.path
            self._begun_epoch = self._saved_epoch = state.epoch
            for name in self._added:
                self._restore_added(state, name)
            log.info("resumed from %s, epoch %d", saved.path, state.epoch)
            return state.epoch
        return None

    def _restore_added(self, state: TrainingState, name: str) -> None:
        try:
            state.restore_added(name, self._added[name])
        except StateError as error:
            log.warning("%s: %s; it starts anew", self.resumed, error)


def _resume_from(said: bool | str | Path | None, own: Path) -> Path | None:
    if said is None:
        return get_resume()
    if isinstance(said, bool):
        return own if said else None
    return Path(said)
