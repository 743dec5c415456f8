"""PowerSGD in training: two means make one step, and it is the same everywhere or nowhere."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from moshpit.errors import ConfigError, DriftError
from moshpit.training.optimizer import Optimizer
from moshpit.training.strategies import GradientAveraging

from .faulty_swarm import FaultySwarm, Weather

ROWS, COLUMNS = 12, 10
CHUNK = 16
P_CHUNKS = range(1, 4)  # of rank 2: 24 numbers of P and 12 of the bias, after the exact head


class Linear:
    """A peer whose gradient has as many ranks as its batch has samples."""

    def __init__(self, peer, rank=2, seed=0, **options):
        torch.manual_seed(7)
        self.model = nn.Linear(COLUMNS, ROWS)
        self.random = torch.Generator().manual_seed(seed)
        self.goal = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))
        strategy = GradientAveraging(1e9, powersgd_rank=rank, **options)
        inner = torch.optim.SGD(self.model.parameters(), lr=0.02)
        self.opt = Optimizer(inner, peer, strategy, batch_size=1, model=self.model)
        self.strategy = strategy

    def step(self, batch=1):
        x = torch.randn(batch, COLUMNS, generator=self.random)
        (self.model(x) - x @ self.goal.t()).square().sum(1).mean().backward()
        self.opt.step(samples=batch)

    def at(self):
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def off(self):
        return (self.model.weight.detach() - self.goal).norm().item()


def average(peers, together):
    """One optimizer step of all; what each has raised, if anything."""

    def one(peer):
        try:
            peer.opt.finish()
        except DriftError as error:
            return error

    return together(*[lambda p=p: one(p) for p in peers])


def swarm_of(size, **options):
    swarm = FaultySwarm(size, CHUNK)
    return swarm, [Linear(p, seed=i, **options) for i, p in enumerate(swarm.peers)]


def all_equal(peers):
    return all(torch.equal(peers[0].at(), p.at()) for p in peers)


def test_gradients_of_low_rank_are_averaged_exactly(together):
    _, peers = swarm_of(2)
    _, exact = swarm_of(2, rank=None)
    for pair in (peers, exact):
        for peer in pair:
            peer.step()
        average(pair, together)
    torch.testing.assert_close(peers[0].at(), exact[0].at(), rtol=1e-4, atol=1e-5)
    assert all_equal(peers)
    assert peers[0].opt.epoch == 2
    assert exact[0].opt.epoch == 1
    assert peers[0].opt._swarm.attached[1] < exact[0].opt._swarm.attached[1] / 2


@pytest.mark.parametrize("codec", ["float32", "float16"])
def test_it_trains_as_well_and_to_the_same_bytes(codec, together):
    _, peers = swarm_of(3, codec=codec)
    _, exact = swarm_of(3, rank=None)
    start = peers[0].off()
    for _ in range(60):
        for group in (peers, exact):
            for peer in group:
                peer.step(batch=8)
            average(group, together)
        assert all_equal(peers)
    assert peers[0].off() < 0.3 * start
    assert peers[0].off() < 1.5 * exact[0].off() + 0.05 * start


def test_contributions_may_be_missing_in_either_mean(together):
    swarm, peers = swarm_of(3)
    swarm.weather[0] = Weather(lost=frozenset({(1, c) for c in P_CHUNKS}))
    swarm.weather[3] = Weather(lost=frozenset({(2, 1)}))
    start = peers[0].off()
    for _ in range(10):
        for peer in peers:
            peer.step(batch=8)
        assert average(peers, together) == [None] * 3
        assert all_equal(peers)
    assert peers[0].off() < start


@pytest.mark.parametrize("epoch", [2, 3])
def test_who_has_not_got_all_of_a_mean_stops_and_the_others_go_on(epoch, together):
    """Epoch 2 averages P for the second time, epoch 3 Q."""
    swarm, peers = swarm_of(3)
    swarm.weather[epoch] = Weather(missing=frozenset({(1, 1)}))
    victim, others = peers[1], [peers[0], peers[2]]
    for peer in peers:
        peer.step()
    average(peers, together)
    for peer in peers:
        peer.step()
    together(
        lambda: (victim.opt.finish(), victim.opt._swarm.leave()),
        *[p.opt.finish for p in others],
    )
    assert all_equal(others)
    assert not torch.equal(victim.at(), others[0].at())
    assert not victim.strategy.halfway
    with pytest.raises(DriftError, match="parameters are not the swarm's"):
        victim.step()
    for peer in others:
        peer.step()
    assert average(others, together) == [None] * 2
    assert all_equal(others)


def test_vectors_that_do_not_belong_together_are_taken_back(together):
    """One peer is at Q and the other at P: both see it, and nothing of their work is lost."""
    _, peers = swarm_of(2)
    _, exact = swarm_of(2, rank=None)
    for pair in (peers, exact):
        for peer in pair:
            peer.step()
    together(
        *[lambda p=p: (p.opt._attach(), p.opt._begin(waits=True), p.opt._wait()) for p in peers]
    )
    assert [p.strategy.halfway for p in peers] == [True, True]
    peers[1].strategy._take_back(peers[1].strategy._low_rank)
    before = peers[0].at()
    together(*[lambda p=p: (p.opt._begin(waits=True), p.opt._wait()) for p in peers])
    assert [p.strategy.halfway for p in peers] == [False, False]
    assert [p.strategy.samples for p in peers] == [1.0, 1.0]
    assert torch.equal(peers[0].at(), before)
    average(peers, together)
    average(exact, together)
    assert all_equal(peers)
    torch.testing.assert_close(peers[0].at(), exact[0].at(), rtol=1e-4, atol=1e-5)


def test_a_peer_without_samples_keeps_what_it_has_not_given(together):
    _, peers = swarm_of(2, rank=1)
    for peer in peers:
        peer.step(batch=8)
    average(peers, together)
    power = peers[1].strategy._low_rank._power
    kept = power.state_dict()["residual"]
    assert kept.abs().max() > 0
    peers[0].step(batch=8)
    average(peers, together)
    assert all_equal(peers)
    assert torch.equal(power.state_dict()["residual"], kept)


def test_a_state_between_the_two_averagings_goes_on(together):
    _, peers = swarm_of(2, rank=1)
    for peer in peers:
        peer.step(batch=8)
    together(
        *[lambda p=p: (p.opt._attach(), p.opt._begin(waits=True), p.opt._wait()) for p in peers]
    )
    assert all(p.strategy.halfway for p in peers)
    _, copies = swarm_of(2, rank=1)
    for peer, copy in zip(peers, copies, strict=True):
        copy.opt.load_state_dict(peer.opt.state_dict())
        copy.model.load_state_dict(peer.model.state_dict())
    for group in (peers, copies):
        average(group, together)
        for peer in group:
            peer.random.manual_seed(3)
            peer.step(batch=8)
        average(group, together)
        assert all_equal(group)
    assert torch.equal(peers[0].at(), copies[0].at())


def test_a_newcomer_with_a_state_between_the_two_takes_the_same_step(together):
    """As state transfer leaves it: it has given nothing to the mean of P, and gives no Q."""
    swarm, peers = swarm_of(3, rank=1)
    swarm.here.remove(2)
    *old, newcomer = peers
    for peer in old:
        peer.step(batch=8)
    together(*[lambda p=p: (p.opt._attach(), p.opt._begin(waits=True), p.opt._wait()) for p in old])
    newcomer.opt.load_state_dict(old[0].opt.state_dict())
    newcomer.model.load_state_dict(old[0].model.state_dict())
    newcomer.strategy.taken_over()
    newcomer.opt._standing.next_epoch = swarm.epoch
    swarm.here.append(2)
    assert newcomer.strategy.halfway
    for _ in range(3):
        average(peers, together)
        assert all_equal(peers)
        for peer in peers:
            peer.step(batch=8)
    assert newcomer.strategy.samples == 8


@pytest.mark.parametrize("options", [{"powersgd_rank": 0}, {"powersgd_rank": 2, "codec": "int8"}])
def test_settings_that_make_no_sense_are_refused(options):
    with pytest.raises(ConfigError, match="powersgd_rank"):
        GradientAveraging(64, **options)
