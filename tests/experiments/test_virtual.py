"""A virtual swarm trains as a real one does, and the same seed gives the same run."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

import moshpit
from moshpit.config import preset
from moshpit.errors import ConfigError
from moshpit.experiments.virtual import Machine, VirtualCluster, VirtualPeer
from moshpit.experiments.virtual_net import Line
from moshpit.training.strategies import Strategy

LINE = Line(1e6, 1e6)
MACHINE = Machine(LINE)
STEP_S = 0.5


class Trainee:
    """A quadratic problem: every peer draws samples around its own place."""

    def __init__(self, peer: VirtualPeer, swarm: moshpit.Swarm, strategy: Strategy) -> None:
        self.peer = peer
        self.swarm = swarm
        torch.manual_seed(0)
        self.model = torch.nn.Linear(40, 1, bias=False)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = moshpit.Optimizer(inner, swarm, strategy=strategy, batch_size=8)

    def step(self) -> None:
        numbers = [[self.peer.rng.gauss(self.peer.index, 1.0) for _ in range(40)] for _ in range(8)]
        self.optimizer.zero_grad()
        (self.model.weight - torch.tensor(numbers)).square().sum(1).mean().backward()
        self.peer.compute(STEP_S)
        self.optimizer.step()


def local_sgd() -> Strategy:
    return moshpit.LocalSGD(samples_per_epoch=4 * 8 * 5)


def gradients() -> Strategy:
    return moshpit.GradientAveraging(target_batch_size=4 * 8)


def train(
    seed: int, machines: list[Machine], make: Callable[[], Strategy], epochs: int = 4
) -> list[tuple[int, float, float, list[float]]]:
    """Train to an epoch; return per peer: number, when it ended, seconds waited, parameters."""
    ends: list[tuple[int, float, float, list[float]]] = []
    cluster = VirtualCluster(seed)

    def script(peer: VirtualPeer) -> None:
        with peer.join() as swarm:
            swarm.wait_for_peers(len(machines))
            trainee = Trainee(peer, swarm, make())
            while trainee.optimizer.epoch < epochs:
                trainee.step()
            trainee.optimizer.finish()
            values = trainee.model.weight.detach().flatten().tolist()
            ends.append((peer.index, peer.clock(), trainee.optimizer.waited_s, values))

    for machine in machines:
        cluster.add(machine, script)
    with cluster:
        assert cluster.run(1e4)
    assert threading.active_count() == 1
    return sorted(ends)


@pytest.mark.parametrize("make", [local_sgd, gradients])
def test_all_end_with_the_same_parameters_when_the_model_of_time_says(
    make: Callable[[], Strategy],
) -> None:
    ends = train(1, [MACHINE] * 4, make)
    assert len(ends) == 4
    assert all(values == ends[0][3] for *_, values in ends)
    steps = 4 * (5 if make is local_sgd else 1)
    for _, end_s, waited_s, _ in ends:
        assert steps * STEP_S < end_s < steps * STEP_S + 5.0
        assert waited_s < 3.0


def test_the_same_seed_gives_the_same_run_to_the_last_bit() -> None:
    machines = [
        Machine(replace(LINE, hiccup_s=0.1), slowness=1.0 + index / 3, noise=0.2)
        for index in range(4)
    ]
    runs = [train(seed, machines, local_sgd, 3) for seed in (1, 1, 2)]
    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_a_thin_line_is_what_averaging_waits_for() -> None:
    thin = Machine(Line(400.0, 400.0))  # 160 bytes of vector, twice, one way at a time
    waited = {
        name: max(end[2] for end in train(1, [machine] * 4, local_sgd))
        for name, machine in (("wide", MACHINE), ("thin", thin))
    }
    assert waited["thin"] > waited["wide"] + 4 * 160 / 400


@pytest.mark.parametrize("unnoticed_s", [0.0, 20.0])
def test_the_others_train_on_when_one_dies(unnoticed_s: float) -> None:
    ends: list[tuple[int, float]] = []
    cleaned: list[int] = []
    cluster = VirtualCluster(1)

    def script(peer: VirtualPeer) -> None:
        try:
            with peer.join() as swarm:
                swarm.wait_for_peers(4)
                trainee = Trainee(peer, swarm, local_sgd())
                while trainee.optimizer.epoch < 8:
                    trainee.step()
                trainee.optimizer.finish()
                ends.append((peer.index, trainee.model.weight.sum().item()))
        finally:
            cleaned.append(peer.index)

    for index in range(4):
        until_s = 6.0 if index == 2 else float("inf")
        cluster.add(MACHINE, script, until_s=until_s, unnoticed_s=unnoticed_s)
    with cluster:
        assert cluster.run(200.0)
        assert cluster.now < 60.0
    assert cleaned[0] == 2
    assert sorted(index for index, _ in ends) == [0, 1, 3]
    assert len({value for _, value in ends}) == 1


def test_a_latecomer_fetches_the_state() -> None:
    ends: dict[int, tuple[int, list[float]]] = {}
    cluster = VirtualCluster(3)

    def script(peer: VirtualPeer) -> None:
        with peer.join() as swarm:
            swarm.wait_for_peers(3)
            trainee = Trainee(peer, swarm, gradients())
            if peer.index == 3:
                with torch.no_grad():
                    trainee.model.weight.fill_(1e3)  # must not be what anybody ends with
            while trainee.optimizer.epoch < 40:
                trainee.step()
            trainee.optimizer.finish()
            values = trainee.model.weight.detach().flatten().tolist()
            ends[peer.index] = (trainee.optimizer.caught_up, values)

    for _ in range(3):
        cluster.add(MACHINE, script)
    cluster.add(MACHINE, script, at_s=8.0)
    with cluster:
        assert cluster.run(400.0)
    assert [ends[index][0] for index in range(4)] == [0, 0, 0, 1]
    assert all(values == ends[0][1] for _, values in ends.values())
    assert max(ends[3][1]) < 10.0


def test_what_makes_no_sense() -> None:
    with pytest.raises(ConfigError, match="slowness must be positive"):
        Machine(LINE, slowness=0.0)

    def joins_twice(peer: VirtualPeer) -> None:
        with peer.join(), pytest.raises(ConfigError, match="joins once"):
            peer.join()

    with VirtualCluster(1, preset("local")) as cluster:
        cluster.add(MACHINE, joins_twice)
        assert cluster.run(100.0)
