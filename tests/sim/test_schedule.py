"""Virtual time: order, ties, stopping."""

from __future__ import annotations

from moshpit.sim.schedule import Schedule


def test_entries_run_in_order_of_time_and_then_of_scheduling() -> None:
    schedule, seen = Schedule(), []
    for time, name in ((2.0, "c"), (1.0, "a"), (2.0, "d"), (1.0, "b")):
        schedule.at(time, lambda x, y: seen.append((schedule.now, x)), name)
    assert not schedule.run(10.0)
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c"), (2.0, "d")]
    assert schedule.now == 10.0


def test_the_past_is_now() -> None:
    schedule, seen = Schedule(), []
    schedule.at(5.0, lambda x, y: schedule.at(1.0, lambda x, y: seen.append(schedule.now)))
    schedule.run(9.0)
    assert seen == [5.0]


def test_stop_leaves_the_rest_for_the_next_run() -> None:
    schedule, seen = Schedule(), []
    schedule.at(1.0, lambda x, y: schedule.stop())
    schedule.at(2.0, lambda x, y: seen.append(x), "later")
    assert schedule.run(9.0)
    assert schedule.now == 1.0
    assert not seen
    assert not schedule.run(9.0)
    assert seen == ["later"]
