"""The wrapping optimizer as an optimizer: schedulers, hooks, sizes of batches, waiting."""

from __future__ import annotations

import copy
import gc
import math
import pickle
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.modules import module as nn_module

from moshpit.errors import ConfigError, LocalError
from moshpit.training.optimizer import Optimizer
from moshpit.training.samples import BatchWatcher, first_dimension
from moshpit.training.strategies import GradientAveraging, LocalSGD


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def peer(memory_swarm):
    return memory_swarm(1).peers[0]


def wrap(model, peer, strategy=None, **options):
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    return Optimizer(inner, peer, strategy or LocalSGD(1e9), **options)


def backward(model, batch=8, **kwargs):
    model(torch.ones(batch, 4), **kwargs).square().sum().backward()


# --- an ordinary optimizer ------------------------------------------------------------------


def test_learning_rate_schedulers_drive_the_wrapped_optimizer(model, peer):
    opt = wrap(model, peer)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda step: 1 / (1 + step))
    rates = []
    for _ in range(3):
        backward(model)
        opt.step()
        schedule.step()
        rates.append(opt.inner.param_groups[0]["lr"])
    assert rates == pytest.approx([0.05, 0.1 / 3, 0.025])


def test_groups_and_state_are_the_wrapped_optimizers_own(model, peer):
    opt = wrap(model, peer)
    backward(model)
    opt.step()
    assert opt.param_groups is opt.inner.param_groups
    assert opt.state is opt.inner.state
    opt.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert opt.param_groups is opt.inner.param_groups
    assert opt.state is opt.inner.state
    assert isinstance(opt, torch.optim.Optimizer)


def test_the_state_of_the_bare_optimizer_can_be_loaded(model, peer):
    bare = torch.optim.AdamW(model.parameters(), lr=0.5)
    opt = wrap(model, peer)
    opt.load_state_dict(bare.state_dict())
    assert opt.param_groups[0]["lr"] == 0.5


def test_hooks_run_on_both(model, peer):
    opt = wrap(model, peer)
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append("outer before"))
    opt.inner.register_step_post_hook(lambda *_: seen.append("inner after"))
    opt.register_step_post_hook(lambda *_: seen.append("outer after"))
    backward(model)
    opt.step()
    assert seen == ["outer before", "inner after", "outer after"]


@pytest.mark.parametrize("strategy", [LocalSGD(1e9), GradientAveraging(1e9)])
def test_a_closure_is_called_with_gradients_on(model, peer, strategy):
    opt = wrap(model, peer, strategy)

    def closure():
        opt.zero_grad()
        loss = model(torch.ones(8, 4)).square().sum()
        loss.backward()
        return loss

    with torch.no_grad():
        assert opt.step(closure).item() > 0
    assert opt.stats.samples == 8


@pytest.mark.parametrize("strategy", [LocalSGD(1e9), GradientAveraging(8)])
def test_a_gradient_scaler_unscales_and_skips(model, peer, strategy):
    opt = wrap(model, peer, strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    before = model[0].weight.detach().clone()
    scaler.scale(model(torch.ones(8, 4)).sum() * math.inf).backward()
    scaler.step(opt)
    scaler.update()
    opt.zero_grad()
    assert torch.equal(model[0].weight, before)
    scaler.scale(model(torch.ones(8, 4)).square().sum()).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    assert not torch.equal(model[0].weight, before)


def test_groups_can_be_added_until_the_first_step(model, peer):
    opt = wrap(model, peer)
    head = nn.Linear(2, 1)
    opt.add_param_group({"params": head.parameters(), "lr": 0.01})
    assert len(opt.inner.param_groups) == 2
    assert peer.attached[1] == sum(p.numel() for p in (*model.parameters(), *head.parameters()))
    head(model(torch.ones(8, 4))).sum().backward()
    opt.step()
    assert peer.attached[1] == sum(p.numel() for p in (*model.parameters(), *head.parameters()))
    with pytest.raises(ConfigError, match="before training"):
        opt.add_param_group({"params": nn.Linear(1, 1).parameters()})


@pytest.mark.parametrize("attempt", [pickle.dumps, copy.copy, copy.deepcopy])
def test_pickling_says_what_to_do_instead(model, peer, attempt):
    with pytest.raises(LocalError, match=r"save its state_dict\(\)"):
        attempt(wrap(model, peer))


def test_frozen_parameters_are_not_exchanged(model, peer):
    model[0].requires_grad_(False)
    opt = wrap(model, peer)
    backward(model)
    opt.step()
    assert peer.attached[1] == 8 * 2 + 2
    for p in model.parameters():
        p.requires_grad_(False)
    with pytest.raises(ConfigError, match="no parameter"):
        wrap(model, peer)


# --- how many samples -----------------------------------------------------------------------


def test_the_batch_is_seen_at_the_model_and_accumulates(model, peer):
    opt = wrap(model, peer)
    for batch in (8, 3):
        backward(model, batch)
    opt.step()
    backward(model, 5)
    opt.step()
    with torch.no_grad():
        model(torch.ones(100, 4))
    backward(model, 1)
    opt.step()
    assert [r[0] for r in peer.reports] == [11, 16, 17]


def test_a_frozen_part_in_front_is_not_the_model(model, peer):
    front = nn.Linear(4, 4).requires_grad_(False)
    opt = wrap(model, peer)
    model(front(torch.ones(6, 4))).sum().backward()
    opt.step()
    assert opt.stats.samples == 6


def test_the_wrapping_module_counts_once(model, peer):
    opt = wrap(model, peer)
    whole = nn.Sequential(model, nn.Identity())
    whole(torch.ones(6, 4)).sum().backward()
    opt.step()
    assert opt.stats.samples == 6


class Keywords(nn.Module):
    def __init__(self):
        super().__init__()
        self.inside = nn.Linear(4, 1)

    def forward(self, flag, inputs):
        return self.inside(inputs["x"])


@pytest.mark.parametrize("given", [True, False])
def test_keyword_arguments_and_mappings_are_looked_into(peer, given):
    model = Keywords()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    opt = Optimizer(inner, peer, LocalSGD(1e9), model=model if given else None)
    model(flag=True, inputs={"x": torch.ones(9, 4)}).sum().backward()
    opt.step()
    assert opt.stats.samples == 9


def test_what_is_said_outranks_what_is_seen(model, peer, memory_swarm):
    opt = wrap(model, peer)
    backward(model, 8)
    opt.step(samples=2)
    backward(model, 8)
    opt.step()
    assert opt.stats.samples == 10
    fixed = wrap(model, memory_swarm(1).peers[0], batch_size=32)
    backward(model, 8)
    fixed.step()
    assert fixed.stats.samples == 32


def test_an_unknown_size_is_an_error_before_anything_happens(model, peer):
    opt = wrap(model, peer)
    before = model[0].weight.detach().clone()
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(ConfigError, match=r"step\(samples=n\)"):
        opt.step()
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize("size", [-1, math.nan, math.inf])
def test_a_size_that_makes_no_sense_is_refused(model, peer, size):
    backward(model)
    with pytest.raises(ConfigError, match="number of samples"):
        wrap(model, peer).step(samples=size)
    with pytest.raises(ConfigError, match="batch_size"):
        wrap(model, peer, batch_size=size)


def test_no_hook_outlives_its_optimizer(model):
    hooks = len(nn_module._global_forward_pre_hooks)
    watcher = BatchWatcher(model.parameters())
    assert len(nn_module._global_forward_pre_hooks) == hooks + 1
    model(torch.ones(2, 4))
    assert len(nn_module._global_forward_pre_hooks) == hooks, "found: no global hook any more"
    assert len(model._forward_hooks) == 1
    watcher.close()
    assert not model._forward_hooks
    forgotten = BatchWatcher(model.parameters())
    del forgotten
    gc.collect()
    assert len(nn_module._global_forward_pre_hooks) == hooks


def test_the_first_dimension_is_found_where_there_is_one():
    assert first_dimension((1, "a", [torch.zeros(5, 2)]), {}) == 5
    assert first_dimension((torch.zeros(()), {"k": 1}), {"x": torch.zeros(3)}) == 3
    assert first_dimension((), {"x": None}) is None


# --- progress and waiting -------------------------------------------------------------------


def test_progress_tells_the_pace_of_the_work(model, peer):
    opt = wrap(model, peer, batch_size=50)
    for _ in range(4):
        backward(model)
        time.sleep(0.01)
        opt.step()
    assert peer.reports[0][1:] == (0.0, 0.0), "nothing is known about the first step"
    _, rate, step_s = peer.reports[-1]
    assert step_s >= 0.01
    assert rate == pytest.approx(50 / step_s)


def test_waiting_is_counted_and_only_where_it_happens(model, memory_swarm):
    swarm = memory_swarm(2)
    swarm.held = True
    opt = wrap(model, swarm.peers[0], LocalSGD(8, overlap=False), batch_size=8)
    other = wrap(copy.deepcopy(model), swarm.peers[1], LocalSGD(8), batch_size=8)
    backward(model)
    other.step()
    assert not swarm.waiting.is_set(), "overlap does not wait"

    def release_later():
        swarm.waiting.wait()
        time.sleep(0.1)
        swarm.release()

    threading.Thread(target=release_later).start()
    opt.step()
    assert opt.waited_s >= 0.1
    assert opt.longest_wait_s == opt.waited_s
    assert opt.last_report.epoch == 0


def test_nothing_is_reported_while_an_averaging_is_under_way(model, memory_swarm):
    swarm = memory_swarm(2)
    opt = wrap(model, swarm.peers[0], LocalSGD(8), batch_size=8)
    other = wrap(copy.deepcopy(model), swarm.peers[1], LocalSGD(8), batch_size=8)
    for _ in range(3):
        opt.step()
    assert [r[0] for r in swarm.peers[0].reports] == [8]
    with pytest.raises(LocalError, match="under way"):
        opt.load_state_dict(opt.state_dict())
    other.step()
    opt.step()  # takes the result
    assert opt.epoch == 1
    opt.step()
    assert [r[0] for r in swarm.peers[0].reports] == [8, 32]


def test_a_loaded_epoch_goes_on_unless_the_swarm_is_further(model, memory_swarm):
    saved = wrap(model, memory_swarm(1).peers[0], LocalSGD(8), batch_size=8)
    for _ in range(8):
        saved.step()
    state = copy.deepcopy(saved.state_dict())
    assert saved.epoch == 4
    for swarm_epoch, expected in ((0, 4), (9, 9)):
        swarm = memory_swarm(1)
        swarm.epoch = swarm_epoch
        opt = wrap(model, swarm.peers[0], LocalSGD(8), batch_size=8)
        opt.load_state_dict(state)
        assert opt.epoch == expected
        opt.finish()
        assert opt.epoch == expected + 1
