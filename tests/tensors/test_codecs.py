"""What every codec must do. A new one only has to be in the registry."""

from __future__ import annotations

import contextlib
import threading

import pytest
import torch
from benchmarks.codecs import PAGE, sizes_table
from hypothesis import given
from hypothesis import strategies as st

from moshpit.errors import ConfigError
from moshpit.tensors.codecs import CODECS, Codec, ErrorFeedback, codec_named
from moshpit.tensors.codecs.scratch import KEPT_NUMEL_MAX

CASES = {
    "normal": torch.randn(1000, generator=torch.Generator().manual_seed(1)),
    "one": torch.tensor([3.25]),
    "zeros": torch.zeros(64),
    "mixed sizes": torch.tensor([1e-30, -1e30, 1.0, -1.0, 0.0, 3e38]),
    "odd length": torch.linspace(-5, 5, 333),
    "long": torch.randn(5001, generator=torch.Generator().manual_seed(2)) ** 5,
    "the largest there are": torch.full((65,), torch.finfo(torch.float32).max),
    "the smallest there are": torch.tensor([1.4e-45, -1e-40, 1e-38, -1.18e-38, 3e-37] * 20),
    "about the smallest steps": torch.linspace(-2e-36, 3e-36, 997),
    "all alike": torch.full((200,), -0.1),
    "an outlier": torch.cat([torch.full((99,), 1e-3), torch.tensor([1e4])]),
    "negative zeros": torch.full((40,), -0.0),
}

ERRORS = {
    "float32": 0.0,
    "float16": 3e-4,
    "bfloat16": 2e-3,
    "int8": 0.007,
    "int4": 0.11,
    "bfp": 0.01,
    "bfp16": 0.008,
    "topk": 0.85,
    "topk64": 0.96,
}
"""The largest relative error for normal numbers."""

FLOATS = st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), max_size=300)


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
    if codec.result_codec is codec:
        assert bytes(codec.encode(once)) == payload


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


def test_codecs_are_found_by_name(codec: Codec) -> None:
    assert codec_named(codec.name) is codec


def test_an_unknown_name_is_answered_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"'gzip'.*float32.*int8.*topk"):
        codec_named("gzip")


def test_the_page_has_every_codec_as_it_is(codec: Codec) -> None:
    """With its size and its flags; the figures that were measured are of their day."""
    page = PAGE.read_text(encoding="utf-8")
    assert sizes_table() in page, "run `python -m benchmarks.codecs --write`"
    assert page.count(f"| `{codec.name}` |") >= 3, "sizes, errors, speed"


def test_results_have_a_codec_of_their_own_kind(codec: Codec) -> None:
    results = codec.result_codec
    assert CODECS[results.number] is results
    assert results.result_codec is results


def test_the_error_is_what_it_should_be(codec: Codec) -> None:
    values = torch.randn(100_000, generator=torch.Generator().manual_seed(3))
    error = (codec.decode(codec.encode(values)) - values).norm() / values.norm()
    assert error <= ERRORS[codec.name]
    assert codec.biased or error <= 0.5 * ERRORS["int8"]


def test_signs_are_kept(codec: Codec) -> None:
    for values in CASES.values():
        got = codec.decode(codec.encode(values))
        assert (got * values.sign() >= 0).all()


@given(numbers=FLOATS)
def test_any_finite_numbers_stay_finite_and_become_fixed(numbers: list[float]) -> None:
    values = torch.tensor(numbers, dtype=torch.float32)
    for codec in CODECS.values():
        payload = bytes(codec.encode(values))
        assert len(payload) == codec.encoded_bytes(values.numel())
        once = codec.decode(payload)
        assert torch.isfinite(once).all(), codec.name
        again = codec.decode(bytes(codec.encode(once)))
        # As bytes: a zero must keep its sign, too, or two peers hold different ones.
        assert bytes(CODECS[0].encode(again)) == bytes(CODECS[0].encode(once)), codec.name
        if codec.result_codec is codec:
            assert bytes(codec.encode(once)) == payload, codec.name


@given(payload=st.binary(max_size=200))
def test_any_bytes_are_numbers_or_refused(payload: bytes) -> None:
    for codec in CODECS.values():
        with contextlib.suppress(ValueError):
            values = codec.decode(payload)
            assert codec.encoded_bytes(values.numel()) == len(payload)
            assert torch.isfinite(values).all() or not codec.refuses_nonfinite, codec.name


@given(seed=st.integers(0, 2**32 - 1), numel=st.integers(1, 600))
def test_broken_payloads_are_numbers_or_refused(seed: int, numel: int) -> None:
    """Any byte of a good payload may be any other; what is refused has not been written."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(numel, generator=random)
    for codec in CODECS.values():
        payload = bytearray(codec.encode(values))
        for _ in range(3):
            at = int(torch.randint(len(payload), (1,), generator=random).item())
            payload[at] = int(torch.randint(256, (1,), generator=random).item())
        into = torch.full((numel,), 7.0)
        try:
            codec.decode_into(payload, into)
        except ValueError:
            assert (into == 7.0).all(), codec.name
        else:
            assert torch.isfinite(into).all() or not codec.refuses_nonfinite, codec.name


def test_a_payload_fits_only_its_own_count(codec: Codec) -> None:
    for numel in (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 129, 255, 256, 257):
        into = torch.full((numel,), 7.0)
        for other in (0, 1, numel - 2, numel - 1, numel + 1, numel + 2, 2 * numel + 1):
            if other in (numel, -1, -2):
                continue
            payload = bytes(codec.encode(torch.ones(other)))
            with pytest.raises(ValueError):
                codec.decode_into(payload, into)
        assert (into == 7.0).all()
        codec.decode_into(bytes(codec.encode(torch.zeros(numel))), into)
        assert (into == 0.0).all()


def test_decoding_leaves_the_payload_alone(codec: Codec) -> None:
    payload = bytearray(codec.encode(CASES["normal"]))
    before = bytes(payload)
    if not codec.in_place:
        codec.decode(payload).mul_(2)
        into = torch.empty(1000)
        codec.decode_into(payload, into)
        into.mul_(2)
    assert payload == before


def test_tensors_with_gradients_are_encoded(codec: Codec) -> None:
    values = CASES["normal"].clone().requires_grad_()
    assert bytes(codec.encode(values)) == bytes(codec.encode(CASES["normal"]))


def test_whole_vectors_are_encoded_like_chunks(codec: Codec) -> None:
    values = torch.randn(KEPT_NUMEL_MAX + 77, generator=torch.Generator().manual_seed(4))
    got = codec.decode(codec.encode(values))
    assert (got - values).norm() / values.norm() <= ERRORS[codec.name]


def test_threads_do_not_disturb_each_other(codec: Codec) -> None:
    """Several swarms of one process share the codecs, each in a thread of its own."""
    sources = [
        torch.randn(30_000, generator=torch.Generator().manual_seed(seed)) for seed in range(4)
    ]
    expected = [bytes(codec.encode(source)) for source in sources]
    wrong: list[int] = []
    start = threading.Barrier(len(sources))

    def work(index: int) -> None:
        into = torch.empty(30_000)
        start.wait()
        for _ in range(8):
            payload = codec.encode(sources[index])
            codec.decode_into(payload, into)
            if bytes(payload) != expected[index] or bytes(codec.encode(into)) != bytes(
                codec.encode(into.clone())
            ):
                wrong.append(index)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(sources))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_with_feedback_nothing_is_lost_for_long(codec: Codec) -> None:
    """After t rounds of the same numbers, the error of the sum is one residual: it falls as 1/t,
    as soon as every number has had its turn."""
    rounds = 200
    values = torch.randn(512, generator=torch.Generator().manual_seed(5))
    feedback, total = ErrorFeedback(512), torch.zeros(512)
    for _ in range(rounds):
        total += codec.decode(feedback.encode(codec, slice(0, 512), values))
        feedback.commit()
    error = (total / rounds - values).norm() / values.norm()
    assert error <= max(1e-5, 0.4 * ERRORS[codec.name])
