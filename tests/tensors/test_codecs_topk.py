"""Top-k: which numbers are chosen, and payloads that lie about their places."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moshpit.tensors.codecs import CODECS, codec_named
from moshpit.tensors.codecs.topk import TopK, largest

CODEC = TopK(99, "one in four", 4, CODECS[3])
VALUES = torch.randn(1000, generator=torch.Generator().manual_seed(1))
CHOSEN, BLOCKS = 250, 4
COUNTS_AT, PLACES_AT = 4 + 2 * CHOSEN, 4 + 2 * CHOSEN + 2 * BLOCKS


@given(st.lists(st.integers(0, 2**31 - 2**23 - 1), min_size=1, max_size=400), st.integers(1, 400))
def test_the_largest_are_found_and_of_equal_ones_the_first(sizes: list[int], k: int) -> None:
    k = min(k, len(sizes))
    expected = sorted(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:k])
    got = largest(torch.tensor(sizes, dtype=torch.int32).numpy(), k)
    assert got.tolist() == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=400), st.integers(1, 400))
def test_many_equal_ones(sizes: list[int], k: int) -> None:
    k = min(k, len(sizes))
    expected = sorted(sorted(range(len(sizes)), key=lambda i: (-sizes[i], i))[:k])
    got = largest(torch.tensor(sizes, dtype=torch.int32).numpy(), k)
    assert got.tolist() == expected


@pytest.mark.parametrize("power", [1, 5, 15])
def test_it_agrees_with_a_sort(power: int) -> None:
    values = torch.randn(131072, generator=torch.Generator().manual_seed(2)) ** power
    codec = codec_named("topk")
    got = codec.decode(codec.encode(values))
    expected = torch.zeros(131072)
    places = values.abs().topk(131072 // 16).indices
    expected[places] = values[places].bfloat16().float()
    assert torch.equal(got, expected)


def test_what_is_sent_is_what_its_name_says() -> None:
    for name, one_in in (("topk", 16), ("topk64", 64)):
        codec = codec_named(name)
        assert int((codec.decode(codec.encode(VALUES)) != 0).sum()) == -(-1000 // one_in)


def test_fewer_numbers_than_places() -> None:
    values = torch.zeros(1000)
    values[[3, 700]] = torch.tensor([1.5, -2.0])
    assert torch.equal(CODEC.decode(CODEC.encode(values)), values)


def test_a_full_block() -> None:
    values = torch.zeros(1024)
    values[256:512] = 1.0
    assert torch.equal(CODEC.decode(CODEC.encode(values)), values)


def test_results_are_dense() -> None:
    assert codec_named("topk").result_codec is codec_named("int8")


def broken(at: int, data: bytes) -> bytearray:
    payload = bytearray(CODEC.encode(VALUES))
    payload[at : at + len(data)] = data
    return payload


@pytest.mark.parametrize("bits", [0x7F80, 0xFF80, 0x7FC0])
def test_values_that_are_not_finite_are_refused(bits: int) -> None:
    with pytest.raises(ValueError, match="finite"):
        CODEC.decode(broken(4 + 2 * 17, struct.pack("<H", bits)))


def test_places_given_twice_or_out_of_order_are_refused() -> None:
    good = bytes(CODEC.encode(VALUES))[PLACES_AT:]
    for places in (bytes([good[1]]), bytes([good[1], good[0]])):
        with pytest.raises(ValueError, match="twice"):
            CODEC.decode(broken(PLACES_AT, places))


def test_places_beyond_the_end_are_refused() -> None:
    # The last block has 1000 - 768 = 232 numbers.
    assert CODEC.decode(broken(PLACES_AT + CHOSEN - 1, bytes([231])))[999] != 0
    with pytest.raises(ValueError, match="beyond"):
        CODEC.decode(broken(PLACES_AT + CHOSEN - 1, bytes([232])))


@pytest.mark.parametrize(
    "counts", [(0, 0, 0, 0), (65535,) * 4, (250, 0, 0, 1), (0, 0, 0, 250), (250, 0, 0, 0)]
)
def test_counts_that_do_not_fit_the_places_are_refused(counts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError):
        CODEC.decode(broken(COUNTS_AT, struct.pack("<4H", *counts)))


def test_counts_of_more_than_was_sent_are_refused() -> None:
    codec = TopK(98, "one in a thousand", 1000, CODECS[3])
    payload = bytearray(codec.encode(torch.ones(300)))
    payload[6:10] = struct.pack("<2H", 1, 1)  # one value, for a place in either block
    with pytest.raises(ValueError, match="as many"):
        codec.decode(payload)


def test_a_broken_payload_writes_nothing_outside() -> None:
    memory = torch.full((3000,), 7.0)
    with pytest.raises(ValueError):
        CODEC.decode_into(broken(PLACES_AT + CHOSEN - 1, bytes([255])), memory[1000:2000])
    assert (memory == 7.0).all()
