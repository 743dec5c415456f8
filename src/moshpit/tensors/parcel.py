"""A vector that one peer has sent to one other, outside of any averaging."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moshpit.types import PeerId

Tag = tuple[int, int]
"""A parcel's kind (at least 0, below 2**32) and number (at least 0, below 2**63). Sender and
receiver agree on what they mean, such as (gradients, step)."""

KIND_LIMIT = 1 << 32
NUMBER_LIMIT = 1 << 63


@dataclass(frozen=True, slots=True)
class Parcel:
    """What arrived.

    Attributes:
        sender: who has sent it.
        tag: kind and number.
        vector: (n,) float32 on the CPU, all finite; the receiver's own.
        weight: what the sender says beside it, finite and at least 0, such as its mass.
    """

    sender: PeerId
    tag: Tag
    vector: torch.Tensor
    weight: float


def tag_fault(tag: Tag) -> str:
    """Say what is wrong with a tag; empty if nothing is.

    >>> tag_fault((1, 7)), tag_fault((1, -7))
    ('', 'tag (1, -7): a kind below 2**32 and a number below 2**63, neither negative')
    """
    kind, number = tag
    if 0 <= kind < KIND_LIMIT and 0 <= number < NUMBER_LIMIT:
        return ""
    return f"tag {tag}: a kind below 2**32 and a number below 2**63, neither negative"
