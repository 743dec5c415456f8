"""Weighted means in float32 that neither overflow nor lose anything to large weights."""

from __future__ import annotations

import math

import torch

_HEADROOM = 64  # seats of a group: with equal masses the scale never has to change


class WeightedSum:
    r"""The running :math:`\sum_i m_i x_i` of one chunk.

    It is kept as :math:`\sum_i (r_i / s)\,x_i` with :math:`r_i = m_i / m_1` and a power of two
    :math:`s \ge \sum_i r_i`, so that no intermediate value is larger than the largest
    :math:`|x_i|`: a million samples of values near 1e38 do not overflow. Scaling by powers of
    two is exact: with equal masses the result is that of adding and dividing by their number.
    A single contribution stays as it is, bit by bit.

    Args:
        first: the first contribution, shape (n,), finite. Its memory becomes the sum's.
        mass: the weight behind it, finite and positive.
    """

    def __init__(self, first: torch.Tensor, mass: float) -> None:
        assert 0 < mass < math.inf, f"mass {mass}"
        self._sum = first
        self._first = mass
        self._ratio = 1.0
        self._scale = 1.0
        self._count = 1

    @property
    def mass(self) -> float:
        """The masses added so far."""
        return self._ratio * self._first

    def add(self, values: torch.Tensor, mass: float) -> None:
        """Add ``mass * values``; values of shape (n,), finite; mass finite and positive."""
        assert 0 < mass < math.inf, f"mass {mass}"
        self._count += 1
        ratio = mass / self._first
        self._ratio += ratio
        if self._ratio > self._scale:
            scale = math.ldexp(1.0, math.frexp(self._ratio)[1]) * _HEADROOM
            self._sum.mul_(self._scale / scale)
            self._scale = scale
        self._sum.add_(values, alpha=ratio / self._scale)

    def mean_into(self, place: torch.Tensor) -> None:
        """Write the mean, shape (n,); the sum is not to be used any more."""
        if self._count == 1:
            place.copy_(self._sum)
            return
        torch.div(self._sum, self._ratio / self._scale, out=place)
        if not is_finite(place):
            # Only rounding at the very edge of the range can do this: the mean of finite
            # numbers is finite.
            limit = torch.finfo(torch.float32).max
            place.clamp_(-limit, limit)


def is_finite(values: torch.Tensor) -> bool:
    """Return whether all numbers are finite; one fast pass, a second one only in doubt."""
    if math.isfinite(values.sum().item()):
        return True
    return bool(torch.isfinite(values).all().item())
