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
- *Own pauses.* When a handler is called long after its wake-up was due, this process did not
  run (SIGSTOP, a laptop's lid, an overloaded machine). The parts see a clock without the gap,
  so that a paused peer does not believe that everybody else fell silent.
"""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from moshpit.config import SwarmConfig
from moshpit.events import EpochReport, Notice, RoundReport
from moshpit.protocol import grid
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.course import Averaging, RunningRound
from moshpit.protocol.machine import (
    AveragingDue,
    AveragingEnded,
    BeginAveraging,
    ChunkArrived,
    Effect,
    Emit,
    Event,
    GroupReady,
    Leave,
    LinkDown,
    LinkUp,
    LocalProgress,
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
from moshpit.protocol.progress import Progress
from moshpit.protocol.view import Entry
from moshpit.types import GroupId, PeerId, Role
from moshpit.wire.messages import (
    MATCHMAKING_MESSAGES,
    MEMBERSHIP_MESSAGES,
    ROUND_MESSAGES,
    Beat,
    GroupAsk,
    GroupFormed,
    GroupKey,
    PeerRecord,
    RoundMessage,
    RoundOver,
    Takeover,
    Want,
)

PAUSE_MIN_S = 0.4  # guess: a wake-up later than this is a pause of this process
CLOSED_KEPT = 64  # guess: how many finished groups are remembered, to answer RoundOver
STALE_EPOCHS = 2  # guess: missing so many epochs makes one's own value worthless
MISFITS_MAX = 64  # guess: peers with another model that are named
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
        self._rounds: OrderedDict[GroupId, RunningRound] = OrderedDict()
        self._closed: OrderedDict[GroupId, None] = OrderedDict()
        self._misfits: dict[PeerId, bytes] = {}
        self._changed: dict[PeerId, None] = {}
        """Whose records have changed since misfits were looked for."""
        self._membership.view.watch(self._note_change)
        self._generation = -1
        self._skew = 0.0
        self._own_now = now
        self._own_wakeup = now
        self._wakeup: float | None = now

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
        return self._wakeup

    # --- what drivers call ----------------------------------------------------------------

    def attach(self, schema: bytes, target: float, now: float) -> list[Effect]:
        """Say what this peer averages and how many samples an epoch has."""
        now -= self._skew
        self._progress.target = target
        effects = self._membership.publish(now, schema=schema)
        self._rest(effects, now)
        return effects

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        if self._wakeup is not None and now - self._wakeup > PAUSE_MIN_S:
            self._skew += now - self._wakeup
        now = self._own_time(now)
        effects: list[Effect] = []
        match event:
            case Received(peer=peer, message=message):
                self._membership.heard(peer, now)
                self._received(event, peer, message, effects, now)
            case ChunkArrived():
                self._chunk(event, effects, now)
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
                for group in list(self._rounds):
                    self._run_round(group, event, effects, now)
            case Leave():
                self._matchmaker.declines = True
                self._absorb(self._matchmaker.cancel(now), effects, now)
                effects += self._membership.leave(now)
        self._rest(effects, now)
        return effects

    def _own_time(self, now: float) -> float:
        """Return the time on the clock without pauses. It never jumps back, and a wake-up that
        is due is due, whatever rounding takes."""
        own = max(self._own_now, now - self._skew)
        if self._wakeup is not None and now >= self._wakeup:
            own = max(own, self._own_wakeup)
        self._own_now = own
        return own

    # --- routing --------------------------------------------------------------------------

    def _tick(self, event: Tick, effects: list[Effect], now: float) -> None:
        if _past(self._membership.wakeup, now):
            effects += self._membership.handle(event, now)
        if _past(self._matchmaker.wakeup, now):
            self._absorb(self._matchmaker.handle(event, now), effects, now)
        for group in list(self._rounds):
            running = self._rounds.get(group)
            if running is not None and _past(running.machine.wakeup, now):
                self._run_round(group, event, effects, now)
        if self._latest_progress is not None and _past(self._progress.wakeup, now):
            self._local_progress(self._latest_progress, effects, now)

    def _received(
        self, event: Received, peer: PeerId, message: object, effects: list[Effect], now: float
    ) -> None:
        if isinstance(message, MEMBERSHIP_MESSAGES):
            effects += self._membership.handle(event, now)
        elif isinstance(message, GroupFormed) and GroupId(message.group) in self._rounds:
            return  # an announcement passed on by a groupmate; we have it
        elif isinstance(message, MATCHMAKING_MESSAGES):
            self._absorb(self._matchmaker.handle(event, now), effects, now)
        elif isinstance(message, GroupAsk):
            running = self._rounds.get(GroupId(message.group))
            if running is not None:
                effects.append(Send(peer, running.formed))
            else:
                effects.append(Send(peer, RoundOver(message.group, self._epoch)))
        elif isinstance(message, ROUND_MESSAGES):
            self._round_message(event, peer, message, effects, now)

    def _round_message(
        self,
        event: Received,
        peer: PeerId,
        message: RoundMessage,
        effects: list[Effect],
        now: float,
    ) -> None:
        group = GroupId(message.group)
        if group in self._rounds:
            self._run_round(group, event, effects, now)
        elif isinstance(message, Beat) and group not in self._closed and self._matchmaker.seeking:
            # The host may have died between two announcements; the groupmate has one.
            effects.append(Send(peer, GroupAsk(group)))
        elif isinstance(message, Beat | Takeover | Want):
            effects.append(Send(peer, RoundOver(group, self._epoch)))

    def _chunk(self, event: ChunkArrived, effects: list[Effect], now: float) -> None:
        group = event.header.group
        if group in self._rounds:
            self._run_round(group, event, effects, now)
        else:
            effects.append(Send(event.peer, RoundOver(group, self._epoch)))

    def _run_round(self, group: GroupId, event: Event, effects: list[Effect], now: float) -> None:
        running = self._rounds[group]
        self._absorb(running.machine.handle(event, now), effects, now)
        self._forget_if_closed(group)

    def _forget_if_closed(self, group: GroupId) -> None:
        running = self._rounds.get(group)
        if running is not None and running.machine.closed:
            del self._rounds[group]
            self._closed[group] = None
            while len(self._closed) > CLOSED_KEPT:
                self._closed.popitem(last=False)

    def _absorb(self, new: list[Effect], effects: list[Effect], now: float) -> None:
        """Pass effects on, acting on those that are about the course of the averaging."""
        for effect in new:
            if isinstance(effect, SeekFailed):
                self._seek_failed(effect, effects, now)
                continue
            if isinstance(effect, Silent):
                effects += self._membership.silent(effect.peer, now)
                continue
            effects.append(effect)
            if isinstance(effect, GroupReady):
                self._group_ready(effect, effects, now)
            elif isinstance(effect, RoundEnded):
                effects[-1] = self._round_ended(effect.report, now)
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
        group = GroupId(ready.formed.group)
        current.group = group
        current.meeting_s = now - current.sought
        machine = AllReduce(
            ready.formed, ready.seat, current.masses, self._signer, self._config.round, now
        )
        self._rounds[group] = RunningRound(machine, ready.formed, ready.seat)
        self._absorb(machine.start(now), effects, now)
        self._forget_if_closed(group)
        self._tell_losses(effects, now)

    def _round_ended(self, report: RoundReport, now: float) -> RoundEnded:
        current = self._averaging
        if current is not None and current.group == report.group:
            report = msgspec.structs.replace(report, meeting_s=current.meeting_s)
            current.reports.append(report)
        return RoundEnded(report)

    def _next_axis(self, effects: list[Effect], now: float) -> None:
        current = self._averaging
        if current is None or current.group is None:
            return
        running = self._rounds[current.group]
        path = running.formed.next_path[running.seat]
        if not path:
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
        stale = failed.epoch > self._epoch
        if not stale:
            current.no_group(self._signer.peer, failed.reason, now)
        self._end(effects, now, swarm_epoch=failed.epoch)

    def _end(self, effects: list[Effect], now: float, swarm_epoch: int = 0) -> None:
        current = self._averaging
        assert current is not None
        self._averaging = None
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
            self._name_misfits(effects)
        if self._averaging is None:
            self._follow(effects, now)
        self._wakeup = self._next_wakeup()

    def _tell_losses(self, effects: list[Effect], now: float) -> None:
        for group in list(self._rounds):
            running = self._rounds[group]
            for join in running.formed.joins:
                known = self.view.record(join.peer) is not None
                if known and not self.view.reachable(join.peer):
                    lost = running.machine.lost(PeerId(join.peer), now)
                    self._absorb(lost, effects, now)
            self._forget_if_closed(group)

    def _adopt_schema(self, effects: list[Effect], now: float) -> None:
        """An aux peer has no model; it reduces what the workers average."""
        if self._role is not Role.AUX or self.view.me.schema:
            return
        for peer in self.view.live:
            record = self.view.record(peer)
            if record is not None and record.schema:
                effects += self._membership.publish(now, schema=record.schema)
                return

    def _note_change(self, entry: Entry) -> None:
        if entry.record.schema != self.view.me.schema:
            self._changed[PeerId(entry.record.peer)] = None

    def _name_misfits(self, effects: list[Effect]) -> None:
        """Say, once, who averages something else and so will never meet this peer."""
        mine = self.view.me.schema
        if not mine:
            return
        changed, self._changed = self._changed, {}
        for peer in changed:
            record = self.view.record(peer)
            if record is None or len(self._misfits) >= MISFITS_MAX:
                continue
            if record.schema not in (b"", mine, self._misfits.get(peer)):
                self._misfits[peer] = record.schema
                effects.append(Emit(Notice("other-model", peer, "averages other tensors")))

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
        soonest = _sooner(self._membership.wakeup, self._matchmaker.wakeup)
        for running in self._rounds.values():
            soonest = _sooner(soonest, running.machine.wakeup)
        if self._averaging is None and self._due is None:
            soonest = _sooner(soonest, self._progress.wakeup)
        if soonest is not None:
            self._own_wakeup = soonest
            soonest += self._skew
        return soonest


def _sooner(a: float | None, b: float | None) -> float | None:
    return b if a is None or (b is not None and b < a) else a


def _past(wakeup: float | None, now: float) -> bool:
    return wakeup is not None and wakeup <= now
