"""By which plan a host seats its groups, when the swarm changes while it averages."""

from __future__ import annotations

from moshpit.protocol import grid
from moshpit.protocol.ranking import Rankings, ranked
from moshpit.wire.messages import GroupKey

from .harness_matchmaking import SCHEMA, StaticView, peer_id, record

SIZE = 4
PEERS = [peer_id(number) for number in range(20)]
LATER = GroupKey(7, 1, (0, 0))


def test_later_axes_are_planned_as_the_rows_were() -> None:
    view = StaticView(PEERS[0], [record(peer) for peer in PEERS])
    rankings = Rankings(view, SIZE)
    begun = ranked(view, SCHEMA, 7, SIZE)
    assert begun is not None
    rankings.begin(7, SCHEMA, begun)
    view.learn(record(peer_id(99)))
    now = ranked(view, SCHEMA, 7, SIZE)
    assert now is not None
    assert (begun[0].n, now[0].n) == (20, 21)
    assert rankings.of(LATER, SCHEMA) is begun
    assert rankings.of(LATER, b"other") is None, "nobody else has that schema"
    for key in (GroupKey(7, 0, (0,)), GroupKey(7, 1, (0, 0), (0, 4))):
        assert rankings.of(key, SCHEMA) == now, "rows, and columns of the torus, by the view"
    other = rankings.of(GroupKey(8, 1, (0, 0)), SCHEMA)
    assert other is not None
    assert other[1] == grid.order([*PEERS, peer_id(99)], 8)


def test_who_has_not_begun_goes_by_its_view() -> None:
    view = StaticView(PEERS[0], [record(peer) for peer in PEERS])
    rankings = Rankings(view, SIZE)
    assert rankings.of(LATER, SCHEMA) == ranked(view, SCHEMA, 7, SIZE)
    assert rankings.of(LATER, SCHEMA) is rankings.of(LATER, SCHEMA), "planned once"
