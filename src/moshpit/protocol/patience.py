"""How long one seat waits for the reducers of others' parts, and whom it asks instead.

A reducer that is silent is lost by the heartbeat. Here are the two cases in between: one that
lives and makes nothing, and results that nobody is going to push to this seat.
"""

from __future__ import annotations

from collections.abc import Callable

from moshpit.protocol.holding import Holding
from moshpit.protocol.reduction import CUT_SHARE
from moshpit.protocol.round import Round
from moshpit.protocol.serving import Serving
from moshpit.protocol.takeover import Takeovers


class Patience:
    """The waiting of one seat in one round.

    Args:
        state: the round.
        serving: through which results are asked for.
        takeovers: what this seat has taken over.
        holding: what this seat holds.
        lose: counts on a seat no more: (seat, reason, detail, now).
    """

    def __init__(
        self,
        state: Round,
        serving: Serving,
        takeovers: Takeovers,
        holding: Holding,
        lose: Callable[[int, str, str, float], None],
    ) -> None:
        self._round = state
        self._serving = serving
        self._takeovers = takeovers
        self._holding = holding
        self._lose = lose
        now, size = state.started, state.seating.size
        self._had, self._had_at = 0, now  # what was here at the latest heartbeat that saw news
        self._lost_at = [now] * size
        self._chunk_at = [now] * size
        self._gap_s = 0.0  # the longest time between two chunks of one sender

    def came(self, seat: int, now: float) -> None:
        """A seat has entered the round."""
        self._chunk_at[seat] = now

    def chunk(self, seat: int, now: float) -> None:
        """A chunk of a seat has arrived."""
        self._gap_s = max(self._gap_s, now - self._chunk_at[seat])
        self._chunk_at[seat] = now

    def parted(self, seat: int, now: float) -> None:
        """A seat is lost."""
        self._lost_at[seat] = now

    def check(self, now: float) -> None:
        """Do what is due, on the heartbeat."""
        self._drop_hanging(now)
        self._seek_results(now)

    def _drop_hanging(self, now: float) -> None:
        """Count no more on reducers that live but make nothing, long after all else is here."""
        config, state = self._round.config, self._round
        ledger, seating = state.ledger, state.seating
        if ledger.have != self._had:
            self._had, self._had_at = ledger.have, now
        if not self._had or not ledger.lacking:
            return
        took = self._had_at - state.started
        allowed = 2 * config.stall_s + (config.laggard_factor + 1) * took
        # A reducer itself may wait so long for senders that lag, and is not hanging then.
        patience = CUT_SHARE * state.base_s + 2 * config.stall_s
        columns = state.formed.columns
        if columns is not None:
            # Nor is one that holds its part while its column has a fault that others have not.
            longer = CUT_SHARE * columns.column_s + 2 * config.stall_s
            allowed, patience = allowed + longer, patience + longer
        if now - self._had_at < allowed or now - state.started < patience:
            return
        for part in ledger.parts:
            acting = state.acting(part)
            lacking = ledger.lacking & ledger.mask(part)
            if lacking and seating.alive >> acting & 1:
                self._lose(acting, "hanging", f"no result of part {part}", now)
        self._had_at = now  # whoever takes over has as long

    def _seek_results(self, now: float) -> None:
        """Ask for results that nobody is going to push to this seat."""
        state, seating, grace = self._round, self._round.seating, self._round.config.stall_s
        hanging = grace + state.config.laggard_factor * self._gap_s
        done = seating.done & seating.servers
        need, prefer = 0, 0
        wanted = state.ledger.lacking & ~self._holding.held
        for part in state.ledger.parts:
            lacking = wanted & state.ledger.mask(part)
            if not lacking:
                continue
            acting = state.acting(part)
            reducers = state.before(part, state.ballot[part]) | 1 << acting
            if not seating.alive or seating.estranged & reducers:
                need |= lacking  # somebody makes these results, and does not send them to us
            elif acting == seating.me:
                waiting = self._takeovers.waiting(part)
                if waiting and now - self._takeovers.bids[part].started > grace:
                    need |= lacking
                    prefer |= waiting
            elif not seating.alive >> acting & 1:
                if now - self._lost_at[acting] > grace:
                    need |= lacking
            elif done and now - self._chunk_at[acting] > hanging:
                need |= lacking  # it lives, but nothing of it arrives, and others have it all
                prefer |= done
        self._serving.seek(need, prefer, now)
