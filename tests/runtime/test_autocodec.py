"""Slow links compress harder, and fast ones do not pay."""

from __future__ import annotations

import math

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moshpit.errors import ConfigError
from moshpit.protocol import partition
from moshpit.runtime.autocodec import CORE_GBPS, DIFFERENCES, PARAMETERS, AutoCodec, codec_or_auto
from moshpit.runtime.jobs import Averaging
from moshpit.tensors.codecs import CODECS, Codec, codec_named
from moshpit.tensors.layout import ChunkPlan
from moshpit.tensors.store import Encoding, RoundStore
from moshpit.wire.messages import GroupFormed, GroupKey, Join

MBIT = 1e6 / 8
VECTOR = 64e6
KEY = GroupKey(0, 0, ())


def group(*mbit: float) -> GroupFormed:
    links = [m * MBIT for m in mbit]
    joins = tuple(Join(bytes(32), KEY, 1, "worker", b"", 128, link, True, b"") for link in links)
    parts = partition.fractions(links, [True] * len(links))
    assert parts is not None
    bounds = partition.bounds(parts, 128)
    return GroupFormed(b"g" * 16, bytes(32), KEY, joins, bounds, (), 60.0)


def encodings(formed: GroupFormed, auto: AutoCodec) -> list[Encoding]:
    return [auto.choose(formed, seat, VECTOR) for seat in range(len(formed.joins))]


def to_itself(formed: GroupFormed, auto: AutoCodec) -> list[str]:
    """What each member would send to one with a link like its own."""
    return [e.contributions[seat].name for seat, e in enumerate(encodings(formed, auto))]


def results(formed: GroupFormed, auto: AutoCodec) -> set[str]:
    return {e.result.name for e in encodings(formed, auto) if e.result is not None}


def test_fast_links_send_numbers_as_they_are() -> None:
    formed = group(40_000, 40_000, 40_000)
    for auto in (AutoCodec(DIFFERENCES), AutoCodec(PARAMETERS)):
        assert to_itself(formed, auto) == ["float32"] * 3
        assert results(formed, auto) == {"float32"}


def test_slow_links_compress_as_far_as_is_allowed() -> None:
    formed = group(20, 20, 20)
    assert to_itself(formed, AutoCodec(PARAMETERS)) == ["float16"] * 3
    assert to_itself(formed, AutoCodec(DIFFERENCES)) == ["int4"] * 3


def test_fast_peers_among_slow_ones_send_to_each_other_more_exactly() -> None:
    formed, auto = group(1000, 1000, 20, 20), AutoCodec(DIFFERENCES)
    fast, _, slow, _ = encodings(formed, auto)
    between_fast, _, from_fast_to_slow, _ = (DIFFERENCES.index(c.name) for c in fast.contributions)
    assert between_fast < from_fast_to_slow
    assert {c.name for c in slow.contributions} == {"int4"}
    assert results(formed, auto) == {"int4"}  # they go to the slow ones too


def test_time_that_nobody_waits_for_is_used() -> None:
    formed = group(100, 100, 100)
    exact_s = 2 * VECTOR / (100 * MBIT)
    assert to_itself(formed, AutoCodec(DIFFERENCES, 2 * exact_s)) == ["float32"] * 3
    assert "float32" not in to_itself(formed, AutoCodec(DIFFERENCES, exact_s / 2))


def test_an_unknown_link_counts_as_fast() -> None:
    auto = AutoCodec(PARAMETERS)
    assert to_itself(group(0, 0), auto) == to_itself(group(1000, 1000), auto)


def test_further_rounds_send_means_as_results_are_sent() -> None:
    """Cut to the k largest again, rows would lose 15 of 16 numbers, and nobody would keep them."""
    plan, formed = ChunkPlan(64, 16), group(100, 100)
    job = Averaging(torch.zeros(64), plan, codec_named("topk"))
    assert job.encoding(formed, 0).contribution(0).name == "topk"
    job.stores.append(RoundStore(job.current, job.current, plan, job.encoding(formed, 0)))
    assert job.encoding(formed, 0).contribution(0).name == "int8"
    assert job.encoding(formed, 0).result is codec_named("int8")


SPEEDS = st.lists(st.floats(1, 2_000), min_size=2, max_size=8)


@given(SPEEDS, st.floats(0, 100), st.booleans())
def test_never_slower_than_the_best_fixed_codec_by_a_tenth(
    mbit: list[float], hidden_s: float, differences: bool
) -> None:
    auto = AutoCodec(DIFFERENCES if differences else PARAMETERS, hidden_s)
    formed = group(*mbit)

    def seconds(used: list[Encoding]) -> float:
        """How long the round takes by what each one really sends and gets."""
        size, chunks = len(mbit), formed.bounds[-1]
        parts = [(formed.bounds[j + 1] - formed.bounds[j]) / chunks for j in range(size)]
        slowest = 0.0
        for me in range(size):
            out = into = 0.0
            for other in range(size):
                if other != me:
                    out += parts[other] * share(used[me].contributions[other])
                    out += parts[me] * share(used[me].result)
                    into += parts[me] * share(used[other].contributions[me])
                    into += parts[other] * share(used[other].result)
            work = max(1 / CORE_GBPS[c.name] for c in used[me].contributions)
            work_s = (1 + (size - 2) * parts[me]) * VECTOR * work / 1e9
            slowest = max(slowest, max(out, into) * VECTOR / (mbit[me] * MBIT) + work_s)
        return slowest

    every = [codec_named(name) for name in auto.names]
    fixed = [seconds([Encoding((0,), (c,) * len(mbit), c)] * len(mbit)) for c in every]
    assert seconds(encodings(formed, auto)) <= 1.1 * max(min(fixed), hidden_s)


def share(codec: Codec | None) -> float:
    return 0.0 if codec is None else codec.encoded_bytes(1 << 17) / (1 << 19)


def test_bandwidths_that_make_no_sense_do_no_harm() -> None:
    formed = group(100, 100)
    for bad in (math.nan, math.inf, -1.0):
        joins = tuple(msgspec.structs.replace(join, bandwidth=bad) for join in formed.joins)
        spoiled = msgspec.structs.replace(formed, joins=joins)
        assert len(to_itself(spoiled, AutoCodec(DIFFERENCES))) == 2


def test_names() -> None:
    assert codec_or_auto("int8") is codec_named("int8")
    assert codec_or_auto("auto", differences=True) == AutoCodec(DIFFERENCES)
    with pytest.raises(ConfigError, match="float32"):
        codec_or_auto("gzip")
    exact_enough = {codec.name for codec in CODECS.values() if not codec.differences_only}
    assert set(PARAMETERS) <= exact_enough
