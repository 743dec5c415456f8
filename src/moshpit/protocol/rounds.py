"""The rounds that a peer has open, and what it says of those that it has not."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from moshpit.protocol.climb import RunningRound
from moshpit.protocol.machine import ChunkArrived, Effect, Received, Send, View
from moshpit.types import GroupId, PeerId
from moshpit.wire.messages import Beat, GroupAsk, GroupKey, RoundMessage, RoundOver, Takeover, Want

CLOSED_KEPT = 64  # guess: how many finished groups are remembered, to answer RoundOver


class OpenRounds:
    """Rounds by group, until nobody needs them any more."""

    def __init__(self) -> None:
        self._open: OrderedDict[GroupId, RunningRound] = OrderedDict()
        self._closed: OrderedDict[GroupId, None] = OrderedDict()

    def add(self, running: RunningRound) -> None:
        """A round has begun."""
        self._open[running.machine.group] = running

    def get(self, group: bytes) -> RunningRound | None:
        """Return an open round."""
        return self._open.get(GroupId(group))

    def all(self) -> list[RunningRound]:
        """Return the open rounds, oldest first."""
        return list(self._open.values())

    def forget_if_closed(self, running: RunningRound) -> None:
        """Drop a round that has closed itself."""
        group = running.machine.group
        if running.machine.closed and self._open.pop(group, None) is not None:
            self._closed[group] = None
            while len(self._closed) > CLOSED_KEPT:
                self._closed.popitem(last=False)

    def unreachable(self, view: View) -> Iterator[tuple[RunningRound, PeerId]]:
        """Yield the members that are known and cannot be reached, while their round is open."""
        for group, running in list(self._open.items()):
            for join in running.formed.joins:
                known = view.record(join.peer) is not None
                if group in self._open and known and not view.reachable(join.peer):
                    yield running, PeerId(join.peer)

    def answer(self, peer: PeerId, group: bytes, epoch: int) -> Effect:
        """Answer who asks what a group is."""
        running = self.get(group)
        return Send(peer, RoundOver(group, epoch) if running is None else running.formed)

    def stray(
        self, event: Received | ChunkArrived, seeking: GroupKey | None, epoch: int
    ) -> list[Effect]:
        """Answer what is about a round that is not open here."""
        if isinstance(event, ChunkArrived):
            return [Send(event.peer, RoundOver(event.header.group, epoch))]
        message = event.message
        assert isinstance(message, RoundMessage), "no message of a round"
        unknown = GroupId(message.group) not in self._closed
        if isinstance(message, Beat) and unknown and seeking is not None:
            # The host may have died between two announcements; the groupmate has one.
            return [Send(event.peer, GroupAsk(message.group))]
        if isinstance(message, Beat | Takeover | Want):
            return [Send(event.peer, RoundOver(message.group, epoch))]
        return []
