"""Codecs: how the numbers of a chunk are written on the wire."""

from __future__ import annotations

from moshpit.tensors.codecs.base import Codec, Payload
from moshpit.tensors.codecs.float32 import Float32

CODECS: dict[int, Codec] = {codec.number: codec for codec in (Float32(),)}
"""Every codec by the number that a chunk's header carries."""

__all__ = ["CODECS", "Codec", "Float32", "Payload"]
