"""`OverlappedGradientAveraging`: the same steps as `GradientAveraging`, at other times."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import threading
import time
from copy import deepcopy
from dataclasses import replace

import pytest
import torch
from torch import nn

import moshpit
from moshpit.errors import ConfigError, LocalError
from moshpit.identity.tickets import RunKey
from moshpit.training.piecewise import Needs, PiecewiseStep

from .test_over_sockets import PATIENCE_S, ROOT, joined, patient, wait_until_all_are_attached

BATCH = 4
STEPS = 5


class Block(nn.Module):
    """Shared weights, attention (which reads its part's weight itself), statistics, and a part
    that no pass uses."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 8)
        self.attend = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.unused = nn.Linear(3, 3)
        self.head = nn.Linear(8, 6, bias=False)
        self.head.weight = nn.Parameter(self.embed.weight.detach().T.clone())
        self.tail = nn.Linear(8, 6, bias=False)
        self.tail.weight = self.head.weight

    def forward(self, x):
        y = self.embed(x).relu()
        y = y + self.attend(y[:, None], y[:, None], y[:, None], need_weights=False)[0][:, 0]
        y = self.norm(y)
        return self.head(y) + self.tail(y.tanh())


class Trainer:
    """Trains a `Block`; all its batches are known beforehand."""

    def __init__(self, swarm, strategy, seed, kind="adamw"):
        torch.manual_seed(7)
        self.model = Block()
        made = {
            "adamw": lambda p: torch.optim.AdamW(p, lr=0.02),
            "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        }
        inner = made[kind](self.model.parameters())
        self.opt = moshpit.Optimizer(inner, swarm, strategy, batch_size=BATCH, model=self.model)
        self.made = 0
        self.random = torch.Generator().manual_seed(seed)

    def loss(self):
        x = torch.randn(BATCH, 6, generator=self.random)
        return (self.model(x) - x.sin()).square().mean()

    def step(self, batches=1):
        for _ in range(batches):
            self.loss().backward()
            self.opt.step()
            self.opt.zero_grad()
        self.schedule()

    def schedule(self):
        self.made += 1
        for group in self.opt.param_groups:
            group["lr"] *= 0.5 if self.made % 2 == 0 else 1.0

    def train(self, steps=STEPS, batches=1):
        while self.opt.epoch < steps:
            self.step(batches)
        return self.opt.finish()

    def bytes(self):
        return torch.cat(
            [t.detach().double().reshape(-1) for t in self.model.state_dict().values()]
        )


def overlapped(**options):
    return moshpit.OverlappedGradientAveraging(**options)


def small_chunks():
    """Options with which even a small model has many chunks, and a busy machine is no fault."""
    options = patient(PATIENCE_S)
    transport = replace(options["config"].transport, chunk_bytes_min=64)
    return {**options, "config": replace(options["config"], transport=transport)}


# --- the same steps ---------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adamw", "momentum"])
@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.3], ids=["", "clipped"])
def test_it_makes_the_steps_of_gradient_averaging(kind, batches, clip, memory_swarm, together):
    def train(make, steps):
        swarm = memory_swarm(2)
        trainers = [Trainer(p, make(), i, kind) for i, p in enumerate(swarm.peers)]
        together(*[lambda t=t: t.train(steps, batches) for t in trainers])
        assert torch.equal(trainers[0].bytes(), trainers[1].bytes())
        assert {t.opt.epoch for t in trainers} == {steps + 1}
        return trainers[0]

    late = train(lambda: overlapped(accumulate=batches, max_grad_norm=clip), STEPS)
    # Batch by batch, so that both strategies see the same ones.
    swarm = memory_swarm(2)
    size = 2 * batches * BATCH
    now = [
        Trainer(p, moshpit.GradientAveraging(size, max_grad_norm=clip), i, kind)
        for i, p in enumerate(swarm.peers)
    ]
    for _ in range(STEPS):
        for t in now:
            for _ in range(batches):
                t.loss().backward()
                t.opt._strategy.local_step(None, lambda: BATCH)
        together(*[t.opt.finish for t in now])
        for t in now:
            t.schedule()
    together(*[t.opt.finish for t in now])
    torch.testing.assert_close(late.bytes(), now[0].bytes(), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(
        late.bytes(), Trainer(memory_swarm(1).peers[0], overlapped(), 0).bytes()
    )


@pytest.mark.parametrize("size", [2, 3])
def test_peers_over_sockets_end_with_the_same_bytes(size, together, memory_swarm):
    with joined(RunKey.generate().invite(), size, small_chunks()) as swarms:
        peers = [
            Trainer(swarm, overlapped(accumulate=2), i, "momentum")
            for i, swarm in enumerate(swarms)
        ]
        wait_until_all_are_attached(swarms)
        reports = together(*[lambda t=t: t.train(STEPS, 2) for t in peers])
    for report, trainer in zip(reports, peers, strict=True):
        assert report.outcome is moshpit.Outcome.COMPLETE
        assert len(report.rounds[-1].peers) == size
        assert trainer.opt.stats.averagings == STEPS + 1
        assert trainer.opt.stats.partial == trainer.opt.stats.failed == 0
        assert trainer.opt.stats.samples == 2 * STEPS * BATCH
        assert torch.equal(trainer.bytes(), peers[0].bytes())
    alike = memory_swarm(size)
    here = [Trainer(p, overlapped(accumulate=2), i, "momentum") for i, p in enumerate(alike.peers)]
    together(*[lambda t=t: t.train(STEPS, 2) for t in here])
    torch.testing.assert_close(peers[0].bytes(), here[0].bytes(), rtol=1e-4, atol=1e-5)


def test_nobody_goes_ahead_while_others_are_still_starting(together):
    with joined(RunKey.generate().invite(), 2, small_chunks()) as swarms:
        first = Trainer(swarms[0], overlapped(), 0)
        started = threading.Event()

        def late():
            assert started.wait(60)
            return Trainer(swarms[1], overlapped(), 1).train()

        first.model.tail.weight.register_hook(lambda _: started.set())  # its backward pass runs
        reports = together(first.train, late)
    assert [r.outcome for r in reports] == [moshpit.Outcome.COMPLETE] * 2
    assert first.opt.stats.alone == 0


def test_a_codec_with_feedback_over_sockets(together):
    with joined(RunKey.generate().invite(), 2, small_chunks()) as swarms:
        peers = [Trainer(swarm, overlapped(codec="int8"), i) for i, swarm in enumerate(swarms)]
        wait_until_all_are_attached(swarms)
        together(*[t.train for t in peers])
    assert torch.equal(peers[0].bytes(), peers[1].bytes())


def test_a_peer_that_is_killed_in_its_backward_pass(together):
    """Its contribution is left out where it had given none; the others go on, alike."""
    invite = RunKey.generate().invite()
    with joined(invite, 2, small_chunks()) as swarms:
        ticket = invite.ticket(swarms[0].addresses).encode()
        command = [sys.executable, "-m", "tests.training.overlapped_victim", ticket]
        victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        try:
            assert victim.stdout.readline() == "ready\n"
            for swarm in swarms:
                swarm.wait_for_peers(3)
            peers = [Trainer(swarm, overlapped(), i) for i, swarm in enumerate(swarms)]
            wait_until_all_are_attached(swarms)

            def watch():
                assert victim.stdout.readline() == "halfway\n"
                deadline = time.monotonic() + 60
                while not all(in_round_two(t) for t in peers):
                    assert time.monotonic() < deadline
                    time.sleep(0.01)
                victim.kill()
                victim.wait()

            *reports, _ = together(*[t.train for t in peers], watch)
        finally:
            victim.kill()
            victim.wait()
            victim.stdout.close()
    assert victim.returncode == -signal.SIGKILL
    assert torch.equal(peers[0].bytes(), peers[1].bytes())
    assert [len(r.rounds[-1].peers) for r in reports] == [2, 2]
    assert all(t.opt.stats.partial >= 1 for t in peers)


def in_round_two(trainer):
    """Whether its second averaging has a group."""
    pending = trainer.opt._pending
    return trainer.opt.stats.averagings == 1 and pending is not None and pending[0].stores


# --- when parameters change -------------------------------------------------------------------


def test_parameters_change_when_their_modules_are_needed(memory_swarm, together):
    swarm = memory_swarm(2)
    first, second = (Trainer(p, overlapped(), i) for i, p in enumerate(swarm.peers))
    together(first.step, second.step)  # who needs what is learned here
    swarm.held = True
    first.loss().backward()
    second.loss().backward()
    before = {n: p.detach().clone() for n, p in first.model.named_parameters()}
    first.opt.step()
    second.opt.step()
    swarm.release()

    def changed():
        return {n for n, p in first.model.named_parameters() if not torch.equal(p, before[n])}

    assert not changed()
    y = first.model.embed(torch.zeros(2, 6))
    assert changed() == {"embed.weight", "embed.bias"}
    first.model.attend(y, y, y)  # its out_proj is never called by itself
    inside = {n for n in before if n.startswith("attend.")}
    assert changed() <= {"embed.weight", "embed.bias"} | inside
    assert "attend.out_proj.weight" in changed()
    first.model.state_dict()
    assert changed() == {n for n in before if not n.startswith("unused.")}


def test_hyperparameters_are_those_of_the_step(memory_swarm, together):
    swarm = memory_swarm(1)
    trainer = Trainer(swarm.peers[0], overlapped(), 0, "momentum")
    twin = Trainer(memory_swarm(1).peers[0], overlapped(), 0, "momentum")
    swarm.held = True
    for t in (trainer, twin):
        t.loss().backward()
        t.opt.step()
        for group in t.opt.param_groups:
            group["lr"] = 0.0
    swarm.release()
    assert torch.equal(trainer.bytes(), twin.bytes())


def test_an_evaluation_may_be_the_first_to_need_the_means(memory_swarm, together):
    swarm = memory_swarm(2)
    trainers = [Trainer(p, overlapped(), i, "momentum") for i, p in enumerate(swarm.peers)]
    for mode in (torch.inference_mode, torch.no_grad):

        def step(trainer, mode=mode):
            trainer.step()
            trainer.model.eval()
            with mode():
                trainer.model(torch.zeros(2, 6))
            trainer.model.train()

        for _ in range(2):
            together(*[lambda t=t, step=step: step(t) for t in trainers])
    assert torch.equal(*together(*[t.bytes for t in trainers]))


def test_needs_are_those_of_the_nearest_module_that_was_called():
    model = Block()
    tensors = [p for _, p in model.named_parameters()]
    names = [n for n, _ in model.named_parameters()]
    asked = []
    needs = Needs(model, tensors, lambda numbers: asked.append({names[i] for i in numbers}))
    model(torch.zeros(2, 6))
    assert asked[0] == set(names)
    assert needs.learn() == []
    asked.clear()
    model(torch.zeros(2, 6))
    root, embed, attend, norm, head, tail = asked
    assert root == {"unused.weight", "unused.bias"}  # nobody else was seen to need them
    assert embed == {"embed.weight", "embed.bias"}
    assert attend >= {"attend.in_proj_weight", "attend.out_proj.weight"}
    assert norm == {"norm.weight", "norm.bias"}
    assert head == tail == {"head.weight"}
    needs.close()
    model(torch.zeros(2, 6))
    assert len(asked) == 6


def test_parameters_of_modules_that_are_called_one_by_one(memory_swarm):
    """Nobody calls the whole model, so some tensors have no reader: they change in step()."""
    model = nn.ModuleDict({"used": nn.Linear(3, 1), "read": nn.Linear(3, 1)})
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    peer = memory_swarm(1).peers[0]
    optimizer = moshpit.Optimizer(inner, peer, overlapped(), batch_size=2, model=model)
    for _ in range(3):
        before = model["read"].weight.detach().clone()
        loss = model["used"](torch.ones(2, 3)) + nn.functional.linear(
            torch.ones(2, 3), model["read"].weight
        )
        loss.sum().backward()
        optimizer.step()
        assert not torch.equal(model["read"].weight, before)


def test_a_parameter_that_was_used_too_early_is_named(memory_swarm):
    swarm = memory_swarm(1)
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 1))
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = moshpit.Optimizer(inner, swarm.peers[0], overlapped(), batch_size=2, model=model)
    x = torch.ones(2, 3)
    model(x).sum().backward()
    optimizer.step()
    swarm.held = True
    model(x).sum().backward()
    optimizer.step()
    swarm.release()
    with pytest.raises(LocalError, match=r"1\.weight was used .* optimizer\.flush"):
        nn.functional.linear(model[0](x), model[1].weight).sum().backward()


def test_optimizers_that_keep_something_for_a_group_are_refused():
    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            for group in self.param_groups:
                group["steps"] = group.get("steps", 0) + 1
            return super().step(closure)

    weight = nn.Parameter(torch.ones(2))
    step = PiecewiseStep(Counting([weight], lr=0.1))
    with pytest.raises(ConfigError, match="Counting changes 'steps' of a whole group"):
        step.step({weight: torch.ones(2)})


# --- what is refused, and faults --------------------------------------------------------------


def test_a_gradient_that_is_not_finite_makes_all_skip_the_step(memory_swarm, together, caplog):
    swarm = memory_swarm(2)
    bad, good = (Trainer(p, overlapped(), i) for i, p in enumerate(swarm.peers))
    together(bad.step, good.step)
    together(bad.bytes, good.bytes)
    before = good.bytes()
    with caplog.at_level(logging.WARNING, "moshpit.training"):
        together(lambda: spoiled_step(bad), good.step)
        states = together(bad.bytes, good.bytes)
    assert "is not finite: all peers skip this step" in caplog.text
    changed = ~torch.isclose(states[1], before)
    statistics = torch.cat(
        [
            torch.full_like(t.double(), float("running" in n or "num_" in n)).reshape(-1)
            for n, t in good.model.state_dict().items()
        ]
    ).bool()
    assert not (changed & ~statistics).any()
    assert [t.opt._strategy.skipped_steps for t in (bad, good)] == [1, 1]
    together(bad.train, good.train)
    assert torch.equal(bad.bytes(), good.bytes())


def spoiled_step(trainer):
    (trainer.loss() * float("inf")).backward()
    trainer.opt.step()
    trainer.schedule()


def test_peers_with_other_parameters_merge_them(memory_swarm, together, caplog):
    swarm = memory_swarm(2)
    one, other = (Trainer(p, overlapped(), i) for i, p in enumerate(swarm.peers))
    together(one.step, other.step)
    values = together(one.bytes, other.bytes)
    with torch.no_grad():
        other.model.embed.weight.mul_(1.5)
    values[1] = other.bytes()
    together(lambda: one.step(2), lambda: other.step(2))
    assert caplog.text.count("their gradients do not belong together") == 2
    trained = torch.tensor([b for n, t in one.model.state_dict().items()
                            for b in [not named_buffer(n)] * t.numel()])  # fmt: skip
    for trainer in (one, other):
        merged = trainer.bytes()[trained]
        torch.testing.assert_close(merged, (values[0] + values[1])[trained] / 2)
    together(one.train, other.train)
    assert torch.equal(one.bytes(), other.bytes())


def named_buffer(name):
    return "running" in name or "num_" in name


def test_what_it_cannot_do_is_said(memory_swarm):
    model = nn.Linear(3, 1)
    peer = memory_swarm(1).peers[0]
    with pytest.raises(ConfigError, match="model=model"):
        moshpit.Optimizer(torch.optim.SGD(model.parameters()), peer, overlapped(), batch_size=1)
    with pytest.raises(ConfigError, match="LBFGS"):
        moshpit.Optimizer(
            torch.optim.LBFGS(model.parameters()), peer, overlapped(), batch_size=1, model=model
        )
    strange = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="not in the model"):
        moshpit.Optimizer(
            torch.optim.SGD([*model.parameters(), strange]),
            peer,
            overlapped(),
            batch_size=1,
            model=model,
        )
    with pytest.raises(ConfigError, match="accumulate"):
        overlapped(accumulate=0)
    with pytest.raises(ConfigError, match="max_grad_norm"):
        overlapped(max_grad_norm=-1.0)


def linear(memory_swarm, **options):
    model = nn.Linear(3, 1)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    peer = memory_swarm(1).peers[0]
    return model, moshpit.Optimizer(inner, peer, overlapped(), model=model, **options)


def test_a_scaler_is_refused(memory_swarm):
    model, optimizer = linear(memory_swarm, batch_size=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(torch.ones(2, 3)).sum()).backward()
    with pytest.raises(ConfigError, match="bfloat16"):
        scaler.step(optimizer)


def test_two_backward_passes_in_one_step_are_refused(memory_swarm):
    model, optimizer = linear(memory_swarm, batch_size=2)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(LocalError, match="second gradient of bias"):
        model(torch.ones(2, 3)).sum().backward()
    optimizer.close()


def test_samples_that_are_told_too_late_are_refused(memory_swarm):
    model, optimizer = linear(memory_swarm)
    model(torch.ones(2, 3)).sum().backward()
    with pytest.raises(ConfigError, match="began with 2"):
        optimizer.step(samples=3)


def test_after_close_the_model_is_as_any_other(memory_swarm):
    model, optimizer = linear(memory_swarm, batch_size=2)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.close()
    model(torch.ones(2, 3)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((1, 3), 2.0))
    assert torch.equal(deepcopy(model).state_dict()["weight"], model.weight)


def test_the_others_are_told_how_long_the_backward_pass_takes(memory_swarm, monkeypatch):
    swarm = memory_swarm(1)
    peer, told, now = swarm.peers[0], [], [0.0]
    begin = peer.begin_averaging
    monkeypatch.setattr(peer, "clock", lambda: now[0])
    monkeypatch.setattr(
        peer,
        "begin_averaging",
        lambda *a, **how: (told.append(how["fill_s"]), begin(*a, **how))[1],
    )
    trainer = Trainer(peer, overlapped(), 0)
    for seconds in (5.0, 20.0, 1.0):
        trainer.loss().backward()
        now[0] += seconds  # from the first gradient to the last
        trainer.opt.step()
        trainer.opt.zero_grad()
    trainer.opt.finish()
    assert told == [60.0, 5.0, 20.0, 0.0], "what is complete needs no time"


@pytest.mark.soak
def test_a_backward_pass_that_takes_longer_than_the_deadline_of_short_ones(together):
    options = small_chunks()
    rounds = replace(options["config"].round, deadline_s_min=4.0)
    options["config"] = replace(options["config"], round=rounds)
    with joined(RunKey.generate().invite(), 2, options) as swarms:
        peers = [Trainer(swarm, overlapped(), i) for i, swarm in enumerate(swarms)]
        slow = next(p for p in peers[1].model.parameters() if p.requires_grad)
        slow.register_hook(lambda grad: time.sleep(5.0))
        wait_until_all_are_attached(swarms)
        together(*[lambda t=t: t.train(3) for t in peers])
    for trainer in peers:
        assert trainer.opt.stats.partial == trainer.opt.stats.failed == 0
        assert torch.equal(trainer.bytes(), peers[0].bytes())
