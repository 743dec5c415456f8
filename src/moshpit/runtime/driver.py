"""Drives a `Node` over a real transport and a real clock. Everything here is one thread.

Effects are executed in order, before the next event is handed in. Payloads move between the
transport and the round's `RoundStore`; the node only names them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

import msgspec
import torch

from moshpit.config import SwarmConfig
from moshpit.errors import ClosedError, KeyInUseError, LocalError
from moshpit.events import EpochReport, Notice
from moshpit.protocol.machine import (
    AveragingDue,
    AveragingEnded,
    BeginAveraging,
    ChunkArrived,
    CloseRound,
    Effect,
    Emit,
    Event,
    GroupReady,
    Leave,
    LinkDown,
    LinkUp,
    LocalProgress,
    Received,
    SeekFailed,
    Send,
    Signer,
    Silent,
    Tick,
    View,
)
from moshpit.protocol.node import Node
from moshpit.protocol.roster import TWIN
from moshpit.runtime.bandwidth import LinkWatch
from moshpit.runtime.company import NUMEL_BYTES, SwarmStats, live_records
from moshpit.runtime.contacts import Contacts
from moshpit.runtime.doubles import Doubles
from moshpit.runtime.evening import Evenness
from moshpit.runtime.helpdesk import HelpDesk
from moshpit.runtime.jobs import Averaging
from moshpit.runtime.parcels import ParcelDesk
from moshpit.runtime.reach import Reach
from moshpit.runtime.record import advertised, own_hosts, worth_dialling
from moshpit.runtime.rounds import Rounds
from moshpit.runtime.statesync import StateDesk
from moshpit.runtime.waiting import REAL_TIME, Waiting
from moshpit.tensors.layout import ChunkPlan
from moshpit.transport.base import Transport
from moshpit.transport.notices import KEY_IN_USE
from moshpit.types import Address, PeerId, Role
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.help import HELP_MESSAGES
from moshpit.wire.messages import Admission, AnyMessage, PeerRecord
from moshpit.wire.parcels import PARCEL_MESSAGES
from moshpit.wire.transfer import STATE_MESSAGES


@dataclass(slots=True)
class Counters:
    """Sums over a peer's life."""

    rounds: int = 0
    rounds_partial: int = 0
    rounds_failed: int = 0
    epochs: int = 0
    payload_received: int = 0
    last_report: EpochReport | None = None


@dataclass(slots=True)
class Listeners:
    """Whom the driver tells, in its own thread; nothing here may block."""

    notice: list[Callable[[Notice], None]] = field(default_factory=list[Callable[[Notice], None]])
    due: Callable[[int], None] | None = None


class Driver:
    """One peer on a real network (implements `moshpit.transport.base.Handler`).

    Args:
        signer: keys.
        record: the peer's first record, unsigned.
        config: settings.
        transport: started by `start`, closed by `close`.
        listeners: whom to tell.
        rng: what its machines draw from.
        waiting: how training waits for parcels.
    """

    def __init__(
        self,
        signer: Signer,
        record: PeerRecord,
        config: SwarmConfig,
        transport: Transport,
        *,
        listeners: Listeners,
        rng: Random | None = None,
        waiting: Waiting = REAL_TIME,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._config = config
        self._listeners = listeners
        self._signer = signer
        self._role = Role(record.role)
        self._record = record
        self.node: Node
        self._rng = rng if rng is not None else Random()
        self._started = False
        self._own_hosts = own_hosts()
        self.counters = Counters()
        self._rounds = Rounds(transport)
        self._desk = HelpDesk(
            transport, self._tell, dial_s=config.transport.dial_timeout_s, known=self.addresses_of
        )
        self._reach: Reach | None = None
        self.states = StateDesk(transport, self._tell, config.transport.chunk_bytes, self._rng)
        self.parcels = ParcelDesk(
            transport, self._tell, waiting, config.transport.chunk_bytes, self._rng.getrandbits(32)
        )
        self._link = LinkWatch(transport.flow, self._measured, given=record.up)
        self._evenness = Evenness(transport.bulk, self._rounds.outbox.waiting)
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at = 0.0
        self._busy = True  # until there is a node, events wait
        self._pending: deque[Event] = deque()
        self._contacts: Contacts | None = None
        self._waiters: list[tuple[Callable[[View], bool], asyncio.Future[None]]] = []
        self._generation = -1
        self._idle = asyncio.Event()
        self._idle.set()
        self._leaving = False
        self._closed = False
        self.failure: LocalError | None = None
        """What has ended this peer for good."""
        self._doubles = Doubles()
        self._ending: asyncio.Task[None] | None = None

    # --- life -----------------------------------------------------------------------------

    async def start(self, contacts: Sequence[Address], reach: Reach | None = None) -> None:
        """Listen, then dial the run's first addresses until somebody answers.

        Args:
            contacts: addresses from the ticket.
            reach: says where others can dial this peer; without it, at what it listens at.
        """
        await self._transport.start(self)
        known = reach.addresses() if reach is not None else advertised(self._transport.addresses)
        record = msgspec.structs.replace(
            self._record, addresses=tuple((a.host, a.port) for a in known)
        )
        self.node = Node(self._signer, record, self._config, self._rng, self._loop.time())
        self.states.epoch = lambda: self.node.epoch
        self._started = True
        self._run([])
        others = [c for c in contacts if c not in known]
        self._contacts = Contacts(self._transport, self._tell, others)
        await self._contacts.begin(lambda: len(self.node.view.live) == 1, self._doubled)
        if reach is not None:
            self._reach, self._desk.answered = reach, reach.answered
            reach.begin(self.node, self._run, self._tell, self._rng)

    async def close(self) -> None:
        """Serve what groupmates still need, say goodbye, end every task. Idempotent."""
        if self._leaving:
            return
        self._leaving = True
        if self._reach is not None:
            await self._reach.close()
        if self._started and self.failure is None:
            # Results that this peer has reduced may still be on their way to others.
            linger_s = self._config.round.linger_s + self._config.round.stall_s
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), linger_s)
            self.handle(Leave())
        self._closed = True
        if self._contacts is not None:
            await self._contacts.close()
        if self._timer is not None:
            self._timer.cancel()
        self._link.stop()
        self._evenness.stop()
        await self._desk.close()
        await self.states.close()
        self.parcels.close()
        await self._transport.close()
        self._rounds.fail(ClosedError("the swarm was closed"))

    def _doubled(self) -> None:
        """Another process is this peer now, so this one ends, and says no goodbye in its name."""
        if self.failure is None and not self._leaving:
            self.failure, self._closed = KeyInUseError(), True
            self._tell(Notice("key-in-use", None, str(self.failure)))
            self._rounds.fail(self.failure)
            self._ending = self._loop.create_task(self._transport.close())

    async def until(self, wanted: Callable[[View], bool], timeout_s: float) -> bool:
        """Wait until the view is as wanted; False if it is not in time."""
        if wanted(self.node.view):
            return True
        waiter = (wanted, self._loop.create_future())
        self._waiters.append(waiter)
        try:
            await asyncio.wait_for(waiter[1], timeout_s)
        except TimeoutError:
            return False
        finally:
            self._waiters.remove(waiter)
        return True

    async def records(self) -> list[PeerRecord]:
        """See `Swarm.peers`."""
        return live_records(self.node.view)

    def _look(self) -> None:
        """Wake those who wait for a view like the present one."""
        view = self.node.view
        if view.generation != self._generation:
            self._generation = view.generation
            self.parcels.view(view.live)
            for wanted, future in self._waiters:
                if not future.done() and wanted(view):
                    future.set_result(None)

    @property
    def bytes_sent(self) -> int:
        """Payload bytes of contributions, results and parcels, over this peer's life."""
        return self._rounds.outbox.bytes_sent + self.parcels.bytes_sent

    def stats(self) -> SwarmStats:
        """See `Swarm.stats`."""
        c = self.counters
        return SwarmStats(
            bytes_sent=self.bytes_sent,
            bytes_received=c.payload_received,
            rounds=c.rounds,
            rounds_partial=c.rounds_partial,
            rounds_failed=c.rounds_failed,
            epochs=c.epochs,
            last_report=c.last_report,
        )

    # --- what the trainer asks ------------------------------------------------------------

    def attach(self, schema: bytes, target: float, epoch: int = 0) -> None:
        """See `Node.attach`."""
        self.parcels.attach(int.from_bytes(schema[-NUMEL_BYTES:], "little"))
        self._run(self.node.attach(schema, target, self._loop.time(), epoch))

    def report_progress(self, samples: float, rate: float, step_s: float) -> None:
        """See `moshpit.protocol.machine.LocalProgress`."""
        if not self._closed:
            self.handle(LocalProgress(samples, rate, step_s))

    def begin(
        self, job: Averaging, weight: float, schema: bytes, epoch: int | None, always: bool
    ) -> None:
        """Average a snapshot; ``job`` is told when it has ended."""
        if self._closed:
            job.fail(self.failure or ClosedError("the swarm is closed"))
            return
        if not self._rounds.begin(job):
            job.fail(LocalError("an averaging is under way; wait for it first"))
            return
        self._link.tell()
        self.handle(
            BeginAveraging(
                weight=weight,
                schema=schema,
                chunks=job.plan.chunks,
                vector_bytes=4 * job.plan.numel,
                due_epoch=epoch,
                always_weighs=always,
                fill_s=job.fill_s,
                earlier=job.earlier,
                merges=job.merges,
            )
        )

    def filled(self, job: Averaging) -> None:
        """More of an averaging's vector is there."""
        if not self._closed:
            self._rounds.filled(job)

    def _measured(self, up: float, down: float) -> None:
        self._run(self.node.publish({"up": up, "down": down}, self._loop.time()))

    async def abandon(self, job: Averaging) -> None:
        """Nobody waits for this averaging any more, and its vectors are wanted back."""
        job.give_back(ended=job.done())

    # --- the node -------------------------------------------------------------------------

    def handle(self, event: Event) -> None:
        """Hand an event to the node and execute the effects, then those that this caused."""
        if self._busy:
            self._pending.append(event)
        elif not self._closed:
            self._run(self.node.handle(event, self._loop.time()))

    def _run(self, effects: list[Effect]) -> None:
        self._busy = True
        try:
            self._execute(effects)
        finally:
            self._busy = False
        if self._pending:
            self.handle(self._pending.popleft())
        else:
            self._look()
            self._arm()

    def _arm(self) -> None:
        at = self.node.wakeup
        if self._timer is not None:
            if at is not None and self._timer_at == at:
                return
            self._timer.cancel()
            self._timer = None
        if at is not None and not self._closed:
            self._timer_at = at
            self._timer = self._loop.call_at(at, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self.handle(Tick())

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            if not self._rounds.execute(effect):
                self._course(effect)

    def _course(self, effect: Effect) -> None:
        """Effects that are not about payloads."""
        match effect:
            case Send(peer=peer, message=message):
                self._transport.send(peer, message)
            case Emit(notice=notice):
                self._tell(notice)
                if notice.code == TWIN:
                    self._doubled()
            case GroupReady(formed=formed, seat=seat, source=source):
                self._rounds.open(formed, seat, source)
                self._idle.clear()
                self._link.start()
                self._evenness.start()
            case CloseRound(group=group):
                self._rounds.close(group)
                if not self._rounds.any_open:
                    self._idle.set()
                    self._link.stop()
                    self._evenness.stop()
            case AveragingDue(epoch=epoch):
                self._averaging_due(epoch)
            case AveragingEnded(report=report):
                self._averaging_ended(report)
            case SeekFailed() | Silent():
                pass  # the node has acted on it
            case _:
                raise AssertionError(f"effect without a driver: {effect}")

    # --- averaging ------------------------------------------------------------------------

    def _averaging_due(self, epoch: int) -> None:
        if self._role is Role.AUX:
            self._begin_aux(epoch)
        elif self._listeners.due is not None:
            self._listeners.due(epoch)

    def _begin_aux(self, epoch: int) -> None:
        """An aux peer has no value of its own: it reduces, and weighs nothing."""
        schema = self.node.view.me.schema
        numel = int.from_bytes(schema[8:], "little")
        plan = ChunkPlan.of(numel, self._config.transport)
        job = Averaging(torch.zeros(numel), plan, None, in_place=True)
        self._loop.call_soon(self.begin, job, 0.0, schema, epoch, False)

    def _averaging_ended(self, report: EpochReport) -> None:
        report = self._rounds.complete(report)
        self._count(report)
        self._rounds.finish(report)

    def _count(self, report: EpochReport) -> None:
        counters = self.counters
        counters.last_report = report
        counters.epochs += 1
        for r in report.rounds:
            counters.rounds += 1
            counters.rounds_partial += r.outcome.value == "partial"
            counters.rounds_failed += r.outcome.value == "failed"

    # --- Handler --------------------------------------------------------------------------

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        """See `moshpit.transport.base.Handler`."""
        self.handle(LinkUp(peer))
        self.parcels.again(peer)

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        """See `moshpit.transport.base.Handler`."""
        self._rounds.forget(peer)
        self.states.lost(peer)
        self.handle(LinkDown(peer, refused, detail))

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        """See `moshpit.transport.base.Handler`."""
        if isinstance(message, HELP_MESSAGES):
            self._desk.handle(peer, message)
        elif isinstance(message, STATE_MESSAGES):
            self.states.handle(peer, message)
        elif isinstance(message, PARCEL_MESSAGES):
            self.parcels.handle(peer, message)
        else:
            self.handle(Received(peer, message))

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        """See `moshpit.transport.base.Handler`."""
        if header.kind is ChunkKind.STATE:
            return self.states.sink(peer, header)
        if header.kind is ChunkKind.PARCEL:
            return self.parcels.sink(peer, header)
        sink, fault = self._rounds.sink(peer, header)
        if sink is None:
            self.handle(ChunkArrived(peer, header, fault))
        return sink

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        """See `moshpit.transport.base.Handler`."""
        assert not self._busy, "a chunk arrived in the middle of another event"
        if header.kind is ChunkKind.STATE:
            self.states.arrived(peer, header)
            return
        if header.kind is ChunkKind.PARCEL:
            self.counters.payload_received += header.length
            self.parcels.arrived(peer, header)
            return
        fault = self._rounds.arrived(peer, header)
        if fault is None:
            return
        self.counters.payload_received += header.length
        try:
            self.handle(ChunkArrived(peer, header, fault))
        finally:
            self._rounds.dispose()

    def chunks_wanted(self, peer: PeerId) -> None:
        """See `moshpit.transport.base.Handler`."""
        self._rounds.outbox.pump(peer)
        self.states.pump(peer)
        self.parcels.pump(peer)

    def bulk_reset(self, peer: PeerId) -> None:
        """See `moshpit.transport.base.Handler`."""
        self._rounds.outbox.send_again(peer)
        self.parcels.again(peer)

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        """See `moshpit.transport.base.Handler`."""
        record = self.node.view.record(peer)
        return worth_dialling(record, self._own_hosts) if record is not None else []

    def on_notice(self, notice: Notice) -> None:
        """See `moshpit.transport.base.Handler`."""
        self._tell(notice)
        if notice.code == KEY_IN_USE and notice.peer is not None:
            connected = sum(map(self._transport.connected, self.node.view.live))
            if self._doubles.refused(notice.peer, connected, self._loop.time()):
                self._doubled()

    def _tell(self, notice: Notice) -> None:
        for listener in self._listeners.notice:
            listener(notice)
