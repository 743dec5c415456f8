"""The bytes of one round at one peer: what the payload effects of the machine do.

Everything here runs in the network thread. The local vector is only read; the trainer leaves
both vectors alone until the round has ended.

Chunks arrive in buffers of their own, never in the result's memory: a connection may still be
writing a chunk when the same chunk comes from somebody else, or when the round ends, and what
it writes must not reach a value that is already in use. The copy costs less than a tenth of
what receiving costs.
"""

from __future__ import annotations

import torch

from moshpit.tensors.codecs.base import Codec
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.reduce import WeightedSum, is_finite
from moshpit.wire.framing import ChunkHeader

BUFFERS_KEPT = 64  # guess: free buffers that are kept for reuse; one a link is in use at most


class RoundStore:
    """The payloads of one round.

    Args:
        local: this peer's value, float32 of shape (numel,), contiguous; only read.
        result: where the round's means go, of the same kind. Until `finish`, its content
            means something only in chunks that were finalized or taken.
        plan: how they are cut.
        codec: how chunks are encoded.
    """

    def __init__(
        self, local: torch.Tensor, result: torch.Tensor, plan: ChunkPlan, codec: Codec
    ) -> None:
        assert local.shape == result.shape == (plan.numel,), "vectors of another plan"
        self.local = local.detach()
        self.result = result.detach()
        self._plan = plan
        self._codec = codec
        self._sums: dict[int, WeightedSum] = {}
        self._have: set[int] = set()
        self._encoded: dict[int, memoryview] = {}
        self._buffers: list[bytearray] = []
        self._buffer_bytes = codec.encoded_bytes(plan.chunk_numel)
        self._decoded: tuple[int, torch.Tensor] | None = None

    # --- sending --------------------------------------------------------------------------

    def contribution(self, chunk: int) -> memoryview:
        """Return the payload of this peer's value of a chunk."""
        return self._codec.encode(self.local[self._plan.slice(chunk)])

    def result_payload(self, chunk: int) -> memoryview:
        """Return the payload of a chunk's result, as its reducer encoded it.

        A chunk without a value (mass 0 in the header) is sent with this peer's own numbers;
        nobody looks at them.
        """
        if chunk not in self._have:
            return self.contribution(chunk)
        if self._codec.in_place:
            return self._codec.encode(self.result[self._plan.slice(chunk)])
        return self._encoded[chunk]

    # --- receiving ------------------------------------------------------------------------

    def sink(self, header: ChunkHeader) -> memoryview | None:
        """Return a buffer for the payload, or None if it cannot be one of this round's.

        Every buffer goes back through `release`.
        """
        if header.codec != self._codec.number or not 0 <= header.chunk < self._plan.chunks:
            return None
        if header.length != self._codec.encoded_bytes(self._plan.size(header.chunk)):
            return None
        buffer = self._buffers.pop() if self._buffers else bytearray(self._buffer_bytes)
        return memoryview(buffer)[: header.length]

    def release(self, buffer: memoryview) -> None:
        """Take a buffer back; nobody may write to it any more."""
        memory = buffer.obj
        self._decoded = None
        if isinstance(memory, bytearray) and len(self._buffers) < BUFFERS_KEPT:
            self._buffers.append(memory)

    def fault(self, header: ChunkHeader, buffer: memoryview) -> str:
        """Return why a payload is unusable: ``wrong-size``, ``undecodable``, ``non-finite``, or
        nothing."""
        if not 0 <= header.chunk < self._plan.chunks:
            return "wrong-size"
        if len(buffer) != self._codec.encoded_bytes(self._plan.size(header.chunk)):
            return "wrong-size"
        if header.codec != self._codec.number:
            return "undecodable"
        try:
            values = self._codec.decode(buffer)
        except ValueError:
            return "undecodable"
        if not is_finite(values):
            return "non-finite"
        self._decoded = (id(buffer), values)
        return ""

    def _values(self, buffer: memoryview) -> torch.Tensor:
        if self._decoded is not None and self._decoded[0] == id(buffer):
            return self._decoded[1]
        return self._codec.decode(buffer)

    # --- reducing -------------------------------------------------------------------------

    def accumulate(self, chunk: int, mass: float, buffer: memoryview) -> None:
        """Add a contribution that has arrived."""
        self._sum(chunk).add(self._values(buffer), mass)

    def accumulate_own(self, chunk: int, mass: float) -> None:
        """Add this peer's own contribution."""
        self._sum(chunk).add(self.local[self._plan.slice(chunk)], mass)

    def reset(self, chunk: int) -> None:
        """Forget a sum."""
        self._sums.pop(chunk, None)

    def finalize(self, chunk: int, mass: float) -> None:
        """Make the mean, and take it as everybody else will: encoded and decoded."""
        total = self._sums.pop(chunk)
        assert abs(total.mass - mass) <= 1e-6 * mass, f"mass {total.mass}, expected {mass}"
        total.finish()
        place = self.result[self._plan.slice(chunk)]
        if not self._codec.in_place:
            payload = self._codec.encode(place)
            self._codec.decode_into(payload, place)
            self._encoded[chunk] = payload
        self._have.add(chunk)

    def _sum(self, chunk: int) -> WeightedSum:
        total = self._sums.get(chunk)
        if total is None:
            assert chunk not in self._have, f"chunk {chunk} has its result"
            # The sum grows in the place of the result, so that a round needs no more memory.
            total = self._sums[chunk] = WeightedSum(self.result[self._plan.slice(chunk)])
        return total

    # --- results --------------------------------------------------------------------------

    def take(self, chunk: int, buffer: memoryview) -> None:
        """Keep the result that has arrived."""
        assert chunk not in self._have, f"chunk {chunk} has its result"
        assert chunk not in self._sums, f"chunk {chunk} is being reduced here"
        self.result[self._plan.slice(chunk)].copy_(self._values(buffer))
        if not self._codec.in_place:
            self._encoded[chunk] = memoryview(bytes(buffer))
        self._have.add(chunk)

    def finish(self, missing: tuple[int, ...] = ()) -> None:
        """The round has ended: every chunk without a result, and those in ``missing``, keep the
        local value."""
        self._sums.clear()
        for chunk in range(self._plan.chunks):
            if chunk not in self._have or chunk in missing:
                place = self._plan.slice(chunk)
                self.result[place].copy_(self.local[place])
