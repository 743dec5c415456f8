"""The plan's table of codecs says what the codecs themselves say."""

from __future__ import annotations

import subprocess
import sys

import pytest

from moshpit.errors import ConfigError
from moshpit.planning.codecs import CODECS, CodecCost, codec_named
from moshpit.tensors import codecs as real

NUMEL = 131_072  # a chunk


def test_every_codec_is_in_the_table() -> None:
    assert {codec.name for codec in CODECS} == {codec.name for codec in real.CODECS.values()}


@pytest.mark.parametrize("planned", CODECS, ids=lambda codec: codec.name)
def test_sizes_and_kinds_are_those_of_the_registry(planned: CodecCost) -> None:
    codec = real.codec_named(planned.name)
    assert planned.bytes_per_number * NUMEL == pytest.approx(codec.encoded_bytes(NUMEL), rel=1e-3)
    means = codec.result_codec.encoded_bytes(NUMEL)
    assert planned.bytes_per_mean * NUMEL == pytest.approx(means, rel=1e-3)
    assert planned.biased == codec.biased
    assert planned.differences_only == codec.differences_only


def test_the_table_goes_from_exact_to_coarse() -> None:
    losses = [codec.loss for codec in CODECS]
    assert losses == sorted(losses)
    assert [codec.name for codec in CODECS if codec.loss == 0] == ["float32"]


def test_an_unknown_codec_is_told_the_names_there_are() -> None:
    with pytest.raises(ConfigError, match="int4"):
        codec_named("int5")


def test_a_plan_loads_no_torch() -> None:
    code = (
        "import sys, moshpit.planning.recommend; "
        "print(*(m for m in ('torch', 'numpy', 'asyncio') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == []
