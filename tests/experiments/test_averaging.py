"""`moshpit experiment averaging`, and the paper's table, cell by cell."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from moshpit.cli.experiment import experiment_app
from moshpit.errors import ConfigError
from moshpit.experiments import averaging, published
from moshpit.experiments.averaging import ALGORITHMS, Setup
from moshpit.sim.averaging import Failure

SMALL = ("averaging", "--peers", "60", "--group-size", "8", "--rounds", "4", "--seeds", "5")


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(experiment_app, list(arguments))


# --- the paper's table ------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "death"), published.PUBLISHED)
def test_the_released_experiment_is_repeated_seed_by_seed(n: int, death: float) -> None:
    """All that it drew from a seed must agree to the last digit; the grid's placement, which it
    did not, within two standard errors."""
    for algorithm, (fine, coarse) in zip(
        published.ALGORITHMS, published.PUBLISHED[n, death], strict=True
    ):
        found = published.replay(n, death, algorithm, placements=6)
        for value, cell in ((fine, found[0]), (coarse, found[1])):
            if value is None:
                continue
            assert cell.agrees(value), f"{algorithm}: published {value}, here {cell}"
            if algorithm != "Paper's grid":
                assert round(cell.mean, 1) == value


def test_a_cell_that_disagrees_is_seen() -> None:
    exact, placed = published.Replayed(8.0, 0.0, 1), published.Replayed(8.0, 0.1, 10)
    assert (exact.agrees(8.1), exact.agrees(8.2)) == (True, False)
    assert (placed.agrees(8.2), placed.agrees(8.4)) == (True, False)


def test_the_table_has_every_cell_and_marks_those_that_disagree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = published.PUBLISHED[768, 0.0]
    wrong = (*row[:3], (9.9, 3.0), row[4])
    monkeypatch.setattr(published, "PUBLISHED", {(768, 0.0): row, (768, 0.001): wrong})
    table = published.published_table(placements=2)
    assert [len(cells) for cells in table.rows] == [len(table.head)] * 2
    assert (1, 5) in table.marked
    assert (0, 5) not in table.marked
    assert table.rows[0][4] == "43.2 (13.8)\n43.2 (13.8)"


# --- the command ------------------------------------------------------------------------------


def test_it_prints_a_table() -> None:
    result = invoke(*SMALL, "--failure", "0.05")
    assert result.exit_code == 0, result.output
    for algorithm in ALGORITHMS.values():
        assert algorithm.label in result.stdout
    assert "2 axes" in result.stdout


def test_csv_holds_every_round_and_is_the_same_each_time(tmp_path: Path) -> None:
    file = tmp_path / "curves.csv"
    arguments = (*SMALL, "--failure", "0.1", "--failure-model", "group", "--seed", "3")
    assert invoke(*arguments, "--csv", str(file)).exit_code == 0
    again = invoke(*arguments, "--csv", "-")
    assert file.read_text() == again.stdout
    rows = list(csv.DictReader(io.StringIO(again.stdout)))
    assert len(rows) == len(ALGORITHMS) * 5
    found = averaging.run(
        Setup(peers=60, group_size=8, death=0.1, failure=Failure.GROUP, rounds=4, seeds=5, seed=3),
        ["moshpit"],
    )["moshpit"]
    ours = [row for row in rows if row["algorithm"] == "moshpit"]
    means = [float(row["variance_mean"]) for row in ours]
    assert means == pytest.approx(found.spreads.mean, rel=1e-8)
    for row in rows:
        assert float(row["variance_low95"]) <= float(row["variance_mean"])
        assert float(row["variance_mean"]) <= float(row["variance_high95"])
        assert (row["failure_model"], row["dims"]) == ("group", "2")


def test_plots_name_each_curve(tmp_path: Path) -> None:
    vector, pixels = tmp_path / "curves.svg", tmp_path / "curves.png"
    names = ("--algorithms", "random-groups,moshpit")
    assert invoke(*SMALL, *names, "--plot", str(vector)).exit_code == 0
    assert invoke(*SMALL, *names, "--plot", str(pixels)).exit_code == 0
    assert ElementTree.parse(vector).getroot().tag.endswith("svg")
    assert pixels.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "wrong",
    [
        ("--peers", "2"),
        ("--peers", "100000000"),
        ("--group-size", "1"),
        ("--group-size", "61"),
        ("--dims", "1"),
        ("--failure", "1"),
        ("--failure", "nan"),
        ("--rounds", "0"),
        ("--seeds", "1"),
        ("--seed", "-1"),
        ("--failure-model", "some"),
        ("--algorithms", "gossip,chatter"),
        ("--algorithms", "gossip,gossip"),
        ("--plot", "curves.docx"),
        ("--csv", "no/such/folder/curves.csv"),
    ],
)
def test_nonsense_is_refused(wrong: tuple[str, str]) -> None:
    result = invoke(*SMALL, *wrong)
    assert isinstance(result.exception, ConfigError), result.output
    assert wrong[0].removeprefix("--").split("-")[0] in str(result.exception)


def test_more_axes_are_smaller_groups() -> None:
    for dims in (2, 3, 4):
        setup = Setup(peers=60, group_size=8, dims=dims, rounds=dims, seeds=2)
        spreads = averaging.run(setup, ["moshpit"])["moshpit"].spreads.mean
        assert spreads[dims] < 1e-20
        assert spreads[dims - 1] > 1e-6


def test_the_interval_of_a_mean_is_positive_and_holds_it() -> None:
    each = np.random.default_rng(0).lognormal(0.0, 2.0, (200, 3)) * [1.0, 1e-9, 1e-30]
    low, high = averaging.interval(each)
    assert ((low > 0) & (low < each.mean(0)) & (each.mean(0) < high)).all()
    assert averaging.interval(np.ones((5, 2)))[0] == pytest.approx(1.0)


@pytest.mark.soak
def test_a_hundred_thousand_peers() -> None:
    """In under a minute, also on a busy machine: it needs 5 seconds of one core."""
    setup = Setup(peers=100_000, group_size=64, death=0.001, rounds=8, seeds=10)
    found = averaging.run(setup, list(ALGORITHMS))
    assert sum(curve.seconds for curve in found.values()) < 60
    assert found["moshpit"].spreads.mean[8] < found["random-groups"].spreads.mean[8]
