"""The one machine that drivers hold: membership, progress, meeting and rounds of a peer.

Theory of operation. A peer is *idle* (it trains), *due* (the driver was asked for a snapshot)
or *averaging*: for each axis of the plan it seeks a group, runs the group's round, and takes
the next path, which the group's host chose. The averaging always ends, with a report of what
really happened, and the peer works on the next epoch.

- What makes a peer due: the swarm's samples have reached the target, or a host has called.
- A peer that sees the swarm at a later epoch goes there. If it missed more than one epoch, or
  has never averaged while the swarm has, its own value is stale and weighs nothing the next
  time: it takes the mean (design §4, "catches up").
- Rounds that have ended stay for groupmates that lack results, until they close themselves.
- The parts see a clock without the pauses of this process (`clock.py`).
- In a row of the torus schedule the peer's slice goes up its column meanwhile (`climb.py`): what
  a column brings lets the row go on; what it does not bring, the row has itself.
"""

from __future__ import annotations

from moshpit.config import SwarmConfig
from moshpit.events import EpochReport, Notice
from moshpit.protocol import grid
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.climb import Climb, RunningRound
from moshpit.protocol.clock import OwnClock, past, sooner
from moshpit.protocol.course import Averaging
from moshpit.protocol.machine import (
    ROUTINE,
    AveragingDue,
    AveragingEnded,
    BeginAveraging,
    ChunkArrived,
    Effect,
    Emit,
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
    Signer,
    Silent,
    Tick,
    View,
)
from moshpit.protocol.matchmaking import Matchmaker
from moshpit.protocol.membership import Membership
from moshpit.protocol.misfits import Misfits
from moshpit.protocol.progress import Progress
from moshpit.protocol.rounds import OpenRounds
from moshpit.types import GroupId, PeerId, Role
from moshpit.wire.messages import (
    MATCHMAKING_MESSAGES,
    MEMBERSHIP_MESSAGES,
    ROUND_MESSAGES,
    GroupAsk,
    GroupFormed,
    GroupKey,
    PeerRecord,
)

STALE_EPOCHS = 2  # guess: missing so many epochs makes one's own value worthless
PUBLISH_ALWAYS = 64  # guess: up to so many peers, all publish a new epoch
PUBLISHERS = 16  # guess: how many do in a larger swarm


class Node:
    """All of a peer's protocol (implements `moshpit.protocol.machine.Machine`).

    Args:
        signer: the peer's keys.
        record: its own record, unsigned: role, addresses, bandwidth, admission.
        config: settings.
        rng: the only source of randomness.
        now: the driver's clock, seconds.
        target: samples per epoch of the whole swarm; 0: averaging begins only on request.
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
    ) -> None:
        self._signer = signer
        self._config = config
        self._rng = rng
        self._role = Role(record.role)
        self._membership = Membership(signer, record, config.membership, rng, now)
        self._progress = Progress(self._membership.view, config.progress, target, now)
        self._matchmaker = Matchmaker(
            signer, self._membership.view, config.matchmaking, config.round, rng
        )
        self._epoch = 0
        self._averaged = False  # whether this peer has ever finished an averaging
        self._missed = 0  # epochs skipped since the last averaging
        self._due: int | None = None
        self._averaging: Averaging | None = None
        self._latest_progress: LocalProgress | None = None
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
        return self._epoch

    @property
    def averaging(self) -> bool:
        """Whether an averaging is under way."""
        return self._averaging is not None

    @property
    def wakeup(self) -> float | None:
        """When a `Tick` is due, on the driver's clock."""
        return self._clock.wakeup

    # --- what drivers call ----------------------------------------------------------------

    def attach(self, schema: bytes, target: float, now: float, epoch: int = 0) -> list[Effect]:
        """Say what this peer averages, how many samples an epoch has, and, if its values come
        from a checkpoint, of which epoch they are."""
        now = self._clock.peek(now)
        self._progress.target = target
        effects = self._membership.publish(now, schema=schema)
        if epoch > 0:
            self._averaged, self._missed = True, max(0, self._epoch - epoch)
            self._advance(max(epoch, self._epoch), effects, now)
        self._rest(effects, now)
        return effects

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
        match event:
            case Received(peer=peer, message=message):
                self._membership.heard(peer, now)
                self._received(event, peer, message, effects, now)
            case ChunkArrived():
                self._eventful = False
                self._round_event(event, event.header.group, effects, now)
                if not (self._eventful or due or self._averaging is None):
                    return effects  # nothing but payloads moved: nobody's time has changed
            case Tick():
                self._tick(event, effects, now)
            case LocalProgress():
                self._local_progress(event, effects, now)
            case BeginAveraging():
                self._begin(event, effects, now)
            case LinkUp():
                effects += self._membership.handle(event, now)
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
        if self._latest_progress is not None and past(self._progress.wakeup, now):
            self._local_progress(self._latest_progress, effects, now)

    def _received(
        self, event: Received, peer: PeerId, message: object, effects: list[Effect], now: float
    ) -> None:
        if isinstance(message, MEMBERSHIP_MESSAGES):
            effects += self._membership.handle(event, now)
        elif isinstance(message, GroupFormed) and self._rounds.get(message.group):
            return  # an announcement passed on by a groupmate; we have it
        elif isinstance(message, MATCHMAKING_MESSAGES):
            self._absorb(self._matchmaker.handle(event, now), effects, now)
        elif isinstance(message, GroupAsk):
            effects.append(self._rounds.answer(peer, message.group, self._epoch))
        elif isinstance(message, ROUND_MESSAGES):
            self._round_event(event, message.group, effects, now)

    def _round_event(
        self, event: Received | ChunkArrived, group: bytes, effects: list[Effect], now: float
    ) -> None:
        running = self._rounds.get(group)
        if running is not None:
            self._pass_on(running, running.machine.handle(event, now), effects, now)
        else:
            effects += self._rounds.stray(event, self._matchmaker.seeking, self._epoch)

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
        self._due = None
        if self._averaging is not None or (
            request.due_epoch is not None and request.due_epoch != self._epoch
        ):
            # The swarm went on while the snapshot was made.
            effects.append(AveragingEnded(EpochReport(self._epoch, (), 0.0, True), self._epoch))
            return
        stale = self._missed >= STALE_EPOCHS or (not self._averaged and self._epoch > 0)
        weight = 0.0 if stale and not request.always_weighs else request.weight
        self._averaging = Averaging(request, now, [weight] * request.chunks)
        view, me = self.view, self._signer.peer
        peers = view.averaging(request.schema)
        if view.me.schema != request.schema:
            peers = sorted((*peers, me))
        self._averaging.planned = len(peers)
        if len(peers) == 1:
            self._end(effects, now)
            return
        size = self._config.matchmaking.group_size
        plan, ranked = grid.arrange(peers, self._epoch, size, view.dialable)
        self._seek(plan.path(ranked.index(me), 0), effects, now)

    def _seek(self, path: tuple[int, ...], effects: list[Effect], now: float) -> None:
        current = self._averaging
        assert current is not None
        current.sought = now
        current.group = None
        current.key = key = GroupKey(self._epoch, current.axis, path)
        fields = current.join_fields(self.view.me)
        self._absorb(self._matchmaker.seek(key, fields, now), effects, now)

    def _group_ready(self, ready: GroupReady, effects: list[Effect], now: float) -> None:
        current = self._averaging
        assert current is not None
        formed, seat, climb = ready.formed, ready.seat, current.climb
        group = GroupId(formed.group)
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
        stale = failed.epoch > self._epoch
        if not stale:
            current.no_group(self._signer.peer, failed.reason, now)
        self._end(effects, now, swarm_epoch=failed.epoch)

    def _end(self, effects: list[Effect], now: float, swarm_epoch: int = 0) -> None:
        current = self._averaging
        assert current is not None
        self._averaging = None
        self._matchmaker.bound = None
        stale = swarm_epoch > self._epoch
        report = EpochReport(self._epoch, tuple(current.reports), now - current.began, stale)
        if stale:
            self._go_to(swarm_epoch, effects, now)
        else:
            self._averaged = True
            self._missed = 0
            self._advance(self._epoch + 1, effects, now)
        effects.append(AveragingEnded(report, self._epoch))

    def _advance(self, epoch: int, effects: list[Effect], now: float) -> None:
        self._epoch = epoch
        self._due = None
        last = self._latest_progress
        if last is not None:  # its samples were the epoch's before
            self._latest_progress = LocalProgress(0.0, last.rate, last.step_s)
        self._matchmaker.epoch = epoch
        self._progress.advance(epoch, now)
        live = len(self.view.live)
        # In a large swarm a sample of the peers tells the rest; the others extrapolate.
        if live <= PUBLISH_ALWAYS or self._rng.random() < PUBLISHERS / live:
            effects += self._membership.publish(now, epoch=epoch, **self._progress.pace())

    def _go_to(self, epoch: int, effects: list[Effect], now: float) -> None:
        """Follow the swarm to a later epoch without having averaged the ones between."""
        effects.append(
            Emit(Notice("behind", None, f"swarm is at epoch {epoch}, this peer at {self._epoch}"))
        )
        self._missed += epoch - self._epoch
        self._advance(epoch, effects, now)

    # --- training -------------------------------------------------------------------------

    def _local_progress(self, event: LocalProgress, effects: list[Effect], now: float) -> None:
        self._latest_progress = event
        self._matchmaker.ready_s = event.step_s if event.step_s > 0 else -1.0
        if self._averaging is not None:
            return  # these samples are the next epoch's
        fields = self._progress.local(event.samples, event.rate, event.step_s, now)
        if fields is not None:
            effects += self._membership.publish(now, epoch=self._epoch, **fields)

    # --- after every event ----------------------------------------------------------------

    def _rest(self, effects: list[Effect], now: float) -> None:
        if self.view.generation != self._generation:
            self._generation = self.view.generation
            self._tell_losses(effects, now)
            self._adopt_schema(effects, now)
            self._absorb(self._matchmaker.handle(Tick(), now), effects, now)
            effects += self._misfits.name()
        if self._averaging is None:
            self._follow(effects, now)
        self._clock.wake_at(self._next_wakeup())

    def _tell_losses(self, effects: list[Effect], now: float) -> None:
        for running, peer in self._rounds.unreachable(self.view):
            self._pass_on(running, running.machine.lost(peer, now), effects, now)

    def _adopt_schema(self, effects: list[Effect], now: float) -> None:
        """An aux peer has no model; it reduces what the workers average."""
        if self._role is not Role.AUX or self.view.me.schema:
            return
        known = (self.view.record(peer) for peer in self.view.live)
        schema = next((r.schema for r in known if r is not None and r.schema), b"")
        if schema:
            effects += self._membership.publish(now, schema=schema)

    def _follow(self, effects: list[Effect], now: float) -> None:
        """Become due, or go to the swarm's epoch."""
        called = self._matchmaker.called
        swarm_epoch = self._progress.swarm_epoch()
        if called is not None and called.epoch > swarm_epoch:
            swarm_epoch = called.epoch
        if swarm_epoch > self._epoch:
            self._go_to(swarm_epoch, effects, now)
        if self._due == self._epoch:
            return
        is_called = called is not None and called.epoch == self._epoch
        if self.view.me.schema and (is_called or self._progress.due(now)):
            self._due = self._epoch
            effects.append(AveragingDue(self._epoch))

    def _next_wakeup(self) -> float | None:
        soonest = sooner(self._membership.wakeup, self._matchmaker.wakeup)
        for running in self._rounds.all():
            soonest = sooner(soonest, running.machine.wakeup)
        asks = self.view.me.schema or self._latest_progress  # else nobody looks at the progress
        if asks and self._averaging is None and self._due is None:
            soonest = sooner(soonest, self._progress.wakeup)
        return soonest
