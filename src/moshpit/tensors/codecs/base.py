"""What every codec offers. All of them pass tests/tensors/test_codecs.py."""

from __future__ import annotations

import math
from typing import Protocol

import torch

Payload = bytes | bytearray | memoryview

FLOAT_MAX = torch.finfo(torch.float32).max


class Codec(Protocol):
    """Turns one-dimensional contiguous float32 CPU tensors into bytes and back.

    What all of them promise:

    - Encoding is deterministic: the same numbers give the same bytes, on every machine. The
      payload is new memory (except `in_place`) and the source is only read.
    - Finite numbers decode to finite numbers: what is beyond a format's range saturates.
    - What was decoded encodes and decodes to itself, bit by bit; with a codec that results are
      sent in, to the same payload. So a reducer can take its own result as everybody else
      will, and who holds that result can encode it again. (Of payloads that an encoder made:
      others may decode, too.)
    - The source should be finite. If it is not, the payload does not hide it: `decode` raises
      `ValueError`, or (only where `refuses_nonfinite` is false) gives what is not finite.
    - A payload may come from anybody: `decode` gives numbers or raises `ValueError`, whatever
      the bytes are, and `decode_into` then leaves its destination as it was. How many numbers
      a payload holds is its own claim: who knows it uses `decode_into`, or compares.

    Codecs keep no state but scratch memory of the calling thread.
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

    @property
    def biased(self) -> bool:
        """Whether numbers that are small beside their neighbours are lost, and lost again in
        every round: what is sent repeatedly needs `ErrorFeedback`. Formats whose error is
        relative to each single number are not biased in this sense."""
        ...

    @property
    def differences_only(self) -> bool:
        """Whether it suits gradients and differences of parameters only: its error is larger
        than what a few steps change, so that parameters would not move."""
        ...

    @property
    def refuses_nonfinite(self) -> bool:
        """Whether `decode` raises rather than give numbers that are not finite; the caller then
        need not look."""
        ...

    @property
    def result_codec(self) -> Codec:
        """How means of what came in this codec are sent; mostly itself. It is its own
        `result_codec`."""
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
        """Decode into a contiguous tensor of shape (n,); raises `ValueError` if it does not
        fit."""
        ...


def new_payload(length: int) -> tuple[memoryview, torch.Tensor]:
    """Return memory for a payload, and the same memory as a tensor of (length,) uint8."""
    memory = torch.empty(length, dtype=torch.uint8)
    return (memory.numpy().data if length else memoryview(b"")), memory


def as_tensor(payload: Payload) -> torch.Tensor:
    """Return a payload as (length,) uint8, to be read only; a copy where it is read-only memory,
    which no buffer of a link is."""
    view = memoryview(payload)
    if view.nbytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(view) if view.readonly else view, dtype=torch.uint8)


def check_fit(numel: int, destination: torch.Tensor) -> None:
    """Raise `ValueError` unless so many numbers fit exactly."""
    if destination.shape != (numel,):
        raise ValueError(f"{numel} numbers for {destination.numel()}")


def bfloat16_below(limit: float) -> float:
    """Return the largest bfloat16 number that is not above a positive one."""
    fraction, exponent = math.frexp(limit)
    return math.ldexp(math.floor(fraction * 256), exponent - 8)
