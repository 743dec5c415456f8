"""Views that share what they began with believe the same as views that were told it."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moshpit.config import ProgressConfig
from moshpit.protocol.known import Known, SharedEntries, Status
from moshpit.protocol.progress import Progress
from moshpit.protocol.view import BUCKETS, LiveView
from moshpit.sim.process import Host, Process, first_record, peer_id
from moshpit.sim.signer import SimSigner
from moshpit.types import Role
from moshpit.wire.messages import PeerRecord

ROLES = (Role.WORKER, Role.WORKER, Role.CLIENT, Role.AUX, Role.WORKER, Role.WORKER)


def record(number: int, role: Role) -> PeerRecord:
    host = Host(number, 0, 1e6, 1e6, nat=role is Role.CLIENT)
    process = Process(number, peer_id(3, number), host, role, born=0.0, offset=0.0)
    return SimSigner(process.peer).sign_message(first_record(process, b"schema", 7000))


RECORDS = [record(number, role) for number, role in enumerate(ROLES)]
STRANGERS = [record(100 + number, Role.WORKER) for number in range(2)]


def both() -> tuple[LiveView, LiveView]:
    """One view that shares, and one that was told."""
    me = RECORDS[0]
    told = LiveView(me, 0.0)
    for other in RECORDS[1:]:
        told.add(other, 0.0)
    return LiveView(me, 0.0, Known(RECORDS)), told


def picture(view: LiveView, progress: Progress, now: float) -> dict[str, object]:
    """Everything that others read of a view."""
    peers = [r.peer for r in (*RECORDS, *STRANGERS)]
    return {
        "live": list(view.live),
        "records": list(view.records()),
        "record": [view.record(peer) for peer in peers],
        "reachable": [view.reachable(peer) for peer in peers],
        "dialable": [view.dialable(peer) for peer in peers],
        "status": [view.status(peer) for peer in peers],
        "averaging": [list(view.averaging(s)) for s in (b"schema", b"other", b"")],
        "digest": view.digest(),
        "buckets": [[e.record for e in view.bucket(index)] for index in range(BUCKETS)],
        "known": [peer in view.entries for peer in peers],
        "count": len(view.entries),
        "all": sorted(view.entries),
        "samples": pytest.approx(progress.estimate(now)),
        "epoch": progress.swarm_epoch(),
        "wakeup": pytest.approx(progress.wakeup),
    }


DOINGS = st.lists(
    st.tuples(
        st.sampled_from(["renew", "schema", "role", "mark", "forget", "add", "cut", "target"]),
        st.integers(0, len(RECORDS) + len(STRANGERS) - 1),
        st.integers(0, 3),
    ),
    max_size=25,
)


def do(  # noqa: PLR0917 - what a test draws
    view: LiveView, progress: Progress, what: str, number: int, how: int, now: float
) -> None:
    """Change something, as membership would; what cannot be is not done."""
    first = (*RECORDS, *STRANGERS)[number]
    entry = view.entries.get(first.peer)
    if what == "target":
        progress.target = 50.0 * (how + 1)
    elif what == "add":
        if entry is None:
            view.add(msgspec.structs.replace(first, version=9, epoch=how), now)
    elif entry is None or number == 0:
        return
    elif what == "renew":
        news = {"version": entry.record.version + 1, "samples": 7.0 * how, "rate": 3.0 * how}
        view.renew(entry, msgspec.structs.replace(entry.record, epoch=how // 2, **news), now)
    elif what == "schema":
        schema = (b"", b"schema", b"other", b"schema")[how]
        view.renew(entry, msgspec.structs.replace(entry.record, schema=schema), now)
    elif what == "role":
        role = (Role.WORKER, Role.CLIENT, Role.AUX, Role.WORKER)[how].value
        view.renew(entry, msgspec.structs.replace(entry.record, role=role), now)
    elif what == "mark":
        view.mark(entry, tuple(Status)[how], now)
    elif what == "cut":
        view.cut(entry, how % 2 == 0)
    elif what == "forget" and not entry.status.live:
        view.forget(entry)


@given(DOINGS)
def test_what_is_shared_and_what_was_told_are_believed_alike(
    doings: list[tuple[str, int, int]],
) -> None:
    views = both()
    progresses = [Progress(view, ProgressConfig(), 100.0, 0.0) for view in views]
    now = 0.0
    assert picture(views[0], progresses[0], now) == picture(views[1], progresses[1], now)
    for what, number, how in doings:
        now += 0.5
        for view, progress in zip(views, progresses, strict=True):
            do(view, progress, what, number, how, now)
        assert picture(views[0], progresses[0], now) == picture(views[1], progresses[1], now)


def test_only_what_was_looked_at_is_a_views_own() -> None:
    known = Known(RECORDS)
    a, b = LiveView(RECORDS[0], 0.0, known), LiveView(RECORDS[1], 0.0, known)
    a.mark(a.entries[RECORDS[2].peer], Status.DEAD, 1.0)
    assert b.reachable(RECORDS[2].peer)
    assert len(known.live) == len(RECORDS)
    assert b.live is known.live
    assert isinstance(b.entries, SharedEntries)
    assert list(b.seen) == [RECORDS[1].peer]


def test_who_has_trained_is_not_among_them() -> None:
    busy = msgspec.structs.replace(RECORDS[1], samples=3.0)
    with pytest.raises(AssertionError, match="line of its own"):
        Known([RECORDS[0], busy])
