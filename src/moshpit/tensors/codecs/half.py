"""Two bytes a number: float16 and bfloat16, little-endian, rounded to nearest even."""

from __future__ import annotations

import torch

from moshpit.tensors.codecs.base import Payload, as_tensor, check_fit, new_payload
from moshpit.tensors.codecs.scratch import scratch

_BYTES = 2


class Half:
    """One of the two-byte floating point formats (implements `base.Codec`).

    Numbers beyond the format's range become its largest number (65504 for float16, 3.39e38 for
    bfloat16), those below half of its smallest become 0.

    Args:
        number: for chunk headers.
        dtype: `torch.float16` or `torch.bfloat16`.

    Example:
        >>> codec = Half(1, torch.float16)
        >>> codec.decode(codec.encode(torch.tensor([0.1, -1e6])))
        tensor([ 9.9976e-02, -6.5504e+04])
    """

    in_place = False
    biased = False
    refuses_nonfinite = True

    def __init__(self, number: int, dtype: torch.dtype) -> None:
        assert dtype in (torch.float16, torch.bfloat16), f"{dtype} is not a half"
        self.number = number
        self.name = str(dtype).removeprefix("torch.")
        # Nine bits of bfloat16 are fewer than what parameters move in a few steps.
        self.differences_only = dtype is torch.bfloat16
        self._dtype = dtype

    @property
    def result_codec(self) -> Half:
        """Itself."""
        return self

    def encoded_bytes(self, numel: int) -> int:
        """Two for each number."""
        return _BYTES * numel

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return the rounded numbers."""
        payload, memory = new_payload(self.encoded_bytes(source.numel()))
        round_into(source, memory.view(self._dtype))
        return payload

    def decode(self, payload: Payload) -> torch.Tensor:
        """Return the numbers, shape (n,); raises `ValueError` where one is not finite."""
        return self._halves(payload).to(torch.float32)

    def decode_into(self, payload: Payload, destination: torch.Tensor) -> None:
        """Decode into a tensor of shape (n,)."""
        halves = self._halves(payload)
        check_fit(halves.numel(), destination)
        destination.copy_(halves)

    def _halves(self, payload: Payload) -> torch.Tensor:
        memory = as_tensor(payload)
        if memory.numel() % _BYTES:
            raise ValueError(f"{memory.numel()} bytes are not {self.name} numbers")
        halves = memory.view(self._dtype)
        check_finite(halves)
        return halves


def round_into(source: torch.Tensor, halves: torch.Tensor) -> None:
    """Round float32 numbers to halves; what is finite stays finite, what is not does not
    become so. Both of shape (n,)."""
    source = source.detach()
    if source.numel() == 0:
        return
    limit = torch.finfo(halves.dtype).max
    low, high = torch.aminmax(source)
    if low.item() >= -limit and high.item() <= limit:  # not so with NaN
        halves.copy_(source)
    else:
        halves.copy_(torch.where(source.isfinite(), source.clamp(-limit, limit), source))


def check_finite(halves: torch.Tensor) -> None:
    """Raise `ValueError` if one of these halves, of shape (n,), is not finite."""
    if halves.numel() == 0:
        return
    # Without the sign, the bits of numbers are ordered as their sizes, infinity above all.
    sizes = scratch("half-sizes", halves.numel(), torch.int16)
    torch.bitwise_and(halves.view(torch.int16), 0x7FFF, out=sizes)
    infinity = 0x7C00 if halves.dtype is torch.float16 else 0x7F80
    if int(sizes.amax().item()) >= infinity:
        raise ValueError(f"{halves.dtype} numbers that are not finite")
