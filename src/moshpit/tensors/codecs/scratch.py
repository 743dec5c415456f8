"""Memory for what codecs compute on the way, kept from chunk to chunk.

It belongs to the calling thread: several swarms of one process have a network thread each, and
share the codecs.
"""

from __future__ import annotations

import threading

import torch

KEPT_NUMEL_MAX = 1 << 20  # guess: chunks are an eighth of this; whole vectors are not kept


class _Kept(threading.local):
    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}


_kept = _Kept()


def scratch(name: str, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of shape (numel,) with any content, until the next call with this name.

    A name always goes with the same dtype.
    """
    if numel > KEPT_NUMEL_MAX:
        return torch.empty(numel, dtype=dtype)
    tensor = _kept.tensors.get(name)
    if tensor is None or tensor.numel() < numel:
        tensor = _kept.tensors[name] = torch.empty(numel, dtype=dtype)
    return tensor[:numel]
