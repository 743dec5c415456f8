"""A swarm in one process that really averages, for trainers in threads or in turns."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moshpit.events import EpochReport, Outcome, RoundReport
from moshpit.types import GroupId, PeerId


class MemoryAveraging:
    """One peer's part in one epoch's averaging."""

    def __init__(self, vector: torch.Tensor, weight: float, waiting: threading.Event) -> None:
        self.vector, self.weight, self.waiting = vector, weight, waiting
        self.ended = threading.Event()
        self.mean = vector
        self.report: EpochReport

    def done(self) -> bool:
        return self.ended.is_set()

    def wait(self, timeout_s: float | None = 60.0) -> EpochReport:
        self.waiting.set()
        if not self.ended.wait(timeout_s):
            raise TimeoutError("the others did not come")
        return self.report


class MemoryPeer:
    """The `Averager` that one trainer holds."""

    def __init__(self, swarm: MemorySwarm, index: int) -> None:
        self.swarm, self.index = swarm, index
        self.peer_id = PeerId(bytes([index]) * 32)
        self.attached: tuple[bytes, int, float] | None = None
        self.reports: list[tuple[float, float, float]] = []

    @property
    def epoch(self) -> int:
        return self.swarm.epoch

    @property
    def averaging_due(self) -> bool:
        return self.swarm.due(self.index)

    def attach(
        self, schema: bytes, numel: int, samples_per_epoch: float, *, epoch: int = 0
    ) -> None:
        assert not self.reports, "what is averaged does not change in training"
        self.swarm.epoch = max(self.swarm.epoch, epoch)
        self.attached = (schema, numel, samples_per_epoch)

    def report_progress(self, samples: float, rate: float, step_s: float) -> None:
        assert self.attached is not None
        self.reports.append((samples, rate, step_s))
        with self.swarm.lock:
            self.swarm.progress[self.index] = samples

    def begin_averaging(self, vector: torch.Tensor, weight: float) -> MemoryAveraging:
        assert self.attached is not None
        assert vector.dtype == torch.float32
        assert vector.shape == (self.attached[1],)
        return self.swarm.begin(self.index, vector, weight)

    def leave(self) -> None:
        self.swarm.leave(self.index)


class MemorySwarm:
    """Averages whenever all its peers have come. Faults are told beforehand.

    Attributes:
        faults: {(epoch, peer index): "failed" or "stale"}.
        overflows: the epochs whose mean has an infinity in it.
        held: while True, results are kept back until `release`.
        waiting: set when somebody waits for a result.
    """

    def __init__(self, size: int) -> None:
        self.lock = threading.RLock()
        self.epoch = 0
        self.here = list(range(size))
        self.peers = [MemoryPeer(self, i) for i in range(size)]
        self.progress: dict[int, float] = {}
        self.begun: dict[int, MemoryAveraging] = {}
        self.faults: dict[tuple[int, int], str] = {}
        self.overflows: set[int] = set()
        self.held = False
        self.waiting = threading.Event()

    def due(self, index: int) -> bool:
        with self.lock:
            target = self.peers[index].attached[2]
            met = sum(self.progress.values()) >= target
            return index not in self.begun and (met or bool(self.begun))

    def begin(self, index: int, vector: torch.Tensor, weight: float) -> MemoryAveraging:
        with self.lock:
            assert index not in self.begun
            self.begun[index] = MemoryAveraging(vector, weight, self.waiting)
            self._end_if_all_are_here()
            return self.begun.get(index) or self.last[index]

    def leave(self, index: int) -> None:
        with self.lock:
            self.here.remove(index)
            self.progress.pop(index, None)
            self._end_if_all_are_here()

    def release(self) -> None:
        with self.lock:
            self.held = False
            self._end_if_all_are_here()

    def _end_if_all_are_here(self) -> None:
        if self.held or not self.here or any(i not in self.begun for i in self.here):
            return
        schemas = {self.peers[i].attached[0] for i in self.begun}
        assert len(schemas) == 1, "peers of different schemas would not meet"
        seats = sorted(self.begun)
        giving = [i for i in seats if self.begun[i].weight > 0 and not self._fault(i)]
        mass = sum(self.begun[i].weight for i in giving)
        mean = None
        if giving:
            total = sum(self.begun[i].vector.double() * self.begun[i].weight for i in giving)
            mean = (total / mass).float()
            if self.epoch in self.overflows:
                mean[0] = float("inf")
        self.last, self.begun = self.begun, {}
        self.progress.clear()
        epoch, self.epoch = self.epoch, self.epoch + 1
        for index in seats:
            self._end(self.last[index], (epoch, index), seats, giving, mean)

    def _fault(self, index: int) -> str | None:
        return self.faults.get((self.epoch, index))

    def _end(self, averaging, key, seats, giving, mean) -> None:
        epoch, index = key
        fault = self.faults.get(key)
        lost = fault is not None or mean is None
        own = 1 << seats.index(index)
        outcome = Outcome.COMPLETE
        if fault is not None:
            outcome = Outcome.FAILED
        elif any((epoch, i) in self.faults for i in seats):
            outcome = Outcome.PARTIAL
        averaging.mean = averaging.vector if lost else mean
        averaging.report = EpochReport(
            epoch=epoch,
            rounds=(
                RoundReport(
                    epoch=epoch,
                    axis=0,
                    group=GroupId(epoch.to_bytes(16)),
                    peers=tuple(self.peers[i].peer_id for i in seats),
                    seat=seats.index(index),
                    outcome=outcome,
                    ledger=(own if lost else sum(1 << seats.index(i) for i in giving),),
                    masses=(
                        averaging.weight if lost else sum(self.last[i].weight for i in giving),
                    ),
                    missing=(0,) if lost else (),
                    attempts=(0,),
                ),
            ),
            seconds=0.0,
            stale=fault == "stale",
        )
        averaging.ended.set()


def together(*calls: Callable[[], object]) -> list[object]:
    """Run every call in a thread of its own and return their results."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [f.result(timeout=100) for f in [pool.submit(c) for c in calls]]


@pytest.fixture
def memory_swarm() -> type[MemorySwarm]:
    return MemorySwarm


@pytest.fixture(name="together")
def together_fixture() -> Callable[..., list[object]]:
    return together
