r"""Blocks of small integers under one scale: int8 and int4 by the largest size in the block.

A block with the largest size :math:`a` has the step :math:`s = a / L` (L the largest level, 127
or 7), rounded to bfloat16, and a number :math:`x` becomes the level :math:`\lfloor x / s \rceil`.
That the step has eight significant bits is what makes encoding a projection, exactly: all
:math:`q s` are float32 numbers without rounding; :math:`a / s` is within a 256th of L, so it
rounds to L; hence what was decoded has the largest size :math:`L s`, the step :math:`s` again,
and the levels again.

Blocks whose step would be below 2^-126 become zeros, numbers so large that a level times its step
would not be finite saturate (3.3e38 for int8, 2.9e38 for int4). A step that is no number marks a
block that was not finite, and is refused.
"""

from __future__ import annotations

import torch

from moshpit.tensors.codecs import blocks
from moshpit.tensors.codecs.base import (
    FLOAT_MAX,
    Payload,
    as_tensor,
    bfloat16_below,
    check_fit,
    new_payload,
)
from moshpit.tensors.codecs.scratch import scratch
from moshpit.tensors.reduce import is_finite

_STEP_BYTES = 2
_STEP_MIN = 2.0**-126  # the smallest with all its bits
_COUNT_BYTES = 4


class Int8(blocks.ByteLevels):
    """Blockwise int8: the steps as bfloat16, then a byte a number (implements `base.Codec`).

    Args:
        number: for chunk headers.
        block: numbers in a block, a power of two.

    Example:
        >>> codec = Int8(3)
        >>> codec.decode(codec.encode(torch.tensor([127.0, 0.4, -3.2])))
        tensor([127.,   0.,  -3.])
    """

    name = "int8"
    in_place = False
    biased = True
    differences_only = True
    refuses_nonfinite = True

    def __init__(self, number: int, block: int = 64) -> None:
        super().__init__(block)
        self.number = number
        self._steps = _Steps(127, 128)

    @property
    def result_codec(self) -> Int8:
        """Itself."""
        return self

    def encoded_bytes(self, numel: int) -> int:
        """One for each number and two for each block."""
        return numel + _STEP_BYTES * blocks.count(numel, self._block)

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return the steps and levels."""
        payload, memory = new_payload(self.encoded_bytes(source.numel()))
        if source.numel():
            steps, levels = self._split(memory)
            inverses = self._steps.write(blocks.peaks(source.detach(), self._block), steps)
            levels.copy_(blocks.levels(source.detach(), inverses, self._block, 127))
        return payload

    def _read(self, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
        memory = as_tensor(payload)
        length = memory.numel()
        # n + 2·⌈n / block⌉ grows with n, so that the length says what n is.
        numel = length - _STEP_BYTES * blocks.count(length, self._block + _STEP_BYTES)
        if numel < 0 or self.encoded_bytes(numel) != length:
            raise ValueError(f"{length} bytes are no blocks of {self.name}")
        steps, levels = self._split(memory)
        return self._steps.read(steps), levels

    def _split(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        edge = _STEP_BYTES * blocks.count(memory.numel(), self._block + _STEP_BYTES)
        return memory[:edge].view(torch.bfloat16), memory[edge:].view(torch.int8)


class Int4:
    """Blockwise int4: the count of numbers in four bytes, the steps as bfloat16, then two levels
    a byte (implements `base.Codec`).

    Byte i holds the level of number i plus 8 in its low bits, and in its high bits, as a two's
    complement, the level of number i + ⌈n/2⌉.

    Args:
        number: for chunk headers.
        block: numbers in a block, a power of two.

    Example:
        >>> codec = Int4(4)
        >>> codec.decode(codec.encode(torch.tensor([7.0, 0.4, -3.2])))
        tensor([ 7.,  0., -3.])
    """

    name = "int4"
    in_place = False
    biased = True
    differences_only = True
    refuses_nonfinite = True

    def __init__(self, number: int, block: int = 32) -> None:
        self.number = number
        self._block = block
        self._steps = _Steps(7, 8)

    @property
    def result_codec(self) -> Int4:
        """Itself."""
        return self

    def encoded_bytes(self, numel: int) -> int:
        """Half a byte for each number, two for each block, four for the count."""
        return _COUNT_BYTES + _STEP_BYTES * blocks.count(numel, self._block) + (numel + 1) // 2

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return the count, the steps and the levels."""
        numel = source.numel()
        payload, memory = new_payload(self.encoded_bytes(numel))
        memory[:_COUNT_BYTES].view(torch.int32).fill_(numel)
        if numel:
            steps, pairs = self._split(memory, numel)
            inverses = self._steps.write(blocks.peaks(source.detach(), self._block), steps)
            levels = blocks.levels(source.detach(), inverses, self._block, 7)
            low, high = levels[: pairs.numel()], levels[pairs.numel() :]
            low[: high.numel()].add_(high, alpha=16)
            pairs.copy_(low.add_(8))
        return payload

    def decode(self, payload: Payload) -> torch.Tensor:
        """Return the numbers, shape (n,)."""
        numel, steps, pairs = self._read(payload)
        numbers = torch.empty(numel)
        self._fill(numbers, steps, pairs)
        return numbers

    def decode_into(self, payload: Payload, destination: torch.Tensor) -> None:
        """Decode into a tensor of shape (n,)."""
        numel, steps, pairs = self._read(payload)
        check_fit(numel, destination)
        self._fill(destination, steps, pairs)

    def _fill(self, numbers: torch.Tensor, steps: torch.Tensor, pairs: torch.Tensor) -> None:
        part = scratch("levels", pairs.numel(), torch.int8)
        low, high = numbers[: pairs.numel()], numbers[pairs.numel() :]
        torch.bitwise_and(pairs, 0x0F, out=part)
        low.copy_(part).sub_(8)
        torch.bitwise_right_shift(pairs, 4, out=part)
        high.copy_(part[: high.numel()])
        blocks.multiply(numbers, steps, self._block, numbers)

    def _read(self, payload: Payload) -> tuple[int, torch.Tensor, torch.Tensor]:
        memory = as_tensor(payload)
        numel = read_count(memory)
        if self.encoded_bytes(numel) != memory.numel():
            raise ValueError(f"{memory.numel()} bytes are not {numel} numbers of {self.name}")
        steps, pairs = self._split(memory, numel)
        return numel, self._steps.read(steps), pairs

    def _split(self, memory: torch.Tensor, numel: int) -> tuple[torch.Tensor, torch.Tensor]:
        edge = _COUNT_BYTES + _STEP_BYTES * blocks.count(numel, self._block)
        return memory[_COUNT_BYTES:edge].view(torch.bfloat16), memory[edge:].view(torch.int8)


def read_count(memory: torch.Tensor) -> int:
    """Return the count at the head of a payload; raises `ValueError` if there is none."""
    if memory.numel() < _COUNT_BYTES:
        raise ValueError(f"{memory.numel()} bytes have no count of numbers")
    count = int(memory[:_COUNT_BYTES].view(torch.int32).item())
    if count < 0:
        raise ValueError(f"{count} numbers")
    return count


class _Steps:
    """Writes and reads the steps of blocks.

    Args:
        top: the level of the largest number.
        lowest: the size of the lowest level that a payload can hold; times any step that is
            accepted, it is finite.
    """

    def __init__(self, top: int, lowest: int) -> None:
        self._top = top
        self._most = bfloat16_below(FLOAT_MAX / lowest)
        most = torch.tensor(self._most, dtype=torch.bfloat16)
        self._most_bits = int(most.view(torch.int16).item())

    def write(self, peaks: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        """Write the steps of blocks with these peaks; return one over them, scratch of shape
        (blocks,), 0 for blocks of zeros."""
        rounded = torch.div(peaks, self._top, out=scratch("steps", peaks.numel()))
        rounded.clamp_(max=self._most)
        rounded.masked_fill_(rounded < _STEP_MIN, 0.0)
        if not is_finite(peaks):
            rounded.masked_fill_(~peaks.isfinite(), float("nan"))
        steps.copy_(rounded)
        rounded.copy_(steps)
        return rounded.reciprocal_().nan_to_num_(nan=0.0, posinf=0.0)

    def read(self, steps: torch.Tensor) -> torch.Tensor:
        """Return the steps as float32; raises `ValueError` if one is no step."""
        if steps.numel():
            # As integers: negative ones, infinity and NaN are outside of the range, too.
            low, high = torch.aminmax(steps.view(torch.int16))
            if int(low.item()) < 0 or int(high.item()) > self._most_bits:
                raise ValueError("a block with an impossible step")
        return scratch("steps", steps.numel()).copy_(steps)
