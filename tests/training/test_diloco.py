"""DiLoCo: the outer step, and that no fault drives its peers apart."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from moshpit.errors import ConfigError
from moshpit.training.optimizer import Optimizer
from moshpit.training.strategies import DiLoCo, LocalSGD, Nesterov

from .faulty_swarm import FaultySwarm, Weather, storm

NUMEL = 40
CHUNK = 16  # the numbers of agreement and the parameters make three chunks
CHUNKS = 3
STEPS = 5  # of each peer, in an epoch


class Bowl:
    """A peer whose loss is the distance to a place of its own, near 100: parameters are large
    beside differences, so that taking one for the other shows."""

    def __init__(self, peer, strategy, seed, dtype=torch.float32):
        noise = torch.Generator().manual_seed(seed)
        self.target = 100 + torch.randn(NUMEL, generator=noise)
        self.noise = noise
        self.place = nn.Parameter(torch.full((NUMEL,), 97.0, dtype=dtype))
        inner = torch.optim.SGD([self.place], lr=0.05)
        self.opt = Optimizer(inner, peer, strategy, batch_size=1)
        self.strategy = strategy

    def step(self):
        blur = 0.3 * torch.randn(NUMEL, generator=self.noise)
        self.place.grad = (self.place.detach().float() - self.target - blur).to(self.place.dtype)
        self.opt.step()

    def finish(self):
        report = self.opt.finish()
        self.opt._swarm.leave()
        return report

    def at(self):
        return self.place.detach().clone()


def swarm_of(size, make=DiLoCo, **options):
    swarm = FaultySwarm(size, CHUNK)
    return swarm, [Bowl(p, make(size * STEPS), i, **options) for i, p in enumerate(swarm.peers)]


def train_until(swarm, bowls, epoch):
    """Train in turns; yield after each turn."""
    while swarm.epoch < epoch:
        for bowl in bowls:
            bowl.step()
        yield


def run(swarm, bowls, epoch):
    for _ in train_until(swarm, bowls, epoch):
        pass


def spread(bowls):
    places = torch.stack([b.at() for b in bowls]).float()
    return (places - places.mean(0)).abs().max().item()


def one_state(bowls):
    first, *others = (b.strategy for b in bowls)
    return all(
        torch.equal(first._anchor, s._anchor) and torch.equal(first._momentum, s._momentum)
        for s in others
    )


def finish(bowls, together):
    together(*[b.finish for b in bowls])


# --- the outer step -------------------------------------------------------------------------


def test_the_outer_step_is_torchs_nesterov():
    anchor = torch.randn(5, generator=torch.Generator().manual_seed(0))
    theirs = nn.Parameter(anchor.clone())
    outer = torch.optim.SGD([theirs], lr=0.7, momentum=0.9, nesterov=True)
    momentum = torch.zeros(5)
    for seed in range(4):
        theirs.grad = torch.randn(5, generator=torch.Generator().manual_seed(seed))
        Nesterov().step(anchor, momentum, theirs.grad)
        outer.step()
    torch.testing.assert_close(anchor, theirs.detach())


def test_peers_make_the_outer_step_on_the_mean_of_their_differences(together):
    _, bowls = swarm_of(2, lambda n: DiLoCo(n, Nesterov(lr=0.5, momentum=0.8)))
    place, momentum = torch.full((NUMEL,), 97.0), torch.zeros(NUMEL)
    for _ in range(3):
        for bowl, steps in zip(bowls, (3, 1), strict=True):
            for _ in range(steps):
                bowl.step()
        mean = (3 * (place - bowls[0].at()) + (place - bowls[1].at())) / 4
        Nesterov(0.5, 0.8).step(place, momentum, mean)
        together(*[b.opt.finish for b in bowls])
        torch.testing.assert_close(bowls[0].at(), place)
    assert one_state(bowls)
    assert spread(bowls) == 0
    assert bowls[0].strategy.outer_steps == 3


def test_with_rate_one_and_no_momentum_it_averages_as_local_sgd(together):
    ends = []
    for make in (lambda n: DiLoCo(n, Nesterov(1.0, 0.0)), LocalSGD):
        swarm, bowls = swarm_of(3, make)
        run(swarm, bowls, epoch=4)  # with steps made while averaging
        finish(bowls, together)
        ends.append(bowls[0].at())
    torch.testing.assert_close(ends[0], ends[1])


def test_half_precision_does_not_swallow_small_outer_steps():
    """Rounding the anchor to the parameters' dtype is not local work."""
    _, (bowl, _) = swarm_of(2, dtype=torch.bfloat16)
    strategy = bowl.strategy
    bowl.step()
    strategy._anchor += 0.01  # far below bfloat16's steps near 100
    bowl.place.data.copy_(strategy._anchor)
    strategy._steps_since_snapshot = 0
    difference = strategy.snapshot().vector[strategy._main()]
    assert torch.equal(difference, torch.zeros(NUMEL))


@pytest.mark.parametrize("outer", [(0.0, 0.9), (-1, 0.9), (float("nan"), 0), (0.7, 1), (0.7, -1)])
def test_an_outer_optimizer_that_makes_no_sense_is_refused(outer):
    with pytest.raises(ConfigError, match="outer"):
        Nesterov(*outer)


# --- faults ---------------------------------------------------------------------------------


def test_a_partial_mean_makes_no_step_and_loses_nothing(together):
    """All see that a contribution is missing: all carry, and the next step has everything."""
    swarm, bowls = swarm_of(3)
    swarm.weather[0] = Weather(lost=frozenset({(2, 1)}))
    for bowl, steps in zip(bowls, (2, 1, 1), strict=True):
        for _ in range(steps):
            bowl.step()
    together(
        *[lambda b=b: (b.opt._attach(), b.opt._begin(waits=False), b.opt._wait()) for b in bowls]
    )
    assert [b.opt.stats.carried for b in bowls] == [1, 1, 1]
    assert [b.strategy.outer_steps for b in bowls] == [0, 0, 0]
    bowls[1].step()
    place = torch.full((NUMEL,), 97.0)
    weights = (2, 2, 1)
    mean = sum(w * (place - b.at()) for w, b in zip(weights, bowls, strict=True)) / 5
    Nesterov().step(place, torch.zeros(NUMEL), mean)
    finish(bowls, together)
    torch.testing.assert_close(bowls[0].at(), place)
    assert one_state(bowls)
    assert [b.strategy.realignments for b in bowls] == [0, 0, 0]


@pytest.mark.parametrize(
    "weather",
    [
        Weather(missing=frozenset({(1, 0)})),
        Weather(missing=frozenset({(1, 2)})),
        Weather(failed=frozenset({1})),
        Weather(split=True),
        Weather(hidden=frozenset({(1, 1)}), missing=frozenset({(0, 2)})),
    ],
    ids=["first-chunk", "last-chunk", "away", "split", "hidden"],
)
def test_a_peer_that_misses_a_step_is_noticed_and_comes_back(weather, together):
    """Three epochs are enough: notice, average parameters, go on."""
    swarm, bowls = swarm_of(4)
    swarm.weather[1] = weather
    run(swarm, bowls, epoch=5)
    for bowl in bowls:
        bowl.step()  # takes the last result
    assert one_state(bowls)
    assert [b.strategy.realignments for b in bowls] == [bowls[0].strategy.realignments] * 4
    finish(bowls, together)
    assert spread(bowls) == 0


@pytest.mark.parametrize("seed", range(15))
def test_random_faults_drive_nobody_apart(seed, together):
    swarm, bowls = swarm_of(4)
    rng = random.Random(seed)
    swarm.weather = {epoch: storm(rng, 4, CHUNKS) for epoch in range(40)}
    widest = 0.0
    for _ in train_until(swarm, bowls, epoch=40):
        for bowl in bowls:  # nobody has taken parameters for a difference, or the reverse
            assert (bowl.at() - 100).abs().max() < 8
        widest = max(widest, spread(bowls))
    assert widest < 6
    run(swarm, bowls, epoch=45)
    finish(bowls, together)
    assert one_state(bowls)
    assert spread(bowls) == 0
    goal = torch.stack([b.target for b in bowls]).mean(0)
    assert (bowls[0].at() - goal).square().mean().sqrt() < 0.5


def test_where_nothing_is_ever_complete_it_is_local_sgd(together):
    """Partial means of parameters hold the peers together where no outer step is possible."""
    swarm, bowls = swarm_of(4)
    rng = random.Random(5)
    lost = [frozenset({(rng.randrange(4), rng.randrange(CHUNKS))}) for _ in range(40)]
    swarm.weather = {epoch: Weather(lost=at) for epoch, at in enumerate(lost)}
    run(swarm, bowls, epoch=40)
    assert [b.strategy.outer_steps for b in bowls] == [0] * 4
    assert min(b.strategy.realignments for b in bowls) > 10
    assert spread(bowls) < 3
    finish(bowls, together)
    goal = torch.stack([b.target for b in bowls]).mean(0)
    assert (bowls[0].at() - goal).square().mean().sqrt() < 0.5


def test_a_newcomer_takes_the_others_state_and_spoils_nothing(together):
    swarm, bowls = swarm_of(4)
    newcomer = bowls.pop()
    swarm.here.remove(3)
    run(swarm, bowls, epoch=8)
    with torch.no_grad():
        newcomer.place.fill_(-500.0)
    swarm.here.append(3)
    bowls.append(newcomer)
    for _ in train_until(swarm, bowls, epoch=14):
        for bowl in bowls[:3]:
            assert (bowl.at() - 100).abs().max() < 8
    finish(bowls, together)
    assert (newcomer.at() - 100).abs().max() < 8
    assert one_state(bowls)
    assert spread(bowls) == 0


def test_newcomers_that_are_left_alone_average_among_themselves(together):
    """They only receive as long as there is somebody who knows better."""
    swarm, bowls = swarm_of(3)
    swarm.here = [0]
    run(swarm, bowls[:1], epoch=9)
    swarm.here = [0, 1, 2]
    run(swarm, bowls, epoch=10)
    swarm.leave(0)
    run(swarm, bowls[1:], epoch=14)
    finish(bowls[1:], together)
    assert one_state(bowls[1:])
    assert spread(bowls[1:]) == 0


def test_a_saved_state_keeps_what_was_carried(together):
    swarm, bowls = swarm_of(2)
    swarm.weather[1] = Weather(lost=frozenset({(0, 0)}))
    run(swarm, bowls, epoch=2)
    for bowl in bowls:
        bowl.step()
    other, copies = swarm_of(2)
    other.epoch = swarm.epoch
    for bowl, copy in zip(bowls, copies, strict=True):
        copy.opt.load_state_dict(bowl.opt.state_dict())
        copy.place.data.copy_(bowl.at())
    assert copies[0].strategy.state_dict()["carried"] > 0
    finish(bowls, together)
    finish(copies, together)
    assert torch.equal(bowls[0].at(), copies[0].at())
