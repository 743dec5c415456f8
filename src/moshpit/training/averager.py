"""What the training layer asks of a swarm: a number of samples to tell, a vector to average.

`moshpit.Swarm` is one implementation. The strategies know nothing else of the network, so the
same code trains over anything that keeps this contract.
"""

from __future__ import annotations

from typing import Protocol

import torch

from moshpit.events import EpochReport
from moshpit.tensors.codecs import ErrorFeedback
from moshpit.types import PeerId


class Averaging(Protocol):
    """One epoch's averaging under way. It always ends (design §4, rule 5)."""

    def done(self) -> bool:
        """Return whether it has ended; cheap."""
        ...

    def wait(self, timeout_s: float | None = None) -> EpochReport:
        """Block until it has ended; raises `TimeoutError` after ``timeout_s`` seconds."""
        ...

    @property
    def mean(self) -> torch.Tensor:
        """The result once it is done: float32, one dimension. Chunks that could not be
        averaged hold this peer's own values."""
        ...

    @property
    def report(self) -> EpochReport:
        """What really happened, once it is done."""
        ...

    def ready(self, start: int, stop: int) -> None:
        """Say that the numbers [start, stop) of the vector are final, if it was not complete when
        the averaging began."""
        ...

    def means(self, start: int, stop: int) -> torch.Tensor:
        """Block until these numbers of the mean are known, if the vector was not complete when the
        averaging began; return them. As `mean`, where nothing came they are this peer's own."""
        ...

    @property
    def settled(self) -> bool:
        """Whether nobody can ask for anything of it any more, so that the memory of its vectors
        may be used again once it is done."""
        ...


class Averager(Protocol):
    """A swarm, as seen from a training loop."""

    @property
    def peer_id(self) -> PeerId:
        """Who this peer is."""
        ...

    @property
    def epoch(self) -> int:
        """The swarm's epoch."""
        ...

    @property
    def averaging_due(self) -> bool:
        """Whether the swarm has met its target, or groupmates call; a cheap read."""
        ...

    def clock(self) -> float:
        """Return the swarm's time in seconds, for what measures or waits; only differences mean
        anything."""
        ...

    def attach(
        self, schema: bytes, numel: int, samples_per_epoch: float, *, epoch: int = 0
    ) -> object:
        """Say what is averaged here, and how many samples of all peers make an epoch. Said
        again only if parameters were added before the first step. ``epoch``: what the values
        are of, if they come from a checkpoint; the swarm's epochs go on from the newest."""
        ...

    def report_progress(self, samples: float, rate: float, step_s: float) -> None:
        """Say how many samples this peer has in this epoch, its samples per second, and how
        many seconds a step takes (0: unknown). Cheap, from any thread."""
        ...

    def begin_averaging(
        self,
        vector: torch.Tensor,
        weight: float,
        *,
        codec: str = "float32",
        feedback: ErrorFeedback | None = None,
        in_place: bool = False,
        differences: bool = False,
        hidden_s: float = 0.0,
        exact_head: int = 0,
        fill_s: float | None = None,
        earlier: float = 0.0,
        merges: bool = False,
    ) -> Averaging:
        """Start this epoch's averaging of ``vector`` (float32, one dimension, CPU), which is
        not touched until it is done. ``weight`` 0 only receives.

        What this peer sends is written in ``codec``, but for ``exact_head`` numbers at the
        beginning, which lose nothing; ``feedback`` keeps what it loses. ``"auto"`` may choose
        codecs for ``differences`` only, and let the averaging take ``hidden_s`` seconds, for
        which nobody waits. ``in_place``: the mean is wanted in the memory of ``vector``.
        ``fill_s``: the vector becomes complete while it is averaged, see `Averaging.ready`, in
        about so many seconds. ``earlier``, ``merges``: see `BeginAveraging`; given only where
        work is given again, as when sides of a swarm merge."""
        ...

    def leave(self) -> None:
        """Tell the others not to count on this peer any more; what is under way is still
        served. Does not wait."""
        ...
