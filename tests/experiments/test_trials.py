"""Trials, fleets, preemptions, and what repeated runs say together."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from random import Random
from statistics import fmean

import pytest
import torch

from moshpit.config import preset
from moshpit.errors import ConfigError
from moshpit.experiments import trials
from moshpit.experiments.fleets import RESNET_50, heterogeneous, homogeneous
from moshpit.experiments.preemptions import Bathtub, comings_and_goings
from moshpit.experiments.repeats import mean_of, ratio_of, run_all
from moshpit.experiments.trials import Look, Place, Setting, Task, Trial
from moshpit.training.strategies import LocalSGD


class Parabola(Task):
    """Every batch pulls the model towards 1."""

    def model(self) -> torch.nn.Module:
        model = torch.nn.Linear(20, 1, bias=False)
        torch.nn.init.zeros_(model.weight)
        return model

    def optimizer(self, model: torch.nn.Module, rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), rate)

    def loss(self, model: torch.nn.Module, rng: Random, batch: int) -> torch.Tensor:
        places = torch.tensor([[rng.gauss(1.0, 0.5)] for _ in range(batch)])
        return (model.weight - places).square().sum(1).mean()

    def score(self, model: torch.nn.Module) -> float:
        return (model.weight - 1.0).square().mean().sqrt().item()


def setting(**changes: object) -> Setting:
    base = Setting(
        places=tuple(Place(machine=machine) for machine in homogeneous(3, 1e6)),
        config=preset("lan"),
        batch=4,
        step_s=0.5,
        seed=1,
        look_s=1.0,
        limit_s=60.0,
        enough=0.15,
        rising=False,
    )
    return replace(base, **changes)


def strategy() -> LocalSGD:
    return LocalSGD(samples_per_epoch=3 * 4 * 4)


def test_a_trial_ends_when_it_is_good_enough_twice() -> None:
    trial = trials.run(Parabola(), strategy, 0.05, setting())
    scores = [look.score for look in trial.looks]
    assert scores[0] == pytest.approx(0.9, abs=0.05)  # all have made one step
    assert scores[-1] <= 0.15
    assert scores[-2] <= 0.15
    assert all(max(a, b) > 0.15 for a, b in itertools.pairwise(scores[:-1]))
    assert [look.at_s for look in trial.looks] == pytest.approx(list(range(len(scores))))
    assert trial.seconds == trial.looks[-2].at_s
    # Three peers, four samples a step, two steps a second; they do not wait for the averagings.
    assert trial.looks[-1].samples == pytest.approx(24.0 * trial.looks[-1].at_s, rel=0.15)
    assert trial.waited_share < 0.1
    assert trial.bytes_carried > 0


def test_a_trial_ends_at_its_limit() -> None:
    trial = trials.run(Parabola(), strategy, 0.05, setting(enough=0.0, limit_s=5.0))
    assert trial.seconds is None
    assert trial.looks[-1].at_s == pytest.approx(5.0)


def test_a_trial_repeats_bit_by_bit() -> None:
    machines = heterogeneous(3, 1e5)
    places = tuple(Place(machine=machine) for machine in machines)
    runs = [
        trials.run(
            Parabola(), strategy, 0.05, setting(places=places, seed=seed, limit_s=10.0)
        ).looks
        for seed in (1, 1, 2)
    ]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_peers_come_and_go_in_a_trial() -> None:
    machine = homogeneous(1, 1e6)[0]
    places = (
        Place(machine=machine),
        Place(machine=machine),
        Place(machine=machine, until_s=6.0),
        Place(machine=machine, at_s=12.0),
    )
    trial = trials.run(Parabola(), strategy, 0.01, setting(places=places, enough=0.0, limit_s=30.0))
    assert [look.peers for look in trial.looks][:3] == [3, 3, 3]
    assert 2 in [look.peers for look in trial.looks]
    assert trial.looks[-1].peers == 3
    with pytest.raises(ConfigError, match="at the beginning"):
        trials.run(Parabola(), strategy, 0.01, setting(places=places[3:]))


def test_scores_may_rise_or_fall() -> None:
    looks = tuple(
        Look(at_s=float(t), samples=0.0, epoch=t, score=score, peers=1)
        for t, score in enumerate((0.1, 0.5, 0.4, 0.9))
    )
    trial = Trial(
        looks=looks,
        enough=0.5,
        rising=True,
        gave_up=0,
        waited_share=0.0,
        bytes_carried=0,
        cpu_s=0.0,
    )
    assert trial.seconds == 1.0
    assert trial.reached(0.6) == looks[3]
    assert trial.reached(1.0) is None
    assert replace(trial, rising=False, enough=0.1).seconds == 0.0


def test_lines_are_as_much_thinner_as_the_vector_is_shorter() -> None:
    rate = RESNET_50.rate(1.0, 1000)
    assert 4 * 1000 / rate == pytest.approx(4 * RESNET_50.numbers / (1e9 / 8))
    assert RESNET_50.step_s == pytest.approx(0.711, abs=0.001)
    slowness = [machine.slowness for machine in heterogeneous(8, rate)]
    assert slowness == [1.0, 1.5, 2.0, 3.0, 1.0, 1.5, 2.0, 3.0]
    assert {machine.slowness for machine in homogeneous(3, rate)} == {1.0}


def test_lifetimes_are_drawn_from_the_bathtub() -> None:
    tub, rng = Bathtub(), Random(5)
    hours = [tub.lifetime_s(rng) / 3600.0 for _ in range(4000)]
    for limit in (0.25, 1.0, 3.0, 12.0, 23.5):
        share = fmean(hour <= limit for hour in hours)
        deviation = math.sqrt(0.25 / len(hours))
        assert share == pytest.approx(tub.ended(limit), abs=4 * deviation)
    assert max(hours) <= 24.0
    with pytest.raises(ConfigError, match="times above 0"):
        Bathtub(late_h=0.0)


def test_what_is_preempted_is_replaced_by_its_kind() -> None:
    machines = heterogeneous(4, 1e6)
    places = comings_and_goings(
        machines, Bathtub(early=1.0), replaced_s=300.0, until_s=20_000.0, rng=Random(1)
    )
    assert [place.at_s for place in places] == sorted(place.at_s for place in places)
    for machine in machines:
        own = [place for place in places if place.machine is machine]
        assert own[0].at_s == 0.0
        assert len(own) > 1
        for before, after in itertools.pairwise(own):
            assert before.until_s < after.at_s


def test_estimates() -> None:
    estimate = mean_of([4.0, 6.0, 5.0, 5.0])
    assert estimate.mean == 5.0
    assert estimate.high - 5.0 == pytest.approx(3.182 * 0.8165 / 2.0, rel=1e-3)  # by hand
    assert mean_of([3.0]).high == math.inf
    assert ratio_of([1.0, 4.0], [1.0, 1.0]).mean == pytest.approx(2.0)
    assert ratio_of([2.0], [1.0]).high == math.inf


def double(number: int) -> int:
    return 2 * number


@pytest.mark.soak  # two interpreters load torch
def test_runs_in_processes_come_in_order() -> None:
    told: list[tuple[int, int]] = []
    assert run_all(double, [3, 1, 2], 2, lambda p, r: told.append((p, r))) == [6, 2, 4]
    assert told == [(3, 6), (1, 2), (2, 4)]
