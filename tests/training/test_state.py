"""A state in full: whatever was saved goes on exactly as if it had never stopped."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import lr_scheduler

import moshpit
from moshpit.errors import ConfigError, StateError
from moshpit.tensors.image import Manifest, StateAssembler
from moshpit.training.state import TrainingState
from moshpit.training.tree import TreeWriter, read_tree

Make = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
    "tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "RAdam": lambda p: torch.optim.RAdam(p, lr=0.01),
    "Adamax": lambda p: torch.optim.Adamax(p, lr=0.01),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.01),
    "Adadelta": lambda p: torch.optim.Adadelta(p, lr=0.5),
    "ASGD": lambda p: torch.optim.ASGD(p, lr=0.01),
    "RMSprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True, momentum=0.5),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=0.01),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=0.01),
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=3, history_size=4),
}

SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, T_max=20),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 7, 9], gamma=0.5),
    "onecycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=40),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=4),
    "warmup": lambda o: lr_scheduler.SequentialLR(
        o,
        [lr_scheduler.LinearLR(o, 0.1, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)],
        milestones=[5],
    ),
}


def a_model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.Dropout(0.2), torch.nn.Linear(6, 2)
    )


def train(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: int, scheduler: Any = None
) -> None:
    """Data, dropout and all from torch's generator, so that its state matters."""

    for _ in range(steps):
        x = torch.randn(8, 4)

        def closure(x: torch.Tensor = x) -> torch.Tensor:
            optimizer.zero_grad()
            loss = (model(x) - x[:, :2]).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)
        if scheduler is not None:
            scheduler.step()


def through_bytes(state: TrainingState) -> TrainingState:
    image = state.image(chunk_bytes=4096)
    assembler = StateAssembler(Manifest.decode(image.manifest.encode()))
    for index in assembler.missing:
        assert assembler.add(index, image.chunk(index))
    return TrainingState.assembled(assembler)


def digest(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> bytes:
    state = TrainingState.capture(optimizer, model, epoch=0, generators=False)
    return state.image().manifest.digest


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on_to_the_bit(name: str) -> None:
    model = a_model()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, 5)
    state = through_bytes(TrainingState.capture(optimizer, model, epoch=5))
    train(model, optimizer, 5)

    other = a_model(seed=1)
    resumed = OPTIMIZERS[name](other.parameters())
    state.restore(resumed, other, generators=True)
    train(other, resumed, 5)
    assert digest(resumed, other) == digest(optimizer, model)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", SCHEDULERS)
def test_every_scheduler_goes_on(name: str) -> None:
    def make(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer, Any]:
        model = a_model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()  # schedulers want to see one
        return model, optimizer, SCHEDULERS[name](optimizer)

    model, optimizer, scheduler = make(0)
    train(model, optimizer, 6, scheduler)
    state = through_bytes(
        TrainingState.capture(optimizer, model, epoch=6, added={"schedule": scheduler})
    )
    train(model, optimizer, 6, scheduler)
    other, resumed, schedule = make(1)
    state.restore(resumed, other, added={"schedule": schedule}, generators=True)
    train(other, resumed, 6, schedule)
    assert schedule.get_last_lr() == scheduler.get_last_lr()
    assert digest(resumed, other) == digest(optimizer, model)
    with pytest.raises(StateError, match="nothing was saved as 'other'"):
        state.restore(resumed, other, added={"other": schedule})


def test_a_capture_does_not_change_with_what_it_was_taken_from() -> None:
    model = a_model()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer, 2)
    state = TrainingState.capture(optimizer, model, epoch=1)
    before = state.image().manifest.digest
    train(model, optimizer, 2)
    assert state.image().manifest.digest == before


def test_all_generators_go_on() -> None:
    def draw() -> tuple[float, float, float]:
        return torch.rand(1).item(), random.random(), np.random.random()

    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    draw()
    state = through_bytes(TrainingState.capture(optimizer, model, epoch=1))
    expected = draw()
    assert draw() != expected
    state.restore(optimizer, model)
    assert draw() != expected
    state.restore(optimizer, model, generators=True)
    assert draw() == expected


def test_parameters_outside_the_model_are_there_too() -> None:
    model, extra = torch.nn.Linear(2, 1), torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": model.parameters()}, {"params": [extra]}], lr=0.1)
    state = TrainingState.capture(optimizer, model, epoch=0)
    assert set(state.tensors) >= {"model.weight", "model.bias", "model.group1.0"}
    with torch.no_grad():
        extra.zero_()
    through_bytes(state).restore(optimizer, model)
    assert torch.equal(extra, torch.ones(3))
    alone = TrainingState.capture(optimizer, None, epoch=0)
    assert "model.group0.0" in alone.tensors
    with torch.no_grad():
        model.weight.zero_()
    alone.restore(optimizer)
    assert torch.equal(model.weight.detach(), state.tensors["model.weight"])


def test_momenta_keep_their_own_precision() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.state[parameter] = {"fine": torch.full((4,), 1 / 3)}
    state = through_bytes(TrainingState.capture(optimizer, None, epoch=0))
    again = torch.optim.SGD([parameter], lr=0.1)
    state.restore(again)
    assert torch.equal(again.state[parameter]["fine"], torch.full((4,), 1 / 3))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: (torch.nn.Linear(4, 6), torch.optim.SGD), "another model"),
        (lambda: (a_model().double(), torch.optim.SGD), "float32 there and .* float64 here"),
        (lambda: (a_model(), torch.optim.AdamW), "of a SGD, and here is a AdamW"),
        (
            lambda: (
                torch.nn.Sequential(*list(a_model())[:-1], torch.nn.Linear(6, 3)),
                torch.optim.SGD,
            ),
            r"\(2, 6\) float32 there and \(3, 6\)",
        ),
    ],
)
def test_what_does_not_fit_is_said_and_changes_nothing(make: Any, said: str) -> None:
    model = a_model()
    state = TrainingState.capture(
        torch.optim.SGD(model.parameters(), lr=0.5), model, epoch=0, generators=False
    )
    other, kind = make()
    optimizer = kind(other.parameters(), lr=0.1)
    before = digest(optimizer, other)
    with pytest.raises(StateError, match=said):
        state.restore(optimizer, other)
    assert digest(optimizer, other) == before


def test_other_groups_are_said() -> None:
    model = a_model()
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    state = TrainingState.capture(one, model, epoch=0)
    two = torch.optim.SGD([{"params": [p]} for p in model.parameters()], lr=0.1)
    with pytest.raises(StateError, match="parameter groups"):
        state.restore(two, model)


@pytest.mark.parametrize(
    "wrong",
    [
        {"groups": None},
        {"groups": [1]},
        {"groups": [{"params": 3}]},
        {"model": []},
        {"model": {}},
        {"optimizer": None},
        {"optimizer": {"state": 5}},
        {"optimizer": {"state": {"$dict": [[0, 7]]}}},
        {"kind": 5},
    ],
)
def test_contents_that_make_no_sense_are_an_error_of_ours(wrong: dict[str, Any]) -> None:
    model = a_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = TrainingState.capture(optimizer, model, epoch=0)
    state = TrainingState(0, state.tensors, state.contents | wrong)
    with pytest.raises(StateError):
        state.restore(optimizer, model)


# --- with a swarm --------------------------------------------------------------------------


def wrapped(swarm: Any, strategy: Any, seed: int) -> tuple[torch.nn.Module, moshpit.Optimizer]:
    model = a_model(seed)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    return model, moshpit.Optimizer(inner, swarm.peers[0], strategy, batch_size=8, model=model)


@pytest.mark.parametrize(
    "strategy",
    [
        lambda: moshpit.LocalSGD(samples_per_epoch=24, overlap=False),
        lambda: moshpit.LocalSGD(samples_per_epoch=24, overlap=False, average_statistics=True),
        lambda: moshpit.GradientAveraging(target_batch_size=24),
        lambda: moshpit.DiLoCo(samples_per_epoch=24, overlap=False),
    ],
)
@pytest.mark.parametrize("steps", [3, 4])  # at the end of an epoch, and in the middle of one
def test_every_strategy_goes_on_to_the_bit(memory_swarm: Any, strategy: Any, steps: int) -> None:
    model, optimizer = wrapped(memory_swarm(1), strategy(), 0)
    train(model, optimizer, steps)
    state = through_bytes(TrainingState.capture(optimizer, model, epoch=optimizer.epoch))
    train(model, optimizer, 5)
    other, resumed = wrapped(memory_swarm(1), strategy(), 1)
    state.restore(resumed, other, generators=True)
    assert resumed.epoch == 1
    train(other, resumed, 5)
    assert resumed.epoch == optimizer.epoch
    assert digest(resumed, other) == digest(optimizer, model)


def test_another_strategy_is_said(memory_swarm: Any) -> None:
    model, optimizer = wrapped(memory_swarm(1), moshpit.GradientAveraging(24), 0)
    state = TrainingState.capture(optimizer, model, epoch=0)
    other, resumed = wrapped(memory_swarm(1), moshpit.LocalSGD(24), 0)
    with pytest.raises(ConfigError, match="saved by GradientAveraging"):
        state.restore(resumed, other)


# --- trees ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        -(2**70),
        1.5,
        "ü",
        [],
        (),
        {},
        (1, [2.5, (None, {"a": (False,)})]),
        {1: "int", "1": "str", 2.5: "float"},
        {"$tensor": "not one", "other": 1},
        {"$odd": 1},
        [float("inf"), float("-inf")],
    ],
)
def test_trees_come_back_as_they_were(value: object) -> None:
    again = read_tree(TreeWriter().take(value, "it"), {})
    assert again == value
    assert type(again) is type(value)


def test_tensors_of_one_path_stay_apart() -> None:
    writer = TreeWriter()
    value = {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}}
    taken = writer.take(value, "it")
    assert len(writer.tensors) == 2
    again = read_tree(taken, writer.tensors)
    assert (again["a.b"].item(), again["a"]["b"].item()) == (0, 1)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"a": [object()]}, "it.a.0: a object cannot be saved"),
        ({(1, 2): 3}, "it: only strings and numbers"),
        (torch.eye(2).to_sparse(), "it: a torch.sparse_coo tensor"),
    ],
)
def test_what_cannot_be_saved_is_named(value: object, said: str) -> None:
    with pytest.raises(StateError, match=said):
        TreeWriter().take(value, "it")


def test_a_circle_is_an_error() -> None:
    circle: list[object] = []
    circle.append(circle)
    with pytest.raises(StateError, match="in a circle"):
        TreeWriter().take(circle, "it")


@pytest.mark.parametrize(
    "value",
    [
        {"$tensor": "none"},
        {"$tensor": [1]},
        {"$float": "x"},
        {"$dict": [[1]]},
        {"$dict": 1},
        {"$dict": [[[1], 2]]},
        {"$tuple": 5},
        {"$new": 5},
    ],
)
def test_a_tree_that_makes_no_sense_is_refused(value: object) -> None:
    with pytest.raises(StateError):
        read_tree({"a": value}, {"t": torch.ones(1)})
