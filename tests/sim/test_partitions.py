"""Sides of a simulated swarm that were cut off from each other merge, and by the right weights.

What should come out is computed here from what the trainers did, without lineages: the last epoch
that all have ended with the same values, and the first one after the cut, tell what to count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import pytest

from moshpit.protocol.machine import AveragingEnded, BeginAveraging, Emit
from moshpit.sim.scenario import Checks, Fault, Scenario, Swarm, Work
from moshpit.sim.world import World

EPOCH_S = 4.0


@dataclass
class Diary:
    """What one trainer has given, and what came of it.

    Attributes:
        given: (when, samples, values), of each snapshot.
        ended: by epoch, (when, values).
    """

    given: list[tuple[float, float, tuple[float, ...]]] = field(default_factory=list)
    ended: dict[int, tuple[float, tuple[float, ...]]] = field(default_factory=dict)

    def samples_in(self, after: float, until: float) -> float:
        return math.fsum(samples for when, samples, _ in self.given if after < when < until)

    def values_before(self, until: float) -> tuple[float, ...]:
        return max(entry for entry in self.given if entry[0] < until)[2]


class Watched(World):
    """A world that keeps diaries."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.diaries: dict[str, Diary] = {}
        self.declared: list[float] = []
        super().__init__(scenario, seed)

    def _diary(self, name: str) -> Diary:
        return self.diaries.setdefault(name, Diary())

    def _handle(self, process, event, payload) -> None:
        if type(event) is BeginAveraging:
            entry = (self.schedule.now, process.trainer.samples, tuple(process.trainer.values))
            self._diary(process.name).given.append(entry)
        super()._handle(process, event, payload)

    def _averaging_ended(self, process, effect: AveragingEnded) -> None:
        if not effect.report.stale:
            entry = (self.schedule.now, tuple(process.store.vector))
            self._diary(process.name).ended[effect.report.epoch] = entry
        super()._averaging_ended(process, effect)

    def _ignore(self, process, effect) -> None:
        if type(effect) is Emit and effect.notice.code == "merging":
            self.declared.append(self.schedule.now)

    def common_epochs(self) -> list[int]:
        """Epochs after which all peers held the same values."""
        first, *others = self.diaries.values()
        return [
            e for e, (_, v) in sorted(first.ended.items()) if all(_same(d, e, v) for d in others)
        ]


def _same(diary: Diary, epoch: int, values: tuple[float, ...]) -> bool:
    if epoch not in diary.ended:
        return False
    theirs = diary.ended[epoch][1]
    return all(math.isclose(a, b, abs_tol=1e-9) for a, b in zip(theirs, values, strict=True))


def cut(rng: Random) -> Scenario:
    """A cut in the middle of some epoch's work, for several epochs' time."""
    peers = rng.randint(2, 12)
    away = rng.randint(1, peers // 2)
    lasts = rng.uniform(14.0, 50.0)
    fault = Fault(
        kind="partition",
        at_epoch=rng.randint(1, 3),
        after_s=(0.5, 1.5),
        for_s=(lasts, lasts),
        hosts=tuple(range(peers - away, peers)),
    )
    epochs = 12 + int(lasts / EPOCH_S)
    return _scenario(peers, rng.choice((3, 4, 8, 16)), epochs, (fault,))


def _scenario(peers: int, group: int, epochs: int, faults: tuple[Fault, ...]) -> Scenario:
    return Scenario(
        title="partitions",
        swarm=Swarm(peers=peers, group_size=group, epochs=epochs, start="warm"),
        work=Work(epoch_s=EPOCH_S, chunks=2),
        faults=faults,
        checks=Checks(heal_epochs=4, time_limit_s=1500.0),
    )


def check(world: Watched) -> None:
    flaws = {v.name: v.first for v in world.checkers.verdicts.values() if not v.ok}
    assert flaws == {}


def judge_merged_mean(world: Watched) -> None:
    common = world.common_epochs()
    gaps = [(a, b) for a, b in pairwise(common) if b > a + 1]
    assert len(gaps) <= 1, common
    for before, merged in gaps:
        alone = [sum(before < e < merged for e in d.ended) for d in world.diaries.values()]
        if min(alone) < 2:
            continue  # its only mean may be one that the cut has interrupted: it is behind
        assert merged <= world.faults.healed_epoch + 2, "it merges soon"
        seen, values = [], []
        for diary in world.diaries.values():
            until = diary.ended[merged][0]
            seen.append(diary.samples_in(diary.ended[before][0], until))
            values.append(diary.values_before(until))
        for chunk, got in enumerate(next(iter(world.diaries.values())).ended[merged][1]):
            parts = [n * v[chunk] for n, v in zip(seen, values, strict=True)]
            assert got == pytest.approx(math.fsum(parts) / math.fsum(seen), abs=1e-9)


def run_cut(seed: int) -> None:
    world = Watched(cut(Random(seed)), seed)
    world.run()
    check(world)
    judge_merged_mean(world)


@pytest.mark.parametrize("seed", range(5))
def test_merged_values_are_the_mean_weighted_by_what_each_side_did(seed: int) -> None:
    run_cut(seed)


def run_storm(seed: int) -> None:
    """Cuts of some here and some there, short and long, at any moment, one in another."""
    rng = Random(seed)
    peers = rng.randint(3, 12)
    faults = tuple(
        Fault(
            kind="partition",
            at_epoch=rng.randint(0, 6),
            moment=rng.choice(("work", "round")),
            after_s=(0.0, 4.0),
            for_s=(lasts := rng.choice((1.0, 4.0, 10.0, 25.0, 50.0)), 1.5 * lasts),
            share=rng.uniform(0.1, 0.6),
        )
        for _ in range(rng.randint(1, 4))
    )
    world = Watched(_scenario(peers, rng.choice((3, 4, 8, 16)), 20, faults), seed)
    world.run()
    check(world)


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_cut_becomes_one_again(seed: int) -> None:
    run_storm(seed)


@pytest.mark.soak
@pytest.mark.parametrize("hundred", range(3))
def test_so_it_does_after_hundreds_of_storms(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        run_storm(seed)


@pytest.mark.soak
@pytest.mark.parametrize("hundred", range(3))
def test_so_they_are_after_hundreds_of_cuts(hundred: int) -> None:
    for seed in range(100 * hundred, 100 * hundred + 100):
        run_cut(seed)
