"""`torch.amp.GradScaler` and means that overflow: one decision, taken by all peers."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from moshpit.errors import ConfigError
from moshpit.training.optimizer import Optimizer
from moshpit.training.strategies import DiLoCo, GradientAveraging, LocalSGD

STRATEGIES = [LocalSGD, DiLoCo, GradientAveraging]
BATCH = 8
SCALE = 256.0

every_strategy = pytest.mark.parametrize("make", STRATEGIES, ids=lambda m: m.name)


class Trainer:
    """A model trained under autocast, its loss scaled."""

    def __init__(self, peer, strategy, seed=0, dtype=torch.float32, **options):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).to(dtype)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=10**6)
        self.random = torch.Generator().manual_seed(seed)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.opt = Optimizer(inner, peer, strategy, **options)

    def backward(self, batch=BATCH, times=1.0):
        x = torch.randn(batch, 4, generator=self.random)
        with torch.autocast("cpu", torch.bfloat16):
            loss = (self.model(x).float() - x[:, :2].sin()).square().mean()
        self.scaler.scale(loss * times).backward()

    def step(self, batch=BATCH, times=1.0):
        self.backward(batch, times)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad()

    def bytes(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


@every_strategy
def test_scaled_training_is_unscaled_training(make, memory_swarm):
    ends = []
    for enabled in (True, False):
        t = Trainer(memory_swarm(1).peers[0], make(2 * BATCH))
        t.scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, enabled=enabled)
        for _ in range(6):
            t.step()
        t.opt.finish()
        ends.append(t.bytes())
    torch.testing.assert_close(*ends)


@every_strategy
def test_a_batch_that_overflows_is_left_out_with_its_samples(make, memory_swarm):
    t = Trainer(memory_swarm(1).peers[0], make(1e9))
    before = t.bytes()
    t.step(times=math.inf)
    assert torch.equal(t.bytes(), before)
    assert t.opt.stats.skipped == t.opt._strategy.skipped_batches == 1
    assert t.scaler.get_scale() == SCALE / 2
    assert t.opt.stats.samples == 0
    t.step(batch=3)
    assert t.opt.stats.samples == 3, "the samples of the skipped batch are not counted with these"
    t.opt.finish()
    assert not torch.equal(t.bytes(), before)


@every_strategy
def test_a_peer_whose_batches_overflow_takes_part_all_the_same(make, memory_swarm, together):
    """Nobody waits for a scale to be found; and each peer finds its own."""
    swarm = memory_swarm(2)
    bad, good = (Trainer(p, make(4 * BATCH), seed=i) for i, p in enumerate(swarm.peers))

    def train(trainer, times):
        while trainer.opt.epoch < 3:
            trainer.step(times=times)
        trainer.opt.finish()

    together(lambda: train(bad, math.inf), lambda: train(good, 1.0))
    assert bad.opt.stats.samples == 0
    assert torch.equal(bad.bytes(), good.bytes())
    assert torch.isfinite(bad.bytes()).all()
    assert good.scaler.get_scale() == SCALE > bad.scaler.get_scale()


@every_strategy
def test_gradients_that_the_user_has_unscaled_stay_as_they_are(make, memory_swarm):
    t, plain = (Trainer(memory_swarm(1).peers[0], make(1e9)) for _ in range(2))
    plain.scaler = torch.amp.GradScaler("cpu", enabled=False)
    for trainer in (t, plain):
        trainer.backward()
        trainer.scaler.unscale_(trainer.opt)
        nn.utils.clip_grad_norm_(trainer.model.parameters(), 0.01)
        trainer.scaler.step(trainer.opt)
        trainer.scaler.update()
        trainer.opt.finish()
    torch.testing.assert_close(t.bytes(), plain.bytes())
    t.backward(times=math.nan)
    t.scaler.unscale_(t.opt)
    t.scaler.step(t.opt)
    assert t.opt.stats.skipped == 1


def test_float16_gradients_cannot_be_unscaled(memory_swarm):
    t = Trainer(memory_swarm(1).peers[0], LocalSGD(64), dtype=torch.float16, batch_size=BATCH)
    for p in t.model.parameters():
        p.grad = torch.ones_like(p)
    t.scaler.scale(torch.ones(()))
    with pytest.raises(ConfigError, match="parameters in float32"):
        t.scaler.step(t.opt)


# --- means that overflow --------------------------------------------------------------------


@every_strategy
def test_a_mean_that_overflows_is_used_by_nobody(make, memory_swarm, together, caplog):
    swarm = memory_swarm(2)
    swarm.overflows = {0}
    trainers = [Trainer(p, make(1e9), seed=i) for i, p in enumerate(swarm.peers)]
    for t in trainers:
        t.step()
    before = [t.bytes() for t in trainers]
    together(*[t.opt.finish for t in trainers])
    assert [t.opt.stats.overflowed for t in trainers] == [1, 1]
    assert "nobody uses it" in caplog.text
    for t, b in zip(trainers, before, strict=True):
        assert torch.equal(t.bytes(), b)
    for t in trainers:
        t.step()
    together(*[t.opt.finish for t in trainers])
    assert torch.equal(trainers[0].bytes(), trainers[1].bytes())
    assert not torch.equal(trainers[0].bytes(), before[0])


def test_a_mean_beyond_the_parameters_dtype_makes_all_skip_the_same_step(memory_swarm, caplog):
    ends = []
    for norm in (None, 1.0):
        strategy = GradientAveraging(1e9, max_grad_norm=norm)
        t = Trainer(memory_swarm(1).peers[0], strategy, dtype=torch.float16, batch_size=BATCH)
        for p in t.model.parameters():
            p.grad = torch.full_like(p, 60000.0)
        t.opt.step()
        before, snapshot = t.bytes(), strategy.snapshot()
        mean = snapshot.vector * 1.2  # as a codec may round it up
        strategy.adopt(snapshot, mean)
        ends.append(strategy.skipped_steps)
        assert torch.isfinite(t.bytes()).all()
        assert torch.equal(t.bytes(), before) is (norm is None)
    assert ends == [1, 0], "clipped before it is rounded, it fits"
    assert "all peers skip this step" in caplog.text
