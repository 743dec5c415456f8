"""Lineages: labels that sides of a swarm do not share, and what a record shows of them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.protocol.lineage import (
    ENTRY_BYTES,
    REMEMBERED_MAX,
    SHOWN_MAX,
    Fork,
    Lineage,
    label_of,
    lineage_flaw,
)
from moshpit.types import PeerId

PEERS = sorted(PeerId(bytes([n * 37 % 256, n]) * 16) for n in range(40))


def everybody(_: PeerId) -> bool:
    return True


def lived(*lives: tuple[range, list[PeerId]], lost: tuple[int, ...] = ()) -> Lineage:
    """A peer that has averaged so many epochs, with whom."""
    lineage = Lineage()
    for epochs, company in lives:
        for epoch in epochs:
            label = label_of(epoch, company, everybody)
            lineage.averaged(epoch, label, len(PEERS) if epoch in lost else 0)
    return lineage


def test_views_that_differ_in_a_peer_seldom_differ_in_the_label() -> None:
    without = [peer for peer in PEERS if peer != PEERS[7]]
    differ = sum(
        label_of(e, PEERS, everybody) != label_of(e, without, everybody) for e in range(400)
    )
    assert 0 < differ < 40  # 400 / 40 are expected


def test_who_is_gone_makes_no_label() -> None:
    gone = PEERS[3]
    without = [peer for peer in PEERS if peer != gone]
    for epoch in range(100):
        seen = label_of(epoch, PEERS, lambda peer: peer != gone)
        assert seen == label_of(epoch, without, everybody)


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(2, 60), st.integers(2, 60), st.integers(1, 39))
def test_sides_find_where_they_parted(common: int, mine: int, theirs: int, cut: int) -> None:
    """Losses are noticed in the epoch of the cut; however long ago that is."""
    start = (range(common), PEERS)
    one = lived(start, (range(common, common + mine), PEERS[:cut]), lost=(common,))
    other = lived(start, (range(common, common + theirs), PEERS[cut:]), lost=(common,))
    for here, there in ((one, other), (other, one)):
        fork = here.compare(there.shown())
        assert fork is not None
        # Labels of two bytes are the same by chance, once in a long while.
        assert fork.first in (common, common + 1)
        assert fork.depth >= 1


def test_who_only_stood_still_has_not_parted() -> None:
    long, short = lived((range(90), PEERS)), lived((range(30), PEERS))
    assert long.compare(short.shown()) is None
    assert short.compare(long.shown()) is None
    assert long.leads(short.shown())
    assert not short.leads(long.shown())


def test_who_has_merged_is_one_side_again() -> None:
    one = lived((range(5), PEERS), (range(5, 9), PEERS[:20]), (range(9, 11), PEERS))
    other = lived((range(5), PEERS), (range(5, 7), PEERS[20:]), (range(9, 11), PEERS))
    assert one.compare(other.shown()) is None


def test_sides_that_never_met_share_nothing() -> None:
    one, other = lived((range(4), PEERS[:20])), lived((range(4), PEERS[20:]))
    assert one.compare(other.shown()) == Fork(0, 3)


def test_what_was_given_since_is_counted() -> None:
    lineage = Lineage()
    for epoch in range(10):
        lineage.gave(epoch, 2.0 + epoch)
    lineage.gave(9, 1.0)
    assert lineage.since(8) == 10.0 + 11.0 + 1.0
    assert lineage.since(10) == 0.0


def test_everything_has_a_limit() -> None:
    lineage = lived((range(REMEMBERED_MAX + 100), PEERS[:3]), lost=tuple(range(0, 4000, 100)))
    for epoch in range(REMEMBERED_MAX + 100):
        lineage.gave(epoch, 1.0)
    assert lineage.since(0) == REMEMBERED_MAX
    shown = lineage.shown()
    assert len(shown) <= SHOWN_MAX * ENTRY_BYTES
    assert lineage_flaw(shown) is None
    assert lineage.compare(lived((range(100), PEERS[:3])).shown()) is None, "that is forgotten"


@given(st.binary(max_size=200))
def test_whatever_a_peer_shows_is_judged(shown: bytes) -> None:
    lineage = lived((range(20), PEERS))
    if lineage_flaw(shown) is None:
        lineage.compare(shown)
        lineage.leads(shown)
    else:
        assert len(shown) % ENTRY_BYTES or len(shown) > SHOWN_MAX * ENTRY_BYTES
