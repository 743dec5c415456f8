"""The virtual network: reliable streams over lines that are far, thin, lossy and cut.

Theory of operation
-------------------
A `Link` is the connection between two processes, opened by one of them and used by both. Like
TCP it keeps order and loses nothing: loss shows as delay. Control messages travel at once;
chunks queue for the sender's uplink, then for the receiver's downlink (store and forward of
whole chunks, FIFO), so control never waits behind bulk.

Who dials whom finds out what a real machine would find out:

- a process that listens: the link is up after three round trips (TCP, TLS, proof of keys);
- a machine where nobody listens, or somebody with another key: refused after a round trip;
- a paused process, a machine without power, or one beyond a partition: the dial times out;
- a client behind its router: nobody can dial it, but links that it opened work both ways.

A process that dies closes its links: what it had sent arrives, then the other end knows. A
machine without power, or a partition, is only noticed by ``silence_s`` without an answer.
Before a driver reports a lost link it dials again, as `LinkDown` promises.
"""

from __future__ import annotations

import math
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from moshpit.protocol.machine import ChunkArrived, Event, LinkDown, LinkUp, Received
from moshpit.sim.process import Host, Process
from moshpit.sim.scenario import Wires
from moshpit.sim.schedule import Schedule
from moshpit.sim.store import Payload
from moshpit.types import GroupId, PeerId
from moshpit.wire.messages import (
    Ack,
    Difference,
    Digest,
    Goodbye,
    Message,
    News,
    NewsAsk,
    Outline,
    Ping,
    PingReq,
    ViewAsk,
)

CONNECTING, UP, DOWN = 0, 1, 2
PACKET_BYTES = 1448  # Ethernet with TCP time stamps
RTO_S = 0.2  # Linux's shortest retransmission time-out
HANDSHAKE_TRIPS = 6  # one-way: TCP, TLS 1.3, proof of keys
_MEMBERSHIP = frozenset(
    (Ack, Difference, Digest, Goodbye, News, NewsAsk, Outline, Ping, PingReq, ViewAsk)
)

_encode = msgspec.msgpack.Encoder().encode_into


@dataclass(frozen=True, slots=True)
class Wiring:
    """What the whole network has in common.

    Example:
        >>> wiring = Wiring.of(Wires(), dial_timeout_s=1.0, rng=random.Random(0))
        >>> wiring.latency_s
        ((0.001,),)
    """

    latency_s: tuple[tuple[float, ...], ...]
    """One way, between regions."""
    jitter_s: float
    loss: float
    silence_s: float
    dial_timeout_s: float
    handshake_s: float

    @classmethod
    def of(cls, wires: Wires, *, dial_timeout_s: float, rng: random.Random) -> Wiring:
        """Put the regions of a scenario somewhere."""
        near, far = (ms / 1000.0 for ms in wires.latency_ms)
        places = [(rng.random(), rng.random()) for _ in range(wires.regions)]
        latency_s = tuple(
            tuple(near + (far - near) * math.dist(a, b) / math.sqrt(2.0) for b in places)
            for a in places
        )
        return cls(
            latency_s,
            wires.jitter_ms / 1000.0,
            wires.loss,
            wires.silence_s,
            dial_timeout_s,
            wires.handshake_ms / 1000.0,
        )


class Link:
    """One connection, or the attempt at one."""

    __slots__ = (
        "bulk_back", "bulk_out", "control_back", "control_out", "opener", "other", "peer", "state",
        "waiting",
    )  # fmt: skip

    def __init__(self, opener: Process, peer: PeerId | None) -> None:
        self.opener = opener
        self.peer = peer
        self.other: Process | None = None
        self.state = CONNECTING
        self.waiting: list[Parcel | Bulk] = []
        """Sent while connecting, or stuck at a partition."""
        # When the last thing arrives that was sent from the opener (out) or to it (back);
        # a stream keeps order. Bulk below 0: no bulk connection yet.
        self.control_out = self.control_back = 0.0
        self.bulk_out = self.bulk_back = -1.0


class Parcel:
    """A control message on its way."""

    __slots__ = ("event", "source", "target")

    def __init__(self, source: Process, target: Process | None, event: Event) -> None:
        self.source = source
        self.target = target
        self.event = event


class Bulk:
    """A chunk on its way."""

    __slots__ = ("event", "group", "link", "payload", "peer", "size", "source")

    def __init__(
        self, source: Process, peer: PeerId, link: Link, event: ChunkArrived, payload: Payload
    ) -> None:
        self.source = source
        self.peer = peer
        self.link = link
        self.event = event
        self.payload = payload
        self.group = event.header.group
        self.size = event.header.length


Hand = Callable[[Process, Event, Payload | None], None]


class Network:
    """All links of all processes."""

    def __init__(
        self, schedule: Schedule, hosts: list[Host], wiring: Wiring, rng: random.Random, hand: Hand
    ) -> None:
        self._schedule = schedule
        self._hosts = hosts
        self._wiring = wiring
        self._random = rng.random
        self._hand = hand
        self.loss = wiring.loss
        self._buffer = bytearray()
        self.on_join_failed: Callable[[Process], None] = lambda process: None

    # --- what the world asks for ----------------------------------------------------------

    def join(self, process: Process, host: Host) -> None:
        """Dial a first address, whoever may listen there."""
        self._connect(Link(process, None), host)

    def send(self, source: Process, peer: PeerId, message: Message) -> None:
        """Send a control message; dial where there is no link."""
        _encode(message, self._buffer)
        size = len(self._buffer) + 4
        traffic = source.traffic
        if type(message) in _MEMBERSHIP:
            traffic.membership_messages += 1
            traffic.membership_bytes += size
        else:
            traffic.control_messages += 1
            traffic.control_bytes += size
        link = source.links.get(peer)
        if link is None:
            link = self._dial(source, peer, patient=False)
        event = Received(source.peer, message)  # type: ignore[arg-type]
        if link.state == UP:
            self._transmit(link, source, event)
        elif link.state == CONNECTING:
            link.waiting.append(Parcel(source, None, event))
        # else: the other end is gone and this one does not know yet

    def send_chunk(
        self, source: Process, peer: PeerId, event: ChunkArrived, payload: Payload
    ) -> None:
        """Queue a chunk for the uplink; dial where there is no link."""
        link = source.links.get(peer)
        if link is None:
            link = self._dial(source, peer, patient=False)
        bulk = Bulk(source, peer, link, event, payload)
        if link.state == UP:
            self._enqueue(bulk)
        elif link.state == CONNECTING:
            link.waiting.append(bulk)

    def cancel(self, source: Process, peer: PeerId, group: GroupId) -> None:
        """Forget chunks of a round that are not on the wire yet."""

        def stays(item: Parcel | Bulk) -> bool:
            return not (
                type(item) is Bulk
                and item.group == group
                and item.source is source
                and item.peer == peer
            )

        host = source.host
        host.bulk_queue = deque(bulk for bulk in host.bulk_queue if stays(bulk))
        link = source.links.get(peer)
        if link is not None and link.waiting:
            link.waiting = [item for item in link.waiting if stays(item)]

    def process_died(self, process: Process) -> None:
        """Close its links: politely by its kernel, or not at all where the power went."""
        now = self._schedule.now
        host = process.host
        host.bulk_queue.clear()
        for link in process.links.values():
            connecting = link.state == CONNECTING
            link.state = DOWN
            other = link.other if link.opener is process else link.opener
            if connecting or other is None:
                continue
            if host.dark:
                self._schedule.at(now + self._wiring.silence_s, self._lost, link, other)
            else:
                last = link.control_out if link.opener is process else link.control_back
                closed = max(last, now + self._latency(host, other.host))
                self._schedule.at(closed, self._lost, link, other)
        process.links.clear()

    def cut(self, processes: list[Process]) -> None:
        """Sides have changed: links that cross now break if it lasts."""
        until = self._schedule.now + self._wiring.silence_s
        for process in processes:
            for link in process.links.values():
                if link.opener is process and link.state == UP and self._crosses(link):
                    self._schedule.at(until, self._break, link, until)

    def healed(self, processes: list[Process]) -> None:
        """Sides have changed: links that do not cross any more pass on what was stuck."""
        for process in processes:
            for link in tuple(process.links.values()):
                stuck = link.opener is process and link.state == UP and link.waiting
                if stuck and not self._crosses(link):
                    self._flush(link)

    # --- connections ----------------------------------------------------------------------

    def _dial(self, source: Process, peer: PeerId, *, patient: bool) -> Link:
        link = Link(source, peer)
        source.links[peer] = link
        record = source.node.view.record(peer)
        if record is not None and record.addresses and peer != source.peer:
            self._connect(link, self._hosts[int(record.addresses[0][0][1:])])
        else:
            # A lost client may dial in again; nobody can do it for it.
            wait = self._wiring.dial_timeout_s if patient else 0.0
            self._fail_at(self._schedule.now + wait, link, "no address")
        return link

    def _connect(self, link: Link, host: Host) -> None:
        delay = self._latency(link.opener.host, host)
        self._schedule.at(self._schedule.now + delay, self._knock, link, host)

    def _knock(self, link: Link, host: Host) -> None:
        now = self._schedule.now
        opener = link.opener
        if link.state != CONNECTING or not opener.alive:
            return
        target = host.process
        delay = self._latency(opener.host, host)
        if host.dark or host.sides != opener.host.sides or (target and target.paused):
            self._fail_at(now + self._wiring.dial_timeout_s, link, "dial timed out")
        elif host.nat or target is None:
            self._schedule.at(now + delay, self._refused, link, "nobody listens")
        elif link.peer is not None and target.peer != link.peer:
            self._schedule.at(now + 3 * delay, self._refused, link, "somebody else listens")
        else:
            ready = now + (HANDSHAKE_TRIPS - 1) * delay + self._wiring.handshake_s
            self._schedule.at(ready, self._up, link, target)

    def _up(self, link: Link, target: Process) -> None:
        opener = link.opener
        if link.state != CONNECTING or not opener.alive:
            return
        if not target.alive:
            self._refused(link, "nobody listens")
            return
        if opener.host.sides != target.host.sides or target.paused:
            self._fail_at(
                self._schedule.now + self._wiring.dial_timeout_s, link, "handshake timed out"
            )
            return
        for existing in (opener.links.get(target.peer), target.links.get(opener.peer)):
            if existing is None or existing is link or existing.state == DOWN:
                continue
            if existing.state == UP:  # the other side's dial came first
                link.state = DOWN
                existing.waiting += link.waiting
                self._flush(existing)
                return
            existing.state = DOWN
            link.waiting += existing.waiting
        link.state = UP
        link.other = target
        opener.links[target.peer] = link
        target.links[opener.peer] = link
        self._flush(link)
        self._hand(opener, LinkUp(target.peer), None)
        self._hand(target, LinkUp(opener.peer), None)

    def _fail_at(self, time: float, link: Link, detail: str) -> None:
        self._schedule.at(time, self._timed_out, link, detail)

    def _timed_out(self, link: Link, detail: str) -> None:
        self._failed(link, False, detail)

    def _refused(self, link: Link, detail: str) -> None:
        self._failed(link, True, detail)

    def _failed(self, link: Link, refused: bool, detail: str) -> None:
        opener = link.opener
        if link.state != CONNECTING or not opener.alive:
            return
        link.state = DOWN
        if link.peer is None:
            self.on_join_failed(opener)
            return
        if opener.links.get(link.peer) is link:
            del opener.links[link.peer]
        self._hand(opener, LinkDown(link.peer, refused, detail), None)

    def _lost(self, link: Link, end: Process) -> None:
        """One end finds out that the link is gone, and dials again."""
        other = link.other if end is link.opener else link.opener
        if other is None or end.links.get(other.peer) is not link:
            return
        del end.links[other.peer]
        if end.alive:
            self._dial(end, other.peer, patient=True)

    def _crosses(self, link: Link) -> bool:
        other = link.other
        return other is not None and link.opener.host.sides != other.host.sides

    def _break(self, link: Link, when: float) -> None:
        if link.state != UP or link.other is None or not self._crosses(link):
            return
        link.state = DOWN
        link.waiting.clear()
        self._lost(link, link.opener)
        self._lost(link, link.other)

    def _flush(self, link: Link) -> None:
        waiting, link.waiting = link.waiting, []
        for item in waiting:
            if type(item) is Bulk:
                item.link = link
                self._enqueue(item)
            else:
                self._transmit(link, item.source, item.event)

    # --- control --------------------------------------------------------------------------

    def _latency(self, a: Host, b: Host) -> float:
        wiring = self._wiring
        return wiring.latency_s[a.region][b.region] + wiring.jitter_s * self._random()

    def _loss(self, a: Host, b: Host) -> float:
        return 1.0 - (1.0 - self.loss) * (1.0 - a.loss) * (1.0 - b.loss)

    def _transmit(self, link: Link, source: Process, event: Event) -> None:
        outward = source is link.opener
        target = link.other if outward else link.opener
        assert target is not None, "only links that are up transmit"
        a, b = source.host, target.host
        parcel = Parcel(source, target, event)
        if a.sides != b.sides:
            link.waiting.append(parcel)
            return
        time = self._schedule.now + self._latency(a, b)
        if self.loss or a.loss or b.loss:
            loss, pause = self._loss(a, b), RTO_S
            while self._random() < loss and pause < 60.0:
                time += pause
                pause *= 2.0
        if outward:
            link.control_out = time = max(time, link.control_out)
        else:
            link.control_back = time = max(time, link.control_back)
        self._schedule.at(time, self._deliver, link, parcel)

    def _deliver(self, link: Link, parcel: Parcel) -> None:
        source, target = parcel.source, parcel.target
        if target is None or not target.alive or target.links.get(source.peer) is not link:
            return
        if source.host.sides != target.host.sides:  # it will be sent again once that heals
            link.waiting.append(parcel)
            return
        self._hand(target, parcel.event, None)

    # --- bulk -----------------------------------------------------------------------------

    def _enqueue(self, bulk: Bulk) -> None:
        host = bulk.source.host
        host.bulk_queue.append(bulk)
        if not host.up_busy:
            self._pump(host, None)

    def _pump(self, host: Host, _: None) -> None:
        queue = host.bulk_queue
        host.up_busy = False
        while queue:
            bulk = queue.popleft()
            link = bulk.link
            if link.state != UP or not bulk.source.alive:
                continue
            outward = bulk.source is link.opener
            target = link.other if outward else link.opener
            assert target is not None, "only links that are up carry chunks"
            if host.sides != target.host.sides:
                link.waiting.append(bulk)
                continue
            self._put_on_wire(host, bulk, target, outward)
            return

    def _put_on_wire(self, host: Host, bulk: Bulk, target: Process, outward: bool) -> None:
        link, now = bulk.link, self._schedule.now
        delay = self._latency(host, target.host)
        sent = now + bulk.size / host.up
        arrives = sent + delay
        if self.loss or host.loss or target.host.loss:
            loss = self._loss(host, target.host)
            sent = now + bulk.size / (host.up * (1.0 - loss))
            again = self._random() > (1.0 - loss) ** (bulk.size / PACKET_BYTES)
            arrives = sent + delay + (2.0 * delay if again else 0.0)
        last = link.bulk_out if outward else link.bulk_back
        if last < 0.0:  # the bulk connection is opened first
            last = now + 4.0 * delay
        arrives = max(arrives, last)
        if outward:
            link.bulk_out = arrives
        else:
            link.bulk_back = arrives
        host.up_busy = True
        bulk.source.traffic.bulk_sent += bulk.size
        self._schedule.at(sent, self._pump, host, None)
        self._schedule.at(arrives, self._arrive, bulk, target)

    def _arrive(self, bulk: Bulk, target: Process) -> None:
        now = self._schedule.now
        host = target.host
        done = max(now, host.down_free + bulk.size / host.down)
        host.down_free = done
        if done > now:
            self._schedule.at(done, self._received, bulk, target)
        else:
            self._received(bulk, target)

    def _received(self, bulk: Bulk, target: Process) -> None:
        source, link = bulk.source, bulk.link
        if not target.alive or target.links.get(source.peer) is not link:
            return
        if source.host.sides != target.host.sides:
            link.waiting.append(bulk)
            return
        target.traffic.bulk_received += bulk.size
        self._hand(target, bulk.event, bulk.payload)
