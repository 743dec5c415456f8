"""`moshpit sim`: what it prints, writes and exits with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from moshpit.cli.sim import sim
from moshpit.errors import ConfigError
from moshpit.sim.scenario import shipped

app = typer.Typer()
app.command()(sim)

HOPELESS = """
title = "hopeless"
[swarm]
peers = 3
[checks]
time_limit_s = 1.0
"""


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def test_without_a_scenario_the_shipped_ones_are_listed() -> None:
    result = invoke()
    assert result.exit_code == 0
    assert result.stdout.split() == shipped()


def test_one_run_is_told_in_words_and_as_json(tmp_path: Path) -> None:
    path = tmp_path / "result.json"
    result = invoke("calm", "--seed", "3", "--peers", "4", "--json", str(path))
    assert result.exit_code == 0
    assert "calm, seed 3, 4 peers" in result.stdout
    data = json.loads(path.read_text())
    assert data["ok"] is True
    assert data["trace_hash"] in result.stdout
    assert {finding["invariant"] for finding in data["findings"]} >= {"S1", "S2", "S4", "L1", "E"}


def test_a_violation_is_exit_status_1_and_said(tmp_path: Path) -> None:
    path = tmp_path / "hopeless.toml"
    path.write_text(HOPELESS)
    result = invoke(str(path))
    assert result.exit_code == 1
    assert "VIOLATED" in result.stdout
    assert "time limit" in result.stdout


def test_many_seeds_are_a_table_and_those_that_fail_are_named(tmp_path: Path) -> None:
    good = invoke("calm", "--seeds", "0..2", "--peers", "3")
    assert good.exit_code == 0
    assert "3 seeds, 0 with violations" in good.stdout
    path = tmp_path / "hopeless.toml"
    path.write_text(HOPELESS)
    bad = invoke(str(path), "--seeds", "4..5")
    assert bad.exit_code == 1
    assert "2 seeds, 2 with violations: 4 5" in bad.stdout


def test_json_to_stdout_is_json_only() -> None:
    result = invoke("calm", "--seeds", "0..1", "--peers", "2", "--json", "-")
    assert [one["seed"] for one in json.loads(result.stdout)] == [0, 1]


def test_a_trace_is_a_story(tmp_path: Path) -> None:
    path = tmp_path / "trace.txt"
    assert invoke("restart", "--trace", str(path)).exit_code == 0
    text = path.read_text()
    assert "*** restart p" in text
    assert "GroupReady(" in text


@pytest.mark.parametrize("seeds", ["3", "5..2", "a..b", ".."])
def test_nonsense_is_refused(seeds: str) -> None:
    result = invoke("calm", "--seeds", seeds)
    assert isinstance(result.exception, ConfigError)


def test_a_trace_of_many_runs_is_refused() -> None:
    result = invoke("calm", "--seeds", "0..1", "--trace", "x")
    assert isinstance(result.exception, ConfigError)


def test_many_processes_give_the_same_results_in_order() -> None:
    one = invoke("calm", "--seeds", "0..3", "--peers", "2", "--json", "-")
    two = invoke("calm", "--seeds", "0..3", "--peers", "2", "--json", "-", "--jobs", "2")
    hashes = [[r["trace_hash"] for r in json.loads(out.stdout)] for out in (one, two)]
    assert hashes[0] == hashes[1]
    assert len(set(hashes[0])) == 4


def test_what_membership_costs_is_a_table_and_json(tmp_path: Path) -> None:
    path = tmp_path / "loads.json"
    arguments = ("--membership", "20,40", "--seconds", "10", "--half-life", "60")
    result = invoke(*arguments, "--json", str(path))
    assert result.exit_code == 0
    assert "views right after" in result.stdout
    loads = json.loads(path.read_text())
    assert [one["peers"] for one in loads] == [20, 20, 40, 40]
    assert [one["changes"] > 0 for one in loads] == [False, True, False, True]
    assert all(one["healed_s"] is not None for one in loads)


@pytest.mark.parametrize("sizes", ["", "a", "10,", "0"])
def test_sizes_that_make_no_swarm_are_refused(sizes: str) -> None:
    result = invoke("--membership", sizes)
    assert isinstance(result.exception, ConfigError)
