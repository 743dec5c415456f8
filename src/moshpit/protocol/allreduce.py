"""Group all-reduce: one object is one round at one seat (docs/internals/protocol.md).

Theory of operation. The vector is cut into parts, one a seat; everybody sends its slice of part
j to the seat that reduces it, chunk by chunk, and gets the mean back. Nothing here touches
values: contributions and results are named by chunk, and the effects say what to do with them.

- Nobody sends chunks before the receiver has been heard: a `Beat` is the permission.
- A chunk is finished as soon as nobody can add to it any more. Seats that are lost, that lag, or
  that sent something unusable are not waited for; the result says whose contributions it has.
- A part whose reducers are all lost changes hands (`takeover.py`).
- In a row of the torus a seat *holds* its part until its column has had it (`holding.py`).
- A seat that nobody pushes results to, because its link to a reducer is cut or because others
  hold it for lost, asks groupmates for them (`serving.py`).
- The round ends when every chunk has its result, when nobody else is left, or at the deadline;
  then the object stays to serve others, until all are done or lost.

The timers run on the heartbeat: whatever waits is looked at once in `heartbeat_s`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from moshpit.config import RoundConfig
from moshpit.events import Reach, RoundReport
from moshpit.protocol.holding import Holding
from moshpit.protocol.ledger import Result
from moshpit.protocol.machine import (
    ChunkArrived,
    CloseRound,
    Effect,
    Event,
    LinkDown,
    Received,
    RoundEnded,
    SendContribution,
    Signer,
    Silent,
    TakeResult,
    Tick,
)
from moshpit.protocol.patience import Patience
from moshpit.protocol.reduction import MASS_MAX, Reductions
from moshpit.protocol.round import Round
from moshpit.protocol.seating import bits
from moshpit.protocol.serving import Serving
from moshpit.protocol.takeover import Takeovers
from moshpit.types import GroupId, PeerId, short
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import (
    Beat,
    GroupAsk,
    GroupFormed,
    Held,
    MemberDone,
    Redo,
    Refusal,
    RoundOver,
    Takeover,
    Want,
)


class AllReduce:
    """A round of this peer's. Implements `moshpit.protocol.machine.Machine`.

    Args:
        formed: the announcement, already judged (`announcement.formed_flaw`).
        seat: this peer's seat.
        masses: for each chunk, the mass behind this peer's value; 0 only takes.
        signer: the peer's keys.
        config: settings.
        now: seconds.

    Attributes:
        group: the round's id.
        ended: the report is out; the object only serves others.
        closed: nobody needs it any more.
        report: the report, once it has ended.
        masses_after: for each chunk, the mass behind this peer's value after the round.
        news: the chunks whose results came since somebody cleared it.
    """

    def __init__(  # noqa: PLR0917 - all of them are needed, and in this order everywhere
        self,
        formed: GroupFormed,
        seat: int,
        masses: Sequence[float],
        signer: Signer,
        config: RoundConfig,
        now: float,
    ) -> None:
        assert formed.joins[seat].peer == signer.peer, "this seat is somebody else's"
        assert formed.bounds[-1] <= len(masses), "masses for another vector"
        state = Round(formed, seat, masses, config=config, now=now)
        self.group: GroupId = state.group
        self.closed = False
        self.report: RoundReport | None = None
        self.masses_after: list[float] = list(masses)
        self.news: list[int] = []
        self._round = state
        self._seating = state.seating
        self._ledger = state.ledger
        self._serving = Serving(state)
        self._holding = Holding(state, self._keep)
        self._reductions = Reductions(state, self._holding.made)
        self._takeovers = Takeovers(state, self._serving, self._reductions)
        self._patience = Patience(state, self._serving, self._takeovers, self._holding, self._lose)
        self._told_lost = 0
        self._next_beat = now + config.heartbeat_s

    @property
    def ended(self) -> bool:
        """Whether the report is out."""
        return self._round.ended

    @property
    def wakeup(self) -> float | None:
        """When a `Tick` is due."""
        if self.closed:
            return None
        last = self._close_at if self.ended else self._round.deadline
        return min(self._next_beat, last)

    @property
    def _close_at(self) -> float:
        return self._round.deadline + self._round.config.linger_s

    # --- what the node calls --------------------------------------------------------------

    def start(self, now: float) -> list[Effect]:
        """Begin; call once, before anything else."""
        state, seating = self._round, self._seating
        pointless = seating.size == 1 or not seating.weighers or not seating.reducers
        if pointless and state.formed.columns is None:
            self._end(now)
        else:
            for seat in seating.seats(seating.others):
                self._beat(seat)
            for part in self._ledger.parts:
                if state.acting(part) == seating.me:
                    self._reductions.begin(part, state.base[part], self._ledger.mask(part), now)
        return self._finish(now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        if self.closed:
            return []
        match event:
            case Tick():
                if now >= self._next_beat:
                    self._heartbeat(now)
            case LinkDown(peer=peer, detail=detail):
                self._link_down(peer, detail, now)
            case Received(peer=peer):
                self._received(event, now)
            case ChunkArrived():
                self._arrived(event, now)
            case _:
                pass
        return self._finish(now)

    def lost(self, seat_or_peer: int | PeerId, now: float) -> list[Effect]:
        """Take what membership says: this groupmate is dead or cannot be reached.

        Life seen in this round within the last two heartbeats is stronger. Of a client that has
        not come yet nobody can know; silence will tell.
        """
        if self.closed:
            return []
        seat = (
            seat_or_peer if isinstance(seat_or_peer, int) else self._seating.seat_of[seat_or_peer]
        )
        recently = self._seating.heard[seat] > now - 2 * self._round.config.heartbeat_s
        if self._seating.can_send(seat) and not (recently and self._seating.present >> seat & 1):
            self._lose(seat, "dead", "its death is known", now)
        return self._finish(now)

    # --- the torus schedule ---------------------------------------------------------------

    @property
    def holding(self) -> Holding:
        """What this seat holds until its column has had it."""
        return self._holding

    def made(self, chunk: int) -> tuple[Result, bool, bool]:
        """Return a chunk's result, whether this seat's contribution is in it, and whether that
        of everybody who weighs is."""
        result = self._ledger.results[chunk]
        assert result is not None, f"chunk {chunk} has no result yet"
        weighers = self._seating.weighers
        mine = bool(result.seats >> self._seating.me & 1)
        return result, mine, result.seats == (weighers if result.mass > 0 else 0)

    def release(self, found: Sequence[tuple[int, GroupId, Result]], now: float) -> list[Effect]:
        """Let held chunks go with what the column made of them."""
        for chunk, source, result in found:
            self._holding.release(chunk, source, result)
        return self._finish(now)

    def release_all(self, now: float) -> list[Effect]:
        """Let everything go that is still held: the row's means stand."""
        self._holding.close()
        return self._finish(now)

    def stop(self, now: float) -> list[Effect]:
        """End the round with what is there."""
        if not self.ended:
            self._end(now)
        return self._finish(now)

    # --- who is there ---------------------------------------------------------------------

    def _beat(self, seat: int) -> None:
        if self._seating.can_send(seat):
            self._round.send(seat, Beat(self.group))

    def _heard(self, seat: int, now: float) -> bool:
        """Note a sign of life; False if this seat is lost, which it is told once."""
        seating = self._seating
        seating.heard[seat] = now
        if not seating.others >> seat & 1:
            return False
        if (seating.lost | seating.over) >> seat & 1:
            if not self._told_lost >> seat & 1:
                self._told_lost |= 1 << seat
                self._round.send(seat, Refusal(self.group, "lost", "you were silent too long"))
            return False
        if not seating.present >> seat & 1:
            seating.present |= 1 << seat
            seating.present_at[seat] = now
            self._patience.came(seat, now)
            self._beat(seat)
            self._greet(seat)
        return bool(seating.alive >> seat & 1)

    def _greet(self, seat: int) -> None:
        """A seat has come: it may be sent chunks from now on."""
        state = self._round
        if state.ended:
            state.send(seat, MemberDone(self.group))
        elif state.weighs:
            for part in self._ledger.parts:
                if state.acting(part) == seat and state.ballot[part] == state.base[part]:
                    self._contribute(seat, part, state.ballot[part], self._ledger.mask(part))
        for part in self._ledger.parts:
            if state.acting(part) == self._seating.me and part not in self._takeovers.bids:
                self._serving.push(seat, self._ledger.mask(part))
        self._takeovers.greet(seat)

    def _lose(self, seat: int, reason: str, detail: str, now: float) -> None:
        """Count on a seat no more."""
        seating = self._seating
        if not seating.servers >> seat & 1:
            return
        seating.lost |= 1 << seat
        if not (seating.done | seating.estranged) >> seat & 1:
            self._ledger.blame(seat, reason, detail)
            self._round.notice("lost", seat, f"{reason}: {detail}")
        self._part_from(seat, now)

    def _part_from(self, seat: int, now: float) -> None:
        self._patience.parted(seat, now)
        self._round.cancel(seat)
        self._serving.gone(seat)
        self._after_loss(now)

    def _after_loss(self, now: float) -> None:
        """Somebody is not waited for any more: see what this sets free."""
        seating = self._seating
        if not seating.alive and seating.servers:
            self._takeovers.give_up()
            if not self._holding.complete:
                self._holding.close()
        if seating.alive:
            self._reductions.settle()
        self._takeovers.answer()
        self._takeovers.check(now)

    def _link_down(self, peer: PeerId, detail: str, now: float) -> None:
        seat = self._seating.seat_of.get(peer)
        # A client that has not come yet cannot be dialled; that says nothing about it.
        if seat is not None and self._seating.can_send(seat):
            self._lose(seat, "link-down", detail, now)

    # --- messages -------------------------------------------------------------------------

    def _received(self, event: Received, now: float) -> None:
        state, message = self._round, event.message
        seat = self._seating.seat_of.get(event.peer)
        if seat is None or seat == self._seating.me:
            self._stranger(event.peer, type(message).__name__)
            return
        if isinstance(message, RoundOver):
            self._over(seat, now)
            return
        if isinstance(message, GroupAsk):
            state.send(seat, state.formed)  # it is not in the round yet: no permission to send
            return
        partner = self._heard(seat, now)
        match message:
            case Want(chunks=chunks):
                self._serving.want(seat, chunks)
            case MemberDone():
                self._seating.done |= 1 << seat
            case Refusal(reason="lost"):
                self._estranged(seat, now)
            case Refusal(reason=reason, detail=detail):
                state.notice("refused", seat, f"{reason}: {detail}")
            case Takeover() if partner:
                self._takeover(seat, message, now)
            case Held() if partner:
                self._takeovers.held(seat, message, now)
            case Redo() if partner:
                self._redo(seat, message)
            case _:
                pass

    def _stranger(self, peer: PeerId, what: str) -> None:
        self._round.notice("stranger", None, f"{what} from {short(peer)}, who is not in the group")

    def _over(self, seat: int, now: float) -> None:
        """A seat has nothing to do with this round any more."""
        seating = self._seating
        if not seating.servers >> seat & 1:
            return
        seating.over |= 1 << seat
        if not seating.done >> seat & 1:
            self._ledger.blame(seat, "round-over", "it has left the round")
        self._part_from(seat, now)

    def _estranged(self, seat: int, now: float) -> None:
        """A seat holds us for lost."""
        if not self._seating.alive >> seat & 1:
            return
        self._seating.estranged |= 1 << seat
        self._round.notice("estranged", seat, "it holds this peer for lost")
        self._part_from(seat, now)

    def _takeover(self, seat: int, message: Takeover, now: float) -> None:
        if self._takeovers.supersedes_us(seat, message):
            self._estranged(seat, now)
            return
        flaw = self._takeovers.asked(seat, message)
        if flaw:
            self._round.refuse(seat, "bad-message", flaw)

    def _redo(self, seat: int, message: Redo) -> None:
        if not self._round.ended and self._round.weighs:
            chunks = self._takeovers.redo(seat, message)
            self._contribute(seat, message.part, message.ballot, chunks)

    # --- contributions --------------------------------------------------------------------

    def _contribute(self, seat: int, part: int, ballot: int, chunks: int) -> None:
        peer, own = self._seating.peers[seat], self._ledger.own
        for chunk in bits(chunks):
            self._round.out.append(SendContribution(peer, self.group, chunk, ballot, own[chunk]))

    def _arrived(self, event: ChunkArrived, now: float) -> None:
        header = event.header
        seat = self._seating.seat_of.get(event.peer)
        if seat is None or seat == self._seating.me:
            self._stranger(event.peer, "a chunk")
            return
        partner = self._heard(seat, now)
        self._patience.chunk(seat, now)
        if header.kind is ChunkKind.RESULT:
            self._result(seat, header, event.fault, now)
        elif header.kind is not ChunkKind.CONTRIBUTION or not self._ledger.knows(header.chunk):
            self._refuse_sender(seat, "bad-chunk", f"chunk {header.chunk}")
        elif partner:
            flaw = self._reductions.contribution(seat, header, event.fault, now)
            if flaw:
                detail = f"chunk {header.chunk}, ballot {header.ballot}, mass {header.mass}"
                self._refuse_sender(seat, flaw, detail)

    def _refuse_sender(self, seat: int, reason: str, detail: str) -> None:
        """Rule 4: its contributions are not used any more; what is in stays in."""
        self._round.refuse(seat, reason, detail)
        if not self._round.bad >> seat & 1:
            self._round.bad |= 1 << seat
            self._reductions.settle()

    # --- results --------------------------------------------------------------------------

    def _result(self, seat: int, header: ChunkHeader, fault: str, now: float) -> None:
        state, chunk = self._round, header.chunk
        if state.ended or (chunk >= 0 and self._ledger.have >> chunk & 1):
            return
        flaw = self._result_flaw(header) or (fault if header.mass > 0 else "")
        if flaw:
            state.refuse(seat, flaw, f"result of chunk {chunk}")
            self._lose(seat, flaw, f"result of chunk {chunk}", now)
            return
        part = self._ledger.part_of(chunk)
        asked = bool(self._serving.asked[seat] >> chunk & 1)
        if not asked and state.acting(part) != seat:
            made = state.reducer(part, header.ballot) == seat
            if not made or header.ballot < state.ballot[part]:
                return  # promised to wait for another reducer, or nobody asked for it
        if (self._reductions.todo(part) | self._holding.held) >> chunk & 1:
            return  # it is reduced afresh here, or was and is held
        if header.mass > 0:
            state.out.append(TakeResult(self.group, chunk))
        self._serving.helped(seat, now)
        self._keep(chunk, Result(header.ballot, header.mass, header.seats, header.reach))

    def _result_flaw(self, header: ChunkHeader) -> str:
        """Return what is wrong with a result's header, as a code."""
        state, mass, seats = self._round, header.mass, header.seats
        if not self._ledger.knows(header.chunk):
            return "bad-chunk"
        part = self._ledger.part_of(header.chunk)
        if not 0 <= header.ballot < self._seating.size:
            return "bad-ballot"
        if not self._seating.reducers >> state.reducer(part, header.ballot) & 1:
            return "bad-ballot"
        columns = state.formed.columns
        sources = max(self._seating.size, 0 if columns is None else columns.rows)
        if not (math.isfinite(mass) and 0 <= mass <= MASS_MAX * sources):
            return "bad-mass"
        if not 0 <= header.reach <= (Reach.ROW if columns is None else Reach.ALL):
            return "bad-reach"
        # A column's mean may be without this row's.
        unnamed = mass > 0 and not seats and not header.reach
        if seats < 0 or seats & ~self._seating.weighers or unnamed or (seats and not mass > 0):
            return "bad-seats"
        return ""

    def _keep(self, chunk: int, result: Result) -> None:
        """A result is here: note it, and send it to whom it is owed."""
        state, part = self._round, self._ledger.part_of(chunk)
        self._ledger.keep(chunk, result)
        self.news.append(chunk)
        if state.acting(part) == self._seating.me:
            if part in self._takeovers.bids:
                self._takeovers.offer(chunk)
            else:
                for seat in self._seating.seats(self._seating.alive & self._seating.present):
                    self._serving.push(seat, 1 << chunk)
        self._serving.came(chunk)

    # --- time -----------------------------------------------------------------------------

    def _heartbeat(self, now: float) -> None:
        config, seating = self._round.config, self._seating
        late = now - self._next_beat
        if late > config.heartbeat_s:
            # This peer did not run; that the others were not heard meanwhile says nothing.
            seating.heard = [at + late for at in seating.heard]
        self._next_beat = now + config.heartbeat_s
        listeners = seating.alive & ~seating.done if self.ended else seating.alive
        for seat in seating.seats(listeners):
            if now - seating.heard[seat] > config.stall_s:
                self._lose(seat, "silent", f"for {now - seating.heard[seat]:.2f} s", now)
                self._round.out.append(Silent(seating.peers[seat]))
        for seat in seating.seats(listeners & seating.alive):
            self._beat(seat)
        if not self.ended:
            self._reductions.cut_laggards(now)
            self._patience.check(now)
            self._holding.check(now)

    # --- the end --------------------------------------------------------------------------

    def _finish(self, now: float) -> list[Effect]:
        """End and close if it is time; return the effects."""
        state, seating = self._round, self._seating
        if not state.ended:
            if not seating.servers:
                self._alone(now)
            elif not self._ledger.lacking or now >= state.deadline:
                self._end(now)
        if state.ended and not self.closed:
            partners = seating.alive & ~seating.done
            if not partners or now >= self._close_at:
                self.closed = True
                state.out.append(CloseRound(self.group))
        out, state.out = state.out, []
        return out + self._holding.take()

    def _alone(self, now: float) -> None:
        """Nobody else is left: finish what holds others' contributions, and end; but not
        before the column has had what is due to it."""
        self._reductions.settle_alone(self._holding.chunks)
        if not self._holding.complete or now >= self._round.deadline:
            self._end(now)

    def _end(self, now: float) -> None:
        state, seating = self._round, self._seating
        self._holding.close()
        self._reductions.drop()
        state.ended = True
        self.report = self._ledger.report(now - state.started)
        self.masses_after = self._ledger.masses_after()
        state.out.append(RoundEnded(self.report))
        for seat in seating.seats(seating.alive & seating.present):
            state.send(seat, MemberDone(self.group))
