"""Weighted means in float32 that neither overflow nor lose anything to large weights."""

from __future__ import annotations

import math

import torch

_HEADROOM = 64  # seats of a group: with equal masses the scale never has to change


class WeightedSum:
    r"""The running :math:`\sum_i m_i x_i` of one chunk, in memory that is given.

    It is kept as :math:`\sum_i (m_i / s)\,x_i` with a power of two :math:`s \ge \sum_i m_i`,
    so that no intermediate value is larger than the largest :math:`|x_i|`: a million samples
    of values near 1e38 do not overflow. The scale grows by powers of two, which is exact. A
    single contribution stays as it is, bit by bit.

    Args:
        into: the sum's memory, shape (n,); what is in it is overwritten.
    """

    def __init__(self, into: torch.Tensor) -> None:
        self._sum = into
        self._mass = 0.0
        self._scale = 0.0
        self._count = 0

    @property
    def mass(self) -> float:
        """The masses added so far."""
        return self._mass

    def add(self, values: torch.Tensor, mass: float) -> None:
        """Add ``mass * values``; values of shape (n,), finite; mass finite and positive."""
        assert 0 < mass < math.inf, f"mass {mass}"
        self._count += 1
        before, self._mass = self._mass, self._mass + mass
        if self._count == 1:
            self._sum.copy_(values)
            return
        if self._count == 2:
            self._scale = _power_of_two(self._mass) * _HEADROOM
            self._sum.mul_(before / self._scale)
        elif self._mass > self._scale:
            scale = _power_of_two(self._mass) * _HEADROOM
            self._sum.mul_(self._scale / scale)
            self._scale = scale
        self._sum.add_(values, alpha=mass / self._scale)

    def finish(self) -> None:
        """Turn the sum into the mean, in place."""
        assert self._count, "the mean of nothing"
        if self._count > 1:
            self._sum.div_(self._mass / self._scale)
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


def _power_of_two(mass: float) -> float:
    return math.ldexp(1.0, math.frexp(mass)[1])
