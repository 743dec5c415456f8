"""What a peer does between two averagings, and what it exchanges in them.

A strategy is told about every local step, hands out a snapshot when the swarm averages, and
takes what comes back. When to begin, whether to wait, and what to do about a stale or failed
averaging is decided once, for all strategies, in `moshpit.training.optimizer`.

Every strategy keeps these promises (they are the conformance suite, tests/training):
alone it is the wrapped optimizer; with others and no faults all peers end `finish` with the
same bytes; an averaging that brings nothing leaves this peer's own values standing; a peer
with non-finite values gives nothing and takes the mean.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from moshpit.errors import ConfigError
from moshpit.events import EpochReport
from moshpit.tensors.codecs import ErrorFeedback, codec_named
from moshpit.tensors.layout import VectorLayout
from moshpit.tensors.reduce import is_finite
from moshpit.training.averager import Averager, Averaging
from moshpit.training.strategies.merging import ParameterMerge
from moshpit.training.tensors import (
    Named,
    buffers_of,
    first_nonfinite,
    parameters_of,
)

Closure = Callable[[], Any]
AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What this peer brings to one averaging, and how.

    Attributes:
        vector: (numel,) float32 on the CPU.
        weight: its mass.
        nonfinite: the first tensor that holds NaN or infinity; then the weight is 0.
        codec: how it is written on the wire, but for ``exact_head`` numbers at the beginning.
        feedback: what the codec has lost of earlier ones.
        differences: gradients or differences of parameters.
        exact_head: so many numbers at the beginning are written exactly.
        fill_s: the vector is not complete yet; the strategy says when it is (`Averaging.ready`), in
            about so many seconds. None: it is complete.
    """

    vector: torch.Tensor
    weight: float
    nonfinite: str | None = None
    codec: str = "float32"
    feedback: ErrorFeedback | None = None
    differences: bool = False
    exact_head: int = 0
    fill_s: float | None = None

    def was_replaced_by(self, mean: torch.Tensor) -> bool:
        """Return whether the mean has taken the place of this peer's own values."""
        return mean.data_ptr() == self.vector.data_ptr()


@dataclass(frozen=True, slots=True)
class Handle:
    """What a strategy that begins its averagings itself asks of the optimizer.

    Attributes:
        begin: takes a snapshot and begins its averaging.
        flush: waits for the averaging under way, if it is complete, and takes its mean.
        expected: returns the samples that the next ``step()`` will count.
        behind: returns whether this peer's parameters are not the swarm's any more.
        swarm: with whom it trains; has the clock.
        waited: notes that training has stood still since a time of that clock.
    """

    begin: Callable[[], None]
    flush: Callable[[], None]
    expected: Callable[[], float]
    behind: Callable[[], bool]
    swarm: Averager
    waited: Callable[[float], object]


class Strategy(ABC):
    """The contract between the wrapping optimizer and a way to train together.

    Attributes:
        samples_per_epoch: the samples of all peers together after which they average.
        overlap: whether training goes on while an averaging is under way.
        same_parameters: whether all peers must hold the same parameters all the time.
        begins_itself: whether it begins averagings in the backward pass, by its `Handle`.
        codec: how this peer's numbers are written on the wire, or ``"auto"``.
    """

    name: str = ""
    same_parameters: bool = False
    begins_itself: bool = False

    @property
    def replays(self) -> bool:
        """Whether a mean that this peer gave nothing to can be taken later, after a state of its
        epoch was loaded, with the outcome that it had at the others."""
        return False

    def __init__(self, samples_per_epoch: float, *, overlap: bool, codec: str = "float32") -> None:
        if not 0 < samples_per_epoch < float("inf"):
            raise ConfigError(
                f"samples per epoch: {samples_per_epoch!r}; give a positive number, the samples "
                "of all peers together between two averagings"
            )
        if codec != AUTO:
            codec_named(codec)
        self.samples_per_epoch = float(samples_per_epoch)
        self.overlap = overlap
        self.codec = codec
        self.samples: float = 0.0
        """Samples of this peer since its last snapshot."""
        self._past = 0.0  # and before, where the next snapshot counts them again
        self.skipped_batches = 0
        """Batches that were left out because their gradient was not finite."""
        self._layouts = Layouts()
        self._feedback: ErrorFeedback | None = None
        self._spare: torch.Tensor | None = None
        self._inner: torch.optim.Optimizer | None = None
        self._model: torch.nn.Module | None = None

    def bind(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        """Take the optimizer to drive; once, since a strategy holds that optimizer's state."""
        if self._inner is not None:
            raise ConfigError("this strategy already belongs to an optimizer; make a new one")
        self._inner, self._model = optimizer, model

    def connect(self, handle: Handle) -> None:  # noqa: B027 - only who begins itself needs it
        """Take what `begins_itself` needs, and who sends vectors to single peers."""

    def close(self) -> None:  # noqa: B027 - only who watches a model has something to end
        """Watch the model no more."""

    def begun(self, averaging: Averaging) -> None:  # noqa: B027 - only who fills it needs it
        """The averaging of the last snapshot has begun."""

    @property
    def answers(self) -> bool:
        """Whether an averaging is begun in ``step()`` when the swarm is due."""
        return not self.begins_itself

    @property
    def catches_up(self) -> bool:
        """Whether who is behind can go on from another peer's state."""
        return True

    @property
    def own_epoch(self) -> int | None:
        """The epoch, where it is not the swarm's."""
        return None

    @property
    def filled(self) -> bool:
        """Whether the last snapshot is complete, so that its averaging can end."""
        return True

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer."""
        assert self._inner is not None, "bind() comes first"
        return self._inner

    def parameters(self) -> list[Named]:
        """The parameters that are trained."""
        return parameters_of(self.inner, self._model)

    @property
    def layout_known(self) -> bool:
        """Whether `layout` can be asked for already, before the first step."""
        return True

    def layout(self) -> tuple[bytes, int]:
        """Return the schema (8 bytes) and length of the vectors that are exchanged. Peers of
        different strategies or models have different schemas, so they never meet."""
        layout = self._layouts.of(self._in_order(self.parameters()))
        schema = hashlib.blake2b(self.name.encode() + layout.schema, digest_size=8)
        return schema.digest(), layout.numel

    @abstractmethod
    def local_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        """Do the work of one ``step()``; ``samples()`` tells its size, after the closure."""

    @abstractmethod
    def snapshot(self) -> Snapshot:
        """Copy out what to average; local work from here on belongs to the next epoch."""

    def accepts(self, mean: torch.Tensor, report: EpochReport) -> bool:
        """Return whether the mean may be adopted; if not, `keep_local` is called. Asked once
        for each averaging that brought something of others."""
        return True

    @abstractmethod
    def adopt(self, snapshot: Snapshot, mean: torch.Tensor) -> None:
        """Take the mean that came for ``snapshot``."""

    @abstractmethod
    def keep_local(self, snapshot: Snapshot) -> None:
        """Go on without the others: this epoch's averaging brought nothing usable."""

    def overflowed(self, snapshot: Snapshot) -> None:
        """Go on after an averaging whose mean holds NaN or infinity, which all peers see."""
        self.keep_local(snapshot)

    def reuse(self, vector: torch.Tensor) -> None:
        """Take memory for the next snapshot; new memory is slow."""
        self._spare = vector

    def skip_batch(self) -> None:
        """Leave out a batch whose gradient is not finite, as `torch.amp.GradScaler` found."""
        self.skipped_batches += 1

    @property
    def merges(self) -> bool:
        """Whether peers that were cut off, and went on by themselves, can become one swarm again
        by `merge`. If not, those who are behind drop what they have, and fetch a state."""
        return False

    def merge(self, past: float) -> None:
        """Make the next snapshot one for sides of the swarm that become one: of what all
        averagings since they have parted have made.

        Args:
            past: the samples of this peer in them, which count in the snapshot's weight.
        """
        self._past = past

    @property
    def fresh(self) -> float:
        """The samples that the next snapshot gives for the first time."""
        return self.samples

    @property
    def reunites(self) -> bool:
        """Whether parameters that have parted are averaged now, so that they are everybody's again
        where all of the mean arrives."""
        return False

    @property
    def settled(self) -> bool:
        """Whether the last averaging was the last word; if not, `Optimizer.finish` makes
        another one."""
        return True

    @property
    def halfway(self) -> bool:
        """Whether what the last averaging has brought is worth something only with another one,
        which is to follow at once."""
        return False

    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed run needs beyond the wrapped optimizer's state."""
        feedback = None if self._feedback is None else self._feedback.state_dict()
        return {"name": self.name, "samples": self.samples, "feedback": feedback}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore `state_dict`; raises `ConfigError` for another strategy's."""
        if state["name"] != self.name:
            raise ConfigError(
                f"this state was saved by {state['name']}, and {self.name} cannot load it"
            )
        self.samples = float(state["samples"])
        saved = state.get("feedback")  # None with a codec that needs none
        self._feedback = None  # what another training has lost is not for this one
        if saved is not None and self._needs_feedback:
            self._feedback = ErrorFeedback(saved["residual"].numel())
            self._feedback.load_state_dict(saved)

    def taken_over(self) -> None:
        """The state that was loaded is another peer's: forget what only that one has done."""
        self.samples = 0.0
        self._feedback = None

    def _inner_step(self, closure: Closure | None, samples: Callable[[], float]) -> Any:
        """Let the wrapped optimizer make a step, and count its samples."""
        if closure is None:
            count = samples()  # first: an unknown size must not leave a step half made
            loss = self.inner.step()
        else:
            loss = self.inner.step(closure)
            count = samples()
        self.samples += count
        return loss

    def _head(self) -> list[Named]:
        """What is averaged in front of all else, so that it lies in the first chunk."""
        return []

    def _extras(self) -> list[Named]:
        """What is averaged beside the parameters or gradients."""
        return buffers_of(self._model)

    def _in_order(self, main: Sequence[Named]) -> list[Named]:
        """Return what makes the vector. Only ``main``, at the end, is for codecs: extras such as a
        running variance are neither differences nor of one size."""
        return [*self._head(), *self._extras(), *main]

    def _before_main(self) -> int:
        """Return how many numbers come before the main part."""
        return sum(t.tensor.numel() for t in (*self._head(), *self._extras()))

    def _collect_parted(self, merge: ParameterMerge) -> Snapshot:
        """Return parameters that have parted, or what the optimizer keeps of them."""
        taken = self._collect(merge.tensors(self.inner, self.parameters()))
        if taken.nonfinite is None:
            taken = replace(taken, weight=merge.weigh(taken.weight))
        return replace(taken, codec="float32")

    def _write_parted(self, merge: ParameterMerge, mean: torch.Tensor) -> None:
        """Put their mean, and that of the head and the extras, into its place."""
        main = merge.tensors(self.inner, self.parameters())
        self._layouts.of(self._in_order(main)).write_back(mean)

    def _collect(self, main: list[Named]) -> Snapshot:
        """Copy the head, the extras and ``main`` into a vector, and look for non-finite values.

        Not the vector of before, but where the optimizer says so (`reuse`): groupmates may still
        ask for that after its averaging.
        """
        tensors = self._in_order(main)
        layout = self._layouts.of(tensors)
        vector, self._spare = self._spare, None
        if vector is None or vector.numel() != layout.numel:
            vector = torch.empty(layout.numel, dtype=torch.float32)
        layout.flatten_into(vector)
        weight, self.samples, self._past = self.samples + self._past, 0.0, 0.0
        exact = layout.numel - sum(t.tensor.numel() for t in main)
        if is_finite(vector):
            return Snapshot(vector, weight, codec=self.codec, exact_head=exact)
        bad = first_nonfinite(tensors) or "a value beyond float32"
        return Snapshot(vector, 0.0, bad, codec=self.codec, exact_head=exact)

    @property
    def _needs_feedback(self) -> bool:
        return self.codec == AUTO or codec_named(self.codec).biased

    def _as_differences(self, snapshot: Snapshot) -> Snapshot:
        """Return the same as gradients or differences, with what earlier ones have lost."""
        feedback, numel = self._feedback, snapshot.vector.numel()
        if not self._needs_feedback or snapshot.weight == 0:
            return replace(snapshot, differences=True)
        if feedback is None or feedback.residual.numel() != numel:
            feedback = self._feedback = ErrorFeedback(numel)
        feedback.weigh(snapshot.weight)
        return replace(snapshot, differences=True, feedback=feedback)


@torch.no_grad()
def keep_positive(extras: list[Named], at: int, snapshot: torch.Tensor) -> None:
    """Clear what a difference made negative in tensors that had nothing negative: a second
    moment or a variance that has decayed since the snapshot may be moved below zero.

    Args:
        extras: the tensors, as they come in the snapshot.
        at: where they begin there.
        snapshot: the vector.
    """
    for named in extras:
        stop = at + named.tensor.numel()
        if bool((snapshot[at:stop] >= 0).all().item()):
            named.tensor.clamp_(min=0)
        at = stop


class Layouts:
    """Makes layouts, and keeps the last one as long as the tensors are the very same. (Loading
    a state replaces the optimizer's tensors.)"""

    def __init__(self) -> None:
        self._tensors: list[Named] = []
        self._layout: VectorLayout | None = None

    def of(self, tensors: list[Named]) -> VectorLayout:
        same = len(tensors) == len(self._tensors) and all(
            a.tensor is b.tensor for a, b in zip(tensors, self._tensors, strict=True)
        )
        if self._layout is None or not same:
            self._tensors = tensors
            self._layout = VectorLayout([(t.name, t.tensor) for t in tensors])
        return self._layout
