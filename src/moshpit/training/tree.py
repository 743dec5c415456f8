"""State as Python keeps it (dicts, lists, tensors, numbers) apart into tensors and JSON.

JSON stays as it is where it can say the thing; else a dict with one key that begins with ``$``
stands for it: ``{"$tensor": name}``, ``{"$tuple": [...]}``, ``{"$float": "inf"}``,
``{"$dict": [[key, value], ...]}`` for keys that are not all plain strings, ``{"$counter": ...}``
for what `torch.optim.lr_scheduler.MultiStepLR` keeps, and so on for sets, deques, bytes, complex
numbers, numpy's arrays and torch's dtypes. Dicts and sets are sorted, so that equal states have
equal JSON.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch

from moshpit.errors import StateError
from moshpit.tensors.image import DTYPES
from moshpit.training.copying import LateCopies

_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}
DEPTH_MAX = 64  # guess: no optimizer nests so deeply; against cycles and hostile manifests


class TreeWriter:
    """Takes states apart.

    Args:
        copies: makes the copies of the tensors that are `late`.

    Attributes:
        tensors: copies of all tensors found so far, on the CPU, by name: the path to them.
        late: which tensors may be copied later; by default none.
    """

    def __init__(self, copies: LateCopies | None = None) -> None:
        self._copies = copies
        self.tensors: dict[str, torch.Tensor] = {}
        self.late: Callable[[torch.Tensor], bool] = lambda tensor: False

    def take(self, value: object, path: str, depth: int = 0) -> Any:
        """Return what stands for a value in JSON; its tensors are copied.

        Raises:
            StateError: something in it has no form in a file; says where and what.
        """
        if depth > DEPTH_MAX:
            raise StateError(f"{path[:200]}: nested more than {DEPTH_MAX} deep, or in a circle")
        match value:
            case None | bool() | str():
                return value
            case int():
                return int(value)
            case float():
                return float(value) if math.isfinite(value) else {"$float": str(float(value))}
            case torch.Tensor():
                return {"$tensor": self._keep(value, path)}
            case list() | tuple():
                items = cast("list[object] | tuple[object, ...]", value)
                found = [self.take(v, f"{path}.{i}", depth + 1) for i, v in enumerate(items)]
                return found if isinstance(value, list) else {"$tuple": found}
            case Counter():
                counts = cast("Counter[object]", value)
                return {"$counter": self._pairs(dict(counts), path, depth)}
            case dict():
                return self._dict(cast("dict[object, object]", value), path, depth)
            case np.generic():
                return self.take(cast("object", value.item()), path, depth + 1)
            case np.ndarray():
                array = cast("np.ndarray[Any, np.dtype[Any]]", value)
                return {"$array": self._keep_array(array, path)}
            case set() | frozenset():
                items = _sorted(cast("set[object] | frozenset[object]", value), path)
                found = [self.take(v, f"{path}.{i}", depth + 1) for i, v in enumerate(items)]
                return {"$set" if isinstance(value, set) else "$frozenset": found}
            case deque():
                queue = cast("deque[object]", value)
                found = [self.take(v, f"{path}.{i}", depth + 1) for i, v in enumerate(queue)]
                return {"$deque": [queue.maxlen, found]}
            case bytes():
                return {"$bytes": base64.b64encode(value).decode()}
            case complex():
                parts = (value.real, value.imag)
                return {"$complex": [self.take(part, path, depth + 1) for part in parts]}
            case torch.dtype() if str(value) in _DTYPES:
                return {"$dtype": str(value)}
            case _:
                kind = type(value).__qualname__
                raise StateError(
                    f"{path}: a {kind} cannot be saved; tensors, numbers, strings, lists, tuples "
                    "and dicts can"
                )

    def _dict(self, value: dict[object, object], path: str, depth: int) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            named = cast("dict[str, object]", value)
            return {k: self.take(named[k], f"{path}.{k}", depth + 1) for k in sorted(named)}
        return {"$dict": self._pairs(value, path, depth)}

    def _pairs(self, value: dict[object, object], path: str, depth: int) -> list[list[Any]]:
        if not all(isinstance(key, str | int | float) for key in value):
            raise StateError(f"{path}: only strings and numbers can be keys")
        keys = sorted(cast("dict[Any, object]", value), key=lambda k: (type(k).__name__, k))
        return [
            [self.take(k, path, depth), self.take(value[k], f"{path}.{k}", depth + 1)] for k in keys
        ]

    def _keep_array(self, array: np.ndarray[Any, np.dtype[Any]], path: str) -> str:
        try:
            tensor: torch.Tensor = torch.from_numpy(array.copy(order="C"))  # pyright: ignore[reportUnknownMemberType]
            return self._keep(tensor, path)
        except TypeError as error:
            raise StateError(f"{path}: an array of {array.dtype} has no form") from error

    def _keep(self, tensor: torch.Tensor, path: str) -> str:
        name, number = path, 1
        while name in self.tensors:  # {"a.b": ..., "a": {"b": ...}}
            number += 1
            name = f"{path}~{number}"
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise StateError(f"{path}: a {tensor.layout} tensor on {tensor.device} has no form")
        if self._copies is not None and self.late(tensor):
            self.tensors[name] = self._copies.copy(tensor)
        else:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            self.tensors[name] = made.copy_(tensor.detach())
        return name


def read_tree(value: Any, tensors: Mapping[str, torch.Tensor], *, copy: bool = True) -> Any:
    """Return what `TreeWriter.take` took apart.

    Args:
        value: what stands for it in JSON.
        tensors: by name.
        copy: return copies of the tensors, so that the others can go.

    Raises:
        StateError: it makes no sense.
    """
    try:
        found = {n: tensors[n].clone() for n in _names(value, 0)} if copy else tensors
        return _read(value, found, 0)
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise StateError(f"the contents make no sense: {error!r}") from error


def _names(value: Any, depth: int) -> Iterator[str]:
    """Yield the names of the tensors in a tree."""
    if depth > 2 * DEPTH_MAX:
        raise StateError("the contents are nested too deeply")
    if isinstance(value, list):
        for inner in cast("list[Any]", value):
            yield from _names(inner, depth + 1)
    elif isinstance(value, dict):
        for key, inner in cast("dict[str, Any]", value).items():
            if key in {"$tensor", "$array"}:
                yield str(inner)
            else:
                yield from _names(inner, depth + 1)


def _read(value: Any, tensors: Mapping[str, torch.Tensor], depth: int) -> Any:
    if depth > 2 * DEPTH_MAX:
        raise StateError("the contents are nested too deeply")

    def read(inner: Any) -> Any:
        return _read(inner, tensors, depth + 1)

    if isinstance(value, list):
        return [read(v) for v in cast("list[Any]", value)]
    if not isinstance(value, dict):
        return value
    named = cast("dict[str, Any]", value)
    tag = next(iter(named), "")
    if len(named) == 1 and tag.startswith("$"):
        return _tagged(tag, named[tag], tensors, read)
    return {k: read(v) for k, v in named.items()}


def _sorted(values: set[object] | frozenset[object], path: str) -> list[Any]:
    if not all(isinstance(value, str | int | float) for value in values):
        raise StateError(f"{path}: only strings and numbers can be in a set")
    return sorted(cast("set[Any]", values), key=lambda v: (type(v).__name__, v))


def _tagged(
    tag: str, value: Any, tensors: Mapping[str, torch.Tensor], read: Callable[[Any], Any]
) -> Any:
    match tag:
        case "$tensor":
            return tensors[value]
        case "$tuple":
            return tuple(read(v) for v in value)
        case "$float":
            return float(value)
        case "$dict":
            return {read(k): read(v) for k, v in value}
        case "$counter":
            return Counter({read(k): read(v) for k, v in value})
        case "$array":
            return tensors[value].numpy()
        case "$set":
            return {read(v) for v in value}
        case "$frozenset":
            return frozenset(read(v) for v in value)
        case "$deque":
            maxlen, items = value
            return deque((read(v) for v in items), maxlen)
        case "$bytes":
            return base64.b64decode(value, validate=True)
        case "$complex":
            real, imag = value
            return complex(read(real), read(imag))
        case "$dtype":
            return _DTYPES[value]
        case _:
            raise StateError(f"the contents hold a {tag[:20]!r}, which nobody here knows")
