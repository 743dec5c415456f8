"""The numbers as they are: little-endian IEEE single precision, without a copy."""

from __future__ import annotations

import sys

import torch

from moshpit.tensors.codecs.base import Payload

_BYTES = 4


class Float32:
    """Lossless and in place (implements `moshpit.tensors.codecs.base.Codec`).

    Example:
        >>> codec = Float32()
        >>> codec.decode(codec.encode(torch.tensor([1.0, 2.5])))
        tensor([1.0000, 2.5000])
    """

    number = 0
    name = "float32"
    in_place = True
    biased = False
    differences_only = False
    refuses_nonfinite = False

    def __init__(self) -> None:
        assert sys.byteorder == "little", "payloads are little-endian"

    @property
    def result_codec(self) -> Float32:
        """Itself."""
        return self

    def encoded_bytes(self, numel: int) -> int:
        """Four for each number."""
        return _BYTES * numel

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return a view of the tensor's memory."""
        if source.numel() == 0:
            return memoryview(b"")
        return source.detach().numpy().data.cast("B")

    def decode(self, payload: Payload) -> torch.Tensor:
        """Return a tensor on the payload's memory (a copy, where that is read-only)."""
        view = memoryview(payload)
        if view.nbytes % _BYTES:
            raise ValueError(f"{view.nbytes} bytes are not float32 numbers")
        if view.nbytes == 0:
            return torch.empty(0)
        return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.float32)

    def decode_into(self, payload: Payload, destination: torch.Tensor) -> None:
        """Copy the numbers; nothing happens where the payload is the destination's memory."""
        numbers = self.decode(payload)
        if numbers.shape != destination.shape:
            raise ValueError(f"{numbers.numel()} numbers for {destination.numel()}")
        if numbers.data_ptr() != destination.data_ptr():
            destination.copy_(numbers)
