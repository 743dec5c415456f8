"""Faults strike whom, when and for how long the scenario says, and nobody else."""

from __future__ import annotations

import io
import re

import pytest

from moshpit.sim.scenario import load, parse
from moshpit.sim.simulate import run

HEAD = """
title = "one fault"
[swarm]
peers = 6
group_size = 3
epochs = 4
start = "warm"
[work]
epoch_s = 2.0
chunks = 6
[checks]
heal_epochs = 3
[[faults]]
"""


def notes(fault: str) -> list[tuple[float, str]]:
    """Run with one fault; return what the trace says of the world's doings, with times."""
    log = io.StringIO()
    result = run(parse(HEAD + fault, "test"), 1, log=log)
    assert result.ok, [f.first for f in result.findings if not f.ok]
    lines = re.findall(r"^ *([\d.]+) \*\*\* (.*)$", log.getvalue(), re.M)
    return [(float(time), text) for time, text in lines if "starts" not in text or float(time) > 0]


def test_a_crash_at_a_time() -> None:
    assert notes('kind = "crash"\nat_s = 3.0\nhosts = [2]') == [(3.0, "crash p2")]


def test_a_restart_brings_the_same_key_back() -> None:
    gone, over, back = notes('kind = "restart"\nat_s = 3.0\nfor_s = [1.5, 1.5]\nhosts = [2]')
    assert gone == (3.0, "restart p2 for 1.500 s")
    assert over == (4.5, "restart p2 is over")
    assert back[1].startswith("p2.2 starts")


def test_a_share_of_the_living_is_struck_at_an_epoch() -> None:
    struck = notes(
        'kind = "pause"\nat_epoch = 1\nafter_s = [0.0, 1.0]\nfor_s = [1.0, 2.0]\nshare = 0.5'
    )
    begun = [text for _, text in struck if " for " in text]
    assert len(begun) == 3
    assert len(struck) == 6


def test_new_peers_come() -> None:
    assert len(notes('kind = "join"\nat_s = 2.0\nafter_s = [0.0, 2.0]\ncount = 2')) == 2


def test_a_farewell() -> None:
    assert notes('kind = "leave"\nat_s = 2.0\nhosts = [1]') == [(2.0, "leave p1")]


@pytest.mark.parametrize("how", ["non-finite", "wrong-size", "undecodable", "bad-mass"])
def test_broken_contributions_are_refused_by_name(how: str) -> None:
    fault = f'kind = "corrupt"\nat_s = 0.5\nfor_s = [4.0, 4.0]\nhosts = [3]\nhow = "{how}"'
    assert notes(fault) == [(0.5, "corrupt p3 for 4.000 s"), (4.5, "corrupt p3 is over")]


@pytest.mark.parametrize(
    ("name", "seed", "peers"),
    [
        ("joiners", 1000, None),
        ("nat", 1009, 7),
        ("storm", 641, 12),
        ("storm", 844, 12),
        ("storm", 1237, 12),
    ],
)
def test_seeds_that_were_red(name: str, seed: int, peers: int | None) -> None:
    """What was wrong:

    - joiners 1000: who held an averaging back, to merge sides, wanted ticks without end;
    - nat 1009: clients, all whose reducers had died, were expected to average, and later on to
      know who of them lives, and to be in step;
    - storm 641: packets that were lost long after all had healed were expected to do no harm;
    - storm 844: whose averaging was under way when a hold was over, wanted ticks without end;
    - storm 1237: who had fetched its state on a side that was cut off, and behind, was expected
      in the other side's next epoch.
    """
    result = run(load(name), seed, peers)
    assert result.ok, [f.first for f in result.findings if not f.ok]
