"""What an averaging makes of an epoch: by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moshpit.errors import ConfigError
from moshpit.planning.codecs import codec_named
from moshpit.planning.forecast import COPY_BYTES_PER_S, Choice, PlannedRun, forecast
from moshpit.planning.swarm import PlannedPeer, PlannedSwarm, swarm_of
from moshpit.planning.wire import Costs

PARAMS = 2**25
BARE = Costs(meeting_s=0.0, meeting_round_trips=0.0, goodput=1.0, cpu_s_per_gb=0.0)
AVERAGING_S = 1.5 * 4 * PARAMS / 1e8  # 2.0 s: four peers, 2(1 - 1/4) of the vector
COPIES_S = 8 * PARAMS / COPY_BYTES_PER_S

RUN = PlannedRun(PARAMS, 0.5, swarm_of([(4, 1e8, 1e8)]), costs=BARE)
CHOICE = Choice("DiLoCo", "grid", codec_named("float32"), 16, 16, overlap=False)


def test_waiting_adds_the_averaging() -> None:
    found = forecast(RUN, CHOICE)
    assert found.averaging.seconds == pytest.approx(AVERAGING_S)
    assert found.epoch_s == pytest.approx(16 * 0.5 + AVERAGING_S + COPIES_S)
    assert found.step_s == pytest.approx(found.epoch_s / 16)
    assert found.averaging_share == pytest.approx((AVERAGING_S + COPIES_S) / found.epoch_s)
    assert found.link_share == pytest.approx(AVERAGING_S / found.epoch_s)


def test_overlapped_averaging_hides_behind_the_epoch() -> None:
    hidden = forecast(RUN, replace(CHOICE, overlap=True))
    assert hidden.epoch_s == pytest.approx(16 * 0.5 + COPIES_S)
    late = forecast(RUN, replace(CHOICE, overlap=True, period=2))
    assert late.epoch_s == pytest.approx(AVERAGING_S + COPIES_S)
    assert late.averaging_share == pytest.approx(1 - 1.0 / late.epoch_s)


def test_gradients_hide_behind_one_step_only() -> None:
    choice = replace(CHOICE, strategy="GradientAveraging", overlap=True)
    assert forecast(RUN, replace(choice, period=1)).epoch_s == pytest.approx(AVERAGING_S + COPIES_S)
    found = forecast(RUN, replace(choice, period=4))
    assert found.epoch_s == pytest.approx(3 * 0.5 + AVERAGING_S + COPIES_S)
    slow = replace(RUN, step_s=2 * AVERAGING_S)
    found = forecast(slow, replace(choice, period=1))
    assert found.epoch_s == pytest.approx(2 * AVERAGING_S + COPIES_S)


def test_money_is_time_and_traffic() -> None:
    run = replace(RUN, price_per_hour=0.36, price_per_gb=0.02, batch=10, samples=64_000)
    found = forecast(run, CHOICE)
    traffic = 4 * 1.5 * 4 * PARAMS / 1e9 * 0.02
    assert found.swarm_bytes == pytest.approx(4 * found.bytes_per_peer)
    assert found.money_per_epoch == pytest.approx(4 * found.epoch_s * 0.36 / 3600 + traffic)
    assert found.money_per_step == pytest.approx(found.money_per_epoch / 16)
    # 64,000 samples are 1600 steps of each peer, 100 epochs
    assert found.run_s == pytest.approx(100 * found.epoch_s)
    assert found.money_per_run == pytest.approx(100 * found.money_per_epoch)


def test_without_samples_the_runs_length_is_unknown() -> None:
    found = forecast(RUN, CHOICE)
    assert (found.run_s, found.money_per_run, found.money_per_epoch) == (None, None, 0)


def test_memory_by_hand() -> None:
    def per_number(choice: Choice, run: PlannedRun = RUN) -> float:
        return forecast(run, choice).memory_bytes / PARAMS

    local = replace(CHOICE, strategy="LocalSGD")
    # weights, gradients and two moments; snapshot, mean, and a quarter of sums
    assert per_number(local) == pytest.approx(16 + 8 + 1)
    assert per_number(local, replace(RUN, dtype="bfloat16")) == pytest.approx(8 + 8 + 1)
    assert per_number(CHOICE) == pytest.approx(25 + 8)  # outer parameters and momentum
    assert per_number(replace(local, strategy="GradientAveraging")) == pytest.approx(25 + 4)
    int4 = codec_named("int4")  # an encoded copy, and its error
    assert per_number(replace(local, codec=int4)) == pytest.approx(25 + int4.bytes_per_number + 4)


@pytest.mark.parametrize(
    "wrong",
    [
        {"params": 0},
        {"step_s": 0.0},
        {"step_s": float("nan")},
        {"batch": -1.0},
        {"samples": float("inf")},
        {"price_per_hour": -0.1},
        {"dtype": "int3"},
    ],
)
def test_nonsense_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        replace(RUN, **wrong)


def test_swarms_that_cannot_be_are_refused() -> None:
    peer = PlannedPeer(1e6, 1e6)
    for peers, round_trip_s in (
        ((peer,), 0.0),
        ((peer, replace(peer, up=0.0)), 0.0),
        ((peer, replace(peer, down=float("inf"))), 0.0),
        ((replace(peer, reduces=False),) * 2, 0.0),
        ((peer, peer), -1.0),
    ):
        with pytest.raises(ConfigError):
            PlannedSwarm(peers, round_trip_s)
    with pytest.raises(ConfigError, match="20001 peers"):
        swarm_of([(20_001, 1e6, 1e6)])
    with pytest.raises(ConfigError, match="clients"):
        swarm_of([(4, 1e6, 1e6)], clients=4)
