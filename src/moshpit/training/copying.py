"""Copies of tensors that a thread makes while training computes its next gradient.

Between two steps of an optimizer nothing changes its parameters and its state, and that is where
a training loop spends most of its time. So a state can be copied then, and training waits only
for what is not done when the next step begins.

Who changes a tensor meanwhile all the same (a loop that clips weights after the step) is found
out by the version that PyTorch counts, and then the copy is none.
"""

from __future__ import annotations

import threading
from typing import Final, final

import numpy as np
import torch

LATE_BYTES_MIN: Final = 1 << 16  # guess: what is smaller is copied before a thread has started


@final
class LateCopies:
    """Copies of tensors at one moment, complete after `finish`."""

    def __init__(self) -> None:
        self._under_way: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        self._thread: threading.Thread | None = None

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, on the CPU; if the tensor is large, its values come later."""
        made = torch.empty(tensor.shape, dtype=tensor.dtype)
        if (
            tensor.device.type == "cpu"
            and tensor.is_contiguous()
            and not tensor.is_inference()
            and tensor.numel() * tensor.element_size() >= LATE_BYTES_MIN
        ):
            self._under_way.append((tensor.detach(), made, tensor._version))
        else:
            made.copy_(tensor.detach())
        return made

    def start(self) -> None:
        """Begin, in a thread. From here on nobody may change the tensors until `finish`."""
        if self._under_way:
            self._thread = threading.Thread(target=self._run, name="moshpit-copy", daemon=True)
            self._thread.start()

    def finish(self) -> bool:
        """Wait until all is copied; return whether nothing was changed meanwhile."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        unchanged = all(tensor._version == version for tensor, _, version in self._under_way)
        self._under_way.clear()
        return unchanged

    def _run(self) -> None:
        # Not by torch: its threads would compete with those of the backward pass.
        for tensor, made, _ in self._under_way:
            np.copyto(_bytes(made), _bytes(tensor))


def _bytes(tensor: torch.Tensor) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
    return tensor.reshape(-1).view(torch.uint8).numpy()
