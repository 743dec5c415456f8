"""The virtual network, link by link, with what a driver would be told."""

from __future__ import annotations

import math
import random

import pytest

from moshpit.protocol.machine import ChunkArrived, Event, LinkDown, LinkUp, Received
from moshpit.sim.network import HANDSHAKE_TRIPS, Network, Wiring
from moshpit.sim.process import Host, Process, peer_id
from moshpit.sim.schedule import Schedule
from moshpit.sim.signer import SIM_ADMISSION
from moshpit.sim.store import Contribution, Payload
from moshpit.types import GroupId, PeerId, Role
from moshpit.wire.framing import ChunkHeader, ChunkKind, encode_message
from moshpit.wire.messages import Beat, PeerRecord, Ping

LATENCY_S = 0.1
HANDSHAKE_S = 0.01
DIAL_S = HANDSHAKE_TRIPS * LATENCY_S + HANDSHAKE_S
SILENCE_S, DIAL_TIMEOUT_S = 8.0, 3.0
GROUP = GroupId(b"g" * 16)


class Directory:
    """Stands where a node's view stands: the records of everybody."""

    def __init__(self) -> None:
        self.records: dict[bytes, PeerRecord] = {}

    def record(self, peer: bytes) -> PeerRecord | None:
        return self.records.get(peer)


class Holder:
    """A node of which the network only reads the view."""

    def __init__(self, view: Directory) -> None:
        self.view = view


class Net:
    """A network of n hosts with a process on each, and what each was told and when."""

    def __init__(self, n: int, loss: float = 0.0, nat: tuple[int, ...] = ()) -> None:
        self.schedule = Schedule()
        self.hosts: list[Host] = []
        wiring = Wiring(((LATENCY_S,),), 0.0, loss, SILENCE_S, DIAL_TIMEOUT_S, HANDSHAKE_S)
        self.network = Network(self.schedule, self.hosts, wiring, random.Random(1), self._hand)
        self.directory = Directory()
        self.processes: list[Process] = []
        self.told: list[tuple[float, int, Event]] = []
        for index in range(n):
            self.hosts.append(Host(index, 0, 1e6, 1e6, index in nat))
            self.start(index, peer_id(0, index))

    def start(self, index: int, peer: PeerId) -> Process:
        host = self.hosts[index]
        role = Role.CLIENT if host.nat else Role.WORKER
        process = Process(len(self.processes), peer, host, role, born=0.0, offset=0.0)
        process.node = Holder(self.directory)  # type: ignore[assignment]
        addresses = () if host.nat else ((f"h{index}", 7000),)
        self.directory.records[peer] = PeerRecord(
            peer, 1, 1, role.value, addresses, (), 0.0, 0.0, b"", 0, 0.0, 0.0, (), 0.0, False,
            SIM_ADMISSION,
        )  # fmt: skip
        host.process = process
        self.processes.append(process)
        return process

    def _hand(self, process: Process, event: Event, payload: Payload | None) -> None:
        self.told.append((round(self.schedule.now, 6), process.index, event))

    def send(self, a: int, b: int, number: int = 0) -> None:
        self.network.send(self.processes[a], self.processes[b].peer, Ping(number))

    def chunk(self, a: int, b: int, size: int, number: int = 0) -> None:
        header = ChunkHeader(ChunkKind.CONTRIBUTION, 0, number, size, 0, GROUP, 1.0, 0)
        source = self.processes[a]
        event = ChunkArrived(source.peer, header, "")
        self.network.send_chunk(source, self.processes[b].peer, event, Contribution(0, 1.0))

    def kill(self, index: int, *, dark: bool = False) -> None:
        process = self.processes[index]
        process.alive = False
        process.host.dark = dark
        process.host.process = None
        self.network.process_died(process)

    def connect(self, a: int, b: int) -> None:
        self.send(a, b)
        self.schedule.run(self.schedule.now + DIAL_S + 2 * LATENCY_S)
        self.told.clear()

    def part(self, *cut: int) -> None:
        for index in cut:
            self.hosts[index].sides = ((1, 1),)
        self.network.cut(self.processes)

    def heal(self) -> None:
        for host in self.hosts:
            host.sides = ()
        self.network.healed(self.processes)

    def run(self, seconds: float) -> list[tuple[float, int, Event]]:
        """Run on and return what was told meanwhile, with times from now."""
        start = self.schedule.now
        self.told.clear()
        self.schedule.run(start + seconds)
        return [(round(time - start, 6), index, event) for time, index, event in self.told]

    def peer(self, index: int) -> PeerId:
        return self.processes[index].peer


def test_a_message_to_a_stranger_waits_for_the_link_and_both_are_told() -> None:
    net = Net(2)
    net.send(0, 1, 5)
    assert net.run(5.0) == [
        (round(DIAL_S, 6), 0, LinkUp(net.peer(1))),
        (round(DIAL_S, 6), 1, LinkUp(net.peer(0))),
        (round(DIAL_S + LATENCY_S, 6), 1, Received(net.peer(0), Ping(5))),
    ]
    net.send(1, 0, 6)
    assert net.run(5.0) == [(LATENCY_S, 0, Received(net.peer(1), Ping(6)))]


def test_two_that_dial_each_other_end_with_one_link() -> None:
    net = Net(2)
    net.send(0, 1, 1)
    net.send(1, 0, 2)
    told = net.run(5.0)
    assert [event for _, _, event in told].count(LinkUp(net.peer(1))) == 1
    assert {(i, e.message.seq) for _, i, e in told if isinstance(e, Received)} == {(1, 1), (0, 2)}
    assert net.processes[0].links[net.peer(1)] is net.processes[1].links[net.peer(0)]


def test_a_dead_process_is_refused_after_a_round_trip() -> None:
    net = Net(2)
    net.kill(1)
    net.send(0, 1)
    assert net.run(9.0) == [(2 * LATENCY_S, 0, LinkDown(net.peer(1), True, "nobody listens"))]


def test_another_key_at_the_address_is_a_dead_peer() -> None:
    net = Net(2)
    old = net.peer(1)
    net.kill(1)
    net.start(1, peer_id(0, 7))
    net.network.send(net.processes[0], old, Ping(0))
    (told,) = net.run(9.0)
    assert told[2] == LinkDown(old, True, "somebody else listens")


def test_paused_and_dark_ones_are_silent_until_the_dial_times_out() -> None:
    net = Net(3)
    net.processes[1].paused = True
    net.kill(2, dark=True)
    net.send(0, 1)
    net.send(0, 2)
    assert net.run(9.0) == [
        (LATENCY_S + DIAL_TIMEOUT_S, 0, LinkDown(net.peer(1), False, "dial timed out")),
        (LATENCY_S + DIAL_TIMEOUT_S, 0, LinkDown(net.peer(2), False, "dial timed out")),
    ]


def test_a_client_is_reached_only_over_links_that_it_opened() -> None:
    net = Net(2, nat=(1,))
    net.send(0, 1)
    assert net.run(9.0) == [(0.0, 0, LinkDown(net.peer(1), False, "no address"))]
    net.connect(1, 0)
    net.send(0, 1, 3)
    assert net.run(9.0) == [(LATENCY_S, 1, Received(net.peer(0), Ping(3)))]


def test_a_death_is_noticed_after_what_was_sent_before_it_has_come() -> None:
    net = Net(2)
    net.connect(0, 1)
    net.send(1, 0, 4)
    net.kill(1)
    assert net.run(9.0) == [
        (LATENCY_S, 0, Received(net.peer(1), Ping(4))),
        # closed, dialled again, refused
        (round(3 * LATENCY_S, 6), 0, LinkDown(net.peer(1), True, "nobody listens")),
    ]


def test_a_power_cut_is_noticed_by_silence_only() -> None:
    net = Net(2)
    net.connect(0, 1)
    net.kill(1, dark=True)
    when = round(SILENCE_S + LATENCY_S + DIAL_TIMEOUT_S, 6)
    assert net.run(30.0) == [(when, 0, LinkDown(net.peer(1), False, "dial timed out"))]


def test_a_lost_client_may_come_back_before_it_is_given_up() -> None:
    net = Net(2, nat=(1,))
    net.connect(1, 0)
    net.kill(1)
    again = net.start(1, net.peer(1))
    net.network.send(again, net.peer(0), Ping(9))
    told = net.run(30.0)
    assert not [event for _, _, event in told if isinstance(event, LinkDown)]
    assert (round(DIAL_S + LATENCY_S, 6), 0, Received(again.peer, Ping(9))) in told


def test_a_short_partition_delays_and_loses_nothing() -> None:
    net = Net(2)
    net.connect(0, 1)
    net.send(0, 1, 1)  # in flight when the line is cut
    net.part(1)
    net.send(0, 1, 2)
    assert net.run(SILENCE_S / 2) == []
    net.heal()
    told = net.run(SILENCE_S)
    assert sorted(e.message.seq for _, _, e in told if isinstance(e, Received)) == [1, 2]
    assert not [event for _, _, event in told if isinstance(event, LinkDown)]


def test_a_long_partition_breaks_the_link_for_both() -> None:
    net = Net(3)
    net.connect(0, 1)
    net.connect(0, 2)
    net.part(1)
    told = net.run(30.0)
    when = round(SILENCE_S + LATENCY_S + DIAL_TIMEOUT_S, 6)
    assert told == [
        (when, 0, LinkDown(net.peer(1), False, "dial timed out")),
        (when, 1, LinkDown(net.peer(0), False, "dial timed out")),
    ]
    net.heal()
    net.send(0, 1, 8)
    assert (round(DIAL_S + LATENCY_S, 6), 1, Received(net.peer(0), Ping(8))) in net.run(5.0)


def test_chunks_share_the_uplink_in_order_and_control_does_not_wait() -> None:
    net = Net(2)
    net.connect(0, 1)
    net.chunk(0, 1, 1_000_000, 0)
    net.chunk(0, 1, 1_000_000, 1)
    net.send(0, 1, 7)
    told = net.run(10.0)
    assert told[0] == (LATENCY_S, 1, Received(net.peer(0), Ping(7)))
    chunks = [(time, e.header.chunk) for time, _, e in told if isinstance(e, ChunkArrived)]
    assert chunks == [(1.0 + LATENCY_S, 0), (2.0 + LATENCY_S, 1)]


def test_two_senders_share_the_downlink() -> None:
    net = Net(3)
    net.connect(0, 2)
    net.connect(1, 2)
    net.hosts[2].down = 5e5
    net.chunk(0, 2, 1_000_000)
    net.chunk(1, 2, 1_000_000)
    times = [time for time, _, e in net.run(10.0) if isinstance(e, ChunkArrived)]
    assert times[1] - times[0] == pytest.approx(2.0)


def test_cancelled_chunks_do_not_travel() -> None:
    net = Net(2)
    net.connect(0, 1)
    for number in range(3):
        net.chunk(0, 1, 1_000_000, number)
    net.network.cancel(net.processes[0], net.peer(1), GROUP)
    told = net.run(10.0)
    assert [e.header.chunk for _, _, e in told if isinstance(e, ChunkArrived)] == [0]


def test_loss_delays_and_keeps_the_order() -> None:
    net = Net(2)
    net.connect(0, 1)
    net.network.loss = 0.5
    for number in range(200):
        net.network.send(net.processes[0], net.peer(1), Beat(bytes([number])))
    told = net.run(120.0)
    assert [e.message.group[0] for _, _, e in told] == list(range(200))
    assert max(time for time, _, _ in told) > 2 * LATENCY_S


def test_loss_costs_goodput() -> None:
    net = Net(2)
    net.connect(0, 1)
    net.network.loss = 0.5
    for number in range(4):
        net.chunk(0, 1, 1_000_000, number)
    times = [time for time, _, e in net.run(60.0) if isinstance(e, ChunkArrived)]
    assert len(times) == 4
    assert math.isclose(max(times), 8.0, abs_tol=1.0)


def test_traffic_is_counted_by_what_it_is_for() -> None:
    net = Net(2)
    net.connect(0, 1)
    before = net.processes[0].traffic.membership_bytes
    net.send(0, 1, 1)
    net.network.send(net.processes[0], net.peer(1), Beat(b"x" * 16))
    net.chunk(0, 1, 5000)
    net.run(5.0)
    traffic = net.processes[0].traffic
    assert (traffic.membership_messages, traffic.control_messages) == (2, 1)
    assert traffic.membership_bytes - before == len(encode_message(Ping(1)))
    assert traffic.bulk_sent == net.processes[1].traffic.bulk_received == 5000
