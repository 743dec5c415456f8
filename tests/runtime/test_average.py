"""`Swarm.average` and `average_` over real sockets: whose memory holds what, and when."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
import torch

import moshpit
from moshpit.identity.tickets import RunKey
from moshpit.runtime.jobs import Averaging
from moshpit.tensors.codecs import Float32, codec_named
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.store import RoundStore
from moshpit.types import Address

LONG_S = 60.0


@pytest.fixture
def pair() -> Iterator[tuple[moshpit.Swarm, moshpit.Swarm]]:
    owner = RunKey.generate()
    with moshpit.join(
        owner.invite().ticket(()).encode(), listen="127.0.0.1:0", identity="new"
    ) as first:
        where = Address("127.0.0.1", first.addresses[0].port)
        ticket = owner.invite().ticket((where,)).encode()
        with moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as second:
            first.wait_for_peers(2)
            second.wait_for_peers(2)
            yield first, second


def together(*calls: Callable[[], object]) -> list[object]:
    results: list[object] = [None] * len(calls)

    def run(index: int) -> None:
        results[index] = calls[index]()

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    return results


def of(value: float) -> list[torch.Tensor]:
    half = torch.full((50,), value, dtype=torch.float16)
    return [torch.full((300, 100), value), half, torch.full((7,), value)]


def test_a_single_tensor_is_averaged_in_its_own_memory(pair) -> None:
    values = [torch.full((300, 1000), float(i)) for i in range(2)]
    places = [value.data_ptr() for value in values]
    for _ in range(3):
        together(*(lambda s=s, v=v: s.average_([v]) for s, v in zip(pair, values, strict=True)))
        assert [value.data_ptr() for value in values] == places
        for i, value in enumerate(values):
            assert torch.equal(value, torch.full((300, 1000), 0.5))
            value.fill_(float(i))  # they are ours again


def test_several_tensors_are_averaged_in_place(pair) -> None:
    values = [of(1.0), of(4.0)]
    for _ in range(2):
        together(*(lambda s=s, v=v: s.average_(v) for s, v in zip(pair, values, strict=True)))
    for tensors in values:
        assert all(torch.equal(t, torch.full_like(t, 2.5)) for t in tensors)


@pytest.mark.parametrize("make", [of, lambda v: [torch.full((300, 100), v)]], ids=["many", "one"])
def test_average_leaves_its_arguments_alone(pair, make) -> None:
    values = [make(1.0), make(4.0)]
    for _ in range(2):
        calls = [lambda s=s, v=v: s.average(v)[0] for s, v in zip(pair, values, strict=True)]
        results = together(*calls)
        for means in results:
            assert all(torch.equal(t, torch.full_like(t, 2.5)) for t in means)
            means[0].zero_()  # they are ours, too
        for value, tensors in zip((1.0, 4.0), values, strict=True):
            assert all(torch.equal(t, torch.full_like(t, value)) for t in tensors)


@pytest.mark.parametrize("name", ["average", "average_"])
def test_after_a_time_out_the_tensors_are_free_again(pair, name: str) -> None:
    """What the others get is the value at the call, whatever is done to the tensor since."""
    first, second = pair
    value, other = torch.full((100_000,), 1.0), torch.full((100_000,), 4.0)
    together(*(lambda s=s: s.average([torch.zeros(100_000)]) for s in pair))
    with pytest.raises(TimeoutError):
        getattr(first, name)([value], timeout_s=0.05)
    value.fill_(100.0)
    (means, _), *_ = together(lambda: second.average([other]))
    assert torch.equal(means[0], torch.full((100_000,), 2.5))
    assert torch.equal(value, torch.full((100_000,), 100.0))


@pytest.mark.parametrize("in_place", [False, True])
def test_what_is_still_served_is_not_what_was_given_out(in_place: bool) -> None:
    """A groupmate that is slow can still ask for results after the caller has changed its own."""
    vector = torch.full((100,), 1.0)
    plan = ChunkPlan(100, 50)
    job = Averaging(vector, plan, codec_named("float32"), in_place=in_place, lent=True)
    store = RoundStore(vector, vector if in_place else torch.empty(100), plan, Float32())
    job.stores.append(store)
    for chunk in range(plan.chunks):
        store.accumulate_own(chunk, 1.0)
        store.finalize(chunk, 1.0)
    store.finish()
    job.current = store.result
    job.give_back(ended=True)
    assert (job.current.data_ptr() == vector.data_ptr()) == in_place
    job.current.zero_()
    vector.zero_()
    _, payload = store.result_payload(1)
    assert torch.equal(Float32().decode(payload), torch.ones(50))
