"""Which epoch a swarm starts again from, agreed upon by those that resume from checkpoints.

Theory of operation. Who resumes tells everybody which epochs it holds (`StateHeld`), and newcomers
as they appear. Of those who have told, the one with the lowest id decides: when as many have told
as there were when the checkpoints were saved, or when its time is over. It tells its choice, which
all take; it is never changed, and whoever comes later is told it. If no word comes, each decides
by itself: then two choices may meet, and who has the older one is behind, and fetches the state.

The choice is the newest epoch that all hold who hold any. Where there is none, it is the newest
that anybody holds, and the others fetch that state. Where the run is under way already, at an
epoch that is as new as anything here, there is nothing to choose.

What peers tell is judged: impossible epochs are told with their sender's name, and a choice
counts only if somebody has told that it holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

import msgspec

from moshpit.events import Notice
from moshpit.protocol.machine import Emit, Send, View
from moshpit.types import PeerId, Role
from moshpit.wire.transfer import StateHeld

EPOCHS_MAX: Final = 64  # guess: nobody keeps so many; the newest count
EPOCH_MAX: Final = 1 << 62
COMPANY_MAX: Final = 100_000
ANSWER_S: Final = 2.0  # guess: live peers that resume have told by then
GRACE_S: Final = 3.0  # guess: how long the one that decides may be late
BEAT_S: Final = 0.1


class Why(StrEnum):
    """What a choice rests on."""

    COMMON = "common"
    """All who hold any epoch hold this one."""
    NEWEST = "newest"
    """No epoch is held by all; this is the newest that anybody holds."""
    NONE = "none"
    """Nobody holds any."""
    UNDER_WAY = "under way"
    """The run has gone on without this peer, and is at this epoch."""
    TOLD = "told"
    """Another peer has decided."""


class Chosen(msgspec.Struct, frozen=True):
    """What the swarm starts from; 0: from the beginning.

    Attributes:
        epoch: the epoch.
        why: what it rests on.
        peers: how many have told what they hold, this one included.
        newest: the newest epoch that anybody has told of.
        by: who has decided.
    """

    epoch: int
    why: Why
    peers: int
    newest: int
    by: PeerId


ReunionEffect = Send | Emit | Chosen


@dataclass(frozen=True, slots=True)
class _Told:
    epochs: tuple[int, ...]
    company: int
    chosen: int


@final
class Reunion:
    """One peer's part in the choice.

    Args:
        view: who there is.
        held: the epochs that it can begin with.
        company: how many peers trained when the newest of them was saved; 0: unknown.
        wait_s: how long to wait for so many at most.
        now: seconds.
    """

    def __init__(
        self, view: View, held: Sequence[int], company: int, wait_s: float, now: float
    ) -> None:
        self._view = view
        self._me = PeerId(view.me.peer)
        epochs = tuple(sorted({e for e in held if 0 < e < EPOCH_MAX}, reverse=True)[:EPOCHS_MAX])
        self._mine = _Told(epochs, min(max(0, company), COMPANY_MAX), -1)
        self._told: dict[PeerId, _Told] = {}
        self._knows: dict[PeerId, None] = {}  # who was told what this peer holds
        self._deadline = now + max(0.0, wait_s)
        self._quiet_since = now
        self.choice: Chosen | None = None
        self.wakeup: float | None = now + BEAT_S
        """When a `tick` is due; None: it has ended."""

    def start(self, now: float) -> list[ReunionEffect]:
        """Tell everybody, and decide if there is nobody to wait for."""
        return self.tick(now)

    def received(self, peer: PeerId, held: StateHeld, now: float) -> list[ReunionEffect]:
        """Somebody has told what it holds."""
        epochs = held.epochs
        if (
            len(epochs) > EPOCHS_MAX
            or any(not 0 < epoch < EPOCH_MAX for epoch in epochs)
            or not 0 <= held.company <= COMPANY_MAX
            or not -1 <= held.chosen < EPOCH_MAX
        ):
            detail = f"{len(epochs)} epochs, of {held.company} peers, chosen {held.chosen}"
            return [Emit(Notice("bad-state-held", peer, detail))]
        if self.choice is not None:
            answer = StateHeld(self._mine.epochs, self._mine.company, self.choice.epoch)
            return [Send(peer, answer)] if held.chosen < 0 else []
        if peer not in self._told:
            self._quiet_since = now
        self._told[peer] = _Told(epochs, held.company, held.chosen)
        effects: list[ReunionEffect] = []
        self._go_on(effects, now)
        return effects

    def tick(self, now: float) -> list[ReunionEffect]:
        """Time has passed, or the view has changed."""
        effects: list[ReunionEffect] = []
        if self.choice is None:
            self.wakeup = now + BEAT_S
            self._go_on(effects, now)
        return effects

    # --- what follows -----------------------------------------------------------------------

    def _go_on(self, effects: list[ReunionEffect], now: float) -> None:
        others = [peer for peer in self._view.live if peer != self._me]
        mine = StateHeld(self._mine.epochs, self._mine.company)
        for peer in others:
            if peer not in self._knows:
                self._knows[peer] = None
                self._quiet_since = now
                effects.append(Send(peer, mine))
        choice = self._heard() or self._under_way(others) or self._decided(others, now)
        if choice is None:
            return
        self.choice, self.wakeup = choice, None
        for peer, told in self._told.items():
            if told.chosen > 0 and told.chosen not in self._epochs():
                detail = f"it has chosen epoch {told.chosen}, which nobody holds"
                effects.append(Emit(Notice("bad-state-held", peer, detail)))
        if choice.by == self._me:
            told = StateHeld(self._mine.epochs, self._mine.company, choice.epoch)
            effects += [Send(peer, told) for peer in others if peer in self._told]
        effects.append(choice)

    def _heard(self) -> Chosen | None:
        """Return the choice of another, if somebody holds what it has chosen."""
        for peer, told in self._told.items():
            known = self._epochs()
            if told.chosen in known or (told.chosen == 0 and not known):
                return self._chosen(told.chosen, Why.TOLD, peer)
        return None

    def _under_way(self, others: list[PeerId]) -> Chosen | None:
        """Return where the run is, if it has gone on at least as far as what is held here."""
        newest = max(self._mine.epochs, default=0)
        for peer in others:
            record = self._view.record(peer)
            if record is None or not record.schema or record.role == Role.AUX.value:
                continue
            if max(newest, 1) <= record.epoch < EPOCH_MAX and peer not in self._told:
                return self._chosen(record.epoch, Why.UNDER_WAY, peer)
        return None

    def _decided(self, others: list[PeerId], now: float) -> Chosen | None:
        """Decide, if it is for this peer to do so, and time."""
        present = [peer for peer in others if peer in self._told]
        first = min([self._me, *present]) == self._me
        if now < self._deadline + (0.0 if first else GRACE_S):
            silent = any(peer not in self._told and self._resumes(peer) for peer in others)
            asked = silent and now < self._quiet_since + ANSWER_S
            company = max([self._mine.company, *(self._told[peer].company for peer in present)])
            if not first or asked or 1 + len(present) < company:
                return None
        lists = [self._mine.epochs, *(self._told[peer].epochs for peer in present)]
        holders = [epochs for epochs in lists if epochs]
        if not holders:
            return self._chosen(0, Why.NONE, self._me)
        common = [epoch for epoch in holders[0] if all(epoch in more for more in holders)]
        if common:
            return self._chosen(max(common), Why.COMMON, self._me)
        return self._chosen(max(self._epochs()), Why.NEWEST, self._me)

    def _resumes(self, peer: PeerId) -> bool:
        """Whether a live peer that has not told may still do so: it trains nothing yet."""
        record = self._view.record(peer)
        return record is not None and not record.schema and record.role != Role.AUX.value

    def _epochs(self) -> dict[int, None]:
        lists = [self._mine.epochs, *(told.epochs for told in self._told.values())]
        return {epoch: None for epochs in lists for epoch in epochs}

    def _chosen(self, epoch: int, why: Why, by: PeerId) -> Chosen:
        newest = max(self._epochs(), default=0)
        return Chosen(epoch, why, 1 + len(self._told), newest, by)
