"""What a peer believes of the others, and how it lets itself be convinced.

The part of `Membership` that judges and merges what arrives, keeps suspicions and deaths, and
defends the peer's own record. It sends almost nothing by itself: it fills the queue of rumours
and says whether they are urgent.

A record is taken only if it is newer, by (incarnation, version), than what is known; only then
is it judged (`judge`), its admission checked and its signature verified, so that hearing what
is known costs next to nothing. Only its own peer can make a newer record, so nobody can raise
another's incarnation; and a rumour, which its subject has not signed, counts only for the very
incarnation that is known here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from math import inf, log10
from typing import Any, Final, final

import msgspec

from moshpit.config import MembershipConfig
from moshpit.errors import ConfigError
from moshpit.events import Notice
from moshpit.protocol.gossip import Rumor, Rumors, gossip_of, suspicion_of
from moshpit.protocol.judge import COUNTER_MAX, record_flaw, suspicion_flaw
from moshpit.protocol.known import Known
from moshpit.protocol.machine import Effect, Emit, Send, Signer
from moshpit.protocol.twins import Twins
from moshpit.protocol.view import Entry, LiveView, Status, same_standing
from moshpit.types import PeerId, Role, short
from moshpit.wire.messages import Gossip, News, PeerRecord, Suspicion

SPREAD_MAX: Final = 96  # guess: longer lists of records are not passed on as rumours
REFUSALS_PER_MESSAGE_MAX: Final = 8  # guess: notices about one message
VIA_PUBLISHED: Final = 3  # guess
SOUGHT_MAX: Final = 64  # guess: peers on the other side of a long cut that are not forgotten
ACCUSERS_MAX: Final = 4  # guess: names kept of those who suspect a peer
TWIN: Final = "key-twin"

_EXTRAPOLATED = ("samples", "rate", "step_s")


@final
class Roster:
    """Beliefs about all peers (see the module). Effects collect in `out`."""

    def __init__(
        self,
        signer: Signer,
        record: PeerRecord,
        config: MembershipConfig,
        now: float,
        known: Known | None,
    ) -> None:
        _check_own(record)
        if record.peer != signer.peer:
            raise ConfigError("the record is of another peer than the key")
        self._signer = signer
        self._config = config
        self.me: Final = signer.peer
        self.view = LiveView(signer.sign_message(record), now, known)
        self.rumors = Rumors(config.retransmit_multiplier, config.rumors_per_message_max, self.me)
        self.out: list[Effect] = []
        self.urgent = False
        """Something in the queue should not wait for the next probe."""
        self.accused: dict[PeerId, None] = {}
        """Suspects whose suspicion rests on this peer's own probes."""
        self._trials: list[tuple[float, PeerId]] = []  # heap of (deadline of a suspicion, whom)
        self.graves: deque[tuple[float, PeerId]] = deque()
        """When which peer died or left, in order; may hold some that came back since."""
        self._refusals = 0
        self.twins = Twins(now)
        if known is None or known.records.get(self.me) != self.view.me:
            self.rumors.add(self.view.me)

    # --- what arrives ---------------------------------------------------------------------

    def merge(self, sender: PeerId, gossip: Gossip, now: float) -> None:
        """Take in what a peer tells."""
        self._refusals = 0
        spread = len(gossip.records) <= SPREAD_MAX
        for record in gossip.records:
            self.merge_record(sender, record, now, spread)
        for suspicion in gossip.suspicions:
            self._merge_suspicion(sender, suspicion, now)

    def merge_record(self, sender: PeerId, record: PeerRecord, now: float, spread: bool) -> None:
        """Take in one record."""
        if self.view.unmoved(record.peer) is record:
            return
        entry = self.view.entries.get(record.peer)
        if entry is not None:
            known = entry.record
            if known is record or (
                known.incarnation == record.incarnation and known.version == record.version
            ):
                if record.peer == self.me:
                    self._defend_record(sender, record, now)
                elif record.peer == sender and record != known:
                    self.tell(entry, now)
                return
            if (record.incarnation, record.version) < (known.incarnation, known.version):
                if record.peer == sender:
                    self.tell(entry, now)
                return
            if record.peer == self.me:
                self._defend_record(sender, record, now)
                return
            if not entry.status.live and record.incarnation <= known.incarnation:
                if record.peer == sender:
                    self.tell(entry, now)
                return
        flaw = self._flaw(record, entry)
        if flaw is not None:
            self.refuse(sender, flaw)
        elif entry is None:
            self._join(record, now, spread)
        else:
            self._renew(entry, record, now, spread)

    def _flaw(self, record: PeerRecord, entry: Entry | None) -> str | None:
        flaw = record_flaw(record)
        if flaw is not None:
            return flaw
        if entry is None and len(self.view.entries) >= self._config.peers_max:
            return "too many peers"
        known = None if entry is None else entry.record
        # Whoever was admitted once stays so: an invite may expire in the middle of a run.
        if (
            known is None or known.admission != record.admission or known.role != record.role
        ) and not self._signer.admitted(record):
            return "not admitted"
        if not self._signer.verify_message(record, record.peer):
            return "bad signature"
        return None

    def refuse(self, sender: PeerId, detail: str) -> None:
        """Blame a peer for what it sent."""
        self._refusals += 1
        if self._refusals <= REFUSALS_PER_MESSAGE_MAX:
            self.out.append(Emit(Notice("refused", sender, detail)))

    def _join(self, record: PeerRecord, now: float, spread: bool) -> None:
        if record.left:
            return
        entry = self.view.add(record, now)
        self._say("peer-joined", entry)
        if spread:
            self.rumors.add(record)
            self.urgent = True

    def _renew(self, entry: Entry, record: PeerRecord, now: float, spread: bool) -> None:
        old = entry.record
        self.view.renew(entry, record, now)
        if record.left:
            if entry.status.live:
                self._bury(entry, Status.LEFT, now)
                self._say("peer-left", entry)
        elif record.incarnation > old.incarnation:
            # A new life, or a refutation: what was found out about the old one counts no more.
            self.view.cut(entry, False)
            entry.refused_at = -inf
            if entry.status is not Status.ALIVE:
                self._acquit(entry, now)
        elif (record.role, record.addresses) != (old.role, old.addresses):
            # There is another way to it now: that the old one led nowhere counts no more.
            self.view.cut(entry, False)
            entry.refused_at = -inf
        if spread:
            self.rumors.add(record)
            self.urgent |= not same_standing(old, record)

    def _merge_suspicion(self, sender: PeerId, rumor: Suspicion, now: float) -> None:
        flaw = suspicion_flaw(rumor)
        if flaw is not None:
            self.refuse(sender, flaw)
            return
        entry = self.view.entries.get(rumor.peer)
        if entry is None:
            return
        incarnation = entry.record.incarnation
        if rumor.peer == self.me:
            if rumor.incarnation == incarnation:
                self._rise(incarnation + 1, now)
            if rumor.incarnation <= incarnation:
                self._answer(sender, (self.view.me,))
            return
        if rumor.incarnation != incarnation or not entry.status.live:
            return
        if rumor.dead or self._witnessed(entry, rumor.by, now):
            self.declare_dead(entry, rumor.by, now)
        elif entry.status is Status.ALIVE:
            self.suspect(entry, rumor.by, now, first_hand=False)
        elif rumor.by not in entry.accusers and len(entry.accusers) < ACCUSERS_MAX:
            entry.accusers += (rumor.by,)

    def _witnessed(self, entry: Entry, by: bytes, now: float) -> bool:
        """Whether somebody else's suspicion confirms a refused connection seen here."""
        return by != self.me and self.refused_lately(entry, now)

    def refused_lately(self, entry: Entry, now: float) -> bool:
        """Whether the peer's machine said a moment ago that nobody listens there."""
        return entry.cut and now - entry.refused_at <= 4 * self._config.probe_timeout_s

    # --- beliefs --------------------------------------------------------------------------

    def heard(self, peer: PeerId, now: float) -> bool:
        """Note a sign of life from a peer itself; return whether it is believed to live."""
        if self.view.unmoved(peer) is not None:
            return True
        entry = self.view.entries.get(peer)
        if entry is None:
            return False
        if entry.status is Status.ALIVE and not entry.cut:
            return True
        self.view.cut(entry, False)
        entry.refused_at = -inf
        if entry.status is Status.SUSPECT:
            self.doubt(entry, now)
        elif entry.status is Status.DEAD:
            self.tell(entry, now)
        return entry.status.live

    def doubt(self, entry: Entry, now: float) -> None:
        """A suspect gave a sign of life: it is given time anew to refute."""
        entry.first_hand = False
        self.accused.pop(PeerId(entry.record.peer), None)
        self._try(entry, now)

    def suspect(self, entry: Entry, by: bytes, now: float, first_hand: bool) -> None:
        """Believe that a peer may be dead."""
        if entry.status is Status.ALIVE:
            self.view.mark(entry, Status.SUSPECT, now)
            entry.accusers = (by,)
            self._say("peer-suspected", entry, by)
            self._try(entry, now)
            self.rumors.add(suspicion_of(entry, by))
        if first_hand and not entry.first_hand:
            peer = PeerId(entry.record.peer)
            entry.first_hand = True
            self.accused[peer] = None
            if entry.deadline == inf:
                self._try(entry, now)
            self._answer(peer, (suspicion_of(entry, by),))

    def declare_dead(self, entry: Entry, by: bytes, now: float) -> None:
        """Believe that a peer is dead."""
        self._bury(entry, Status.DEAD, now)
        self._say("peer-dead", entry, by)
        self.rumors.drop(entry.record.peer, False)
        self.rumors.add(suspicion_of(entry, by))
        self.urgent = True

    def _bury(self, entry: Entry, status: Status, now: float) -> None:
        peer = PeerId(entry.record.peer)
        self.accused.pop(peer, None)
        self.rumors.drop(peer, True)
        self.view.mark(entry, status, now)
        self.graves.append((now, peer))

    def _acquit(self, entry: Entry, now: float) -> None:
        peer = PeerId(entry.record.peer)
        self.accused.pop(peer, None)
        self.rumors.drop(peer, True)
        self.view.mark(entry, Status.ALIVE, now)
        self._say("peer-back", entry)

    def _try(self, entry: Entry, now: float) -> None:
        config = self._config
        peers = len(self.view.live)
        patience = config.suspicion_multiplier * log10(peers + 1) * config.probe_interval_s
        entry.deadline = now + patience
        heappush(self._trials, (entry.deadline, PeerId(entry.record.peer)))

    @property
    def wakeup(self) -> float:
        """When a suspicion ends or a dead peer is to be forgotten; may be too early."""
        trial = self._trials[0][0] if self._trials else inf
        grave = self.graves[0][0] + self._config.dead_kept_s if self.graves else inf
        return min(trial, grave)

    def ripe(self, now: float) -> list[Entry]:
        """Return the suspects whose time to refute is over."""
        ripe: list[Entry] = []
        while self._trials and self._trials[0][0] <= now:
            deadline, peer = heappop(self._trials)
            entry = self.view.entries.get(peer)
            if entry is not None and entry.deadline == deadline:
                entry.deadline = inf
                ripe.append(entry)
        return ripe

    def bury_for_good(self, now: float) -> None:
        """Forget those who have been dead for long.

        Not if they are as many as the living, for then this may be the smaller side of a cut (or
        half of it), which is to find the other when it heals, however late.
        """
        while self.graves and self.graves[0][0] + self._config.dead_kept_s <= now:
            sought = len(self.view.live) <= len(self.graves) <= SOUGHT_MAX
            since, peer = self.graves.popleft()
            entry = self.view.entries.get(peer)
            if entry is None or entry.status.live or entry.since != since:
                continue
            if sought and entry.status is Status.DEAD:
                entry.since = now
                self.graves.append((now, peer))
            else:
                self.view.forget(entry)

    def _say(self, code: str, entry: Entry, by: bytes | None = None) -> None:
        detail = "" if by is None or by == self.me else f"by {short(bytes(by))}"
        self.out.append(Emit(Notice(code, PeerId(entry.record.peer), detail)))

    # --- telling those concerned ----------------------------------------------------------

    def about(self, peer: PeerId) -> tuple[Rumor, ...]:
        """Return what a peer must hear that is believed here to be dead, or older or newer."""
        if self.view.unmoved(peer) is not None:
            return ()
        entry = self.view.entries.get(peer)
        if entry is None or entry.status is Status.ALIVE:
            return ()
        if entry.status is Status.LEFT:
            return (entry.record,)
        return (suspicion_of(entry, self.me),)

    def tell(self, entry: Entry, now: float) -> None:
        """Show a peer the record of it that is known here, so that it can go above it."""
        if now - entry.told_at >= self._config.probe_timeout_s:
            entry.told_at = now
            peer = PeerId(entry.record.peer)
            self._answer(peer, (entry.record, *self.about(peer)))

    def _answer(self, peer: PeerId, rumors: tuple[Rumor, ...]) -> None:
        message = News(gossip_of(rumors))
        # A message can hold the same claim many times; one answer will do.
        if not (self.out and self.out[-1] == Send(peer, message)):
            self.out.append(Send(peer, message))

    # --- the own record -------------------------------------------------------------------

    def _defend_record(self, sender: PeerId, record: PeerRecord, now: float) -> None:
        """A record of this very peer that it did not make: it is from an earlier life, or from
        another process that has its key."""
        if record is self.view.me or record == self.view.me:
            return
        flaw = record_flaw(record)
        if flaw is None and not self._signer.verify_message(record, self.me):
            flaw = "bad signature"
        if flaw is not None:
            self.refuse(sender, flaw)
            return
        if self.twins.outdone(self.view.me, record, now):
            self.out.append(Emit(Notice(TWIN, self.me, "another living process has this key")))
        self._rise(record.incarnation + 1, now)

    def _rise(self, incarnation: int, now: float) -> None:
        if incarnation < COUNTER_MAX:
            self._sign(now, incarnation=incarnation)
            self.urgent = True

    def publish(self, now: float, fields: dict[str, Any]) -> bool:
        """Change the own record; return whether it is another now."""
        me = self.view.me
        changed = {name: value for name, value in fields.items() if getattr(me, name) != value}
        if not changed:
            return False
        _check_own(msgspec.structs.replace(me, **changed))
        self._sign(now, **changed)
        self.urgent |= any(name not in _EXTRAPOLATED for name in changed)
        return True

    def update_via(self, linked: Iterable[PeerId], now: float) -> None:
        """A client tells through whom it can be probed.

        Called now and then: the record that says so may come later than the link.
        """
        me = self.view.me
        if me.role != Role.CLIENT:
            return
        links = [peer for peer in linked if self.dialable(peer)]
        kept = [peer for peer in me.via if peer in links]
        fresh = [peer for peer in links if peer not in kept]
        self.publish(now, {"via": tuple(kept + fresh)[:VIA_PUBLISHED]})

    def dialable(self, peer: PeerId) -> bool:
        """Whether a peer is known and takes connections."""
        record = self.view.record(peer)
        return record is not None and record.role != Role.CLIENT

    def _sign(self, now: float, **fields: Any) -> None:
        me = self.view.me
        record = msgspec.structs.replace(me, version=me.version + 1, **fields)
        entry = self.view.entries[self.me]
        self.view.renew(entry, self._signer.sign_message(record), now)
        self.rumors.add(self.view.me)


def _check_own(record: PeerRecord) -> None:
    flaw = record_flaw(record)
    if flaw is not None:
        raise ConfigError(f"nobody would believe this peer's record: {flaw}")
