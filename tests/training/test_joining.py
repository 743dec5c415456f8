"""What a joiner does with a state and the means since, and what it does not let in."""

from __future__ import annotations

import threading
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import moshpit
from moshpit.tensors.image import Manifest, StateAssembler
from moshpit.training.listening import Listener
from moshpit.training.standing import Standing
from moshpit.training.state import TrainingState
from moshpit.training.strategies import DiLoCo, GradientAveraging, LocalSGD

STRATEGIES = {
    "gradients": GradientAveraging,
    "gradients-clipped": partial(GradientAveraging, max_grad_norm=0.5),
    "gradients-int8": partial(GradientAveraging, codec="int8"),
    "diloco": partial(DiLoCo, overlap=False),
    "diloco-topk": partial(DiLoCo, overlap=False, codec="topk"),
}
BATCH = 8
LAST = 4


class Trainer:
    def __init__(self, peer, strategy, *, seed, start=7):
        torch.manual_seed(start)
        self.model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        self.random = torch.Generator().manual_seed(seed)
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.strategy = strategy
        self.opt = moshpit.Optimizer(inner, peer, strategy, batch_size=BATCH, model=self.model)
        self.states = {}

    def train(self):
        while self.opt.epoch < LAST:
            x = torch.randn(BATCH, 4, generator=self.random)
            (self.model(x) - x[:, :2].sin()).square().mean().backward()
            self.opt.step()
            self.opt.zero_grad()
            epoch = self.opt.epoch
            if epoch not in self.states:
                state = TrainingState.capture(self.opt, self.model, epoch=epoch, generators=False)
                self.states[epoch] = state

    def state(self):
        return TrainingState.capture(self.opt.inner, self.model, epoch=0, generators=False)


def listen(listener, swarm):
    while swarm.epoch < LAST:
        listener.look()
        threading.Event().wait(0.001)
    listener.settle(lambda: None)


def sent(state):
    """The state as another peer gets it."""
    image = state.image(4096)
    assembler = StateAssembler(Manifest.decode(image.manifest.encode()))
    for index in range(len(image)):
        assert assembler.add(index, image.chunk(index))
    return TrainingState.assembled(assembler)


@pytest.mark.parametrize("make", STRATEGIES.values(), ids=STRATEGIES.keys())
@pytest.mark.parametrize("at", [1, 3, LAST])
def test_a_state_and_the_means_since_make_the_same_bytes(make, at, memory_swarm, together):
    swarm = memory_swarm(3)
    one, two, late = (Trainer(peer, make(6 * BATCH), seed=i) for i, peer in enumerate(swarm.peers))
    listener = Listener(swarm.peers[2], late.strategy)
    together(one.train, two.train, lambda: listen(listener, swarm))
    sent(one.states[at]).restore(late.opt, late.model)
    late.strategy.taken_over()
    assert listener.replay(at)
    for p, q, r in zip(*(t.model.parameters() for t in (one, two, late)), strict=True):
        assert torch.equal(p, q)
        assert torch.equal(p, r)
    if isinstance(late.strategy, GradientAveraging):  # then their optimizers are alike, too
        mine, theirs = late.state(), one.state()
        assert mine.image().manifest.hashes == theirs.image().manifest.hashes
    if isinstance(late.strategy, DiLoCo):
        assert late.strategy.outer_steps == one.strategy.outer_steps == LAST
        assert late.strategy.realignments == 0


def test_a_mean_that_was_missed_is_noticed(memory_swarm, together):
    swarm = memory_swarm(3)
    swarm.faults = {(2, 2): "failed"}
    one, two, late = (
        Trainer(peer, GradientAveraging(6 * BATCH), seed=i) for i, peer in enumerate(swarm.peers)
    )
    listener = Listener(swarm.peers[2], late.strategy)
    together(one.train, two.train, lambda: listen(listener, swarm))
    sent(one.states[1]).restore(late.opt, late.model)
    assert not listener.replay(1)


# --- what is not let in ---------------------------------------------------------------------


class OneState:
    """A swarm that is ahead, and whose every state is the same."""

    piece_bytes = 1 << 19
    merging = None

    def merge(self, merges):
        pass

    def __init__(self, state):
        self.fetched = []
        self.state = state
        self.ables = []

    def newest(self, numel, schema=b""):
        return 5, b"x" * 8 + numel.to_bytes(8, "little")

    def able(self, able):
        self.ables.append(able)

    def detach(self):
        pass

    def fetch(self, **how):
        self.fetched.append(how)
        image = self.state.image()
        assembler = StateAssembler(image.manifest)
        for index in range(len(image)):
            assembler.add(index, image.chunk(index))
        state = SimpleNamespace(assembler=assembler, schema=self.newest(1)[1])
        return SimpleNamespace(wait=lambda _: True, state=state, reason="")


def standing_at(trainer, sync, strategy):
    swarm = SimpleNamespace(
        states=sync,
        epoch=5,
        attach=lambda *_, **__: True,
        averaging_due=False,
        clock=time.monotonic,
    )
    return Standing(
        trainer.opt, swarm, strategy, model=trainer.model, checkpoint=None, catch_up=True
    )


@pytest.mark.parametrize("what", ["nan", "shape", "optimizer", "strategy"])
def test_a_state_that_does_not_fit_changes_nothing(what, memory_swarm, caplog):
    donor = Trainer(memory_swarm(1).peers[0], LocalSGD(64), seed=0, start=1)
    trainer = Trainer(memory_swarm(1).peers[0], LocalSGD(64), seed=0)
    if what == "strategy":
        donor = Trainer(memory_swarm(1).peers[0], DiLoCo(64), seed=0, start=1)
    state = TrainingState.capture(donor.opt, donor.model, epoch=5, generators=False)
    match what:
        case "nan":
            state.tensors["model.0.weight"][1, 2] = float("nan")
        case "shape":
            state.tensors["model.0.weight"] = torch.zeros(7, 4)
        case "optimizer":
            state.contents["kind"] = "SGD"
        case _:
            pass
    before = [p.clone() for p in trainer.model.parameters()]
    standing = standing_at(trainer, OneState(state), trainer.strategy)
    assert standing.behind()
    assert not standing.catch_up(lambda: None)
    assert "the swarm's state cannot be used" in caplog.text
    assert not trainer.opt.inner.state, "not half of it either"
    assert all(map(torch.equal, before, trainer.model.parameters()))
    assert not standing.behind(), "it goes on as it is, and takes the next mean"


class Gone(OneState):
    """All who had a state are gone; after some looks somebody is there again, or never."""

    def __init__(self, state, looks=10**9):
        super().__init__(state)
        self.looks = looks
        self.detached = 0

    def newest(self, numel, schema=b""):
        self.looks -= 1
        return super().newest(numel, schema) if self.looks < 0 else (-1, b"")

    def detach(self):
        self.detached += 1

    def confirm(self, epoch):
        pass

    def pause(self, seconds):
        pass


def test_the_last_one_that_has_a_state_goes_on_from_it(memory_swarm, caplog):
    trainer = Trainer(memory_swarm(1).peers[0], GradientAveraging(64), seed=0)
    standing = standing_at(trainer, Gone(None), trainer.strategy)
    standing.next_epoch, standing.drift = 3, "the averaging of epoch 3 did not reach this peer"
    standing.attached = True
    assert standing.behind()
    assert not standing.catch_up(lambda: None), "it goes on with the batch at hand"
    assert "going on from this peer's own state, of epoch 3" in caplog.text
    standing.check()
    assert not standing.behind()


def test_who_has_no_state_waits_for_somebody_who_has(memory_swarm, caplog):
    peers = memory_swarm(2).peers
    donor, trainer = (Trainer(peer, GradientAveraging(64), seed=0) for peer in peers)
    state = TrainingState.capture(donor.opt, donor.model, epoch=5, generators=False)
    standing = standing_at(trainer, Gone(state, looks=20), trainer.strategy)
    standing.attached = True
    asked = []
    assert standing.catch_up(lambda: asked.append(1))
    assert "all who had the state of epoch 5 are gone: waiting" in caplog.text
    assert "moshpit run --resume" in caplog.text
    assert len(asked) > 10, "the process can be ended meanwhile"
    assert standing.next_epoch == 5


def test_memory_is_bounded_by_the_model(memory_swarm):
    trainer = Trainer(memory_swarm(1).peers[0], LocalSGD(64), seed=0)
    state = TrainingState.capture(trainer.opt, trainer.model, epoch=5, generators=False)
    sync = OneState(state)
    standing = standing_at(trainer, sync, trainer.strategy)
    assert standing.catch_up(lambda: None)
    assert standing.next_epoch == 5
    (how,) = sync.fetched
    own = sum(4 * p.numel() for p in trainer.model.parameters())
    assert own < how["size_max"] <= 8 * own + (16 << 20)


# --- what is given --------------------------------------------------------------------------


class Asked(OneState):
    """Somebody waits for a state; what is given is kept."""

    wanted_s = 9.0

    def __init__(self):
        super().__init__(None)
        self.given = []

    def give(self, make):
        self.given.append(make().manifest)


@pytest.mark.parametrize("what", ["steady", "torn"])
def test_a_donor_gives_the_state_of_the_boundary_and_nothing_torn(what, memory_swarm, caplog):
    caplog.set_level("INFO")
    trainer = Trainer(memory_swarm(1).peers[0], LocalSGD(64), seed=0)
    wide = nn.Linear(4, 20_000)
    inner = torch.optim.AdamW(wide.parameters())
    wide(torch.randn(8, 4)).square().sum().backward()
    inner.step()
    trainer.model, trainer.opt = wide, inner
    sync = Asked()
    standing = standing_at(trainer, sync, trainer.strategy)
    at_boundary = TrainingState.capture(inner, wide, epoch=5, generators=False).image(1 << 19)
    waits = []
    standing.serve(5, boundary=True)
    standing.serve(5, boundary=True)
    assert not sync.given, "training computes, and a thread copies"
    if what == "torn":
        with torch.no_grad():
            wide.weight.clamp_(min=0.0)
    standing.between_steps(waits.append)
    assert len(waits) == 1, "the wait is noted"
    if what == "steady":
        assert [given.hashes for given in sync.given] == [at_boundary.manifest.hashes]
        standing.between_steps(waits.append)
        assert len(sync.given) == len(waits) == 1
        return
    assert not sync.given
    assert "snapshots are taken at once from now on" in caplog.text
    now = TrainingState.capture(inner, wide, epoch=5, generators=False).image(1 << 19)
    standing.serve(5, boundary=True)
    assert [given.hashes for given in sync.given] == [now.manifest.hashes]


def test_a_snapshot_of_the_last_step_is_given_before_training_is_over(memory_swarm):
    trainer = Trainer(memory_swarm(1).peers[0], LocalSGD(64), seed=0)
    sync = Asked()
    standing = standing_at(trainer, sync, trainer.strategy)
    standing.serve(5, boundary=True)
    standing.finished()
    assert len(sync.given) == 1
    assert sync.ables == [False]
