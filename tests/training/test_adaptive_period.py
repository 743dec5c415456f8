"""ADACOMM: the period follows loss and learning rate, and is the same at all peers."""

from __future__ import annotations

import math

import pytest
import torch

import moshpit
from moshpit.errors import ConfigError
from moshpit.training.strategies import AdaComm


class Trainer:
    def __init__(self, peer, first, least, losses):
        self.x = torch.nn.Parameter(torch.zeros(4))
        self.losses = losses
        self.inner = torch.optim.SGD([self.x], lr=1.0)
        rule = AdaComm(least)
        self.strategy = moshpit.LocalSGD(first, overlap=False, adaptive_period=rule)
        self.opt = moshpit.Optimizer(self.inner, peer, self.strategy, batch_size=8)

    def step(self):
        self.x.grad = torch.ones(4)
        self.strategy.note_loss(self.losses[self.opt.epoch])
        self.opt.step()

    def train(self, epochs):
        while self.opt.epoch < epochs:
            self.step()


def test_the_period_follows_the_mean_loss_of_all(memory_swarm, together):
    swarm = memory_swarm(2)
    a = Trainer(swarm.peers[0], 64, 8, [3.0, 1.0, 0.5, 0.0, 9.0])
    b = Trainer(swarm.peers[1], 64, 8, [5.0, 1.0, 0.0, 0.0, 9.0])
    seen = []
    for epoch in range(1, 6):
        before = a.strategy.samples
        together(lambda e=epoch: a.train(e), lambda e=epoch: b.train(e))
        assert a.strategy.samples_per_epoch == b.strategy.samples_per_epoch
        assert swarm.peers[0].attached[2] == a.strategy.samples_per_epoch
        seen.append(a.strategy.samples_per_epoch)
        assert before == 0
    # The first mean is 4; weights differ by who begins, but all epochs have samples of both.
    assert seen[0] == 64
    assert seen[1] == pytest.approx(64 * math.sqrt(1 / 4), rel=0.15)
    assert seen[2] < seen[1]
    assert seen[3] == 8
    assert seen[4] > 64


def test_a_lower_rate_makes_longer_periods(memory_swarm, together):
    swarm = memory_swarm(2)
    pair = [Trainer(p, 64, 1, [2.0] * 4) for p in swarm.peers]
    together(*[lambda t=t: t.train(1) for t in pair])
    for t in pair:
        t.inner.param_groups[0]["lr"] = 0.25
    together(*[lambda t=t: t.train(2) for t in pair])
    assert {t.strategy.samples_per_epoch for t in pair} == {128.0}


def test_the_loss_of_a_closure_counts(memory_swarm, together):
    swarm = memory_swarm(2)
    pair = [Trainer(p, 1e6, 1, [1.0] * 4) for p in swarm.peers]

    def closure(t, loss):
        t.x.grad = torch.ones(4)
        return torch.tensor(loss)

    together(*[lambda t=t: t.opt.step(lambda: closure(t, 4.0)) for t in pair])
    together(*[t.opt.finish for t in pair])
    together(*[lambda t=t: t.opt.step(lambda: closure(t, 1.0)) for t in pair])
    together(*[t.opt.finish for t in pair])
    assert {t.strategy.samples_per_epoch for t in pair} == {5e5}


def test_without_a_loss_it_says_what_to_do(memory_swarm):
    t = Trainer(memory_swarm(1).peers[0], 16, 1, [])
    t.x.grad = torch.ones(4)
    with pytest.raises(ConfigError, match="note_loss"):
        t.opt.step()


def test_a_resumed_run_has_the_same_period(memory_swarm, together):
    swarm, again = memory_swarm(2), memory_swarm(2)
    pair = [Trainer(p, 64, 1, [4.0, 1.0, 1.0]) for p in swarm.peers]
    together(*[lambda t=t: t.train(2) for t in pair])
    resumed = [Trainer(p, 64, 1, [4.0, 1.0, 1.0]) for p in again.peers]
    for old, new in zip(pair, resumed, strict=True):
        new.opt.load_state_dict(old.opt.state_dict())
    assert {t.strategy.samples_per_epoch for t in resumed} == {32.0}
    for old, new in zip(pair, resumed, strict=True):
        assert new.strategy._period.next(2.0, 1.0) == old.strategy._period.next(2.0, 1.0)


def test_a_loss_that_is_not_finite_is_not_counted(memory_swarm, together):
    swarm = memory_swarm(2)
    pair = [Trainer(p, 32, 1, [4.0, 4.0]) for p in swarm.peers]
    pair[0].losses = [math.nan, math.nan]
    together(*[lambda t=t: t.train(1) for t in pair])
    assert all(math.isfinite(t.strategy.samples_per_epoch) for t in pair)


@pytest.mark.parametrize("least", [0, -1, math.inf, math.nan])
def test_a_least_period_that_makes_no_sense_is_refused(least):
    with pytest.raises(ConfigError, match="least"):
        AdaComm(least)


def test_the_least_period_is_no_longer_than_the_first():
    with pytest.raises(ConfigError, match="first epoch"):
        moshpit.LocalSGD(8, adaptive_period=AdaComm(16))
