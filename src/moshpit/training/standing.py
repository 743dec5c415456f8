"""Where this peer's training stands in the swarm's epochs, and how it comes back when it is behind.

A peer is *behind* if the swarm has gone on without it: it joined a running job, was paused, cut
off, or did not get a mean. Then it fetches the state that the others have now
(`moshpit.runtime.states`), and takes part again. Meanwhile it listens (`Listener`), and takes
the means that it has heard; with a strategy that cannot do that (`Strategy.replays`), it tells
the others not to count on it, and if the swarm has gone on meanwhile, it begins anew.
Strategies whose peers must hold the same parameters (`Strategy.same_parameters`) cannot do
without; for the others, one epoch is no matter, and where nobody gives a state they take the
next mean, as ever.

The other side of it: when somebody asks, the end of an averaging is the moment to copy one's
own state for them (`Standing.serve`), since there all peers' are alike. Who has waited for
`PATIENCE_S` gets the state between two steps.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Final, final

import torch

from moshpit.errors import ConfigError, DriftError, StateError
from moshpit.runtime.company import NUMEL_BYTES
from moshpit.runtime.states import FetchedState, StateSync
from moshpit.tensors.image import CHUNK_BYTES_MIN
from moshpit.tensors.reduce import is_finite
from moshpit.training.averager import Averager
from moshpit.training.checkpoint import Checkpoint
from moshpit.training.copying import LateCopies
from moshpit.training.listening import LOOK_S as LISTEN_S
from moshpit.training.listening import Listener
from moshpit.training.state import MODEL, Stateful, TrainingState
from moshpit.training.strategies import Strategy
from moshpit.training.tensors import buffers_of

log = logging.getLogger("moshpit.training")

PATIENCE_S: Final = 3.0  # guess: how long an asker waits for the end of an averaging
BEHIND_MAX: Final = 1  # epochs that do no harm where parameters may differ; more are stale
TRIES_MAX: Final = 8  # guess: for swarms whose epochs are hardly longer than a transfer
PAUSE_S: Final = 0.5  # guess: times the number of tries, so all in all a quarter of a minute
SIZE_FACTOR: Final = 8  # guess: parameters, two moments, gradient sums, outer momentum, feedback
SIZE_SLACK: Final = 16 << 20
ALONE_S: Final = 3600.0  # guess: long enough for a person to start a peer from a checkpoint
LOOK_S: Final = 0.1  # guess: how soon a wait for the others sees that the process is to end


@final
class Standing:
    """This peer's place in the swarm's epochs.

    Args:
        optimizer: the `moshpit.Optimizer`.
        swarm: the swarm.
        strategy: the strategy.
        model: where parameters and buffers are.
        checkpoint: knows what else belongs to a state.
        catch_up: whether to fetch the swarm's state when behind.

    Attributes:
        attached: whether the swarm counts on this peer.
        next_epoch: the swarm's epoch that these parameters are of.
        resumed: the epoch that a loaded state is of; 0: there is none.
        offset: how far this training's own count of epochs is ahead of the swarm's.
        drift: why these parameters are not the swarm's any more; empty if they are.
        caught_up: how often a state was fetched.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        swarm: Averager,
        strategy: Strategy,
        *,
        model: torch.nn.Module | None,
        checkpoint: Checkpoint | None,
        catch_up: bool,
    ) -> None:
        self._whose = weakref.ref(optimizer)  # no circle: it goes as soon as nobody has it
        self._swarm = swarm
        self._strategy = strategy
        self._model = model
        self._checkpoint = checkpoint
        self._sync: StateSync | None = None
        if catch_up and strategy.catches_up:
            self._sync = getattr(swarm, "states", None)
        self._schema = b""
        self._attached_as = b""
        self._tries = 0
        self._giving: tuple[TrainingState, LateCopies] | None = None
        self._steady = not strategy.begins_itself  # whose parameters change in forward passes
        self.attached = False
        self.next_epoch = 0
        self.resumed = 0
        self.offset = 0
        self.drift = ""
        self.caught_up = 0

    @property
    def _optimizer(self) -> torch.optim.Optimizer:
        optimizer = self._whose()
        assert optimizer is not None, "it calls this"
        return optimizer

    # --- what the swarm is told -------------------------------------------------------------

    def attach(self) -> None:
        """Have the swarm count on this peer, unless it does already."""
        if self.attached:
            return
        schema, numel = self._strategy.layout()
        self._attached_as = self._schema or schema
        self._swarm.attach(
            self._attached_as, numel, self._strategy.samples_per_epoch, epoch=self.resumed
        )
        self.attached = True
        states = getattr(self._swarm, "states", None)
        if states is not None:
            states.merge(self._strategy.merges)
        if self._sync is not None and not self.behind():
            self._sync.able(True)

    def attach_early(self) -> None:
        """The sooner, the sooner others count on this peer. Not where it needs their parameters
        first, which are in the schema, too."""
        if self._strategy.layout_known and not (self._strategy.same_parameters and self.behind()):
            self.attach()

    def loaded(self, epoch: int) -> None:
        """A state of an epoch was loaded."""
        if self.attached:
            self.offset = max(0, epoch - self._swarm.epoch)
        else:  # the swarm will hear of it, so that its epochs go on from there
            self.resumed = self.next_epoch = epoch

    def averaged(self, epoch: int, *, whole: bool) -> None:
        """An averaging has ended; ``whole``: all of its mean has reached this peer."""
        self._tries = 0
        if whole and self._strategy.reunites:
            self.drift = ""
        if not whole:
            self.drift = f"the averaging of epoch {epoch} did not reach this peer in full"
        self.next_epoch = self._swarm.epoch

    def finished(self) -> None:
        """Training is over: there will be no more snapshots."""
        self._give()
        if self._sync is not None:
            self._sync.able(False)

    # --- being behind -----------------------------------------------------------------------

    @property
    def _merges(self) -> bool:
        """Whether what this peer has done by itself goes into the next averaging."""
        states = getattr(self._swarm, "states", None)
        return self._strategy.merges and states is not None and states.merging is not None

    def check(self) -> None:
        """Stop before this peer's gradients, taken at other parameters, harm the others.

        Raises:
            DriftError: says why they are others.
        """
        if not self._strategy.same_parameters or self._merges:
            return
        if self._swarm.epoch > self.next_epoch:
            self.drift = (
                f"the swarm is at epoch {self._swarm.epoch}, and this peer has no part in what "
                f"came since epoch {self.next_epoch} (it joined late, or was away)"
            )
        if self.drift:
            raise DriftError(
                f"{self.drift}: its parameters are not the swarm's any more, which "
                f"{self._strategy.name} needs. Start all peers again from one checkpoint, or use "
                "LocalSGD, which brings peers back together at every averaging"
            )

    def behind(self) -> bool:
        """Return whether the swarm has gone on so far that its state should be fetched."""
        if self._sync is None:
            return False
        newest = self._swarm.epoch
        if self._merges:
            return False
        if not self.attached:
            newest, _ = self._sync.newest(self._numel())
        missed = newest - self.next_epoch
        if self._strategy.same_parameters:
            return missed > 0 or bool(self.drift)
        return missed > BEHIND_MAX

    def catch_up(self, leave_if_asked: Callable[[], None]) -> bool:
        """Fetch the swarm's state and go on from there; return whether it was to be had.

        Args:
            leave_if_asked: called now and then, as this may last.
        """
        assert self._sync is not None, "who is behind can catch up"
        # Who goes on alone is still of this run, which others may come back to: its schema is not
        # to be made anew, of the parameters of now.
        sync, own = self._sync, self._schema or (self._attached_as if self.attached else b"")
        listener, since = self._listen(sync), self.next_epoch
        while self._tries < TRIES_MAX:
            self._tries += 1
            if listener is None:
                self._step_back(sync)
            fetched = self._fetch(sync, leave_if_asked, listener)
            if fetched is None:
                if not self._strategy.same_parameters:
                    break
                self._step_back(sync)  # so that others who need a state do not ask here
                if sync.newest(self._numel())[0] >= 0:
                    self._pause(self._tries * PAUSE_S, leave_if_asked)
                elif self._wait_alone(sync, leave_if_asked):
                    self._tries = 0
                else:
                    break
                self._schema = b""  # who comes from a checkpoint averages under another one
                listener = self._listen(sync)
                continue
            if listener is not None:
                listener.settle(leave_if_asked)
            if not self._restore(fetched):
                break
            if listener is not None:
                if not listener.replay(self.next_epoch):
                    continue
                self.next_epoch = max(self.next_epoch, self._swarm.epoch)
                sync.confirm(self.next_epoch)
                sync.able(True)
            self.attach()
            if not self.behind():
                log.info("caught up with the swarm at epoch %d", self.next_epoch)
                if since > 0:
                    log.info(
                        "what this peer did without the others, up to its epoch %d, is dropped",
                        since,
                    )
                return True
        self._step_back(sync)
        self._schema = own
        if not self._strategy.same_parameters:  # which the next mean brings back
            self.next_epoch = max(self.next_epoch, sync.newest(self._numel())[0])
        return False

    def _listen(self, sync: StateSync) -> Listener | None:
        """Take part without a say from now on, where the strategy can make use of that."""
        if not self._strategy.replays:
            return None
        epoch, schema = sync.newest(self._numel(), self._wire_schema)
        if epoch < 0:
            return None
        self._schema = schema[:-NUMEL_BYTES]
        self._strategy.taken_over()
        self.attach()
        sync.able(False)
        return Listener(self._swarm, self._strategy)

    def _step_back(self, sync: StateSync) -> None:
        """Have nobody count on this peer."""
        if self.attached:
            sync.able(False)
            sync.detach()
            self.attached = False

    def _fetch(
        self, sync: StateSync, leave_if_asked: Callable[[], None], listener: Listener | None
    ) -> FetchedState | None:
        numel = self._numel()
        newest, _ = sync.newest(numel, self._wire_schema)
        if newest < 0:
            log.warning("the swarm is ahead, and nobody is there who could give its state")
            return None
        log.info("the swarm is at epoch %d, this peer at %d: fetching", newest, self.next_epoch)
        fetching = sync.fetch(
            epoch_min=max(newest, self.next_epoch),
            size_max=self._size_max(),
            numel=numel,
            schema=self._wire_schema,
        )
        try:
            while not fetching.wait(LOOK_S if listener is None else LISTEN_S):
                leave_if_asked()
                if listener is not None:
                    listener.look()
        except BaseException:
            sync.stop(fetching)
            raise
        if fetching.state is None:
            log.warning("the swarm's state could not be had: %s", fetching.reason)
        return fetching.state

    def _wait_alone(self, sync: StateSync, leave_if_asked: Callable[[], None]) -> bool:
        """All who had the swarm's state are gone. Who has a state of this run goes on with that,
        now the newest there is; who has none waits for somebody who does: return whether one has
        come."""
        newest = self._swarm.epoch
        if self.next_epoch > 0:
            log.warning(
                "nobody else is left who has epoch %d: going on from this peer's own state, of "
                "epoch %d",
                newest,
                self.next_epoch,
            )
            self.next_epoch, self.drift = newest, ""
            return False
        log.warning(
            "all who had the state of epoch %d are gone: waiting for somebody who has it, up to "
            "%g s; `moshpit run --resume DIR` starts a peer from a checkpoint",
            newest,
            ALONE_S,
        )
        end = self._swarm.clock() + ALONE_S
        while self._swarm.clock() < end:
            leave_if_asked()
            if sync.newest(self._numel())[0] >= 0:
                return True
            sync.pause(LOOK_S)
        return False

    def _pause(self, seconds: float, leave_if_asked: Callable[[], None]) -> None:
        """All who could give a state have no time, or are catching up themselves: let them."""
        sync = self._sync
        assert sync is not None, "who is behind can catch up"
        end = self._swarm.clock() + seconds
        while self._swarm.clock() < end:
            leave_if_asked()
            sync.pause(LISTEN_S)

    def _restore(self, fetched: FetchedState) -> bool:
        try:
            state = TrainingState.assembled(fetched.assembler)
            bad = _nonfinite(state)
            if bad:
                raise StateError(f"{bad} holds NaN or infinity")
            added = self._added()
            here = {name: added[name] for name in state.names_added() if name in added}
            state.restore(self._optimizer, self._model, added=here)
        except (StateError, ConfigError) as error:
            log.warning("the swarm's state cannot be used: %s", error)
            return False
        self._strategy.taken_over()
        self.offset = max(0, self.resumed - state.epoch)
        self.resumed = self.next_epoch = state.epoch
        self._schema = fetched.schema[:-NUMEL_BYTES]
        self.drift = ""
        self.caught_up += 1
        return True

    # --- giving -----------------------------------------------------------------------------

    def between_steps(self, waited: Callable[[float], object]) -> None:
        """The loop has come around: what was begun at the end of the last step must be complete.

        Args:
            waited: notes that training has stood still since a time of the swarm's clock.
        """
        if self._checkpoint is not None:
            self._checkpoint.between_steps()
        if self._giving is not None:
            started = self._swarm.clock()
            self._give()
            waited(started)

    def _give(self) -> None:
        """Hand out the snapshot that was begun, unless it turns out to be torn."""
        if self._giving is None or self._sync is None:
            return
        (state, copies), self._giving = self._giving, None
        if not copies.finish():
            self._steady = False
            log.info("parameters change between two steps: snapshots are taken at once from now on")
            return
        size = max(CHUNK_BYTES_MIN, self._sync.piece_bytes)
        self._sync.give(functools.partial(state.image, size))

    def serve(self, epoch: int, *, boundary: bool) -> None:
        """Copy this peer's state for those that wait for it, if this is the moment. What is large
        is copied while the loop computes the next gradient (`between_steps`).

        Args:
            epoch: the swarm's epoch that the state is of.
            boundary: an averaging has just been adopted.
        """
        sync = self._sync
        waited_s = sync.wanted_s if sync is not None else 0.0
        if sync is None or not waited_s or not (boundary or waited_s > PATIENCE_S):
            return
        if self._giving is not None:
            return
        if epoch != self._swarm.epoch or (self._strategy.same_parameters and self.drift):
            return
        copies = LateCopies()
        try:
            state = TrainingState.capture(
                self._optimizer,
                self._model,
                epoch=epoch,
                added=self._added(),
                generators=False,
                copies=copies,
            )
        except StateError as error:
            log.warning("this peer's state cannot be given to others: %s", error)
            sync.able(False)
            return
        self._giving = state, copies
        copies.start()
        if not self._steady:
            self._give()

    def _added(self) -> Mapping[str, Stateful]:
        return self._checkpoint.added if self._checkpoint is not None else {}

    # --- sizes ------------------------------------------------------------------------------

    @property
    def _wire_schema(self) -> bytes:
        """What peers that train the same have in their records, where that is known for sure."""
        if not self._schema:
            return b""
        return self._schema + (self._numel() or 0).to_bytes(NUMEL_BYTES, "little")

    def _numel(self) -> int | None:
        return self._strategy.layout()[1] if self._strategy.layout_known else None

    def _size_max(self) -> int:
        named = [*self._strategy.parameters(), *buffers_of(self._model)]
        own = sum(n.tensor.numel() * max(4, n.tensor.element_size()) for n in named)
        return SIZE_FACTOR * own + SIZE_SLACK


def _nonfinite(state: TrainingState) -> str:
    """Return the name of a parameter or buffer that holds NaN or infinity."""
    for name, tensor in state.tensors.items():
        if name.startswith(f"{MODEL}.") and tensor.is_floating_point():
            flat = tensor.reshape(-1)
            if not (is_finite(flat) if flat.dtype == torch.float32 else flat.isfinite().all()):
                return name
    return ""
