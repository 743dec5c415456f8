"""Codecs: how the numbers of a chunk are written on the wire.

`docs/reference/codecs.md` has each one's size, error and speed.
"""

from __future__ import annotations

import torch

from moshpit.errors import ConfigError
from moshpit.tensors.codecs.base import Codec, Payload
from moshpit.tensors.codecs.blockfloat import BlockFloat
from moshpit.tensors.codecs.feedback import ErrorFeedback
from moshpit.tensors.codecs.float32 import Float32
from moshpit.tensors.codecs.half import Half
from moshpit.tensors.codecs.integer import Int4, Int8
from moshpit.tensors.codecs.topk import TopK

_INT8 = Int8(3)

CODECS: dict[int, Codec] = {
    codec.number: codec
    for codec in (
        Float32(),
        Half(1, torch.float16),
        Half(2, torch.bfloat16),
        _INT8,
        Int4(4),
        BlockFloat(5, "bfp", 64),
        BlockFloat(6, "bfp16", 16),
        TopK(7, "topk", 16, _INT8),
        TopK(8, "topk64", 64, _INT8),
    )
}
"""Every codec by the number that a chunk's header carries."""


def codec_named(name: str) -> Codec:
    """Return the codec of a name.

    Raises:
        ConfigError: there is none; it lists those that are.

    Example:
        >>> codec_named("int8").encoded_bytes(64)
        66
    """
    for codec in CODECS.values():
        if codec.name == name:
            return codec
    known = ", ".join(codec.name for codec in CODECS.values())
    raise ConfigError(f"codec {name!r}: there are {known}")


__all__ = ["CODECS", "Codec", "ErrorFeedback", "Float32", "Payload", "codec_named"]
