"""A swarm in one process that really averages, for trainers in threads or in turns."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moshpit.events import EpochReport, Outcome, RoundReport
from moshpit.tensors.codecs import ErrorFeedback
from moshpit.tensors.layout import ChunkPlan
from moshpit.types import GroupId, PeerId

from .coding import Meeting


class MemoryAveraging:
    """One peer's part in one epoch's averaging."""

    settled = True

    def __init__(
        self,
        vector: torch.Tensor,
        weight: float,
        waiting: threading.Event,
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
    ) -> None:
        assert 0 <= earlier <= weight
        assert not merges, "nobody is ever cut off here"
        assert feedback is None or (differences and weight > 0)
        assert hidden_s == 0.0 or not in_place
        self.vector, self.weight, self.waiting = vector, weight, waiting
        self.values = vector.clone()
        self.lacking = 0 if fill_s is None else vector.numel()
        self.filled: Callable[[], None] | None = None
        self.codec, self.differences, self.exact_head = codec, differences, exact_head
        self.feedback, self.in_place, self.hidden_s = feedback, in_place, hidden_s
        self.ended = threading.Event()
        self.mean = vector
        self.report: EpochReport

    def end(self, mean: torch.Tensor, report: EpochReport, plan: ChunkPlan) -> None:
        """Hand out the result."""
        assert torch.equal(self.vector.nan_to_num(), self.values.nan_to_num()), "was changed"
        (last,) = report.rounds
        if self.feedback is not None:
            self.feedback.commit(
                plan.slice(chunk)
                for chunk, seats in enumerate(last.ledger)
                if not seats & (1 << last.seat) or chunk in last.missing
            )
        self.mean = self.vector.copy_(mean) if self.in_place else mean.clone()
        self.report = report
        self.ended.set()

    def ready(self, start: int, stop: int) -> None:
        lacking = self.lacking - (stop - start)
        assert lacking >= 0, "some numbers came twice"
        last = lacking == 0 and stop > start
        if last:
            self.values = self.vector.clone()
        self.lacking = lacking  # from here on another thread may end it
        if last:
            self.filled()

    def means(self, start: int, stop: int) -> torch.Tensor:
        self.wait()
        return self.mean[start:stop]

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

    def clock(self) -> float:
        return time.monotonic()

    def attach(
        self, schema: bytes, numel: int, samples_per_epoch: float, *, epoch: int = 0
    ) -> None:
        changed = self.attached is None or self.attached[:2] != (schema, numel)
        assert not (changed and self.reports), "what is averaged does not change in training"
        self.swarm.epoch = max(self.swarm.epoch, epoch)
        self.attached = (schema, numel, samples_per_epoch)

    def report_progress(self, samples: float, rate: float, step_s: float) -> None:
        assert self.attached is not None
        self.reports.append((samples, rate, step_s))
        with self.swarm.lock:
            self.swarm.progress[self.index] = samples

    def begin_averaging(
        self, vector: torch.Tensor, weight: float, **how: object
    ) -> MemoryAveraging:
        assert self.attached is not None
        assert vector.dtype == torch.float32
        assert vector.shape == (self.attached[1],)
        averaging = MemoryAveraging(vector, weight, self.swarm.waiting, **how)
        return self.swarm.begin(self.index, averaging)

    def leave(self) -> None:
        self.swarm.leave(self.index)


class MemorySwarm:
    """Averages whenever all its peers have come. Faults are told beforehand.

    The vector is cut into chunks of eight numbers, so that codecs have several.

    Attributes:
        faults: {(epoch, peer index): "failed" or "stale"}.
        overflows: the epochs whose mean has an infinity in it.
        held: while True, results are kept back until `release`.
        waiting: set when somebody waits for a result.
    """

    def __init__(self, size: int, chunk_numel: int = 8) -> None:
        self.chunk_numel = chunk_numel
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

    def begin(self, index: int, averaging: MemoryAveraging) -> MemoryAveraging:
        with self.lock:
            assert index not in self.begun
            self.begun[index] = averaging
            averaging.filled = self.release_if_filled
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

    def release_if_filled(self) -> None:
        with self.lock:
            self._end_if_all_are_here()

    def _end_if_all_are_here(self) -> None:
        if self.held or not self.here or any(i not in self.begun for i in self.here):
            return
        if any(averaging.lacking for averaging in self.begun.values()):
            return
        schemas = {self.peers[i].attached[0] for i in self.begun}
        assert len(schemas) == 1, "peers of different schemas would not meet"
        seats = sorted(self.begun)
        giving = [i for i in seats if self.begun[i].weight > 0 and not self._fault(i)]
        mean = None
        if giving:
            mean = self._mean(seats, [self.begun[i] for i in giving])
            if self.epoch in self.overflows:
                mean[0] = float("inf")
        self.last, self.begun = self.begun, {}
        self.progress.clear()
        epoch, self.epoch = self.epoch, self.epoch + 1
        for index in seats:
            self._end(self.last[index], (epoch, index), seats, giving, mean)

    def _mean(self, seats: list[int], given: list[MemoryAveraging]) -> torch.Tensor:
        if len(seats) == 1:  # a round of one is none
            return given[0].values
        if all(a.codec == "float32" for a in given):  # by other means than the real rounds
            total = sum(a.values.double() * a.weight for a in given)
            return (total / sum(a.weight for a in given)).float()
        meeting = Meeting([self.begun[i] for i in seats], self.chunk_numel)
        return torch.cat([meeting.mean(chunk, given) for chunk in range(meeting.plan.chunks)])

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
        plan = ChunkPlan(averaging.values.numel(), self.chunk_numel)
        ledger = own if lost else sum(1 << seats.index(i) for i in giving)
        mass = averaging.weight if lost else sum(self.last[i].weight for i in giving)
        report = EpochReport(
            epoch=epoch,
            rounds=(
                RoundReport(
                    epoch=epoch,
                    axis=0,
                    group=GroupId(epoch.to_bytes(16)),
                    peers=tuple(self.peers[i].peer_id for i in seats),
                    seat=seats.index(index),
                    outcome=outcome,
                    ledger=(ledger,) * plan.chunks,
                    masses=(mass,) * plan.chunks,
                    missing=tuple(range(plan.chunks)) if lost else (),
                    attempts=(0,) * plan.chunks,
                ),
            ),
            seconds=0.0,
            stale=fault == "stale",
        )
        averaging.end(averaging.values if lost else mean, report, plan)


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
