"""Optimizer steps in pieces, each just before the forward pass needs it.

`Needs` finds out which module's forward pass needs which parameters; `PiecewiseStep` lets a
`torch.optim.Optimizer` make its step for some parameters now and for the others later, all
with the settings of one moment. A `GlobalStep` is the way of one step of all peers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from moshpit.errors import ConfigError
from moshpit.events import EpochReport
from moshpit.tensors.reduce import is_finite
from moshpit.training.averager import Averaging
from moshpit.training.tensors import Named, buffers_of

log = logging.getLogger("moshpit.training")

FIRST_FILL_S = 60.0  # guess: of the first backward pass nobody knows how long it takes
CALMER = 0.9  # guess: from step to step so much is left of what once took long


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


def in_order_of(model: torch.nn.Module, parameters: Sequence[Named], who: str) -> list[Named]:
    """Return parameters in the order in which a model has them.

    Raises:
        ConfigError: one is not in the model, and ``who`` has to know when it is needed.
    """
    place = {id(p): i for i, p in enumerate(model.parameters())}
    strange = next((p.name for p in parameters if id(p.tensor) not in place), None)
    if strange is not None:
        raise ConfigError(
            f"the optimizer's parameter {strange} is not in the model, so nobody knows when "
            f"it is needed, as {who} has to"
        )
    return sorted(parameters, key=lambda p: place[id(p.tensor)])


def pieces_of(model: torch.nn.Module, parameters: Sequence[Named], at: int) -> list[Piece]:
    """Return the places of a model's buffers and parameters in a vector, from ``at`` on."""
    pieces: list[Piece] = []
    for named in (*buffers_of(model), *parameters):
        stop = at + named.tensor.numel()
        pieces.append(Piece(named.name, named.tensor, at, stop, named.tensor.requires_grad))
        at = stop
    return pieces


class FillPace:
    """How long a vector takes to be complete.

    Attributes:
        seconds: about so long; the longest of the latest ones.
    """

    def __init__(self) -> None:
        self.seconds = FIRST_FILL_S
        self._known = False
        self._begun = 0.0

    def begun(self, now: float) -> None:
        """A vector begins to fill."""
        self._begun = now

    def complete(self, now: float) -> None:
        """It is complete: the next one takes about as long."""
        took_s = now - self._begun
        self.seconds = max(took_s, CALMER * self.seconds) if self._known else took_s
        self._known = True


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
        heard: a mean that came while this peer's state was on its way; then there is no ``job``.
        merges: what is averaged are parameters that have parted, or statistics (`ParameterMerge`).
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
    heard: tuple[torch.Tensor, EpochReport] | None = None
    merges: bool = False

    @property
    def new(self) -> bool:
        """Whether nothing was averaged for it yet."""
        return self.job is None and self.heard is None

    def fill(
        self,
        number: int,
        piece: Piece,
        gradient: torch.Tensor | None,
        total: torch.Tensor | None,
    ) -> None:
        """Write this peer's part of a piece into the vector.

        Args:
            number: the piece's.
            piece: of a parameter, or a buffer.
            gradient: the last batch's; None: it has none.
            total: the sum of earlier ones, if there are any.
        """
        place = self.vector[piece.start : piece.stop].view(piece.tensor.shape)
        if not piece.trained:
            place.copy_(piece.tensor)
        elif gradient is None:
            place.zero_()
        else:
            place.copy_(gradient.to_dense() if gradient.is_sparse else gradient)
        if total is not None and self.weight > 0:
            place.mul_(self.samples).add_(total).div_(self.weight)
        if not is_finite(place):
            self.spoiled = piece.name
            place.zero_()
        self.filled.add(number)
        assert self.job is not None
        self.job.ready(piece.start, piece.stop)

    def means(self, start: int, stop: int) -> torch.Tensor:
        """Return these numbers of the mean, as soon as they are here."""
        if self.heard is not None:
            return self.heard[0][start:stop]
        assert self.job is not None
        return self.job.means(start, stop)

    def take(self, piece: Piece, gradients: dict[torch.Tensor, torch.Tensor]) -> None:
        """Let a piece have its mean: a buffer at once, a parameter with ``gradients``."""
        mean = self.means(piece.start, piece.stop).view(piece.tensor.shape)
        if not piece.trained:
            piece.tensor.copy_(mean)
            return
        gradient = torch.empty_like(piece.tensor)
        gradient.copy_(mean if self.scale == 1 else mean * self.scale)
        if not is_finite(gradient):
            log.warning("the mean gradient of %s overflows: no peer changes it", piece.name)
        elif bool(gradient.any().item()):  # what nobody used has no gradient
            gradients[piece.tensor] = gradient

    def report(self) -> EpochReport:
        """Return what came of the averaging, as soon as it has ended."""
        if self.heard is not None:
            return self.heard[1]
        assert self.job is not None
        return self.job.wait()


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
