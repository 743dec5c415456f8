"""An averaging on its way between the trainer and the network: vectors, and what became of them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from moshpit.errors import LocalError, MoshpitError, WaitTimeoutError
from moshpit.events import EpochReport, RoundReport
from moshpit.runtime.autocodec import AutoCodec
from moshpit.runtime.filling import Filling
from moshpit.runtime.waiting import REAL_TIME, Waiting
from moshpit.tensors.codecs import Codec, ErrorFeedback
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.store import Encoding, RoundStore
from moshpit.wire.messages import GroupFormed


class Averaging:
    """One epoch's averaging, begun and maybe not yet ended.

    The network thread writes it, the trainer waits for it or looks in now and then.

    Args:
        vector: the snapshot; float32, one-dimensional.
        plan: how it is cut.
        codec: how contributions are encoded, or what to choose from; None if there is no own
            value.
        in_place: the means take the place of the snapshot, so that no second vector is needed.
        lent: the vectors are used for something else as soon as the averaging has ended.
        feedback: what earlier averagings have lost of this peer's contributions.
        exact_head: so many numbers at the beginning must not lose anything to the codec.
        filled: the vector is not complete yet (`ready`); this is called, with the averaging,
            when the network thread has to look at what has come.
        fill_s: about how many seconds it takes until it is complete.
        earlier, merges: see `moshpit.protocol.machine.BeginAveraging`.
        waiting: how the trainer waits.
    """

    def __init__(
        self,
        vector: torch.Tensor,
        plan: ChunkPlan,
        codec: Codec | AutoCodec | None,
        *,
        in_place: bool = False,
        lent: bool = False,
        feedback: ErrorFeedback | None = None,
        exact_head: int = 0,
        filled: Callable[[Averaging], None] | None = None,
        fill_s: float = 0.0,
        earlier: float = 0.0,
        merges: bool = False,
        waiting: Waiting = REAL_TIME,
    ) -> None:
        assert filled is None or not (in_place or lent), "the trainer writes to this vector"
        self.plan = plan
        self.filling = Filling(plan, waiting) if filled is not None else None
        self._filled = filled
        self.fill_s = fill_s
        self.earlier, self.merges = earlier, merges
        self.landing: torch.Tensor | None = None
        """Where the last round's means go, once that is under way; the network thread's but for
        what `Filling.wait_for` has told to be there."""
        self.in_place = in_place
        self.lent = lent
        self.codec = codec
        self.feedback = feedback
        self.exact = -(-exact_head // plan.chunk_numel)
        self.current = vector
        """The value after the rounds so far; the network thread's until `done`."""
        self.stores: list[RoundStore] = []
        """The bytes of its rounds, in order; the network thread's."""
        self.first: RoundReport | None = None
        """Of the first round, until its losses are remembered."""
        self._ended = waiting.event()
        self._report: EpochReport | None = None
        self._error: MoshpitError | None = None

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    @property
    def settled(self) -> bool:
        """Whether nobody can ask for anything of its rounds so far any more."""
        return all(store.closed for store in self.stores)

    @property
    def stale(self) -> bool:
        """The swarm had gone on without this peer; `mean` is its own value."""
        return self.report.stale

    @property
    def report(self) -> EpochReport:
        """What really happened. Raises `LocalError` before the end."""
        if self._error is not None:
            raise self._error
        if self._report is None:
            raise LocalError("the averaging has not ended; call wait() first")
        return self._report

    @property
    def mean(self) -> torch.Tensor:
        """The averaged vector (float32, one-dimensional); the snapshot where nothing came."""
        _ = self.report
        return self.current

    def wait(self, timeout_s: float | None = None) -> EpochReport:
        """Block until it has ended; raises `WaitTimeoutError` after ``timeout_s`` seconds."""
        if not self._ended.wait(timeout_s):
            raise WaitTimeoutError(
                f"the averaging did not end within {timeout_s:g} s. It goes on: wait longer, or do "
                "not limit the wait; every round has a deadline of its own"
            )
        return self.report

    def ready(self, start: int, stop: int) -> None:
        """Say that the numbers [start, stop) of the vector are final; each of them once. From any
        thread. The averaging does not end before all are."""
        assert self.filling is not None, "this vector was complete"
        assert self._filled is not None
        if self.filling.fill(start, stop):
            self._filled(self)

    def means(self, start: int, stop: int) -> torch.Tensor:
        """Block until the numbers [start, stop) of `mean` are known, and return them."""
        assert self.filling is not None, "wait() for the end"
        self.filling.wait_for(start, stop)
        vector = self.landing if self.landing is not None and not self.done() else self.mean
        return vector[start:stop]

    def rank(self, chunk: int) -> int:
        """Return which of its chunks go first: of what becomes ready bit by bit, those in front."""
        return self.plan.place(chunk) if self.filling is not None else 0

    def encoding(self, formed: GroupFormed, seat: int) -> Encoding:
        """Return how this peer encodes in a group."""
        if self.codec is None:
            return Encoding.without_own()
        if isinstance(self.codec, AutoCodec):
            return self.codec.choose(formed, seat, 4 * self.plan.numel)
        # What further rounds average are means: dense, and no feedback keeps what they lose.
        return Encoding.uniform(self.codec.result_codec if self.stores else self.codec)

    def remember_losses(self) -> None:
        """The first round has ended, and all of it is done: keep what its codec has lost of what is
        in the means."""
        report, self.first = self.first, None
        if self.feedback is not None and report is not None:
            mine, missing = 1 << report.seat, set(report.missing)
            self.feedback.commit(
                self.plan.slice(chunk)
                for chunk, seats in enumerate(report.ledger)
                if not seats & mine or chunk in missing
            )

    def give_back(self, *, ended: bool) -> None:
        """The caller wants the vectors back: what others may still ask for is copied. In the
        network thread.

        Args:
            ended: `current` is the result, and the caller's; otherwise the averaging goes on, with
                the copies.
        """
        for store in self.stores:
            store.move_out(ended=ended)
        if not ended:
            self.current = self.stores[-1].result if self.stores else self.current.clone()

    def finish(self, report: EpochReport) -> None:
        """Called by the network thread, once."""
        self._report = report
        self._ended.set()
        if self.filling is not None:
            self.filling.end()

    def fail(self, error: MoshpitError) -> None:
        """Called by the network thread if there will be no report."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
            if self.filling is not None:
                self.filling.end()


def free_vector(last: Averaging | None, numel: int) -> torch.Tensor:
    """Return a float32 vector: that of an averaging of before, if it fits and nobody needs it."""
    if last is not None and last.done() and last.settled and last.current.numel() == numel:
        return last.current
    return torch.empty(numel, dtype=torch.float32)
