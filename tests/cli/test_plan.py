"""`moshpit plan`: what it prints, and what it says of nonsense."""

from __future__ import annotations

import json

import pytest
import typer
from typer.testing import CliRunner, Result

from moshpit.cli.parse import count_of, seconds_of
from moshpit.cli.plan import classes_of, plan
from moshpit.errors import ConfigError

app = typer.Typer()
app.command()(plan)

BASE = ("--params", "1.3B", "--step-time", "0.8")
EVEN = (*BASE, "--peers", "24", "--mbit", "200")

ROW = {
    "strategy", "schedule", "codec", "period_steps", "group_size", "overlap", "step_s", "epoch_s",
    "averaging_share", "averaging_s", "meeting_s", "link_share", "cpu_s_max",
    "peer_bytes_per_epoch", "peer_bytes_per_epoch_max", "swarm_bytes_per_epoch", "memory_bytes",
    "money_per_epoch", "money_per_step", "run_s", "money_per_run",
}  # fmt: skip


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_a_plan_says_what_to_do_and_why() -> None:
    result = invoke(*EVEN)
    assert result.exit_code == 0, result.output
    for words in ("Recommended: ", "more time", "instead of that", "LocalSGD", "float16", "share"):
        assert words in result.stdout
    assert "Money" not in result.stdout


def test_json_has_every_figure() -> None:
    result = invoke(*EVEN, "--price", "0.35", "--batch", "8", "--samples", "1g", "--json")
    data = json.loads(result.stdout)
    assert data.keys() == {
        "params", "peers", "clients", "recommended", "why", "notes", "cheapest", "alternatives",
    }  # fmt: skip
    assert data["params"] == 1_300_000_000
    assert data["recommended"].keys() == ROW
    assert all(row.keys() == ROW for rows in data["alternatives"].values() for row in rows)
    assert data["recommended"]["money_per_run"] > 0


def test_prices_are_shown() -> None:
    result = invoke(*EVEN, "--price", "0.35", "--traffic-price", "0.02", "--batch", "8",
                    "--samples", "1g")  # fmt: skip
    assert "Money: " in result.stdout
    assert "The whole run: " in result.stdout
    assert "money/1000" in result.stdout


def test_classes_are_all_peers() -> None:
    result = invoke(*BASE, "--mbit", "8x1000,16x100/20", "--clients", "4", "--json")
    data = json.loads(result.stdout)
    assert (data["peers"], data["clients"]) == (24, 4)
    same = json.loads(invoke(*BASE, "--mbit", "24x200", "--json").stdout)
    assert same == json.loads(invoke(*EVEN, "--json").stdout)


def test_lists_leave_only_what_is_in_them() -> None:
    result = invoke(*EVEN, "--strategy", "LocalSGD", "--codec", "float32,float16", "--period",
                    "8,32", "--schedule", "torus", "--group-size", "8", "--json")  # fmt: skip
    data = json.loads(result.stdout)
    shown = [data["recommended"], *(r for rows in data["alternatives"].values() for r in rows)]
    assert {row["strategy"] for row in shown} == {"LocalSGD"}
    assert {row["period_steps"] for row in shown} == {8, 32}
    assert {row["codec"] for row in shown} == {"float32", "float16"}
    assert {row["schedule"] for row in shown} == {"torus"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--params", "many", "--step-time", "1", "--peers", "2", "--mbit", "1"), "350M"),
        (("--params", "0", "--step-time", "1", "--peers", "2", "--mbit", "1"), "above 0"),
        (("--params", "1M", "--step-time", "1h", "--peers", "2", "--mbit", "1"), "50ms"),
        ((*BASE, "--mbit", "200"), "--peers"),
        ((*BASE, "--mbit", "200", "--peers", "1"), "2 to"),
        ((*BASE, "--mbit", "0", "--peers", "2"), "bandwidth"),
        ((*BASE, "--mbit", "1.2.3", "--peers", "2"), "no number"),
        ((*BASE, "--mbit", "fast", "--peers", "2"), "100/20"),
        ((*BASE, "--mbit", "8x100,200", "--peers", "9"), "classes"),
        ((*BASE, "--mbit", "8x100,16x200", "--peers", "9"), "24 peers"),
        ((*BASE, "--mbit", "4x100,", "--peers", "4"), "commas"),
        ((*EVEN, "--codec", "zip"), "float16"),
        ((*EVEN, "--strategy", "magic"), "DiLoCo"),
        ((*EVEN, "--period", "a"), "whole numbers"),
        ((*EVEN, "--group-size", "100"), "64"),
        ((*EVEN, "--clients", "24"), "reachable"),
        ((*EVEN, "--clients", "-1"), "reachable"),
        ((*EVEN, "--latency-ms", "-5"), "0 or more"),
        ((*EVEN, "--samples", "1M"), "--batch"),
        ((*EVEN, "--dtype", "int3"), "bfloat16"),
        ((*EVEN, "--price", "-1"), "price"),
        ((*EVEN, "--slack", "nan"), "0.1"),
    ],
)
def test_nonsense_is_refused_with_what_to_write(arguments: tuple[str, ...], said: str) -> None:
    result = invoke(*arguments)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.parametrize(
    ("text", "count"), [("200", 200), ("20k", 2e4), ("1.5M", 1.5e6), ("1g", 1e9), ("2T", 2e12)]
)
def test_counts(text: str, count: float) -> None:
    assert count_of(text) == count


@pytest.mark.parametrize("text", ["", "B", "-1", "nan", "inf", "1.3BB", "1,3", "1e999"])
def test_what_is_no_count(text: str) -> None:
    with pytest.raises(ConfigError):
        count_of(text)


@pytest.mark.parametrize("text", ["", "0", "-1", "1h", "ms", "nan"])
def test_what_is_no_short_time(text: str) -> None:
    with pytest.raises(ConfigError):
        seconds_of(text)


def test_down_is_before_up() -> None:
    assert classes_of("3x80/8", 3) == [(3, 1e6, 1e7)]
