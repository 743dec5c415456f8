"""The strategies over real swarms: sockets, encryption and clocks, two peers in one process."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import moshpit
from moshpit.identity.tickets import RunKey

ROOT = Path(__file__).parents[2]
BATCH = 8
EPOCHS = 3
PATIENCE_S = 5.0  # a peer that is killed is noticed by its sockets
OPTIONS = {"listen": "127.0.0.1:0", "identity": "new", "preset": "local"}


def patient(wait_s, group_size=16, chunk_bytes_min=4096):
    """Options with which a busy machine is no fault."""
    local = moshpit.preset("local")
    matchmaking = replace(
        local.matchmaking, group_size=group_size, call_timeout_s=wait_s, join_timeout_s=wait_s
    )
    rounds = replace(local.round, stall_s=wait_s, deadline_s_min=100.0)
    transport = replace(local.transport, chunk_bytes_min=chunk_bytes_min)
    config = replace(local, matchmaking=matchmaking, round=rounds, transport=transport)
    return {"listen": "127.0.0.1:0", "identity": "new", "config": config}


@pytest.fixture
def invite():
    return RunKey.generate().invite()


@contextlib.contextmanager
def joined(invite, size, options):
    """Some swarms that know each other."""
    with contextlib.ExitStack() as stack:
        swarms = [stack.enter_context(moshpit.join(invite.ticket(()).encode(), **options))]
        ticket = invite.ticket(swarms[0].addresses).encode()
        swarms += [stack.enter_context(moshpit.join(ticket, **options)) for _ in range(size - 1)]
        for swarm in swarms:
            swarm.wait_for_peers(size)
        yield swarms


@pytest.fixture
def two_swarms(invite):
    with joined(invite, 2, OPTIONS) as swarms:
        yield swarms


@pytest.fixture
def patient_swarms(invite):
    with joined(invite, 2, patient(PATIENCE_S)) as swarms:
        yield swarms


def diloco():
    return moshpit.DiLoCo(64 * BATCH)


class Trainer:
    def __init__(self, swarm, strategy, seed):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.random = torch.Generator().manual_seed(seed)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.opt = moshpit.Optimizer(inner, swarm, strategy, batch_size=BATCH, model=self.model)

    def loss(self):
        x = torch.randn(BATCH, 4, generator=self.random)
        return (self.model(x) - x[:, :2].sin()).square().mean()

    def step(self):
        self.loss().backward()
        self.opt.step()
        self.opt.zero_grad()

    def train(self, until=lambda epoch: epoch >= EPOCHS):
        while not until(self.opt.epoch):
            self.step()
        return self.opt.finish()


def wait_until_all_are_attached(swarms):
    deadline = time.monotonic() + 100
    while not all(p.schema for s in swarms for p in s.peers()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    "make",
    [
        lambda: moshpit.LocalSGD(64 * BATCH),
        lambda: moshpit.LocalSGD(64 * BATCH, overlap=False),
        lambda: moshpit.GradientAveraging(64 * BATCH, max_grad_norm=1.0),
        lambda: moshpit.GradientAveraging(64 * BATCH, powersgd_rank=1),
        diloco,
    ],
    ids=["local-overlap", "local-blocking", "gradients", "gradients-powersgd", "diloco"],
)
def test_two_peers_end_with_the_same_bytes(make, two_swarms, together):
    first, second = (Trainer(swarm, make(), seed=i) for i, swarm in enumerate(two_swarms))
    wait_until_all_are_attached(two_swarms)
    reports = together(first.train, second.train)
    for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(p, q)
    for report, trainer in zip(reports, (first, second), strict=True):
        assert len(report.rounds[-1].peers) == 2
        assert report.outcome is moshpit.Outcome.COMPLETE
        stats = trainer.opt.stats
        assert stats.failed == stats.stale == stats.alone == 0
        assert stats.averagings >= EPOCHS + 1


CODED = {
    "local-float16": lambda n: moshpit.LocalSGD(n, codec="float16"),
    "gradients-topk": lambda n: moshpit.GradientAveraging(n, codec="topk"),
    "gradients-auto": lambda n: moshpit.GradientAveraging(n, codec="auto"),
    "diloco-int4": lambda n: moshpit.DiLoCo(n, codec="int4"),
}


@pytest.mark.parametrize("make", CODED.values(), ids=CODED.keys())
def test_codecs_over_sockets(make, invite, together):
    """Several chunks, so that only the first is exact; a slow link, so that "auto" compresses."""
    options = {**patient(wait_s=60.0, chunk_bytes_min=32), "bandwidth_mbit": 1.0}
    with joined(invite, 2, options) as swarms:
        peers = [Trainer(swarm, make(16 * BATCH), seed=i) for i, swarm in enumerate(swarms)]
        wait_until_all_are_attached(swarms)
        start = peers[0].loss().item()
        reports = together(*[lambda t=t: t.train(lambda epoch: epoch >= 10) for t in peers])
    for p, q in zip(peers[0].model.parameters(), peers[1].model.parameters(), strict=True):
        assert torch.equal(p, q)
    for trainer in peers:
        assert trainer.opt.stats.failed == trainer.opt.stats.partial == 0
    assert len(reports[0].rounds[0].ledger) > 2, "chunks"
    assert peers[0].loss().item() < start
    feedback = peers[0].opt._strategy._feedback
    if isinstance(peers[0].opt._strategy, moshpit.LocalSGD):
        assert feedback is None
    else:
        assert feedback.residual.abs().max() > 0, "nothing was lost, so nothing was encoded"


def test_powersgd_on_a_grid(invite, together):
    """Two rounds of pairs, in each of the two averagings of a step."""
    options = patient(wait_s=60.0, group_size=2, chunk_bytes_min=32)
    with joined(invite, 4, options) as swarms:
        strategies = [moshpit.GradientAveraging(64 * BATCH, powersgd_rank=1) for _ in swarms]
        peers = [
            Trainer(*own, seed=i) for i, own in enumerate(zip(swarms, strategies, strict=True))
        ]
        wait_until_all_are_attached(swarms)
        together(*[t.train for t in peers])
    first, *others = (nn.utils.parameters_to_vector(t.model.parameters()) for t in peers)
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-4, atol=1e-5)
    for trainer in peers:
        assert trainer.opt.stats.partial == trainer.opt.stats.carried == 0
        assert not trainer.opt._strategy.halfway
        assert trainer.opt.inner.state[trainer.model[0].weight]["step"] >= 2


@pytest.mark.parametrize("codec", ["topk", "int4"])
def test_codecs_on_a_grid(codec, invite, together):
    """Two rounds of pairs: what is lost on the way is not so much that anchors part."""
    options = patient(wait_s=60.0, group_size=2, chunk_bytes_min=32)
    with joined(invite, 4, options) as swarms:
        outer = moshpit.Nesterov(momentum=0.0)
        strategies = [moshpit.DiLoCo(64 * BATCH, outer, overlap=False, codec=codec) for _ in swarms]
        peers = [
            Trainer(*own, seed=i) for i, own in enumerate(zip(swarms, strategies, strict=True))
        ]
        wait_until_all_are_attached(swarms)
        together(*[t.train for t in peers])
    assert min(s.outer_steps for s in strategies) >= EPOCHS
    assert [s.realignments for s in strategies] == [0] * 4
    assert [t.opt.stats.carried for t in peers] == [0] * 4
    first, *others = (nn.utils.parameters_to_vector(t.model.parameters()) for t in peers)
    for other in others:
        torch.testing.assert_close(first, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "make", [moshpit.LocalSGD, moshpit.DiLoCo, moshpit.GradientAveraging], ids=lambda m: m.name
)
def test_an_overflow_at_one_peer_costs_its_batch_only(make, two_swarms, together):
    """`torch.amp.GradScaler` as it is: its scale is its peer's own matter."""
    peers = [Trainer(swarm, make(16 * BATCH), seed=i) for i, swarm in enumerate(two_swarms)]
    scalers = [torch.amp.GradScaler("cpu", init_scale=256.0) for _ in peers]
    wait_until_all_are_attached(two_swarms)

    def train(trainer, scaler, bad_steps):
        done = 0
        while trainer.opt.epoch < EPOCHS:
            factor = float("inf") if done in bad_steps else 1.0
            scaler.scale(trainer.loss() * factor).backward()
            scaler.step(trainer.opt)
            scaler.update()
            trainer.opt.zero_grad()
            done += 1
        return trainer.opt.finish()

    bad_steps = ({0, 1}, set())
    reports = together(
        *[lambda a=a: train(*a) for a in zip(peers, scalers, bad_steps, strict=True)]
    )
    assert all(r.outcome is moshpit.Outcome.COMPLETE for r in reports)
    for p, q in zip(peers[0].model.parameters(), peers[1].model.parameters(), strict=True):
        assert torch.isfinite(p).all()
        assert torch.equal(p, q)
    assert [t.opt.stats.skipped for t in peers] == [2, 0]
    assert [s.get_scale() for s in scalers] == [64.0, 256.0]


def test_diloco_steps_on_the_mean_of_a_grid(invite, together):
    """Two rounds of pairs: complete at every peer, and the same mass behind every chunk."""
    options = patient(wait_s=60.0, group_size=2)
    with joined(invite, 4, options) as swarms:
        strategies = [moshpit.DiLoCo(64 * BATCH, overlap=False) for _ in swarms]
        peers = [
            Trainer(*own, seed=i) for i, own in enumerate(zip(swarms, strategies, strict=True))
        ]
        wait_until_all_are_attached(swarms)
        reports = together(*[t.train for t in peers])
    assert [len(r.rounds) for r in reports] == [2] * 4
    first, *others = (torch.nn.utils.parameters_to_vector(t.model.parameters()) for t in peers)
    for other in others:  # columns add in another order
        torch.testing.assert_close(first, other)
    for trainer in peers:
        assert trainer.opt._strategy.outer_steps >= EPOCHS
        assert trainer.opt._strategy.realignments == 0
        assert trainer.opt.stats.carried == 0


def test_diloco_goes_on_when_a_peer_is_killed(invite, patient_swarms, together):
    swarms = patient_swarms
    ticket = invite.ticket(swarms[0].addresses).encode()
    command = [sys.executable, "-m", "tests.training.peer", ticket]
    victim = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert victim.stdout.readline() == "ready\n"
        for swarm in swarms:
            swarm.wait_for_peers(3)
        peers = [Trainer(swarm, diloco(), seed=i) for i, swarm in enumerate(swarms)]
        wait_until_all_are_attached(swarms)
        last = [float("inf")]

        def kill():
            while victim.stdout.readline() not in ("epoch 3\n", ""):
                pass
            victim.kill()
            victim.wait()
            last[0] = max(t.opt.epoch for t in peers) + 6

        trains = [lambda t=t: t.train(until=lambda epoch: epoch >= last[0]) for t in peers]
        *reports, _ = together(*trains, kill)
    finally:
        victim.kill()
        victim.wait()
        victim.stdout.close()
    assert victim.returncode == -signal.SIGKILL
    assert [r.outcome for r in reports] == [moshpit.Outcome.COMPLETE] * 2
    for p, q in zip(peers[0].model.parameters(), peers[1].model.parameters(), strict=True):
        assert torch.equal(p, q)
    first, second = (t.opt._strategy for t in peers)
    assert torch.equal(first._anchor, second._anchor)
    assert torch.equal(first._momentum, second._momentum)
    assert first.outer_steps > 3
