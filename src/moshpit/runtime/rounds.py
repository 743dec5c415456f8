"""The bytes of the rounds at this peer: what the effects about payloads do to memory.

One averaging at a time has its rounds here, each with a `RoundStore`; rounds that have ended
stay until the node closes them, for groupmates that still ask.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import msgspec
import torch

from moshpit.errors import MoshpitError
from moshpit.events import EpochReport, RoundReport
from moshpit.protocol.machine import (
    Accumulate,
    AccumulateOwn,
    AdoptResult,
    CancelSends,
    Effect,
    Finalize,
    ResetSum,
    RoundEnded,
    SendContribution,
    SendResult,
    TakeResult,
)
from moshpit.runtime.filling import Shipment
from moshpit.runtime.jobs import Averaging
from moshpit.runtime.outbox import LiveRound, Outbox
from moshpit.tensors.store import Buffers, RoundStore
from moshpit.transport.base import Transport
from moshpit.types import GroupId, PeerId
from moshpit.wire.framing import ChunkHeader
from moshpit.wire.messages import GroupFormed

COPIES_PER_S: Final = 2e9  # bytes; measured, copying into new memory
SETTLE_S_MIN: Final = 0.002  # guess
SETTLE_SHARE: Final = 0.005  # guess: of the time that the averaging took; nobody sees it


class Rounds:
    """All rounds of a peer; in the network thread.

    Args:
        transport: where chunks go.

    Attributes:
        outbox: the chunks on their way out.
    """

    def __init__(self, transport: Transport) -> None:
        self._loop = asyncio.get_running_loop()
        self._live: dict[GroupId, LiveRound] = {}
        self._reports: dict[GroupId, RoundReport] = {}
        self.outbox = Outbox(transport, self._live)
        self._buffers = Buffers()
        self._inbound: dict[PeerId, tuple[GroupId, memoryview]] = {}
        self._arrived: tuple[RoundStore, memoryview] | None = None
        self._job: Averaging | None = None
        self._ended: tuple[Averaging, EpochReport] | None = None
        self._actions: dict[type, Callable[[Any], None]] = {
            SendContribution: self._send,
            SendResult: self._send,
            Accumulate: self._accumulate,
            AccumulateOwn: self._accumulate_own,
            TakeResult: self._take,
            Finalize: self._finalize,
            ResetSum: self._reset,
            AdoptResult: self._adopt,
            CancelSends: self._cancel_sends,
            RoundEnded: self._round_ended,
        }

    @property
    def any_open(self) -> bool:
        """Whether somebody may still ask for something."""
        return bool(self._live)

    # --- an averaging ---------------------------------------------------------------------

    def begin(self, job: Averaging) -> bool:
        """The next rounds are this averaging's; False if another one is under way."""
        if self._job is not None:
            return False
        self._job = job
        return True

    def complete(self, report: EpochReport) -> EpochReport:
        """Return the report with the bytes that were moved."""
        rounds = tuple(self._reports.pop(r.group, r) for r in report.rounds)
        self._reports.clear()
        return msgspec.structs.replace(report, rounds=rounds)

    def finish(self, report: EpochReport) -> None:
        """The averaging has ended: hand it out, lent vectors when nobody asks for them, one that
        is still filled when that is done."""
        job, self._job = self._job, None
        if job is None:
            return
        self._ended = (job, report)
        if job.filling is not None and not job.filling.complete:
            return
        if job.settled or not job.lent:
            self._give_out()
        else:
            # Waiting is cheaper than copying only if it does not take longer, or hardly shows.
            copy_s = 4 * job.plan.numel / COPIES_PER_S
            patience_s = max(SETTLE_S_MIN, copy_s, SETTLE_SHARE * report.seconds)
            self._loop.call_later(patience_s, self._give_back, job)

    def filled(self, job: Averaging) -> None:
        """More of a vector is there: do what was put off, and end what only waited for it."""
        assert job.filling is not None
        for deed in job.filling.filled():
            deed()
        if job.filling.complete:
            job.remember_losses()
            if self._ended is not None and self._ended[0] is job:
                self._give_out()

    def _give_back(self, job: Averaging) -> None:
        """Some groupmates are slower: what they may ask for is copied, the vectors are free."""
        if self._ended is not None and self._ended[0] is job:
            self._buffers.clear()  # the copies need the room
            job.give_back(ended=True)
            self._give_out()

    def _give_out(self) -> None:
        assert self._ended is not None
        (job, report), self._ended = self._ended, None
        job.finish(report)

    def fail(self, error: MoshpitError) -> None:
        """End everything."""
        if self._ended is not None:
            job = self._ended[0]
            if job.filling is None or job.filling.complete:
                self._give_out()
            else:  # nobody knows what the rest of it was to be
                job.fail(error)
                self._ended = None
        if self._job is not None:
            self._job.fail(error)
            self._job = None
        self._live.clear()

    # --- rounds ---------------------------------------------------------------------------

    def open(self, formed: GroupFormed, seat: int, source: GroupId | None) -> None:
        """Make room for a round.

        Args:
            formed: its announcement.
            seat: this peer's.
            source: for a column of the torus, the row: its means are averaged further, where
                they are; its store takes them over chunk by chunk (`RoundStore.adopt`).
        """
        job, group, span = self._job, GroupId(formed.group), formed.key.span
        assert job is not None
        before, last = None, False
        if source is not None:
            local = result = self._live[source].store.result
        else:
            before = job.stores[-1] if job.stores else None
            # The first round leaves the snapshot alone, unless it was given away.
            fresh = before is None and not job.in_place
            local = job.current
            result = torch.empty_like(local) if fresh else local
            last = not formed.next_path[seat] and formed.columns is None
        store = RoundStore(
            local,
            result,
            job.plan,
            job.encoding(formed, seat),
            self._buffers,
            before=before,
            span=span,
            feedback=None if job.stores else job.feedback,
            exact=job.exact,
        )
        job.stores.append(store)
        self._live[group] = LiveRound(store, job, last)
        if last:
            job.landing = store.result

    def close(self, group: GroupId) -> None:
        """Free what a round holds."""
        live = self._live.pop(group)
        live.store.close()
        self.outbox.close_round(group)
        if self._ended is not None and self._ended[0].lent and self._ended[0].settled:
            self._give_out()

    def execute(self, effect: Effect) -> bool:
        """Do what an effect about payloads says; False if it is not about payloads."""
        action = self._actions.get(type(effect))
        if action is None:
            return False
        action(effect)
        return True

    def _arrival(self) -> tuple[RoundStore, memoryview]:
        assert self._arrived is not None, "a payload effect outside of a chunk's arrival"
        return self._arrived

    def _send(self, effect: SendContribution | SendResult) -> None:
        live = self._live.get(effect.group)
        if live is None:
            return
        if live.job.filling is None:
            self.outbox.put(effect.peer, effect)
            return
        own = isinstance(effect, SendContribution)
        deed = partial(self.outbox.put, effect.peer, effect)
        _in_turn(live, effect.chunk, deed, own=own, shipment=effect)

    def _accumulate(self, effect: Accumulate) -> None:
        store, buffer = self._arrival()
        store.accumulate(effect.chunk, effect.mass, buffer)

    def _accumulate_own(self, effect: AccumulateOwn) -> None:
        live, chunk = self._live[effect.group], effect.chunk
        deed = partial(live.store.accumulate_own, chunk, effect.mass)
        _in_turn(live, chunk, deed, own=True)

    def _reset(self, effect: ResetSum) -> None:
        self._live[effect.group].store.reset(effect.chunk)

    def _finalize(self, effect: Finalize) -> None:
        live, chunk = self._live[effect.group], effect.chunk
        _in_turn(live, chunk, partial(_finalize, live, chunk, effect.mass))

    def _adopt(self, effect: AdoptResult) -> None:
        if effect.source is not None:
            live, column = self._live[effect.group], self._live[effect.source].store
            _in_turn(live, effect.chunk, partial(live.store.adopt, column, effect.chunk))

    def _cancel_sends(self, effect: CancelSends) -> None:
        self.outbox.cancel(effect.peer, effect.group)
        if effect.group in self._live:
            _cancel(self._live[effect.group], effect.peer, effect.group)

    def _take(self, effect: TakeResult) -> None:
        live, chunk = self._live[effect.group], effect.chunk
        store, buffer = self._arrival()
        filling = live.job.filling
        if filling is None or not filling.waits(chunk, own=False):
            store.take(chunk, buffer)
            _landed(live, chunk)
        else:
            filling.put_off(chunk, store.take_later(chunk, buffer))
            filling.put_off(chunk, partial(_landed, live, chunk))

    def _round_ended(self, effect: RoundEnded) -> None:
        report = effect.report
        live = self._live[report.group]
        filling = live.job.filling
        later = filling.open_chunks() if filling is not None else {}
        missing = frozenset(report.missing)
        live.store.finish(missing, later)
        for chunk in later:
            finish = partial(live.store.finish_chunk, chunk, missing=chunk in missing)
            _in_turn(live, chunk, finish, own=True)
        if live.store is live.job.stores[0]:
            live.job.first = report
            if not later:
                live.job.remember_losses()
        if not report.span:
            live.job.current = live.store.result
        self._reports[report.group] = msgspec.structs.replace(
            report, bytes_sent=live.bytes_sent, bytes_received=live.bytes_received
        )

    # --- chunks that arrive ---------------------------------------------------------------

    def sink(self, peer: PeerId, header: ChunkHeader) -> tuple[memoryview | None, str]:
        """Return where a chunk's payload goes, or None and what is wrong with it."""
        self.release(peer)
        live = self._live.get(header.group)
        if live is None:
            return None, "unknown-group"
        sink = live.store.sink(header)
        if sink is None:
            return None, "wrong-size"
        self._inbound[peer] = (header.group, sink)
        return sink, ""

    def arrived(self, peer: PeerId, header: ChunkHeader) -> str | None:
        """A chunk is there: until `dispose`, effects may use it. Returns what is wrong with it,
        or None if there is no round for it any more."""
        inbound = self._inbound.pop(peer, None)
        live = self._live.get(inbound[0]) if inbound is not None else None
        if inbound is None or live is None:
            return None
        live.bytes_received += header.length
        self._arrived = (live.store, inbound[1])
        return live.store.fault(header, inbound[1])

    def dispose(self) -> None:
        """The chunk that had arrived was used, or is not wanted."""
        store, buffer = self._arrival()
        self._arrived = None
        store.release(buffer)

    def forget(self, peer: PeerId) -> None:
        """A peer is gone, and what it was sending or was to be sent."""
        self.outbox.forget(peer)
        for live in self._live.values():
            _cancel(live, peer)
        self.release(peer)

    def release(self, peer: PeerId) -> None:
        """Give back the buffer of a chunk that was cut short."""
        inbound = self._inbound.pop(peer, None)
        if inbound is not None:
            self._buffers.give(inbound[1])


def _in_turn(
    live: LiveRound,
    chunk: int,
    deed: Callable[[], object],
    *,
    own: bool = False,
    shipment: Shipment | None = None,
) -> None:
    """Do this, or put it off until the chunk is filled (`Filling`)."""
    filling = live.job.filling
    if filling is not None and filling.waits(chunk, own=own):
        filling.put_off(chunk, deed, shipment)
    else:
        deed()


def _finalize(live: LiveRound, chunk: int, mass: float) -> None:
    live.store.finalize(chunk, mass)
    _landed(live, chunk)


def _landed(live: LiveRound, chunk: int) -> None:
    if live.last and live.job.filling is not None:
        live.job.filling.landed(chunk)


def _cancel(live: LiveRound, peer: PeerId, group: GroupId | None = None) -> None:
    if live.job.filling is not None:
        live.job.filling.cancel(peer, group)
