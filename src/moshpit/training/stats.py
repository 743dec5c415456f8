"""What a peer's training has come to, in counts, and how fast it is."""

from __future__ import annotations

from dataclasses import dataclass

RATE_MEMORY = 0.9  # guess: the rate's moving average reaches back about ten steps


@dataclass(frozen=True, slots=True)
class TrainingStats:
    """What a peer's averagings came to so far.

    Attributes:
        averagings: how many ended.
        alone: no other peer was there.
        partial: some contribution or chunk was missing from the mean.
        failed: nothing of anybody else's arrived; the local values stayed.
        overflowed: the mean held NaN or infinity, and nobody used it.
        carried: the mean was of no use to the strategy; the work goes into the next one.
        stale: the swarm had moved on; the local values stayed.
        nonfinite: this peer had NaN or infinity and gave nothing.
        skipped: batches left out because their scaled gradient overflowed (`GradScaler`).
        samples: samples in all local steps.
    """

    averagings: int = 0
    alone: int = 0
    partial: int = 0
    failed: int = 0
    overflowed: int = 0
    carried: int = 0
    stale: int = 0
    nonfinite: int = 0
    skipped: int = 0
    samples: float = 0.0


class Pace:
    """Samples per second and seconds per step of the local work, waiting not included."""

    def __init__(self) -> None:
        self._samples = 0.0
        self._seconds = 0.0
        self._steps = 0.0
        self._since: float | None = None

    def resume(self, now: float) -> None:
        self._since = now

    def stepped(self, samples: float, now: float) -> None:
        if self._since is None:  # nobody knows when the work for the first step began
            return
        self._samples = RATE_MEMORY * self._samples + samples
        self._seconds = RATE_MEMORY * self._seconds + now - self._since
        self._steps = RATE_MEMORY * self._steps + 1.0

    @property
    def rate(self) -> float:
        return self._samples / self._seconds if self._seconds > 0 else 0.0

    @property
    def step_s(self) -> float:
        return self._seconds / self._steps if self._steps > 0 else 0.0
