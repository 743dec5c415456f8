"""What every codec must do. A new one only has to be in the registry."""

from __future__ import annotations

import pytest
import torch

from moshpit.tensors.codecs import CODECS, Codec

CASES = {
    "normal": torch.randn(1000, generator=torch.Generator().manual_seed(1)),
    "one": torch.tensor([3.25]),
    "zeros": torch.zeros(64),
    "mixed sizes": torch.tensor([1e-30, -1e30, 1.0, -1.0, 0.0, 3e38]),
    "odd length": torch.linspace(-5, 5, 333),
}


@pytest.fixture(params=list(CODECS.values()), ids=lambda codec: codec.name)
def codec(request: pytest.FixtureRequest) -> Codec:
    return request.param


def decoded(codec: Codec, payload: bytes | memoryview, numel: int) -> torch.Tensor:
    into = torch.full((numel,), float("nan"))
    codec.decode_into(payload, into)
    return into


def test_numbers_and_names_are_unique(codec: Codec) -> None:
    assert CODECS[codec.number] is codec
    assert 0 <= codec.number <= 255
    assert [c.name for c in CODECS.values()].count(codec.name) == 1


@pytest.mark.parametrize("case", CASES)
def test_the_size_is_known_before(codec: Codec, case: str) -> None:
    values = CASES[case]
    assert len(codec.encode(values)) == codec.encoded_bytes(values.numel())


@pytest.mark.parametrize("case", CASES)
def test_what_was_decoded_encodes_to_itself(codec: Codec, case: str) -> None:
    """The reducer takes the decoded result, and others serve it on: all hold the same bytes."""
    values = CASES[case].clone()
    payload = bytes(codec.encode(values))
    once = decoded(codec, payload, values.numel())
    again = decoded(codec, bytes(codec.encode(once)), values.numel())
    assert torch.isfinite(once).all()
    assert torch.equal(once, again)
    assert torch.equal(codec.decode(payload), once)


@pytest.mark.parametrize("case", CASES)
def test_encoding_is_deterministic_and_leaves_its_source_alone(codec: Codec, case: str) -> None:
    values = CASES[case].clone()
    first, second = bytes(codec.encode(values)), bytes(codec.encode(values.clone()))
    assert first == second
    assert torch.equal(values, CASES[case])


def test_the_source_may_be_a_slice(codec: Codec) -> None:
    values = CASES["normal"]
    payload = bytes(codec.encode(values[100:300]))
    assert payload == bytes(codec.encode(values[100:300].clone()))


def test_other_kinds_of_buffers(codec: Codec) -> None:
    values = CASES["normal"]
    payload = bytes(codec.encode(values))
    expected = decoded(codec, payload, values.numel())
    padded = bytearray(b"????" + payload)
    for buffer in (payload, bytearray(payload), memoryview(payload), memoryview(padded)[4:]):
        assert torch.equal(decoded(codec, buffer, values.numel()), expected)
        assert torch.equal(codec.decode(buffer), expected)


def test_nothing_is_nothing(codec: Codec) -> None:
    payload = codec.encode(torch.empty(0))
    assert len(payload) == codec.encoded_bytes(0)
    assert codec.decode(bytes(payload)).numel() == 0


def test_payloads_of_a_wrong_size_are_refused(codec: Codec) -> None:
    payload = bytes(codec.encode(CASES["normal"]))
    for wrong in (payload[:-1], payload + b"?", payload[: len(payload) // 2], b""):
        with pytest.raises(ValueError):
            decoded(codec, wrong, 1000)


def test_non_finite_numbers_do_not_become_finite(codec: Codec) -> None:
    """Or the check of what arrives would pass a poisoned chunk."""
    for bad in (float("nan"), float("inf"), -float("inf")):
        values = torch.ones(100)
        values[50] = bad
        payload = bytes(codec.encode(values))
        if codec.refuses_nonfinite:
            with pytest.raises(ValueError):
                codec.decode(payload)
        else:
            assert not torch.isfinite(decoded(codec, payload, 100)).all()


def test_in_place_codecs_cost_nothing(codec: Codec) -> None:
    values = CASES["normal"].clone()
    payload = codec.encode(values)
    if codec.in_place:
        assert codec.decode(payload).data_ptr() == values.data_ptr()
    else:
        values.zero_()
        assert torch.equal(codec.decode(payload), codec.decode(codec.encode(CASES["normal"])))
