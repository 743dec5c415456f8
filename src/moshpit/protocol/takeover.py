"""What becomes of a part whose reducer is lost: ballots, promises, and what is still held of it.

A seat answers a `Takeover` only when it, too, has lost every earlier reducer of the part, and its
answer is a promise to take no result of a lower ballot any more. So a part changes hands only if
all that are in touch agree, and the new reducer knows all results that anybody holds: it passes
those on as they are, and reduces afresh only what nobody holds. Two seats in touch with each
other never hold different bytes for a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from moshpit.protocol.reduction import Reductions
from moshpit.protocol.round import Round
from moshpit.protocol.serving import Serving
from moshpit.wire.messages import Held, Redo, Takeover, pack_mask, unpack_mask


@dataclass(slots=True)
class Bid:
    """A takeover of a part by this seat.

    Attributes:
        part, ballot: what is taken over.
        started: when.
        told: the seats that were asked; who has not come yet is asked when it comes.
        held: for each seat that has answered (and so promised), the bit mask of its results.
    """

    part: int
    ballot: int
    started: float
    told: int = 0
    held: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def answered(self) -> int:
        """The seats that have answered."""
        return sum(1 << seat for seat in self.held)


class Takeovers:
    """The takeovers of one round, as seen from one seat.

    Args:
        state: the round.
        serving: through which results are fetched and passed on.
        reductions: what this seat reduces; takeovers add to it.
    """

    def __init__(
        self,
        state: Round,
        serving: Serving,
        reductions: Reductions,
    ) -> None:
        self._round = state
        self._serving = serving
        self._reductions = reductions
        self._pleas: dict[tuple[int, int], None] = {}  # (part, ballot), not answered yet
        self.bids: dict[int, Bid] = {}

    # --- at the seats that are asked ------------------------------------------------------

    def asked(self, seat: int, message: Takeover) -> str:
        """Handle a `Takeover`; returns what is wrong with it.

        A seat that takes over what we reduce holds us for lost; the caller sees to that.
        """
        state, part, ballot = self._round, message.part, message.ballot
        if not self._valid(seat, part, ballot) or ballot <= state.base[part]:
            return f"takeover of part {part} at ballot {ballot}"
        if ballot >= state.ballot[part]:
            self._pleas[part, ballot] = None
            self.answer()
        return ""

    def supersedes_us(self, seat: int, message: Takeover) -> bool:
        """Whether a valid `Takeover` is about a part that this seat reduces before the other."""
        if not self._valid(seat, message.part, message.ballot):
            return False
        return bool(self._round.before(message.part, message.ballot) >> self._round.seating.me & 1)

    def _valid(self, seat: int, part: int, ballot: int) -> bool:
        state = self._round
        return (
            part in state.ledger.parts
            and 0 <= ballot < state.seating.size
            and state.reducer(part, ballot) == seat
            and bool(state.seating.reducers >> seat & 1)
        )

    def answer(self) -> None:
        """Promise what can be promised now."""
        state = self._round
        alive = state.seating.alive
        for part, ballot in list(self._pleas):
            seat = state.reducer(part, ballot)
            if ballot < state.ballot[part] or not alive >> seat & 1:
                del self._pleas[part, ballot]
            elif not state.before(part, ballot) & alive:
                del self._pleas[part, ballot]
                state.ballot[part] = ballot
                mask = state.ledger.mask(part)
                self._serving.forget(mask)
                held = pack_mask(state.ledger.have & mask)
                state.send(seat, Held(state.group, part, ballot, held))

    # --- at the seat that takes over ------------------------------------------------------

    def check(self, now: float) -> None:
        """Take over what falls to this seat, and go on with what it has taken over."""
        state = self._round
        seating = state.seating
        if not seating.alive or not seating.reducers >> seating.me & 1:
            return
        undone = seating.alive & ~seating.done
        for part in state.ledger.parts:
            mine = (seating.me - part) % seating.size
            if mine <= state.ballot[part] or state.before(part, mine) & seating.alive:
                continue
            if undone or state.ledger.lacking & state.ledger.mask(part):
                self._bid(part, mine, now)
        for bid in self.bids.values():
            self._proceed(bid, now)

    def _bid(self, part: int, ballot: int, now: float) -> None:
        state = self._round
        lost = state.reducer(part, state.ballot[part])
        state.notice("takeover", lost, f"part {part} at ballot {ballot}")
        state.ballot[part] = ballot
        self._serving.forget(state.ledger.mask(part))
        bid = self.bids[part] = Bid(part, ballot, now)
        for seat in state.seating.seats(state.seating.alive):
            self._tell(bid, seat)

    def _tell(self, bid: Bid, seat: int) -> None:
        state = self._round
        if (state.seating.present & ~bid.told) >> seat & 1:
            bid.told |= 1 << seat
            state.send(seat, Takeover(state.group, bid.part, bid.ballot))

    def greet(self, seat: int) -> None:
        """A seat has come: it is told of the takeovers."""
        for bid in self.bids.values():
            self._tell(bid, seat)

    def held(self, seat: int, message: Held, now: float) -> None:
        """A seat has promised, and says which results it holds."""
        bid = self.bids.get(message.part)
        if bid is None or bid.ballot != message.ballot or seat in bid.held:
            return
        mask = self._round.ledger.mask(bid.part)
        bid.held[seat] = unpack_mask(message.chunks) & mask
        self._serving.push(seat, mask & ~bid.held[seat])
        self._proceed(bid, now)

    def offer(self, chunk: int) -> None:
        """Pass a result of a part that was taken over on to those who have promised."""
        bid = self.bids[self._round.ledger.part_of(chunk)]
        answered = self._round.seating.alive & bid.answered
        for seat in self._round.seating.seats(answered):
            if not bid.held[seat] >> chunk & 1:
                self._serving.push(seat, 1 << chunk)

    def waiting(self, part: int) -> int:
        """Return the seats whose answers about a part are still awaited."""
        bid = self.bids.get(part)
        return 0 if bid is None else self._round.seating.alive & ~bid.answered

    def _proceed(self, bid: Bid, now: float) -> None:
        """When everybody has answered: fetch what somebody holds, reduce the rest."""
        state = self._round
        if state.ended or self.waiting(bid.part):
            return
        ledger = state.ledger
        lacking = ledger.lacking & ledger.mask(bid.part)
        lacking &= ~self._reductions.todo(bid.part)
        alive = list(state.seating.seats(state.seating.alive))
        for seat in alive:
            lacking &= ~(self._serving.asked[seat] & bid.held[seat])
        for seat in alive:
            fetch = lacking & bid.held[seat]
            if fetch:
                lacking &= ~fetch
                self._serving.ask(seat, fetch)
        if lacking:
            chunks = pack_mask(lacking)
            for seat in state.seating.seats(state.contributors):
                state.send(seat, Redo(state.group, bid.part, bid.ballot, chunks))
            self._reductions.begin(bid.part, bid.ballot, lacking, now)

    def redo(self, seat: int, message: Redo) -> int:
        """Return the chunks of which a seat may have our contributions again."""
        state, part = self._round, message.part
        if not self._valid(seat, part, message.ballot) or message.ballot != state.ballot[part]:
            return 0
        return unpack_mask(message.chunks) & state.ledger.mask(part)

    # --- at the seat that is superseded ---------------------------------------------------

    def give_up(self) -> None:
        """Everybody in touch holds this seat for lost: reduce nothing more."""
        self._reductions.drop()
        self.bids.clear()
