"""The training experiments, in a size of seconds: they train, they compare, they tell."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from random import Random

import pytest
import torch
from typer.testing import CliRunner

from moshpit.cli.app import app
from moshpit.errors import ConfigError
from moshpit.experiments import comparison, plots, preemptible
from moshpit.experiments.catalogue import CATALOGUE, experiment
from moshpit.experiments.language import ALPHABET, LENGTH, MaskedText, SharedLayers, text
from moshpit.experiments.trials import Look, Trial

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
pytest.importorskip("matplotlib", reason="figures need matplotlib")


@pytest.fixture(autouse=True)
def single_threaded() -> Iterator[None]:
    """Threads that wait for each other in small sums are slow on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


TINY = comparison.Plan(peers=4, group_size=2, batch=8, enough=1.0, limit_s=6.0)


def trial(*scores: float, peers: int = 4, rising: bool = True, enough: float = 0.5) -> Trial:
    looks = tuple(
        Look(at_s=10.0 * k, samples=100.0 * k, epoch=k, score=score, peers=peers, steps=k)
        for k, score in enumerate(scores)
    )
    return Trial(
        looks=looks,
        enough=enough,
        rising=rising,
        gave_up=0,
        waited_share=0.1,
        bytes_carried=1,
        cpu_s=1.0,
    )


@pytest.mark.parametrize("method", comparison.METHODS)
def test_every_method_trains_in_virtual_time(method: str) -> None:
    found = comparison.run(replace(TINY, method=method))
    assert found.looks[-1].at_s == pytest.approx(TINY.limit_s, abs=comparison.LOOK_S)
    assert found.looks[-1].epoch >= 1
    assert found.looks[-1].samples > 0
    assert 0.0 <= found.looks[-1].score <= 1.0


def test_every_method_is_drawn_in_a_way_of_its_own() -> None:
    styles = {method.style for method in comparison.METHODS.values()}
    assert len(styles) == len(comparison.METHODS)
    assert max(styles) < min(len(plots.COLOURS), len(plots.MARKERS), len(plots.DASHES))


def test_the_fleet_with_failures_loses_a_quarter_of_its_peers() -> None:
    places = comparison.setting_of(comparison.Plan(fleet="failures", seed=3)).places
    dying = [place for place in places if place.until_s < float("inf")]
    assert len(places) == 16
    assert len(dying) == 4
    assert all(10.0 <= place.until_s <= 60.0 for place in dying)
    again = comparison.setting_of(comparison.Plan(fleet="failures", seed=3)).places
    assert again == places


def test_ratios_are_of_pairs_and_need_every_run() -> None:
    results = {
        ("homogeneous", "moshpit"): [trial(0.1, 0.5), trial(0.1, 0.2, 0.6)],
        ("homogeneous", "ar-sgd"): [trial(0.1, 0.2, 0.5), trial(0.1, 0.2, 0.3, 0.4, 0.7)],
        ("homogeneous", "sgp"): [trial(0.1, 0.2), trial(0.1, 0.6)],
    }
    slower = comparison.slower(results, "homogeneous", "ar-sgd")
    assert slower is not None
    assert slower.mean == pytest.approx(2.0)
    assert comparison.slower(results, "homogeneous", "sgp") is None
    rows = {row[0]: row for row in comparison.rows_of(results, "homogeneous")}
    assert rows["AR-SGD"][1].startswith("30 (")
    assert rows["SGP"][1] == "1 of 2 runs reached it"
    text = comparison.as_csv(results)
    assert text.splitlines()[1] == "homogeneous,moshpit,0,0.000,0,0,4,0.1000"
    assert len(text.splitlines()) == 1 + sum(
        len(one.looks) for runs in results.values() for one in runs
    )


def test_plans_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="there are moshpit"):
        comparison.Plan(method="magic")
    with pytest.raises(ConfigError, match="learning rate"):
        comparison.Plan(rate=0.0)
    with pytest.raises(ConfigError, match="there are homogeneous"):
        comparison.Plan(fleet="none")
    with pytest.raises(ConfigError, match="a low and a high rate"):
        preemptible.Plan(mbit_s=(2.0, 1.0))


def test_text_is_hidden_and_guessed() -> None:
    task = MaskedText()
    assert set(text()) <= set(ALPHABET)
    torch.random.manual_seed(0)
    model = task.model()
    before = task.score(model)
    optimizer, rng = task.optimizer(model, 0.04), Random(1)
    for _ in range(20):
        optimizer.zero_grad()
        task.loss(model, rng, 32).backward()
        optimizer.step()
    assert task.score(model) < before - 0.8
    letters = torch.zeros(2, LENGTH, dtype=torch.int64)
    assert SharedLayers()(letters).shape == (2, LENGTH, len(ALPHABET))


@pytest.mark.parametrize("fleet", preemptible.FLEETS)
def test_both_fleets_train_the_language_model(fleet: str) -> None:
    tub = preemptible.Bathtub(early=0.6, early_h=0.05)
    plan = preemptible.Plan(
        fleet=fleet, reliable=2, preemptible=6, target=16, batch=2, steps=5, enough=0.1,
        tub=tub, replaced_s=60.0,
    )  # fmt: skip
    found = preemptible.run(plan)
    assert found.looks[-1].epoch >= 3
    assert found.looks[-1].score < found.looks[0].score
    peers = {look.peers for look in found.looks}
    assert peers == {2} if fleet == "reliable" else len(peers) > 1


def test_money_is_what_the_machines_cost_that_were_there() -> None:
    plan = preemptible.Plan(fleet="preemptible", preemptible_usd=3.6)
    falling = trial(3.0, 2.8, 2.5, 2.0, peers=100, rising=False, enough=2.6)
    assert preemptible.cost_usd(plan, falling) == pytest.approx(3.6 * 100 * 20 / 3600)
    dear = replace(plan, fleet="reliable", reliable_usd=7.2)
    assert preemptible.cost_usd(dear, falling) == pytest.approx(2 * 3.6 * 100 * 20 / 3600)
    assert preemptible.cost_usd(plan, trial(3.0, rising=False, enough=1.0)) is None
    results = {
        "reliable": [trial(3.0, 2.8, 2.7, 2.6, 2.5, rising=False, enough=2.6)],
        "preemptible": [trial(3.0, 2.7, 2.5, 2.4, 2.3, rising=False, enough=2.6)],
    }
    times, steps = preemptible.tables_of(plan, results)
    assert "1.50 times as fast" in times.text
    assert [row[0] for row in steps.rows] == ["1", "2", "3", "4"]
    assert [row[3] for row in steps.rows] == ["-0.100", "-0.200", "-0.200", "-0.200"]
    assert "over the steps from 1 to 4 is -0.175." in steps.text, "one seed: no verdict"
    twice = {
        "reliable": [*results["reliable"], trial(3.0, 2.6, 2.6, 2.4, 2.3, rising=False)],
        "preemptible": [*results["preemptible"], trial(3.0, 2.8, 2.8, 2.6, 2.5, rising=False)],
    }
    assert ": equal within noise" in preemptible.tables_of(plan, twice)[1].text
    twice["preemptible"][1] = trial(3.0, 2.44, 2.42, 2.21, 2.1, rising=False)
    assert ": not equal within noise" in preemptible.tables_of(plan, twice)[1].text
    assert preemptible.as_csv(results).startswith("fleet,run,virtual_s,samples,step,peers,loss\n")


def test_the_report_has_both() -> None:
    assert {"vision", "language"} <= set(CATALOGUE)
    assert experiment("vision") is comparison.section
    assert experiment("language") is preemptible.section


def test_the_command_says_what_is_wrong() -> None:
    for arguments, wrong in (
        (["--preset", "audio"], "vision or language"),
        (["--methods", "moshpit,magic", "--seeds", "1"], "there are moshpit"),
        (["--preset", "language", "--prices", "1"], "give two numbers"),
        (["--seeds", "0"], "give 1 or more"),
    ):
        result = CliRunner().invoke(app, ["experiment", "training", *arguments])
        assert result.exit_code != 0
        assert wrong in str(result.exception) + result.output


def test_the_command_trains_writes_and_draws(tmp_path) -> None:
    arguments = [
        "--methods", "moshpit,ad-psgd", "--fleets", "homogeneous", "--peers", "4", "--seeds", "1",
        "--target", "1", "--limit", "5", "--jobs", "1", "--rate", "0.1", "--period", "2",
        "--csv", str(tmp_path / "looks.csv"), "--plot", str(tmp_path / "curves.svg"),
    ]  # fmt: skip
    result = CliRunner().invoke(app, ["experiment", "training", *arguments])
    assert result.exit_code == 0, result.output
    assert "AD-PSGD" in result.output
    assert (tmp_path / "looks.csv").read_text().count("\n") > 4
    assert (tmp_path / "curves.svg").read_text().count("<svg") == 1
