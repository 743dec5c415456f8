"""The swarm in one process, with what can happen to an epoch's averaging on a real network."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch

from moshpit.events import EpochReport, Outcome, Reach, RoundReport
from moshpit.tensors.layout import ChunkPlan
from moshpit.types import GroupId

from .coding import Meeting
from .conftest import MemorySwarm

Places = frozenset[tuple[int, int]]
"""(peer, chunk)"""


@dataclass(frozen=True)
class Weather:
    """What happens in one epoch.

    Attributes:
        lost: contributions that are not in the mean; everybody's report says so.
        hidden: the same in a row of another group: only the mass behind the chunk is less.
        missing: results that this peer did not get; it keeps its own values there.
        failed: peers of which nobody gets anything, and that get nothing.
        split: two halves average by themselves, and do not know of each other.
        torn: a row of a torus, of whose peers nobody is in the column of the last chunk. They have
            their row's mean there, and the others theirs.
        unseen: the others do not know of that.
    """

    lost: Places = frozenset()
    hidden: Places = frozenset()
    missing: Places = frozenset()
    failed: frozenset[int] = frozenset()
    split: bool = False
    torn: frozenset[int] = frozenset()
    unseen: bool = False


CALM = Weather()


def storm(rng: random.Random, peers: int, chunks: int) -> Weather:
    """Return random faults, most of them at single peers and chunks."""

    def some(share: float) -> Places:
        at = [(p, c) for p in range(peers) for c in range(chunks)]
        return frozenset(place for place in at if rng.random() < share)

    kind = rng.randrange(6)
    return Weather(
        lost=some(0.1) if kind == 1 else frozenset(),
        hidden=some(0.1) if kind == 2 else frozenset(),
        missing=some(0.15) if kind in (3, 4) else frozenset(),
        failed=frozenset({rng.randrange(peers)}) if kind == 4 else frozenset(),
        split=kind == 5,
    )


@dataclass(frozen=True)
class Chunk:
    """What came of a chunk in a group: who gave it, as the group knows."""

    place: slice
    mean: torch.Tensor | None
    mass: float
    known: list[int]
    whole: bool


class FaultySwarm(MemorySwarm):
    """Averages chunk by chunk, as the weather of each epoch has it."""

    def __init__(self, size: int, chunk_numel: int) -> None:
        super().__init__(size, chunk_numel)
        self.weather: dict[int, Weather] = {}

    def _end_if_all_are_here(self) -> None:
        if not self.here or any(i not in self.begun for i in self.here):
            return
        weather = self.weather.get(self.epoch, CALM)
        self.last, self.begun = self.begun, {}
        self.progress.clear()
        epoch, self.epoch = self.epoch, self.epoch + 1
        seats = sorted(self.last)
        there = [i for i in seats if i not in weather.failed]
        half = len(there) // 2
        for group in (there[:half], there[half:]) if weather.split else (there,):
            chunks = self._chunks(group, weather)
            for index in group:
                if weather.torn:
                    column = [i for i in group if (i in weather.torn) == (index in weather.torn)]
                    chunks[-1] = self._chunks(column, weather)[-1]
                self._end_chunked(epoch, index, group, weather, chunks)
        for index in sorted(weather.failed & set(seats)):
            self._end_chunked(epoch, index, [], weather, [])

    def _chunks(self, group: list[int], weather: Weather) -> list[Chunk]:
        """Average every chunk of those who give it."""
        chunks: list[Chunk] = []
        if not group:
            return chunks
        weighs = [i for i in group if self.last[i].weight > 0]
        coded = any(self.last[i].codec != "float32" for i in group)
        meeting = Meeting([self.last[i] for i in group], self.chunk_numel)
        for chunk in range(meeting.plan.chunks):
            place = meeting.plan.slice(chunk)
            known = [i for i in weighs if (i, chunk) not in weather.lost]
            given = [self.last[i] for i in known if (i, chunk) not in weather.hidden]
            mass, mean = sum(a.weight for a in given), None
            if given and coded:
                mean = meeting.mean(chunk, given)
            elif given:
                total = sum(a.values[place].double() * a.weight for a in given)
                mean = (total / mass).float()
            chunks.append(Chunk(place, mean, mass, known, known == weighs))
        return chunks

    def _end_chunked(
        self, epoch: int, index: int, group: list[int], weather: Weather, chunks: list[Chunk]
    ) -> None:
        averaging = self.last[index]
        mean = averaging.values.clone()
        plan = ChunkPlan(mean.numel(), self.chunk_numel)
        own = 1 << (group.index(index) if group else 0)
        ledger, masses = [own] * plan.chunks, [averaging.weight] * plan.chunks
        missing, whole = set(range(plan.chunks)), bool(group)
        for at, chunk in enumerate(chunks):
            whole = whole and chunk.whole
            if chunk.mean is None or (index, at) in weather.missing:
                continue
            mean[chunk.place] = chunk.mean
            ledger[at] = sum(1 << group.index(i) for i in chunk.known)
            masses[at] = chunk.mass
            missing.remove(at)
        reach = [Reach.ALL] * plan.chunks if weather.torn else []
        if weather.torn and (index in weather.torn or not weather.unseen):
            reach[-1] = Reach.ROW if index in weather.torn else Reach.SOME
        whole = whole and all(r == Reach.ALL for r in reach)
        outcome = Outcome.COMPLETE if whole and not missing else Outcome.PARTIAL
        report = EpochReport(
            epoch=epoch,
            rounds=(
                RoundReport(
                    epoch=epoch,
                    axis=0,
                    group=GroupId(epoch.to_bytes(16)),
                    peers=tuple(self.peers[i].peer_id for i in group or [index]),
                    seat=group.index(index) if group else 0,
                    outcome=outcome if group else Outcome.FAILED,
                    ledger=tuple(ledger),
                    masses=tuple(masses),
                    missing=tuple(sorted(missing)),
                    attempts=(0,) * len(ledger),
                    reach=tuple(reach),
                ),
            ),
            seconds=0.0,
            stale=not group,
        )
        averaging.end(mean, report, plan)
