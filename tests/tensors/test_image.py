"""A state's bytes: what anybody can read, what nobody can alter, and chunks from anywhere."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.errors import StateError
from moshpit.tensors.image import (
    CHUNK_BYTES_MIN,
    DTYPES,
    Manifest,
    StateAssembler,
    StateImage,
    parse,
)

SIZE = CHUNK_BYTES_MIN


def some_tensors(seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "weight": torch.randn(40, 70, generator=generator),
        "empty": torch.empty(0, 3),
        "scalar": torch.tensor(3.5, dtype=torch.float64),
        "mask": torch.randn(5, generator=generator) > 0,
        "half": torch.randn(3, 3, generator=generator).bfloat16(),
        "counts": torch.arange(7),
        "transposed": torch.randn(30, 50, generator=generator).t(),
    }


def image_of(tensors: dict[str, torch.Tensor], epoch: int = 3) -> StateImage:
    return StateImage.of(tensors, {"lr": 0.1, "big": 2**100}, epoch, SIZE)


def assembled(image: StateImage) -> StateAssembler:
    assembler = StateAssembler(Manifest.decode(image.manifest.encode()))
    for index in assembler.missing:
        assert assembler.add(index, image.chunk(index))
    return assembler


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert (tensor.dtype, tensor.shape) == (b[name].dtype, b[name].shape), name
        as_bytes = [t.contiguous().reshape(-1).view(torch.uint8) for t in (tensor, b[name])]
        assert torch.equal(*as_bytes), name


def stream(image: StateImage) -> bytes:
    return b"".join(image.chunk(i) for i in range(len(image)))


def test_round_trip_and_readable_by_others(tmp_path: Path) -> None:
    tensors = some_tensors()
    image = image_of(tensors)
    assert len(image) > 2
    assert_equal(assembled(image).tensors(), tensors)
    file = tmp_path / "state.safetensors"
    file.write_bytes(stream(image))
    assert file.stat().st_size == image.manifest.size
    assert_equal(safetensors.torch.load_file(file), tensors)


def test_what_others_write_can_be_read() -> None:
    tensors = {n: t.contiguous() for n, t in some_tensors().items()}
    assert_equal(parse(bytearray(safetensors.torch.save(tensors, {"by": "others"}))), tensors)


@pytest.mark.parametrize("kind", DTYPES)
def test_every_kind_of_number(kind: str) -> None:
    generator = torch.Generator().manual_seed(1)
    raw = torch.randint(0, 2, (16, 8), dtype=torch.uint8, generator=generator)
    tensors = {"a": raw.view(DTYPES[kind]), "odd": torch.ones(3, dtype=torch.uint8)}
    image = image_of(tensors)
    assert_equal(assembled(image).tensors(), tensors)
    assert_equal(safetensors.torch.load(stream(image)), tensors)


def test_equal_states_have_equal_bytes_whatever_the_order() -> None:
    tensors = some_tensors()
    turned = dict(reversed(list(tensors.items())))
    one, other = image_of(tensors), image_of(turned)
    assert stream(one) == stream(other)
    assert one.manifest.digest == other.manifest.digest
    assert one.manifest.encode() == other.manifest.encode()
    assert image_of(tensors, epoch=4).manifest.digest != one.manifest.digest


def test_one_changed_value_changes_one_chunk() -> None:
    tensors = some_tensors()
    before = image_of(tensors).manifest
    tensors["weight"][-1, -1] += 1
    after = image_of(tensors).manifest
    changed = [a != b for a, b in zip(before.hashes, after.hashes, strict=True)]
    assert sum(changed) == 1


def test_chunks_in_any_order_from_donors_of_whom_one_lies() -> None:
    image, liar = image_of(some_tensors()), image_of(some_tensors(seed=1))
    assembler = StateAssembler(image.manifest)
    order = list(range(len(image)))
    random.Random(5).shuffle(order)
    refused = 0
    for index in order:
        if not assembler.add(index, liar.chunk(index)):
            refused += 1
            assert index in assembler.missing
            assert assembler.add(index, image.chunk(index))
            assert assembler.add(index, b"late and not looked at")
    assert refused > 1
    assert assembler.complete
    assert_equal(assembler.tensors(), some_tensors())


def test_a_chunk_that_is_none_is_refused() -> None:
    image = image_of(some_tensors())
    assembler = StateAssembler(image.manifest)
    last = len(image) - 1
    assert not assembler.add(-1, image.chunk(last))
    assert not assembler.add(last + 1, image.chunk(last))
    assert not assembler.add(0, image.chunk(0)[:-1])
    assert not assembler.add(0, image.chunk(0) + b"x")
    assert not assembler.add(0, b"")
    assert len(assembler.missing) == len(image)
    with pytest.raises(StateError, match="missing"):
        assembler.tensors()
    with pytest.raises(IndexError):
        image.chunk(last + 1)


def test_what_two_states_have_in_common_is_fetched_once() -> None:
    tensors = some_tensors()
    old = assembled(image_of(tensors))
    tensors["weight"][0, 0] += 1
    image = image_of(tensors, epoch=4)
    assembler = StateAssembler(image.manifest)
    assert assembler.reuse(old) == len(image) - 1
    (index,) = assembler.missing
    assert assembler.add(index, image.chunk(index))
    assert_equal(assembler.tensors(), tensors)
    assert StateAssembler(StateImage.of(tensors, {}, 4, 2 * SIZE).manifest).reuse(old) == 0


# --- what comes from others is judged ------------------------------------------------------


def test_no_altered_or_cut_manifest_is_believed() -> None:
    manifest = image_of({"w": torch.ones(8)}).manifest
    good = manifest.encode()
    assert Manifest.decode(good) == manifest
    for at in range(len(good)):
        for bad in (good[:at], good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]):
            try:  # base64 has spare bits: an altered digest may be the same one
                assert Manifest.decode(bad) == manifest
            except StateError:
                pass
            else:
                assert len(bad) == len(good)


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": 2},
        {"epoch": -1},
        {"epoch": 1 << 70},
        {"size": 0},
        {"size": -5},
        {"size": 1 << 60},
        {"chunk_bytes": 1},
        {"chunk_bytes": 0},
        {"chunk_bytes": 1 << 40},
        {"hashes": ()},
        {"hashes": (b"short",)},
        {"hashes": (bytes(32),) * 2},
    ],
)
def test_a_manifest_that_makes_no_sense_is_refused(wrong: dict[str, object]) -> None:
    manifest = msgspec.structs.replace(image_of({"w": torch.ones(8)}).manifest, **wrong)
    with pytest.raises(StateError):
        Manifest.decode(manifest.encode())


def test_nobody_sets_how_much_memory_is_taken() -> None:
    manifest = image_of(some_tensors()).manifest
    assert Manifest.decode(manifest.encode(), size_max=manifest.size) == manifest
    with pytest.raises(StateError, match="make no sense"):
        Manifest.decode(manifest.encode(), size_max=manifest.size - 1)


def test_a_manifest_that_is_nested_too_deeply_is_refused() -> None:
    deep = b'{"digest":"AA==","manifest":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    with pytest.raises(StateError):
        Manifest.decode(deep)


HEADERS = [
    b"",
    b"[]",
    b'{"a":1}',
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
    b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}',
    b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
    b'{"a":{"dtype":"F32","shape":[0,4611686018427387904,4611686018427387904],'
    b'"data_offsets":[0,0]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,-4]}}',
    b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-4,0]}}',
    b'{"a":{"dtype":"F32","shape":[1.5],"data_offsets":[0,4]}}',
    b'{"a":' * 50_000,
    b"{}",
]


@pytest.mark.parametrize("header", HEADERS)
def test_a_file_that_is_none_is_refused(header: bytes) -> None:
    with pytest.raises(StateError):
        parse(bytearray(len(header).to_bytes(8, "little") + header + b"1234"))


@given(st.binary(max_size=64), st.integers(0, 200), st.integers(0, 255))
@settings(max_examples=200)
def test_no_bytes_do_harm(data: bytes, at: int, value: int) -> None:
    good = bytearray(stream(image_of({"w": torch.ones(3, 2), "v": torch.arange(2)})))
    good[at % len(good)] = value
    for bad in (bytearray(data), good):
        try:
            tensors = parse(bad)
        except StateError:
            continue
        assert all(isinstance(t, torch.Tensor) for t in tensors.values())


def test_a_tensor_without_a_form_is_said() -> None:
    with pytest.raises(StateError, match="sparse: a"):
        image_of({"sparse": torch.eye(2).to_sparse()})
    with pytest.raises(StateError, match="complex128"):
        image_of({"wide": torch.ones(2, dtype=torch.complex128)})
