"""A round whose chunks are encoded: everybody holds the same bytes, whatever each one sends in."""

from __future__ import annotations

import pytest
import torch

from moshpit.tensors.codecs import CODECS, Codec, ErrorFeedback, codec_named
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.store import Encoding, RoundStore
from moshpit.types import GroupId
from moshpit.wire.framing import ChunkHeader, ChunkKind

GROUP = GroupId(b"a group of sixte")
PLAN = ChunkPlan(numel=2200, chunk_numel=512)
CHUNKS = range(PLAN.chunks)


def store(
    seed: int,
    codec: Codec | None,
    *,
    in_place: bool = False,
    feedback: ErrorFeedback | None = None,
    exact: int = 0,
) -> RoundStore:
    local = torch.randn(PLAN.numel, generator=torch.Generator().manual_seed(seed))
    result = local if in_place else torch.empty(PLAN.numel)
    encoding = Encoding.without_own() if codec is None else codec
    return RoundStore(local, result, PLAN, encoding, feedback=feedback, exact=exact)


def deliver(encoded: tuple[Codec, memoryview], target: RoundStore, chunk: int, mass: float) -> None:
    """Mass 0: a result."""
    codec, payload = encoded
    kind = ChunkKind.CONTRIBUTION if mass else ChunkKind.RESULT
    header = ChunkHeader(kind, 0, chunk, len(payload), codec.number, GROUP, mass or 1.0, 0)
    sink = target.sink(header)
    assert sink is not None
    sink[:] = payload
    assert target.fault(header, sink) == ""
    if mass:
        target.accumulate(chunk, mass, sink)
    else:
        target.take(chunk, sink)
    target.release(sink)


def contribute(source: RoundStore, target: RoundStore, chunk: int, mass: float) -> None:
    encoded = source.contribution(chunk)
    assert encoded is not None
    deliver(encoded, target, chunk, mass)


def average(peers: list[RoundStore], masses: list[float]) -> None:
    """Chunk c is reduced by peer c mod n; who weighs nothing contributes nothing."""
    for chunk in CHUNKS:  # all first contributions before any second one
        for seat, source in enumerate(peers):
            reducer = peers[chunk % len(peers)]
            if source is not reducer and masses[seat]:
                contribute(source, reducer, chunk, masses[seat])
    for chunk in CHUNKS:
        reducer = peers[chunk % len(peers)]
        if masses[chunk % len(peers)]:
            reducer.accumulate_own(chunk, masses[chunk % len(peers)])
        reducer.finalize(chunk, sum(masses))
        for other in peers:
            if other is not reducer:
                deliver(reducer.result_payload(chunk), other, chunk, 0.0)
    for peer in peers:
        peer.finish()


def error(peers: list[RoundStore], exact: torch.Tensor) -> float:
    return ((peers[0].result - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda c: c.name)
@pytest.mark.parametrize("in_place", [False, True])
def test_everybody_ends_with_the_same_bytes(codec: Codec, in_place: bool) -> None:
    peers = [store(seed, codec, in_place=in_place) for seed in range(3)]
    masses = [1.0, 2.0, 5.0]
    exact = torch.stack([p.local * m / 8 for p, m in zip(peers, masses, strict=True)]).sum(0)
    average(peers, masses)
    assert all(torch.equal(p.result, peers[0].result) for p in peers)
    alone = exact.clone()
    for chunk in CHUNKS:
        place = PLAN.slice(chunk)
        alone[place] = codec.decode(codec.encode(exact[place].contiguous()))
    # About as good as encoding the mean itself once.
    assert error(peers, exact) <= 3 * ((alone - exact).norm() / exact.norm()).item() + 1e-6


@pytest.mark.parametrize("codec", CODECS.values(), ids=lambda c: c.name)
def test_a_result_is_passed_on_by_anybody_with_the_same_bytes(codec: Codec) -> None:
    peers = [store(seed, codec) for seed in range(3)]
    average(peers, [1.0, 1.0, 1.0])
    for chunk in CHUNKS:
        payloads = {(c.number, bytes(p)) for c, p in (x.result_payload(chunk) for x in peers)}
        assert len(payloads) == 1
    late = store(9, codec)
    deliver(peers[1].result_payload(2), late, 2, 0.0)
    assert torch.equal(late.result[PLAN.slice(2)], peers[0].result[PLAN.slice(2)])


def test_each_peer_may_use_another_codec() -> None:
    names = ["float32", "bfloat16", "int8", "bfp", "float16"]
    peers = [store(seed, codec_named(name)) for seed, name in enumerate(names)]
    exact = torch.stack([p.local for p in peers]).mean(0)
    average(peers, [1.0] * len(peers))
    assert all(torch.equal(p.result, peers[0].result) for p in peers)
    assert error(peers, exact) < 0.02


def test_who_has_no_value_sends_results_as_the_contributions_came() -> None:
    peers = [store(0, None), *(store(seed, codec_named("topk")) for seed in (1, 2))]
    average(peers, [0.0, 1.0, 1.0])
    assert all(torch.equal(p.result, peers[1].result) for p in peers)
    assert {peers[0].result_payload(chunk)[0].name for chunk in CHUNKS} == {"int8"}


def test_what_is_lost_comes_with_the_next_round() -> None:
    def drift(feedbacks: list[ErrorFeedback | None]) -> float:
        """How far the sum of the means is from where it should be."""
        total = torch.zeros(PLAN.numel)
        for _ in range(40):
            peers = [store(i, codec_named("topk"), feedback=f) for i, f in enumerate(feedbacks)]
            total -= torch.stack([p.local for p in peers]).mean(0)
            average(peers, [1.0, 1.0, 1.0])
            for feedback in feedbacks:
                if feedback is not None:
                    feedback.commit()
            total += peers[0].result
        return total.norm().item()

    assert drift([ErrorFeedback(PLAN.numel) for _ in range(3)]) < 0.3 * drift([None] * 3)


def test_the_head_can_be_exact() -> None:
    peers = [store(seed, codec_named("int4"), exact=2) for seed in range(3)]
    exact = torch.stack([p.local for p in peers]).mean(0)
    average(peers, [1.0, 1.0, 1.0])
    head = slice(0, 2 * PLAN.chunk_numel)
    assert torch.allclose(peers[1].result[head], exact[head], rtol=1e-6, atol=1e-7)
    assert not torch.allclose(peers[1].result, exact, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("number", [200, 255])
def test_an_unknown_codec_is_no_chunk(number: int) -> None:
    peer = store(0, codec_named("int8"))
    header = ChunkHeader(ChunkKind.RESULT, 0, 0, 528, number, GROUP, 1.0, 0)
    assert peer.sink(header) is None
    assert peer.fault(header, memoryview(bytearray(528))) == "undecodable"


@pytest.mark.parametrize("name", ["int4", "topk", "topk64"])
def test_a_payload_that_lies_about_its_count_is_refused(name: str) -> None:
    """Its length is right: one number fewer has as many bytes."""
    peer, codec = store(0, codec_named(name)), codec_named(name)
    payload = bytearray(codec.encode(torch.ones(512)))
    payload[:4] = (511).to_bytes(4, "little")
    assert codec.decode(payload).numel() == 511
    header = ChunkHeader(ChunkKind.CONTRIBUTION, 0, 0, len(payload), codec.number, GROUP, 1.0, 0)
    sink = peer.sink(header)
    assert sink is not None
    sink[:] = payload
    assert peer.fault(header, sink) == "wrong-size"
