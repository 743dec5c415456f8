"""What a link carries is measured where the link was the limit, and nowhere else."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from moshpit.cli.bench_links import Links
from moshpit.identity.tickets import RunKey
from moshpit.protocol import partition
from moshpit.runtime.bandwidth import FAST, LOOK_S, LinkWatch, Meter
from moshpit.transport.base import Flow
from moshpit.types import Address
from tests.real.harness import real_swarm
from tests.real.relay import unable

PEER = Path(__file__).with_name("bandwidth_peer.py")


class Clockwork:
    """Feeds a meter as a link would: so fast, in so much noise, by the clock."""

    def __init__(self, seed: int = 1) -> None:
        self.meter = Meter()
        self.now = 1000.0
        self.flow = Flow()
        self.busy_s = 0.0
        self._rng = random.Random(seed)

    def move(
        self, seconds: float, up: float, down: float, limited: float = 1.0, busy: float = 0.1
    ) -> None:
        for _ in range(round(seconds / LOOK_S)):
            late_s = LOOK_S * self._rng.uniform(1.0, 1.2)
            noise = self._rng.uniform(0.9, 1.1)
            self.now += late_s
            self.busy_s += busy * late_s
            self.flow += Flow(
                round(up * late_s * noise), round(down * late_s * noise), limited * late_s
            )
            self.meter.sample(self.now, self.flow, self.busy_s)


@pytest.mark.parametrize("up", [2e5, 1.25e6, 12.5e6, 60e6])
def test_a_full_link_is_measured(up: float) -> None:
    link = Clockwork()
    link.move(6.0, up=up, down=up / 2)
    assert link.meter.estimate()[0] == pytest.approx(up, rel=0.12)


def test_all_fast_links_are_alike() -> None:
    one, other = Clockwork(1), Clockwork(2)
    one.move(1.0, up=150e6, down=150e6)
    other.move(1.0, up=900e6, down=300e6)
    assert one.meter.estimate() == other.meter.estimate() == (FAST, FAST)


@pytest.mark.parametrize(
    ("limited", "busy"), [(0.3, 0.1), (1.0, 0.95)], ids=["network-not-full", "processor-full"]
)
def test_what_something_else_limits_says_nothing(limited: float, busy: float) -> None:
    link = Clockwork()
    link.move(5.0, up=10e6, down=10e6, limited=limited, busy=busy)
    assert link.meter.estimate() == (0.0, 0.0)


def test_down_is_no_less_than_up() -> None:
    """What came in shows how fast the others sent, at least as much as how fast this link is."""
    link = Clockwork()
    link.move(5.0, up=10e6, down=1e6)
    up, down = link.meter.estimate()
    assert up == down == pytest.approx(10e6, rel=0.12)
    link.move(5.0, up=10e6, down=40e6)
    assert link.meter.estimate()[1] == pytest.approx(40e6, rel=0.12)


def test_a_burst_after_silence_is_not_the_link() -> None:
    link = Clockwork()
    for _ in range(5):
        link.move(0.5, up=0, down=0, limited=0.0)
        link.move(0.1, up=100e6, down=0)  # what a shaper lets through at once
        link.move(1.0, up=5e6, down=0)
        link.meter.pause()
    assert link.meter.estimate()[0] == pytest.approx(5e6, rel=0.12)


def test_slower_for_good_is_noticed() -> None:
    link = Clockwork()
    link.move(10.0, up=20e6, down=0)
    link.move(60.0, up=2e6, down=0)
    assert link.meter.estimate()[0] == pytest.approx(2e6, rel=0.12)


def test_counters_that_shrink_are_survived() -> None:
    """A peer that is forgotten takes its counts along."""
    link = Clockwork()
    link.move(2.0, up=10e6, down=10e6)
    link.flow = Flow()
    link.move(2.0, up=10e6, down=10e6)
    assert link.meter.estimate()[0] == pytest.approx(10e6, rel=0.12)


def test_what_is_measured_is_told_when_it_is_news() -> None:
    async def work() -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        told: list[tuple[float, float]] = []

        def flow() -> Flow:
            gone_s = loop.time() - began
            return Flow(round(20e6 * gone_s), round(30e6 * gone_s), gone_s)

        watch = LinkWatch(flow, lambda up, down: told.append((up, down)), given=0.0)
        watch.start()
        while not told:
            await asyncio.sleep(LOOK_S)
            watch.tell()
        watch.tell()
        watch.stop()
        assert told == [(pytest.approx(20e6, rel=0.01), pytest.approx(30e6, rel=0.01))]

    asyncio.run(work())


def test_what_the_user_says_is_not_measured() -> None:
    async def work() -> None:
        watch = LinkWatch(pytest.fail, pytest.fail, given=1e6)
        watch.start()
        await asyncio.sleep(2 * LOOK_S)
        watch.tell()
        watch.stop()

    asyncio.run(work())


def test_a_transport_that_does_not_count_is_asked_once() -> None:
    async def work() -> None:
        asked: list[None] = []
        watch = LinkWatch(lambda: asked.append(None), pytest.fail, given=0.0)
        for _ in range(3):
            watch.start()
            await asyncio.sleep(0)
            watch.tell()
            watch.stop()
        assert len(asked) == 1

    asyncio.run(work())


# --- the parts that follow --------------------------------------------------------------------


def test_links_that_hardly_differ_are_equal() -> None:
    assert partition.levelled([94.0, 101.0, 0.0, 20.0]) == [97.5, 97.5, 0.0, 20.0]
    assert partition.levelled([10.0, 5.0, 2.0, 1.0]) == [10.0, 5.0, 2.0, 1.0]
    assert partition.levelled([]) == []
    equal = partition.fractions(partition.levelled([95.0, 80.0, 99.0, 90.0]), [True] * 4)
    assert equal == [0.25] * 4


@contextmanager
def peers(speeds: list[float], numel: int, rounds: int) -> Iterator[list[list[dict[str, float]]]]:
    """By round and peer, what peers with these links report."""
    with Links(speeds) as links, ExitStack() as stack:
        first = Address(links.hosts[0], 7000)
        ticket = RunKey.generate().invite().ticket((first,)).encode()
        started = []
        for index, host in enumerate(links.hosts):
            command = [*links.prefix(index), sys.executable, str(PEER), "--ticket", ticket]
            command += ["--listen", f"{host}:7000", "--peers", str(len(speeds))]
            command += ["--numel", str(numel), "--rounds", str(rounds)]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            started.append(stack.enter_context(process))
        yield [[json.loads(p.stdout.readline()) for p in started] for _ in range(rounds)]


@pytest.mark.soak
def test_unequal_links_get_unequal_parts_and_nobody_was_told() -> None:
    if why := unable():
        pytest.skip(why)
    speeds, numel = [200.0, 100.0, 40.0, 20.0], 1_000_000
    with peers(speeds, numel, rounds=3) as rounds:
        # Everybody sends (1 - w) + (M - 1) w of the vector.
        parts = [[(r["sent"] / (4 * numel) - 1) / 2 for r in each] for each in rounds]
        best = partition.fractions(speeds, [True] * 4)
        assert best is not None
        cost = [partition.seconds(speeds, ps, 1.0, 1.0) for ps in [best, parts[0], parts[2]]]
        assert cost[1] > 1.4 * cost[0]
        assert cost[2] < 1.15 * cost[0]
        # The fast links were never full. How fast they are nobody saw, and nobody needs to know.
        assert 8 * rounds[2][3]["up"] / 1e6 == pytest.approx(20.0, rel=0.3)


def test_on_one_machine_parts_stay_equal() -> None:
    numel = 200_000
    with real_swarm(numel) as swarm:
        swarm.start(3)
        for _ in range(3):
            results = swarm.average(swarm.peers)
            for result in results:
                (only,) = result["rounds"]
                share = only["bytes_sent"] / (4 * numel) - 1
                assert share == pytest.approx(1 / 3, abs=0.05)
