"""What membership costs: the same for all sizes where nothing changes; right views soon after."""

from __future__ import annotations

import pytest

from moshpit.errors import ConfigError
from moshpit.sim.traffic import measure


def test_quiet_swarms_cost_a_peer_the_same_whatever_their_size() -> None:
    small, large = (measure(n, half_life_s=0.0, seconds=16.0, seed=3, quiet=0.0) for n in (16, 160))
    assert large.messages == pytest.approx(small.messages, rel=0.2)
    assert large.bytes == pytest.approx(small.bytes, rel=0.3)
    assert 20 < large.bytes < 200
    assert large.changes == 0


def test_a_change_costs_each_peer_a_bounded_number_of_bytes() -> None:
    """A record has about 450 bytes, and is sent a dozen times at most."""
    load = measure(60, half_life_s=60.0, seconds=20.0, seed=3, quiet=58.0)
    assert load.changes > 0.3
    assert 200 < load.bytes_per_change < 450 * 12
    assert load.healed_s is not None
    assert load.healed_s < 60.0


def test_no_swarm_no_load() -> None:
    with pytest.raises(ConfigError, match="peers"):
        measure(0, half_life_s=0.0, seconds=1.0, seed=0, quiet=0.0)
    with pytest.raises(ConfigError, match="half_life_s"):
        measure(4, half_life_s=-1.0, seconds=1.0, seed=0, quiet=0.0)
