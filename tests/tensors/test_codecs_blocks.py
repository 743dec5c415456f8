"""The codecs with one scale for a block of numbers: their bytes, their edges."""

from __future__ import annotations

import struct

import pytest
import torch

from moshpit.tensors.codecs import CODECS, Codec, codec_named

FLOAT_MAX = torch.finfo(torch.float32).max
BLOCKWISE = {"int8": (64, 127), "int4": (32, 7), "bfp": (64, 127), "bfp16": (16, 127)}


@pytest.fixture(params=BLOCKWISE)
def codec(request: pytest.FixtureRequest) -> Codec:
    return codec_named(request.param)


def normal(numel: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(
    ("name", "ratio"), [("int8", 3.88), ("int4", 7.11), ("bfp", 3.94), ("bfp16", 3.76)]
)
def test_ratios(name: str, ratio: float) -> None:
    numel = 131072
    assert round(4 * numel / codec_named(name).encoded_bytes(numel), 2) == ratio


def test_no_number_is_off_by_more_than_its_share_of_the_block(codec: Codec) -> None:
    block, levels = BLOCKWISE[codec.name]
    values = normal(64 * 100) * torch.logspace(-20, 20, 6400)
    got = codec.decode(codec.encode(values))
    peaks = values.view(-1, block).abs().amax(1, keepdim=True)
    # Half a step; steps are the peak over the levels, or over 63.75 at least; a 256th more for
    # the rounding of a step.
    least = 63.75 if codec.name.startswith("bfp") else levels / (1 + 1 / 256)
    step = peaks / least
    assert ((got - values).view(-1, block).abs() <= 0.5001 * step).all()


def test_blocks_do_not_disturb_each_other(codec: Codec) -> None:
    block, _ = BLOCKWISE[codec.name]
    values = normal(4 * block)
    loud = values.clone()
    loud[block : 2 * block] *= 1e9
    got, got_loud = codec.decode(codec.encode(values)), codec.decode(codec.encode(loud))
    rest = torch.ones(4 * block, dtype=torch.bool)
    rest[block : 2 * block] = False
    assert torch.equal(got[rest], got_loud[rest])


def test_the_largest_number_of_a_block_is_a_top_level(codec: Codec) -> None:
    """Or what was decoded would have smaller steps than what was encoded."""
    block, levels = BLOCKWISE[codec.name]
    for seed in range(200):
        values = normal(block, seed)
        got = codec.decode(codec.encode(values))
        step = float(got[got != 0].abs().min())
        top = float(got.abs().max()) / step
        assert top <= levels
        if codec.name == "int4":
            assert top in (7.0, 3.5, 7 / 3)  # the smallest level that occurs may be 2 or 3


def test_numbers_near_the_end_of_the_range_saturate(codec: Codec) -> None:
    values = torch.tensor([FLOAT_MAX, -FLOAT_MAX, 1e38])
    got = codec.decode(codec.encode(values))
    assert torch.isfinite(got).all()
    assert torch.allclose(got, values, rtol=0.16)
    assert got[0] == -got[1] == got.max()


def test_blocks_of_tiny_numbers_become_zeros(codec: Codec) -> None:
    values = torch.full((128,), 1e-39)
    values[64:] = 1.0
    got = codec.decode(codec.encode(values))
    assert (got[:64] == 0).all()
    assert (got[64:] > 0.9).all()
    if codec.name.startswith("bfp"):
        tiny = torch.full((64,), 5e-37)
        assert bytes(codec.encode(tiny)) == bytes(codec.encoded_bytes(64))


@pytest.mark.parametrize("name", ["int8", "int4"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf"), -1.0, 3.3e38])
def test_impossible_steps_are_refused(name: str, bad: float) -> None:
    codec = codec_named(name)
    payload = bytearray(codec.encode(normal(200)))
    head = 4 if name == "int4" else 0
    step = torch.tensor([bad], dtype=torch.bfloat16)
    payload[head + 2 : head + 4] = step.view(torch.uint8).numpy().tobytes()
    with pytest.raises(ValueError, match="step"):
        codec.decode(payload)


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_any_level_times_any_step_is_finite(name: str) -> None:
    """The largest step that is accepted, with levels that no encoder makes."""
    codec = codec_named(name)
    payload = bytearray(codec.encode(torch.full((64,), FLOAT_MAX)))
    head = 4 if name == "int4" else 0
    steps = 2 * (64 // BLOCKWISE[name][0])
    payload[head + steps :] = b"\x80" * (len(payload) - head - steps)  # -128, or pairs of -8
    assert torch.isfinite(codec.decode(payload)).all()


@pytest.mark.parametrize("name", ["bfp", "bfp16"])
def test_impossible_exponents_and_levels_are_refused(name: str) -> None:
    codec = codec_named(name)
    payload = bytes(codec.encode(torch.full((16,), FLOAT_MAX)))
    assert payload[0] == 254
    for at, byte in ((0, 255), (1, 0x80), (16, 0x80)):
        broken = bytearray(payload)
        broken[at] = byte
        with pytest.raises(ValueError):
            codec.decode(broken)


@pytest.mark.parametrize("name", ["bfp", "bfp16"])
def test_exponents_below_all_steps_are_zeros(name: str) -> None:
    codec = codec_named(name)
    for exponent in range(7):
        assert (codec.decode(bytes([exponent, 1, 127])) == 0).all()
    assert codec.decode(bytes([7, 1, 127])).tolist() == [2.0**-126, 127 * 2.0**-126]


def test_block_floats_are_exponent_and_levels() -> None:
    payload = bytes(codec_named("bfp").encode(torch.tensor([100.0, -3.2, 0.4, 0.0])))
    assert payload == bytes([127 + 6, 100, 253, 0, 0])
    # What would round to 128 takes the next exponent.
    assert bytes(codec_named("bfp").encode(torch.tensor([127.6, -127.6]))) == bytes([134, 64, 192])
    assert bytes(codec_named("bfp").encode(torch.tensor([127.4, -127.4]))) == bytes([133, 127, 129])


def test_int8_is_steps_and_levels() -> None:
    payload = bytes(codec_named("int8").encode(torch.tensor([127.0, -3.2, 0.4, 0.0])))
    assert payload == struct.pack("<H4b", 0x3F80, 127, -3, 0, 0)


@pytest.mark.parametrize("numel", [1, 2, 3, 31, 32, 33, 64, 65])
def test_int4_pairs_the_halves(numel: int) -> None:
    levels = (torch.arange(numel) * 5 % 15 - 7).float()
    levels[::32] = 7.0
    payload = bytes(codec_named("int4").encode(levels))
    edge = 4 + 2 * -(-numel // 32)
    assert struct.unpack_from("<I", payload) == (numel,)
    half = -(-numel // 2)
    got = [(byte & 15) - 8 for byte in payload[edge:]]
    got += [((byte >> 4) ^ 8) - 8 for byte in payload[edge:]][: numel - half]
    assert got == levels.int().tolist()
    assert torch.equal(codec_named("int4").decode(payload), levels)


@pytest.mark.parametrize("count", [0, 7, 9, 2**31 - 1, 2**31, 2**32 - 1])
@pytest.mark.parametrize("name", ["int4", "topk", "topk64"])
def test_counts_that_do_not_fit_are_refused(name: str, count: int) -> None:
    codec = codec_named(name)
    payload = bytearray(codec.encode(normal(1000)))
    payload[:4] = struct.pack("<I", count)
    with pytest.raises(ValueError):
        codec.decode(payload)


@pytest.mark.parametrize("name", ["int4", "topk", "topk64"])
def test_counts_below_zero_are_refused(name: str) -> None:
    assert codec_named(name).decode(bytes(4)).numel() == 0
    with pytest.raises(ValueError):
        codec_named(name).decode(bytes([255] * 4))


def test_halves_saturate_and_vanish() -> None:
    half, brain = codec_named("float16"), codec_named("bfloat16")
    values = torch.tensor([65503.0, 65519.0, 65520.0, -1e30, FLOAT_MAX, 1e-9, -1e-9])
    assert half.decode(half.encode(values)).tolist() == [
        65504.0, 65504.0, 65504.0, -65504.0, 65504.0, 0.0, -0.0,
    ]  # fmt: skip
    top = torch.finfo(torch.bfloat16).max
    assert brain.decode(brain.encode(torch.tensor([FLOAT_MAX, -FLOAT_MAX]))).tolist() == [top, -top]


def test_only_float32_lets_what_is_not_finite_through() -> None:
    assert [codec.name for codec in CODECS.values() if not codec.refuses_nonfinite] == ["float32"]
