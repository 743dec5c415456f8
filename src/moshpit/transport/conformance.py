"""What every transport must do: one list of checks, run by the tests for each transport.

A `Bench` makes peers on the transport under test and provokes faults; each function of
`CHECKS` takes a fresh one. A check fails by `AssertionError`, or by `TimeoutError` naming what
it waited for.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, final

from moshpit.config import TransportConfig
from moshpit.errors import ClosedError, HandshakeError, RemoteError, UnreachableError
from moshpit.transport.base import CODEC_SLACK_BYTES, Transport
from moshpit.transport.recorder import ArrivedChunk, Recorder
from moshpit.types import GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import Admission, Beat, Ping


@final
@dataclass(frozen=True, slots=True)
class Party:
    """One peer of a check."""

    peer: PeerId
    transport: Transport
    heard: Recorder
    admission: Admission


class Bench(ABC):
    """Makes peers on the transport under test, and provokes faults.

    Attributes:
        ordered: whether chunks to one peer arrive in the order in which they were handed in.
    """

    ordered: bool = True

    def as_sent(self, heard: Sequence[ArrivedChunk]) -> list[ArrivedChunk]:
        """Return chunks in the order in which they were handed in, if any order will do."""
        return list(heard) if self.ordered else sorted(heard, key=lambda chunk: chunk[1].mass)

    @abstractmethod
    async def party(self, *, listens: bool = True, config: TransportConfig | None = None) -> Party:
        """Make and start a peer; all peers that listen can dial each other."""

    @abstractmethod
    def sever(self, one: Party, other: Party) -> None:
        """Break all connections between two peers, without a word to either."""

    @abstractmethod
    async def vanish(self, party: Party) -> None:
        """Break a peer's connections and have dials to it refused, as if it was killed."""

    @abstractmethod
    async def close(self) -> None:
        """Close all transports."""


def make_chunk(number: int, size: int) -> tuple[ChunkHeader, bytes]:
    """Return a chunk whose bytes follow from its number."""
    payload = random.Random(number).randbytes(size)
    group = GroupId(bytes([number % 256]) * 16)
    header = ChunkHeader(ChunkKind.RESULT, number % 7, number, size, 3, group, number + 0.5, number)
    return header, payload


def _numbers(party: Party, sender: Party) -> list[int]:
    return [m.seq for p, m in party.heard.messages if p == sender.peer and isinstance(m, Ping)]


async def _fails(dial: Awaitable[object], kind: type[RemoteError], reason: str) -> None:
    [error] = await asyncio.gather(dial, return_exceptions=True)
    assert isinstance(error, kind), f"{reason} expected, got {error!r}"
    assert error.reason == reason, f"{reason} expected, got {error!r}"


async def _pair(bench: Bench) -> tuple[Party, Party]:
    """Two peers that are connected."""
    one, other = await bench.party(), await bench.party()
    one.transport.send(other.peer, Ping(0))
    await other.heard.until(lambda: _numbers(other, one) == [0], "the first message")
    return one, other


# --- checks -------------------------------------------------------------------------------


async def messages_in_order(bench: Bench) -> None:
    """Messages arrive in order, both ways, from the first one that is sent."""
    one, other = await bench.party(), await bench.party()
    for seq in range(300):
        one.transport.send(other.peer, Ping(seq))
        other.transport.send(one.peer, Ping(1000 + seq))
        if seq % 50 == 0:
            await asyncio.sleep(0)
    await other.heard.until(lambda: len(other.heard.messages) == 300, "300 messages")
    await one.heard.until(lambda: len(one.heard.messages) == 300, "300 messages back")
    assert _numbers(other, one) == list(range(300))
    assert _numbers(one, other) == list(range(1000, 1300))
    assert other.heard.links == [(one.peer, one.admission)]
    assert one.heard.links == [(other.peer, other.admission)]
    assert one.transport.connected(other.peer)
    assert not one.heard.lost
    assert one.transport.stats(other.peer).control_in > 300


async def chunks_are_exact(bench: Bench) -> None:
    """Chunks of all sizes arrive bit by bit, both ways, with their headers."""
    one, other = await _pair(bench)
    limit = TransportConfig().chunk_bytes + CODEC_SLACK_BYTES
    sizes = [0, 1, 47, 48, 49, 4096, 0, limit - 1, limit, 65536, 1]
    chunks = [make_chunk(number, size) for number, size in enumerate(sizes)]
    one.heard.queue(other.peer, chunks)
    other.heard.queue(one.peer, chunks[::-1])
    await other.heard.until(lambda: len(other.heard.chunks) == len(sizes), "all chunks")
    await one.heard.until(lambda: len(one.heard.chunks) == len(sizes), "all chunks back")
    assert bench.as_sent(other.heard.chunks) == [(one.peer, *chunk) for chunk in chunks]
    back = one.heard.chunks if bench.ordered else bench.as_sent(one.heard.chunks)[::-1]
    assert back == [(other.peer, *chunk) for chunk in chunks[::-1]]
    assert one.transport.stats(other.peer).bulk_in >= sum(sizes)
    assert one.transport.stats(other.peer).bulk_out >= sum(sizes)


async def many_small_chunks(bench: Bench) -> None:
    """Hundreds of small chunks of odd sizes keep their order and bytes."""
    one, other = await _pair(bench)
    chunks = [make_chunk(number, 1 + number * 37 % 9001) for number in range(600)]
    one.heard.queue(other.peer, chunks)
    await other.heard.until(lambda: len(other.heard.chunks) == 600, "600 chunks")
    assert bench.as_sent(other.heard.chunks) == [(one.peer, *chunk) for chunk in chunks]


async def unwanted_chunks_are_dropped(bench: Bench) -> None:
    """A chunk without a sink is read and dropped; the next ones are whole."""
    one, other = await _pair(bench)
    other.heard.unwanted = [1, 2]
    chunks = [make_chunk(number, 30_000 - number) for number in range(5)]
    one.heard.queue(other.peer, chunks)
    await other.heard.until(lambda: len(other.heard.chunks) == 3, "three chunks")
    arrived = bench.as_sent(other.heard.chunks)
    assert [header.chunk for _, header, _ in arrived] == [0, 3, 4]
    assert arrived[1][2] == chunks[3][1]


async def payload_can_be_reused(bench: Bench) -> None:
    """The sender may overwrite a payload as soon as `send_chunk` has returned True."""
    one, other = await _pair(bench)
    one.heard.queue(other.peer, [make_chunk(0, 100)])
    await other.heard.until(lambda: len(other.heard.chunks) == 1, "the link")
    size = TransportConfig().chunk_bytes
    header, payload = make_chunk(1, size)
    buffer = bytearray(payload)
    sent = 0
    while one.transport.send_chunk(other.peer, header, memoryview(buffer)):
        buffer[:] = bytes(size)
        sent += 1
        buffer[:] = payload
        assert sent < 1000, "never full"
    buffer[:] = bytes(size)
    await other.heard.until(lambda: len(other.heard.chunks) == 1 + sent, "all that was taken")
    assert all(got == payload for _, _, got in other.heard.chunks[1:])


async def backpressure(bench: Bench) -> None:
    """A full link says so, and asks again when it has room; nothing is lost or moved."""
    one, other = await _pair(bench)
    chunks = [make_chunk(number, 400_000) for number in range(60)]
    one.heard.queue(other.peer, chunks[:1])
    await other.heard.until(lambda: len(other.heard.chunks) == 1, "the link")
    one.heard.queue(other.peer, chunks[1:])
    assert one.heard.outgoing[other.peer], "24 MB fit into a link at once"
    await other.heard.until(lambda: len(other.heard.chunks) == 60, "all chunks")
    arrived = bench.as_sent(other.heard.chunks)
    assert [header for _, header, _ in arrived] == [header for header, _ in chunks]
    assert arrived[-1][2] == chunks[-1][1]


async def control_passes_bulk(bench: Bench) -> None:
    """A message does not wait behind chunks that wait, in either direction."""
    one, other = await _pair(bench)
    one.heard.queue(other.peer, [make_chunk(0, 1)])
    await other.heard.until(lambda: len(other.heard.chunks) == 1, "the link")
    payload = bytes(500_000)
    header = make_chunk(1, len(payload))[0]
    one.heard.queue(other.peer, [(header, payload)] * 120)
    for seq in range(1, 6):
        one.transport.send(other.peer, Ping(seq))
        await other.heard.until(lambda seq=seq: _numbers(other, one)[-1] == seq, "a message")
        other.transport.send(one.peer, Ping(seq))
        await one.heard.until(lambda seq=seq: _numbers(one, other)[-1:] == [seq], "the answer")
    arrived = len(other.heard.chunks)
    await other.heard.until(lambda: len(other.heard.chunks) == 121, "all chunks")
    assert arrived < 121, "five exchanges took longer than 60 MB"


async def a_broken_link_is_dialled_again(bench: Bench) -> None:
    """A lost connection comes back by itself, and nobody is called lost."""
    one, other = await _pair(bench)
    bench.sever(one, other)
    await one.heard.until(lambda: len(one.heard.links) == 2, "the new link")
    await other.heard.until(lambda: len(other.heard.links) == 2, "the new link, other side")
    one.transport.send(other.peer, Ping(1))
    other.transport.send(one.peer, Ping(2))
    await other.heard.until(lambda: _numbers(other, one) == [0, 1], "a message after")
    await one.heard.until(lambda: _numbers(one, other) == [2], "a message back")
    assert not one.heard.lost
    assert not other.heard.lost


async def bulk_comes_back(bench: Bench) -> None:
    """Chunks flow again after a loss."""
    one, other = await _pair(bench)
    one.heard.queue(other.peer, [make_chunk(0, 1000)])
    await other.heard.until(lambda: len(other.heard.chunks) == 1, "a chunk")
    bench.sever(one, other)
    await one.heard.until(lambda: len(one.heard.links) == 2, "the new link")
    one.heard.queue(other.peer, [make_chunk(1, 1000)])
    other.heard.queue(one.peer, [make_chunk(2, 1000)])
    await other.heard.until(lambda: len(other.heard.chunks) == 2, "a chunk after")
    await one.heard.until(lambda: len(one.heard.chunks) == 1, "a chunk back")


async def a_killed_peer_is_lost(bench: Bench) -> None:
    """A peer whose process is gone is reported, once, and as refused."""
    one, other = await _pair(bench)
    await bench.vanish(other)
    await one.heard.until(lambda: bool(one.heard.lost), "the loss")
    assert [(peer, refused) for peer, refused, _ in one.heard.lost] == [(other.peer, True)]
    assert not one.transport.connected(other.peer)


async def refused_dials(bench: Bench) -> None:
    """Sends to a peer that does not listen come back as lost; `dial` raises."""
    one, other = await bench.party(), await bench.party()
    where = one.heard.book[other.peer][0]
    await bench.vanish(other)
    one.transport.send(other.peer, Ping(1))
    assert not one.heard.lost, "called back from within send"
    await one.heard.until(lambda: bool(one.heard.lost), "the loss")
    assert [(peer, refused) for peer, refused, _ in one.heard.lost] == [(other.peer, True)]
    header, payload = make_chunk(1, 10)
    assert not one.transport.send_chunk(other.peer, header, memoryview(payload))
    await one.heard.until(lambda: len(one.heard.lost) == 2, "the loss, for a chunk")
    await _fails(one.transport.dial(where), UnreachableError, "refused")


async def no_address(bench: Bench) -> None:
    """A peer that cannot be dialled and has not dialled is lost, but not refused."""
    one = await bench.party()
    stranger = PeerId(bytes(range(32)))
    one.transport.send(stranger, Ping(1))
    one.transport.send(stranger, Ping(2))
    await one.heard.until(lambda: bool(one.heard.lost), "the loss")
    assert [(peer, refused) for peer, refused, _ in one.heard.lost] == [(stranger, False)]


async def dials_that_cross(bench: Bench) -> None:
    """Peers that dial each other at once end with one link and lose nothing."""
    parties = [await bench.party() for _ in range(6)]
    for seq in range(3):
        for one in parties:
            for other in parties:
                if one is not other:
                    one.transport.send(other.peer, Ping(seq))
    for one in parties:
        await one.heard.until(lambda one=one: len(one.heard.messages) == 15, "15 messages")
        for other in parties:
            if one is not other:
                assert _numbers(one, other) == [0, 1, 2]
                assert [p for p, _ in one.heard.links].count(other.peer) == 1
        assert not one.heard.lost
        assert not one.heard.notices


async def bulk_that_crosses(bench: Bench) -> None:
    """Peers that want a bulk link at once get one, and every chunk arrives once."""
    parties = [await bench.party() for _ in range(4)]
    chunks = [make_chunk(number, 20_000) for number in range(5)]
    for one in parties:
        for other in parties:
            if one is not other:
                one.heard.queue(other.peer, chunks)
    for one in parties:
        await one.heard.until(lambda one=one: len(one.heard.chunks) == 15, "15 chunks")
        for other in parties:
            if one is not other:
                heard = bench.as_sent(one.heard.chunks)
                got = [(h, data) for p, h, data in heard if p == other.peer]
                assert got == chunks
        assert not one.heard.lost


async def dropping(bench: Bench) -> None:
    """Who drops a peer hears nothing; the dropped one hears why; both can meet again."""
    one, other = await _pair(bench)
    one.transport.drop(other.peer, "strikes")
    assert not one.transport.connected(other.peer)
    await other.heard.until(lambda: bool(other.heard.lost), "the loss")
    peer, refused, detail = other.heard.lost[0]
    assert (peer, refused) == (one.peer, False)
    assert "strikes" in detail
    assert not one.heard.lost
    other.transport.send(one.peer, Ping(5))
    await one.heard.until(lambda: _numbers(one, other) == [5], "a message after")


async def clients(bench: Bench) -> None:
    """A client dials out; messages and chunks reach it over its own connections."""
    worker, client = await bench.party(), await bench.party(listens=False)
    assert client.transport.addresses == ()
    got = await client.transport.dial(client.heard.book[worker.peer][0])
    assert got == worker.peer
    await worker.heard.until(lambda: bool(worker.heard.links), "the client")
    worker.transport.send(client.peer, Beat(b"g" * 16))
    worker.heard.queue(client.peer, [make_chunk(1, 100_000)])
    client.heard.queue(worker.peer, [make_chunk(2, 100_000)])
    await client.heard.until(lambda: bool(client.heard.messages), "a message")
    await client.heard.until(lambda: bool(client.heard.chunks), "a chunk")
    await worker.heard.until(lambda: bool(worker.heard.chunks), "a chunk back")
    assert client.heard.chunks[0] == (worker.peer, *make_chunk(1, 100_000))


async def dialling_by_address(bench: Bench) -> None:
    """`dial` says who is there, refuses somebody else, and refuses itself."""
    one, other = await bench.party(), await bench.party()
    where = one.heard.book[other.peer][0]
    at = one.heard.book[one.peer][0]
    nobody = PeerId(bytes(32))
    await _fails(one.transport.dial(where, nobody), HandshakeError, "swapped-certificate")
    await _fails(one.transport.reach(where, nobody), HandshakeError, "swapped-certificate")
    await _fails(one.transport.dial(where, one.peer), HandshakeError, "self-dial")
    await _fails(one.transport.dial(at), HandshakeError, "self-dial")
    await one.transport.reach(where, other.peer)
    assert not one.heard.links
    assert await one.transport.dial(where) == other.peer
    assert await one.transport.dial(where, other.peer) == other.peer
    both = await asyncio.gather(one.transport.dial(where), other.transport.dial(at))
    assert both == [other.peer, one.peer]
    assert len(one.heard.links) == 1
    await other.heard.until(lambda: bool(other.heard.links), "the link, other side")
    assert getattr(one.transport.remote(other.peer), "host", "") == where.host
    assert getattr(other.transport.remote(one.peer), "host", "") == where.host
    assert one.transport.remote(nobody) is None


async def full_control_queue(bench: Bench) -> None:
    """A peer that does not take its messages is dropped before they fill the memory."""
    one = await bench.party(config=TransportConfig(control_queue_bytes_max=10_000))
    other = await bench.party()
    for seq in range(5000):
        one.transport.send(other.peer, Ping(seq))
    assert not one.heard.lost, "called back from within send"
    await one.heard.until(lambda: bool(one.heard.lost), "the loss")
    assert one.heard.lost[0][:2] == (other.peer, False)
    assert one.heard.notices[0].code == "control-queue-full"


async def closing(bench: Bench) -> None:
    """Closing delivers what is queued, tells the others, and can be repeated."""
    one, other = await _pair(bench)
    one.heard.queue(other.peer, [make_chunk(0, 1000)])
    await other.heard.until(lambda: bool(other.heard.chunks), "a chunk")
    for seq in range(1, 100):
        one.transport.send(other.peer, Ping(seq))
    await one.transport.close()
    await one.transport.close()
    await other.heard.until(lambda: bool(other.heard.lost), "the loss")
    assert _numbers(other, one) == list(range(100))
    assert other.heard.lost[0][:2] == (one.peer, True)
    assert not other.heard.notices
    assert not one.heard.lost
    one.transport.send(other.peer, Ping(1))
    header, payload = make_chunk(1, 10)
    assert not one.transport.send_chunk(other.peer, header, memoryview(payload))
    late = one.transport.dial(other.heard.book[other.peer][0])
    [error] = await asyncio.gather(late, return_exceptions=True)
    assert isinstance(error, ClosedError), f"dialled after close: {error!r}"
    await bench.close()
    assert asyncio.all_tasks() == {asyncio.current_task()}


CHECKS: Final[tuple[Callable[[Bench], Awaitable[None]], ...]] = (
    messages_in_order,
    chunks_are_exact,
    many_small_chunks,
    unwanted_chunks_are_dropped,
    payload_can_be_reused,
    backpressure,
    control_passes_bulk,
    a_broken_link_is_dialled_again,
    bulk_comes_back,
    a_killed_peer_is_lost,
    refused_dials,
    no_address,
    dials_that_cross,
    bulk_that_crosses,
    dropping,
    clients,
    dialling_by_address,
    full_control_queue,
    closing,
)
"""All checks, each to be run on a fresh bench."""
