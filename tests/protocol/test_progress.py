"""The swarm's progress: what is counted, when an epoch is due, when a report is worth it."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import ProgressConfig
from moshpit.protocol.machine import Received, Tick
from moshpit.protocol.membership import Membership
from moshpit.protocol.progress import Progress
from moshpit.protocol.view import LiveView, Status
from moshpit.wire.messages import Gossip, News

from .harness_membership import Net, machine, peer_id, record_of, signed

CONFIG = ProgressConfig()


def view_of(**mine: Any) -> LiveView:
    return LiveView(record_of(0, **mine), 0.0)


def put(view: LiveView, number: int, now: float, **fields: Any) -> None:
    entry = view.entries.get(peer_id(number))
    if entry is None:
        view.add(record_of(number, **fields), now)
    else:
        version = entry.record.version + 1
        view.renew(entry, msgspec.structs.replace(entry.record, version=version, **fields), now)


def test_a_peer_alone_reaches_its_target_by_itself() -> None:
    progress = Progress(view_of(), CONFIG, 100.0, 0.0)
    assert progress.estimate(0.0) == 0.0
    progress.local(99.0, 10.0, 0.1, 9.9)
    assert not progress.due(10.0)
    progress.local(100.0, 10.0, 0.1, 10.0)
    assert progress.due(10.0)
    progress.advance(1, 10.5)
    assert progress.epoch == 1
    assert not progress.due(10.5)
    assert progress.estimate(60.0) == 0.0


def test_without_a_target_nothing_is_due() -> None:
    progress = Progress(view_of(), CONFIG, 0.0, 0.0)
    progress.local(1e9, 1e3, 0.1, 1.0)
    assert not progress.due(1e6)


def test_others_are_extrapolated_until_they_should_have_reported() -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 1000.0, 0.0)
    put(view, 1, 2.0, samples=20.0, rate=10.0)
    put(view, 2, 3.0, samples=5.0, rate=1.0)
    assert progress.estimate(3.0) == pytest.approx(30.0 + 5.0)
    assert progress.estimate(12.0) == pytest.approx(120.0 + 14.0)
    assert progress.estimate(32.5) == pytest.approx(320.0 + 34.5)
    assert progress.estimate(1e5) == pytest.approx(320.0 + 35.0)
    put(view, 1, 1e5, samples=400.0, rate=0.0)
    assert progress.estimate(1e5 + 1) == pytest.approx(400.0 + 35.0)


def test_the_dead_stop_growing_and_the_forgotten_vanish() -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 1000.0, 0.0)
    put(view, 1, 0.0, samples=20.0, rate=10.0)
    entry = view.entries[peer_id(1)]
    view.mark(entry, Status.SUSPECT, 1.0)
    assert progress.estimate(2.0) == pytest.approx(40.0)
    view.mark(entry, Status.DEAD, 2.0)
    assert progress.estimate(9.0) == pytest.approx(20.0)
    view.mark(entry, Status.ALIVE, 9.0)
    assert progress.estimate(10.0) == pytest.approx(120.0)
    view.mark(entry, Status.DEAD, 10.0)
    view.forget(entry)
    assert progress.estimate(10.0) == 0.0


def test_aux_peers_count_nothing() -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 1000.0, 0.0)
    put(view, 1, 0.0, role="aux", samples=500.0, rate=10.0)
    assert progress.estimate(5.0) == 0.0


def test_older_epochs_count_from_the_beginning_here_and_later_ones_not() -> None:
    view = view_of(epoch=3)
    progress = Progress(view, CONFIG, 1000.0, 0.0)
    put(view, 1, 0.0, epoch=3, samples=900.0, rate=10.0)
    put(view, 2, 0.0, epoch=4, samples=70.0, rate=5.0)
    assert progress.estimate(1.0) == pytest.approx(910.0)
    assert progress.swarm_epoch() == 4
    progress.advance(4, 2.0)
    assert progress.estimate(2.0) == pytest.approx(80.0)
    assert progress.estimate(6.0) == pytest.approx(100.0 + 40.0)
    assert progress.estimate(1e4) == pytest.approx(70.0 + 5.0 * 30.0 + 10.0 * 30.0)
    put(view, 1, 1e4, epoch=4, samples=1.0, rate=0.0)
    assert progress.estimate(1e4) == pytest.approx(220.0 + 1.0)


def test_the_swarms_epoch_is_the_highest_that_live_peers_show() -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 0.0, 0.0)
    put(view, 1, 0.0, epoch=7)
    put(view, 2, 0.0, epoch=5)
    put(view, 3, 0.0, epoch=1 << 47)
    assert progress.swarm_epoch() == 7
    view.mark(view.entries[peer_id(1)], Status.DEAD, 1.0)
    assert progress.swarm_epoch() == 5
    progress.advance(9, 1.0)
    assert progress.swarm_epoch() == 9


def test_absurd_rates_do_not_end_an_epoch_at_once() -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 1000.0, 0.0)
    put(view, 1, 0.0, samples=1.0, rate=1e9)
    assert progress.estimate(0.01) <= 1.0 + 1000.0 / CONFIG.report_interval_s * 0.01
    assert not progress.due(0.4)
    put(view, 1, 0.4, samples=1.0, rate=0.0)
    assert progress.estimate(5.0) == pytest.approx(1.0)


def test_own_nonsense_is_not_published() -> None:
    progress = Progress(view_of(), CONFIG, 10.0, 0.0)
    nan = float("nan")
    assert progress.local(nan, nan, nan, 1.0) is None
    assert progress.estimate(1.0) == 0.0
    fields = progress.local(5.0, float("inf"), -1.0, 2.0)
    assert fields == {"samples": 5.0, "rate": 1e9, "step_s": 0.0}


# --- reports ------------------------------------------------------------------------------


class Trainer:
    """A peer alone in its view, with a record that follows its reports."""

    def __init__(self, target: float, **mine: Any) -> None:
        self.view = view_of(**mine)
        self.progress = Progress(self.view, CONFIG, target, 0.0)
        self.reports: list[tuple[float, dict[str, object]]] = []

    def local(self, samples: float, rate: float, step_s: float, now: float) -> None:
        fields = self.progress.local(samples, rate, step_s, now)
        if fields is not None:
            self.reports.append((now, fields))
            put(self.view, 0, now, epoch=self.progress.epoch, **fields)


def test_steady_training_is_reported_once_and_then_when_extrapolation_ends() -> None:
    peer = Trainer(1e6)
    for step in range(1, 1000):
        peer.local(1000.0 * step, 10_000.0, 0.1, 0.1 * step)
    times = [at for at, _ in peer.reports]
    # The first when a tenth of the target is reached unannounced, then every 30 s.
    assert times == pytest.approx([10.1, 40.1, 70.1], abs=0.2)
    assert peer.reports[0][1]["rate"] == 10_000.0


def test_a_change_of_speed_is_reported_but_not_more_often_than_allowed() -> None:
    peer = Trainer(100.0)
    samples = 0.0
    for step in range(1, 400):
        now = 0.01 * step
        samples += 5.0 if step % 7 else 0.0
        peer.local(samples, 500.0 if step % 2 else 5.0, 0.01, now)
    times = [at for at, _ in peer.reports]
    assert len(times) >= 3
    assert min(b - a for a, b in pairwise(times)) >= 0.5 - 1e-9


def test_aux_peers_report_nothing() -> None:
    peer = Trainer(100.0, role="aux")
    peer.local(1000.0, 10.0, 0.1, 5.0)
    assert peer.reports == []


def test_standing_still_is_reported_at_the_wakeup() -> None:
    peer = Trainer(100.0)
    peer.local(20.0, 10.0, 1.0, 2.0)
    assert [at for at, _ in peer.reports] == [2.0]
    for _ in range(10):
        wakeup = peer.progress.wakeup
        if wakeup is None:
            break
        peer.local(20.0, 10.0, 1.0, wakeup)
    assert peer.progress.wakeup is None
    assert peer.reports[-1][1] == {"samples": 20.0, "rate": 0.0, "step_s": 1.0}
    assert peer.reports[-1][0] <= 6.0
    assert len(peer.reports) <= 4


def test_long_steps_are_no_standstill() -> None:
    peer = Trainer(1000.0)
    for step in range(1, 8):
        now = 4.0 * step
        peer.local(40.0 * step, 10.0, 4.0, now)
        while True:
            wakeup = peer.progress.wakeup
            if wakeup is None or wakeup > now + 3.99:
                break
            peer.local(40.0 * step, 10.0, 4.0, wakeup)
    assert len(peer.reports) == 1


def test_the_wakeup_is_when_the_lines_meet_the_target() -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 100.0, 0.0)
    assert progress.wakeup is None
    put(view, 1, 1.0, samples=10.0, rate=10.0)
    put(view, 2, 1.0, samples=10.0, rate=5.0)
    progress.estimate(1.0)
    assert progress.wakeup == pytest.approx(1.0 + 80.0 / 15.0)
    assert not progress.due(6.3)
    assert progress.due(6.34)
    assert progress.wakeup is None  # nobody need be told twice
    progress.advance(1, 6.34)
    # Both are in an older epoch's record: they count from now on.
    assert progress.wakeup == pytest.approx(6.34 + 100.0 / 15.0)


numbers = st.floats(0.0, 1e6)
records = st.fixed_dictionaries(
    {
        "number": st.integers(1, 4),
        "epoch": st.integers(0, 3),
        "samples": numbers,
        "rate": st.floats(0.0, 1e4),
        "role": st.sampled_from(["worker", "client", "aux"]),
    }
)
steps = st.lists(
    st.tuples(
        st.floats(0.0, 40.0), st.one_of(records, st.sampled_from(list(Status)), st.just(None))
    ),
    max_size=30,
)


@given(steps)
def test_the_kept_sum_is_the_sum_that_is_meant(story: list[tuple[float, Any]]) -> None:
    view = view_of()
    progress = Progress(view, CONFIG, 1e7, 0.0)
    now = began = 0.0
    for later, what in story:
        now += later
        if isinstance(what, dict):
            fields = {k: v for k, v in what.items() if k != "number"}
            put(view, what["number"], now, **fields)
        elif isinstance(what, Status):
            if peer_id(1) in view.entries:
                view.mark(view.entries[peer_id(1)], what, now)
        else:
            progress.advance(min(3, progress.epoch + 1), now)
            began = now
        wanted = 0.0
        for peer, entry in view.entries.items():
            record, live = entry.record, entry.status.live
            if peer == view.me.peer or record.role == "aux":
                continue
            if record.epoch == progress.epoch:
                wanted += record.samples
                wanted += record.rate * min(now - entry.at, 30.0) if live else 0.0
            elif record.epoch < progress.epoch and live:
                wanted += record.rate * min(now - began, 30.0)
        assert progress.estimate(now) == pytest.approx(wanted, rel=1e-6, abs=1e-3)
        highest = [e.record.epoch for e in view.entries.values() if e.status.live]
        assert progress.swarm_epoch() == max(progress.epoch, *highest)


# --- with gossip --------------------------------------------------------------------------


def test_an_epoch_is_due_everywhere_within_a_gossip_delay_and_few_reports() -> None:
    count, step_s = 24, 0.05
    rates = [5.0 + n for n in range(count)]
    length_s = 12.0
    target = length_s * sum(rates)
    net = Net(5)
    net.grow(count)
    net.run_until(lambda: net.agree(list(range(count))), 10.0)
    parts = [
        Progress(net.hosts[peer_id(n)].machine.view, CONFIG, target, net.now) for n in range(count)
    ]
    spreads: list[float] = []
    reports: list[int] = []
    lengths: list[float] = []
    for epoch in range(3):
        began = net.now
        due: dict[int, float] = {}
        published = 0
        while len(due) < count:
            assert net.now - began < 2 * length_s
            net.run(step_s)
            elapsed = net.now - began
            for n, progress in enumerate(parts):
                fields = progress.local(rates[n] * elapsed, rates[n], step_s, net.now)
                if fields is not None:
                    published += 1
                    publish = net.hosts[peer_id(n)].machine.publish
                    net.do(n, publish(net.now, epoch=epoch, **fields))
                if n not in due and progress.due(net.now):
                    due[n] = elapsed
        for progress in parts:
            progress.advance(epoch + 1, net.now)
        spreads.append(max(due.values()) - min(due.values()))
        lengths.append(min(due.values()))
        reports.append(published)
    # At first the rates must become known; then nobody need say anything for 30 s.
    assert spreads[0] < 3.0
    assert max(spreads[1:]) <= 1.0
    assert lengths[1:] == pytest.approx([length_s] * 2, rel=0.05)
    assert reports[0] <= 2 * count
    assert max(reports[1:]) <= count


def test_records_that_come_by_gossip_are_counted() -> None:
    made: Membership = machine(0)
    progress = Progress(made.view, CONFIG, 100.0, 0.0)
    record = signed(record_of(1, samples=60.0, rate=20.0))
    made.handle(Received(peer_id(1), News(Gossip((record,)))), 1.0)
    made.handle(Tick(), 1.5)
    assert progress.estimate(2.0) == pytest.approx(80.0)
    assert progress.wakeup == pytest.approx(3.0)
