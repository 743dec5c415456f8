"""The bytes of one round at one peer: what the payload effects of the machine do.

Everything here runs in the network thread. The trainer leaves the vectors alone until the
averaging has ended.

Chunks arrive in buffers of their own, never in the result's memory: a connection may still be
writing a chunk when the same chunk comes from somebody else, or when the round ends, and what
it writes must not reach a value that is already in use. The copy costs less than a tenth of
what receiving costs.

Means may take the place of the local values (``result`` is ``local``): a peer that has the
result of a chunk is never asked for its contribution again in a way that counts, since who
reduces afresh asks first whether anybody holds a result. So a round needs no second vector,
and the next round of the same averaging goes on in the same memory; what the one before must
still be able to serve is copied aside chunk by chunk, only while somebody may ask (`preserve`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch

from moshpit.tensors.codecs import CODECS, Codec, ErrorFeedback, Float32
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.reduce import WeightedSum, is_finite
from moshpit.wire.framing import ChunkHeader

_EXACT: Final = Float32()

BUFFERS_KEPT = 64  # guess: free buffers that are kept for reuse; one a link is in use at most


class Buffers:
    """Memory for chunks that arrive, used again and again.

    New memory is slow: the system clears each page of it first.
    """

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._bytes = 0

    def take(self, size: int) -> memoryview:
        """Return ``size`` bytes."""
        if size > self._bytes:
            self._free.clear()
            self._bytes = size  # the chunks of a vector are equal, but for the last one
        memory = self._free.pop() if self._free else bytearray(self._bytes)
        return memoryview(memory)[:size]

    def clear(self) -> None:
        """Give all memory that is not in use back to the system."""
        self._free.clear()

    def give(self, buffer: memoryview) -> None:
        """Take a buffer back; nobody may use it any more."""
        memory = buffer.obj
        if (
            isinstance(memory, bytearray)
            and len(memory) == self._bytes
            and len(self._free) < BUFFERS_KEPT
        ):
            self._free.append(memory)


@dataclass(frozen=True, slots=True)
class Encoding:
    """Which codecs a peer uses in a round.

    Attributes:
        bounds: rising; contribution codec j is for the chunks from number j up to number j + 1.
        contributions: at least one.
        result: for results; None: as the contributions came.
    """

    bounds: tuple[int, ...]
    contributions: tuple[Codec, ...]
    result: Codec | None

    @classmethod
    def uniform(cls, codec: Codec) -> Encoding:
        """Return one codec for all chunks."""
        return cls((0,), (codec,), codec.result_codec)

    @classmethod
    def without_own(cls) -> Encoding:
        """Return what a peer uses that has no value of its own."""
        return cls((0,), (_EXACT,), None)

    def contribution(self, chunk: int) -> Codec:
        """Return the codec for a contribution to a chunk."""
        return self.contributions[bisect_right(self.bounds, chunk) - 1]


@dataclass(frozen=True, slots=True)
class _Arrived:
    codec: Codec
    buffer: memoryview
    values: torch.Tensor


class RoundStore:
    """The payloads of one round.

    Args:
        local: this peer's value, float32 of shape (numel,), contiguous.
        result: where the round's means go, of the same kind; may be ``local`` itself. Until
            `finish`, its content means something only in chunks that were finalized or taken.
        plan: how they are cut.
        encoding: how contributions and results are encoded, or the codec of both.
        buffers: memory for what arrives; shared by the rounds of a peer.
        before: the round before in the same averaging, if it has left its result in ``result``.
        span: the chunks (from, up to) that the round is about; (): all.
        feedback: what earlier rounds have lost of this peer's contributions, if that is kept.
        exact: so many chunks at the beginning are float32 whatever the codec.

    Attributes:
        local, result: the vectors.
        closed: nobody asks for anything any more.
    """

    def __init__(
        self,
        local: torch.Tensor,
        result: torch.Tensor,
        plan: ChunkPlan,
        encoding: Encoding | Codec,
        buffers: Buffers | None = None,
        *,
        before: RoundStore | None = None,
        span: tuple[int, ...] = (),
        feedback: ErrorFeedback | None = None,
        exact: int = 0,
    ) -> None:
        assert local.shape == result.shape == (plan.numel,), "vectors of another plan"
        self.local = local.detach()
        self.result = result.detach()
        self._in_place = local.data_ptr() == result.data_ptr()
        self._plan = plan
        if not isinstance(encoding, Encoding):
            encoding = Encoding.uniform(encoding)
        self._encoding = encoding
        self._feedback = feedback
        self._own: dict[int, float] = {}  # this peer's mass in the chunks that it reduces
        self._exact = exact
        self._before = before
        self._span = span
        self.closed = False
        self._gone = False  # the local value was given back
        self._sums: dict[int, WeightedSum] = {}
        self._held: dict[int, memoryview] = {}  # buffers that have become sums, by chunk
        self._held_memory: set[int] = set()
        self._have: set[int] = set()
        self._came_in: dict[int, Codec] = {}  # the codec of a chunk's result, if it has lost
        self._payloads: dict[int, memoryview] = {}  # of results that were made here
        self._aside: dict[int, torch.Tensor] = {}
        self._buffers = Buffers() if buffers is None else buffers
        self._arrived: _Arrived | None = None

    # --- sending --------------------------------------------------------------------------

    def contribution(self, chunk: int) -> tuple[Codec, memoryview] | None:
        """Return codec and payload of this peer's value of a chunk; None if it is not needed any
        more, because this peer has the result."""
        if self._gone or (self._in_place and chunk in self._have):
            return None
        codec = self._unless_exact(chunk, self._encoding.contribution(chunk))
        values = self._local(chunk)
        if self._feedback is not None:
            return codec, self._feedback.encode(codec, self._plan.slice(chunk), values)
        return codec, codec.encode(values)

    def result_payload(self, chunk: int) -> tuple[Codec, memoryview]:
        """Return codec and payload of a chunk's result, as its reducer encoded it.

        A chunk without a value (mass 0 in the header) is sent with any numbers; nobody looks
        at them.
        """
        if chunk not in self._have:
            return _EXACT, memoryview(bytes(_EXACT.encoded_bytes(self._plan.size(chunk))))
        codec = self._came_in.get(chunk, _EXACT)
        payload = self._payloads.get(chunk)
        if payload is None:  # not kept: what was decoded encodes to the same bytes again
            payload = codec.encode(self._aside.get(chunk, self._result(chunk)))
        return codec, payload

    def _unless_exact(self, chunk: int, codec: Codec) -> Codec:
        """Return the codec, or float32 for the chunks at the beginning that must be exact."""
        return _EXACT if self._plan.place(chunk) < self._exact else codec

    def _local(self, chunk: int) -> torch.Tensor:
        kept = self._aside.get(chunk) if self._in_place else None
        return self.local[self._plan.slice(chunk)] if kept is None else kept

    def _result(self, chunk: int) -> torch.Tensor:
        return self.result[self._plan.slice(chunk)]

    # --- receiving ------------------------------------------------------------------------

    def sink(self, header: ChunkHeader) -> memoryview | None:
        """Return a buffer for the payload, or None if it cannot be one of this round's.

        Every buffer goes back through `release`.
        """
        codec = CODECS.get(header.codec)
        if codec is None or not 0 <= header.chunk < self._plan.chunks:
            return None
        if header.length != codec.encoded_bytes(self._plan.size(header.chunk)):
            return None
        return self._buffers.take(header.length)

    def release(self, buffer: memoryview) -> None:
        """Take a buffer back; nobody may write to it any more."""
        self._arrived = None
        if id(buffer.obj) not in self._held_memory:
            self._buffers.give(buffer)

    def fault(self, header: ChunkHeader, buffer: memoryview) -> str:
        """Decode what has arrived, for `accumulate` or `take`. Returns why it is unusable:
        ``wrong-size``, ``undecodable``, ``non-finite``, or nothing."""
        self._arrived = None
        codec = CODECS.get(header.codec)
        if codec is None:
            return "undecodable"
        if not 0 <= header.chunk < self._plan.chunks:
            return "wrong-size"
        if len(buffer) != codec.encoded_bytes(self._plan.size(header.chunk)):
            return "wrong-size"
        try:
            values = codec.decode(buffer)
        except ValueError:
            return "undecodable"
        if values.numel() != self._plan.size(header.chunk):
            return "wrong-size"  # a payload that says itself how many numbers it has may lie
        if not codec.refuses_nonfinite and not is_finite(values):
            return "non-finite"
        self._arrived = _Arrived(codec, buffer, values)
        return ""

    def _values(self, buffer: memoryview) -> _Arrived:
        arrived = self._arrived
        assert arrived is not None, "nothing usable has arrived"
        assert arrived.buffer is buffer, "something else has arrived"
        return arrived

    # --- reducing -------------------------------------------------------------------------

    def accumulate(self, chunk: int, mass: float, buffer: memoryview) -> None:
        """Add a contribution that has arrived."""
        arrived = self._values(buffer)
        if self._encoding.result is None:
            self._came_in[chunk] = arrived.codec.result_codec
        if self._add(chunk, arrived.values, mass):
            return
        if arrived.codec.in_place:
            # The buffer itself becomes the sum; `release` leaves it alone until then.
            self._held[chunk] = buffer
            self._held_memory.add(id(buffer.obj))
        self._sums[chunk] = WeightedSum(arrived.values, mass)

    def accumulate_own(self, chunk: int, mass: float) -> None:
        """Add this peer's own contribution."""
        values = self._local(chunk)
        if self._feedback is not None:
            values = self._feedback.exact(self._plan.slice(chunk), values)
            self._own[chunk] = mass
        if not self._add(chunk, values, mass):
            self._sums[chunk] = WeightedSum(values.clone(), mass)

    def reset(self, chunk: int) -> None:
        """Forget a sum."""
        self._sums.pop(chunk, None)
        held = self._held.pop(chunk, None)
        if held is not None:
            self._held_memory.discard(id(held.obj))
            # The one that has just arrived goes back through `release`, and only once.
            if self._arrived is None or self._arrived.buffer is not held:
                self._buffers.give(held)

    def finalize(self, chunk: int, mass: float) -> None:
        """Make the mean, and take it as everybody else will: encoded and decoded."""
        total = self._sums[chunk]
        assert abs(total.mass - mass) <= 1e-6 * mass, f"mass {total.mass}, expected {mass}"
        place = self._place(chunk)
        total.mean_into(place)
        self.reset(chunk)
        if self._encoding.result is not None:
            self._came_in[chunk] = self._unless_exact(chunk, self._encoding.result)
        codec = self._came_in.get(chunk, _EXACT)
        if not codec.in_place:
            payload = codec.encode(place)
            if self._feedback is not None and chunk in self._own:
                share = self._own[chunk] / mass
                self._feedback.reduced(self._plan.slice(chunk), place, codec, payload, share)
            codec.decode_into(payload, place)
            self._payloads[chunk] = payload
        self._have.add(chunk)

    def _add(self, chunk: int, values: torch.Tensor, mass: float) -> bool:
        assert chunk not in self._have, f"chunk {chunk} has its result"
        total = self._sums.get(chunk)
        if total is None:
            return False
        total.add(values, mass)
        return True

    # --- results --------------------------------------------------------------------------

    def take(self, chunk: int, buffer: memoryview) -> None:
        """Keep the result that has arrived."""
        arrived = self._values(buffer)
        self._take(chunk, arrived.codec, arrived.values)

    def take_later(self, chunk: int, buffer: memoryview) -> Callable[[], None]:
        """Return what is to be called to keep the result that has arrived, at any time."""
        arrived = self._values(buffer)
        return partial(self._take, chunk, arrived.codec, arrived.values.clone())

    def _take(self, chunk: int, codec: Codec, values: torch.Tensor) -> None:
        assert chunk not in self._have, f"chunk {chunk} has its result"
        assert chunk not in self._sums, f"chunk {chunk} is being reduced here"
        self._place(chunk).copy_(values)
        self._came_in[chunk] = codec
        self._have.add(chunk)

    def adopt(self, column: RoundStore, chunk: int) -> None:
        """Let a column's result take the place of what was finalized here and not sent yet."""
        result = column._aside.get(chunk, column._result(chunk))
        place = self._result(chunk)
        if place.data_ptr() != result.data_ptr():
            place.copy_(result)
        self._came_in[chunk] = column._came_in.get(chunk, _EXACT)
        self._payloads.pop(chunk, None)
        self._have.add(chunk)

    def finish(self, missing: Collection[int] = (), later: Collection[int] = ()) -> None:
        """The round has ended: every chunk without a result, and those in ``missing``, keep the
        local value. For those in ``later``, `finish_chunk` will be called."""
        if not later:
            self._feedback = None
        for chunk in range(self._plan.chunks):
            if chunk not in later:
                self.finish_chunk(chunk, missing=chunk in missing)

    def finish_chunk(self, chunk: int, *, missing: bool) -> None:
        """Do for one chunk what `finish` does."""
        self.reset(chunk)
        if not self._in_place and (missing or chunk not in self._have):
            self._result(chunk).copy_(self._local(chunk))

    def _place(self, chunk: int) -> torch.Tensor:
        """Return where a result goes, when what is there now is safe."""
        if self._before is not None:
            self._before.preserve(chunk)
        return self._result(chunk)

    # --- after its end --------------------------------------------------------------------

    def preserve(self, chunk: int) -> None:
        """The next round is about to write there: copy aside what may still be asked for."""
        if self.closed or chunk in self._aside:
            return
        self._aside[chunk] = self._result(chunk).clone()
        if self._before is not None and chunk not in self._have:
            self._before.preserve(chunk)

    def move_out(self, *, ended: bool) -> None:
        """The vectors are wanted back: copy what others may still ask for.

        Args:
            ended: the round has its result; this peer's own value is not asked for any more.
        """
        if self.closed:
            return
        if self._span and ended:
            for chunk in range(*self._span):
                self._aside[chunk] = self._result(chunk).clone()
            return
        self._gone = ended and not self._in_place
        result = self.result.clone()
        self.local = result if self._in_place or ended else self.local.clone()
        self.result = result

    def close(self) -> None:
        """Nobody asks any more."""
        self.closed = True
        self._aside.clear()
        self._payloads.clear()
        self._before = None
