"""The bytes of a round: sums, results, and no garbage in either."""

from __future__ import annotations

import math

import pytest
import torch

from moshpit.tensors.codecs import Float32
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.store import Buffers, RoundStore
from moshpit.types import GroupId
from moshpit.wire.framing import ChunkHeader, ChunkKind

GROUP = GroupId(b"a group of sixte")
PLAN = ChunkPlan(numel=100, chunk_numel=32)  # chunks of 32, 32, 32 and 4 numbers
CODEC = Float32()


def store(seed: int = 0) -> RoundStore:
    local = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    return RoundStore(local, torch.full((100,), float("nan")), PLAN, CODEC)


def header(chunk: int, kind: ChunkKind = ChunkKind.CONTRIBUTION, **other: int) -> ChunkHeader:
    length = other.get("length", 4 * PLAN.size(chunk) if chunk < 4 else 128)
    return ChunkHeader(kind, 0, chunk, length, other.get("codec", 0), GROUP, 1.0, 0)


def receive(into: RoundStore, payload: bytes | memoryview, about: ChunkHeader) -> memoryview:
    """Do what a transport does: write into the sink."""
    sink = into.sink(about)
    assert sink is not None
    sink[:] = payload
    return sink


def given(source: RoundStore, chunk: int) -> bytes:
    encoded = source.contribution(chunk)
    return b"" if encoded is None else bytes(encoded[1])


def result(source: RoundStore, chunk: int) -> bytes:
    return bytes(source.result_payload(chunk)[1])


def move(source: RoundStore, target: RoundStore, chunk: int, mass: float) -> None:
    """A contribution from one peer to another."""
    about = header(chunk)
    buffer = receive(target, given(source, chunk), about)
    assert target.fault(about, buffer) == ""
    target.accumulate(chunk, mass, buffer)
    target.release(buffer)


def pass_on(source: RoundStore, target: RoundStore, chunk: int) -> None:
    """A result from one peer to another."""
    about = header(chunk, ChunkKind.RESULT)
    buffer = receive(target, result(source, chunk), about)
    assert target.fault(about, buffer) == ""
    target.take(chunk, buffer)
    target.release(buffer)


def test_two_peers_end_with_the_same_bytes() -> None:
    a, b = store(1), store(2)
    for chunk in range(4):
        reducer, other = (a, b) if chunk < 2 else (b, a)
        move(other, reducer, chunk, 1.0)
        reducer.accumulate_own(chunk, 1.0)
        reducer.finalize(chunk, 2.0)
        pass_on(reducer, other, chunk)
    a.finish()
    b.finish()
    assert torch.equal(a.result, b.result)
    assert torch.equal(a.result, (a.local + b.local) / 2)


def test_a_result_is_passed_on_as_it_came() -> None:
    a, b, c = store(1), store(2), store(3)
    a.accumulate_own(0, 1.0)
    a.finalize(0, 1.0)
    pass_on(a, b, 0)
    pass_on(b, c, 0)
    assert result(c, 0) == result(a, 0)


def test_what_has_no_result_keeps_the_local_value() -> None:
    a, b = store(1), store(2)
    a.accumulate_own(1, 2.0)
    a.finalize(1, 2.0)
    pass_on(a, b, 1)
    b.accumulate_own(2, 1.0)  # a sum that is never finished
    b.finish((0, 2, 3))
    assert torch.equal(b.result[32:64], a.local[32:64])
    for place in (PLAN.slice(0), PLAN.slice(2), PLAN.slice(3)):
        assert torch.equal(b.result[place], b.local[place])


def test_a_chunk_that_is_cut_short_or_refused_leaves_no_trace() -> None:
    a = store(1)
    half = a.sink(header(0, ChunkKind.RESULT))
    assert half is not None
    half[:50] = b"\xff" * 50
    bad = receive(a, b"\xff" * 128, header(1, ChunkKind.RESULT))
    assert a.fault(header(1, ChunkKind.RESULT), bad) == "non-finite"
    a.release(bad)
    a.finish((0, 1, 2, 3))
    half[50:] = b"\xff" * 78  # the connection was still writing
    a.release(half)
    assert torch.equal(a.result, a.local)


def test_the_same_chunk_from_two_peers_at_once() -> None:
    a, b = store(1), store(2)
    b.accumulate_own(0, 1.0)
    b.finalize(0, 1.0)
    about = header(0, ChunkKind.RESULT)
    first, second = a.sink(about), a.sink(about)
    assert first is not None
    assert second is not None
    first[:64] = b"\xff" * 64
    second[:] = result(b, 0)
    assert a.fault(about, second) == ""
    a.take(0, second)
    a.release(second)
    first[64:] = b"\xff" * 64
    a.release(first)
    a.finish((1, 2, 3))
    assert torch.equal(a.result[:32], b.local[:32])


def test_sinks_only_for_what_can_be_a_chunk_of_this_round() -> None:
    a = store()
    assert a.sink(header(0, length=127)) is None
    assert a.sink(header(3, length=128)) is None
    assert a.sink(header(4)) is None
    assert a.sink(header(0, codec=9)) is None
    sink = a.sink(header(3))
    assert sink is not None
    assert len(sink) == 16


def test_buffers_are_used_again() -> None:
    a = store()
    first = a.sink(header(0))
    assert first is not None
    memory = first.obj
    a.release(first)
    second = a.sink(header(3))
    assert second is not None
    assert second.obj is memory
    third = a.sink(header(0))
    assert third is not None
    assert third.obj is not memory


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_non_finite_numbers_are_found_wherever_they_are(bad: float) -> None:
    a, b = store(1), store(2)
    for chunk, index in ((0, 0), (0, 31), (3, 99)):
        kept = b.local[index].item()
        b.local[index] = bad
        buffer = receive(a, given(b, chunk), header(chunk))
        assert a.fault(header(chunk), buffer) == "non-finite"
        a.release(buffer)
        b.local[index] = kept


def test_large_finite_numbers_are_no_fault() -> None:
    a, b = store(1), store(2)
    b.local.fill_(3e38)
    buffer = receive(a, given(b, 0), header(0))
    assert a.fault(header(0), buffer) == ""


def test_faults_of_size_and_codec() -> None:
    a = store()
    buffer = memoryview(bytearray(128))
    assert a.fault(header(3), buffer) == "wrong-size"
    assert a.fault(header(7), buffer) == "wrong-size"
    assert a.fault(header(0, codec=200), buffer) == "undecodable"


def test_a_sum_that_was_given_up_leaves_no_trace() -> None:
    a, b = store(1), store(2)
    move(b, a, 0, 5.0)
    a.reset(0)
    a.reset(0)
    a.accumulate_own(0, 2.0)
    a.finalize(0, 2.0)
    assert torch.equal(a.result[:32], a.local[:32])


def test_contributions_with_masses() -> None:
    peers = [store(seed) for seed in range(5)]
    masses = [1.0, 250.0, 0.5, 1e6, 3.0]
    reducer = peers[0]
    for peer, mass in zip(peers[1:], masses[1:], strict=True):
        move(peer, reducer, 2, mass)
    reducer.accumulate_own(2, masses[0])
    reducer.finalize(2, sum(masses))
    place = PLAN.slice(2)
    exact = sum(p.local[place].double() * m for p, m in zip(peers, masses, strict=True))
    assert torch.allclose(reducer.result[place].double(), exact / sum(masses), rtol=1e-6)


def test_the_mass_of_machine_and_store_must_agree() -> None:
    a = store()
    a.accumulate_own(0, 2.0)
    with pytest.raises(AssertionError, match="expected 3"):
        a.finalize(0, 3.0)


def test_a_result_comes_once() -> None:
    a, b = store(1), store(2)
    b.accumulate_own(0, 1.0)
    b.finalize(0, 1.0)
    pass_on(b, a, 0)
    with pytest.raises(AssertionError):
        pass_on(b, a, 0)
    with pytest.raises(AssertionError):
        a.accumulate_own(0, 1.0)


def test_a_chunk_without_a_value_can_be_sent() -> None:
    """Mass 0 in the header says that nobody had anything; the bytes are not looked at."""
    a = store()
    assert len(result(a, 0)) == 4 * PLAN.size(0)
    assert len(result(a, 3)) == 4 * PLAN.size(3)


def test_the_local_vector_is_only_read() -> None:
    a, b = store(1), store(2)
    before = a.local.clone()
    move(b, a, 0, 1.0)
    a.accumulate_own(0, 1.0)
    a.finalize(0, 2.0)
    pass_on(a, b, 0)
    a.finish((1, 2, 3))
    assert torch.equal(a.local, before)
    assert a.local.data_ptr() != a.result.data_ptr()


def in_place(seed: int, buffers: Buffers | None = None) -> RoundStore:
    local = torch.randn(100, generator=torch.Generator().manual_seed(seed))
    return RoundStore(local, local, PLAN, CODEC, buffers)


def test_means_can_take_the_place_of_the_local_values() -> None:
    a, b = in_place(1), in_place(2)
    exact = (a.local + b.local) / 2
    alone = b.local[PLAN.slice(3)].clone()
    for chunk in range(3):
        reducer, other = (a, b) if chunk < 2 else (b, a)
        move(other, reducer, chunk, 1.0)
        reducer.accumulate_own(chunk, 1.0)
        reducer.finalize(chunk, 2.0)
        pass_on(reducer, other, chunk)
        assert other.contribution(chunk) is None  # the mean is no contribution
        assert reducer.contribution(chunk) is None
    a.finish((3,))
    b.finish((3,))
    assert torch.equal(a.result[:96], exact[:96])
    assert torch.equal(a.result[:96], b.result[:96])
    assert torch.equal(b.result[96:], alone)


def test_a_sum_given_up_in_place_leaves_the_local_values() -> None:
    a, b = in_place(1), in_place(2)
    before = a.local.clone()
    move(b, a, 0, 5.0)
    a.accumulate_own(0, 1.0)
    a.reset(0)
    a.finish((0, 1, 2, 3))
    assert torch.equal(a.result, before)


def test_a_sum_keeps_the_buffer_that_it_grew_from() -> None:
    buffers = Buffers()
    a, b = in_place(1, buffers), in_place(2)
    expected = (a.local[:32] + b.local[:32]) / 2
    move(b, a, 0, 1.0)
    other = a.sink(header(1))
    assert other is not None
    other[:] = b"\xff" * 128  # would spoil the sum if it were the same memory
    a.release(other)
    a.accumulate_own(0, 1.0)
    a.finalize(0, 2.0)
    assert torch.equal(a.result[:32], expected)


def test_the_round_before_serves_what_it_had() -> None:
    first = in_place(1)
    first.accumulate_own(0, 1.0)
    first.finalize(0, 1.0)
    first.finish((1, 2, 3))
    had = [result(first, 0), given(first, 1)]
    second = RoundStore(first.result, first.result, PLAN, CODEC, before=first)
    third = RoundStore(first.result, first.result, PLAN, CODEC, before=second)
    other = in_place(2)
    for chunk in (0, 1):
        move(other, third, chunk, 1.0)
        third.accumulate_own(chunk, 1.0)
        third.finalize(chunk, 2.0)
    third.finish((2, 3))
    assert [result(first, 0), given(first, 1)] == had
    assert result(third, 0) != had[0]


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("shared", [False, True])
def test_vectors_that_are_given_back_do_not_matter_any_more(ended: bool, shared: bool) -> None:
    a = in_place(1) if shared else store(1)
    vectors = [a.local, a.result]
    a.accumulate_own(0, 1.0)
    a.finalize(0, 1.0)
    if ended:
        a.finish((1, 2, 3))
    had = result(a, 0), given(a, 1)
    a.move_out(ended=ended)
    for vector in vectors:
        vector.fill_(7.0)
    assert result(a, 0) == had[0]
    assert given(a, 1) == (had[1] if shared or not ended else b"")


def test_vectors_that_require_gradients_are_detached() -> None:
    local = torch.zeros(100, requires_grad=True)
    made = RoundStore(local, torch.empty(100), PLAN, CODEC)
    made.accumulate_own(0, 1.0)
    made.finalize(0, 1.0)
    assert not made.result.requires_grad


def test_memory_that_was_the_whole_sum_is_free_only_once() -> None:
    a, b = store(1), store(2)
    about = header(0)
    buffer = receive(b, given(a, 0), about)
    assert b.fault(about, buffer) == ""
    b.accumulate(0, 1.0, buffer)
    b.accumulate_own(0, 1.0)
    b.finalize(0, 2.0)  # the only contribution was the one that has just arrived
    b.release(buffer)
    first, second = b.sink(about), b.sink(about)
    assert first is not None
    assert second is not None
    assert first.obj is not second.obj


def test_a_column_goes_on_where_the_row_is_and_the_row_gives_out_its_result() -> None:
    row, other = store(1), store(2)
    for chunk in (1, 2):
        row.accumulate_own(chunk, 2.0)
        row.finalize(chunk, 2.0)
    column = RoundStore(row.result, row.result, PLAN, CODEC, span=(1, 3))
    move(other, column, 1, 6.0)
    column.accumulate_own(1, 2.0)
    column.finalize(1, 8.0)
    column.finish((2,))  # nothing came of chunk 2
    row.adopt(column, 1)
    row.finish((0, 3))
    expected = row.local.clone()
    part = PLAN.slice(1)
    expected[part] = (2 * row.local[part] + 6 * other.local[part]) / 8
    torch.testing.assert_close(row.result, expected)
    assert result(row, 1) == result(column, 1)
    column.move_out(ended=True)
    kept = result(column, 1)
    row.result.zero_()  # the caller has them back
    assert result(column, 1) == kept
