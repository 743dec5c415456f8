"""Tensors into one vector and back, bit by bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import TransportConfig
from moshpit.errors import LayoutError
from moshpit.tensors.layout import ChunkPlan, VectorLayout


def mixed() -> dict[str, torch.Tensor]:
    """One of everything that can be averaged."""
    made = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=made)

    return {
        "matrix": normal(3, 4),
        "scalar": normal(1)[0],
        "empty": torch.empty(0, 5),
        "half": normal(7).to(torch.float16),
        "brain": normal(2, 3).to(torch.bfloat16),
        "double": normal(5).to(torch.float64),
        "transposed": normal(4, 3).T,
        "strided": normal(10)[::2],
    }


def flat(layout: VectorLayout) -> torch.Tensor:
    vector = torch.full((layout.numel,), float("nan"))
    layout.flatten_into(vector)
    return vector


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def test_what_goes_in_comes_back_bit_by_bit() -> None:
    tensors = mixed()
    layout = VectorLayout(tensors)
    vector = flat(layout)
    assert torch.isfinite(vector).all()
    before = {name: bits(t) for name, t in tensors.items()}
    for tensor in tensors.values():
        tensor.zero_()
    layout.write_back(vector)
    assert {name: bits(t) for name, t in tensors.items()} == before


def test_the_vector_has_the_tensors_in_their_order() -> None:
    layout = VectorLayout([torch.tensor([[1.0, 2.0], [3.0, 4.0]]).T, torch.tensor(5.0)])
    assert flat(layout).tolist() == [1.0, 3.0, 2.0, 4.0, 5.0]
    assert layout.names == ("0", "1")


def test_other_tensors_of_the_same_layout() -> None:
    layout = VectorLayout(mixed())
    copies = [torch.zeros_like(t) for t in mixed().values()]
    layout.write_back(flat(layout), copies)
    assert [bits(t) for t in copies] == [bits(t) for t in mixed().values()]
    vector = torch.empty(layout.numel)
    layout.flatten_into(vector, copies)
    assert torch.equal(vector, flat(layout))


def test_parameters_that_require_gradients() -> None:
    model = torch.nn.Linear(3, 2)
    layout = VectorLayout(list(model.named_parameters()))
    layout.write_back(torch.arange(8.0))
    assert model.weight.requires_grad
    assert model.weight.grad_fn is None
    assert model.bias.tolist() == [6.0, 7.0]
    vector = flat(layout)
    assert not vector.requires_grad


def test_a_delta_moves_what_was_worked_on_and_assigns_the_mean_elsewhere() -> None:
    tensors = mixed()
    layout = VectorLayout(tensors)
    snapshot = flat(layout)
    mean = snapshot + torch.linspace(-1, 1, layout.numel)
    worked = {"matrix", "double", "brain"}
    before = {name: t.clone() for name, t in tensors.items()}
    for name in worked:
        tensors[name].view(-1)[0] += 0.25
    layout.add_delta(mean, snapshot)
    expected = [torch.zeros_like(t) for t in tensors.values()]
    layout.write_back(mean, expected)
    at = 0
    for target, (name, tensor) in zip(expected, tensors.items(), strict=True):
        untouched = tensor.flatten()[1:] if name in worked else tensor.flatten()
        assert bits(untouched) == bits(target.flatten()[tensor.numel() - untouched.numel() :]), name
        if name in worked:
            delta = (mean[at] - snapshot[at]).to(torch.float64)
            wanted = before[name].flatten()[0].to(torch.float64) + 0.25 + delta
            got = tensor.flatten()[0].to(torch.float64)
            assert torch.isclose(got, wanted, rtol=0, atol=0.02), name
        at += tensor.numel()


def test_a_delta_keeps_what_float64_has_beyond_float32() -> None:
    tensor = torch.tensor([1.0 + 1e-12], dtype=torch.float64)
    layout = VectorLayout([tensor])
    snapshot = torch.zeros(1)  # so that it was worked on since
    layout.add_delta(torch.tensor([0.5]), snapshot)
    assert tensor.item() == 1.0 + 1e-12 + 0.5


def test_peers_that_did_nothing_hold_the_same_bytes() -> None:
    """0.1 + (0.7 - 0.1) is not 0.7 in float32; the mean itself is assigned."""
    mean = torch.rand(1000)
    results = list[bytes]()
    for seed in (1, 2):
        tensor = torch.rand(1000, generator=torch.Generator().manual_seed(seed))
        layout = VectorLayout([tensor])
        layout.add_delta(mean, flat(layout))
        results.append(bits(tensor))
    assert results == [bits(mean)] * 2


def test_the_schema_tells_names_shapes_and_dtypes_apart() -> None:
    base = VectorLayout({"a": torch.zeros(2, 3)})
    assert len(base.schema) == 8
    assert base.schema == VectorLayout([("a", torch.ones(2, 3))]).schema
    others = [
        VectorLayout({"b": torch.zeros(2, 3)}),
        VectorLayout({"a": torch.zeros(3, 2)}),
        VectorLayout({"a": torch.zeros(6)}),
        VectorLayout({"a": torch.zeros(2, 3, dtype=torch.float64)}),
        VectorLayout({"a": torch.zeros(2, 3), "b": torch.zeros(0)}),
    ]
    assert len({base.schema, *(layout.schema for layout in others)}) == 6


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ([], "no tensors"),
        ({}, "no tensors"),
        ([torch.empty(0)], "all tensors are empty"),
        ({"w": torch.zeros(2), "steps": torch.zeros(2, dtype=torch.int64)}, "'steps' is torch.int"),
        ({"z": torch.zeros(2, dtype=torch.complex64)}, "'z' is complex"),
        ({"m": torch.zeros(2, device="meta")}, "'m' has no data"),
        ({"s": torch.zeros(2, 2).to_sparse()}, "'s' is torch.sparse_coo"),
        ([("a", torch.zeros(1)), ("a", torch.zeros(1))], "'a' was given twice"),
        ({"x": [1.0, 2.0]}, "'x' is a list"),
    ],
)
def test_what_cannot_be_averaged_is_named(tensors: object, words: str) -> None:
    with pytest.raises(LayoutError, match=words):
        VectorLayout(tensors)  # pyright: ignore[reportArgumentType]


def test_tensors_of_another_layout_are_named() -> None:
    layout = VectorLayout({"a": torch.zeros(2), "b": torch.zeros(3)})
    vector = flat(layout)
    with pytest.raises(LayoutError, match="'b'"):
        layout.write_back(vector, [torch.zeros(2), torch.zeros(4)])
    with pytest.raises(LayoutError, match="'a'"):
        layout.flatten_into(vector, [torch.zeros(2, dtype=torch.float64), torch.zeros(3)])
    with pytest.raises(LayoutError, match="1 tensors for a layout of 2"):
        layout.write_back(vector, [torch.zeros(2)])


@pytest.mark.parametrize(
    "vector",
    [torch.zeros(4), torch.zeros(5, dtype=torch.float64), torch.zeros(10)[::2], torch.zeros(5, 1)],
)
def test_a_vector_that_does_not_fit(vector: torch.Tensor) -> None:
    layout = VectorLayout([torch.zeros(5)])
    with pytest.raises(LayoutError, match="5 contiguous float32"):
        layout.flatten_into(vector)


CONFIG = TransportConfig()


@pytest.mark.parametrize("numel", [1, 15, 16, 1023, 1024, 70_000, 8_388_608, 8_388_609, 10**9])
def test_chunks_cover_the_vector_once(numel: int) -> None:
    plan = ChunkPlan.of(numel, CONFIG)
    places = [plan.slice(chunk) for chunk in range(plan.chunks)]
    assert places[0].start == 0
    assert places[-1].stop == numel
    assert all(a.stop == b.start for a, b in pairwise(places))
    assert [plan.size(c) for c in range(plan.chunks)] == [p.stop - p.start for p in places]
    assert all(plan.size(chunk) > 0 for chunk in range(plan.chunks))
    assert plan.chunk_numel * 4 <= CONFIG.chunk_bytes
    if plan.chunks > 1:
        assert plan.chunk_numel * 4 >= CONFIG.chunk_bytes_min


def test_small_vectors_have_smaller_chunks_but_not_tiny_ones() -> None:
    assert ChunkPlan.of(10, CONFIG).chunks == 1
    assert ChunkPlan.of(2048, CONFIG).chunks == 2
    assert ChunkPlan.of(4 << 20, CONFIG).chunks == 64
    assert 15 <= ChunkPlan.of(1_000_000, CONFIG).chunks <= 16
    assert ChunkPlan.of(64 * 131_072 * 10, CONFIG).chunk_numel == CONFIG.chunk_bytes // 4


@given(numel=st.integers(1, 3000), chunk_numel=st.integers(1, 40), data=st.data())
def test_a_spread_plan_has_some_of_each_region_in_each_part(
    numel: int, chunk_numel: int, data: st.DataObject
) -> None:
    plan = ChunkPlan(numel, chunk_numel)
    spread, count = plan.spread(), plan.chunks
    places = [spread.place(chunk) for chunk in range(count)]
    assert sorted(places) == list(range(count))
    # Who has no value of its own need not know the order: sizes are the same.
    assert [spread.size(c) for c in range(count)] == [plan.size(c) for c in range(count)]
    assert [spread.slice(c) for c in range(count)] == [plan.slice(place) for place in places]

    first = data.draw(st.integers(0, count - 1))
    part = places[first : data.draw(st.integers(first, count))]
    start = data.draw(st.integers(0, count - 1))
    region = range(start, data.draw(st.integers(start, count)))
    fair = len(part) * len(region) / count
    # Halves of halves: a range is cut into few intervals of which each is fair but for one chunk.
    assert abs(sum(place in region for place in part) - fair) <= 2 * count.bit_length() + 2
