"""A process hangs, and another one with its key takes its place at another address.

The hung one's kernel still accepts connections: only nobody ever answers on them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from moshpit.identity.keys import PeerKey
from moshpit.transport.conformance import Party, make_chunk
from tests.transport.benches import QUICK, Relay, TcpBench, run

SIZE = 50_000
IMPATIENT = replace(QUICK, handshake_timeout_s=1.0)


def key_where(fits: Callable[[PeerKey], bool]) -> PeerKey:
    while not fits(key := PeerKey.generate()):
        pass
    return key


def hang(bench: TcpBench, ghost: Party, server: Party) -> Relay:
    """Have a peer connected to, and accept, and nothing else; returns what it is dialled by."""
    for relay in (bench.relays[ghost.peer], bench.relays[server.peer]):
        relay.tap = lambda first, inward, data: b""
    bench.book[server.peer] = server.transport.addresses  # past what the ghost had dialled
    return bench.relays[ghost.peer]


async def arrives(bench: TcpBench, giver: Party, taker: Party, number: int) -> None:
    chunk = make_chunk(number, SIZE)
    giver.heard.queue(taker.peer, [chunk])
    await taker.heard.until(lambda: bool(taker.heard.chunks), "the chunk")
    assert bench.as_sent(taker.heard.chunks) == [(giver.peer, *chunk)]
    taker.heard.chunks.clear()


@pytest.mark.parametrize("had_bulk", [True, False])
@pytest.mark.parametrize("server_dials", [True, False])
def test_nothing_leads_to_the_ghost_any_more(server_dials: bool, had_bulk: bool) -> None:
    """Whoever had dialled it dials its successor, and sends nothing on what it had open."""

    async def work() -> None:
        bench = TcpBench()
        server = await bench.party(config=IMPATIENT)
        key = key_where(lambda key: (server.peer < key.peer) == server_dials)
        ghost = await bench.party(key=key)
        await server.transport.dial(bench.book[key.peer][0], key.peer)
        if had_bulk:
            await arrives(bench, server, ghost, 1)
        relay = hang(bench, ghost, server)
        before = len(relay.pairs)
        successor = await bench.party(key=key)
        await successor.transport.dial(server.transport.addresses[0])
        await server.heard.until(lambda: len(server.heard.links) == 2, "the successor")
        await arrives(bench, server, successor, 2)
        await arrives(bench, successor, server, 3)
        assert len(relay.pairs) == before, "it dialled the ghost again"
        assert server.heard.resets == [key.peer] * had_bulk
        assert not server.heard.lost
        assert not successor.heard.lost
        await bench.close()
        await relay.close()

    run(work)


@pytest.mark.parametrize("wanted", [True, False])
def test_who_knows_the_ghosts_address_only_is_dialled(wanted: bool) -> None:
    """Where a dial is accepted and not answered, the other side can perhaps dial."""

    async def work() -> None:
        bench = TcpBench()
        server = await bench.party(config=IMPATIENT)
        key = key_where(lambda key: server.peer < key.peer)
        ghost = await bench.party(key=key)
        stale = dict(bench.book)
        await ghost.transport.dial(bench.book[server.peer][0])
        await server.heard.until(lambda: bool(server.heard.links), "the ghost")
        relay = hang(bench, ghost, server)
        if wanted:
            server.heard.queue(key.peer, [make_chunk(1, SIZE)])
        successor = await bench.party(key=key)
        server.heard.book = stale  # the news of it is on its way
        await successor.transport.dial(server.transport.addresses[0])
        await server.heard.until(lambda: len(server.heard.links) == 2, "the successor")
        if not wanted:
            server.heard.queue(key.peer, [make_chunk(1, SIZE)])
        await successor.heard.until(lambda: bool(successor.heard.chunks), "the chunk")
        assert not server.heard.lost
        assert not successor.heard.lost
        await bench.close()
        await relay.close()

    run(work)
