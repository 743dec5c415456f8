"""How the swarms in memory average where codecs lose something: in the stores of real rounds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moshpit.runtime.autocodec import DIFFERENCES, PARAMETERS
from moshpit.tensors.codecs import Codec, codec_named
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.store import RoundStore
from moshpit.types import GroupId
from moshpit.wire.framing import ChunkHeader, ChunkKind

if TYPE_CHECKING:
    from .conftest import MemoryAveraging


def codec_of(averaging: MemoryAveraging) -> Codec:
    """Return an averaging's codec; for "auto" the coarsest, as on a slow link."""
    if averaging.codec == "auto":
        return codec_named((DIFFERENCES if averaging.differences else PARAMETERS)[-1])
    return codec_named(averaging.codec)


class Meeting:
    """One round of some averagings. Chunks are reduced by their members in turn.

    Args:
        members: those that meet.
        chunk_numel: numbers in a chunk.
    """

    def __init__(self, members: list[MemoryAveraging], chunk_numel: int) -> None:
        plan = ChunkPlan(members[0].values.numel(), chunk_numel)
        self._stores = [
            RoundStore(
                a.values,
                torch.empty_like(a.values),
                plan,
                codec_of(a),
                feedback=a.feedback,
                exact=-(-a.exact_head // chunk_numel),
            )
            for a in members
        ]
        self._members = members
        self.plan = plan

    def mean(self, chunk: int, given: list[MemoryAveraging]) -> torch.Tensor:
        """Return the mean of a chunk as all of them get it; at least one gives."""
        at = chunk % len(self._members)
        reducer, mass = self._stores[at], sum(a.weight for a in given)
        for member, store in zip(self._members, self._stores, strict=True):
            if member not in given:
                continue
            if store is reducer:
                reducer.accumulate_own(chunk, member.weight)
                continue
            buffer = self._arrive(reducer, chunk, *store.contribution(chunk))
            reducer.accumulate(chunk, member.weight, buffer)
            reducer.release(buffer)
        reducer.finalize(chunk, mass)
        taker = RoundStore(reducer.local, reducer.result, self.plan, codec_named("float32"))
        buffer = self._arrive(taker, chunk, *reducer.result_payload(chunk))
        taken = taker._values(buffer).values.clone()
        assert torch.equal(taken, reducer.result[self.plan.slice(chunk)]), "the reducer has another"
        return taken

    def _arrive(self, store: RoundStore, chunk: int, codec: Codec, payload: memoryview):
        """Let a payload reach a store; return its buffer."""
        kind, group = ChunkKind.CONTRIBUTION, GroupId(bytes(16))
        header = ChunkHeader(kind, 0, chunk, len(payload), codec.number, group, mass=1.0, seats=0)
        buffer = store.sink(header)
        buffer[:] = payload
        assert store.fault(header, buffer) == ""
        return buffer
