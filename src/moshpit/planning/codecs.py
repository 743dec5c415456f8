"""What numbers weigh on the wire: the plan's own small table, which loads no torch.

`tests/planning/test_codecs.py` holds it against the registry in `moshpit.tensors.codecs`.
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpit.errors import ConfigError

RAW_BYTES = 4
"""Vectors are float32 in memory."""


@dataclass(frozen=True, slots=True)
class CodecCost:
    """A codec as the plan sees it.

    Attributes:
        name: as the registry calls it.
        bytes_per_number: on the wire, block scales included.
        loss: how much it may cost in quality, in doublings of the period. All guesses: rounding to
            16 bits is never seen, 8 and 4 bits with error feedback hardly (Streaming DiLoCo
            sends 4 bits), top-k delays most of a difference by many rounds.
        encode_s_per_gb: CPU seconds to encode a GB of float32.
        decode_s_per_gb: CPU seconds to decode what was a GB of float32.
        mean_bytes: the same as ``bytes_per_number`` for means, where these travel in another
            codec; 0: in the same.
        biased: whether it keeps its error for the next time, in memory of the vector's size.
        differences_only: it may carry gradients and differences of parameters, not parameters:
            its error is larger than what a few steps change.
    """

    name: str
    bytes_per_number: float
    loss: float
    encode_s_per_gb: float
    decode_s_per_gb: float
    mean_bytes: float = 0.0
    biased: bool = True
    differences_only: bool = True

    @property
    def bytes_per_mean(self) -> float:
        """Of a mean, on the wire."""
        return self.mean_bytes or self.bytes_per_number


_INT8_BYTES = 1 + 2 / 64

CODECS: tuple[CodecCost, ...] = (
    CodecCost("float32", 4.0, 0.0, 0.0, 0.0, biased=False, differences_only=False),
    CodecCost("float16", 2.0, 0.1, 0.07, 0.08, biased=False, differences_only=False),
    CodecCost("bfloat16", 2.0, 0.2, 0.08, 0.08, biased=False),
    CodecCost("bfp16", 1 + 1 / 16, 0.5, 0.8, 0.13),
    CodecCost("bfp", 1 + 1 / 64, 0.5, 0.4, 0.11),
    CodecCost("int8", _INT8_BYTES, 0.5, 0.3, 0.09),
    CodecCost("int4", 0.5 + 2 / 32, 1.0, 0.4, 0.16),
    CodecCost("topk", 3 / 16 + 2 / 256, 3.0, 1.0, 0.3, mean_bytes=_INT8_BYTES),
    CodecCost("topk64", 3 / 64 + 2 / 256, 5.0, 1.0, 0.3, mean_bytes=_INT8_BYTES),
)
"""From exact to coarse. Speeds: measured, chunks of 512 KB on one core."""


def codec_named(name: str) -> CodecCost:
    """Return the codec of this name; raises `ConfigError` with the names there are."""
    for codec in CODECS:
        if codec.name == name:
            return codec
    raise ConfigError(f"codec {name!r}: choose {', '.join(codec.name for codec in CODECS)}")
