"""Weighted means in float32 that neither overflow nor lose anything to large weights."""

from __future__ import annotations

import math

import torch

_HEADROOM = 64  # seats of a group: with equal masses the scale never has to change


class WeightedSum:
    r"""The running :math:`\sum_i m_i x_i` of one chunk, in memory that is given.

    It is kept as :math:`\sum_i (r_i / s)\,x_i` with :math:`r_i = m_i / m_1` and a power of two
    :math:`s \ge \sum_i r_i`, so that no intermediate value is larger than the largest
    :math:`|x_i|`: a million samples of values near 1e38 do not overflow. Scaling by powers of
    two is exact: with equal masses the result is that of adding and dividing by their number.
    A single contribution stays as it is, bit by bit.

    Args:
        into: the sum's memory, shape (n,); what is in it is overwritten.
    """

    def __init__(self, into: torch.Tensor) -> None:
        self._sum = into
        self._first = 0.0
        self._ratio = 0.0
        self._scale = 1.0
        self._count = 0

    @property
    def mass(self) -> float:
        """The masses added so far."""
        return self._ratio * self._first

    def add(self, values: torch.Tensor, mass: float) -> None:
        """Add ``mass * values``; values of shape (n,), finite; mass finite and positive."""
        assert 0 < mass < math.inf, f"mass {mass}"
        self._count += 1
        if self._count == 1:
            self._first, self._ratio = mass, 1.0
            self._sum.copy_(values)
            return
        ratio = mass / self._first
        self._ratio += ratio
        if self._ratio > self._scale:
            scale = math.ldexp(1.0, math.frexp(self._ratio)[1]) * _HEADROOM
            self._sum.mul_(self._scale / scale)
            self._scale = scale
        self._sum.add_(values, alpha=ratio / self._scale)

    def finish(self) -> None:
        """Turn the sum into the mean, in place."""
        assert self._count, "the mean of nothing"
        if self._count > 1:
            self._sum.div_(self._ratio / self._scale)
            if not is_finite(self._sum):
                # Only rounding at the very edge of the range can do this: the mean of finite
                # numbers is finite.
                limit = torch.finfo(torch.float32).max
                self._sum.clamp_(-limit, limit)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all numbers are finite; one fast pass, a second one only in doubt."""
    if math.isfinite(values.sum().item()):
        return True
    return bool(torch.isfinite(values).all().item())
