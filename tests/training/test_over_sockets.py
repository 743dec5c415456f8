"""The strategies over real swarms: sockets, encryption and clocks, two peers in one process."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

import moshpit
from moshpit.identity.tickets import RunKey

BATCH = 8
EPOCHS = 3


@pytest.fixture
def two_swarms():
    invite = RunKey.generate().invite()
    options = {"listen": "127.0.0.1:0", "identity": "new", "preset": "local"}
    with moshpit.join(invite.ticket(()).encode(), **options) as first:
        ticket = invite.ticket(first.addresses).encode()
        with moshpit.join(ticket, **options) as second:
            for swarm in (first, second):
                swarm.wait_for_peers(2)
            yield first, second


class Trainer:
    def __init__(self, swarm, strategy, seed):
        torch.manual_seed(7)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.random = torch.Generator().manual_seed(seed)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.opt = moshpit.Optimizer(inner, swarm, strategy, batch_size=BATCH, model=self.model)

    def train(self):
        while self.opt.epoch < EPOCHS:
            x = torch.randn(BATCH, 4, generator=self.random)
            (self.model(x) - x[:, :2].sin()).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()
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
    ],
    ids=["local-overlap", "local-blocking", "gradients"],
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
