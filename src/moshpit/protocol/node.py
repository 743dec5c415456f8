"""The one machine that drivers hold: membership, progress, meeting and rounds of a peer.

Theory of operation. A peer is *idle* (it trains), *due* (the driver was asked for a snapshot)
or *averaging*: for each axis of the plan it seeks a group, runs the group's round, and takes
the next path, which the group's host chose. The averaging always ends, with a report of what
really happened, and the peer works on the next epoch.

- Which epoch a peer works on, and when it is due: `epochs.py`. A peer that missed more than one
  epoch, or has never averaged while the swarm has, is stale: its own value weighs nothing the
  next time, and it takes the mean (design §4, "catches up"). Not so where it was cut off and
  went on with others: then the sides merge (`merging.py`).
- Rounds that have ended stay for groupmates that lack results, until they close themselves.
- The parts see a clock without the pauses of this process (`clock.py`).
- In a row of the torus schedule the peer's slice goes up its column meanwhile (`climb.py`): what
  a column brings lets the row go on; what it does not bring, the row has itself.
"""

from __future__ import annotations

from moshpit.config import SwarmConfig
from moshpit.events import EpochReport
from moshpit.protocol import grid
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.climb import Climb, RunningRound
from moshpit.protocol.clock import OwnClock, past, sooner
from moshpit.protocol.course import Averaging
from moshpit.protocol.epochs import Epochs
from moshpit.protocol.known import Known
from moshpit.protocol.machine import (
    ROUTINE,
    AveragingEnded,
    BeginAveraging,
    ChunkArrived,
    Effect,
    Event,
    GroupReady,
    HoldOver,
    Leave,
    LinkDown,
    LinkUp,
    LocalProgress,
    PartReduced,
    Received,
    Rng,
    RoundEnded,
    SeekFailed,
    Send,
    Signer,
    Silent,
    Tick,
    View,
)
from moshpit.protocol.matchmaking import Matchmaker
from moshpit.protocol.membership import Membership
from moshpit.protocol.misfits import Misfits, schema_to_reduce
from moshpit.protocol.rounds import OpenRounds
from moshpit.types import GroupId, PeerId
from moshpit.wire.messages import (
    MATCHMAKING_MESSAGES,
    MEMBERSHIP_MESSAGES,
    ROUND_MESSAGES,
    Call,
    CallReply,
    GroupAsk,
    GroupFormed,
    GroupKey,
    PeerRecord,
)


class Node:
    """All of a peer's protocol (implements `moshpit.protocol.machine.Machine`).

    Args:
        signer: the peer's keys.
        record: its own record, unsigned: role, addresses, bandwidth, admission.
        config: settings.
        rng: the only source of randomness.
        now: the driver's clock, seconds.
        target: samples per epoch of the whole swarm; 0: averaging begins only on request.
        known: whom it knows already, if other nodes of this process know the same.
    """

    def __init__(
        self,
        signer: Signer,
        record: PeerRecord,
        config: SwarmConfig,
        rng: Rng,
        now: float,
        *,
        target: float = 0.0,
        known: Known | None = None,
    ) -> None:
        self._signer = signer
        self._config = config
        self._rng = rng
        self._membership = Membership(signer, record, config.membership, rng, now, known=known)
        self._matchmaker = Matchmaker(
            signer, self._membership.view, config.matchmaking, config.round, rng
        )
        self._epochs = Epochs(
            self._membership, self._matchmaker, config, rng, target=target, now=now
        )
        self._merging = self._epochs.merging
        self._averaging: Averaging | None = None
        self._rounds = OpenRounds()
        self._misfits = Misfits(self._membership.view)
        self._membership.view.watch(self._misfits.note)
        self._eventful = False  # whether the latest chunk changed the course
        self._generation = -1
        self._clock = OwnClock(now)

    # --- what drivers read ----------------------------------------------------------------

    @property
    def view(self) -> View:
        """The picture of the swarm."""
        return self._membership.view

    @property
    def epoch(self) -> int:
        """The epoch that this peer works on."""
        return self._epochs.now_at

    @property
    def averaging(self) -> bool:
        """Whether an averaging is under way."""
        return self._averaging is not None

    @property
    def merging(self) -> float | None:
        """How many samples of earlier epochs this peer's next weight counts, since it merges
        sides of the swarm; None: it does not. Any thread may read it."""
        return self._merging.past

    @property
    def wakeup(self) -> float | None:
        """When a `Tick` is due, on the driver's clock."""
        return self._clock.wakeup

    # --- what drivers call ----------------------------------------------------------------

    def attach(self, schema: bytes, target: float, now: float, epoch: int = 0) -> list[Effect]:
        """Say what this peer averages, how many samples an epoch has, and, if its values come
        from a checkpoint, of which epoch they are."""
        now = self._clock.peek(now)
        self._epochs.retarget(target)
        effects = self._membership.publish(now, schema=schema)
        if epoch > 0:
            self._merging.replaced(max(0, self.epoch - epoch))
            self._epochs.advance(max(epoch, self.epoch), effects, now)
        self._rest(effects, now)
        return effects

    def merge(self, able: bool) -> None:
        """Say whether this peer's training can merge with sides that were cut off from it: with a
        snapshot of what it has at any time, whose weight it makes as `merging` says."""
        self._merging.able = able

    def publish(self, fields: dict[str, object], now: float) -> list[Effect]:
        """Tell the others something new of this peer: its bandwidth, its role, its addresses."""
        now = self._clock.peek(now)
        effects = self._membership.publish(now, **fields)
        self._rest(effects, now)
        return effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        due = past(self._clock.wakeup, now)
        now = self._clock.read(now)
        effects: list[Effect] = []
        soonest = self._membership.wakeup
        match event:
            case Received(peer=peer, message=message):
                self._eventful = not isinstance(message, ROUND_MESSAGES)
                self._membership.heard(peer, now)
                self._received(event, peer, message, effects, now)
                if not self._eventful and self._at_rest(soonest, due):
                    return effects  # a round's timers run on its heartbeat
            case ChunkArrived():
                self._eventful = False
                self._round_event(event, event.header.group, effects, now)
                if not (self._eventful or due or self._averaging is None):
                    return effects  # nothing but payloads moved: nobody's time has changed
            case Tick():
                self._tick(event, effects, now)
            case LocalProgress():
                self._epochs.local(event, self.averaging, effects, now)
            case BeginAveraging():
                self._begin(event, effects, now)
            case LinkUp():
                effects += self._membership.handle(event, now)
                if not effects and self._at_rest(soonest, due):
                    return effects
            case LinkDown():
                effects += self._membership.handle(event, now)
                self._absorb(self._matchmaker.handle(event, now), effects, now)
                for running in self._rounds.all():
                    self._pass_on(running, running.machine.handle(event, now), effects, now)
            case Leave():
                self._matchmaker.declines = True
                self._absorb(self._matchmaker.cancel(now), effects, now)
                self._let_go(effects, now)
                effects += self._membership.leave(now)
        self._rest(effects, now)
        return effects

    # --- routing --------------------------------------------------------------------------

    def _tick(self, event: Tick, effects: list[Effect], now: float) -> None:
        if past(self._membership.wakeup, now):
            effects += self._membership.handle(event, now)
        if past(self._matchmaker.wakeup, now):
            self._absorb(self._matchmaker.handle(event, now), effects, now)
        for running in self._rounds.all():
            if past(running.machine.wakeup, now):
                self._pass_on(running, running.machine.handle(event, now), effects, now)
        self._epochs.tick(self.averaging, effects, now)

    def _received(
        self, event: Received, peer: PeerId, message: object, effects: list[Effect], now: float
    ) -> None:
        if isinstance(message, MEMBERSHIP_MESSAGES):
            effects += self._membership.handle(event, now)
        elif isinstance(message, GroupFormed) and self._rounds.get(message.group):
            return  # an announcement passed on by a groupmate; we have it
        elif isinstance(message, Call) and self._declines(peer, message, now):
            effects.append(Send(peer, CallReply(message.key, False, -1.0)))
        elif isinstance(message, MATCHMAKING_MESSAGES):
            self._absorb(self._matchmaker.handle(event, now), effects, now)
        elif isinstance(message, GroupAsk):
            effects.append(self._rounds.answer(peer, message.group, self.epoch))
        elif isinstance(message, ROUND_MESSAGES):
            self._round_event(event, message.group, effects, now)

    def _declines(self, caller: PeerId, call: Call, now: float) -> bool:
        idle = self._averaging is None and call.key.epoch == self.epoch
        return idle and self._merging.declines(caller, self.epoch, now)

    def _round_event(
        self, event: Received | ChunkArrived, group: bytes, effects: list[Effect], now: float
    ) -> None:
        running = self._rounds.get(group)
        if running is not None:
            self._pass_on(running, running.machine.handle(event, now), effects, now)
        else:
            effects += self._rounds.stray(event, self._matchmaker.seeking, self.epoch)

    def _pass_on(
        self, running: RunningRound, new: list[Effect], effects: list[Effect], now: float
    ) -> None:
        """Pass on what a round wants done; in a torus, what this means for row or column."""
        climb = self._averaging.climb if self._averaging is not None else None
        if climb is not None and climb.row is running and running.machine.ended:
            self._stop_climb(climb, effects, now)  # it works on what the row gives out now
        if climb is None or climb.column is not running or climb.row.machine.ended:
            self._absorb(new, effects, now)
        else:
            self._eventful = True
            self._climbed(climb, new, effects, now)
        self._rounds.forget_if_closed(running)

    def _absorb(self, new: list[Effect], effects: list[Effect], now: float) -> None:
        """Pass effects on, acting on those that are about the course of the averaging."""
        for effect in new:
            if type(effect) in ROUTINE:
                effects.append(effect)
                continue
            self._eventful = True
            if isinstance(effect, SeekFailed):
                self._seek_failed(effect, effects, now)
                continue
            if isinstance(effect, Silent):
                effects += self._membership.silent(effect.peer, now)
                continue
            if isinstance(effect, PartReduced | HoldOver):
                column = isinstance(effect, PartReduced)
                (self._seek_column if column else self._let_go)(effects, now)
                continue
            effects.append(effect)
            if isinstance(effect, GroupReady):
                self._group_ready(effect, effects, now)
            elif isinstance(effect, RoundEnded):
                current = self._averaging
                if current is not None:
                    effects[-1] = RoundEnded(current.ended(effect.report))
                    if current.group == effect.report.group:
                        self._next_axis(effects, now)

    # --- an epoch's averaging -------------------------------------------------------------

    def _begin(self, request: BeginAveraging, effects: list[Effect], now: float) -> None:
        epoch = self.epoch if request.due_epoch is None else request.due_epoch
        self._epochs.begun()
        self._merging.gave(epoch, request)
        late = self._averaging is not None or epoch != self.epoch
        begins = False if late else self._merging.takes(request, now)
        if begins:
            self._start(request, effects, now)
        elif begins is not None:
            # The swarm went on while the snapshot was made.
            effects.append(AveragingEnded(EpochReport(self.epoch, (), 0.0, True), self.epoch))

    def _start(self, request: BeginAveraging, effects: list[Effect], now: float) -> None:
        self._epochs.begun()
        stale = self._merging.stale(self.epoch) and not request.always_weighs
        masses = [0.0 if stale else request.weight] * request.chunks
        self._averaging = Averaging(request, now, masses)
        view, me = self.view, self._signer.peer
        peers = view.averaging(request.schema)
        if view.me.schema != request.schema:
            peers = sorted((*peers, me))
        self._averaging.company = peers
        if len(peers) == 1:
            self._end(effects, now)
            return
        size = self._config.matchmaking.group_size
        plan, ranked = grid.arrange(peers, self.epoch, size, view.dialable)
        self._matchmaker.rankings.begin(self.epoch, request.schema, (plan, ranked))
        self._seek(plan.path(ranked.index(me), 0), effects, now)

    def _seek(self, path: tuple[int, ...], effects: list[Effect], now: float) -> None:
        current = self._averaging
        assert current is not None
        current.sought = now
        current.group = None
        current.key = key = GroupKey(self.epoch, current.axis, path)
        fields = current.join_fields(self.view.me)
        self._absorb(self._matchmaker.seek(key, fields, now), effects, now)

    def _group_ready(self, ready: GroupReady, effects: list[Effect], now: float) -> None:
        current = self._averaging
        assert current is not None
        formed, seat, climb = ready.formed, ready.seat, current.climb
        group = GroupId(formed.group)
        if climb is None and current.axis == 0:
            weight = self._merging.weighs(current.request, self.epoch, now)
            current.weigh(weight)
        masses = current.masses if climb is None else climb.masses()
        machine = AllReduce(formed, seat, masses, self._signer, self._config.round, now)
        running = RunningRound(machine, formed, seat)
        self._rounds.add(running)
        if climb is None:
            current.group = group
            current.meeting_s = now - current.sought
            current.climb = Climb.of(running)
            if formed.columns is not None:
                key = current.climb.key if current.climb is not None else None
                self._matchmaker.bound = (formed.key.epoch, formed.key.axis + 1), key
        else:
            effects[-1] = GroupReady(formed, seat, climb.row.machine.group)
            climb.column = running
            climb.meeting_s = now - (climb.sought or now)
        self._pass_on(running, machine.start(now), effects, now)
        self._tell_losses(effects, now)

    # --- torus ----------------------------------------------------------------------------

    def _seek_column(self, effects: list[Effect], now: float) -> None:
        """What this peer holds is reduced: look for the column's group."""
        current = self._averaging
        climb = current.climb if current is not None else None
        if current is None or climb is None or climb.over:
            return
        climb.sought = now
        fields = climb.fields(current.join_fields(self.view.me))
        self._absorb(self._matchmaker.seek(climb.key, fields, now), effects, now)

    def _climbed(self, climb: Climb, new: list[Effect], effects: list[Effect], now: float) -> None:
        """The column wants something done; let the row go on with what it has brought."""
        row = climb.row
        # The report first: the row may end with this. Its memory is freed (`CloseRound`) last.
        ends = next((i for i, e in enumerate(new) if isinstance(e, RoundEnded)), None)
        at = len(new) if ends is None else ends + 1
        self._absorb(new[:at], effects, now)
        found = climb.found()
        if found:
            self._pass_on(row, row.machine.release(found, now), effects, now)
        self._absorb(new[at:], effects, now)
        if ends is not None and not row.machine.ended:
            self._pass_on(row, row.machine.release_all(now), effects, now)

    def _stop_climb(self, climb: Climb, effects: list[Effect], now: float) -> None:
        """Expect nothing more of the column."""
        if climb.over:
            return
        if climb.seeking:
            self._absorb(self._matchmaker.cancel(now), effects, now)
        climb.over = True
        if climb.column is not None:
            self._absorb(climb.column.machine.stop(now), effects, now)
            self._rounds.forget_if_closed(climb.column)

    def _let_go(self, effects: list[Effect], now: float) -> None:
        """The row's means stand for what this peer still holds."""
        climb = self._averaging.climb if self._averaging is not None else None
        if climb is not None and not climb.row.machine.ended:
            self._stop_climb(climb, effects, now)
            self._pass_on(climb.row, climb.row.machine.release_all(now), effects, now)

    # --- from axis to axis ----------------------------------------------------------------

    def _next_axis(self, effects: list[Effect], now: float) -> None:
        current = self._averaging
        if current is None or current.group is None:
            return
        running = self._rounds.get(current.group)
        assert running is not None, "a round that ends is open"
        path = running.formed.next_path[running.seat]
        if not path or running.formed.columns is not None:
            self._end(effects, now)
            return
        current.masses = list(running.machine.masses_after)
        current.origin = current.group
        current.axis += 1
        self._seek(path, effects, now)

    def _seek_failed(self, failed: SeekFailed, effects: list[Effect], now: float) -> None:
        current = self._averaging
        if current is None:
            return
        climb = current.climb
        if climb is not None:
            current.no_column(self._signer.peer, climb, failed.reason, now)
            climb.over = True
            self._let_go(effects, now)
            return
        stale = failed.epoch > self.epoch
        if not stale:
            current.no_group(self._signer.peer, failed.reason, now)
        self._end(effects, now, swarm_epoch=failed.epoch)

    def _end(self, effects: list[Effect], now: float, swarm_epoch: int = 0) -> None:
        current = self._averaging
        assert current is not None
        self._averaging = None
        self._matchmaker.bound = None
        stale = swarm_epoch > self.epoch
        report = EpochReport(self.epoch, tuple(current.reports), now - current.began, stale)
        if stale:
            self._epochs.go_to(swarm_epoch, effects, now)
        else:
            if not current.request.always_weighs:
                self._merging.ended(self.epoch, *current.together(self._signer.peer))
            self._epochs.advance(self.epoch + 1, effects, now)
        effects.append(AveragingEnded(report, self.epoch))

    # --- after every event ----------------------------------------------------------------

    def _at_rest(self, soonest: float | None, due: bool) -> bool:
        """Whether an event of which no part wants anything has changed nobody's time, either:
        most are such, and looking at everybody's takes as long as the event itself."""
        return not (
            due
            or self._averaging is None
            or self._membership.wakeup != soonest
            or self._membership.view.generation != self._generation
        )

    def _rest(self, effects: list[Effect], now: float) -> None:
        if self.view.generation != self._generation:
            self._generation = self.view.generation
            self._tell_losses(effects, now)
            schema = schema_to_reduce(self.view)
            if schema:
                effects += self._membership.publish(now, schema=schema)
            self._absorb(self._matchmaker.handle(Tick(), now), effects, now)
            effects += self._misfits.name()
        self._epochs.tell_again(effects, now)
        if self._averaging is None:
            self._epochs.follow(effects, now)
            request = self._merging.ready(now)
            if request is not None:
                self._start(request, effects, now)
        self._clock.wake_at(self._next_wakeup())

    def _tell_losses(self, effects: list[Effect], now: float) -> None:
        for running, peer in self._rounds.unreachable(self.view):
            self._pass_on(running, running.machine.lost(peer, now), effects, now)

    def _next_wakeup(self) -> float | None:
        soonest = sooner(self._membership.wakeup, self._matchmaker.wakeup)
        soonest = sooner(soonest, self._epochs.wakeup(self.averaging))
        for running in self._rounds.all():
            soonest = sooner(soonest, running.machine.wakeup)
        return soonest
