"""How many samples a local step has seen, where the user does not say it.

An optimizer cannot see the model, so `BatchWatcher` looks for it: the first module called
with gradients enabled that owns one of the optimizer's parameters is the model (the outermost
call comes first). From then on only that module is watched. Each of its forward passes under
gradients adds the first dimension of its first tensor argument, so several forwards per step
(gradient accumulation) add up, and evaluation under ``torch.no_grad()`` does not count.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.utils.hooks import RemovableHandle

from moshpit.errors import ConfigError

_HOW = (
    "pass the number of samples: step(samples=n) for one step, or "
    "moshpit.Optimizer(..., batch_size=n) for all"
)


def first_dimension(args: Iterable[object], kwargs: Mapping[str, object]) -> int | None:
    """Return the first dimension of the first tensor among the arguments, looking one level
    into lists, tuples and mappings; None if there is none."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            inner: Iterable[object] = (value,)
        elif isinstance(value, Mapping):
            inner = cast("Mapping[object, object]", value).values()
        elif isinstance(value, list | tuple):
            inner = cast("Iterable[object]", value)
        else:
            continue
        for item in inner:
            if isinstance(item, torch.Tensor) and item.dim() > 0:
                return item.shape[0]
    return None


class BatchWatcher:
    """Counts the samples that pass forward through the module that owns some parameters.

    Args:
        parameters: the optimizer's parameters.
        model: the module to watch, if known; otherwise it is found (see above).

    Example:
        >>> model = torch.nn.Linear(3, 1)
        >>> watcher = BatchWatcher(model.parameters())
        >>> _ = model(torch.zeros(8, 3)), model(torch.zeros(4, 3))
        >>> watcher.take()
        12
        >>> watcher.close()
    """

    def __init__(
        self, parameters: Iterable[torch.Tensor], model: torch.nn.Module | None = None
    ) -> None:
        self._owned = {id(p) for p in parameters}
        self._count = 0
        self._handle: RemovableHandle
        if model is not None:
            self._watch(model)
            return
        # The global hook must not keep this object (and so the search) alive.
        this = weakref.ref(self)

        def look(module: torch.nn.Module, args: tuple[Any, ...]) -> None:
            watcher = this()
            if watcher is not None:
                watcher._look(module, args)

        self._handle = register_module_forward_pre_hook(look)
        weakref.finalize(self, self._handle.remove)

    def _look(self, module: torch.nn.Module, args: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        if not any(id(p) in self._owned for p in module.parameters()):
            return
        self._handle.remove()
        self._watch(module)

    def _watch(self, module: torch.nn.Module) -> None:
        this = weakref.ref(self)

        def count(
            _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], __: object
        ) -> None:
            watcher = this()
            if watcher is not None and torch.is_grad_enabled():
                watcher._count += first_dimension(args, kwargs) or 0

        # A hook after the pass: it also runs for the very pass in which the model was found.
        self._handle = module.register_forward_hook(count, with_kwargs=True)

    @property
    def seen(self) -> int:
        """The samples seen since the last `take`.

        Raises:
            ConfigError: none, so the number is not known.
        """
        if self._count == 0:
            raise ConfigError(
                "no forward pass of a module that owns these parameters, with a tensor "
                f"argument, was seen since the last step; {_HOW}"
            )
        return self._count

    def take(self) -> int:
        """Return the samples seen since the last call, and start again from zero.

        Raises:
            ConfigError: as `seen`.
        """
        taken, self._count = self.seen, 0
        return taken

    def own(self, parameters: Iterable[torch.Tensor]) -> None:
        """Look for these parameters as well."""
        self._owned.update(id(p) for p in parameters)

    def forget(self) -> None:
        """Drop what was seen since the last call: the user has said the number."""
        self._count = 0

    def close(self) -> None:
        """Stop watching."""
        self._handle.remove()
