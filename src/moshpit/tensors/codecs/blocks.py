"""What the blockwise codecs share: runs of numbers with one scale each, the last one shorter."""

from __future__ import annotations

import torch

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
