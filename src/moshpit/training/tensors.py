"""Which tensors a strategy exchanges, and under which names.

Names and shapes make the schema by which peers know that they train the same thing, so they
come in one fixed order: parameters by group and place, then statistics, then buffers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch

from moshpit.errors import ConfigError
from moshpit.tensors.reduce import is_finite


@dataclass(frozen=True, slots=True)
class Named:
    """A tensor and the name by which messages and the schema call it."""

    name: str
    tensor: torch.Tensor


def parameters_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> list[Named]:
    """Return the optimizer's parameters; named as in the model where that is known, else by
    their place, like ``group0.3``.

    Raises:
        ConfigError: there is none.
    """
    known = {id(p): n for n, p in model.named_parameters()} if model is not None else {}
    found = [
        Named(known.get(id(p), f"group{g}.{i}"), p)
        for g, group in enumerate(optimizer.param_groups)
        for i, p in enumerate(group["params"])
        if p.requires_grad
    ]
    if not found:
        raise ConfigError("the optimizer has no parameter that requires gradients")
    return found


def buffers_of(model: torch.nn.Module | None) -> list[Named]:
    """Return the model's floating point buffers (running means and variances). Integer
    buffers, such as the count of batches seen, stay each peer's own."""
    if model is None:
        return []
    return [Named(n, b) for n, b in model.named_buffers() if b.is_floating_point()]


def statistics_of(optimizer: torch.optim.Optimizer, parameters: Sequence[Named]) -> list[Named]:
    """Return what the optimizer keeps per parameter in the parameter's shape (``exp_avg``,
    ``momentum_buffer``, ...).

    A parameter that has had no gradient here has no statistics yet. So that all peers have one
    schema, zeros stand in for it: they are averaged, and what comes back is not used.
    """
    keys: dict[str, torch.dtype] = {}
    for named in parameters:
        for key, value in optimizer.state.get(named.tensor, {}).items():
            if is_statistic(value, named.tensor):
                keys.setdefault(key, value.dtype)
    found: list[Named] = []
    for named in parameters:
        state = optimizer.state.get(named.tensor, {})
        for key in sorted(keys):
            value = state.get(key)
            if not is_statistic(value, named.tensor):
                value = torch.zeros_like(named.tensor, dtype=keys[key])
            found.append(Named(f"{named.name}.{key}", value))
    return found


def forget_nonfinite_statistics(
    optimizer: torch.optim.Optimizer, parameters: Sequence[Named]
) -> None:
    """Drop the optimizer's state of each parameter for which it holds NaN or infinity, so
    that it starts anew instead of spoiling the next step."""
    for named in parameters:
        state = optimizer.state.get(named.tensor, {})
        if any(isinstance(v, torch.Tensor) and not is_finite(v) for v in state.values()):
            del optimizer.state[named.tensor]


def first_nonfinite(tensors: Sequence[Named]) -> str | None:
    """Return the name of the first tensor that holds NaN or infinity, or None."""
    return next((t.name for t in tensors if not is_finite(t.tensor)), None)


def is_statistic(value: object, parameter: torch.Tensor) -> TypeGuard[torch.Tensor]:
    """Return whether this is something that an optimizer keeps in a parameter's shape."""
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.shape == parameter.shape
        and value.dim() > 0
    )


@torch.no_grad()
def fingerprint(parameters: Sequence[Named]) -> torch.Tensor:
    r"""Return two numbers of order 1 that differ between different parameters: (2,) float32.

    For parameters :math:`p` they are :math:`\sum_i s_i p_i / \lVert p \rVert` with two fixed
    patterns of signs :math:`s`; for independent parameters they are independent.
    """
    fast = slow = square = 0.0
    for number, named in enumerate(parameters):
        flat = named.tensor.detach().reshape(-1).double()
        half = flat.numel() // 2
        sign = 1.0 if number % 2 == 0 else -1.0
        fast += (flat[::2].sum() - flat[1::2].sum()).item()
        slow += sign * (flat[:half].sum() - flat[half:].sum()).item()
        square += flat.square().sum().item()
    return torch.tensor([fast, slow]) / math.sqrt(max(square, 1e-30))
