"""The clock jumps, and one thing at a time runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from random import Random

import pytest

from moshpit.errors import ClosedError, LocalError
from moshpit.experiments.virtual_time import (
    Killed,
    Stage,
    StalledError,
    VirtualBridge,
    VirtualLoop,
    VirtualWaiting,
)


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage(VirtualLoop())
    yield stage
    stage.close()
    assert threading.active_count() == 1, "every script's thread has ended"


def play(stage: Stage, *scripts: Callable[[], object], limit_s: float = 1e6) -> bool:
    for number, script in enumerate(scripts):
        stage.start(script, f"script {number}")
    return stage.run(limit_s)


def test_time_passes_only_where_somebody_waits(stage: Stage) -> None:
    times: list[float] = []

    def script() -> None:
        times.append(stage.loop.time())
        sum(range(100_000))
        times.append(stage.loop.time())
        stage.sleep(1000.0)
        times.append(stage.loop.time())

    assert play(stage, script)
    assert times == [0.0, 0.0, pytest.approx(1000.0)]


def test_scripts_take_turns_in_the_order_of_their_times(stage: Stage) -> None:
    seen: list[tuple[str, float]] = []

    def script(name: str, step_s: float) -> Callable[[], None]:
        def work() -> None:
            for _ in range(3):
                stage.sleep(step_s)
                seen.append((name, round(stage.loop.time(), 6)))

        return work

    assert play(stage, script("fast", 1.0), script("slow", 1.4))
    assert seen == [
        ("fast", 1.0), ("slow", 1.4), ("fast", 2.0), ("slow", 2.8), ("fast", 3.0), ("slow", 4.2),
    ]  # fmt: skip


def test_an_event_ends_waits_and_a_time_out_does_too(stage: Stage) -> None:
    waiting = VirtualWaiting(stage)
    event = waiting.event()
    seen: list[tuple[bool, float]] = []

    def waits() -> None:
        seen.append((event.wait(2.0), waiting.clock()))
        seen.append((event.wait(), waiting.clock()))
        seen.append((event.wait(0.0), waiting.clock()))

    def happens() -> None:
        stage.sleep(5.0)
        event.set()

    assert play(stage, waits, happens)
    assert seen == [(False, 2.0), (True, 5.0), (True, 5.0)]


def test_a_condition_looks_again_whenever_it_is_told(stage: Stage) -> None:
    condition = VirtualWaiting(stage).condition()
    values: list[int] = []
    seen: list[tuple[bool, float]] = []

    def waits() -> None:
        with condition:
            seen.append((condition.wait_for(lambda: len(values) == 3), stage.loop.time()))
            seen.append((condition.wait_for(lambda: len(values) == 9, 0.5), stage.loop.time()))

    def adds() -> None:
        for number in range(4):
            stage.sleep(1.0)
            values.append(number)
            with condition:
                condition.notify_all()

    assert play(stage, waits, adds)
    assert seen == [(True, 3.0), (False, 3.5)]


def test_who_waits_for_nothing_is_an_error_and_not_a_hang(stage: Stage) -> None:
    event = VirtualWaiting(stage).event()
    stage.start(event.wait, "waits")
    with pytest.raises(StalledError, match="nothing will bring about"):
        stage.loop.run_until_complete(stage.loop.create_future())


def test_what_a_script_raises_ends_the_run(stage: Stage) -> None:
    def fails() -> None:
        stage.sleep(1.0)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        play(stage, fails, lambda: stage.sleep(1e9), limit_s=1e10)


def test_a_run_has_a_limit(stage: Stage) -> None:
    assert not play(stage, lambda: stage.sleep(100.0), limit_s=10.0)
    assert stage.loop.time() == 10.0


def test_a_killed_script_ends_where_it_waits(stage: Stage) -> None:
    seen: list[str] = []

    def victim() -> None:
        try:
            stage.sleep(100.0)
            seen.append("too far")
        finally:
            seen.append("cleaned up")
            with pytest.raises(Killed):
                stage.sleep(1.0)

    script = stage.start(victim, "victim")
    stage.loop.call_at(5.0, script.kill)
    assert stage.run(1e3)
    assert seen == ["cleaned up"]
    assert stage.loop.time() == 5.0


def test_a_bridge_calls_in_the_loop_and_closes(stage: Stage) -> None:
    bridge = VirtualBridge(stage, Random(0))
    seen: list[object] = []

    async def work() -> float:
        await asyncio.sleep(3.0)
        return stage.loop.time()

    def script() -> None:
        seen.append(bridge.call(work()))
        with pytest.raises(TimeoutError):
            bridge.call(work(), timeout_s=1.0)
        bridge.post(seen.append, "posted")
        stage.sleep(0.0)
        bridge.stop()
        with pytest.raises(ClosedError):
            bridge.post(seen.append, "too late")

    assert play(stage, script)
    assert seen == [3.0, "posted"]


def test_the_network_side_cannot_wait_for_itself(stage: Stage) -> None:
    event = VirtualWaiting(stage).event()
    with pytest.raises(LocalError, match="only a script can wait"):
        event.wait(1.0)


def test_what_would_run_in_another_thread_runs_here(stage: Stage) -> None:
    def fails() -> None:
        raise ValueError("in the pool")

    async def work() -> int:
        loop = asyncio.get_running_loop()
        with pytest.raises(ValueError, match="in the pool"):
            await loop.run_in_executor(None, fails)
        return await loop.run_in_executor(None, threading.get_ident)

    assert stage.loop.run_until_complete(work()) == threading.get_ident()
