"""What the parts of one round's machine share: seats, ledger, ballots, and the effects to be."""

from __future__ import annotations

from collections.abc import Sequence

from moshpit.config import RoundConfig
from moshpit.events import Notice
from moshpit.protocol.ledger import Ledger
from moshpit.protocol.machine import CancelSends, Effect, Emit, Send
from moshpit.protocol.seating import Seating
from moshpit.types import GroupId
from moshpit.wire.messages import GroupFormed, Message, Refusal

DETAIL_MAX = 200  # guess: characters of a peer's words that go into a notice


class Round:
    """The state of one round at one seat, without behaviour of its own.

    Args:
        formed: the announcement, already judged.
        seat: this peer's seat.
        masses: for each chunk, the mass behind this peer's value.
        config: settings.
        now: when the round began here.
    """

    def __init__(
        self,
        formed: GroupFormed,
        seat: int,
        masses: Sequence[float],
        config: RoundConfig,
        now: float,
    ) -> None:
        self.formed = formed
        self.group = GroupId(formed.group)
        self.config = config
        self.started = now
        self.deadline = now + formed.deadline_s
        columns = formed.columns
        self.base_s = formed.deadline_s - (0.0 if columns is None else columns.hold_s)
        """How long the round may last apart from what its columns may take."""
        self.seating = Seating(formed, seat, now)
        self.ledger = Ledger(formed, self.seating, masses)
        self.out: list[Effect] = []
        self.base = [self._first_ballot(part) for part in range(self.seating.size)]
        """For each part, the ballot of its first reducer."""
        self.ballot = list(self.base)
        """For each part, the highest ballot that this seat has promised to."""
        self.bad = 0
        """The seats that sent something unusable: they contribute nothing more here."""
        self.ended = False

    def needs_s(self, seat: int) -> float:
        """Return how long a seat needs for what it sends, by what it has announced: until its
        vector is complete, and by its bandwidth, for its slices of the others' parts, and its own
        part's mean to all (paper.md §3)."""
        join, bounds = self.formed.joins[seat], self.ledger.bounds
        if not join.bandwidth > 0:
            return join.fill_s
        share = (bounds[seat + 1] - bounds[seat]) / (bounds[-1] - bounds[0])
        return (
            join.fill_s
            + (1 + max(0, self.seating.size - 2) * share) * join.vector_bytes / join.bandwidth
        )

    def _first_ballot(self, part: int) -> int:
        ballots = range(self.seating.size)
        return next((b for b in ballots if self.seating.reducers >> self.reducer(part, b) & 1), 0)

    def reducer(self, part: int, ballot: int) -> int:
        """Return the seat that reduces a part at a ballot."""
        return (part + ballot) % self.seating.size

    def acting(self, part: int) -> int:
        """Return the seat that reduces a part now, as far as this seat has promised."""
        return self.reducer(part, self.ballot[part])

    def before(self, part: int, ballot: int) -> int:
        """Return the seats (a bit mask) that reduce the part at lower ballots."""
        seats = sum(1 << self.reducer(part, b) for b in range(ballot))
        return seats & self.seating.reducers

    @property
    def weighs(self) -> bool:
        """Whether this seat contributes."""
        return bool(self.seating.weighers >> self.seating.me & 1)

    @property
    def contributors(self) -> int:
        """The other seats from which contributions can still come."""
        return self.seating.weighers & self.seating.alive & ~self.bad

    def send(self, seat: int, message: Message) -> None:
        """Send a control message to a seat."""
        self.out.append(Send(self.seating.peers[seat], message))

    def notice(self, code: str, seat: int | None, detail: str = "") -> None:
        """Tell people."""
        peer = None if seat is None else self.seating.peers[seat]
        self.out.append(Emit(Notice(code, peer, detail[:DETAIL_MAX])))

    def refuse(self, seat: int, reason: str, detail: str) -> None:
        """Refuse something of a seat: it is told, people are told, the report names it."""
        if self.ledger.blame(seat, reason, detail[:DETAIL_MAX]):
            self.send(seat, Refusal(self.group, reason, detail[:DETAIL_MAX]))
            self.notice(reason, seat, detail)

    def cancel(self, seat: int) -> None:
        """Take back what is queued for a seat."""
        self.out.append(CancelSends(self.seating.peers[seat], self.group))
