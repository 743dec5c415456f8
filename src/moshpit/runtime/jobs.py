"""An averaging on its way between the trainer and the network: vectors, and what became of them."""

from __future__ import annotations

import threading

import torch

from moshpit.errors import LocalError, MoshpitError
from moshpit.events import EpochReport
from moshpit.tensors.layout import ChunkPlan


class Averaging:
    """One epoch's averaging, begun and maybe not yet ended.

    The network thread writes it, the trainer waits for it or looks in now and then.
    """

    def __init__(self, vector: torch.Tensor, plan: ChunkPlan) -> None:
        self.plan = plan
        self.local = vector
        """The snapshot; float32, one-dimensional, not written to."""
        self.current = vector
        """The value after the rounds so far; the network thread's until `done`."""
        self._ended = threading.Event()
        self._report: EpochReport | None = None
        self._error: MoshpitError | None = None

    def done(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

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
        """Block until it has ended; raises `TimeoutError` after ``timeout_s`` seconds."""
        if not self._ended.wait(timeout_s):
            raise TimeoutError(f"the averaging did not end within {timeout_s} s")
        return self.report

    def finish(self, report: EpochReport) -> None:
        """Called by the network thread, once."""
        self._report = report
        self._ended.set()

    def fail(self, error: MoshpitError) -> None:
        """Called by the network thread if there will be no report."""
        if not self._ended.is_set():
            self._error = error
            self._ended.set()
