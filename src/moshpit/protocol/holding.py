"""What a seat of a torus row holds: its part's means, until its column has had them.

A chunk that this seat has reduced as the part's first reducer, and that is to go up its column,
is *held*: it is no result yet, nobody is sent it, nobody takes it from here. When all of them
are reduced the node is told (`PartReduced`), and looks for the column. A held chunk is
*released* (`AdoptResult`) with what the column says, or with the row's own mean if there is no
such thing; then it is a result like others. Nothing is held longer than the announcement allows.

Who takes a part over from a holder that is lost holds nothing: the row's mean stands there.
"""

from __future__ import annotations

from collections.abc import Callable

from moshpit.protocol.ledger import Result
from moshpit.protocol.machine import AdoptResult, Effect, HoldOver, PartReduced
from moshpit.protocol.round import Round
from moshpit.protocol.seating import bits, span
from moshpit.types import GroupId


class Holding:
    """What one seat holds in one round; nothing where the round is no torus row.

    Args:
        state: the round.
        keep: takes a chunk's result when it is released.

    Attributes:
        chunks: the bit mask of what is to be held and was not released yet.
    """

    def __init__(self, state: Round, keep: Callable[[int, Result], None]) -> None:
        self._round = state
        self._keep = keep
        columns = state.formed.columns
        self._span = span(*columns.spans[state.seating.me]) if columns is not None else 0
        self.chunks = self._span
        self._until = state.started + columns.hold_s if columns is not None else 0.0
        self._held: dict[int, Result] = {}
        self._for_node: list[Effect] = []

    @property
    def held(self) -> int:
        """The bit mask of the chunks that are held now."""
        return sum(1 << chunk for chunk in self._held)

    @property
    def complete(self) -> bool:
        """Whether there is something to hold, and all of it is reduced."""
        return bool(self.chunks) and len(self._held) == self.chunks.bit_count()

    def result(self, chunk: int) -> Result:
        """Return the row's own result of a chunk that is held."""
        return self._held[chunk]

    def made(self, chunk: int, result: Result) -> None:
        """A chunk was reduced here: hold it, or keep it."""
        state = self._round
        first = result.ballot == state.base[state.ledger.part_of(chunk)]
        if not first or not self._span >> chunk & 1:
            self._keep(chunk, result)
            return
        self._held[chunk] = result
        if not self.chunks >> chunk & 1:
            self.release(chunk, None, result)  # it is too late to go up
        elif self.complete:
            self._for_node.append(PartReduced(state.group))

    def check(self, now: float) -> None:
        """See whether it is held for too long."""
        if self.chunks and now >= self._until:
            self._for_node.append(HoldOver(self._round.group))

    def take(self) -> list[Effect]:
        """Return what the node is to be told, after all else that has come of an event: the
        round may end in consequence."""
        told, self._for_node = self._for_node, []
        return told

    def release(self, chunk: int, source: GroupId | None, result: Result) -> None:
        """Let a held chunk go; does nothing if it has gone.

        Args:
            chunk: which.
            source: the column that made the result; None: the row.
            result: with the row's ballot.
        """
        if self._held.pop(chunk, None) is None:
            return
        self.chunks &= ~(1 << chunk)
        ballot, mass, seats, reach = result
        if mass > 0:
            group = self._round.group
            self._round.out.append(AdoptResult(group, chunk, source, ballot, mass, seats, reach))
        self._keep(chunk, result)

    def close(self) -> None:
        """Let everything go as it is, and hold nothing any more."""
        for chunk in bits(self.held):
            self.release(chunk, None, self._held[chunk])
        self.chunks = 0
