"""Parcels: with desks over a network in memory that breaks, with liars, and over real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence

import pytest
import torch

import moshpit
from moshpit.config import TransportConfig
from moshpit.errors import ClosedError, ConfigError, PeerLostError, WaitTimeoutError
from moshpit.events import Notice
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey
from moshpit.runtime.parcels import PARCELS_MAX, VECTORS_MAX, ParcelDesk
from moshpit.runtime.waiting import REAL_TIME
from moshpit.tensors.parcel import Parcel
from moshpit.transport.base import MessagesOnly
from moshpit.transport.memory import Exchange, MemoryTransport
from moshpit.types import Address, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind, parcel_name
from moshpit.wire.messages import Admission, AnyMessage
from moshpit.wire.parcels import ParcelGot, ParcelRefused
from tests.transport.benches import run

CHUNK = 4096
NUMEL = 3000  # three chunks
TURNS = 2000


class Party(MessagesOnly):
    """A peer with a desk."""

    def __init__(self, net: Net, transport: MemoryTransport, session: int) -> None:
        self.net, self.transport, self.peer = net, transport, transport.peer
        self.notices: list[Notice] = []
        self.messages: list[AnyMessage] = []
        self.desk = ParcelDesk(transport, self.notices.append, REAL_TIME, CHUNK, session)
        self.desk.attach(NUMEL)
        self.desk.open()

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        self.desk.again(peer)

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        pass

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        self.messages.append(message)
        self.desk.handle(peer, message)

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        return self.desk.sink(peer, header)

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        self.desk.arrived(peer, header)

    def chunks_wanted(self, peer: PeerId) -> None:
        self.desk.pump(peer)

    def bulk_reset(self, peer: PeerId) -> None:
        self.desk.again(peer)

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        return self.net.book[peer]

    def send(self, to: Party, number: int, vector: torch.Tensor, weight: float = 1.0) -> None:
        self.desk.send(to.peer, (1, number), vector.clone(), weight)

    def taken(self) -> list[Parcel]:
        mailbox, found = self.desk.mailbox, []
        while (parcel := mailbox.first(lambda _: True)) is not None:
            found.append(parcel)
        return found


class Net:
    """Parties that know each other."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.ticket = RunKey.generate().invite().ticket(())
        self.book: dict[PeerId, tuple[Address, ...]] = {}
        self.parties: list[Party] = []

    async def party(self, session: int = 7, peer: PeerId | None = None) -> Party:
        peer = peer or PeerKey.generate().peer
        config = TransportConfig(chunk_bytes=CHUNK)
        transport = MemoryTransport(self.exchange, peer, self.ticket.admit(peer), config)
        party = Party(self, transport, session)
        await transport.start(party)
        self.book[peer] = transport.addresses
        self.parties.append(party)
        for other in self.parties:
            other.desk.view(sorted(self.book))
        return party


def play(part: Callable[[Net], Awaitable[None]]) -> None:
    async def work() -> None:
        net = Net()
        try:
            await part(net)
        finally:
            for party in net.parties:
                party.desk.close()
                await party.transport.close()

    run(work)


async def turns(until: Callable[[], object]) -> None:
    """Let the loop turn until something is so."""
    for _ in range(TURNS):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("it never happened")


async def quiet() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


def vector(seed: int, numel: int = NUMEL) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_a_parcel_arrives_once_with_its_tag_and_weight() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        a.send(b, 5, vector(1), 0.25)
        a.send(b, 6, vector(2, 1))
        got: list[Parcel] = []
        await turns(lambda: got.extend(b.taken()) or len(got) == 2)
        assert [(p.sender, p.tag, p.weight) for p in got] == [
            (a.peer, (1, 5), 0.25),
            (a.peer, (1, 6), 1.0),
        ]
        assert torch.equal(got[0].vector, vector(1))
        assert torch.equal(got[1].vector, vector(2, 1))
        await turns(lambda: len(a.messages) == 2)
        a.desk.again(b.peer)  # nothing is left to be sent again
        await quiet()
        assert (b.taken(), a.notices, b.notices) == ([], [], [])
        assert a.desk.bytes_sent == 4 * (NUMEL + 1)

    play(part)


@pytest.mark.parametrize("after", range(6))
def test_what_a_broken_link_has_lost_is_sent_again_and_nothing_comes_twice(after: int) -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        for number in range(3):
            a.send(b, number, vector(number))
        for _ in range(after):
            await asyncio.sleep(0)
        net.exchange.break_link(a.transport, b.transport)
        got: list[Parcel] = []
        await turns(lambda: got.extend(b.taken()) or len(got) == 3)
        a.desk.again(b.peer)  # as if the confirmations were lost, too
        await quiet()
        assert b.taken() == []
        assert sorted(p.tag[1] for p in got) == [0, 1, 2]
        assert all(torch.equal(p.vector, vector(p.tag[1])) for p in got)

    play(part)


def test_to_the_dead_nothing_is_sent_and_nothing_is_kept_for_them() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        a.send(b, 1, vector(1))
        a.desk.view([a.peer])
        a.send(b, 2, vector(2))
        await quiet()
        a.desk.again(b.peer)
        await quiet()
        assert a.desk._receivers == {}
        assert [p.tag[1] for p in b.taken()] in ([], [1])

    play(part)


def test_who_has_not_asked_for_parcels_takes_none() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        b.desk._open = False
        a.send(b, 1, vector(1))
        await quiet()
        assert (b.taken(), b.desk._senders) == ([], {})
        b.desk.open()
        a.desk.again(b.peer)
        await turns(b.taken)

    play(part)


def test_what_waits_is_bounded_at_both_ends() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        for number in range(VECTORS_MAX + 1):
            a.send(b, number, vector(number))
        assert [n.code for n in a.notices] == ["parcel-dropped"]
        await turns(lambda: not a.desk._receivers[b.peer].queue)
        a.send(b, 9, vector(9))
        await turns(lambda: b.notices)
        assert [(n.code, n.peer) for n in b.notices] == [("too-many-parcels", a.peer)]
        await turns(lambda: len(a.notices) == 2)
        assert a.notices[1].code == "parcel-refused"
        assert len(b.taken()) == VECTORS_MAX
        a.send(b, 10, vector(10))
        await turns(b.taken)

    play(part)


def test_small_ones_are_counted_too() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        for number in range(PARCELS_MAX + 1):
            a.send(b, number, vector(0, 1))
        assert [n.code for n in a.notices] == ["parcel-dropped"]

    play(part)


def test_a_peer_that_is_started_again_may_use_the_same_numbers() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(session=1), await net.party()
        a.send(b, 0, vector(0))
        await turns(b.taken)
        net.exchange.kill(a.transport)
        again = await net.party(session=2, peer=a.peer)
        again.send(b, 0, vector(1))
        got: list[Parcel] = []
        await turns(lambda: got.extend(b.taken()) or got)
        assert torch.equal(got[0].vector, vector(1))

    play(part)


def header(**changed: object) -> ChunkHeader:
    fields = {
        "kind": ChunkKind.PARCEL, "ballot": 3, "chunk": 0, "length": 40, "codec": 0,
        "group": parcel_name(1, 2, 99), "mass": 1.0, "seats": 10,
    }  # fmt: skip
    return ChunkHeader(**{**fields, **changed})


LIES = {
    "empty": header(seats=0, length=0),
    "too long": header(seats=NUMEL + 1, length=CHUNK),
    "weight NaN": header(mass=math.nan),
    "weight negative": header(mass=-1.0),
    "weight infinite": header(mass=math.inf),
    "weight huge": header(mass=1e31),
    "short piece": header(length=36),
    "long piece": header(length=44),
    "begins between": header(seats=2000, chunk=5, length=CHUNK),
    "begins beyond": header(chunk=CHUNK // 4),
    "codec": header(codec=1),
    "number": header(group=parcel_name(1, 1 << 63, 99)),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_parcel_that_cannot_be_is_refused_by_name(lie: str) -> None:
    async def part(net: Net) -> None:
        liar, b = await net.party(), await net.party()
        wrong = LIES[lie]
        payload = memoryview(bytes(wrong.length))
        await turns(lambda: liar.transport.send_chunk(b.peer, wrong, payload))
        await turns(lambda: liar.messages)
        assert [(n.code, n.peer) for n in b.notices] == [("bad-parcel", liar.peer)]
        assert liar.messages == [ParcelRefused(99, 3, "bad-parcel")]
        assert (b.taken(), b.desk._senders[liar.peer].coming) == ([], {})

    play(part)


def test_pieces_that_do_not_belong_together_are_refused() -> None:
    async def part(net: Net) -> None:
        liar, b = await net.party(), await net.party()
        piece = memoryview(bytes(CHUNK))
        first = header(seats=2048, length=CHUNK)
        for wrong in (
            header(seats=3000, length=CHUNK, chunk=1024),
            header(seats=2048, length=CHUNK, chunk=1024, mass=2.0),
            header(seats=2048, length=CHUNK, chunk=1024, group=parcel_name(1, 3, 99)),
        ):
            b.desk._senders.clear()
            b.notices.clear()
            for each in (first, wrong):
                await turns(lambda each=each: liar.transport.send_chunk(b.peer, each, piece))
            await turns(lambda: b.notices)
            assert b.notices[0].code == "bad-parcel"
            assert b.taken() == []

    play(part)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_parcel_with_what_is_not_finite_is_refused_by_name(bad: float) -> None:
    async def part(net: Net) -> None:
        liar, b = await net.party(), await net.party()
        poisoned = vector(1)
        poisoned[1234] = bad
        liar.send(b, 1, poisoned)
        await turns(lambda: liar.notices)
        assert [(n.code, n.peer) for n in b.notices] == [("non-finite", liar.peer)]
        assert liar.notices[0].code == "parcel-refused"
        assert b.taken() == []
        assert not liar.desk._receivers[b.peer].queue

    play(part)


def test_messages_about_parcels_of_nobody_are_ignored() -> None:
    async def part(net: Net) -> None:
        a, b = await net.party(), await net.party()
        a.send(b, 1, vector(1))
        a.desk.handle(b.peer, ParcelGot(8, 0))  # of another session
        a.desk.handle(b.peer, ParcelGot(7, 44))
        a.desk.handle(PeerId(bytes(32)), ParcelGot(7, 0))
        assert len(a.desk._receivers[b.peer].queue) == 1
        await turns(b.taken)

    play(part)


# --- over real sockets ------------------------------------------------------------------------

OPTIONS = {"listen": "127.0.0.1:0", "identity": "new", "preset": "local"}
SCHEMA = bytes(8)
PATIENCE_S = 60.0


@pytest.fixture
def swarms() -> Iterator[list[moshpit.Swarm]]:
    invite = RunKey.generate().invite()
    with contextlib.ExitStack() as stack:
        first = stack.enter_context(moshpit.join(invite.ticket(()).encode(), **OPTIONS))
        ticket = invite.ticket(first.addresses).encode()
        all_three = [first, *(stack.enter_context(moshpit.join(ticket, **OPTIONS)) for _ in "ab")]
        for swarm in all_three:
            assert swarm.peers_now() == []
            assert swarm.parcels is swarm.parcels
            swarm.attach(SCHEMA, NUMEL, 0.0)
        for swarm in all_three:
            assert swarm._wait_for(lambda view: len(view.averaging(view.me.schema)) == 3, 60)
        yield all_three


def test_parcels_over_sockets(swarms: list[moshpit.Swarm]) -> None:
    a, b, c = swarms
    assert a.peers_now() == b.peers_now() == sorted(s.peer_id for s in swarms)
    sent = vector(1)
    a.parcels.send(b.peer_id, (1, 5), sent, 0.5)
    sent.zero_()  # it was copied
    c.parcels.send(b.peer_id, (1, 5), vector(2))
    of_c = b.parcels.take((1, 5), sender=c.peer_id, timeout_s=PATIENCE_S)
    of_a = b.parcels.take((1, 5), timeout_s=PATIENCE_S)
    assert (of_a.sender, of_a.weight, of_c.sender) == (a.peer_id, 0.5, c.peer_id)
    assert torch.equal(of_a.vector, vector(1))
    assert torch.equal(of_c.vector, vector(2))
    assert b.parcels.poll(1) is None
    assert a.stats().bytes_sent == 4 * NUMEL
    assert b.stats().bytes_received == 8 * NUMEL
    with pytest.raises(WaitTimeoutError, match=r"no parcel \(1, 5\) within 0.01 s"):
        b.parcels.take((1, 5), timeout_s=0.01)


def test_parcels_are_served_while_training_waits(swarms: list[moshpit.Swarm]) -> None:
    a, b, _ = swarms
    seen: list[tuple[str, Parcel]] = []

    def answer(parcel: Parcel) -> None:
        seen.append((threading.current_thread().name, parcel))
        b.parcels.send(parcel.sender, (3, parcel.tag[1]), 2 * parcel.vector, parcel.weight)

    a.parcels.send(b.peer_id, (2, 0), vector(0))  # before anybody serves it
    b.parcels.serve(2, answer)
    a.parcels.send(b.peer_id, (2, 1), vector(1), 4.0)
    for number in (0, 1):
        back = a.parcels.take((3, number), sender=b.peer_id, timeout_s=PATIENCE_S)
        assert torch.equal(back.vector, 2 * vector(number))
    assert len(seen) == 2
    assert threading.current_thread().name not in {name for name, _ in seen}


def test_who_waits_for_a_dead_peer_is_told(swarms: list[moshpit.Swarm]) -> None:
    a, b, c = swarms
    c.parcels.send(a.peer_id, (1, 1), vector(1))
    assert a._wait_for(lambda view: True, 1)
    first = a.parcels.take((1, 1), sender=c.peer_id, timeout_s=PATIENCE_S)
    assert first.sender == c.peer_id
    threading.Timer(0.05, c.close).start()
    with pytest.raises(PeerLostError, match=r"lost: parcel \(1, 2\) has not come from it"):
        a.parcels.take((1, 2), sender=c.peer_id, timeout_s=PATIENCE_S)
    a.parcels.send(c.peer_id, (1, 3), vector(1))  # dropped
    a.parcels.send(b.peer_id, (1, 4), vector(1))
    b.parcels.take((1, 4), timeout_s=PATIENCE_S)


def test_closing_ends_the_wait(swarms: list[moshpit.Swarm]) -> None:
    a = swarms[0]
    threading.Timer(0.05, a.close).start()
    with pytest.raises(ClosedError):
        a.parcels.take((1, 1), timeout_s=PATIENCE_S)


@pytest.mark.parametrize(
    ("tag", "sent", "weight", "why"),
    [
        ((-1, 0), torch.zeros(3), 1.0, "neither negative"),
        ((1, 1 << 63), torch.zeros(3), 1.0, "below 2"),
        ((1, 1), torch.zeros(3, 3), 1.0, "one dimension"),
        ((1, 1), torch.zeros(3, dtype=torch.float64), 1.0, "float32"),
        ((1, 1), torch.zeros(0), 1.0, "at least one number"),
        ((1, 1), torch.zeros(NUMEL), 1.0, "64 at most"),
        ((1, 1), torch.zeros(3), -1.0, "weight"),
        ((1, 1), torch.zeros(3), math.nan, "weight"),
        ((1, 1), torch.tensor([1.0, math.nan]), 1.0, "NaN"),
    ],
)
def test_what_nobody_would_take_is_refused_at_once(tag, sent, weight, why) -> None:
    invite = RunKey.generate().invite()
    with (
        moshpit.join(invite.ticket(()).encode(), **OPTIONS) as swarm,
        pytest.raises(ConfigError, match=why),
    ):
        swarm.parcels.send(swarm.peer_id, tag, sent, weight)
