"""Peers of a torus that die while it averages: nobody's parameters part, and no sample is lost.

Real optimizers, swarms and protocol in virtual time (`moshpit.experiments.virtual`), on a quadratic
problem.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest
import torch

import moshpit
from moshpit.config import SwarmConfig, preset
from moshpit.events import EpochReport
from moshpit.experiments.virtual import Machine, VirtualCluster, VirtualPeer
from moshpit.experiments.virtual_net import Line
from moshpit.training.strategies import GradientAveraging
from moshpit.training.strategies.agreement import PERIOD, REPEATS_MAX, Agreement
from moshpit.training.tensors import Named

from .faulty_swarm import FaultySwarm, Weather

SIZE = 9  # three rows of three
NUMEL = 6000
BATCH = 4
JOIN_S = 8.0  # in the first averaging
STEPS = 3  # of each peer, to an epoch
LINE = Line(4 * NUMEL / 2.0, 4 * NUMEL / 2.0)  # the vector takes two seconds


def config() -> SwarmConfig:
    lan = preset("lan")
    return replace(
        lan,
        matchmaking=replace(lan.matchmaking, group_size=3),
        transport=replace(lan.transport, chunk_bytes=4096, chunk_bytes_min=1024),
    )


@dataclass
class Trainee:
    """A quadratic problem: every peer has a place of its own."""

    peer: VirtualPeer
    swarm: moshpit.Swarm
    strategy: GradientAveraging
    reports: list[EpochReport] = field(default_factory=list)
    values: list[torch.Tensor] = field(default_factory=list)
    """The parameters after each step of the swarm."""
    gave: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(NUMEL, 1, bias=False)
        self.place = torch.randn(NUMEL, generator=torch.Generator().manual_seed(self.peer.index))
        inner = torch.optim.Adam(self.model.parameters(), lr=0.03)
        inner.register_step_post_hook(self.stepped)
        self.optimizer = moshpit.Optimizer(inner, self.swarm, self.strategy, batch_size=BATCH)
        accepts = self.strategy.accepts

        def noted(mean, report):
            self.reports.append(report)
            return accepts(mean, report)

        self.strategy.accepts = noted

    def stepped(self, *_: object) -> None:
        self.values.append(self.model.weight.detach().clone())

    def step(self) -> None:
        self.optimizer.zero_grad()
        (self.model.weight - self.place).square().sum().backward()
        self.peer.compute(1.0)
        self.optimizer.step()


def train(kill_s: float, *, victim: int, steps: int = 3, replaced: bool = False) -> list[Trainee]:
    """Train; a peer is killed so long after the first averaging has begun, and perhaps another
    one comes just then. Return those who were there all the time, then the one who came."""
    cluster = VirtualCluster(1, config())
    trainees: list[Trainee] = []

    def script(peer: VirtualPeer) -> None:
        with peer.join() as swarm:
            if peer.index < SIZE:
                swarm.wait_for_peers(SIZE)
            trainee = Trainee(peer, swarm, GradientAveraging(SIZE * BATCH * STEPS))
            trainees.append(trainee)
            begin = swarm.begin_averaging

            def noted(vector, weight, **how):
                if not killed:
                    killed.append(victim)
                    cluster.at(peer.clock() + kill_s, cluster.peers[victim].kill)
                trainee.gave.append(weight)
                return begin(vector, weight, **how)

            swarm.begin_averaging = noted
            while trainee.optimizer.state[trainee.model.weight].get("step", 0) < steps:
                trainee.step()
            trainee.optimizer.finish()

    killed: list[int] = []
    for _ in range(SIZE):
        cluster.add(Machine(LINE), script)
    if replaced:
        cluster.add(Machine(LINE), script, at_s=JOIN_S)
    with cluster:
        assert cluster.run(1e4)
    return sorted((t for t in trainees if t.peer.index != victim), key=lambda t: t.peer.index)


def parted(trainees: list[Trainee]) -> list[list[int]]:
    """For each peer the epochs in which it saw that peers have different means."""
    return [[r.epoch for r in t.reports if r.parted] for t in trainees]


def check_nobody_parted(trainees: list[Trainee], caplog: pytest.LogCaptureFixture) -> None:
    first, *others = trainees
    for other in others:
        shared = len(other.values)
        for mine, theirs in zip(first.values[-shared:], other.values, strict=True):
            assert torch.equal(mine, theirs)
    assert "hold different parameters" not in caplog.text
    assert "were mixed" not in caplog.text


@pytest.mark.parametrize(("victim", "kill_s"), [(1, 2.0), (4, 2.0)])
def test_a_death_in_the_torus_parts_nobodys_parameters_and_costs_no_sample(
    victim: int, kill_s: float, caplog: pytest.LogCaptureFixture
) -> None:
    trainees = train(kill_s, victim=victim)
    seen = parted(trainees)
    assert seen[0], "else this test shows nothing"
    assert all(epochs == seen[0] for epochs in seen), "all know it"
    check_nobody_parted(trainees, caplog)
    repeats = len(seen[0])
    for trainee in trainees:
        assert trainee.optimizer.epoch == len(trainee.values) + repeats + 1, "and that of the end"
        assert trainee.optimizer.caught_up == 0
    assert all(t.gave[0] >= BATCH * STEPS for t in trainees)
    assert all(t.gave[: repeats + 1] == t.gave[:1] * (repeats + 1) for t in trainees)
    again = trainees[0].reports[repeats]
    assert max(again.rounds[-1].masses) == sum(t.gave[0] for t in trainees)


def test_who_comes_while_all_give_the_same_again_takes_part(
    caplog: pytest.LogCaptureFixture,
) -> None:
    *trainees, new = train(0.5, victim=4, steps=4, replaced=True)
    assert new.peer.index == SIZE
    assert parted(trainees)[0]
    check_nobody_parted([*trainees, new], caplog)


# --- without a network ------------------------------------------------------------------------


class Member:
    """One of some peers whose gradients are known."""

    def __init__(self, peer: object, index: int, rank: int | None) -> None:
        self.weight = torch.nn.Parameter(torch.zeros(4, 5))
        self.strategy = GradientAveraging(1e9, powersgd_rank=rank)
        inner = torch.optim.SGD([self.weight], lr=1.0)
        self.optimizer = moshpit.Optimizer(inner, peer, self.strategy, batch_size=1)
        self.slope = float(index + 1)

    def step(self) -> None:
        self.weight.grad = torch.full_like(self.weight, self.slope)
        self.optimizer.step()


def members(weather: dict[int, Weather], rank: int | None = None) -> list[Member]:
    swarm = FaultySwarm(4, 8)
    swarm.weather.update(weather)
    return [Member(peer, index, rank) for index, peer in enumerate(swarm.peers)]


TORN = Weather(torn=frozenset({0, 1}))


@pytest.mark.parametrize("times", range(1, REPEATS_MAX + 1))
def test_what_not_all_have_got_is_given_again(times: int, together) -> None:
    peers = members(dict.fromkeys(range(times), TORN))
    for peer in peers:
        peer.step()
    together(*[p.optimizer.finish for p in peers])
    for peer in peers:
        assert peer.optimizer.epoch == times + 1
        assert torch.equal(peer.weight, torch.full((4, 5), -2.5)), "the mean of all slopes"
        assert peer.optimizer.stats.carried == times


@pytest.mark.parametrize("epoch", [0, 1])
def test_of_low_rank_all_of_the_step_is_made_anew(epoch: int, together) -> None:
    """Epoch 0 averages P, epoch 1 Q."""
    peers = members({epoch: TORN}, rank=2)
    for peer in peers:
        peer.step()
    together(*[p.optimizer.finish for p in peers])
    for peer in peers:
        assert peer.optimizer.epoch == 3 + epoch
        torch.testing.assert_close(peer.weight.detach(), torch.full((4, 5), -2.5))
        assert torch.equal(peer.weight, peers[0].weight)


def test_an_averaging_that_never_comes_to_all_stops_nobody(together) -> None:
    peers = members(dict.fromkeys(range(REPEATS_MAX + 1), TORN))
    for peer in peers:
        peer.step()
    together(*[p.optimizer.finish for p in peers])
    for peer in peers:
        assert peer.weight.abs().min() > 0, "everybody has made the step"
    assert not torch.equal(peers[0].weight, peers[3].weight), "and they have parted"
    for peer in peers:
        peer.step()
    together(*[p.optimizer.finish for p in peers])
    assert all(torch.equal(peers[0].weight, p.weight) for p in peers), "found out, and healed"


def test_who_has_not_heard_of_it_makes_the_step_and_all_find_together(together) -> None:
    """A holder that dies after its column leaves the other rows with a whole mean."""
    peers = members({0: Weather(torn=frozenset({0, 1}), unseen=True)})

    def unaware(peer: Member) -> None:
        peer.optimizer.finish()
        peer.step()
        peer.optimizer.finish()

    for peer in peers:
        peer.step()
    together(*[p.optimizer.finish for p in peers[:2]], *[lambda p=p: unaware(p) for p in peers[2:]])
    assert all(torch.equal(peers[0].weight, p.weight) for p in peers)
    assert peers[0].weight.abs().min() > 0
    assert [p.optimizer.epoch for p in peers] == [3] * 4, "gradients, a mixture, parameters"


def heads(*values: float, repeats: tuple[int, ...] = ()) -> list[torch.Tensor]:
    """What peers with such parameters say."""
    found: list[torch.Tensor] = []
    for number, value in enumerate(values):
        agreement = Agreement()
        agreement.repeats = repeats[number] if repeats else 0
        agreement.note([Named("w", torch.tensor([value, 1.0, 2.0, 1.5]))])
        found.append(agreement.head.clone())
    return found


def judged(found: list[torch.Tensor]) -> bool:
    return Agreement().judge(torch.stack(found).mean(0))


def test_a_majority_sees_a_few_that_differ() -> None:
    assert judged(heads(*[3.0] * 31))
    assert judged(heads(*[3.0] * 30, 3.00001)), "rounding"
    assert not judged(heads(*[3.0] * 26, *[3.02] * 5))
    assert not judged(heads(3.0, 3.01))
    assert not judged(heads(3.0, 3.0 + PERIOD))


def test_a_mean_of_what_is_given_again_and_what_is_not_is_for_nobody() -> None:
    assert judged(heads(3.0, 3.0, repeats=(2, 2)))
    assert not judged(heads(3.0, 3.0, repeats=(1, 0)))
    assert not judged(heads(*[3.0] * 9, repeats=(*[0] * 8, 2)))
    listener = Agreement()
    assert listener.judge(torch.stack(heads(3.0, 3.0, repeats=(1, 1))).mean(0))
    assert listener.repeats == 1, "who gives nothing hears it"
