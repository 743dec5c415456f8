"""State transfer with real bytes between desks, and with donors that send what they should not."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from random import Random

import pytest
import torch

from moshpit.config import TransportConfig
from moshpit.events import Notice
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey
from moshpit.protocol import statesharing
from moshpit.runtime.states import FetchedState, Fetching
from moshpit.runtime.statesync import StateDesk
from moshpit.tensors.image import Manifest, StateImage, content_hash
from moshpit.transport.base import MessagesOnly
from moshpit.transport.memory import Exchange, MemoryTransport
from moshpit.types import Address, GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import Admission, AnyMessage
from moshpit.wire.transfer import StateAsk, StateComing, StateOffer, StateWant
from tests.transport.benches import run

PIECE = 4096
SIZE_MAX = 1 << 20
SCHEMA = b"0123456789abcdef"


def image(epoch: int = 5, numel: int = 30_000) -> StateImage:
    torch.manual_seed(1)
    return StateImage.of({"w": torch.randn(numel)}, {"kind": "x"}, epoch, PIECE)


class Net:
    """Peers that know each other's addresses."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.ticket = RunKey.generate().invite().ticket(())
        self.book: dict[PeerId, tuple[Address, ...]] = {}
        self.transports: list[MemoryTransport] = []

    async def transport(self) -> MemoryTransport:
        peer = PeerKey.generate().peer
        admission = self.ticket.admit(peer)
        made = MemoryTransport(self.exchange, peer, admission, TransportConfig())
        self.transports.append(made)
        return made


class Desk(MessagesOnly):
    """A peer with a desk."""

    def __init__(self, net: Net, transport: MemoryTransport) -> None:
        self.net, self.transport, self.peer = net, transport, transport.peer
        self.notices: list[Notice] = []
        self.desk = StateDesk(transport, self.notices.append, PIECE, Random(1))
        self.desk.epoch = lambda: 5

    @classmethod
    async def start(cls, net: Net, *args: object) -> Desk:
        transport = await net.transport()
        desk = cls(net, transport, *args)
        await transport.start(desk)
        net.book[transport.peer] = transport.addresses
        return desk

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        pass

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        self.desk.lost(peer)

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        self.desk.handle(peer, message)
        if self.desk.wanted_since is not None:
            self.desk.give(image, SCHEMA)

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        return self.desk.sink(peer, header)

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        self.desk.arrived(peer, header)

    def chunks_wanted(self, peer: PeerId) -> None:
        self.desk.pump(peer)

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        return self.net.book[peer]


class Liar(Desk):
    """A donor that sends what it should not."""

    def __init__(self, net: Net, transport: MemoryTransport, what: str) -> None:
        super().__init__(net, transport)
        self.waiting: list[tuple[ChunkHeader, bytes]] = []
        true = image()
        manifest = true.manifest
        if what == "huge":
            manifest = Manifest(5, 1 << 40, 1 << 26, (bytes(32),) * (1 << 14), {})
        elif what == "other-epoch":
            manifest = image(4).manifest
        self.data = b"no manifest" if what == "no-manifest" else manifest.encode()
        cuts = [self.data[at : at + PIECE] for at in range(0, len(self.data), PIECE)]
        self.pieces = {content_hash(cut): cut for cut in cuts}
        self.names = tuple(content_hash(cut) for cut in cuts)
        for index in range(len(true)):
            chunk = true.chunk(index)
            wrong = {"altered": bytes(len(chunk)), "short": chunk[:-1], "long": chunk + b"x"}
            self.pieces[content_hash(chunk)] = wrong.get(what, chunk)

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        match message:
            case StateAsk(seq=seq):
                self.transport.send(peer, StateComing(seq))
                offer = StateOffer(seq, 5, SCHEMA, self.names, len(self.data), PIECE)
                self.transport.send(peer, offer)
            case StateWant(hashes=hashes):
                for piece in hashes:
                    self.put(peer, bytes(16), b"nobody asked for this")
                    self.put(peer, piece[:16], self.pieces[piece])

    def put(self, peer: PeerId, name: bytes, data: bytes) -> None:
        header = ChunkHeader(ChunkKind.STATE, 0, 0, len(data), 0, GroupId(name), 0.0, 0)
        self.waiting.append((header, data))
        self.chunks_wanted(peer)

    def chunks_wanted(self, peer: PeerId) -> None:
        while self.waiting and self._sent(peer, *self.waiting[0]):
            del self.waiting[0]

    def _sent(self, peer: PeerId, header: ChunkHeader, data: bytes) -> bool:
        return self.transport.send_chunk(peer, header, memoryview(data))


def play(part: Callable[[Net, list[Desk]], Awaitable[None]]) -> None:
    async def work() -> None:
        net = Net()
        desks: list[Desk] = []
        try:
            await part(net, desks)
        finally:
            for desk in desks:
                await desk.desk.close()
            for transport in net.transports:
                await transport.close()

    run(work)


async def fetched(asker: Desk, donors: Sequence[Desk]) -> FetchedState | None:
    fetching = Fetching()
    asker.desk.fetch([d.peer for d in donors], fetching, SIZE_MAX, 0)
    async with asyncio.timeout(60):
        while not fetching.wait(0):
            await asyncio.sleep(0.005)
    return fetching.state


def test_a_state_comes_from_two_donors_as_it_was() -> None:
    async def part(net: Net, desks: list[Desk]) -> None:
        for _ in range(3):
            desks.append(await Desk.start(net))
        one, two, asker = desks
        one.desk.able(True)
        two.desk.able(True)
        state = await fetched(asker, [one, two])
        assert state is not None
        assert state.schema == SCHEMA
        assert state.assembler.manifest == image().manifest
        torch.manual_seed(1)
        assert torch.equal(state.assembler.tensors()["w"], torch.randn(30_000))
        assert not asker.notices
        for donor in (one, two):
            async with asyncio.timeout(10):
                while donor.desk._given:
                    await asyncio.sleep(0.005)

    play(part)


def test_joiners_pass_on_what_they_have_and_a_donor_gives_it_once() -> None:
    async def part(net: Net, desks: list[Desk]) -> None:
        for _ in range(6):
            desks.append(await Desk.start(net))
        donor, *askers = desks
        donor.desk.able(True)
        fetchings = [Fetching() for _ in askers]
        for asker, fetching in zip(askers, fetchings, strict=True):
            others = [other.peer for other in askers if other is not asker]
            asker.desk.fetch(
                [donor.peer], fetching, SIZE_MAX, 0, shares=True, reach=others.__contains__
            )
        async with asyncio.timeout(60):
            while not all(fetching.wait(0) for fetching in fetchings):
                await asyncio.sleep(0.005)
        size = image().manifest.size + len(image().manifest.encode())
        for asker, fetching in zip(askers, fetchings, strict=True):
            assert fetching.state is not None
            torch.manual_seed(1)
            assert torch.equal(fetching.state.assembler.tensors()["w"], torch.randn(30_000))
            assert not asker.notices
        given = [desk.desk.bytes_given for desk in desks]
        assert sum(given) == 5 * size
        assert given[0] <= 1.2 * size
        assert all(asker.desk._shared is not None for asker in askers), "for those still to come"
        for asker in askers:
            asker.desk._shared.sharing._ended_at -= statesharing.LINGER_S
            asker.desk._shared.sharing._heard -= statesharing.LINGER_S
            asker.desk._tick()
            assert asker.desk._shared is None, "its memory is free again"

    play(part)


@pytest.mark.parametrize("what", ["altered", "short", "long", "huge", "no-manifest", "other-epoch"])
def test_a_donor_that_lies_is_named_and_another_gives_the_state(what: str) -> None:
    async def part(net: Net, desks: list[Desk]) -> None:
        desks += [await Liar.start(net, what), await Desk.start(net), await Desk.start(net)]
        liar, honest, asker = desks
        assert await fetched(asker, [liar]) is None
        assert [(n.code, n.peer) for n in asker.notices] == [("state-refused", liar.peer)]
        assert asker.notices[0].detail
        honest.desk.able(True)
        state = await fetched(asker, [liar, honest])
        assert state is not None
        assert state.assembler.manifest == image().manifest

    play(part)


def test_who_has_nothing_to_give_says_so() -> None:
    async def part(net: Net, desks: list[Desk]) -> None:
        desks += [await Desk.start(net), await Desk.start(net)]
        assert await fetched(desks[1], desks[:1]) is None
        assert await fetched(desks[1], []) is None

    play(part)


def test_a_closed_desk_leaves_nobody_waiting() -> None:
    async def part(net: Net, desks: list[Desk]) -> None:
        desks += [await Desk.start(net), await Desk.start(net)]
        desks[0].desk.able(True)
        fetching = Fetching()
        desks[1].desk.fetch([desks[0].peer], fetching, SIZE_MAX, 0)
        await desks[1].desk.close()
        assert fetching.wait(0)
        assert fetching.state is None

    play(part)
