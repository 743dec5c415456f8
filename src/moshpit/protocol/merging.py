"""Two sides of a swarm that were cut off from each other become one again.

Theory of operation. A side goes on by itself: it averages, and all its peers hold the same values.
When the sides see each other again, their lineages (`lineage.py`) show that they have parted, and
since which epoch. The merged values are the mean of both sides, weighted by the samples that each
has seen since then. That is what an ordinary averaging gives in which every peer weighs as much
as *it* has done since the sides have parted, and not only in this epoch. So all that is needed is
that everybody does so in the same averaging:

- Who sees that another live peer is of another side *declares* it in its record: the first epoch
  that the sides do not share (`PeerRecord.merges_from`). Who reads that of a peer that is at its
  own epoch declares it, too; so it spreads at the speed of gossip.
- From its declaration on, a peer *holds*: it begins no averaging for `HOLD_PROBES` probe
  intervals. That is enough for both sides' views to become one, and for the declaration to reach
  everybody. Training goes on. Whoever calls and has declared has held already: then it is time.
- A side whose epochs are fewer goes to the other's number. It has missed nothing that it does not
  bring, so that its values are not stale, and it fetches no state.
- In the next averaging all who have declared weigh as much as they have done since the earliest
  epoch that any of them has declared. Its end is the end of the declaration.

Who comes too late for it comes to the next one, declares again, and all weigh anew what they have
done since: as long as weights are what peers did since they parted, means of means are right.
Nothing depends on everybody knowing: who has not heard of it weighs less than it should, once.

A peer that only stood still has averaged nothing that others have not: its lineage is a part of
theirs, it is behind, and catches up (`Node`, state transfer). One mean that missed somebody
is no parting, either: lineages must differ for `DEPTH_MIN` epochs, or the peer must
have been dead here.

A peer can declare what it likes. What it can gain is a hold, of which there are `HOLDS_MAX`, and
one more for each `HOLD_AGAIN_S`; and weights that count more than one epoch, of everybody alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, final

from moshpit.events import Notice
from moshpit.protocol.lineage import Lineage, label_of
from moshpit.protocol.machine import BeginAveraging
from moshpit.protocol.view import Entry, LiveView, Status
from moshpit.types import PeerId

HOLD_PROBES: Final = 4  # guess: a far side's peers hear that they were held for dead, and say no
HOLDS_MAX: Final = 4  # guess: sides that find each other in pieces
HOLD_AGAIN_S: Final = 60.0  # guess: what a peer that always declares may cost
DEPTH_MIN: Final = 2  # epochs; in a single one, views may have differed by a peer
STALE_EPOCHS: Final = 2  # guess: missing so many epochs makes one's own value worthless
AWAY_MAX: Final = 4096  # guess: peers that were dead, of whom it is remembered


@final
class Merging:
    """Whether this peer's next averaging merges sides, and what it weighs there.

    Args:
        view: the picture of the swarm.
        probe_interval_s: of the membership's probes.
    """

    def __init__(self, view: LiveView, probe_interval_s: float) -> None:
        self._view = view
        self._me = PeerId(view.me.peer)
        self._hold_s = HOLD_PROBES * probe_interval_s
        self._lineage = Lineage()
        self._changed: dict[PeerId, None] = {}
        self._judged: dict[PeerId, bytes] = {}
        """Lineages that were compared; of the other sides' peers that took part in the latest
        averaging, too, until they show another."""
        self._others: dict[PeerId, int] = {}
        """Peers of other sides, and the first epoch that was not averaged with them."""
        self._declared: dict[PeerId, None] = {}
        self._away: dict[PeerId, None] = {}
        self._lost = 0
        self._credit, self._credit_at = float(HOLDS_MAX), 0.0
        self._asked_again = False
        self._own_side = False
        self._averaged = False
        self._missed = 0
        self.able = False
        """Whether this peer can merge; else it shows no lineage, and declares nothing."""
        self.first: int | None = None
        """The first epoch whose work counts in the next averaging; None: its own only."""
        self.held_until: float | None = None
        self._put_off: BeginAveraging | None = None
        self.past: float | None = None
        """What the next averaging counts of earlier epochs, in this peer's samples; None: it is
        an ordinary one. Other threads may read this."""
        view.watch(self._note)

    def _note(self, entry: Entry) -> None:
        peer = PeerId(entry.record.peer)
        if peer == self._me:
            return
        if not entry.status.live:
            if entry.status is Status.DEAD and peer not in self._away:
                self._lost += 1
                self._away[peer] = None
                if len(self._away) > AWAY_MAX:
                    del self._away[next(iter(self._away))]
            for peers in (self._changed, self._judged, self._others, self._declared):
                peers.pop(peer, None)
            return
        if entry.record.merges_from >= 0:
            self._declared[peer] = None
        else:
            self._declared.pop(peer, None)
        if self._judged.get(peer) != entry.record.lineage:
            self._changed[peer] = None

    # --- what the node reads --------------------------------------------------------------

    def fields(self) -> dict[str, object]:
        """Return what this peer's record says of all this."""
        first = -1 if self.first is None else self.first
        return {"lineage": self._lineage.shown() if self.able else b"", "merges_from": first}

    @property
    def declared(self) -> bool:
        """Whether this peer has declared that sides merge."""
        return self.first is not None

    def notice(self) -> Notice:
        """Return what people are told of it."""
        return Notice(
            "merging", None, f"peers are back that went on by themselves from epoch {self.first}"
        )

    def holding(self, now: float) -> bool:
        """Whether this peer begins no averaging yet."""
        if self.held_until is not None and now >= self.held_until:
            self.held_until = None
        return self.held_until is not None

    def stale(self, epoch: int) -> bool:
        """Whether this peer's values are worth nothing to the others."""
        return self._behind or (not self._averaged and epoch > 0)

    @property
    def _behind(self) -> bool:
        """Whether it has missed what the others have done, and has nothing for it."""
        return self._missed >= STALE_EPOCHS and not self._own_side

    # --- seeing that there are two sides --------------------------------------------------

    def look(self, epoch: int, now: float) -> bool:
        """Look whether there are peers of other sides, or peers that have declared.

        Returns:
            Whether this peer's record has to say something new.
        """
        if self._changed:
            self._judge()
        if not (self.able and (self._others or self._declared)):
            return False
        schema = self._view.me.schema
        seen = [f for p, f in self._others.items() if self._view.entries[p].record.schema == schema]
        told: list[int] = []
        for peer in self._declared:
            record = self._view.entries[peer].record
            if record.schema == schema and record.epoch == epoch:
                told.append(record.merges_from)
                self._own_side |= self._lineage.leads(record.lineage)
        if not (schema and (seen or told)):
            return False
        self._own_side |= bool(seen)
        # Of what this peer sees the latest parting: lineages show some epochs only. Of what all
        # have seen the earliest: sides may have parted more than once.
        first = min([*told, max(seen)] if seen else told)
        if self.first is None:
            self._hold(now)
        elif first >= self.first:
            return False
        self.first = first
        self._count()
        return True

    def _judge(self) -> None:
        for peer in self._changed:
            entry = self._view.entries[peer]
            shown = self._judged[peer] = entry.record.lineage
            fork = self._lineage.compare(shown)
            if fork is not None and (fork.depth >= DEPTH_MIN or peer in self._away):
                self._others[peer] = fork.first
            else:
                self._others.pop(peer, None)
                if fork is None and self._lineage.leads(shown):
                    self._away.pop(peer, None)
        self._changed.clear()

    def _hold(self, now: float) -> None:
        earned = (now - self._credit_at) / HOLD_AGAIN_S
        self._credit, self._credit_at = min(HOLDS_MAX, self._credit + earned), now
        if self._credit >= 1:
            self._credit -= 1
            self.held_until = now + self._hold_s

    def _count(self) -> None:
        if self.first is None or self._behind:
            self.past = None
        else:
            self.past = self._lineage.since(self.first)

    def declines(self, caller: PeerId, epoch: int, now: float) -> bool:
        """Whether this peer does not come to an averaging of its epoch that it is called to.

        A caller that has declared, too, has held long enough for both.
        """
        if not self.holding(now):
            return False
        record = self._view.record(caller)
        if record is not None and record.merges_from >= 0 and record.epoch == epoch:
            self.held_until = None
        return self.held_until is not None

    # --- an averaging ---------------------------------------------------------------------

    def takes(self, request: BeginAveraging, now: float) -> bool | None:
        """Return whether an averaging can begin with this snapshot; None: later (`ready`).

        A snapshot that does not know of the merging is asked for again, once.
        """
        if request.always_weighs or self.first is None:
            return True
        if request.weight > 0 and not (request.merges or self._asked_again):
            self._asked_again = True
            return False
        if self.holding(now):
            self._put_off = request
            return None
        return True

    def ready(self, now: float) -> BeginAveraging | None:
        """Return what was put off, when its time has come."""
        if self._put_off is None or self.holding(now):
            return None
        request, self._put_off = self._put_off, None
        return request

    def gave(self, epoch: int, request: BeginAveraging) -> None:
        """Note the work that is in a snapshot; its values keep it, whatever comes of it."""
        if not request.always_weighs and not self.stale(epoch):
            self._lineage.gave(epoch, request.weight - request.earlier)
            self._count()

    def weighs(self, request: BeginAveraging, epoch: int, now: float) -> float | None:
        """Return what a snapshot weighs that was taken before its peer heard of the merging, now
        that its first group is there; None: what it says."""
        if request.merges or request.always_weighs or request.weight <= 0:
            return None
        self.look(epoch, now)
        return self.past  # with what this snapshot gives

    def ended(self, epoch: int, company: Sequence[PeerId], sure: bool = False) -> None:
        """An averaging with these peers has ended; ``sure``: none of them was lost on the way.
        Nobody: it was none of all, as when a pause of this process has interrupted it. That makes
        no side of anybody."""
        self._averaged, self._missed = True, 0
        self._judge()  # by what was before

        def here(peer: PeerId) -> bool:
            return sure or peer == self._me or self._view.reachable(peer)

        if company:
            self._lineage.averaged(epoch, label_of(epoch, company, here), self._lost)
            self._lost = 0
        if self.first is not None or self._others:
            self._merged(company)

    def _merged(self, company: Sequence[PeerId]) -> None:
        """Those who were there are one side now, until they show something else."""
        together = dict.fromkeys(company)
        for peer in list(self._others):
            if peer in together and self._view.reachable(peer):
                del self._others[peer]
                self._away.pop(peer, None)
        self._leave_off()

    def _leave_off(self) -> None:
        self.first = self.held_until = self.past = None
        self._own_side = self._asked_again = False

    # --- what else changes the values -----------------------------------------------------

    def skipped(self, epochs: int) -> None:
        """This peer goes to a later epoch without having averaged so many."""
        self._missed += epochs
        self._count()

    def replaced(self, missed: int) -> None:
        """This peer's values come from elsewhere now: a checkpoint, another peer."""
        self._averaged, self._missed = True, missed
        self._lineage = Lineage()
        self._others.clear()
        self._leave_off()
