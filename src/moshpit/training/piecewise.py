"""Optimizer steps in pieces, each just before the forward pass needs it.

`Needs` finds out which module's forward pass needs which parameters; `PiecewiseStep` lets a
`torch.optim.Optimizer` make its step for some parameters now and for the others later, all
with the settings of one moment. A `GlobalStep` is the way of one step of all peers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moshpit.errors import ConfigError
from moshpit.training.averager import Averaging


class PiecewiseStep:
    """One step of an optimizer, made in pieces.

    Args:
        inner: the optimizer; it must treat each parameter by itself, as all of `torch.optim` do
            but LBFGS. Its learning rates and other settings are those of now.
    """

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._inner = inner
        self._settings = [
            {key: _kept(value) for key, value in group.items() if key != "params"}
            for group in inner.param_groups
        ]

    def step(self, gradients: Mapping[torch.Tensor, torch.Tensor]) -> None:
        """Make the step for these parameters.

        Raises:
            ConfigError: the optimizer keeps something for a whole group, which a step of a piece
                would get wrong.
        """
        groups = self._inner.param_groups
        held = {parameter: parameter.grad for parameter in gradients}
        pieces: list[dict[str, Any]] = []
        for group, settings in zip(groups, self._settings, strict=True):
            wanted = [p for p in group["params"] if p in gradients]
            if wanted:
                pieces.append({**settings, "params": wanted})
        before = [dict(piece) for piece in pieces]
        try:
            for parameter, gradient in gradients.items():
                parameter.grad = gradient
            self._inner.param_groups = pieces
            self._inner.step()
        finally:
            self._inner.param_groups = groups
            for parameter, gradient in held.items():
                parameter.grad = gradient
        for piece, old in zip(pieces, before, strict=True):
            changed = [key for key in piece if piece[key] is not old.get(key)]
            if changed:
                raise ConfigError(
                    f"{type(self._inner).__name__} changes {changed[0]!r} of a whole group in its "
                    "step: it cannot make it in pieces; use GradientAveraging"
                )


def _kept(value: Any) -> Any:
    return value.clone() if isinstance(value, torch.Tensor) else value


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor's place in the vector."""

    name: str
    tensor: torch.Tensor
    start: int
    stop: int
    trained: bool


@dataclass(slots=True)
class GlobalStep:
    """One step of all peers, from its first gradient to its last parameter.

    Attributes:
        vector, weight: what this peer brings.
        samples: of the last batch, as they were known when the averaging began.
        early: it was begun by a gradient; otherwise there is no last batch.
        job: the averaging.
        filled: the pieces that are in the vector, by number.
        todo: the pieces whose means are not used yet.
        spoiled: what was not finite; "" if nothing.
        settings: the optimizer's, as they were in ``step()``; until then None.
        judged: the first numbers were looked at.
        skipped: nobody makes this step.
        scale: by which the mean is multiplied, to clip it.
    """

    vector: torch.Tensor
    weight: float
    samples: float
    early: bool
    todo: dict[int, None]
    job: Averaging | None = None
    filled: set[int] = field(default_factory=set[int])
    spoiled: str = ""
    settings: PiecewiseStep | None = None
    judged: bool = False
    skipped: bool = False
    scale: float = 1.0


class Needs:
    """Which modules' forward passes need which tensors; learned from the passes of the first step.

    A tensor is needed by the modules that own it. A module whose forward pass was not seen may be
    read by one that contains it (`torch.nn.MultiheadAttention` does so): then that one needs it.

    Args:
        model: all modules.
        tensors: what is needed: some of the model's parameters and buffers.
        reached: called with the numbers of tensors that are needed now, before a module's forward
            pass; until `learn`, with all of them.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        reached: Callable[[Iterable[int]], None],
    ) -> None:
        self._reached = reached
        self._all = range(len(tensors))
        self._modules: dict[str, torch.nn.Module] = dict(model.named_modules())  # pyright: ignore[reportUnknownArgumentType]
        self._by_module: dict[torch.nn.Module, list[int]] | None = None
        self._called: dict[torch.nn.Module, None] = {}
        number = {id(tensor): i for i, tensor in enumerate(tensors)}
        self._owners: list[list[str]] = [[] for _ in tensors]
        for name, module in self._modules.items():
            own = (*module.parameters(recurse=False), *module.buffers(recurse=False))
            for i in {number[id(t)]: None for t in own if id(t) in number}:
                self._owners[i].append(name)
        self._handles = [m.register_forward_pre_hook(self._look) for m in self._modules.values()]

    def _look(self, module: torch.nn.Module, _: object) -> None:
        if self._by_module is None:
            self._called[module] = None
            self._reached(self._all)
        else:
            mine = self._by_module.get(module)
            if mine is not None:
                self._reached(mine)

    @property
    def learned(self) -> bool:
        """Whether `learn` was called."""
        return self._by_module is not None

    def learn(self) -> list[int]:
        """The forward passes of a step were seen: from now on, wait for each module's own.

        Returns:
            The numbers of tensors for which nobody saw who needs them.
        """
        found: dict[torch.nn.Module, list[int]] = {}
        lost: list[int] = []
        for i, owners in enumerate(self._owners):
            readers = {reader: None for name in owners if (reader := self._reader(name))}
            for reader in readers:
                found.setdefault(reader, []).append(i)
            if not readers:
                lost.append(i)
        self._by_module = found
        return lost

    def _reader(self, name: str) -> torch.nn.Module | None:
        """Return the module itself, or the nearest around it, that was called."""
        while True:
            if self._modules[name] in self._called:
                return self._modules[name]
            if not name:
                return None
            name = name.rpartition(".")[0]

    def close(self) -> None:
        """Watch no more."""
        for handle in self._handles:
            handle.remove()
