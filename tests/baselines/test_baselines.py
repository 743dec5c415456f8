"""The conformance suite of the baselines, and what each promises beyond it."""

from __future__ import annotations

import math
import threading
from copy import deepcopy

import pytest
import torch
from torch import nn

import moshpit
from moshpit.baselines import (
    ADPSGD,
    DPSGD,
    SGP,
    AllReduceLocalSGD,
    AllReduceSGD,
    ParameterServer,
)
from moshpit.errors import ConfigError, WaitTimeoutError
from moshpit.training.optimizer import Optimizer

BASELINES = {
    "all-reduce": AllReduceSGD,
    "local-all-reduce": lambda n, **how: AllReduceLocalSGD(n, period=3, **how),
    "sgp": SGP,
    "sgp-overlap": lambda n, **how: SGP(n, overlap=True, **how),
    "dpsgd": DPSGD,
    "adpsgd": ADPSGD,
    "adpsgd-waiting": lambda n, **how: ADPSGD(n, overlap=False, **how),
    "adpsgd-free": lambda n, **how: ADPSGD(n, atomic=False, **how),
    "server": ParameterServer,
    "server-async": lambda n, **how: ParameterServer(n, asynchronous=True, **how),
}
IN_STEP = [k for k in BASELINES if not k.startswith(("adpsgd", "server-async"))]
FREE = [k for k in BASELINES if k not in IN_STEP]
NUMEL = 6

every = pytest.mark.parametrize("kind", BASELINES)


def of(kind, peers, per_epoch=1e9, patience_s=15.0):
    return BASELINES[kind](per_epoch, peers=peers, patience_s=patience_s)


class Hill(nn.Module):
    """Each peer has a quadratic of its own; the sum of all has one lowest point."""

    def __init__(self, seed, start=0.0, steepness=1.0):
        super().__init__()
        rng = torch.Generator().manual_seed(seed)
        self.a = steepness * (0.5 + torch.rand(NUMEL, generator=rng))
        self.c = torch.randn(NUMEL, generator=rng)
        self.first = nn.Parameter(torch.full((2,), start))
        self.second = nn.Parameter(torch.full((2, 2), start))

    def x(self):
        return torch.cat([self.first, self.second.view(-1)])

    def forward(self):
        return 0.5 * (self.a * (self.x() - self.c).square()).sum()


class Trainer:
    def __init__(self, peer, strategy, seed, *, lr=0.1, start=0.0, momentum=0.0, decay=1.0):
        self.model = Hill(seed, start)
        inner = torch.optim.SGD(self.model.parameters(), lr=lr, momentum=momentum)
        self.strategy = strategy
        self.opt = Optimizer(inner, peer, strategy, batch_size=2)
        self.scheduler = torch.optim.lr_scheduler.ExponentialLR(self.opt, decay)
        self.steps = 0

    def step(self):
        self.model().backward()
        self.opt.step()
        self.opt.zero_grad()
        self.scheduler.step()
        self.steps += 1

    def run(self, steps):
        for _ in range(steps):
            self.step()

    def train(self, steps):
        self.run(steps)
        return self.opt.finish()

    def x(self):
        return self.model.x().detach().clone()


def trainers(swarm, kind, **how):
    size = len(swarm.peers)
    return [Trainer(p, of(kind, size), seed=i, **how) for i, p in enumerate(swarm.peers)]


def march(group, kind, steps, together):
    """Let all make steps: those that wait for each other at once, the others in turns, so that
    they are equally fast."""
    if kind in FREE:
        for _ in range(steps):
            for t in group:
                t.step()
    else:
        together(*[lambda t=t: t.run(steps) for t in group])


def finish(group, together):
    together(*[t.opt.finish for t in group])
    assert len({tuple(t.x().tolist()) for t in group}) == 1


def regret(group, x=None):
    """How much of what could be gained is not."""

    def height(x):
        return sum(0.5 * (t.model.a * (x - t.model.c).square()).sum() for t in group)

    best = height(lowest(group))
    x = group[0].x() if x is None else x
    return ((height(x) - best) / (height(torch.zeros(NUMEL)) - best)).item()


def lowest(group):
    a = torch.stack([t.model.a for t in group])
    c = torch.stack([t.model.c for t in group])
    return (a * c).sum(0) / a.sum(0)


# --- what all promise ---------------------------------------------------------------------


@every
def test_they_find_the_lowest_point_of_the_sum(kind, parcel_swarm, together):
    group = trainers(parcel_swarm(4), kind, decay=0.97)
    assert not torch.allclose(lowest(group), group[0].model.c, atol=0.2)
    march(group, kind, 60, together)
    finish(group, together)
    assert regret(group) < 0.01


@every
def test_alone_it_is_the_wrapped_optimizer(kind, parcel_swarm):
    trainer = Trainer(parcel_swarm(1).peers[0], of(kind, 1), 0, momentum=0.9)
    plain = Hill(0)
    inner = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        trainer.step()
        plain().backward()
        inner.step()
        inner.zero_grad()
        torch.testing.assert_close(trainer.x(), plain.x().detach())
    trainer.opt.finish()
    torch.testing.assert_close(trainer.x(), plain.x().detach())


@every
@pytest.mark.parametrize("size", [2, 5])
def test_without_gradients_all_come_to_the_mean_or_to_one_model(kind, size, parcel_swarm, together):
    swarm = parcel_swarm(size)
    group = [
        Trainer(p, of(kind, size), seed=i, lr=0.0, start=float(i))
        for i, p in enumerate(swarm.peers)
    ]
    together(*[lambda t=t: t.run(40) for t in group])
    spread = torch.stack([t.x() for t in group]).var(0).max().item()
    together(*[t.opt.finish for t in group])
    mean = (size - 1) / 2
    expected = {"all-reduce": 0.0, "local-all-reduce": 0.0, "server": 0.0, "server-async": 0.0}
    for t in group:
        torch.testing.assert_close(t.x(), torch.full((NUMEL,), expected.get(kind, mean)))
    # Who is asynchronous may have made all its steps before the others began.
    begun = torch.arange(size).float().var().item()
    assert spread < (begun if kind.startswith("adpsgd") else 0.05)


@every
@pytest.mark.parametrize("victim", [0, 2])
def test_a_dead_peer_does_not_end_the_others(kind, victim, parcel_swarm, together):
    swarm = parcel_swarm(4)
    group = trainers(swarm, kind, decay=0.97)
    left = [t for t in group if t is not group[victim]]
    if kind in FREE:
        march(group, kind, 5, together)
        swarm.kill(victim)
        march(left, kind, 45, together)
    else:

        def die():
            group[victim].run(5)
            swarm.kill(victim)

        # Who was one step ahead when it died ends one step earlier, and says so.
        together(die, *[lambda t=t: t.train(50) for t in left])
        assert all(t.strategy.regroups >= 1 for t in left)
    if kind in FREE:
        finish(left, together)
    assert len({tuple(t.x().tolist()) for t in left}) == 1
    assert regret(left) < 0.1


@pytest.mark.parametrize("kind", IN_STEP)
def test_who_waits_for_a_late_peer_goes_on_when_it_comes(kind, parcel_swarm, together):
    swarm = parcel_swarm(3)
    group = trainers(swarm, kind)
    late, go = group[2], threading.Event()
    others_done = threading.Event()

    def dawdle():
        late.run(4)
        assert not others_done.wait(0.3), "they did not wait"
        go.set()
        late.train(26)

    def train(t):
        t.run(30)
        others_done.set()
        t.opt.finish()

    together(dawdle, *[lambda t=t: train(t) for t in group[:2]])
    assert go.is_set()
    assert torch.equal(group[0].x(), late.x())


@pytest.mark.parametrize("kind", FREE)
def test_nobody_waits_for_a_late_peer_where_nobody_has_to(kind, parcel_swarm, together):
    swarm = parcel_swarm(4)
    group = trainers(swarm, kind)
    others = [threading.Event() for _ in range(3)]

    def dawdle():
        group[3].run(4)
        assert all(event.wait(60) for event in others)
        group[3].train(10)

    def train(t, event):
        t.run(30)
        event.set()
        t.opt.finish()

    together(dawdle, *[lambda t=t, e=e: train(t, e) for t, e in zip(group, others, strict=False)])
    assert torch.equal(group[0].x(), group[3].x())


@every
def test_one_that_comes_later_takes_part(kind, parcel_swarm, together):
    swarm = parcel_swarm(3)
    group = trainers(swarm, kind, momentum=0.5)
    march(group, kind, 10, together)
    newcomer = Trainer(swarm.add(), of(kind, 1), seed=3, start=9.0, momentum=0.5)
    everybody = [*group, newcomer]
    if kind in FREE:
        march(everybody, kind, 40, together)
    else:  # it may be ready a little later, and end a little later
        together(*[lambda t=t: t.train(40) for t in everybody])
        assert all(t.strategy.regroups >= 1 for t in group)
    if kind in FREE:
        finish(everybody, together)
    assert regret(everybody) < 0.5 * regret(everybody, lowest(group))


@every
def test_a_batch_that_is_not_finite_is_left_out_and_stalls_nobody(kind, parcel_swarm, together):
    swarm = parcel_swarm(3)
    group = trainers(swarm, kind)

    def bad(t):
        t.run(3)
        for _ in range(2):
            t.model().backward()
            t.model.first.grad[0] = math.nan
            t.opt.step()
            t.opt.zero_grad()
        t.train(15)

    together(lambda: bad(group[1]), *[lambda t=t: t.train(20) for t in (group[0], group[2])])
    assert torch.equal(group[0].x(), group[1].x())
    assert group[0].x().isfinite().all()
    assert group[1].strategy.skipped_batches == 2


@every
def test_the_same_seed_gives_the_same_bytes(kind, parcel_swarm, together):
    def play():
        group = trainers(parcel_swarm(4), kind, momentum=0.5)
        march(group, kind, 20, together)
        return torch.stack([t.x() for t in group])

    assert torch.equal(play(), play())


@every
def test_a_saved_state_goes_on_as_if_never_stopped(kind, parcel_swarm, together):
    going = trainers(parcel_swarm(3), kind, momentum=0.5)
    march(going, kind, 7, together)
    resumed = trainers(parcel_swarm(3), kind, momentum=0.5)
    for old, new in zip(going, resumed, strict=True):
        saved = deepcopy(old.opt.state_dict())  # first: it takes in what is on its way
        new.model.load_state_dict(deepcopy(old.model.state_dict()))
        new.opt.load_state_dict(saved)
        assert new.opt.epoch == old.opt.epoch
    march(going, kind, 8, together)
    march(resumed, kind, 8, together)
    for old, new in zip(going, resumed, strict=True):
        torch.testing.assert_close(old.x(), new.x())


@every
def test_epochs_count_the_samples_of_all(kind, parcel_swarm, together):
    swarm = parcel_swarm(3)
    group = [Trainer(p, of(kind, 3, per_epoch=36), seed=i) for i, p in enumerate(swarm.peers)]
    together(*[lambda t=t: t.run(5) for t in group])
    assert {t.opt.epoch for t in group} == {0}
    together(*[lambda t=t: t.run(1) for t in group])
    assert {t.opt.epoch for t in group} == {1}  # 3 peers, 6 steps of 2
    together(*[t.opt.finish for t in group])
    assert {t.opt.epoch for t in group} == {1}


def test_settings_that_make_no_sense_are_refused():
    for wrong in (
        lambda: SGP(0),
        lambda: SGP(8, peers=0),
        lambda: DPSGD(8, patience_s=0),
        lambda: ADPSGD(8, patience_s=math.inf),
        lambda: AllReduceLocalSGD(8, period=0),
    ):
        with pytest.raises(ConfigError, match="give"):
            wrong()


def test_a_swarm_without_parcels_is_refused(memory_swarm_without_parcels):
    with pytest.raises(ConfigError, match="single peers"):
        Trainer(memory_swarm_without_parcels, SGP(8), 0)


def test_they_are_found_from_the_package():
    assert moshpit.baselines.SGP is SGP


@every
def test_waiting_for_peers_that_never_come_ends(kind, parcel_swarm):
    peer = parcel_swarm(1).peers[0]
    with pytest.raises(WaitTimeoutError, match=r"1 of 2 workers that train the same"):
        Trainer(peer, of(kind, 2, patience_s=0.3), 0).step()


def test_a_batch_that_a_grad_scaler_leaves_out_is_a_step_all_the_same(parcel_swarm, together):
    a, b = trainers(parcel_swarm(2), "all-reduce")

    def overflow():
        a.model().backward()
        a.opt.found_inf = torch.tensor(1.0)
        a.opt.step()
        del a.opt.found_inf
        a.opt.zero_grad()
        a.train(3)

    together(overflow, lambda: b.train(4))
    assert torch.equal(a.x(), b.x())
    assert a.opt.stats.skipped == 1


# --- each ---------------------------------------------------------------------------------


def test_all_reduce_is_one_machine_with_the_whole_batch(parcel_swarm, together):
    group = trainers(parcel_swarm(3), "all-reduce", momentum=0.9)
    hills = [Hill(i) for i in range(3)]
    inner = torch.optim.SGD(hills[0].parameters(), lr=0.1, momentum=0.9)
    together(*[lambda t=t: t.run(10) for t in group])
    for _ in range(10):
        for hill in hills[1:]:
            hill.load_state_dict(hills[0].state_dict())
        loss = sum(h() for h in hills) / 3
        loss.backward()
        for hill in hills[1:]:
            for mine, theirs in zip(hills[0].parameters(), hill.parameters(), strict=True):
                mine.grad += theirs.grad
            hill.zero_grad()
        inner.step()
        inner.zero_grad()
    for t in group:
        torch.testing.assert_close(t.x(), hills[0].x().detach())
        assert torch.equal(t.x(), group[0].x())


def test_all_reduce_weighs_by_samples(parcel_swarm, together):
    a, b = trainers(parcel_swarm(2), "all-reduce", lr=1.0)

    def step(t, samples):
        t.model().backward()
        t.opt.step(samples=samples)

    expected = torch.zeros(NUMEL)
    for t, samples in ((a, 6), (b, 2)):
        expected -= samples / 8 * t.model.a * (t.model.x().detach() - t.model.c)
    together(lambda: step(a, 6), lambda: step(b, 2))
    torch.testing.assert_close(a.x(), expected)


def test_local_all_reduce_averages_every_period(parcel_swarm, together):
    group = trainers(parcel_swarm(3), "local-all-reduce")
    together(*[lambda t=t: t.run(2) for t in group])
    assert not torch.allclose(group[0].x(), group[1].x())
    together(*[lambda t=t: t.run(1) for t in group])
    assert torch.equal(group[0].x(), group[1].x())


@pytest.mark.parametrize("size", [2, 3, 4, 7, 8])
@pytest.mark.parametrize("overlap", [False, True])
def test_push_sum_conserves_its_mass(size, overlap, parcel_swarm, together):
    swarm = parcel_swarm(size)
    group = [
        Trainer(p, SGP(1e9, overlap=overlap, peers=size), seed=i, lr=0.0, start=float(i))
        for i, p in enumerate(swarm.peers)
    ]
    together(*[lambda t=t: t.run(9) for t in group])
    mass = sum(t.strategy.weight for t in group)
    assert mass == pytest.approx(size * 2 / 3 if overlap else size, rel=0.01)
    for t in group:  # what is on its way is taken in
        t.strategy.snapshot()
    mass = sum(t.strategy.weight for t in group)
    sums = sum(t.strategy.numerator for t in group)
    assert mass == pytest.approx(size)
    torch.testing.assert_close(sums, torch.full((NUMEL,), size * (size - 1) / 2))
    if size in (2, 4, 8) and not overlap:  # exact after log2(n) steps
        assert all(t.strategy.weight == 1.0 for t in group)
        torch.testing.assert_close(group[0].x(), torch.full((NUMEL,), (size - 1) / 2))


def test_dpsgd_mixes_with_both_neighbours(parcel_swarm, together):
    swarm = parcel_swarm(4)
    group = [
        Trainer(p, DPSGD(1e9, peers=4), seed=i, lr=0.0, start=float(i * i))
        for i, p in enumerate(swarm.peers)
    ]
    together(*[lambda t=t: t.run(1) for t in group])
    expected = [(0 + 1 + 9) / 3, (0 + 1 + 4) / 3, (1 + 4 + 9) / 3, (4 + 9 + 0) / 3]
    for t, value in zip(group, expected, strict=True):
        torch.testing.assert_close(t.x(), torch.full((NUMEL,), value))


def test_dpsgd_takes_its_gradient_before_it_mixes(parcel_swarm, together):
    a, b = trainers(parcel_swarm(2), "dpsgd", lr=0.5, start=1.0)
    a.model.first.data.fill_(3.0)
    start_a, start_b = a.x(), b.x()
    together(lambda: a.run(1), lambda: b.run(1))
    gradient = a.model.a * (start_a - a.model.c)
    torch.testing.assert_close(a.x(), (start_a + start_b) / 2 - 0.5 * gradient)


def test_adpsgd_pairs_an_active_peer_with_a_passive_one_at_once(parcel_swarm):
    swarm = parcel_swarm(2)
    active, passive = trainers(swarm, "adpsgd-free", lr=0.0)
    active.model.first.data.fill_(4.0)
    passive.step()
    before = passive.strategy._x.clone()
    active.step()
    mean = (before[0] + 4.0) / 2
    assert active.x()[0] == passive.strategy._x[0] == mean
    assert passive.x()[0] == before[0], "what it computes with changes in its own step only"
    assert (active.strategy.averagings, passive.strategy.averagings) == (1, 1)


def test_adpsgd_applies_stale_gradients_to_the_newest_parameters(parcel_swarm):
    swarm = parcel_swarm(2)
    active, passive = trainers(swarm, "adpsgd-free", lr=0.5)
    passive.step()
    active.step()
    passive.model().backward()  # at its own parameters
    stale = passive.model.a * (passive.x() - passive.model.c)
    active.step()  # moves the passive one's parameters meanwhile
    newest = passive.strategy._x.clone()
    assert not torch.equal(newest, passive.x())
    passive.opt.step()
    torch.testing.assert_close(passive.x(), newest - 0.5 * stale)


def test_adpsgd_gives_up_a_partner_that_is_dead_or_silent(parcel_swarm):
    swarm = parcel_swarm(3)
    group = [
        Trainer(p, ADPSGD(1e9, atomic=False, patience_s=600.0), i)
        for i, p in enumerate(swarm.peers)
    ]
    swarm.peers[1].parcels.handlers.clear()  # it is there, but silent
    group[0].step()
    pending = group[0].strategy._pending
    assert pending is not None
    group[0].step()
    assert group[0].strategy._pending is pending
    group[0].strategy._asked_at -= 601.0
    group[0].step()
    assert group[0].strategy._pending is not pending
    swarm.kill(1)
    group[0].step()
    assert group[0].strategy._pending is None or group[0].strategy._pending[1] != pending[1]


def test_atomic_averaging_sets_both_to_one_mean_before_the_next_step(parcel_swarm):
    swarm = parcel_swarm(2)
    active, passive = trainers(swarm, "adpsgd", lr=0.5)
    passive.step()
    held = passive.strategy._x.clone()
    active.step()
    sent = active.strategy._pending[2].clone()
    torch.testing.assert_close(active.x(), sent)  # it stands still while the averaging is under way
    mean = (held + sent) / 2
    torch.testing.assert_close(passive.strategy._x, mean)
    active.model().backward()  # meanwhile, at what it has sent
    stale = active.model.a * (sent - active.model.c)
    active.opt.step()
    torch.testing.assert_close(active.x(), mean - 0.5 * stale)
    assert active.strategy._pending is not None  # the next one


def test_an_atomic_averaging_with_the_silent_or_dead_is_given_up(parcel_swarm):
    swarm = parcel_swarm(2)
    group = [Trainer(p, ADPSGD(1e9, patience_s=0.05), i) for i, p in enumerate(swarm.peers)]
    swarm.peers[1].parcels.handlers.clear()  # it is there, but silent
    for _ in range(3):
        group[0].step()
    assert group[0].strategy.averagings == 0
    assert group[0].opt.waited_s > 0
    swarm.kill(1)
    group[0].step()
    group[0].step()
    assert group[0].strategy._pending is None


def test_the_asynchronous_server_makes_a_step_with_each_gradient(parcel_swarm):
    swarm = parcel_swarm(3)
    group = trainers(swarm, "server-async")
    for t in group:
        t.step()
    server = group[0].strategy
    assert server.applied == 3
    x = torch.zeros(NUMEL)
    for t in group:  # each at the parameters that it had last: all began with zeros
        x -= 0.1 * t.model.a * (0.0 - t.model.c)
    torch.testing.assert_close(group[2].x(), x)
    assert not torch.allclose(group[1].x(), x), "it has what was new when it asked"


def test_the_server_follows_the_learning_rate(parcel_swarm):
    swarm = parcel_swarm(2)
    server, worker = trainers(swarm, "server-async", decay=0.5)
    for _ in range(3):
        server.step()
        worker.step()
    assert server.opt.param_groups[0]["lr"] == pytest.approx(0.0125)
    assert server.strategy._held.param_groups[0]["lr"] == server.opt.param_groups[0]["lr"]
