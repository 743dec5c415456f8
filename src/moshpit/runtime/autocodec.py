"""Which codec a peer uses in a round when it may choose (``codec="auto"``).

Slow links compress harder, fast ones do not pay for it (the idea of AdaTopK, paper.md §8). All that
is needed is in the group's announcement, so everybody reckons alike:

* T* is how long the round takes if everybody uses the codec that is fastest for the whole group;
  if training goes on meanwhile, the round may take as long as that work: more is won by nothing.
* Each member's codec is the most exact one with which its own link is done by then.
* A contribution goes in the coarser one of its sender's and its reducer's.
* Results go to everybody, so in the coarsest one.

A link that is not known counts as fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from moshpit.runtime.bandwidth import FAST
from moshpit.tensors.codecs import Codec, codec_named
from moshpit.tensors.store import Encoding
from moshpit.wire.messages import GroupFormed

AUTO: Final = "auto"
SLACK: Final = 1.05  # guess: so much longer than T* is not worth a coarser codec
CORE_GBPS: Final = {  # encode and decode, GB of float32 per second; measured, benchmarks/codecs.py
    "float32": math.inf,
    "float16": 5.3,
    "bfp": 1.9,
    "int4": 1.7,
}
PARAMETERS: Final = ("float32", "float16")
DIFFERENCES: Final = ("float32", "float16", "bfp", "int4")
"""From the most exact to the smallest. (A mean of top-k's is sent as int8: more bytes in all.)"""


@dataclass(frozen=True, slots=True)
class AutoCodec:
    """What to choose from.

    Attributes:
        names: of codecs, the most exact first.
        hidden_s: how long a round may take without anybody waiting for it.
    """

    names: tuple[str, ...]
    hidden_s: float = 0.0

    def choose(self, formed: GroupFormed, seat: int, vector_bytes: float) -> Encoding:
        """Return how this seat encodes.

        Args:
            formed: the group, with the members' bandwidths and parts.
            seat: this peer's.
            vector_bytes: of the vector in float32.
        """
        size, bounds = len(formed.joins), formed.bounds
        chunks = max(1, bounds[-1] - bounds[0])
        members = [
            _Member(
                join.bandwidth if math.isfinite(join.bandwidth) and join.bandwidth > 0 else FAST,
                sent=(1 - part) * vector_bytes,
                reduced=(size - 1) * part * vector_bytes,
            )
            for join, part in (
                (join, (bounds[j + 1] - bounds[j]) / chunks) for j, join in enumerate(formed.joins)
            )
        ]
        fastest = min(max(m.seconds(name) for m in members) for name in self.names)
        allowed = SLACK * max(fastest, self.hidden_s)
        each = [self._rank(member, allowed) for member in members]
        codecs = [codec_named(name) for name in self.names]
        return Encoding(
            bounds,
            tuple(codecs[max(each[seat], rank)] for rank in each),
            codecs[max(each)].result_codec,
        )

    def _rank(self, member: _Member, allowed: float) -> int:
        """Return the number of the most exact codec by which a member is done in time."""
        times = [member.seconds(name) for name in self.names]
        in_time = [rank for rank, seconds in enumerate(times) if seconds <= allowed]
        return in_time[0] if in_time else min(range(len(times)), key=times.__getitem__)


@dataclass(frozen=True, slots=True)
class _Member:
    """What a member sends, and receives at the same time, in bytes of float32 (paper.md §3).

    Attributes:
        link: bytes per second, each way.
        sent: contributions to others' parts, or results of them.
        reduced: contributions to its own part, or results of it.
    """

    link: float
    sent: float
    reduced: float

    def seconds(self, name: str) -> float:
        """Return how long it takes with a codec."""
        codec = codec_named(name)
        moved = self.sent * _share(codec) + self.reduced * _share(codec.result_codec)
        return moved / self.link + (self.sent + self.reduced) / (CORE_GBPS[name] * 1e9)


def _share(codec: Codec) -> float:
    numel = 1 << 17  # of a chunk; the share hardly depends on it
    return codec.encoded_bytes(numel) / (4 * numel)


def codec_or_auto(
    name: str, *, differences: bool = False, hidden_s: float = 0.0
) -> Codec | AutoCodec:
    """Return the codec of a name, or for ``"auto"`` what to choose from.

    Args:
        name: of a codec, or ``"auto"``.
        differences: what is sent are gradients or differences of parameters.
        hidden_s: see `AutoCodec`.

    Raises:
        ConfigError: there is no such codec.

    Example:
        >>> codec_or_auto("auto")
        AutoCodec(names=('float32', 'float16'), hidden_s=0.0)
    """
    if name == AUTO:
        return AutoCodec(DIFFERENCES if differences else PARAMETERS, hidden_s)
    return codec_named(name)
