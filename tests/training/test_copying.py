"""Copies made beside training: whole or none, and no longer than training waits."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from moshpit.training import copying
from moshpit.training.copying import LateCopies
from moshpit.training.state import TrainingState

LARGE = copying.LATE_BYTES_MIN


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.uint8]
)
def test_large_tensors_are_copied_by_the_thread(dtype):
    tensor = torch.randint(0, 2, (LARGE, 3)).to(dtype)
    copies = LateCopies()
    made = copies.copy(tensor)
    assert made.data_ptr() != tensor.data_ptr()
    copies.start()
    assert copies.finish()
    assert torch.equal(made, tensor)
    assert not [t for t in threading.enumerate() if t.name == "moshpit-copy"]


def test_what_is_small_or_scattered_is_there_at_once():
    copies = LateCopies()
    small, scattered = torch.arange(10.0), torch.randn(LARGE, 2).t()
    assert torch.equal(copies.copy(small), small)
    assert torch.equal(copies.copy(scattered), scattered)
    with torch.inference_mode():
        counted_by_nobody = torch.randn(LARGE)
    assert torch.equal(copies.copy(counted_by_nobody), counted_by_nobody)
    copies.start()
    small.add_(1)
    assert copies.finish(), "what is copied may be changed"


def test_who_changes_a_tensor_meanwhile_is_found_out():
    parameter = nn.Parameter(torch.zeros(LARGE))
    copies = LateCopies()
    copies.copy(parameter)
    copies.start()
    with torch.no_grad():
        parameter.clamp_(min=0.5)
    assert not copies.finish()


def test_a_state_waits_for_its_large_tensors_and_not_for_buffers():
    model = nn.Sequential(nn.Linear(4, LARGE // 8), nn.BatchNorm1d(LARGE // 8))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(8, 4)).square().sum().backward()
    optimizer.step()
    whole = TrainingState.capture(optimizer, model, epoch=3)
    copies = LateCopies()
    state = TrainingState.capture(optimizer, model, epoch=3, copies=copies)
    model(torch.randn(8, 4)).sum().backward()  # moves the running statistics, and nothing else
    copies.start()
    assert copies.finish()
    assert state.image().manifest.hashes[1:] == whole.image().manifest.hashes[1:]
    for name, tensor in whole.tensors.items():
        assert torch.equal(state.tensors[name], tensor), name
