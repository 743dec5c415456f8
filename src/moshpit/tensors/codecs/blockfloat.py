r"""Block floating point: a block shares one exponent, each number keeps a signed byte.

A block whose largest size is in :math:`[2^{e-1}, 2^e)` has the step :math:`2^{e-7}`: its largest
number becomes a level of 64 to 127. Steps are powers of two, so decoding rounds nothing, and what
was decoded has the same exponent and the same levels. Where the largest number would round to 128,
the exponent is one higher.

Blocks below 2^-120 become zeros. The exponent 255 marks a block that was not finite, and is
refused. At blocks of 16 and 64 numbers the payload is 3.76 and 3.94 times smaller than float32.

Source: paper.md §8 (block floating point of the FPGA smart-NIC paper).
"""

from __future__ import annotations

import torch

from moshpit.tensors.codecs import blocks
from moshpit.tensors.codecs.base import Payload, as_tensor, new_payload
from moshpit.tensors.codecs.scratch import scratch
from moshpit.tensors.reduce import is_finite

_TOP = 127
_MANTISSA_BITS = 23
_ROUNDS_UP = 0x10000  # (128 - 127.5) / 64 of a mantissa: what is that near to 2^e reaches it
_EXPONENT_MAX = 254
_SHIFT = 6  # a step's exponent lies so far below that of its block
_INVERSE = 254 + _SHIFT  # the biased exponents of a number and of one over it add up to 254
_NOT_FINITE = 255


class BlockFloat(blocks.ByteLevels):
    """Block floating point: the exponents, a byte each, then a byte a number (implements
    `base.Codec`).

    Args:
        number: for chunk headers.
        name: for people.
        block: numbers in a block, a power of two.

    Example:
        >>> codec = BlockFloat(5, "bfp", 64)
        >>> codec.decode(codec.encode(torch.tensor([100.0, 0.4, -3.2])))
        tensor([100.,   0.,  -3.])
    """

    in_place = False
    biased = True
    differences_only = True
    refuses_nonfinite = True

    def __init__(self, number: int, name: str, block: int) -> None:
        super().__init__(block)
        self.number = number
        self.name = name

    @property
    def result_codec(self) -> BlockFloat:
        """Itself."""
        return self

    def encoded_bytes(self, numel: int) -> int:
        """One for each number and one for each block."""
        return numel + blocks.count(numel, self._block)

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return the exponents and levels."""
        payload, memory = new_payload(self.encoded_bytes(source.numel()))
        if source.numel():
            exponents, levels = self._split(memory)
            peaks = blocks.peaks(source.detach(), self._block)
            inverses = _write_exponents(peaks, exponents)
            levels.copy_(blocks.levels(source.detach(), inverses, self._block, _TOP))
        return payload

    def _read(self, payload: Payload) -> tuple[torch.Tensor, torch.Tensor]:
        memory = as_tensor(payload)
        length = memory.numel()
        numel = length - blocks.count(length, self._block + 1)
        if self.encoded_bytes(numel) != length:
            raise ValueError(f"{length} bytes are no blocks of {self.name}")
        exponents, levels = self._split(memory)
        if numel:
            if int(exponents.amax().item()) > _EXPONENT_MAX:
                raise ValueError("a block that is not finite")
            if int(levels.amin().item()) < -_TOP:
                # With the largest exponent it would not be finite.
                raise ValueError("a level of -128")
        return _steps(exponents), levels

    def _split(self, memory: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        edge = blocks.count(memory.numel(), self._block + 1)
        return memory[:edge], memory[edge:].view(torch.int8)


def _write_exponents(peaks: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """Write the exponents of blocks with these peaks; return one over the steps, shape (blocks,),
    0 for blocks of zeros."""
    biased = scratch("exponents", peaks.numel(), torch.int32)
    torch.add(peaks.view(torch.int32), _ROUNDS_UP, out=biased)
    biased.bitwise_right_shift_(_MANTISSA_BITS).clamp_(max=_EXPONENT_MAX)
    biased.masked_fill_(biased <= _SHIFT, 0)
    if not is_finite(peaks):
        biased.masked_fill_(~peaks.isfinite(), _NOT_FINITE)
    exponents.copy_(biased)
    zeros = biased == 0
    inverses = biased.neg_().add_(_INVERSE).bitwise_left_shift_(_MANTISSA_BITS)
    return inverses.masked_fill_(zeros, 0).view(torch.float32)


def _steps(exponents: torch.Tensor) -> torch.Tensor:
    """Return the steps of blocks, scratch of shape (blocks,), float32."""
    biased = scratch("exponents", exponents.numel(), torch.int32).copy_(exponents)
    return biased.sub_(_SHIFT).clamp_(min=0).bitwise_left_shift_(_MANTISSA_BITS).view(torch.float32)
