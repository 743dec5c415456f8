"""How tensors lie in the one flat vector that is averaged, and how that is cut into chunks.

The vector is float32 on the CPU. Tensors of other floating dtypes go through float32: float16
and bfloat16 lose nothing on the way in and are rounded on the way out; float64 is rounded to
float32 on the way in. Tensors may live on any device; they are copied.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from moshpit.config import TransportConfig
from moshpit.errors import LayoutError

Tensors = Mapping[str, torch.Tensor] | Sequence[torch.Tensor] | Sequence[tuple[str, torch.Tensor]]

SCHEMA_BYTES = 8
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@dataclass(frozen=True, slots=True)
class _Entry:
    name: str
    shape: torch.Size
    dtype: torch.dtype
    start: int
    stop: int


class VectorLayout:
    """The names, shapes and dtypes of some tensors, and their places in a flat vector.

    Args:
        tensors: a mapping of names to tensors, (name, tensor) pairs, or just tensors (their
            names are then their numbers). They are what the methods work on, where no others
            are given.

    Attributes:
        names: of the tensors.
        numel: how many numbers the vector has.
        schema: 8 bytes that are equal for equal names, shapes and dtypes only.

    Raises:
        LayoutError: there are none, or one cannot be averaged; it says which and why.

    Example:
        >>> layout = VectorLayout({"w": torch.ones(2, 2), "b": torch.zeros(2)})
        >>> vector = torch.empty(layout.numel)
        >>> layout.flatten_into(vector)
        >>> vector
        tensor([1., 1., 1., 1., 0., 0.])
    """

    def __init__(self, tensors: Tensors) -> None:
        named = list(_named(tensors))
        if not named:
            raise LayoutError("no tensors were given; there is nothing to average")
        entries: list[_Entry] = []
        at = 0
        for name, tensor in named:
            _check(name, tensor)
            entries.append(_Entry(name, tensor.shape, tensor.dtype, at, at + tensor.numel()))
            at += tensor.numel()
        self.names = tuple(name for name, _ in named)
        if len(set(self.names)) != len(self.names):
            twice = next(name for name in self.names if self.names.count(name) > 1)
            raise LayoutError(f"the name {twice!r} was given twice")
        if at == 0:
            raise LayoutError("all tensors are empty; there is nothing to average")
        self._tensors = [tensor for _, tensor in named]
        self._entries = entries
        self.numel = at
        digest = hashlib.blake2b(digest_size=SCHEMA_BYTES)
        for entry in entries:
            line = f"{len(entry.name)}:{entry.name}:{tuple(entry.shape)}:{entry.dtype}\n"
            digest.update(line.encode())
        self.schema = digest.digest()

    def flatten_into(self, vector: torch.Tensor, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Copy the tensors into the vector.

        Raises:
            LayoutError: the vector or the tensors are not of this layout.
        """
        self._check_vector(vector)
        with torch.no_grad():
            for entry, tensor in self._pairs(tensors):
                vector[entry.start : entry.stop].view(entry.shape).copy_(tensor)

    def as_vector(self, tensors: Sequence[torch.Tensor] = ()) -> torch.Tensor | None:
        """Return the tensors as a vector that is their own memory, if it can be: a single
        contiguous float32 tensor on the CPU."""
        (_, only), *others = self._pairs(tensors)
        simple = only.dtype == torch.float32 and only.device.type == "cpu" and only.is_contiguous()
        return None if others or not simple else only.detach().view(-1)

    def write_back(self, vector: torch.Tensor, tensors: Sequence[torch.Tensor] = ()) -> None:
        """Copy the vector into the tensors, in their dtypes and on their devices.

        Raises:
            LayoutError: the vector or the tensors are not of this layout.
        """
        self._check_vector(vector)
        with torch.no_grad():
            for entry, tensor in self._pairs(tensors):
                tensor.copy_(vector[entry.start : entry.stop].view(entry.shape))

    def add_delta(
        self,
        mean: torch.Tensor,
        snapshot: torch.Tensor,
        tensors: Sequence[torch.Tensor] = (),
    ) -> None:
        r"""Move the tensors by what the averaging changed: ``x += mean - snapshot``.

        Work done since the snapshot survives. Where a number still is what it was in the
        snapshot, the mean itself is assigned, so that peers that did nothing meanwhile hold
        the same bytes. Computed in float32, for float64 tensors in float64.

        Raises:
            LayoutError: a vector or the tensors are not of this layout.

        Source: design §4.
        """
        self._check_vector(mean)
        self._check_vector(snapshot)
        with torch.no_grad():
            for entry, tensor in self._pairs(tensors):
                wide = torch.float64 if tensor.dtype == torch.float64 else torch.float32
                place = slice(entry.start, entry.stop)
                target = mean[place].view(entry.shape).to(tensor.device)
                before = snapshot[place].view(entry.shape).to(tensor.device)
                delta = (target - before).to(wide)
                untouched = tensor.to(torch.float32) == before
                tensor.copy_(torch.where(untouched, target.to(wide), tensor.to(wide) + delta))

    def _pairs(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[_Entry, torch.Tensor]]:
        chosen = tensors or self._tensors
        if len(chosen) != len(self._entries):
            raise LayoutError(f"{len(chosen)} tensors for a layout of {len(self._entries)}")
        for entry, tensor in zip(self._entries, chosen, strict=True):
            if tensor.shape != entry.shape or tensor.dtype != entry.dtype:
                raise LayoutError(
                    f"tensor {entry.name!r}: {tuple(tensor.shape)} {tensor.dtype}, but the layout "
                    f"has {tuple(entry.shape)} {entry.dtype}"
                )
        return zip(self._entries, chosen, strict=True)

    def _check_vector(self, vector: torch.Tensor) -> None:
        if (
            vector.shape != (self.numel,)
            or vector.dtype != torch.float32
            or vector.device.type != "cpu"
            or not vector.is_contiguous()
        ):
            raise LayoutError(
                f"the vector must be {self.numel} contiguous float32 numbers on the CPU, not "
                f"{tuple(vector.shape)} {vector.dtype} on {vector.device}"
            )


def _named(tensors: Tensors) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(tensors, Mapping):
        yield from tensors.items()
        return
    for index, item in enumerate(tensors):
        yield item if isinstance(item, tuple) else (str(index), item)


def _check(name: str, tensor: object) -> None:
    """Raise `LayoutError` if this cannot be averaged."""
    if not isinstance(tensor, torch.Tensor):
        raise LayoutError(f"{name!r} is a {type(tensor).__name__}, not a tensor")
    if tensor.is_complex():
        flaw = "is complex; average torch.view_as_real of it"
    elif tensor.dtype not in DTYPES:
        flaw = f"is {tensor.dtype}; only float16, bfloat16, float32 and float64 can be averaged"
    elif tensor.layout != torch.strided:
        flaw = f"is {tensor.layout}; only dense tensors can be averaged"
    elif tensor.is_meta:
        flaw = "has no data (meta device)"
    else:
        return
    raise LayoutError(f"tensor {name!r} {flaw}")


@dataclass(frozen=True, slots=True)
class ChunkPlan:
    """How a vector is cut: equal chunks, the last one may be shorter.

    It depends on the vector's length (and settings that all peers share) only.

    Attributes:
        numel: numbers in the vector.
        chunk_numel: numbers in a chunk.
        order: for each chunk, its place in the vector, counted in chunks; (): as they are numbered.

    Example:
        >>> plan = ChunkPlan.of(100_000, TransportConfig())
        >>> plan.chunks, plan.chunk_numel, plan.slice(15)
        (16, 6256, slice(93840, 100000, None))
    """

    numel: int
    chunk_numel: int
    order: tuple[int, ...] = ()

    @classmethod
    def of(cls, numel: int, config: TransportConfig) -> ChunkPlan:
        """Return the plan by the settings (`TransportConfig.chunk_numel`)."""
        return cls(numel, config.chunk_numel(numel))

    @property
    def chunks(self) -> int:
        """How many chunks there are."""
        return max(1, -(-self.numel // self.chunk_numel))

    def spread(self) -> ChunkPlan:
        """Return the plan with its chunks in another order: any of them that follow each other lie
        evenly over the vector, so that every part of a group has some of each region.

        A chunk has the same size in both.

        >>> ChunkPlan(numel=15, chunk_numel=2).spread().order
        (0, 4, 2, 6, 1, 5, 3, 7)
        """
        return replace(self, order=_spread(self.numel // self.chunk_numel, self.chunks))

    def place(self, chunk: int) -> int:
        """Return how many chunks lie before a chunk in the vector."""
        return self.order[chunk] if self.order else chunk

    def slice(self, chunk: int) -> slice:
        """Return the place of a chunk in the vector."""
        start = self.place(chunk) * self.chunk_numel
        return slice(start, min(start + self.chunk_numel, self.numel))

    def size(self, chunk: int) -> int:
        """Return how many numbers a chunk has."""
        return min(self.chunk_numel, self.numel - self.place(chunk) * self.chunk_numel)


def _spread(full: int, chunks: int) -> tuple[int, ...]:
    """Return the full chunks in the order of their numbers' bits read backwards (van der Corput),
    then the shorter last one, if there is one: it stays, so that sizes do not change."""
    bits = max(1, (full - 1).bit_length())
    backwards = (int(f"{number:0{bits}b}"[::-1], 2) for number in range(1 << bits))
    return (*(place for place in backwards if place < full), *range(full, chunks))
