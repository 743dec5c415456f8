"""Scenario files: what is shipped can be read, what is wrong is refused with its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from moshpit.errors import ConfigError
from moshpit.sim.scenario import load, parse, shipped

SHIPPED = (
    "calm", "churn", "corrupt", "crash", "joiners", "loss", "nat", "partition", "pause", "restart",
    "slow", "storm", "thousand",
)  # fmt: skip


def test_what_is_shipped() -> None:
    assert tuple(shipped()) == SHIPPED
    for name in shipped():
        assert load(name).title == name


def test_every_kind_of_fault_is_in_some_shipped_scenario_or_is_a_join_or_a_leave() -> None:
    kinds = {fault.kind for name in shipped() for fault in load(name).faults}
    assert kinds >= {
        "crash", "restart", "pause", "slow", "partition", "bandwidth", "loss", "corrupt",
    }  # fmt: skip


def test_a_path_is_a_scenario_too(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('title = "mine"\n[swarm]\npeers = 3\n')
    assert load(str(path)).swarm.peers == 3


def test_settings_change_the_preset() -> None:
    text = 'title = "x"\npreset = "internet"\n[swarm]\npeers = 3\n[settings.round]\nstall_s = 9.5\n'
    config = parse(text, "x").config()
    assert config.round.stall_s == 9.5
    assert config.round.linger_s == 6.0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("title = ", "x:"),
        ('title = "x"', "swarm"),
        ('title = "x"\n[swarm]\npeers = 0', "peers: 1 to"),
        ('title = "x"\n[swarm]\npeers = "many"', "$.swarm.peers"),
        ('title = "x"\n[swarm]\npeers = 3\npers = 4', "pers"),
        ('title = "x"\n[swarm]\npeers = 3\nnat_share = 1.5', "nat_share"),
        ('title = "x"\n[swarm]\npeers = 3\n[work]\nstep_s = [2.0, 1.0]', "step_s"),
        ('title = "x"\n[swarm]\npeers = 3\n[network]\nloss = 1.0', "loss"),
        ('title = "x"\n[swarm]\npeers = 3\n[[faults]]\nkind = "flood"', "$.faults[0].kind"),
        ('title = "x"\n[swarm]\npeers = 3\n[[faults]]\nkind = "crash"', "at_s or at_epoch"),
        (
            'title = "x"\n[swarm]\npeers = 3\n[[faults]]\nkind = "pause"\nat_s = 1\ncount = 1',
            "pause needs for_s",
        ),
        (
            'title = "x"\n[swarm]\npeers = 3\n[[faults]]\nkind = "crash"\nat_s = 1\ncount = 1\n'
            "share = 0.5",
            "one of count, share, hosts",
        ),
        (
            'title = "x"\n[swarm]\npeers = 3\n[checks]\nexact = true\n[churn]\n'
            "half_life_s = 1.0\nuntil_epoch = 2",
            "checks.exact",
        ),
        ('title = "x"\n[swarm]\npeers = 3\n[settings.rounds]\nstall_s = 1', "settings.rounds"),
        ('title = "x"\n[swarm]\npeers = 3\n[settings.round]\nstal_s = 1', "stal_s"),
    ],
)
def test_what_is_wrong_is_refused_in_words(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "x")
    assert words in str(caught.value)


def test_what_cannot_be_found_is_refused_with_what_there_is() -> None:
    with pytest.raises(ConfigError, match="crash, joiners, loss"):
        load("no-such-scenario")


def test_a_number_of_peers_that_makes_no_swarm_is_refused() -> None:
    assert load("calm").with_peers(5).swarm.peers == 5
    with pytest.raises(ConfigError, match="peers: 1 to"):
        load("calm").with_peers(0)
