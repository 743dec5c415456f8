"""What the blockwise codecs share: runs of numbers with one scale each, the last one shorter."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from moshpit.tensors.codecs.base import Payload, check_fit
from moshpit.tensors.codecs.scratch import scratch

_WIDE = 32  # measured, benchmarks/codecs.py: below it, torch's maximum over short rows is slow


def count(numel: int, block: int) -> int:
    """Return how many blocks so many numbers make."""
    return -(-numel // block)


def peaks(source: torch.Tensor, block: int) -> torch.Tensor:
    """Return the largest size in each block, scratch of shape (blocks,); NaN where there is one.

    Args:
        source: shape (n,).
        block: numbers in a block, a power of two.
    """
    numel = source.numel()
    sizes = torch.abs(source, out=scratch("numbers", numel))
    found = scratch("peaks", count(numel, block))
    full = numel // block
    if full:
        rows = sizes[: full * block].view(full, block)
        width = block
        while width > 1 and block < _WIDE:
            width //= 2
            rows = torch.maximum(rows[:, :width], rows[:, width:])
        torch.amax(rows, 1, out=found[:full])
    if full * block < numel:
        found[full] = sizes[full * block :].amax()
    return found


def multiply(
    source: torch.Tensor, factors: torch.Tensor, block: int, product: torch.Tensor
) -> None:
    """Multiply each block by its factor.

    Args:
        source: shape (n,).
        factors: shape (blocks,).
        block: numbers in a block.
        product: shape (n,), may be the source.
    """
    numel = source.numel()
    full = numel // block
    edge = full * block
    if full:
        rows = source[:edge].view(full, block)
        torch.mul(rows, factors[:full, None], out=product[:edge].view(full, block))
    if edge < numel:
        torch.mul(source[edge:], factors[full], out=product[edge:])


def levels(source: torch.Tensor, inverses: torch.Tensor, block: int, most: int) -> torch.Tensor:
    """Return each number divided by its block's step, rounded to nearest even and held within
    ±most; scratch of shape (n,), float32.

    Args:
        source: shape (n,).
        inverses: one over the steps, shape (blocks,).
        block: numbers in a block.
        most: the largest level.
    """
    rounded = scratch("numbers", source.numel())
    multiply(source, inverses, block, rounded)
    return rounded.round_().clamp_(-most, most)


class ByteLevels(ABC):
    """How codecs decode whose payload is a step for each block and a byte for each number."""

    def __init__(self, block: int) -> None:
        self._block = block

    @abstractmethod
    def _read(self, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the steps, shape (blocks,), and levels, shape (n,); raises `ValueError`."""

    def decode(self, payload: Payload) -> torch.Tensor:
        """Return the numbers, shape (n,)."""
        steps, levels = self._read(payload)
        numbers = torch.empty(levels.numel())
        self._fill(numbers, steps, levels)
        return numbers

    def decode_into(self, payload: Payload, destination: torch.Tensor) -> None:
        """Decode into a tensor of shape (n,)."""
        steps, levels = self._read(payload)
        check_fit(levels.numel(), destination)
        self._fill(destination, steps, levels)

    def _fill(self, numbers: torch.Tensor, steps: torch.Tensor, levels: torch.Tensor) -> None:
        numbers.copy_(levels)
        multiply(numbers, steps, self._block, numbers)
