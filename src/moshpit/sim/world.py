"""The simulated world: a driver of nodes on a virtual network, with one clock.

It holds nodes exactly as `moshpit.runtime` does (`handle`, ``wakeup``, effects in order) and
knows nothing of what they say to each other. Everything random comes from generators that are
seeded by what they are for, so that a fault more does not change the network's dice.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from typing import Any, TextIO

from moshpit.protocol.known import Known
from moshpit.protocol.machine import (
    Accumulate,
    AveragingDue,
    AveragingEnded,
    BeginAveraging,
    ChunkArrived,
    Effect,
    Emit,
    Event,
    GroupReady,
    Leave,
    Received,
    SeekFailed,
    Send,
    Tick,
)
from moshpit.protocol.node import Node
from moshpit.sim.checkers import Checkers
from moshpit.sim.faults import Faults
from moshpit.sim.network import Network, Wiring
from moshpit.sim.payloads import Payloads
from moshpit.sim.process import Host, NodeMachine, Process, first_record, peer_id
from moshpit.sim.scenario import Scenario
from moshpit.sim.schedule import Schedule
from moshpit.sim.signer import SimSigner
from moshpit.sim.states import desks_of
from moshpit.sim.store import Contribution, Payload
from moshpit.sim.trace import Trace
from moshpit.sim.trainer import SCHEMA, Job, Phase, Trainer
from moshpit.types import PeerId, Role, short
from moshpit.wire.messages import Join, JoinRefused, Refusal

PORT = 7000
FIRST_ADDRESSES = 3  # how many a ticket names
JOIN_AGAIN_S = 2.0  # as a person's script would try
LEAVE_S = 1.0  # between saying goodbye and the end of the process
POLL_S = 0.25  # how often the end of the run is looked for
SPINS_MAX = 100  # ticks in a row after which a node still wants another at once
_MBIT = 1e6 / 8


class World:
    """One run of a scenario under one seed.

    Args:
        scenario: what happens.
        seed: the source of all randomness.
        log: where to write the readable trace.
    """

    def __init__(self, scenario: Scenario, seed: int, log: TextIO | None = None) -> None:
        self.schedule = Schedule()
        self.scenario = scenario
        self.config = scenario.config()
        self.hosts: list[Host] = []
        self.processes: list[Process] = []
        self.top_epoch = 0
        self.finished = False
        self._draining = False
        self._seed = seed
        self._rng = self.generator("world")
        self._by_peer: dict[PeerId, Process] = {}
        self._keys = 0
        self._known: Known | None = None
        self._spins: dict[int, int] = {}
        self.trace = Trace(log, self._name)
        self.checkers = Checkers(
            scenario.checks,
            self.config,
            scenario.swarm.peers,
            transfer=scenario.transfer is not None,
        )
        wiring = Wiring.of(
            scenario.network,
            dial_timeout_s=self.config.transport.dial_timeout_s,
            rng=self.generator("regions"),
        )
        self.network = Network(
            self.schedule, self.hosts, wiring, self.generator("network"), self._hand
        )
        self.network.on_join_failed = self._join_failed
        work = scenario.work
        self._job = Job(
            work.chunks, work.vector_bytes, work.drift, work.report_s, work.mode == "average",
            work.mode == "rest",
        )  # fmt: skip
        self._target = self._target_samples()
        chunk_bytes = max(1, work.vector_bytes // work.chunks)
        self._payloads = Payloads(self.schedule, self.network, self.checkers, chunk_bytes)
        self._actions: dict[type, Callable[[Process, Any], None]] = self._payloads.actions | {
            Send: self._send,
            Emit: self._ignore,
            SeekFailed: self._ignore,
            AveragingDue: self._averaging_due,
            AveragingEnded: self._averaging_ended,
        }
        self._desks = desks_of(self) if scenario.transfer is not None else None
        self.faults = Faults(scenario.faults, scenario.churn, self.generator("faults"), self)

    def generator(self, purpose: str) -> random.Random:
        return random.Random(f"{self._seed}/{purpose}")

    def _target_samples(self) -> float:
        work = self.scenario.work
        if work.mode != "train":
            return 0.0
        expected = self.scenario.swarm.peers * (1.0 - self.scenario.swarm.aux_share)
        return work.target_samples or work.epoch_s * work.rate_median * expected

    def _name(self, peer: bytes) -> str:
        process = self._by_peer.get(PeerId(peer))
        return process.name if process is not None else short(peer)

    # --- running --------------------------------------------------------------------------

    def run(self) -> None:
        """Run to the end: all epochs and then the drain, or the time limit."""
        checks = self.scenario.checks
        self.begin()
        self.schedule.at(POLL_S, self._poll)
        self.finished = self.schedule.run(checks.time_limit_s)
        if self.finished:
            self._draining = True
            self.schedule.run(self.schedule.now + checks.drain_s)
        self.checkers.finish(
            self.schedule.now, self.living(), self.faults.healed_epoch, self.finished
        )

    def begin(self) -> None:
        """Schedule the start of the first peers; `run` does it."""
        swarm = self.scenario.swarm
        plain = [self.new_host() for _ in range(swarm.peers)]
        if swarm.start == "warm":
            self.schedule.at(0.0, self._start_warm)
        else:
            for host in plain:
                when = swarm.join_spread_s * self._rng.random() if host.index else 0.0
                self.schedule.at(when, self._first_start, host)
        self.faults.epoch_reached(0)

    def _poll(self, _x: None, _y: None) -> None:
        goal = self.scenario.swarm.epochs
        if self.faults.pending == 0 and all(p.node.epoch >= goal for p in self.living()):
            self.schedule.stop()
        else:
            self.schedule.at(self.schedule.now + POLL_S, self._poll)

    def living(self) -> list[Process]:
        """Return the processes that are alive and mean to stay, oldest first."""
        hosts = (host.process for host in self.hosts)
        return [p for p in hosts if p is not None and p.alive and not p.leaving]

    # --- hosts and processes --------------------------------------------------------------

    def new_host(self) -> Host:
        """Put up another machine."""
        rng, wires = self._rng, self.scenario.network
        index = len(self.hosts)
        host = Host(
            index,
            rng.randrange(wires.regions),
            rng.uniform(*wires.up_mbit) * _MBIT,
            rng.uniform(*wires.down_mbit) * _MBIT,
            index > 0 and rng.random() < self.scenario.swarm.nat_share,
        )
        self.hosts.append(host)
        return host

    def _first_start(self, host: Host, _: None) -> None:
        self.start(host, same_key=False)

    def start(self, host: Host, *, same_key: bool) -> None:
        """Start a process on a host, with its last key or a new one."""
        if host.process is None:
            process = self._new_process(host, same_key=same_key)
            self._launch(process)
            self._join(process, None)
            process.trainer.work()

    def _start_warm(self, _x: None, _y: None) -> None:
        """Start everybody at once, each knowing everybody."""
        processes = [self._new_process(host, same_key=False) for host in self.hosts]
        records = [first_record(process, SCHEMA, PORT) for process in processes]
        self._known = Known([SimSigner(PeerId(r.peer)).sign_message(r) for r in records])
        for process in processes:
            self._launch(process)
            process.trainer.work()
        self._known = None

    def _new_process(self, host: Host, *, same_key: bool) -> Process:
        last = host.last
        if same_key and last is not None:
            peer, role = last.peer, last.role
        else:
            peer, role = peer_id(self._seed, self._keys), self._role(host)
            self._keys += 1
        index, offset = len(self.processes), self._rng.uniform(0.0, 1e3)
        process = Process(index, peer, host, role, born=self.schedule.now, offset=offset)
        host.process = host.last = process
        self.processes.append(process)
        self._by_peer[peer] = process
        return process

    def _launch(self, process: Process) -> None:
        process.node = self.make_node(process)
        if self._desks is not None and process.role.trains:
            self._desks.open(process)
        process.trainer = self._trainer(process)
        text = f"{process.name} starts ({process.role.value}, key {short(process.peer)})"
        self.note(text)
        self.faults.born(process)
        self._arm(process)

    def make_node(self, process: Process) -> NodeMachine:
        """Make the machine of a new process; tests of the checkers put broken ones here."""
        rng = self.generator(f"node/{process.index}")
        now = self.schedule.now + process.offset
        node = Node(
            SimSigner(process.peer), first_record(process, SCHEMA, PORT), self.config, rng, now,
            target=self._target, known=self._known,
        )  # fmt: skip
        node.merge(not self._job.average_only)
        return node

    def _role(self, host: Host) -> Role:
        if host.nat:
            return Role.CLIENT
        if host.index and self._rng.random() < self.scenario.swarm.aux_share:
            return Role.AUX
        return Role.WORKER

    def _trainer(self, process: Process) -> Trainer:
        work, host = self.scenario.work, process.host
        rng = self.generator(f"trainer/{process.index}")
        step_s = rng.uniform(*work.step_s)
        rate = work.rate_median * math.exp(rng.gauss(0.0, work.rate_sigma))
        batch = rate * step_s if process.role.trains else 0.0

        def hand(event: Event) -> None:
            self._hand(process, event, None)

        return Trainer(
            self._job, self.schedule, rng, hand,
            batch=batch, step_s=step_s, slowness=lambda: host.slow,
            between=lambda: self._between(process), merging=lambda: process.node.merging,
        )  # fmt: skip

    def _join(self, process: Process, _: None) -> None:
        """Dial the first addresses, as a ticket names them."""
        if not process.alive or process.links:
            return
        others = [p.host for p in self.living() if p is not process and not p.host.nat]
        for host in self._rng.sample(others, min(FIRST_ADDRESSES, len(others))):
            self.network.join(process, host)
        if not others:
            self._join_failed(process)

    def _join_failed(self, process: Process) -> None:
        self.schedule.at(self.schedule.now + JOIN_AGAIN_S, self._join, process)

    def kill(self, process: Process, *, dark: bool) -> None:
        """End a process, and its machine's power where ``dark``."""
        process.alive = False
        process.died = self.schedule.now
        process.trainer.stop()
        process.host.dark = dark
        process.host.process = None
        self.network.process_died(process)
        self.checkers.died(process)
        self._payloads.died(process)
        process.inbox.clear()

    def leave(self, process: Process) -> None:
        """Let a process say goodbye and end soon after."""
        if process.leaving or not process.alive:
            return
        process.leaving = True
        process.trainer.stop()
        self._hand(process, Leave(), None)
        self.schedule.at(self.schedule.now + LEAVE_S, self._left, process)

    def _left(self, process: Process, _: None) -> None:
        if process.alive:
            self.kill(process, dark=False)

    def pause(self, process: Process) -> None:
        """Stop a process as SIGSTOP does."""
        process.paused = True
        process.trainer.stop()

    def resume(self, process: Process, seconds: float) -> None:
        """Continue a process: what has come meanwhile, and its overdue timer, in any order."""
        if not process.alive or not process.paused:
            return
        process.paused = False
        self.checkers.paused(process, seconds)
        inbox, process.inbox = process.inbox, []
        if process.desk is not None and self._desks is not None:
            self._desks.tick(process)
        tick_first = self._rng.random() < 0.5
        if tick_first:
            self._handle(process, Tick(), None)
        for event, payload in inbox:
            self._handle(process, event, payload)
        if not tick_first:
            self._handle(process, Tick(), None)
        process.trainer.resume(seconds)

    def corrupt(self, process: Process, how: str) -> None:
        """Break what a process sends."""
        process.corrupt = how
        if how:
            self.checkers.corrupting(process)

    def separate(self, hosts: list[Host], number: int) -> None:
        """Cut hosts off from all others."""
        for host in hosts:
            host.sides = (*host.sides, (number, 1))
        self.network.cut(self._running())

    def unite(self, number: int) -> None:
        """End a partition."""
        for host in self.hosts:
            if (number, 1) in host.sides and host.process is not None:
                # Whoever has come up on that side has a state of that side's epoch.
                self.checkers.excuse(host.process)
            host.sides = tuple(side for side in host.sides if side[0] != number)
        self.network.healed(self._running())

    def _running(self) -> list[Process]:
        return [host.process for host in self.hosts if host.process is not None]

    def note(self, text: str) -> None:
        """Write a line into the trace."""
        self.trace.note(self.schedule.now, text)

    # --- events ---------------------------------------------------------------------------

    def _hand(self, process: Process, event: Event, payload: Payload | None) -> None:
        if process.paused:
            process.inbox.append((event, payload))
        elif process.alive:
            self._handle(process, event, payload)

    def _handle(self, process: Process, event: Event, payload: Payload | None) -> None:
        now = self.schedule.now
        clock = now + process.offset
        clock = max(clock, process.clock)
        process.clock = clock
        node = process.node
        kind = type(event)
        desks = self._desks if process.desk is not None else None
        if desks is not None and desks.takes(process, event, payload):
            self.trace.event(now, process, event, [])
            return
        if kind is BeginAveraging:
            process.store.vector = list(process.trainer.values)
            self.checkers.began(now, process, node.epoch, event, process.store.vector)  # type: ignore[arg-type]
        effects = node.handle(event, clock)
        self.trace.event(now, process, event, effects)
        if kind is ChunkArrived:
            self._judge_chunk(process, event, payload, effects)  # type: ignore[arg-type]
        elif kind is Received and type(event.message) is Join:  # type: ignore[union-attr]
            self.checkers.received_join(now, process, event.peer, effects)  # type: ignore[union-attr]
        if effects:
            self._payloads.arrived = payload
            self._execute(process, effects)
        self._arm(process)

    def _execute(self, process: Process, effects: list[Effect]) -> None:
        actions = self._actions
        for effect in effects:
            actions[type(effect)](process, effect)
            if type(effect) is GroupReady:
                self.faults.group_formed(effect.formed.key)

    def _judge_chunk(
        self, process: Process, event: ChunkArrived, payload: Payload | None, effects: list[Effect]
    ) -> None:
        accumulated = any(type(effect) is Accumulate for effect in effects)
        self.checkers.received_chunk(self.schedule.now, process, event, accumulated)
        round_ = process.store.rounds.get(event.header.group)
        if event.header.mass == 0.0 and type(payload) is Contribution and round_ is not None:
            chunk = event.header.chunk
            round_.empty[chunk] = round_.empty.get(chunk, 0) | 1 << payload.seat

    def _arm(self, process: Process) -> None:
        """Schedule the next tick, unless an earlier one is scheduled anyway."""
        wakeup = process.node.wakeup
        if wakeup is None:
            return
        due = max(wakeup - process.offset, self.schedule.now)
        if process.timer is None or due < process.timer:
            process.timer = due
            self.schedule.at(due, self._tick, process, due)

    def _tick(self, process: Process, due: float) -> None:
        if process.timer != due or not process.alive:
            return
        process.timer = None
        if process.paused:
            return
        wakeup = process.node.wakeup
        if wakeup is None:
            return
        clock = self.schedule.now + process.offset
        if wakeup > clock + 1e-9:
            self._arm(process)
            return
        process.clock = max(process.clock, wakeup)  # what rounding took from the offset
        self._handle(process, Tick(), None)
        self._judge_spin(process)

    def _judge_spin(self, process: Process) -> None:
        wakeup = process.node.wakeup
        if wakeup is None or wakeup > process.clock:
            self._spins.pop(process.index, None)
            return
        spins = self._spins[process.index] = self._spins.get(process.index, 0) + 1
        if spins > SPINS_MAX:
            text = f"wants ticks without end (wake-up {wakeup}, clock {process.clock})"
            self.note(f"{process.name} {text}")
            self.checkers.fail("L1", self.schedule.now, process, text)
            self.kill(process, dark=False)

    # --- effects --------------------------------------------------------------------------

    def _ignore(self, process: Process, effect: Effect) -> None:
        pass

    def _send(self, process: Process, effect: Send) -> None:
        message = effect.message
        if type(message) is Refusal or type(message) is JoinRefused:
            self.checkers.sent(self.schedule.now, process, message)
        self.network.send(process, effect.peer, message)

    def _averaging_due(self, process: Process, effect: AveragingDue) -> None:
        if not process.leaving:
            process.trainer.due(effect.epoch)

    def _averaging_ended(self, process: Process, effect: AveragingEnded) -> None:
        now, report = self.schedule.now, effect.report
        trainer = process.trainer
        if not report.stale:
            trainer.values = list(process.store.vector)
            trainer.epoch = effect.next_epoch
        self.checkers.averaging_ended(now, process, report, process.trainer.values)
        if effect.next_epoch > self.top_epoch:
            self.top_epoch = effect.next_epoch
            self.faults.epoch_reached(self.top_epoch)
        if trainer.phase is Phase.AVERAGING and not process.leaving:
            if self._desks is not None and not report.stale:
                self._desks.serve(process, boundary=True)
            if self._draining and process.node.epoch > self.scenario.swarm.epochs:
                trainer.rest()
            elif not self._between(process):
                trainer.work()

    # --- state transfer -------------------------------------------------------------------

    def _between(self, process: Process) -> bool:
        """A process is between two steps; return whether it stops to fetch a state."""
        desks = self._desks
        if desks is None or process.desk is None or process.leaving:
            return False
        if desks.behind(process):
            process.trainer.catch_up()
            desks.catch_up(process)
            return True
        desks.serve(process, boundary=False)
        return False

    def declare(self, process: Process, schema: bytes, epoch: int) -> None:
        """Let a process tell the swarm what it averages."""
        clock = max(self.schedule.now + process.offset, process.clock)
        self._execute(process, process.node.attach(schema, self._target, clock, epoch))
        self._arm(process)

    def restored(self, process: Process, values: list[float] | None) -> None:
        """Let a process train again, with the state that it has fetched, if any."""
        if values is not None:
            process.trainer.values = list(values)
        if not process.leaving:
            process.trainer.work()
