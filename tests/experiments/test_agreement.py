"""The protocol in the simulator against the arithmetic of its schedule."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from moshpit.cli.experiment import experiment_app
from moshpit.errors import ConfigError
from moshpit.experiments import agreement
from moshpit.experiments.agreement import APART_MAX, band, compare, predicted, simulated
from moshpit.experiments.crashing import Case, Observed
from moshpit.experiments.replay import furthest_apart

SMALL = Case(peers=48, group_size=7, death=0.03, epochs=2, values=4, seeds=2, runs=80)
THREE_AXES = Case(peers=24, group_size=4, death=0.06, epochs=2, values=4, seeds=1)


def test_the_protocol_is_where_the_model_says() -> None:
    (found,) = compare([SMALL], jobs=2)
    assert found.crashes > 3, "nothing was tried"
    assert found.outside == [], f"{found.protocol} not in {found.low} to {found.high}"
    assert found.violated == ()
    assert found.apart < APART_MAX
    assert found.agrees


@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("seed", [0, 1])
def test_every_value_is_what_its_groups_make_of_it(seed: int, asked: bool) -> None:
    """With three axes, and with peers that die in a group that has counted on them."""
    case = replace(THREE_AXES, asked=asked)
    world = Observed(case, seed)
    world.run()
    assert case.axes == 3
    assert world.crashes > 2, "nothing was tried"
    lost = sum(peer not in world.after[at] for at, members in world.met.items() for peer in members)
    assert (lost > 0) == asked
    assert furthest_apart(case, world) < APART_MAX


def test_a_value_that_is_off_is_seen() -> None:
    world = Observed(THREE_AXES, 0)
    world.run()
    some = next(peer for peer in world.after[1, 1] if peer not in world.last)
    world.after[1, 1][some][2] += 1e-6
    assert furthest_apart(THREE_AXES, world) > APART_MAX


def test_a_share_that_is_counted_otherwise_is_seen() -> None:
    """Whoever has died in a group that had formed has taken a share of its kin's mass along."""
    case = replace(THREE_AXES, asked=True)
    world = Observed(case, 0)
    world.run()
    for at, members in world.met.items():
        world.met[at] = {peer: None for peer in members if peer in world.after[at]}
    assert furthest_apart(case, world) > 1e-4


def test_another_rate_of_crashes_would_be_seen() -> None:
    """The bands are narrow enough to tell one rate from another."""
    low, high = band(predicted(SMALL), 20)
    many = predicted(replace(SMALL, death=0.2, runs=20)).mean(0)
    assert (many[2:] > high[2:]).all()
    assert (low <= high).all()


def test_without_crashes_both_are_exact() -> None:
    case = replace(SMALL, death=0.0, peers=30, group_size=6, values=6)
    swarm, model = simulated(case, 0), predicted(replace(case, runs=20))
    assert swarm.crashes == 0
    for spreads in (swarm.spreads, *model):
        assert spreads[1] > 0.01
        assert (spreads[2:] < 1e-25).all()


def test_the_same_seed_gives_the_same_swarm() -> None:
    case = replace(SMALL, peers=20, group_size=5, values=2, death=0.1)
    one, other = simulated(case, 5), simulated(case, 5)
    assert np.array_equal(one.spreads, other.spreads)
    assert not np.array_equal(one.spreads, simulated(case, 6).spreads)


def test_the_command(tmp_path: Path) -> None:
    arguments = ["protocol", "--peers", "20", "--group-size", "5", "--values", "2", "--seeds", "1"]
    arguments += ["--runs", "40"]
    file = tmp_path / "both.svg"
    result = CliRunner().invoke(experiment_app, [*arguments, "--plot", str(file)])
    assert result.exit_code == 0, result.output
    assert "protocol" in result.stdout
    assert file.exists()
    result = CliRunner().invoke(experiment_app, [*arguments, "--failure", "0.5"])
    assert isinstance(result.exception, ConfigError)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("peers", [512, 768])
def test_the_protocol_at_the_papers_sizes(peers: int) -> None:
    (found,) = compare([Case(peers=peers)])
    assert found.crashes > 20
    assert found.agrees, f"outside {found.outside}, apart {found.apart}, {found.violated}"


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_three_axes_are_where_the_model_says() -> None:
    case = Case(peers=48, group_size=4, death=0.02, values=8, seeds=40, runs=1000)
    (found,) = compare([case])
    assert found.case.axes == 3
    assert found.agrees, f"outside {found.outside}, apart {found.apart}, {found.violated}"


def test_sections_name_what_repeats_them() -> None:
    for case in (*agreement._CASES, *agreement._SMALL_CASES):
        assert case.axes == 2
        assert f"--peers {case.peers} " in agreement.command_of(case)
