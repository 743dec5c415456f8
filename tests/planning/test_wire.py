"""One averaging, against what paper.md sections 3 and 4 say by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.planning.codecs import CODECS, CodecCost, codec_named
from moshpit.planning.schedules import group_shares, phases
from moshpit.planning.swarm import PlannedPeer, PlannedSwarm, swarm_of
from moshpit.planning.wire import AveragingCost, Costs, averaging_cost

FLOAT32 = codec_named("float32")
BARE = Costs(meeting_s=0.0, meeting_round_trips=0.0, goodput=1.0, cpu_s_per_gb=0.0)
"""Nothing but bandwidth, as in the paper."""
NUMEL = 2**25  # 256 chunks
VECTOR = 4 * NUMEL


def links(*bandwidths: float, round_trip_s: float = 0.0, clients: int = 0) -> PlannedSwarm:
    peers = tuple(
        PlannedPeer(b, b, place < len(bandwidths) - clients) for place, b in enumerate(bandwidths)
    )
    return PlannedSwarm(peers, round_trip_s)


def cost(
    swarm: PlannedSwarm,
    schedule: str = "grid",
    group_size: int = 16,
    codec: CodecCost = FLOAT32,
    costs: Costs = BARE,
) -> AveragingCost:
    return averaging_cost(swarm, NUMEL, codec, schedule, group_size=group_size, costs=costs)


# --- by hand ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 8, 16])
def test_equal_links_move_the_bytes_of_a_ring(count: int) -> None:
    found = cost(links(*[1e8] * count))
    ring = 2 * (count - 1) / count * VECTOR
    assert found.bytes_mean == pytest.approx(ring)
    assert found.bytes_max == pytest.approx(ring)
    assert found.swarm_bytes == pytest.approx(count * ring)
    assert found.seconds == pytest.approx(ring / 1e8)


def test_one_very_fast_peer_is_a_parameter_server() -> None:
    found = cost(links(1e12, *[1e6] * 7))
    assert found.bytes_max == pytest.approx(7 * VECTOR, rel=0.05)
    assert found.bytes_mean == pytest.approx(14 / 8 * VECTOR)
    assert found.seconds == pytest.approx(VECTOR / 1e6, rel=0.05)
    assert found.part_share == pytest.approx(1, rel=0.01)


def test_10_5_2_1_takes_what_its_slowest_link_does() -> None:
    # ξ* = max(1/1, 6/18) = 1: the first term rules, w ∝ (9, 4, 1, 0).
    swarm = links(10e6, 5e6, 2e6, 1e6)
    assert cost(swarm).seconds == pytest.approx(VECTOR / 1e6)
    parts = [share.part for share in group_shares(swarm.peers, range(4), 1400)]
    assert parts == pytest.approx([9 / 14, 4 / 14, 1 / 14, 0])


def test_10_9_8_7_is_ruled_by_the_sum() -> None:
    # ξ* = max(1/7, 6/34) = 6/34, w = (ξ* b - 1)/2.
    swarm = links(10e6, 9e6, 8e6, 7e6)
    assert cost(swarm).seconds == pytest.approx(6 / 34e6 * VECTOR, rel=0.01)
    parts = [share.part for share in group_shares(swarm.peers, range(4), 100_000)]
    assert parts == pytest.approx([13 / 34, 10 / 34, 7 / 34, 4 / 34], abs=1e-4)


def test_two_split_by_bandwidth() -> None:
    swarm = links(3e6, 1e6)
    parts = [share.part for share in group_shares(swarm.peers, range(2), 256)]
    assert parts == pytest.approx([0.75, 0.25])
    assert cost(swarm).seconds == pytest.approx(VECTOR / 1e6)


@pytest.mark.parametrize(("count", "side"), [(16, 4), (64, 8)])
def test_two_full_rounds_against_the_torus(count: int, side: int) -> None:
    swarm = links(*[1e8] * count)
    grid, torus = cost(swarm, "grid", side), cost(swarm, "torus", side)
    assert grid.bytes_mean == pytest.approx(2 * 2 * (side - 1) / side * VECTOR)
    assert torus.bytes_mean == pytest.approx(2 * (1 - 1 / count) * VECTOR)
    assert torus.seconds == pytest.approx(2 * (1 - 1 / count) * VECTOR / 1e8)


def test_a_client_sends_and_receives_the_vector_once() -> None:
    swarm = links(1e8, 1e8, 1e6, clients=1)
    *_, client = group_shares(swarm.peers, range(3), 256)
    assert client.part == 0
    assert (client.sent_values, client.sent_means) == (1, 0)
    assert (client.got_values, client.got_means) == (0, 1)
    assert cost(swarm).seconds == pytest.approx(VECTOR / 1e6)


def test_the_narrower_direction_counts() -> None:
    swarm = PlannedSwarm((PlannedPeer(1e6, 1e8), PlannedPeer(1e6, 1e8)))
    assert cost(swarm).seconds == pytest.approx(VECTOR / 1e6)


def test_latency_and_meetings_are_paid_for_each_phase() -> None:
    costs = replace(BARE, meeting_s=0.03, meeting_round_trips=2.0)
    near, far = links(*[1e8] * 16), links(*[1e8] * 16, round_trip_s=0.1)
    one = cost(far, costs=costs)
    assert one.meeting_s == pytest.approx(0.03 + 2 * 0.1 + 0.1)
    assert one.seconds - cost(near).seconds == pytest.approx(one.meeting_s)
    assert one.moving_s == pytest.approx(cost(near).seconds)
    two = cost(far, "grid", 4, costs=costs)
    assert two.meeting_s == pytest.approx(2 * one.meeting_s)
    # two meetings; values, values and means, means: four ways
    assert cost(far, "torus", 4, costs=costs).meeting_s == pytest.approx(2 * 0.23 + 4 * 0.05)


def test_on_a_fast_link_the_processor_decides() -> None:
    costs = replace(BARE, cpu_s_per_gb=0.65)
    swarm = links(*[1e12] * 4)
    moved = 2 * 2 * 3 / 4 * VECTOR  # sent and received
    assert cost(swarm, costs=costs).seconds == pytest.approx(0.65 * moved / 1e9, rel=0.01)
    half = replace(costs, cores=0.5)
    assert cost(swarm, costs=half).seconds == pytest.approx(2 * 0.65 * moved / 1e9, rel=0.01)


def test_means_of_top_k_travel_in_their_own_codec() -> None:
    codec = codec_named("topk")
    found = cost(links(*[1e6] * 4), codec=codec)
    bytes_ = 0.75 * NUMEL * (codec.bytes_per_number + codec.bytes_per_mean)
    assert found.bytes_mean == pytest.approx(bytes_)


def test_in_a_grid_the_slowest_path_decides() -> None:
    slow = links(*[1e8] * 15, 1e7)
    assert cost(slow, "grid", 4).seconds >= 2 * VECTOR / 1e7


# --- properties ---------------------------------------------------------------------------------

BANDWIDTHS = st.lists(st.floats(1e6, 1e9), min_size=2, max_size=20)
SCHEDULE = st.sampled_from(["grid", "torus"])
SIZE = st.integers(4, 16)
ROUNDING = 1.1
"""Parts are whole chunks: a faster peer may be given one chunk too many."""


@settings(max_examples=60)
@given(BANDWIDTHS, SCHEDULE, SIZE, st.floats(1, 10), st.data())
def test_more_bandwidth_is_never_slower(
    bandwidths: list[float], schedule: str, size: int, factor: float, data: st.DataObject
) -> None:
    before = cost(links(*bandwidths), schedule, size).seconds
    scaled = cost(links(*(b * factor for b in bandwidths)), schedule, size).seconds
    assert scaled == pytest.approx(before / factor, rel=1e-6)
    lucky = data.draw(st.integers(0, len(bandwidths) - 1))
    bandwidths[lucky] *= factor
    assert cost(links(*bandwidths), schedule, size).seconds <= before * ROUNDING


@settings(max_examples=60)
@given(BANDWIDTHS, SCHEDULE, SIZE, st.integers(0, 5))
def test_nothing_is_sent_that_is_not_received(
    bandwidths: list[float], schedule: str, size: int, clients: int
) -> None:
    swarm = links(*bandwidths, clients=min(clients, len(bandwidths) - 1))
    for phase in phases(swarm, schedule, size, 256, 0):
        members = sorted(share.peer for group in phase.groups for share in group)
        assert len(set(members)) == len(members)
        for group in phase.groups:
            values = sum(share.sent_values for share in group)
            assert values == pytest.approx(sum(share.got_values for share in group))
            means = sum(share.sent_means for share in group)
            assert means == pytest.approx(sum(share.got_means for share in group))


@settings(max_examples=60)
@given(BANDWIDTHS, SCHEDULE, SIZE)
def test_no_averaging_beats_the_physical_limit(
    bandwidths: list[float], schedule: str, size: int
) -> None:
    found = cost(links(*bandwidths), schedule, size)
    count = len(bandwidths)
    limit = max(1 / min(bandwidths), 2 * (count - 1) / sum(bandwidths)) * VECTOR
    assert found.seconds >= limit * (1 - 1e-9)
    assert found.swarm_bytes >= 2 * (count - 1) * VECTOR * (1 - 1e-9)


@settings(max_examples=30)
@given(BANDWIDTHS, SCHEDULE, SIZE, st.sampled_from(CODECS), st.floats(0, 0.5))
def test_latency_only_adds(
    bandwidths: list[float], schedule: str, size: int, codec: CodecCost, round_trip_s: float
) -> None:
    near = averaging_cost(links(*bandwidths), NUMEL, codec, schedule, group_size=size)
    far = links(*bandwidths, round_trip_s=round_trip_s)
    found = averaging_cost(far, NUMEL, codec, schedule, group_size=size)
    assert found.seconds >= near.seconds
    assert found.swarm_bytes == near.swarm_bytes
    assert math.isclose(found.seconds, found.meeting_s + found.moving_s)


def test_a_thousand_peers_are_planned_at_once() -> None:
    found = cost(swarm_of([(1000, 1e8, 1e8)]), "torus", 32)
    assert found.bytes_mean == pytest.approx(2 * VECTOR, rel=0.01)
