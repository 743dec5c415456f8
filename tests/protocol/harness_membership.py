"""A small deterministic network of membership machines: a heap, a seed, virtual time."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

import msgspec

from moshpit.config import MembershipConfig
from moshpit.protocol.machine import (
    Effect,
    Emit,
    Event,
    LinkDown,
    LinkUp,
    Received,
    Send,
    Tick,
)
from moshpit.protocol.membership import Membership
from moshpit.protocol.view import Status
from moshpit.runtime.record import own_record
from moshpit.sim.signer import SIM_ADMISSION, SimSigner
from moshpit.types import Address, PeerId, Role
from moshpit.wire.messages import Ack, Gossip, Message, News, PeerRecord, Ping

QUIET = MembershipConfig(exchange_interval_s=1e6)  # no exchanges of digests in between


def peer_id(number: int) -> PeerId:
    """An id whose first byte spreads over the buckets."""
    return PeerId(bytes(((number * 37) % 256,)) + number.to_bytes(31, "big"))


def record_of(number: int, **fields: Any) -> PeerRecord:
    address = Address(f"10.0.{number // 250}.{number % 250 + 1}", 7000)
    record = own_record(peer_id(number), Role.WORKER, (address,), SIM_ADMISSION, 1e8)
    usual = {"incarnation": 0, "version": 0, "schema": b"schema.."}
    return msgspec.structs.replace(record, **(usual | fields))


def signed(record: PeerRecord) -> PeerRecord:
    return SimSigner(PeerId(record.peer)).sign_message(record)


def machine(
    number: int,
    seed: int = 0,
    config: MembershipConfig | None = None,
    now: float = 0.0,
    **fields: Any,
) -> Membership:
    record = record_of(number, **fields)
    return Membership(
        SimSigner(PeerId(record.peer)),
        record,
        config or MembershipConfig(),
        random.Random(f"{seed}/{number}"),
        now,
    )


def knowing(*numbers: int, config: MembershipConfig = QUIET) -> Membership:
    """Peer 0, which knows these peers and has nothing left to tell."""
    made = machine(0, config=config)
    for number in numbers:
        records = (signed(record_of(number)),)
        made.handle(Received(peer_id(number), News(Gossip(records))), 0.0)
    for _ in range(20):
        for number in numbers:
            made.handle(Received(peer_id(number), Ping(1)), 0.5)
    asker = peer_id(numbers[0])
    assert made.handle(Received(asker, Ping(1)), 0.5) == [Send(asker, Ack(1))]
    return made


def tick(made: Membership, now: float | None = None) -> tuple[float, list[Effect]]:
    at = made.wakeup if now is None else now
    assert at is not None
    return at, made.handle(Tick(), at)


@dataclass
class Host:
    machine: Membership
    alive: bool = True
    paused_at: float | None = None
    skew: float = 0.0
    waiting: list[Event] = field(default_factory=list)


class Net:
    """Peers by number. Links come up at the first message; `refuse` says how a kill looks."""

    def __init__(
        self, seed: int = 0, loss: float = 0.0, config: MembershipConfig | None = None
    ) -> None:
        self.rng = random.Random(seed)
        self.seed = seed
        self.loss = loss
        self.config = config or MembershipConfig()
        self.now = 0.0
        self.hosts: dict[PeerId, Host] = {}
        self.numbers: dict[PeerId, int] = {}
        self.links: dict[tuple[PeerId, PeerId], None] = {}
        self.apart: Callable[[int, int], bool] = lambda a, b: False
        self.notices: list[tuple[float, int, str, int | None]] = []
        self.trace: list[str] | None = None
        self.sent: Counter[str] = Counter()
        self.sent_bytes = 0
        self.measure_bytes = False
        self._heap: list[tuple[float, int, PeerId, Event | None]] = []
        self._count = 0
        self._ticks: dict[PeerId, float] = {}

    def add(self, number: int, **fields: Any) -> Membership:
        made = machine(number, self.seed, self.config, self.now, **fields)
        peer = peer_id(number)
        self.hosts[peer] = Host(made)
        self.numbers[peer] = number
        self._ticks.pop(peer, None)
        self._plan_tick(peer)
        return made

    def dial(self, a: int, b: int) -> None:
        self._link(peer_id(a), peer_id(b))

    def grow(self, count: int) -> None:
        """Peers 0 to count-1, all of which know peer 0's address."""
        for number in range(count):
            self.add(number)
        for number in range(1, count):
            self.dial(number, 0)

    def view(self, number: int) -> Any:
        return self.hosts[peer_id(number)].machine.view

    def kill(self, number: int, refuse: bool = False) -> None:
        """The process ends; with ``refuse`` its links break and nobody listens any more."""
        peer = peer_id(number)
        self.hosts[peer].alive = False
        for a, b in list(self.links):
            if peer in (a, b):
                del self.links[(a, b)]
                if a != peer and refuse:
                    self._post(0.001, a, LinkDown(peer, True, "refused"))
        self._refusing = refuse

    def pause(self, number: int) -> None:
        self.hosts[peer_id(number)].paused_at = self.now

    def resume(self, number: int) -> None:
        """The paused time is taken out of the peer's own time, as the Node does."""
        peer = peer_id(number)
        host = self.hosts[peer]
        assert host.paused_at is not None
        host.skew += self.now - host.paused_at
        host.paused_at = None
        for event in host.waiting:
            self._post(0.0, peer, event)
        host.waiting.clear()
        self._ticks.pop(peer, None)
        self._plan_tick(peer)

    def run(self, seconds: float) -> None:
        until = self.now + seconds
        while self._heap and self._heap[0][0] <= until:
            self.now, _, peer, event = heappop(self._heap)
            self._handle(peer, event)
        self.now = until

    def run_until(self, done: Callable[[], bool], limit: float, step: float = 0.1) -> float:
        """Run until ``done``; return how long it took; fail after ``limit`` seconds."""
        began = self.now
        while not done():
            assert self.now - began < limit, f"not done within {limit} s"
            self.run(step)
        return self.now - began

    def agree(self, numbers: list[int]) -> bool:
        """Whether these peers all see exactly each other as alive, by the same records."""
        wanted = sorted(peer_id(n) for n in numbers)
        newest = [self.view(n).me for n in sorted(numbers, key=peer_id)]
        return all(
            list(self.view(n).live) == wanted
            and [self.view(n).record(p) for p in wanted] == newest
            and all(self.view(n).status(p) is Status.ALIVE for p in wanted)
            for n in numbers
        )

    def everywhere(self, number: int, status: Status | None) -> bool:
        """Whether all living peers believe this of a peer."""
        peer = peer_id(number)
        return all(
            host.machine.view.status(peer) is status
            for p, host in self.hosts.items()
            if host.alive and p != peer
        )

    def do(self, number: int, effects: list[Effect]) -> None:
        self._effects(peer_id(number), effects)

    # ---

    def _handle(self, peer: PeerId, event: Event | None) -> None:
        host = self.hosts.get(peer)
        if host is None or not host.alive:
            return
        if event is None and self._ticks.get(peer) != self.now:
            return
        if host.paused_at is not None:
            if event is not None:
                host.waiting.append(event)
            return
        own = self.now - host.skew
        if event is None and host.machine.wakeup is not None:
            own = max(own, host.machine.wakeup)  # taking the skew out must not round below it
        effects = host.machine.handle(Tick() if event is None else event, own)
        if self.trace is not None:
            self.trace.append(f"{self.now:.6f} {self.numbers[peer]} {event!r} {effects!r}")
        self._effects(peer, effects)

    def _plan_tick(self, peer: PeerId) -> None:
        host = self.hosts[peer]
        wakeup = host.machine.wakeup
        if wakeup is None:
            self._ticks.pop(peer, None)
            return
        at = max(self.now, wakeup + host.skew)
        if self._ticks.get(peer) != at:
            self._ticks[peer] = at
            self._count += 1
            heappush(self._heap, (at, self._count, peer, None))

    def _effects(self, peer: PeerId, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Send):
                self._send(peer, effect.peer, effect.message)
            elif isinstance(effect, Emit):
                about = effect.notice.peer
                number = None if about is None else self.numbers.get(about)
                self.notices.append((self.now, self.numbers[peer], effect.notice.code, number))
        self._ticks.pop(peer, None)
        self._plan_tick(peer)

    def _link(self, a: PeerId, b: PeerId) -> None:
        if (a, b) not in self.links:
            self.links[(a, b)] = self.links[(b, a)] = None
            self._post(0.0, a, LinkUp(b))
            self._post(0.001, b, LinkUp(a))

    def _send(self, a: PeerId, b: PeerId, message: Message) -> None:
        self.sent[type(message).__name__] += 1
        if self.measure_bytes:
            self.sent_bytes += len(msgspec.msgpack.encode(message)) + 4
        target = self.hosts.get(b)
        if self.apart(self.numbers[a], self.numbers[b]):
            return
        if target is None or not target.alive:
            if target is not None and self._refusing:
                self._post(0.001, a, LinkDown(b, True, "refused"))
            return
        if (a, b) not in self.links and target.machine.view.me.role == "client":
            self._post(0.001, a, LinkDown(b, False, "a client cannot be dialled"))
            return
        self._link(a, b)
        if self.rng.random() >= self.loss:
            self._post(self.rng.uniform(0.002, 0.03), b, Received(a, message))

    def _post(self, delay: float, peer: PeerId, event: Event) -> None:
        self._count += 1
        heappush(self._heap, (self.now + delay, self._count, peer, event))

    _refusing = False
