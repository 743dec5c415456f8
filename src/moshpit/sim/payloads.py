"""Executes the payload effects of nodes on the symbolic store, under the eyes of the checkers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from moshpit.protocol.machine import (
    Accumulate,
    AccumulateOwn,
    AdoptResult,
    CancelSends,
    ChunkArrived,
    CloseRound,
    Effect,
    Finalize,
    GroupReady,
    ResetSum,
    RoundEnded,
    SendContribution,
    SendResult,
    TakeResult,
)
from moshpit.sim.checkers import Checkers
from moshpit.sim.network import Network
from moshpit.sim.process import Process
from moshpit.sim.schedule import Schedule
from moshpit.sim.store import Contribution, Mean, Payload
from moshpit.types import GroupId
from moshpit.wire.framing import ChunkHeader, ChunkKind


class Payloads:
    """What a driver does with tensors, for all processes.

    Args:
        schedule: the clock.
        network: carries chunks.
        checkers: are told of everything that an invariant speaks of.
        chunk_bytes: the size of a chunk on the wire.

    Attributes:
        arrived: the payload of the chunk that is being handled.
    """

    def __init__(
        self, schedule: Schedule, network: Network, checkers: Checkers, chunk_bytes: int
    ) -> None:
        self._schedule = schedule
        self._network = network
        self._checkers = checkers
        self._chunk_bytes = chunk_bytes
        self._open: dict[GroupId, int] = {}
        self.arrived: Payload | None = None
        self.actions: dict[type, Callable[[Process, Any], None]] = {
            GroupReady: self._group_ready,
            SendContribution: self._send_contribution,
            Accumulate: self._accumulate,
            AccumulateOwn: self._accumulate_own,
            ResetSum: self._reset_sum,
            Finalize: self._finalize,
            SendResult: self._send_result,
            AdoptResult: self._adopt_result,
            TakeResult: self._take_result,
            CancelSends: self._cancel_sends,
            RoundEnded: self._round_ended,
            CloseRound: self._close_round,
        }

    def died(self, process: Process) -> None:
        """Forget the rounds of a process that has ended."""
        for group in process.store.rounds:
            self._release(group)
        process.store.rounds.clear()

    def _group_ready(self, process: Process, effect: GroupReady) -> None:
        group = GroupId(effect.formed.group)
        if effect.source is None:
            round_ = process.store.open(group, effect.seat)
        else:
            span = effect.formed.key.span
            round_ = process.store.open_column(group, effect.seat, effect.source, span)
        self._open[group] = self._open.get(group, 0) + 1
        self._checkers.group_ready(self._schedule.now, process, effect.formed, round_)

    def _send_contribution(self, process: Process, effect: SendContribution) -> None:
        round_ = process.store.rounds[effect.group]
        fault, size, mass = process.corrupt, self._chunk_bytes, effect.mass
        if fault == "bad-mass":
            fault, mass = "", math.nan
        elif fault == "wrong-size":
            size += 1
        header = ChunkHeader(
            ChunkKind.CONTRIBUTION, effect.ballot, effect.chunk, size, 0, effect.group, mass, 0
        )
        payload = Contribution(round_.seat, round_.local[effect.chunk])
        event = ChunkArrived(process.peer, header, fault)
        self._network.send_chunk(process, effect.peer, event, payload)

    def _accumulate(self, process: Process, effect: Accumulate) -> None:
        payload = self.arrived
        if type(payload) is not Contribution:
            self._misuse(process, effect, "no contribution has arrived")
            return
        round_ = process.store.rounds[effect.group]
        round_.add(effect.chunk, payload.seat, payload.value, effect.mass)

    def _accumulate_own(self, process: Process, effect: AccumulateOwn) -> None:
        round_ = process.store.rounds[effect.group]
        round_.add(effect.chunk, round_.seat, round_.local[effect.chunk], effect.mass)

    def _reset_sum(self, process: Process, effect: ResetSum) -> None:
        process.store.rounds[effect.group].reset(effect.chunk)

    def _finalize(self, process: Process, effect: Finalize) -> None:
        round_ = process.store.rounds[effect.group]
        self._checkers.finalize(self._schedule.now, process, effect, round_)
        mean = round_.finalize(effect.chunk, effect.ballot, effect.mass, effect.seats)
        if self._checkers.is_held(effect.group, round_, effect.chunk, effect.ballot):
            round_.held[effect.chunk] = round_.means.pop(effect.chunk)
        else:
            self._checkers.mean(self._schedule.now, process, effect.group, effect.chunk, mean)

    def _send_result(self, process: Process, effect: SendResult) -> None:
        mean = process.store.rounds[effect.group].means.get(effect.chunk)
        if effect.mass == 0.0:  # nobody had anything to give: a header and no value
            mean = Mean(0.0, effect.ballot, 0.0, 0, -1)
        elif mean is None:
            self._misuse(process, effect, "sends a result that it does not hold")
            return
        header = ChunkHeader(
            ChunkKind.RESULT, effect.ballot, effect.chunk, self._chunk_bytes, 0, effect.group,
            effect.mass, effect.seats, effect.reach,
        )  # fmt: skip
        self._network.send_chunk(process, effect.peer, ChunkArrived(process.peer, header, ""), mean)

    def _take_result(self, process: Process, effect: TakeResult) -> None:
        payload = self.arrived
        if type(payload) is not Mean:
            self._misuse(process, effect, "no result has arrived")
            return
        process.store.rounds[effect.group].means[effect.chunk] = payload
        self._checkers.mean(self._schedule.now, process, effect.group, effect.chunk, payload)

    def _adopt_result(self, process: Process, effect: AdoptResult) -> None:
        rounds = process.store.rounds
        row = rounds[effect.group]
        column = row if effect.source is None else rounds.get(effect.source)
        made = row.held if effect.source is None else column.means if column is not None else {}
        found = made.get(effect.chunk)
        if found is None or column is None:
            self._misuse(process, effect, "adopts a result that it does not hold")
            return
        mean = Mean(found.value, effect.ballot, effect.mass, effect.seats, row.seat, effect.reach)
        self._checkers.adopted(self._schedule.now, process, effect, row, column)
        row.means[effect.chunk] = mean
        self._checkers.mean(self._schedule.now, process, effect.group, effect.chunk, mean)

    def _misuse(self, process: Process, effect: Effect, text: str) -> None:
        self._checkers.fail("S1", self._schedule.now, process, f"{effect}: {text}")

    def _cancel_sends(self, process: Process, effect: CancelSends) -> None:
        self._network.cancel(process, effect.peer, effect.group)

    def _round_ended(self, process: Process, effect: RoundEnded) -> None:
        report = effect.report
        round_ = process.store.rounds[report.group]
        absent = round_.lacks(report.missing)
        if not round_.span:
            process.store.adopt(round_, report.missing)
        self._checkers.round_ended(self._schedule.now, process, report, round_, absent)

    def _close_round(self, process: Process, effect: CloseRound) -> None:
        self._checkers.closed(self._schedule.now, process, effect.group)
        if process.store.rounds.pop(effect.group, None) is not None:
            self._release(effect.group)

    def _release(self, group: GroupId) -> None:
        self._open[group] -= 1
        if not self._open[group]:
            del self._open[group]
            self._checkers.forget(group)
