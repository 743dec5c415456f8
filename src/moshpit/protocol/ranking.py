"""Who has which rank of the grid's plan, as a host sees it (docs/internals/protocol.md "Grid")."""

from __future__ import annotations

from moshpit.protocol import grid
from moshpit.protocol.machine import View
from moshpit.types import PeerId
from moshpit.wire.messages import GroupKey

Ranking = tuple[grid.Plan, list[PeerId]]


def ranked(view: View, schema: bytes, epoch: int, group_size: int) -> Ranking | None:
    """Return the plan for the live peers of a schema, and who has which rank; None: no peers."""
    peers = view.averaging(schema)
    return grid.arrange(peers, epoch, group_size, view.dialable) if peers else None


class Rankings:
    """The plan of the view as it is, and of the view as it was when this peer began to average.

    The rows of an epoch send their members to later axes by the plan that all began with. A host
    that planned a later axis by a view in which somebody has died since would send members where
    no row counts on them: a plan of one peer less cuts other rows and columns.

    Args:
        view: the swarm.
        group_size: M.
    """

    def __init__(self, view: View, group_size: int) -> None:
        self._view = view
        self._group_size = group_size
        self._now: Ranking | None = None
        self._now_of: tuple[int, int, bytes] | None = None
        self._begun: Ranking | None = None
        self._begun_of: tuple[int, bytes] | None = None

    def begin(self, epoch: int, schema: bytes, ranking: Ranking) -> None:
        """This peer begins to average by this plan."""
        self._begun, self._begun_of = ranking, (epoch, schema)

    def of(self, key: GroupKey, schema: bytes) -> Ranking | None:
        """Return the plan by which the group of a key meets, and who has which rank.

        Columns of the torus are planned by the view as it is: their rows have replaced the dead.
        """
        if key.axis > 0 and not key.span and self._begun_of == (key.epoch, schema):
            return self._begun
        wanted = (key.epoch, self._view.generation, schema)
        if self._now_of != wanted:  # a cache for as long as the view does not change
            self._now = ranked(self._view, schema, key.epoch, self._group_size)
            self._now_of = wanted
        return self._now
