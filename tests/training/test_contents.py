"""What a joiner gets: any optimizer, any scheduler, the strategy, over a real transfer.

Donor and joiner are two desks on a transport in memory. Afterwards both train on with the same
data, and must stay the same to the bit.
"""

from __future__ import annotations

import asyncio
from collections import deque

import numpy as np
import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import moshpit
from moshpit.errors import StateError
from moshpit.runtime.states import Fetching
from moshpit.training.state import TrainingState
from moshpit.training.tree import TreeWriter, read_tree
from tests.runtime.test_statesync import PIECE, SCHEMA, Desk, Net


@pytest.fixture(autouse=True)
def one_thread():
    """Small tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Donor(Desk):
    """Gives one state."""

    def __init__(self, net, transport, state):
        super().__init__(net, transport)
        self.state = state
        self.desk.able(True)

    def on_message(self, peer, message):
        self.desk.handle(peer, message)
        if self.desk.wanted_since is not None:
            self.desk.give(lambda: self.state.image(PIECE), SCHEMA)


def transferred(state):
    """The state as a joiner gets it."""

    async def work():
        net = Net()
        donor, joiner = await Donor.start(net, state), await Desk.start(net)
        try:
            fetching = Fetching()
            joiner.desk.fetch([donor.peer], fetching, 1 << 24, 0)
            async with asyncio.timeout(60):
                while not fetching.wait(0):
                    await asyncio.sleep(0.002)
            assert fetching.state is not None, fetching.reason
            return TrainingState.assembled(fetching.state.assembler)
        finally:
            for desk in (donor, joiner):
                await desk.desk.close()
                await desk.transport.close()

    return asyncio.run(work())


class Odd(torch.optim.Optimizer):
    """State that is nothing like the parameters: factored, counted, masked, nested."""

    def __init__(self, parameters, lr=0.01):
        super().__init__(parameters, {"lr": lr, "mode": "odd", "betas": (0.9, [0.99, 1])})

    @torch.no_grad()
    def step(self, closure=None):
        common = self.state.setdefault("common", {"steps": 0, "names": []})
        common["steps"] += 1
        common["names"] = [*common["names"], f"step {common['steps']}"][-3:]
        for group in self.param_groups:
            for p in group["params"]:
                self._one(group, p)

    def _one(self, group, p):
        state = self.state[p]
        if not state:
            state["step"] = 0
            state["count"] = torch.zeros((), dtype=torch.int64)
            state["mask"] = torch.ones(p.shape, dtype=torch.bool)
            state["moment"] = torch.zeros(p.shape, dtype=torch.bfloat16)
            state["row"] = torch.zeros(p.shape[:1], dtype=torch.float64)
            state["history"] = deque(maxlen=2)
            state["notes"] = {"kind": "text", "best": float("inf"), "last": (None, 1, "a")}
            state["seen"] = {3, 1}
            state["raw"] = b"\x00\xff"
            state["nested"] = [{"where": torch.zeros(3, dtype=torch.int32), "t": (1.5, True)}]
            state["turn"] = 1 + 2j
            state["array"] = np.zeros(2)
            state["dtype"] = torch.bfloat16
        state["step"] += 1
        state["count"] += 1
        state["mask"] = p.grad.abs() > p.grad.abs().mean() / 2
        state["moment"] = (0.9 * state["moment"].float() + p.grad).to(state["dtype"])
        state["row"].mul_(0.9).add_(p.grad.double().reshape(p.shape[0], -1).square().mean(1))
        state["history"].append(float(p.grad.sum()))
        state["notes"]["best"] = min(state["notes"]["best"], state["history"][-1])
        state["notes"]["kind"] = f"{state['notes']['kind'][:4]} {state['step']}"
        state["seen"].add(int(state["count"]))
        state["nested"][0]["where"][0] += 1
        state["turn"] *= 1j
        state["array"] += abs(state["turn"])
        scale = (state["row"].sqrt() + 1e-3).float().reshape(-1, *[1] * (p.dim() - 1))
        jump = float(np.mean(state["array"])) * 1e-6 + len(state["seen"]) * 1e-6
        update = state["moment"].float() * state["mask"] / scale + jump * sum(state["history"])
        p.sub_(group["lr"] * update)


SGD, Adam = torch.optim.SGD, torch.optim.Adam
OPTIMIZERS = {
    "sgd": lambda ps: SGD(ps, lr=0.05),
    "momentum": lambda ps: SGD(ps, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda ps: Adam(ps, lr=0.01),
    "amsgrad": lambda ps: Adam(ps, lr=0.01, amsgrad=True),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.01, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.01, fused=True),
    "tensor-lr": lambda ps: Adam(ps, lr=torch.tensor(0.01)),
    "adafactor": lambda ps: torch.optim.Adafactor(ps, lr=0.01),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=0.01),
    "adadelta": torch.optim.Adadelta,
    "adamax": torch.optim.Adamax,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "rprop": torch.optim.Rprop,
    "asgd": torch.optim.ASGD,
    "lbfgs": lambda ps: torch.optim.LBFGS(ps, max_iter=3),
    "odd": Odd,
}


class Work:
    """A model, an optimizer and data that goes on from a seed."""

    def __init__(self, make, *, start, dtype=torch.float32):
        torch.manual_seed(start)
        self.model = nn.Sequential(
            nn.Linear(5, 7, dtype=dtype), nn.Tanh(), nn.BatchNorm1d(7, dtype=dtype),
            nn.Linear(7, 3, dtype=dtype), nn.Unflatten(1, (3, 1)), nn.Conv1d(3, 2, 1, dtype=dtype),
        )  # fmt: skip
        self.dtype = dtype
        self.optimizer = make(self.model.parameters())

    def train(self, seed, steps):
        random = torch.Generator().manual_seed(seed)
        for _ in range(steps):
            x = torch.randn(8, 5, generator=random).to(self.dtype)

            def closure(x=x):
                self.optimizer.zero_grad()
                loss = (self.model(x).float().squeeze(-1) - x[:, :2].float()).square().mean()
                loss.backward()
                return loss

            if isinstance(self.optimizer, torch.optim.LBFGS):
                self.optimizer.step(closure)
            else:
                closure()
                self.optimizer.step()

    def state(self, added=None):
        return TrainingState.capture(
            self.optimizer, self.model, epoch=5, generators=False, added=added
        )

    def digest(self):
        return self.state().image().manifest.digest


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh", "stepped"])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS.keys())
def test_a_joiner_goes_on_as_its_donor_would(make, fresh):
    donor, joiner = Work(make, start=1), Work(make, start=2)
    donor.train(seed=3, steps=4)
    if not fresh:
        joiner.train(seed=9, steps=2)
    state = transferred(donor.state())
    state.restore(joiner.optimizer, joiner.model)
    assert joiner.digest() == donor.digest()
    for work in (donor, joiner):
        work.train(seed=4, steps=4)
    assert joiner.digest() == donor.digest()
    for p, q in zip(donor.model.parameters(), joiner.model.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("name", ["odd", "adam", "adafactor"])
def test_also_with_parameters_of_half_precision(name):
    make = OPTIMIZERS[name]
    donor, joiner = (Work(make, start=start, dtype=torch.bfloat16) for start in (1, 2))
    donor.train(seed=3, steps=4)
    transferred(donor.state()).restore(joiner.optimizer, joiner.model)
    for work in (donor, joiner):
        work.train(seed=4, steps=4)
    assert joiner.digest() == donor.digest()


def test_nothing_of_an_odd_state_changes_its_type():
    donor, joiner = Work(Odd, start=1), Work(Odd, start=2)
    donor.train(seed=3, steps=2)
    transferred(donor.state()).restore(joiner.optimizer, joiner.model)
    kinds = {
        key: type(value) for key, value in donor.optimizer.state[donor.model[0].weight].items()
    }
    got = joiner.optimizer.state[joiner.model[0].weight]
    assert {key: type(value) for key, value in got.items()} == kinds
    assert got["history"].maxlen == 2
    assert got["nested"][0]["where"].dtype == torch.int32
    assert got["count"].dtype == torch.int64
    assert got["mask"].dtype == torch.bool
    assert got["notes"] == donor.optimizer.state[donor.model[0].weight]["notes"]
    assert joiner.optimizer.state["common"] == {"steps": 2, "names": ["step 1", "step 2"]}


SCHEDULES = {
    "steps": lambda o: lr_scheduler.StepLR(o, 3),
    "milestones": lambda o: lr_scheduler.MultiStepLR(o, [2, 5, 5, 8]),
    "one-cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=40),
    "cosine": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 4, 2),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "sequence": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [3]
    ),
    "chain": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda epoch: 0.9**epoch),
}


@pytest.mark.parametrize("make", SCHEDULES.values(), ids=SCHEDULES.keys())
def test_a_schedule_goes_on(make):
    def rates(work, schedule):
        found = []
        for loss in (3.0, 2.0, 2.5, 2.5, 2.5, 2.5, 1.0):
            plateau = isinstance(schedule, lr_scheduler.ReduceLROnPlateau)
            schedule.step(loss) if plateau else schedule.step()
            found.append(work.optimizer.param_groups[0]["lr"])
        return found

    donor, joiner = Work(OPTIMIZERS["adam"], start=1), Work(OPTIMIZERS["adam"], start=2)
    schedules = [make(work.optimizer) for work in (donor, joiner)]
    donor.train(seed=3, steps=1)
    rates(donor, schedules[0])
    state = transferred(donor.state({"schedule": schedules[0]}))
    state.restore(joiner.optimizer, joiner.model, added={"schedule": schedules[1]})
    assert rates(joiner, schedules[1]) == rates(donor, schedules[0])


@pytest.mark.parametrize("codec", ["float32", "topk"])
def test_the_strategys_state_comes_along_and_what_is_the_donors_own_does_not(
    codec, memory_swarm, together
):
    def trainer(peer, start):
        work = Work(OPTIMIZERS["momentum"], start=start)
        strategy = moshpit.DiLoCo(32, overlap=False, codec=codec)
        wrapped = moshpit.Optimizer(work.optimizer, peer, strategy, batch_size=8, model=work.model)
        work.inner, work.optimizer = work.optimizer, wrapped
        return work, strategy

    swarm = memory_swarm(2)
    (one, outer), (two, _) = (trainer(peer, 1) for peer in swarm.peers)

    def train(work):
        while work.optimizer.epoch < 3:
            work.train(seed=work.optimizer.epoch, steps=1)

    together(lambda: train(one), lambda: train(two))
    late, late_outer = trainer(memory_swarm(1).peers[0], 2)
    transferred(one.state()).restore(late.optimizer, late.model)
    theirs, ours = outer.state_dict(), late_outer.state_dict()
    assert sorted(ours) == sorted(theirs)
    tensors = [name for name, value in theirs.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 2, "the anchor and the outer momentum"
    for name in tensors:
        assert torch.equal(ours[name], theirs[name]), name
    assert (ours["feedback"] is None) == (codec == "float32")
    late_outer.taken_over()
    assert late_outer.state_dict()["feedback"] is None, "that was lost by the donor"
    assert late_outer.samples == 0


@pytest.mark.parametrize(
    ("tree", "says"),
    [
        ({"$dtype": "torch.nn"}, "make no sense"),
        ({"$bytes": "?"}, "make no sense"),
        ({"$set": [[1]]}, "make no sense"),
        ({"$deque": [1]}, "make no sense"),
        ({"$complex": [1]}, "make no sense"),
        ({"$array": "nowhere"}, "make no sense"),
        ({"$frozenset": 3}, "make no sense"),
    ],
    ids=str,
)
def test_what_makes_no_sense_is_refused(tree, says):
    with pytest.raises(StateError, match=says):
        read_tree({"x": tree}, {})


def test_sets_are_sorted_and_hold_names_and_numbers():
    one, two = ({"s": set(order)} for order in ([3, "b", 1], ["b", 1, 3]))
    assert TreeWriter().take(one, "x") == TreeWriter().take(two, "x")
    with pytest.raises(StateError, match=r"x\.s: only strings and numbers can be in a set"):
        TreeWriter().take({"s": {(1, 2)}}, "x")
    with pytest.raises(StateError, match=r"x\.a: an array of object has no form"):
        TreeWriter().take({"a": np.array([object()])}, "x")
