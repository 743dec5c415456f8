"""Who gets results from this seat, and from whom this seat gets those that it lacks.

A result goes once to each seat that is served: *pushed* by the seat that reduces its part, or
sent because the seat *wants* it. What is wanted and not here yet is sent when it comes. A new
`Want` of a seat replaces the one before.
"""

from __future__ import annotations

from moshpit.protocol.machine import SendResult
from moshpit.protocol.round import Round
from moshpit.protocol.seating import bits
from moshpit.wire.messages import Want, pack_mask, unpack_mask

SERVED_FACTOR = 3  # guess: how many times a seat may be sent the whole vector


class Serving:
    """The traffic of results of one round at one seat."""

    def __init__(self, state: Round) -> None:
        self._round = state
        size = state.seating.size
        self._pushed = [0] * size
        self._wanted = [0] * size
        self._budget = [SERVED_FACTOR * state.ledger.all.bit_count()] * size
        self.asked = [0] * size
        """For each seat, the chunks that we asked it for."""
        self._helper: int | None = None
        self._helped_at = 0.0

    # --- giving ---------------------------------------------------------------------------

    def push(self, seat: int, chunks: int) -> None:
        """Send a seat these results, except those that it was sent before."""
        new = chunks & self._round.ledger.have & ~self._pushed[seat]
        self._pushed[seat] |= new
        self._wanted[seat] &= ~new
        for chunk in bits(new):
            self._send(seat, chunk)

    def want(self, seat: int, chunks: bytes) -> None:
        """A seat wants these chunks: send what is here, and the rest when it comes."""
        ledger = self._round.ledger
        wanted = unpack_mask(chunks) & ledger.all & ~self._pushed[seat]
        self._wanted[seat] = wanted & ~ledger.have
        for chunk in bits(wanted & ledger.have):
            self._serve(seat, chunk)

    def came(self, chunk: int) -> None:
        """A result is here: send it to those who wanted it."""
        for seat in self._round.seating.order:
            self.asked[seat] &= ~(1 << chunk)
            if self._wanted[seat] >> chunk & 1:
                self._wanted[seat] &= ~(1 << chunk)
                self._serve(seat, chunk)

    def gone(self, seat: int) -> None:
        """What is queued for a seat has been taken back; it is asked for nothing any more."""
        self._pushed[seat] = 0
        self._wanted[seat] = 0
        self.asked[seat] = 0
        if self._helper == seat:
            self._helper = None

    def _serve(self, seat: int, chunk: int) -> None:
        if self._budget[seat] > 0:
            self._budget[seat] -= 1
            self._send(seat, chunk)

    def _send(self, seat: int, chunk: int) -> None:
        result = self._round.ledger.results[chunk]
        assert result is not None
        peer = self._round.seating.peers[seat]
        ballot, mass, seats, reach = result
        group = self._round.group
        self._round.out.append(SendResult(peer, group, chunk, ballot, mass, seats, reach))

    # --- getting --------------------------------------------------------------------------

    def ask(self, seat: int, chunks: int) -> None:
        """Ask a seat for results, on top of what it was asked for before."""
        state = self._round
        self.asked[seat] = (self.asked[seat] | chunks) & state.ledger.lacking
        state.send(seat, Want(state.group, pack_mask(self.asked[seat])))

    def forget(self, chunks: int) -> None:
        """Take no result of these chunks for having been asked for."""
        for seat in range(self._round.seating.size):
            self.asked[seat] &= ~chunks

    def seek(self, chunks: int, prefer: int, now: float) -> None:
        """See to it that one groupmate is asked for these chunks, which nobody pushes to us.

        It is kept as long as results come from it; otherwise the next one is asked.

        Args:
            chunks: a bit mask.
            prefer: seats that are known to be served by the reducer; asked before others.
        """
        state, helper = self._round, self._helper
        if not chunks:
            self._helper = None
            return
        if helper is not None and not chunks & ~self.asked[helper]:
            if now - self._helped_at < state.config.stall_s:
                return
        elif helper is not None and now - self._helped_at < state.config.stall_s:
            self.ask(helper, chunks)
            return
        choice = self._next_helper(helper, prefer)
        if choice is None:
            return
        if helper is not None and helper != choice and state.seating.servers >> helper & 1:
            self.asked[helper] &= ~chunks
            state.send(helper, Want(state.group, pack_mask(self.asked[helper])))
        self._helper, self._helped_at = choice, now
        self.ask(choice, chunks)

    def helped(self, seat: int, now: float) -> None:
        """A result came from a seat."""
        if seat == self._helper:
            self._helped_at = now

    def _next_helper(self, last: int | None, prefer: int) -> int | None:
        seating = self._round.seating
        servers = seating.servers & seating.present
        pool = list(seating.seats(servers & prefer)) or list(seating.seats(servers))
        if not pool:
            return None
        later = seating.order[seating.order.index(last) + 1 :] if last is not None else ()
        return next((seat for seat in later if seat in pool), pool[0])
