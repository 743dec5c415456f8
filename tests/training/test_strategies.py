"""The conformance suite of strategies, and what each promises beyond it."""

from __future__ import annotations

import logging
import math
from copy import deepcopy
from functools import partial

import pytest
import torch
from torch import nn

import moshpit.training.optimizer as wrapped
from moshpit.errors import ConfigError, DriftError
from moshpit.training.strategies import (
    DiLoCo,
    GradientAveraging,
    LocalSGD,
    OverlappedGradientAveraging,
)


def few_or_many(samples):
    """Return the batches of a step: two in all tests below, or more than any of them makes."""
    return 2 if samples < 1e9 else 10**6


CODED = ("float16", "int8", "topk", "auto")
STRATEGIES = {
    "local-overlap": LocalSGD,
    "local-blocking": lambda n: LocalSGD(n, overlap=False),
    "local-statistics": lambda n: LocalSGD(n, average_statistics=True),
    "gradients": GradientAveraging,
    "gradients-clipped": lambda n: GradientAveraging(n, max_grad_norm=0.5),
    "gradients-overlapped": lambda n: OverlappedGradientAveraging(few_or_many(n)),
    "gradients-overlapped-clipped": lambda n: OverlappedGradientAveraging(
        few_or_many(n), max_grad_norm=0.5
    ),
    "diloco-overlap": DiLoCo,
    "diloco-blocking": lambda n: DiLoCo(n, overlap=False),
    "local-float16": lambda n: LocalSGD(n, average_statistics=True, codec="float16"),
    "local-auto": lambda n: LocalSGD(n, codec="auto"),
    **{f"gradients-{c}": partial(GradientAveraging, codec=c) for c in CODED},
    **{f"diloco-{c}": partial(DiLoCo, codec=c) for c in CODED},
    "gradients-powersgd": lambda n: GradientAveraging(n, powersgd_rank=2),
    "diloco-blocking-topk": lambda n: DiLoCo(n, overlap=False, codec="topk"),
}
BATCH = 8
GRADIENTS = (GradientAveraging, OverlappedGradientAveraging)

every_strategy = pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES.keys())


class Trainer:
    """A small regression with its own data, trained by a wrapped AdamW."""

    def __init__(self, peer, strategy, seed=0, model=None, inner=None):
        torch.manual_seed(7)
        self.model = model or nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.inner = inner or torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.random = torch.Generator().manual_seed(seed)
        self.opt = wrapped.Optimizer(self.inner, peer, strategy, model=self.model)

    def loss(self, batch=BATCH):
        x = torch.randn(batch, 4, generator=self.random)
        return (self.model(x) - x[:, :2].sin()).square().mean()

    def step(self, batch=BATCH):
        self.loss(batch).backward()
        self.opt.step()
        self.opt.zero_grad()

    def train(self, epochs):
        while self.opt.epoch < epochs:
            self.step()
        return self.opt.finish()

    def bytes(self):
        parameters = nn.utils.parameters_to_vector(self.model.parameters())
        return parameters.detach().clone()


def poison(trainer):
    """Make this trainer's next snapshot non-finite."""
    strategy = trainer.opt._strategy
    if isinstance(strategy, GRADIENTS):
        owner = getattr(strategy, "_gathered", strategy)  # overlapped gradients have them apart
        first = next(iter(owner._sums.values()))
        first.view(-1)[0] = math.inf
    else:
        with torch.no_grad():
            trainer.model[0].weight[0, 0] = math.nan


# --- what all strategies promise ------------------------------------------------------------


@every_strategy
def test_alone_it_is_the_wrapped_optimizer(make, memory_swarm):
    trainer = Trainer(memory_swarm(1).peers[0], make(2 * BATCH))
    plain = Trainer(memory_swarm(1).peers[0], LocalSGD(1e9))
    gradients = isinstance(trainer.opt._strategy, GRADIENTS)
    for _ in range(4):
        if gradients:
            ((plain.loss() + plain.loss()) / 2).backward()
            if trainer.opt._strategy.max_grad_norm:
                nn.utils.clip_grad_norm_(plain.model.parameters(), 0.5)
            plain.inner.step()
            plain.inner.zero_grad()
        for _ in range(2):
            trainer.step()
            if not gradients:
                plain.loss().backward()
                plain.inner.step()
                plain.inner.zero_grad()
    if gradients:
        torch.testing.assert_close(trainer.bytes(), plain.bytes())
    else:
        assert torch.equal(trainer.bytes(), plain.bytes())
    assert trainer.opt.stats.alone >= 1
    assert trainer.opt.epoch >= 2


@every_strategy
def test_all_peers_finish_with_the_same_bytes(make, memory_swarm, together):
    swarm = memory_swarm(3)
    trainers = [Trainer(p, make(6 * BATCH), seed=i) for i, p in enumerate(swarm.peers)]
    start = trainers[0].bytes()
    together(*[lambda t=t: t.train(epochs=4) for t in trainers])
    epochs = {t.opt.epoch for t in trainers}
    if getattr(trainers[0].opt._strategy, "powersgd_rank", None):  # two, if there were samples left
        assert epochs in ({5}, {6})
    else:
        assert epochs == {5}
    assert torch.equal(trainers[0].bytes(), trainers[1].bytes())
    assert torch.equal(trainers[0].bytes(), trainers[2].bytes())
    assert not torch.allclose(trainers[0].bytes(), start)
    assert len({p.attached for p in swarm.peers}) == 1


@every_strategy
@pytest.mark.parametrize("fault", ["failed", "stale"])
def test_an_averaging_that_brings_nothing_leaves_local_values(
    make, fault, memory_swarm, together, caplog
):
    swarm = memory_swarm(2)
    swarm.faults = {(0, 0): fault, (0, 1): fault}
    trainers = [Trainer(p, make(1e9), seed=i) for i, p in enumerate(swarm.peers)]
    single = Trainer(memory_swarm(1).peers[0], make(1e9), seed=0)
    for t in (*trainers, single):
        t.step()
        t.step()
    with caplog.at_level(logging.WARNING, "moshpit.training"):
        together(trainers[0].opt.finish, trainers[1].opt.finish)
    single.opt.finish()
    torch.testing.assert_close(trainers[0].bytes(), single.bytes())
    assert getattr(trainers[0].opt.stats, fault) == 1
    assert "local values stay" in caplog.text
    if trainers[0].opt._strategy.same_parameters:  # going on would harm the others
        with pytest.raises(DriftError, match="epoch 0 did not reach this peer"):
            trainers[0].step()
    else:
        trainers[0].step()


def test_gradients_of_a_peer_that_missed_an_epoch_are_refused(memory_swarm, together):
    swarm = memory_swarm(2)
    late, early = (Trainer(p, GradientAveraging(1e9), seed=i) for i, p in enumerate(swarm.peers))
    swarm.here.remove(0)  # the swarm goes on without it
    early.step()
    early.opt.finish()
    with pytest.raises(DriftError, match=r"the swarm is at epoch 1.*LocalSGD"):
        late.step()
    early.step()


@every_strategy
def test_a_peer_with_nonfinite_values_gives_nothing_and_takes_the_mean(
    make, memory_swarm, together, caplog
):
    swarm = memory_swarm(2)
    bad, good = (Trainer(p, make(1e9), seed=i) for i, p in enumerate(swarm.peers))
    for t in (bad, good):
        t.step()
    poison(bad)
    with caplog.at_level(logging.WARNING, "moshpit.training"):
        together(bad.opt.finish, good.opt.finish)
    assert torch.equal(bad.bytes(), good.bytes())
    assert torch.isfinite(good.bytes()).all()
    assert bad.opt.stats.nonfinite == 1
    assert good.opt.stats.nonfinite == 0
    assert "0.weight holds NaN or infinity" in caplog.text
    bad.step()
    assert torch.isfinite(bad.bytes()).all()


@every_strategy
def test_a_saved_state_goes_on_as_if_never_stopped(make, memory_swarm):
    going = Trainer(memory_swarm(1).peers[0], make(3 * BATCH), seed=1)
    for _ in range(4):
        going.step()
    saved, weights = deepcopy(going.opt.state_dict()), going.model.state_dict()
    resumed = Trainer(memory_swarm(1).peers[0], make(3 * BATCH), seed=1)
    resumed.opt.load_state_dict(saved)
    resumed.model.load_state_dict(weights)
    resumed.random.set_state(going.random.get_state())
    assert resumed.opt.epoch == going.opt.epoch
    # What the swarm knew of this epoch's samples is the only thing that is not in the state.
    for t in (going, resumed):
        t.step()
        t.opt.finish()
    assert torch.equal(going.bytes(), resumed.bytes())
    assert going.inner.state_dict()["state"].keys() == resumed.inner.state_dict()["state"].keys()


@every_strategy
def test_another_strategys_state_is_refused(make, memory_swarm):
    trainer = Trainer(memory_swarm(1).peers[0], make(64))
    other = GradientAveraging(64) if trainer.opt._strategy.name == "LocalSGD" else LocalSGD(64)
    saved = Trainer(memory_swarm(1).peers[0], other).opt.state_dict()
    with pytest.raises(ConfigError, match=f"saved by {other.name}"):
        trainer.opt.load_state_dict(saved)


@every_strategy
def test_one_strategy_serves_one_optimizer(make, memory_swarm):
    strategy = make(64)
    Trainer(memory_swarm(1).peers[0], strategy)
    with pytest.raises(ConfigError, match="already belongs"):
        Trainer(memory_swarm(1).peers[0], strategy)


@pytest.mark.parametrize("target", [0, -1, math.nan, math.inf])
@pytest.mark.parametrize("kind", [LocalSGD, GradientAveraging, DiLoCo])
def test_a_target_that_makes_no_sense_is_refused(kind, target):
    with pytest.raises(ConfigError, match="positive number"):
        kind(target)


def test_peers_of_different_strategies_or_shapes_have_different_schemas(memory_swarm):
    def schema(strategy, width=6):
        model = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 2))
        peer = memory_swarm(1).peers[0]
        Trainer(peer, strategy, model=model).step()
        return peer.attached[0]

    kinds = [make(64) for make in STRATEGIES.values()]
    assert len({schema(s) for s in kinds}) == 6
    assert schema(LocalSGD(64)) != schema(LocalSGD(64), width=7)


# --- LocalSGD -------------------------------------------------------------------------------


def test_local_sgd_takes_the_mean_weighted_by_samples(memory_swarm, together):
    swarm = memory_swarm(2)
    a, b = (Trainer(p, LocalSGD(1e9, overlap=False), seed=i) for i, p in enumerate(swarm.peers))
    a.step(batch=6)
    b.step(batch=2)
    expected = (a.bytes().double() * 6 + b.bytes().double() * 2) / 8
    together(a.opt.finish, b.opt.finish)
    assert torch.equal(a.bytes(), expected.float())


def test_steps_made_while_averaging_survive(memory_swarm):
    swarm = memory_swarm(2)
    swarm.held = True
    a, b = (Trainer(p, LocalSGD(2 * BATCH), seed=i) for i, p in enumerate(swarm.peers))
    a.step()
    b.step()  # the target is met: b begins
    snapshot_b = b.bytes()
    a.step()  # a hears the call and begins
    snapshot_a = a.bytes()
    assert a.opt.epoch == b.opt.epoch == 0
    b.step()
    b.step()
    before = b.bytes()
    swarm.release()
    assert torch.equal(b.bytes(), before), "parameters change inside step() only"
    twin = Trainer(memory_swarm(1).peers[0], LocalSGD(1e9))
    twin.model.load_state_dict(b.model.state_dict())
    twin.inner.load_state_dict(deepcopy(b.inner.state_dict()))
    twin.random.set_state(b.random.get_state())
    twin.step()
    b.step()
    mean = (snapshot_a * 16 + snapshot_b * 8) / 24
    torch.testing.assert_close(b.bytes(), twin.bytes() + mean - snapshot_b)
    assert b.opt.epoch == 1
    assert b.opt._strategy.samples == 3 * BATCH


def test_statistics_are_averaged_only_when_asked(memory_swarm, together):
    for wanted in (False, True):
        swarm = memory_swarm(2)
        strategies = [LocalSGD(1e9, average_statistics=wanted) for _ in range(2)]
        a, b = (
            Trainer(p, s, seed=i)
            for i, (p, s) in enumerate(zip(swarm.peers, strategies, strict=True))
        )
        for t in (a, b):
            t.step()
        together(a.opt.finish, b.opt.finish)
        for key in ("exp_avg", "exp_avg_sq"):
            weight = a.model[0].weight, b.model[0].weight
            ours, theirs = a.inner.state[weight[0]][key], b.inner.state[weight[1]][key]
            assert torch.equal(ours, theirs) is wanted


def test_a_second_moment_never_becomes_negative(memory_swarm):
    trainer = Trainer(memory_swarm(1).peers[0], LocalSGD(1e9, average_statistics=True))
    trainer.step()
    strategy, state = trainer.opt._strategy, trainer.inner.state[trainer.model[0].weight]
    snapshot = strategy.snapshot()
    trainer.step()
    with torch.no_grad():
        state["exp_avg_sq"].mul_(1e-3)  # it has decayed since ...
    first, second = state["exp_avg"].clone(), state["exp_avg_sq"].clone()
    strategy.adopt(snapshot, snapshot.vector * 0.5)  # ... and the mean is well below
    assert torch.equal(state["exp_avg_sq"], torch.zeros_like(second))
    assert (second > 0).any()
    assert (first < 0).any()
    assert (state["exp_avg"] < 0).any(), "what has a sign keeps it"
    assert not torch.equal(state["exp_avg"], first)


def test_a_parameter_without_gradients_does_not_change_the_schema(memory_swarm):
    def schema(use_second):
        model = nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
        inner = torch.optim.AdamW(model.parameters(), lr=0.1)
        peer = memory_swarm(1).peers[0]
        opt = wrapped.Optimizer(
            inner, peer, LocalSGD(64, average_statistics=True), batch_size=4, model=model
        )
        out = model["a"](torch.ones(4, 4))
        (out + model["b"](torch.ones(4, 4)) if use_second else out).sum().backward()
        opt.step()
        opt.finish()
        return peer.attached

    assert schema(True) == schema(False)


def test_statistics_before_the_first_step_are_an_error(memory_swarm):
    trainer = Trainer(memory_swarm(1).peers[0], LocalSGD(64, average_statistics=True))
    with pytest.raises(ConfigError, match="before its first step"):
        trainer.opt.finish()


def test_running_statistics_of_batch_normalisation_are_averaged(memory_swarm, together):
    swarm = memory_swarm(2)
    models = [nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2)) for _ in range(2)]
    trainers = [
        Trainer(p, LocalSGD(1e9), seed=i, model=m)
        for i, (p, m) in enumerate(zip(swarm.peers, models, strict=True))
    ]
    for t in trainers:
        t.step()
    expected = (models[0][1].running_mean.double() + models[1][1].running_mean.double()) / 2
    trainers[1].step()
    trainers[0].step()
    before = models[0][1].num_batches_tracked.item()
    together(*[t.opt.finish for t in trainers])
    assert torch.equal(models[0][1].running_mean, models[1][1].running_mean)
    assert not torch.equal(models[0][1].running_mean, expected.float())
    assert models[0][1].num_batches_tracked.item() == before


# --- GradientAveraging ----------------------------------------------------------------------


def test_two_peers_make_the_step_of_one_large_batch(memory_swarm, together):
    swarm = memory_swarm(2)
    peers = [Trainer(p, GradientAveraging(1e9), seed=i) for i, p in enumerate(swarm.peers)]
    large = Trainer(memory_swarm(1).peers[0], LocalSGD(1e9))
    sizes = {0: (6, 2), 1: (3, 5)}
    total = sum(map(sum, sizes.values()))
    for i, t in enumerate(peers):
        twin = torch.Generator().manual_seed(i)
        for size in sizes[i]:
            t.step(batch=size)
            large.random = twin
            (large.loss(size) * size / total).backward()
    assert torch.equal(peers[0].bytes(), Trainer(memory_swarm(1).peers[0], LocalSGD(1)).bytes())
    together(*[t.opt.finish for t in peers])
    large.inner.step()
    torch.testing.assert_close(peers[0].bytes(), large.bytes())
    assert torch.equal(peers[0].bytes(), peers[1].bytes())


def test_a_batch_with_nonfinite_gradients_is_left_out(memory_swarm, caplog):
    trainer = Trainer(memory_swarm(1).peers[0], GradientAveraging(1e9))
    (trainer.loss() * math.nan).backward()
    with caplog.at_level(logging.WARNING, "moshpit.training"):
        trainer.opt.step()
    assert "gradient of 0.weight is not finite" in caplog.text
    assert trainer.opt._strategy.skipped_batches == 1
    assert trainer.opt.stats.samples == 0
    start = trainer.bytes()
    trainer.opt.finish()
    assert torch.equal(trainer.bytes(), start), "no sample, no step"


def test_the_averaged_gradient_is_clipped(memory_swarm):
    model = nn.Linear(4, 1, bias=False)
    inner = torch.optim.SGD(model.parameters(), lr=1.0)
    strategy = GradientAveraging(8, max_grad_norm=0.25)
    opt = wrapped.Optimizer(inner, memory_swarm(1).peers[0], strategy)
    before = model.weight.detach().clone()
    (model(torch.ones(8, 4)).sum() * 100).backward()
    opt.step()
    assert (model.weight - before).norm().item() == pytest.approx(0.25, rel=1e-3)


def test_a_clip_that_makes_no_sense_is_refused():
    with pytest.raises(ConfigError, match="max_grad_norm"):
        GradientAveraging(8, max_grad_norm=0.0)


def peers_with_different_parameters(swarm, make):
    trainers = [Trainer(p, make(), seed=i) for i, p in enumerate(swarm.peers)]
    for t in trainers:
        t.step()
    with torch.no_grad():
        next(iter(trainers[1].model.parameters())).add_(0.1)
    return trainers


def test_gradients_at_different_parameters_are_not_mixed(memory_swarm, together, caplog):
    trainers = peers_with_different_parameters(memory_swarm(2), lambda: GradientAveraging(1e9))
    before = [[p.detach().clone() for p in t.model.parameters()] for t in trainers]
    together(*[t.opt.finish for t in trainers])
    assert "the peers hold different parameters" in caplog.text
    for trainer in trainers:
        for mine, one, other in zip(trainer.model.parameters(), *before, strict=True):
            torch.testing.assert_close(mine.detach(), (one + other) / 2)
    assert torch.equal(trainers[0].bytes(), trainers[1].bytes())


def test_factors_at_different_parameters_are_not_mixed(memory_swarm, together):
    make = partial(GradientAveraging, 1e9, powersgd_rank=1)
    trainers = peers_with_different_parameters(memory_swarm(2), make)
    before = [t.bytes() for t in trainers]

    def finish(trainer):
        with pytest.raises(DriftError, match=r"different parameters.*wait_for_peers"):
            trainer.opt.finish()

    together(*[lambda t=t: finish(t) for t in trainers])
    for trainer, bytes_before in zip(trainers, before, strict=True):
        assert torch.equal(trainer.bytes(), bytes_before), "a step was made all the same"


def test_peers_that_start_from_other_parameters_have_another_schema(memory_swarm):
    models = [nn.Linear(4, 2) for _ in range(3)]
    models[1].load_state_dict(models[0].state_dict())
    peers = memory_swarm(3).peers
    for peer, model in zip(peers, models, strict=True):
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        Trainer(peer, GradientAveraging(1e9), model=model, inner=inner)
    schemas = [peer.attached[0] for peer in peers]
    assert schemas[0] == schemas[1] != schemas[2]
