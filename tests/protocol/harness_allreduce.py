"""A small world of virtual time for one round: machines, reliable links, and a symbolic store.

Values are fractions, so that means compare exactly. The world checks while it runs that every
effect makes sense (a result is taken once, nothing is sent to a seat that has not been heard,
a sum holds exactly the named contributions), and `World.check` judges the end.

Links keep order and lose nothing; they can be slow, be cut in both directions, and break with
or without notice. Control messages and chunks travel on separate connections.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from random import Random
from typing import Any

from moshpit.config import RoundConfig
from moshpit.events import Notice, Outcome, RoundReport
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.machine import (
    Accumulate,
    AccumulateOwn,
    CancelSends,
    ChunkArrived,
    CloseRound,
    Effect,
    Emit,
    Event,
    Finalize,
    LinkDown,
    Received,
    ResetSum,
    RoundEnded,
    Send,
    SendContribution,
    SendResult,
    Silent,
    TakeResult,
    Tick,
)
from moshpit.sim.signer import SimSigner
from moshpit.types import GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import (
    Beat,
    GroupAsk,
    GroupFormed,
    GroupKey,
    Join,
    Message,
    RoundOver,
    Takeover,
    Want,
)

GROUP = GroupId(b"a group of sixte")
CONFIG = RoundConfig(heartbeat_s=0.25, stall_s=1.0, linger_s=3.0)
DEADLINE_S = 20.0


def peer_of(seat: int) -> PeerId:
    """Return the id of the peer in a seat."""
    return PeerId(bytes([seat]) * 32)


def group_of(
    chunks: int,
    roles: Sequence[str],
    *,
    weighs: Sequence[bool] | None = None,
    origins: Sequence[bytes] | None = None,
    bounds: Sequence[int] | None = None,
) -> GroupFormed:
    """Announce a group with near-equal parts for all that reduce."""
    size = len(roles)
    key = GroupKey(3, 1, (0, 0))
    joins = tuple(
        Join(
            peer=peer_of(seat),
            key=key,
            nonce=1,
            role=roles[seat],
            schema=b"schema__",
            vector_chunks=chunks,
            bandwidth=0.0,
            weighs=weighs is None or weighs[seat],
            origin=b"" if origins is None else origins[seat],
        )
        for seat in range(size)
    )
    if bounds is None:
        reducers = [seat for seat in range(size) if roles[seat] != "client"]
        edges = [0]
        for seat in range(size):
            before = sum(1 for r in reducers if r <= seat)
            edges.append(chunks * before // max(1, len(reducers)))
        bounds = edges
    return GroupFormed(
        group=GROUP,
        host=peer_of(0),
        key=key,
        joins=joins,
        bounds=tuple(bounds),
        next_path=((),) * size,
        deadline_s=DEADLINE_S,
    )


@dataclass(frozen=True)
class Value:
    """A payload: what it is worth, and (for results) how it came about."""

    value: Fraction
    maker: int
    ballot: int = 0


@dataclass
class Process:
    """One seat: its machine, and what a driver would hold for it."""

    seat: int
    local: list[Fraction]
    masses: list[float]
    machine: AllReduce | None = None
    alive: bool = True
    paused: bool = False
    skew: float = 0.0
    sums: dict[int, list[tuple[int, float, Fraction]]] = field(default_factory=dict)
    results: dict[int, Value] = field(default_factory=dict)
    heard: set[int] = field(default_factory=set)
    report: RoundReport | None = None
    ended_at: float | None = None
    closed_at: float | None = None
    notices: list[Notice] = field(default_factory=list)
    inbox: list[Any] = field(default_factory=list)
    tick_at: float | None = None


class World:
    """A round among ``len(roles)`` seats.

    Args:
        seed: of everything that is random.
        chunks: in the vector.
        roles: by seat.
        masses: by seat and chunk.
        delay: gives the seconds that a control message takes from a seat to another.
        chunk_delay: the same for a chunk; chunks of a connection come one after another.
    """

    def __init__(
        self,
        seed: int,
        chunks: int,
        roles: Sequence[str],
        masses: Sequence[Sequence[float]],
        *,
        origins: Sequence[bytes] | None = None,
        config: RoundConfig = CONFIG,
        starts: Sequence[float] | None = None,
        delay: Callable[[int, int], float] | None = None,
        chunk_delay: Callable[[int, int], float] | None = None,
    ) -> None:
        self.rng = Random(seed)
        self.chunks = chunks
        self.size = len(roles)
        self.roles = list(roles)
        self.config = config
        weighs = [any(m > 0 for m in row) for row in masses]
        self.formed = group_of(chunks, roles, weighs=weighs, origins=origins)
        self.now = 0.0
        self.steps = 0
        self.trace: list[str] = []
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._last: dict[tuple[str, int, int], float] = {}
        self._epochs: dict[tuple[str, int, int], int] = {}
        self._cuts: set[tuple[int, int]] = set()
        self._delay = delay or (lambda a, b: 0.001 + 0.02 * self.rng.random())
        self._chunk_delay = chunk_delay or (lambda a, b: 0.001 + 0.03 * self.rng.random())
        self.made: dict[tuple[int, int], tuple[Fraction, float, int]] = {}
        """What was made of each chunk at each ballot: value, mass, seats."""
        self.on_step: Callable[[World], None] | None = None
        self.tamper: Callable[[int, int, ChunkHeader], tuple[ChunkHeader, str]] | None = None
        self.processes = [
            Process(
                seat,
                [Fraction(self.rng.randrange(-999, 1000)) for _ in range(chunks)],
                list(masses[seat]),
            )
            for seat in range(self.size)
        ]
        for process in self.processes:
            at = 0.0 if starts is None else starts[process.seat]
            if at != float("inf"):
                self.at(at, lambda p=process: self.start(p))

    # --- time -----------------------------------------------------------------------------

    def at(self, when: float, action: Callable[[], None]) -> None:
        """Do something at a time."""
        self._serial += 1
        heapq.heappush(self._queue, (when, self._serial, action))

    def run(self, until: float = 120.0) -> World:
        """Run until nothing is left to happen."""
        while self._queue:
            when, _, action = heapq.heappop(self._queue)
            if when > until:
                break
            self.now = max(self.now, when)
            action()
        return self

    # --- processes ------------------------------------------------------------------------

    def start(self, process: Process) -> None:
        """The seat's peer gets the announcement."""
        if process.machine is not None or not process.alive:
            return
        now = self.now - process.skew
        process.machine = AllReduce(
            self.formed,
            process.seat,
            process.masses,
            SimSigner(peer_of(process.seat)),
            self.config,
            now,
        )
        self._do(process, process.machine.start(now), None)

    def kill(self, seat: int, *, refused_after: float | None = 0.01) -> None:
        """End a process. Others are told after some seconds, or never (None)."""
        process = self.processes[seat]
        if not process.alive:
            return
        self.trace.append(f"{self.now:.3f} kill {seat}")
        process.alive = False
        if refused_after is None:
            return
        for other in self.processes:
            if other.seat != seat:
                event = LinkDown(peer_of(seat), True, "reset by peer")
                arrival = max(self.now + refused_after, self._last.get(("c", seat, other.seat), 0))
                self.at(arrival, lambda p=other, e=event: self.deliver(p, e, None))

    def pause(self, seat: int, seconds: float) -> None:
        """Stop a process; what arrives meanwhile waits, and its clock does not see the gap."""
        process = self.processes[seat]
        process.paused = True
        self.trace.append(f"{self.now:.3f} pause {seat} for {seconds}")
        self.at(self.now + seconds, lambda: self._resume(process, seconds))

    def _resume(self, process: Process, seconds: float) -> None:
        process.paused = False
        process.skew += seconds
        waiting, process.inbox = process.inbox, []
        for event, payload in waiting:
            self.deliver(process, event, payload)
        process.tick_at = None
        self._arm(process)

    def cut(self, a: int, b: int, *, tell: bool = True) -> None:
        """Break what connects two seats, for good."""
        self._cuts |= {(a, b), (b, a)}
        if tell:
            for here, there in ((a, b), (b, a)):
                event = LinkDown(peer_of(there), False, "cut")
                self.deliver(self.processes[here], event, None)

    # --- events ---------------------------------------------------------------------------

    def deliver(self, process: Process, event: Event, payload: Value | None) -> None:
        """Hand an event to a seat, as its node would."""
        if not process.alive:
            return
        if process.paused:
            process.inbox.append((event, payload))
            return
        if self.on_step is not None:
            self.on_step(self)
            if not process.alive:
                return
        self.steps += 1
        if isinstance(event, Received | ChunkArrived):
            process.heard.add(event.peer[0])
        if process.machine is None:
            self._before_start(process, event)
            return
        if process.machine.closed:
            self._after_close(process, event)
            return
        self._do(process, process.machine.handle(event, self.now - process.skew), event, payload)

    def _before_start(self, process: Process, event: Event) -> None:
        if isinstance(event, Received) and isinstance(event.message, Beat):
            self._send(process.seat, event.peer[0], GroupAsk(GROUP))
        elif isinstance(event, Received) and isinstance(event.message, GroupFormed):
            self.start(process)

    def _after_close(self, process: Process, event: Event) -> None:
        if isinstance(event, ChunkArrived) or (
            isinstance(event, Received) and isinstance(event.message, Beat | Takeover | Want)
        ):
            self._send(process.seat, event.peer[0], RoundOver(GROUP, 4))

    def _arm(self, process: Process) -> None:
        machine = process.machine
        if machine is None or machine.wakeup is None or process.paused:
            return
        at = max(self.now, machine.wakeup + process.skew)
        if process.tick_at is not None and process.tick_at <= at and process.tick_at > self.now:
            return
        process.tick_at = at
        self.at(at, lambda: self._tick(process, at))

    def _tick(self, process: Process, at: float) -> None:
        if process.tick_at != at or process.paused or not process.alive:
            return
        process.tick_at = None
        machine = process.machine
        assert machine is not None
        if machine.wakeup is not None and machine.wakeup + process.skew <= self.now + 1e-9:
            now = max(self.now - process.skew, machine.wakeup)
            self._do(process, machine.handle(Tick(), now), None)
        else:
            self._arm(process)

    # --- effects --------------------------------------------------------------------------

    def _do(
        self,
        process: Process,
        effects: list[Effect],
        event: Event | None,
        payload: Value | None = None,
    ) -> None:
        for effect in effects:
            assert process.closed_at is None, f"{effect} after the end"
            self._effect(process, effect, event, payload)
        self._arm(process)

    def _effect(
        self, process: Process, effect: Effect, event: Event | None, payload: Value | None
    ) -> None:
        seat = process.seat
        match effect:
            case Send(peer=peer, message=message):
                self._send(seat, peer[0], message)
            case Emit(notice=notice):
                process.notices.append(notice)
            case SendContribution(peer=peer, chunk=chunk):
                assert process.ended_at is None, "a contribution after the end"
                value = Value(process.local[chunk], seat)
                self._send_chunk(process, peer[0], ChunkKind.CONTRIBUTION, effect, value)
            case SendResult(peer=peer, chunk=chunk, mass=mass):
                value = process.results.get(chunk)
                if mass == 0:
                    value = Value(process.local[chunk], seat)
                assert value is not None, "a result that is not here"
                self._send_chunk(process, peer[0], ChunkKind.RESULT, effect, value)
            case Accumulate(chunk=chunk, mass=mass):
                assert isinstance(event, ChunkArrived)
                assert payload is not None
                assert event.header.kind is ChunkKind.CONTRIBUTION
                assert not event.fault
                assert (chunk, mass) == (event.header.chunk, event.header.mass)
                self._add(process, chunk, payload.maker, mass, payload.value)
            case AccumulateOwn(chunk=chunk, mass=mass):
                self._add(process, chunk, seat, mass, process.local[chunk])
            case ResetSum(chunk=chunk):
                process.sums.pop(chunk, None)
            case Finalize():
                self._finalize(process, effect)
            case TakeResult(chunk=chunk):
                assert isinstance(event, ChunkArrived)
                assert payload is not None
                assert event.header.kind is ChunkKind.RESULT
                assert not event.fault
                assert chunk == event.header.chunk
                assert chunk not in process.results
                assert chunk not in process.sums
                process.results[chunk] = payload
            case CancelSends(peer=peer):
                key = ("b", seat, peer[0])
                self._epochs[key] = self._epochs.get(key, 0) + 1
            case RoundEnded(report=report):
                assert process.report is None
                process.report, process.ended_at = report, self.now - process.skew
            case CloseRound():
                process.closed_at = self.now - process.skew
            case Silent():
                pass  # for membership, which is not in this world
            case _:
                raise AssertionError(f"unexpected {effect}")

    def _add(self, process: Process, chunk: int, who: int, mass: float, value: Fraction) -> None:
        assert chunk not in process.results, "a sum after the result"
        entries = process.sums.setdefault(chunk, [])
        assert who not in [entry[0] for entry in entries], "counted twice (S1)"
        assert mass > 0
        entries.append((who, mass, value))

    def _finalize(self, process: Process, effect: Finalize) -> None:
        entries = process.sums.pop(effect.chunk)
        mass = sum(Fraction(m) for _, m, _ in entries)
        assert abs(float(mass) - effect.mass) <= 1e-9 * effect.mass, "mass (S1)"
        named = effect.seats
        for who, _, _ in entries:
            assert named >> who & 1, "a contribution that is not named (S1)"
            named &= ~(1 << who)
        for who in range(self.size):
            if named >> who & 1:
                assert self.processes[who].masses[effect.chunk] == 0, "named, not in (S1)"
        value = sum((Fraction(m) * v for _, m, v in entries), Fraction()) / mass
        key = (effect.chunk, effect.ballot)
        assert key not in self.made, "made twice (S2)"
        self.made[key] = (value, effect.mass, effect.seats)
        process.results[effect.chunk] = Value(value, process.seat, effect.ballot)

    # --- the network ----------------------------------------------------------------------

    def _send(self, source: int, target: int, message: Message) -> None:
        self.trace.append(f"{self.now:.3f} {source}->{target} {message}")
        if (source, target) in self._cuts:
            self._unreachable(source, target)
            return
        client = self.roles[target] == "client" and target not in self.processes[source].heard
        assert not (client and self.roles[source] == "client"), "a client dials a client"
        if client:
            self._unreachable(source, target)
            return
        if not self.processes[target].alive:
            self._unreachable(source, target)
            return
        arrival = self._arrival("c", source, target, self._delay(source, target))
        event = Received(peer_of(source), message)
        self.at(arrival, lambda: self._land(source, target, event, None))

    def _unreachable(self, source: int, target: int) -> None:
        event = LinkDown(peer_of(target), False, "cannot be dialled")
        self.at(self.now + 0.5, lambda: self.deliver(self.processes[source], event, None))

    def _send_chunk(
        self,
        process: Process,
        target: int,
        kind: ChunkKind,
        effect: SendContribution | SendResult,
        value: Value,
    ) -> None:
        source = process.seat
        assert target in process.heard, "a chunk for a seat that has not been heard"
        if (source, target) in self._cuts:
            return
        seats = effect.seats if isinstance(effect, SendResult) else 0
        header = ChunkHeader(kind, effect.ballot, effect.chunk, 4, 0, GROUP, effect.mass, seats)
        fault = ""
        if self.tamper is not None:
            header, fault = self.tamper(source, target, header)
        key = ("b", source, target)
        epoch = self._epochs.get(key, 0)
        arrival = self._arrival("b", source, target, self._chunk_delay(source, target))
        event = ChunkArrived(peer_of(source), header, fault)

        def land() -> None:
            # CancelSends takes back what has not left; a killed process sends no more.
            if self._epochs.get(key, 0) == epoch and process.alive:
                self._land(source, target, event, value)

        self.at(arrival, land)

    def _arrival(self, channel: str, source: int, target: int, delay: float) -> float:
        key = (channel, source, target)
        begin = self._last.get(key, 0.0) if channel == "b" else 0.0
        arrival = max(max(begin, self.now) + delay, self._last.get(key, 0.0))
        self._last[key] = arrival
        return arrival

    def _land(self, source: int, target: int, event: Event, value: Value | None) -> None:
        if (source, target) not in self._cuts:
            self.deliver(self.processes[target], event, value)

    # --- judging --------------------------------------------------------------------------

    @property
    def survivors(self) -> list[Process]:
        """The processes that are alive."""
        return [p for p in self.processes if p.alive]

    def check(self) -> World:
        """S1, S2 and L1, as far as every ending must keep them."""
        for process in self.survivors:
            if process.machine is None:
                continue
            report = process.report
            assert report is not None, f"seat {process.seat} never ended (L1)"
            assert process.ended_at is not None
            assert process.closed_at is not None, f"seat {process.seat} never closed (L1)"
            began = process.machine._round.started
            assert process.ended_at <= began + DEADLINE_S + 1e-6, "ended after the deadline (L1)"
            limit = began + DEADLINE_S + self.config.linger_s
            assert process.closed_at <= limit + self.config.heartbeat_s, "closed too late (L1)"
            self._check_report(process, report)
        return self

    def _check_report(self, process: Process, report: RoundReport) -> None:
        mine = 1 << process.seat
        for chunk in range(self.chunks):
            if chunk in report.missing:
                assert chunk not in process.results
                assert report.ledger[chunk] == mine
                continue
            value = process.results[chunk]
            made = self.made[chunk, report.attempts[chunk]]
            assert made == (value.value, report.masses[chunk], report.ledger[chunk]), "S1, S2"

    def identity(self, process: Process) -> list[Any]:
        """Return which result a seat has of each chunk."""
        report = process.report
        assert report is not None
        return [
            None if chunk in report.missing else report.attempts[chunk]
            for chunk in range(self.chunks)
        ]

    def check_agreement(self) -> World:
        """All survivors hold the same bytes of every chunk (as after one failure)."""
        identities = [self.identity(p) for p in self.survivors]
        assert all(i == identities[0] for i in identities), identities
        return self

    def check_nothing_missing(self) -> World:
        """Every survivor has every chunk."""
        for process in self.survivors:
            assert process.report is not None
            assert process.report.missing == (), (process.seat, process.report.missing)
        return self

    def check_exact(self) -> World:
        """Everybody has the weighted mean of everybody."""
        for process in self.processes:
            assert process.report is not None
            assert process.report.outcome is Outcome.COMPLETE, process.report
            for chunk in range(self.chunks):
                mass = sum(Fraction(p.masses[chunk]) for p in self.processes)
                total = sum(Fraction(p.masses[chunk]) * p.local[chunk] for p in self.processes)
                held = process.results.get(chunk)
                value = process.local[chunk] if held is None else held.value
                if mass:
                    assert value == total / mass
        return self
