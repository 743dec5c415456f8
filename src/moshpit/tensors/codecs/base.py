"""What every codec offers. All of them pass tests/tensors/test_codecs.py."""

from __future__ import annotations

from typing import Protocol

import torch

Payload = bytes | bytearray | memoryview


class Codec(Protocol):
    """Turns one-dimensional float32 CPU tensors into bytes and back.

    Encoding is deterministic, and what was decoded encodes and decodes to itself.
    """

    @property
    def number(self) -> int:
        """The number by which chunk headers name it, 0 to 255."""
        ...

    @property
    def name(self) -> str:
        """The name by which people call it."""
        ...

    @property
    def in_place(self) -> bool:
        """Whether the bytes are those of the numbers in memory: `encode` then returns a view
        of its source, and `decode` of its payload, and neither costs anything."""
        ...

    def encoded_bytes(self, numel: int) -> int:
        """Return how many bytes the payload of so many numbers has."""
        ...

    def encode(self, source: torch.Tensor) -> memoryview:
        """Return the payload of a contiguous tensor of shape (n,)."""
        ...

    def decode(self, payload: Payload) -> torch.Tensor:
        """Return the numbers of a payload, shape (n,); raises `ValueError` if it is none."""
        ...

    def decode_into(self, payload: Payload, destination: torch.Tensor) -> None:
        """Decode into a tensor of shape (n,); raises `ValueError` if it does not fit."""
        ...
