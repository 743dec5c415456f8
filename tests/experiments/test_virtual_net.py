"""Virtual lines: a transport as any other, only slower, by as much as is said."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable
from random import Random
from statistics import fmean

import pytest

from moshpit.config import TransportConfig
from moshpit.errors import ConfigError
from moshpit.experiments.virtual_net import Line, ShapedWire
from moshpit.experiments.virtual_time import VirtualLoop
from moshpit.transport.conformance import CHECKS, Party
from moshpit.transport.memory import Exchange
from moshpit.types import PeerId
from tests.transport.benches import MemoryBench

LINE = Line(1e7, 1e7, 0.01)


class ShapedBench(MemoryBench):
    """Peers of one exchange, with lines between them."""

    def __init__(self) -> None:
        super().__init__()
        self.wire = ShapedWire(asyncio.get_running_loop(), Random(1))
        self.exchange = Exchange(self.wire)

    async def party(self, *, listens: bool = True, config: TransportConfig | None = None) -> Party:
        party = await super().party(listens=listens, config=config)
        self.wire.connect(party.peer, LINE)
        return party


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_conformance(check) -> None:
    async def work() -> None:
        bench = ShapedBench()
        try:
            await check(bench)
        finally:
            await bench.close()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        complaints: list[dict[str, object]] = []
        runner.get_loop().set_exception_handler(lambda _, what: complaints.append(what))
        runner.run(work())
    gc.collect()
    assert not complaints


class Net:
    """Transfers between peers named by letters, and when they arrive."""

    def __init__(self, seed: int = 1, **lines: Line) -> None:
        self.loop = VirtualLoop()
        self.wire = ShapedWire(self.loop, Random(seed))
        self.arrived: dict[str, float] = {}
        for name, line in lines.items():
            self.wire.connect(PeerId(name.encode()), line)

    def send(self, name: str, way: str, size: int, then: Callable[[], None] = lambda: None) -> None:
        def deliver() -> None:
            self.arrived[name] = self.loop.time()

        a, b = (PeerId(letter.encode()) for letter in way)
        self.wire.chunk(a, b, size, then, deliver)

    def run(self) -> dict[str, float]:
        self.loop.run_until_complete(asyncio.sleep(1e6))
        self.loop.close()
        return self.arrived


def test_a_chunk_takes_its_size_over_the_rate_and_the_latency() -> None:
    net = Net(a=Line(1000.0, 1.0, 0.02), b=Line(1.0, 500.0, 0.03))
    net.send("chunk", "ab", 1000)
    assert net.run() == {"chunk": pytest.approx(2.0 + 0.05)}


def test_transfers_share_both_lines() -> None:
    line = Line(1000.0, 1000.0, 0.0)
    net = Net(a=line, b=line, c=line, d=line)
    net.send("one", "ab", 1000)  # shares a's line up with the second
    net.send("two", "ac", 500)
    net.send("three", "db", 500)  # and b's line down with the third
    # Each at 500 bytes/s for a second; then the first has both lines for itself.
    assert net.run() == pytest.approx({"two": 1.0, "three": 1.0, "one": 1.5})


def test_who_comes_later_takes_a_share_from_then_on() -> None:
    line = Line(1000.0, 1000.0, 0.0)
    net = Net(a=line, b=line)
    net.send("first", "ab", 1000)
    net.loop.call_at(0.5, net.send, "second", "ab", 1000)
    assert net.run() == pytest.approx({"first": 1.5, "second": 2.0})


def test_both_directions_of_a_line_are_independent() -> None:
    line = Line(1000.0, 1000.0, 0.0)
    net = Net(a=line, b=line)
    net.send("there", "ab", 1000)
    net.send("back", "ba", 1000)
    assert net.run() == pytest.approx({"there": 1.0, "back": 1.0})


def test_the_first_burst_after_some_computing_hiccups() -> None:
    line = Line(1000.0, 1000.0, 0.0, hiccup_s=5.0)

    def burst(seed: int) -> tuple[float, float, float]:
        net = Net(seed, a=line, b=line)
        net.send("one", "ab", 100, lambda: net.send("two", "ab", 100))
        net.loop.call_at(500.0, net.send, "late", "ab", 100)  # nothing was computed since
        net.loop.call_at(999.0, net.wire.computed, PeerId(b"a"))
        net.loop.call_at(1000.0, net.send, "three", "ab", 100)
        arrived = net.run()
        assert arrived["late"] == pytest.approx(500.1)
        return arrived["one"] - 0.1, arrived["two"] - arrived["one"], arrived["three"] - 1000.1

    bursts = [burst(seed) for seed in range(300)]
    assert [two for _, two, _ in bursts] == pytest.approx([0.1] * 300)
    for pauses in ([one for one, _, _ in bursts], [three for _, _, three in bursts]):
        assert fmean(pauses) == pytest.approx(5.0, rel=0.2)  # 300 draws: 6 % are one deviation
        assert min(pauses) < 1.0
    assert all(one != three for one, _, three in bursts)


def test_messages_pass_chunks_and_keep_their_order() -> None:
    net = Net(a=Line(10.0, 10.0, 0.1), b=Line(10.0, 10.0, 0.2))
    net.send("chunk", "ab", 1000)
    order: list[tuple[int, float]] = []
    for number in range(5):
        net.wire.message(
            PeerId(b"a"),
            PeerId(b"b"),
            lambda number=number: order.append((number, net.loop.time())),
        )
    net.run()
    assert order == [(number, pytest.approx(0.3)) for number in range(5)]


def test_lines_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="must be positive"):
        Line(0.0, 1.0)
