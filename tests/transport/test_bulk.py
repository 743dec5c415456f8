"""What somebody on the network can do to a bulk connection, and what becomes of it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import dataclass, field, replace

import pytest

from moshpit.errors import RemoteError
from moshpit.transport.bulk import MAGIC, BulkKeys, BulkLink
from moshpit.transport.conformance import Party, make_chunk
from moshpit.transport.recorder import PATIENCE_S
from moshpit.types import PeerId
from moshpit.wire.framing import HEADER_BYTES, TAG_BYTES, ChunkHeader
from tests.transport.benches import QUICK, TcpBench, run

SIZE = 1000
WHOLE = HEADER_BYTES + SIZE + TAG_BYTES
PEER = PeerId(bytes(32))


@dataclass
class Heard:
    """Keeps what a link says (`BulkEvents`)."""

    chunks: list[tuple[int, bytes]] = field(default_factory=list)
    fault: RemoteError | None = None
    sink: bytearray = field(default_factory=bytearray)

    def bulk_sink(self, header: ChunkHeader) -> memoryview:
        self.sink = bytearray(header.length)
        return memoryview(self.sink)

    def bulk_chunk(self, header: ChunkHeader) -> None:
        self.chunks.append((header.chunk, bytes(self.sink)))

    def bulk_writable(self, link: BulkLink) -> None:
        pass

    def bulk_closed(self, link: BulkLink, fault: RemoteError | None, detail: str) -> None:
        self.fault = fault


async def link_over(sock: socket.socket, keys: BulkKeys, heard: Heard) -> BulkLink:
    link = BulkLink(PEER, keys, 1 << 16, heard)
    sock.setblocking(False)
    await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
    return link


async def sealed_chunks(keys: BulkKeys, count: int) -> list[bytes]:
    """Return the bytes of each chunk as they pass on the network."""
    ours, theirs = socket.socketpair()
    link = await link_over(ours, keys, Heard())
    wire = bytearray()
    theirs.setblocking(False)
    for number in range(count):
        header, payload = make_chunk(number, SIZE)
        assert link.send(header, memoryview(payload))
        while len(wire) < (number + 1) * WHOLE:
            wire += await asyncio.get_running_loop().sock_recv(theirs, 1 << 16)
    link.close()
    await link.closed
    theirs.close()
    return [bytes(wire[n * WHOLE : (n + 1) * WHOLE]) for n in range(count)]


async def receive(keys: BulkKeys, stream: bytes, step: int) -> Heard:
    """Let a link receive a stream in pieces and then its end."""
    ours, theirs = socket.socketpair()
    heard = Heard()
    turned = BulkKeys(keys.token, keys.into, keys.out, keys.sealed)
    link = await link_over(ours, turned, heard)
    theirs.setblocking(False)
    try:
        for start in range(0, len(stream), step):
            await asyncio.get_running_loop().sock_sendall(theirs, stream[start : start + step])
    except (ConnectionResetError, BrokenPipeError):
        pass  # it was dropped, as it should be
    theirs.close()
    async with asyncio.timeout(PATIENCE_S):
        await link.closed
    return heard


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


ATTACKS = {
    # name: (what passes, made of the chunks 0, 1, 2, 3; how many are taken; reason)
    "nothing": (lambda c: c[0] + c[1] + c[2] + c[3], 4, None),
    "reordered": (lambda c: c[0] + c[2] + c[1], 1, "bad-tag"),
    "left-out": (lambda c: c[0] + c[2], 1, "bad-tag"),
    "replayed": (lambda c: c[0] + c[1] + c[1], 2, "bad-tag"),
    "payload-altered": (lambda c: c[0] + flipped(c[1], HEADER_BYTES + 500) + c[2], 1, "bad-tag"),
    "tag-altered": (lambda c: flipped(c[0], WHOLE - 1) + c[1], 0, "bad-tag"),
    "mass-altered": (lambda c: flipped(c[0], 35) + c[1], 0, "bad-tag"),
    "chunk-number-altered": (lambda c: flipped(c[0], 4) + c[1], 0, "bad-tag"),
    "length-altered": (lambda c: flipped(c[0], 8) + c[1], 0, "bad-tag"),
    "length-huge": (lambda c: flipped(c[0], 11) + c[1], 0, "oversized"),
    "magic-altered": (lambda c: flipped(c[0], 0) + c[1], 0, "bad-chunk-header"),
    "injected": (lambda c: c[0] + c[1][:HEADER_BYTES] + bytes(SIZE + TAG_BYTES), 1, "bad-tag"),
    "cut-in-payload": (lambda c: c[0] + c[1][:500], 1, "cut-chunk"),
    "cut-in-header": (lambda c: c[0] + c[1][:10], 1, "cut-chunk"),
}


@pytest.mark.parametrize("name", ATTACKS)
@pytest.mark.parametrize("step", [100_000, 333])
def test_sealed_stream(name: str, step: int) -> None:
    forge, taken, reason = ATTACKS[name]

    async def work() -> None:
        keys = BulkKeys.fresh(True)
        chunks = await sealed_chunks(keys, 4)
        heard = await receive(keys, forge(chunks), step)
        assert [number for number, _ in heard.chunks] == list(range(taken))
        assert all(data == make_chunk(number, SIZE)[1] for number, data in heard.chunks)
        assert (heard.fault.reason if heard.fault else None) == reason

    run(work)


def test_what_i_sent_does_not_pass_as_what_you_sent() -> None:
    async def work() -> None:
        keys = BulkKeys.fresh(True)
        chunks = await sealed_chunks(keys, 1)
        reflected = BulkKeys(keys.token, keys.into, keys.out, True)
        heard = await receive(reflected, chunks[0], 100_000)
        assert heard.chunks == []
        assert heard.fault.reason == "bad-tag"

    run(work)


# --- through whole transports ---------------------------------------------------------------


async def dialler_first(bench: TcpBench) -> tuple[Party, Party]:
    """Two peers, the one that will dial the bulk connection first."""
    one, other = await bench.party(), await bench.party()
    return (one, other) if one.peer < other.peer else (other, one)


def codes(party: Party) -> list[str]:
    return [notice.code for notice in party.heard.notices]


def test_an_altered_chunk_is_blamed_and_bulk_goes_on() -> None:
    async def work() -> None:
        bench = TcpBench()
        one, other = await dialler_first(bench)
        await feed_and_wait(one, other, 1)
        spoiled = 0

        def tap(first: bytes, inward: bool, data: bytes) -> bytes:
            nonlocal spoiled
            if first.startswith(MAGIC) and inward and not spoiled and len(data) > 500:
                spoiled += 1
                return flipped(data, 400)
            return data

        bench.relays[other.peer].tap = tap
        one.heard.queue(other.peer, [make_chunk(8, 5000)])
        await other.heard.until(lambda: "bad-tag" in codes(other), "the notice")
        assert other.heard.notices[-1].peer == one.peer
        assert len(other.heard.chunks) == 1
        await one.heard.until(lambda: "bulk-lost" in codes(one), "the loss at the sender")
        assert one.heard.resets == [other.peer]
        assert other.heard.resets == [one.peer]
        one.heard.queue(other.peer, [make_chunk(9, 5000)])
        await other.heard.until(lambda: len(other.heard.chunks) == 2, "a chunk after")
        assert other.heard.chunks[-1][1:] == make_chunk(9, 5000)
        assert not one.heard.lost
        assert not other.heard.lost
        await bench.close()

    run(work)


async def feed_and_wait(one: Party, other: Party, count: int) -> None:
    one.heard.queue(other.peer, [make_chunk(7, 5000)])
    await other.heard.until(lambda: len(other.heard.chunks) == count, "a chunk")


@pytest.mark.parametrize("leaves", ["dialler", "dialled"])
def test_the_bulk_end_of_a_peer_that_leaves_is_no_loss(leaves: str) -> None:
    """The end of the bulk connection overtakes the farewell that explains it."""

    async def work() -> None:
        bench = TcpBench()
        one, other = await dialler_first(bench)
        await feed_and_wait(one, other, 1)
        leaver, stays = (one, other) if leaves == "dialler" else (other, one)
        pair = stays.transport.state_of(leaver.peer).pair
        for relay in bench.relays.values():
            relay.control.clear()
        leaving = asyncio.create_task(leaver.transport.close())
        async with asyncio.timeout(PATIENCE_S):
            while pair.active:
                await asyncio.sleep(0.001)
        assert not stays.heard.notices
        assert not stays.heard.lost
        for relay in bench.relays.values():
            relay.control.set()
        await stays.heard.until(lambda: bool(stays.heard.lost), "the farewell")
        await leaving
        assert stays.heard.lost[0][:2] == (leaver.peer, True)
        assert not stays.heard.notices
        await bench.close()

    run(work)


def test_a_stolen_token_opens_nothing() -> None:
    async def work() -> None:
        bench = TcpBench()
        one, other = await dialler_first(bench)
        seen: list[bytes] = []
        target = bench.relays[other.peer].target

        def tap(first: bytes, inward: bool, data: bytes) -> bytes:
            if first.startswith(MAGIC) and inward and not seen:
                seen.append(data[:36])
                # The thief is first: the honest hello waits until it was answered.
                with socket.create_connection((target.host, target.port)) as thief:
                    thief.sendall(data[:36])
                    thief.setblocking(False)
                    held.append(thief.dup())
            return data

        held: list[socket.socket] = []
        bench.relays[other.peer].tap = tap
        await feed_and_wait(one, other, 1)
        thief = held[0]
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(PATIENCE_S):
            await loop.sock_sendall(thief, bytes(32))
            await other.heard.until(lambda: "bad-bulk-proof" in codes(other), "the notice")
        thief.close()
        await feed_and_wait(one, other, 2)
        # And once more, when it has been used.
        late = socket.create_connection((target.host, target.port))
        late.setblocking(False)
        await loop.sock_sendall(late, seen[0])
        await other.heard.until(lambda: "reused-token" in codes(other), "the notice")
        late.close()
        assert not one.heard.lost
        await bench.close()

    run(work)


def test_an_unknown_token_opens_nothing() -> None:
    async def work() -> None:
        bench = TcpBench()
        party = await bench.party(config=replace(QUICK, handshake_timeout_s=0.4))
        address = party.transport.addresses[0]
        _, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(MAGIC + bytes(32))
        await party.heard.until(lambda: bool(party.heard.notices), "the notice")
        assert codes(party) == ["unknown-token"]
        writer.close()
        await writer.wait_closed()
        await bench.close()

    run(work)


def test_faults_without_end_end_the_peer() -> None:
    async def work() -> None:
        bench = TcpBench()
        one, other = await dialler_first(bench)
        await feed_and_wait(one, other, 1)

        def tap(first: bytes, inward: bool, data: bytes) -> bytes:
            spoil = first.startswith(MAGIC) and inward and len(data) > 500
            return flipped(data, 400) if spoil else data

        bench.relays[other.peer].tap = tap
        for fault in range(1, 4):
            one.heard.queue(other.peer, [make_chunk(fault, 5000)])
            await other.heard.until(lambda f=fault: codes(other).count("bad-tag") == f, "a fault")
            await one.heard.until(
                lambda f=fault: codes(one).count("bulk-lost") == f or bool(one.heard.lost), "a loss"
            )
        await other.heard.until(lambda: bool(other.heard.lost), "the end")
        assert other.heard.lost[0][0] == one.peer
        assert len(other.heard.chunks) == 1
        await bench.close()

    run(work)
