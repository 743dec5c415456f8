"""LAMB and LARS against their formulas, computed by hand and by plain loops."""

from __future__ import annotations

import math
from copy import deepcopy

import pytest
import torch

import moshpit
from moshpit.errors import ConfigError
from moshpit.training.optim import LAMB, LARS


def norm(values):
    return math.sqrt(sum(v * v for v in values))


def lamb_by_hand(x, gradients, *, lr, betas, eps, decay):
    m, v = [0.0] * len(x), [0.0] * len(x)
    for t, gradient in enumerate(gradients, 1):
        m = [betas[0] * a + (1 - betas[0]) * g for a, g in zip(m, gradient, strict=True)]
        v = [betas[1] * a + (1 - betas[1]) * g * g for a, g in zip(v, gradient, strict=True)]
        u = [
            (a / (1 - betas[0] ** t)) / (math.sqrt(b / (1 - betas[1] ** t)) + eps) + decay * c
            for a, b, c in zip(m, v, x, strict=True)
        ]
        ratio = norm(x) / norm(u) if norm(x) > 0 and norm(u) > 0 else 1.0
        x = [a - lr * ratio * b for a, b in zip(x, u, strict=True)]
    return x


def lars_by_hand(x, gradients, *, lr, momentum, decay, trust):
    v = [0.0] * len(x)
    for g in gradients:
        some = norm(x) > 0 and norm(g) > 0
        gamma = trust * norm(x) / (norm(g) + decay * norm(x)) if some else 1.0
        v = [momentum * a + lr * gamma * (b + decay * c) for a, b, c in zip(v, g, x, strict=True)]
        x = [a - b for a, b in zip(x, v, strict=True)]
    return x


def run(make, start, gradients):
    x = torch.nn.Parameter(torch.tensor(start, dtype=torch.float64))
    optimizer = make([x])
    for gradient in gradients:
        x.grad = torch.tensor(gradient, dtype=torch.float64)
        optimizer.step()
    return x.tolist(), optimizer


GRADIENTS = [[1.0, -2.0, 0.5], [0.0, 3.0, -1.0], [-0.2, 0.1, 4.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize("start", [[1.0, 2.0, -2.0], [0.0, 0.0, 0.0]])
def test_lamb_is_its_formula(start):
    how = {"lr": 0.05, "betas": (0.8, 0.95), "eps": 1e-3}
    got, _ = run(lambda p: LAMB(p, weight_decay=0.1, **how), start, GRADIENTS)
    assert got == pytest.approx(lamb_by_hand(start, GRADIENTS, decay=0.1, **how), rel=1e-9)


@pytest.mark.parametrize("start", [[1.0, 2.0, -2.0], [0.0, 0.0, 0.0]])
def test_lars_is_its_formula(start):
    how = {"lr": 0.5, "momentum": 0.7, "trust": 0.02}
    got, _ = run(lambda p: LARS(p, weight_decay=0.1, **how), start, GRADIENTS)
    assert got == pytest.approx(lars_by_hand(start, GRADIENTS, decay=0.1, **how), rel=1e-9)


def test_lamb_by_numbers():
    """x = (3, 4): norm 5. First step: m̂ = g, v̂ = g², so u = sign(g), norm sqrt(2)."""
    got, _ = run(lambda p: LAMB(p, lr=0.1, eps=1e-12), [3.0, 4.0], [[7.0, -0.001]])
    assert got == pytest.approx([3 - 0.5 / math.sqrt(2), 4 + 0.5 / math.sqrt(2)])


def test_lars_by_numbers():
    """x = (3, 4), g = (0, 2): γ = 0.01 · 5 / 2; v = 0.4 γ g = (0, 0.02); then v = 0.5 v + new."""
    got, _ = run(lambda p: LARS(p, lr=0.4, momentum=0.5, trust=0.01), [3.0, 4.0], [[0.0, 2.0]] * 2)
    second = 0.5 * 0.02 + 0.4 * 0.01 * math.hypot(3, 3.98)
    assert got == pytest.approx([3.0, 4 - 0.02 - second])


@pytest.mark.parametrize("make", [LAMB, LARS])
def test_they_resume_skip_what_has_no_gradient_and_follow_groups(make):
    def build():
        torch.manual_seed(1)
        a, b, c = (torch.nn.Parameter(torch.randn(3)) for _ in range(3))
        return (a, b, c), make([{"params": [a, c]}, {"params": [b], "lr": 0.5}], lr=0.01)

    (a, b, c), going = build()
    before = c.detach().clone()
    for _ in range(3):
        a.grad, b.grad = a.detach() * 2, b.detach() + 1
        going.step()
    assert torch.equal(c, before)
    (a2, b2, _), resumed = build()
    a2.data.copy_(a.data)
    b2.data.copy_(b.data)
    resumed.load_state_dict(deepcopy(going.state_dict()))
    for x, y, opt in ((a, b, going), (a2, b2, resumed)):
        x.grad, y.grad = x.detach() * 2, y.detach() + 1
        assert opt.step(lambda: 5.0) == 5.0
    assert torch.equal(a, a2)
    assert torch.equal(b, b2)


@pytest.mark.parametrize(
    ("make", "wrong"),
    [
        (LAMB, {"lr": 0}), (LAMB, {"betas": (1.0, 0.9)}), (LAMB, {"betas": (0.9, -0.1)}),
        (LAMB, {"eps": 0}), (LAMB, {"weight_decay": -1}), (LARS, {"lr": math.nan}),
        (LARS, {"momentum": 1}), (LARS, {"trust": 0}), (LARS, {"weight_decay": math.inf}),
    ],
)  # fmt: skip
def test_values_that_make_no_sense_are_refused(make, wrong):
    with pytest.raises(ConfigError, match="give"):
        make([torch.nn.Parameter(torch.zeros(1))], **wrong)


# --- pseudo-gradients -------------------------------------------------------------------------


class Net:
    def __init__(self, peer, strategy, seed, lr=0.05):
        torch.manual_seed(3)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
        )
        self.random = torch.Generator().manual_seed(seed)
        self.strategy = strategy
        inner = LAMB(self.model.parameters(), lr=lr)
        self.opt = moshpit.Optimizer(inner, peer, strategy, batch_size=8)

    def loss(self):
        x = torch.randn(8, 4, generator=self.random)
        return (self.model(x) - x[:, :2].sin()).square().mean()

    def step(self):
        self.loss().backward()
        self.opt.step()

    def train(self, epochs):
        while self.opt.epoch < epochs:
            self.step()
        return self.opt.finish()

    def x(self):
        return torch.nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


def test_a_pseudo_gradient_is_the_difference_by_rate_and_steps(memory_swarm):
    (peer,) = memory_swarm(1).peers
    net = Net(peer, moshpit.GradientAveraging(24, local_lr=0.1), 0)
    start, taken = net.x(), []
    twin = Net(memory_swarm(1).peers[0], moshpit.LocalSGD(1e9), 0)
    for _ in range(3):  # plain SGD, by hand
        loss = twin.loss()
        grads = torch.autograd.grad(loss, list(twin.model.parameters()))
        for p, g in zip(twin.model.parameters(), grads, strict=True):
            p.data -= 0.1 * g
    pseudo = (start - twin.x()) / (0.1 * 3)
    net.opt.inner.register_step_pre_hook(
        lambda opt, *_: taken.append(torch.cat([p.grad.view(-1) for p in net.model.parameters()]))
    )
    net.step()
    net.step()
    assert not torch.equal(net.x(), start), "it goes its own way"
    net.step()
    (used,) = taken
    torch.testing.assert_close(used, pseudo, rtol=1e-4, atol=1e-5)
    at = 0
    for part in net.model.parameters():  # LAMB, from the start: a share of each norm
        moved = net.x()[at : at + part.numel()] - start[at : at + part.numel()]
        length = 0.05 * start[at : at + part.numel()].norm()
        torch.testing.assert_close(moved.norm(), length, rtol=1e-3, atol=1e-6)
        at += part.numel()


def test_peers_with_pseudo_gradients_stay_together(memory_swarm, together):
    swarm = memory_swarm(3)
    nets = [
        Net(p, moshpit.GradientAveraging(96, local_lr=0.05), i) for i, p in enumerate(swarm.peers)
    ]
    first = nets[0].loss().item()
    together(*[lambda n=n: n.train(40) for n in nets])
    assert torch.equal(nets[0].x(), nets[1].x())
    assert torch.equal(nets[0].x(), nets[2].x())
    assert sum(nets[0].loss().item() for _ in range(20)) / 20 < 0.6 * first


def test_a_state_taken_on_the_way_goes_on_from_where_it_began(memory_swarm):
    def build():
        return Net(memory_swarm(1).peers[0], moshpit.GradientAveraging(40, local_lr=0.1), 0)

    going, resumed = build(), build()
    for _ in range(7):
        going.step()
    resumed.model.load_state_dict(going.model.state_dict())
    resumed.opt.load_state_dict(deepcopy(going.opt.state_dict()))
    resumed.random.set_state(going.random.get_state())
    for net in (going, resumed):
        net.step()
        net.step()
        net.opt.finish()
    assert torch.equal(going.x(), resumed.x())


@pytest.mark.parametrize("rate", [0, -1, math.nan, math.inf])
def test_a_local_rate_that_makes_no_sense_is_refused(rate):
    with pytest.raises(ConfigError, match="local_lr"):
        moshpit.GradientAveraging(8, local_lr=rate)


class Classifier:
    """One of four peers, each with the examples of some classes only."""

    def __init__(self, peer, index, strategy):
        rng = torch.Generator().manual_seed(0)
        first, second = torch.randn(20, 32, generator=rng), torch.randn(32, 10, generator=rng)

        def examples(n):
            x = torch.randn(n, 20, generator=rng)
            return x, (torch.tanh(x @ first) @ second).argmax(1)

        x, y = examples(4096)
        mine = y.argsort().chunk(4)[index]
        self.x, self.y = x[mine], y[mine]
        self.held_out = examples(2048)
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.Linear(20, 64),
            torch.nn.LayerNorm(64),
            torch.nn.GELU(),
            torch.nn.Linear(64, 10),
        )
        self.random = torch.Generator().manual_seed(100 + index)
        inner = LAMB(self.model.parameters(), lr=0.1, weight_decay=0.01)
        self.opt = moshpit.Optimizer(inner, peer, strategy, batch_size=8, model=self.model)

    def steps(self):
        for _ in range(8):
            at = torch.randint(len(self.x), (8,), generator=self.random)
            self.opt.zero_grad()
            torch.nn.functional.cross_entropy(self.model(self.x[at]), self.y[at]).backward()
            self.opt.step()

    @torch.no_grad()
    def loss(self):
        x, y = self.held_out
        return torch.nn.functional.cross_entropy(self.model(x), y).item()


@pytest.fixture
def one_thread():
    """For tensors as small as these, more only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
def test_lamb_converges_with_pseudo_gradients_where_averaged_parameters_do_not(
    memory_swarm, together
):
    """What the paper saw: with LAMB plain averaging of parameters diverges. Each peer's own
    statistics carry it along its own classes, in steps as long as its weights."""

    def train(make):
        peers = memory_swarm(4).peers
        group = [Classifier(p, i, make()) for i, p in enumerate(peers)]
        losses = [group[0].loss()]
        for _ in range(16):
            for c in group:
                c.steps()
            together(*[c.opt.finish for c in group])
            losses.append(group[0].loss())
        return losses

    plain = train(lambda: moshpit.LocalSGD(1e9, overlap=False))
    pseudo = train(lambda: moshpit.GradientAveraging(1e9, local_lr=0.2))
    chance = math.log(10)
    assert min(plain[-3:]) > chance, plain  # worse than saying nothing, and worse than before
    assert max(pseudo[-3:]) < 0.75 * chance, pseudo
