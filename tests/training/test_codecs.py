"""Codecs in training: what is exact, what is kept for later, and what is taken back."""

from __future__ import annotations

import random

import msgspec
import pytest
import torch
from torch import nn

from moshpit.errors import ConfigError
from moshpit.training.exchange import Exchange
from moshpit.training.optimizer import Optimizer
from moshpit.training.strategies import DiLoCo, GradientAveraging, LocalSGD, Nesterov

from .faulty_swarm import FaultySwarm, Weather, storm
from .test_diloco import CHUNK, CHUNKS, STEPS, Bowl, finish, one_state, run, spread, train_until

SLOPES = 48


class Slope:
    """A peer whose gradient is always the same; few of its numbers are large."""

    def __init__(self, peer, strategy, seed):
        random = torch.Generator().manual_seed(seed)
        self.slope = torch.randn(SLOPES, generator=random) ** 3
        self.place = nn.Parameter(torch.zeros(SLOPES))
        inner = torch.optim.SGD([self.place], lr=1.0)
        self.opt = Optimizer(inner, peer, strategy, batch_size=1)

    def step(self):
        self.place.grad = self.slope.clone()
        self.opt.step()


def average(trainers, together):
    for trainer in trainers:
        trainer.step()
    together(
        *[lambda t=t: (t.opt._attach(), t.opt._begin(waits=False), t.opt._wait()) for t in trainers]
    )


def residual(trainer):
    feedback = trainer.opt._strategy._feedback
    return None if feedback is None else feedback.residual.clone()


@pytest.mark.parametrize("make", [LocalSGD, GradientAveraging, DiLoCo])
def test_a_codec_that_does_not_exist_is_refused(make):
    with pytest.raises(ConfigError, match=r"'zip'.*topk"):
        make(64, codec="zip")


@pytest.mark.parametrize("codec", ["int8", "int4", "topk", "bfp", "bfloat16"])
def test_local_sgd_refuses_what_suits_differences_only(codec):
    with pytest.raises(ConfigError, match="DiLoCo exchanges differences"):
        LocalSGD(64, codec=codec)


@pytest.mark.parametrize("codec", ["topk", "int4", "int8"])
def test_what_a_codec_has_lost_arrives_later(codec, memory_swarm, together):
    """However many steps there are, what has arrived lacks no more than about one step's loss."""
    swarm = memory_swarm(2)
    peers = [Slope(p, GradientAveraging(1e9, codec=codec), i) for i, p in enumerate(swarm.peers)]
    meant = (peers[0].slope + peers[1].slope) / 2
    off = []
    for steps in range(1, 61):
        average(peers, together)
        off.append((peers[0].place.detach() + steps * meant).abs().max().item())
        assert torch.equal(peers[0].place, peers[1].place)
    assert off[0] > 0
    assert max(off[30:]) < 1.5 * max(off[:30])


@pytest.mark.parametrize("make", [GradientAveraging, DiLoCo])
def test_buffers_lose_nothing(make, memory_swarm, together):
    swarm = memory_swarm(2)
    models = [nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)) for _ in swarm.peers]
    models[1].load_state_dict(models[0].state_dict())
    opts = []
    for seed, (peer, model) in enumerate(zip(swarm.peers, models, strict=True)):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        opts.append(Optimizer(inner, peer, make(1e9, codec="topk"), batch_size=8, model=model))
        data = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))
        (model(data) - data.sum()).square().mean().backward()
        opts[-1].step()
    running = [model[1].running_mean.double() for model in models]
    together(*[opt.finish for opt in opts])
    for model in models:
        assert torch.equal(model[1].running_mean, (sum(running) / 2).float())


def pair(make, size=2):
    swarm = FaultySwarm(size, CHUNK)
    return swarm, [Bowl(p, make(size * STEPS), i) for i, p in enumerate(swarm.peers)]


def test_what_a_mean_that_is_not_used_has_lost_is_taken_back(together):
    """The difference is given again in full, with what was lost of it."""
    swarm, bowls = pair(lambda n: DiLoCo(n, codec="topk"))
    average(bowls, together)
    average(bowls, together)
    before = [residual(b) for b in bowls]
    assert all(r.abs().max() > 0 for r in before)
    swarm.weather[2] = Weather(lost=frozenset({(1, 1)}))
    average(bowls, together)
    assert [b.opt.stats.carried for b in bowls] == [1, 1]
    assert all(torch.equal(residual(b), r) for b, r in zip(bowls, before, strict=True))
    average(bowls, together)
    assert [b.strategy.outer_steps for b in bowls] == [3, 3]
    assert not any(torch.equal(residual(b), r) for b, r in zip(bowls, before, strict=True))


def test_parameters_are_not_sent_in_a_codec_for_differences(together):
    swarm, bowls = pair(lambda n: DiLoCo(n, codec="topk"))
    average(bowls, together)
    for bowl in bowls:
        bowl.strategy._sends_parameters = True
        bowl.step()
    places = torch.stack([b.at() for b in bowls])
    together(*[b.opt.finish for b in bowls])
    assert [b.strategy.realignments for b in bowls] == [1, 1]
    assert {a.codec for a in swarm.last.values()} == {"float16"}
    torch.testing.assert_close(bowls[0].at(), places.mean(0), rtol=1e-3, atol=0)
    assert torch.equal(bowls[0].at(), bowls[1].at())
    assert all((residual(b) == 0).all() for b in bowls), "it belongs to an anchor that is gone"


@pytest.mark.parametrize(
    ("codec", "outer"), [("int8", None), ("auto", None), ("topk", Nesterov(momentum=0.0))]
)
@pytest.mark.parametrize("seed", range(3))
def test_random_faults_drive_nobody_apart(codec, outer, seed, together):
    swarm, bowls = pair(lambda n: DiLoCo(n, outer, codec=codec), size=4)
    rng = random.Random(seed)
    swarm.weather = {epoch: storm(rng, 4, CHUNKS) for epoch in range(40)}
    for _ in train_until(swarm, bowls, epoch=40):
        for bowl in bowls:
            assert (bowl.at() - 100).abs().max() < 8
    run(swarm, bowls, epoch=60)
    finish(bowls, together)
    assert one_state(bowls)
    assert spread(bowls) == 0
    goal = torch.stack([b.target for b in bowls]).mean(0)
    assert (bowls[0].at() - goal).square().mean().sqrt() < 0.5


def test_a_gradient_beyond_its_dtype_leaves_nothing_behind(memory_swarm, together):
    """All skip this step, and nothing of it is in the next one."""
    swarm = memory_swarm(2)
    peers = []
    for peer in swarm.peers:
        place = nn.Parameter(torch.zeros(SLOPES, dtype=torch.float16))
        inner = torch.optim.SGD([place], lr=1.0)
        peers.append((place, Optimizer(inner, peer, GradientAveraging(2, codec="int8"))))

    def step(place, opt, size):
        place.grad = torch.full_like(place, size)
        opt._strategy.local_step(None, lambda: 1.0)
        opt._strategy._sums[place].mul_(size)  # in float32 it is more than float16 holds
        opt._attach()
        opt._begin(waits=True)
        opt._wait()

    for size in (1000.0, 1.0):
        together(*[lambda p=p, o=o, s=size: step(p, o, s) for p, o in peers])
    assert [opt._strategy.skipped_steps for _, opt in peers] == [1, 1]
    assert all(torch.equal(place, torch.full_like(place, -1.0)) for place, _ in peers)


# --- memory and time ------------------------------------------------------------------------


def bound(strategy, peer):
    place = nn.Parameter(torch.zeros(SLOPES))
    inner = torch.optim.SGD([place], lr=0.1)
    opt = Optimizer(inner, peer, strategy, batch_size=1)
    place.grad = torch.ones_like(place)
    opt.step()
    return opt


def test_memory_is_used_again_when_nobody_asks_for_it_any_more(memory_swarm):
    peer = memory_swarm(1).peers[0]
    opt = bound(LocalSGD(1e9), peer)
    exchange = Exchange(peer, opt._strategy)
    held = []
    for settled in (True, False, True):
        averaging, snapshot = exchange.begin(1.0, waits=True)
        held.append(snapshot.vector)
        assert averaging.in_place
        assert snapshot.was_replaced_by(averaging.mean)
        averaging.settled = settled
        exchange.ended(averaging, snapshot, used=True)
    assert held[0].data_ptr() == held[1].data_ptr()
    assert held[1].data_ptr() != held[2].data_ptr()


def test_an_averaging_may_take_as_long_as_the_work_beside_it(memory_swarm):
    peer = memory_swarm(1).peers[0]
    opt = bound(LocalSGD(100), peer)
    exchange = Exchange(peer, opt._strategy)

    def hidden_s(samples, rate, *, waits=False, mass=None):
        """Begin with so many samples; in the end the swarm has had ``mass`` of them."""
        opt._strategy.samples = samples
        averaging, snapshot = exchange.begin(rate, waits=waits)
        (last,) = averaging.report.rounds
        last = msgspec.structs.replace(last, masses=(mass or samples,))
        averaging.report = msgspec.structs.replace(averaging.report, rounds=(last,))
        exchange.ended(averaging, snapshot, used=True)
        return averaging.hidden_s

    assert hidden_s(samples=30.0, rate=10.0, mass=120.0) == 3.0, "so long it took until now"
    assert hidden_s(samples=60.0, rate=10.0, waits=True, mass=240.0) == 0.0
    assert hidden_s(samples=60.0, rate=0.0, mass=240.0) == 0.0, "nobody knows"
    assert hidden_s(samples=60.0, rate=10.0) == 2.5, "a quarter of the swarm's 100 samples"
