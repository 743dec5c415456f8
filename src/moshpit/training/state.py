"""Everything that one peer's training consists of, as named tensors and a little JSON.

`TrainingState` is what a checkpoint holds and what a joiner will get: parameters and buffers
(``model.*``), the optimizer's state of any shape, the strategy's, the epoch, learning rates,
what the user has added (schedulers, a `torch.amp.GradScaler`, anything with ``state_dict``), and
the random generators. Its bytes are those of `moshpit.tensors.image`.

It is taken in two steps, since a training loop moves its scheduler on only after ``step()``
returns: tensors at the end of a ``step()``, before the next one changes them, and the rest
(`Capture.finish`) when the loop comes around. So what is saved is what the next iteration
of the loop would have begun with.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np
import torch

from moshpit.errors import StateError
from moshpit.tensors.image import CHUNK_BYTES, Manifest, StateAssembler, StateImage
from moshpit.training.copying import LateCopies
from moshpit.training.tree import TreeWriter, read_tree

MODEL = "model"
NAMES_SHOWN = 3  # of tensors that do not fit, in an error


class Stateful(Protocol):
    """Anything that PyTorch would call stateful: schedulers, scalers, samplers, modules."""

    def state_dict(self) -> Any:
        """Return what `load_state_dict` takes."""
        ...

    def load_state_dict(self, state_dict: Any, /) -> Any:
        """Restore what `state_dict` returned."""
        ...


class Capture:
    """A state of which the tensors are copied already.

    Args:
        optimizer: a `moshpit.Optimizer`, or any other.
        model: where parameters and buffers are; without it, the optimizer's parameters only.
        epoch: what the state is of.
        generators: also the states of the random generators.
        owner: whose it is, as text.
        company: how many peers train the same; 0: unknown.
        copies: makes the copies of what only the next step changes: parameters, and the state of
            optimizer and strategy. Everything else is copied here.

    Raises:
        StateError: something cannot be saved; says what.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None,
        *,
        epoch: int,
        generators: bool = True,
        owner: str = "",
        company: int = 0,
        copies: LateCopies | None = None,
    ) -> None:
        self._optimizer = optimizer
        self.epoch = epoch
        self._writer = TreeWriter(copies)
        stepped = {p.data_ptr() for g in optimizer.param_groups for p in g["params"]}
        self._writer.late = lambda tensor: tensor.data_ptr() in stepped  # not buffers
        state = optimizer.state_dict()
        self._places = [group["params"] for group in state.pop("param_groups")]
        self._contents: dict[str, Any] = {
            "kind": kind_of(optimizer),
            "owner": owner,
            "company": company,
            MODEL: self._writer.take(_model_state(model, optimizer), MODEL),
        }
        self._writer.late = lambda tensor: True
        self._contents["optimizer"] = self._writer.take(state, "optimizer")
        self._writer.late = lambda tensor: False
        if generators:
            self._contents["generators"] = self._writer.take(_generators(), "generators")

    def finish(self, added: Mapping[str, Stateful]) -> TrainingState:
        """Add what the training loop changes after a step: the options of the parameter groups
        (learning rates), and what the user has added, by name."""
        groups = [
            {**{k: v for k, v in group.items() if k != "params"}, "params": places}
            for group, places in zip(self._optimizer.param_groups, self._places, strict=True)
        ]
        self._contents["groups"] = self._writer.take(groups, "groups")
        states = {name: thing.state_dict() for name, thing in added.items()}
        self._contents["added"] = self._writer.take(states, "added")
        return TrainingState(self.epoch, self._writer.tensors, self._contents)


@dataclass(frozen=True, slots=True)
class TrainingState:
    """A state in full, independent of the objects it was taken from.

    Attributes:
        epoch: the swarm's epoch that it is of.
        tensors: by name, on the CPU.
        contents: the rest, with the names of tensors in their places (`moshpit.training.tree`).

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        >>> state = TrainingState.capture(optimizer, model, epoch=4)
        >>> sorted(state.tensors)[-2:]
        ['model.bias', 'model.weight']
        >>> other = torch.nn.Linear(3, 1)
        >>> copy = torch.optim.AdamW(other.parameters())
        >>> TrainingState.of(state.image().manifest, state.tensors).restore(copy, other)
        >>> torch.equal(model.weight, other.weight), copy.param_groups[0]["lr"]
        (True, 0.5)
    """

    epoch: int
    tensors: dict[str, torch.Tensor]
    contents: dict[str, Any]

    @classmethod
    def capture(
        cls,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None = None,
        *,
        epoch: int,
        added: Mapping[str, Stateful] | None = None,
        generators: bool = True,
        owner: str = "",
        copies: LateCopies | None = None,
    ) -> TrainingState:
        """Take the state as it is now; arguments as of `Capture`."""
        taken = Capture(
            optimizer, model, epoch=epoch, generators=generators, owner=owner, copies=copies
        )
        return taken.finish(added or {})

    @classmethod
    def of(cls, manifest: Manifest, tensors: dict[str, torch.Tensor]) -> TrainingState:
        """Return the state that a manifest and its tensors are."""
        return cls(manifest.epoch, tensors, manifest.contents)

    @classmethod
    def assembled(cls, assembler: StateAssembler) -> TrainingState:
        """Return the state whose chunks are all there; raises `StateError`."""
        return cls.of(assembler.manifest, assembler.tensors())

    def image(self, chunk_bytes: int = CHUNK_BYTES) -> StateImage:
        """Return the state as chunks of bytes."""
        return StateImage.of(self.tensors, self.contents, self.epoch, chunk_bytes)

    @property
    def owner(self) -> str:
        """Whose it is."""
        owner = self.contents.get("owner")
        return owner if isinstance(owner, str) else ""

    def check(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        """Find out whether `restore` would succeed, and change nothing.

        Raises:
            StateError: it is of another model or optimizer; says where they differ.
        """
        mine = _model_state(model, optimizer)
        theirs = self._part(MODEL, copy=False)
        kind, expected = self.contents.get("kind"), kind_of(optimizer)
        if kind != expected:
            raise StateError(f"it is of a {kind}, and here is a {expected}")
        missing = [n for n in mine if n not in theirs]
        surplus = [n for n in theirs if n not in mine]
        if missing or surplus:
            raise StateError(
                "it is of another model: "
                + _listed("this model's", missing)
                + (" and " if missing and surplus else "")
                + _listed("its own", surplus)
                + " not on both sides"
            )
        for name, value in mine.items():
            saved = theirs[name]
            if isinstance(value, torch.Tensor) and (
                not isinstance(saved, torch.Tensor)
                or (saved.shape, saved.dtype) != (value.shape, value.dtype)
            ):
                raise StateError(f"{name} is {_form(saved)} there and {_form(value)} here")
        sizes = [len(group["params"]) for group in self._groups()]
        here = [len(group["params"]) for group in optimizer.param_groups]
        if sizes != here:
            raise StateError(f"its parameter groups have {sizes} parameters, and here {here}")

    def restore(
        self,
        optimizer: torch.optim.Optimizer,
        model: torch.nn.Module | None = None,
        *,
        added: Mapping[str, Stateful] | None = None,
        generators: bool = False,
    ) -> None:
        """Bring objects into this state; arguments as of `capture`.

        Raises:
            StateError: as `check`; or something was added that the state knows nothing of; or
                the optimizer's part of it makes no sense (then half of it may be restored).
            ConfigError: the strategy is another one.
        """
        self.check(optimizer, model)
        try:
            self._apply(optimizer, model)
        except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise StateError(f"it cannot be loaded: {error!r}") from error
        for name, thing in (added or {}).items():
            self.restore_added(name, thing)
        if generators and "generators" in self.contents:
            _set_generators(self._part("generators"))

    def _apply(self, optimizer: torch.optim.Optimizer, model: torch.nn.Module | None) -> None:
        state = self._part("optimizer") | {"param_groups": self._groups()}
        optimizer.load_state_dict(state | {"state": _plain(cast("dict[Any, Any]", state["state"]))})
        _keep_exact(optimizer, state)
        theirs = self._part(MODEL, copy=False)
        keys = model.state_dict().keys() if model is not None else ()
        if model is not None:
            model.load_state_dict({name: theirs[name] for name in keys})
        with torch.no_grad():
            for name, parameter in _model_state(model, optimizer).items():
                if name not in keys:
                    parameter.copy_(theirs[name])

    def names_added(self) -> list[str]:
        """Return the names of what was added."""
        return list(self._part("added", copy=False))

    def restore_added(self, name: str, thing: Stateful) -> None:
        """Bring one of the things that were added into this state.

        Raises:
            StateError: nothing was saved under that name.
        """
        added = self._part("added")
        if name not in added:
            raise StateError(f"nothing was saved as {name!r}, only {sorted(added)}")
        thing.load_state_dict(added[name])

    def restore_options(self, optimizer: torch.optim.Optimizer) -> None:
        """Set the options of the parameter groups (learning rates) again, after something, such
        as a new scheduler, has set them to what a run begins with."""
        for group, saved in zip(optimizer.param_groups, self._groups(), strict=True):
            group.update({k: v for k, v in saved.items() if k != "params"})

    def _part(self, name: str, *, copy: bool = True) -> dict[str, Any]:
        part = read_tree(self.contents.get(name), self.tensors, copy=copy)
        if not isinstance(part, dict):
            raise StateError(f"it has no part {name!r}")
        return part  # pyright: ignore[reportUnknownVariableType]

    def _groups(self) -> list[dict[str, Any]]:
        groups: Any = read_tree(self.contents.get("groups"), self.tensors)
        if not isinstance(groups, list) or not all(
            isinstance(group, dict) and isinstance(group.get("params"), list)  # pyright: ignore[reportUnknownMemberType]
            for group in groups  # pyright: ignore[reportUnknownVariableType]
        ):
            raise StateError("it has no parameter groups")
        return groups  # pyright: ignore[reportUnknownVariableType]


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """Return the name of the optimizer's class, of the wrapped one where it wraps one."""
    inner = getattr(optimizer, "inner", optimizer)
    return type(inner).__name__


def _plain(states: dict[Any, Any]) -> dict[Any, Any]:
    """Return what `torch.optim.Optimizer.load_state_dict` can read: it takes everything that can
    be iterated for a list of tensors, also strings and arrays."""
    kept: dict[Any, Any] = {}
    for place, state in states.items():
        kept[place] = state
        if isinstance(place, int) and isinstance(state, dict):
            named = cast("dict[Any, Any]", state)
            plain = torch.Tensor | int | float | None
            kept[place] = {k: v for k, v in named.items() if isinstance(v, plain)}
    return kept


def _keep_exact(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    """Add what `_plain` has left out, and undo what the loading does to tensors that are not like
    their parameter: it turns also counts, masks and float32 momenta into its dtype."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    for place, parameter in zip(places, parameters, strict=True):
        for key, saved in state["state"].get(place, {}).items():
            loaded = optimizer.state[parameter].get(key)
            optimizer.state[parameter][key] = _exact(loaded, saved, parameter.device)


def _exact(loaded: Any, saved: Any, device: torch.device) -> Any:
    """Return what was saved, where the loading has put it."""
    if isinstance(loaded, torch.Tensor):  # also what was a number in older versions of torch
        if not isinstance(saved, torch.Tensor) or saved.dtype == loaded.dtype:
            return loaded
        return saved.to(loaded.device)
    return _moved(saved, device)


def _moved(saved: Any, device: torch.device) -> Any:
    match saved:
        case torch.Tensor():
            return saved.to(device)
        case Counter():
            return cast("Counter[Any]", saved)
        case dict():
            return {k: _moved(v, device) for k, v in cast("dict[Any, Any]", saved).items()}
        case list() | tuple():
            items = cast("list[Any] | tuple[Any, ...]", saved)
            return type(items)(_moved(v, device) for v in items)
        case deque():
            queue = cast("deque[Any]", saved)
            return deque((_moved(v, device) for v in queue), queue.maxlen)
        case _:
            return saved


def _model_state(model: torch.nn.Module | None, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return parameters and buffers by name, and the optimizer's parameters that are not among
    the model's, by their place."""
    found: dict[str, Any] = dict(model.state_dict()) if model is not None else {}
    known = {id(p) for p in model.parameters()} if model is not None else set[int]()
    for g, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                found[f"group{g}.{i}"] = parameter
    return found


def _listed(whose: str, names: list[str]) -> str:
    if not names:
        return ""
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{whose} {', '.join(names[:NAMES_SHOWN])}{more}"


def _form(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    return type(value).__name__


def _generators() -> dict[str, Any]:
    numpy: Any = np.random.get_state(legacy=True)
    found: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (numpy[0], numpy[1].tolist(), *numpy[2:]),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state_all()
    return found


def _set_generators(saved: dict[str, Any]) -> None:
    torch.set_rng_state(saved["torch"])
    random.setstate(saved["python"])
    np.random.set_state(saved["numpy"])
    if "cuda" in saved and torch.cuda.is_available():
        for device, state in enumerate(saved["cuda"][: torch.cuda.device_count()]):
            torch.cuda.set_rng_state(state, device)
