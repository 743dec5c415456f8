"""Several bulk connections to one peer: all used, each with its own keys, none indispensable."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from dataclasses import replace

import pytest
from benchmarks.longlink import VARIANTS, allowed, measure

from moshpit.transport.bulk import MAGIC
from moshpit.transport.conformance import Party, make_chunk
from moshpit.transport.pair import STRIPES_LIMIT, BulkPair
from moshpit.wire.links import BulkAsk, BulkOffer, BulkRefused
from tests.real.relay import Link, long_link, unable
from tests.transport.benches import QUICK, TcpBench, run

SIZE = 100_000


async def striped_pair(bench: TcpBench, dialler_first: bool = True) -> tuple[Party, Party]:
    """Two peers whose stripes are all open."""
    one, other = await bench.party(), await bench.party()
    if (one.peer < other.peer) != dialler_first:
        one, other = other, one
    one.heard.queue(other.peer, [make_chunk(0, SIZE)])
    await other.heard.until(lambda: len(other.heard.chunks) == 1, "a chunk")
    async with asyncio.timeout(20):
        while not pair(one, other).width == pair(other, one).width == bench.options["stripes_min"]:
            await asyncio.sleep(0.01)
    return one, other


def pair(of: Party, to: Party) -> BulkPair:
    return of.transport.state_of(to.peer).pair


def arrived(party: Party) -> list[int]:
    return sorted(header.chunk for _, header, _ in party.heard.chunks)


@pytest.mark.parametrize("sealed", [True, False])
def test_every_stripe_is_used(sealed: bool) -> None:
    async def work() -> None:
        bench = TcpBench(sealed=sealed, stripes=4)
        one, other = await striped_pair(bench)
        carried = dict.fromkeys(range(len(bench.relays[other.peer].pairs)), 0)

        def tap(first: bytes, inward: bool, data: bytes) -> bytes:
            if first.startswith(MAGIC) and inward:
                carried[first] = carried.get(first, 0) + len(data)
            return data

        bench.relays[other.peer].tap = tap
        chunks = [make_chunk(number, SIZE) for number in range(1, 200)]
        one.heard.queue(other.peer, chunks)
        await other.heard.until(lambda: len(other.heard.chunks) == 200, "all chunks")
        assert bench.as_sent(other.heard.chunks)[1:] == [(one.peer, *chunk) for chunk in chunks]
        tokens = {first[4:36]: size for first, size in carried.items() if isinstance(first, bytes)}
        assert len(tokens) == 4, "a token for each stripe"
        assert min(tokens.values()) > SIZE
        await bench.close()

    run(work)


@pytest.mark.parametrize("dialler_first", [True, False])
def test_a_stripe_that_breaks_is_opened_again(dialler_first: bool) -> None:
    async def work() -> None:
        bench = TcpBench(stripes=3)
        one, other = await striped_pair(bench, dialler_first)
        for broken in range(3):
            pair(other, one)._stripes[broken].link.abort()
            await one.heard.until(lambda n=broken: len(one.heard.resets) > n, "the reset")
            one.heard.queue(other.peer, [make_chunk(n, SIZE) for n in range(100, 200)])
            await other.heard.until(lambda n=broken: 199 in arrived(other), "the chunks")
            async with asyncio.timeout(20):
                while pair(one, other).width < 3:
                    one.heard.queue(other.peer, [make_chunk(300, 4 * SIZE)] * 50)  # so it is full
                    await asyncio.sleep(0.05)
            other.heard.chunks.clear()
        assert not one.heard.lost
        assert not other.heard.lost
        await bench.close()

    run(work)


def test_a_pair_does_with_the_stripes_that_it_can_get() -> None:
    async def work() -> None:
        bench = TcpBench(stripes=4)
        one, other = await bench.party(), await bench.party()
        one, other = (one, other) if one.peer < other.peer else (other, one)
        bulk: list[bytes] = []

        def tap(first: bytes, inward: bool, data: bytes) -> bytes:
            if first.startswith(MAGIC) and inward and data is first:
                bulk.append(first)
                if len(bulk) > 2:
                    return b"MPB1" + bytes(len(data) - 4)  # nobody's token
            return data

        bench.relays[other.peer].tap = tap
        chunks = [make_chunk(number, SIZE) for number in range(100)]
        one.heard.queue(other.peer, chunks)
        await other.heard.until(lambda: len(other.heard.chunks) == 100, "all chunks")
        assert bench.as_sent(other.heard.chunks) == [(one.peer, *chunk) for chunk in chunks]
        assert pair(one, other).width <= 2
        assert not one.heard.lost
        await bench.close()

    run(work)


HOSTILE = {
    "offer": BulkOffer(bytes(32), bytes(32), bytes(31) + b"1", True, STRIPES_LIMIT),
    "ask": BulkAsk(b"", False, STRIPES_LIMIT),
    "negative": BulkRefused("no", -1),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_stripe_beyond_all_limits_is_blamed(kind: str) -> None:
    async def work() -> None:
        bench = TcpBench()
        one, other = await bench.party(), await bench.party()
        one.transport.send(other.peer, HOSTILE[kind])
        await other.heard.until(lambda: bool(other.heard.notices), "the notice")
        assert other.heard.notices[0].code == "bad-bulk-offer"
        assert other.heard.notices[0].peer == one.peer
        await bench.close()

    run(work)


def test_a_refusal_of_what_was_never_asked_for_does_nothing() -> None:
    async def work() -> None:
        bench = TcpBench()
        one, other = await bench.party(config=replace(QUICK, stripes_max=2)), await bench.party()
        other.transport.send(one.peer, BulkRefused("no", 5))
        other.heard.queue(one.peer, [make_chunk(1, 10)])
        await one.heard.until(lambda: len(one.heard.chunks) == 1, "a chunk")
        assert not one.heard.notices
        await bench.close()

    run(work)


# --- on a link that loses packets -------------------------------------------------------------


def lossy(loss: float, options: dict[str, object]) -> dict[str, float]:
    if why := unable():
        pytest.skip(why)
    if not allowed(str(options["congestion"])):
        pytest.skip(f"{options['congestion']} is not allowed here")
    with long_link(Link(rate_mbit=30.0, rtt_ms=50.0, loss=loss)) as link:
        small = {**options, "chunk_bytes": 1 << 16}  # the losses are looked at between chunks
        return measure(link, small, warmup_s=2.0, seconds=0.5)


def test_losses_open_stripes() -> None:
    # On a machine that is busy enough too little moves within the time of one try.
    tries = (lossy(0.02, VARIANTS["cubic, stripes"]) for _ in range(4))
    assert any(found["connections"] > 1 for found in tries)


def test_losses_change_the_congestion_control_where_that_is_allowed() -> None:
    lost = lossy(0.02, VARIANTS["auto"])
    assert lost["connections"] == 1
    assert lost["mbit"] > 10  # cubic gets 2


@pytest.mark.parametrize(
    ("loss", "variant"), [(0.0, "cubic, stripes"), (0.0, "auto"), (0.02, "bbr")]
)
def test_without_need_it_stays_one(loss: float, variant: str) -> None:
    assert lossy(loss, VARIANTS[variant])["connections"] == 1


def test_a_relay_loses_what_it_should() -> None:
    """The link of these tests is itself tested: delay and losses are those asked for."""
    if why := unable():
        pytest.skip(why)
    probe = """
import json, socket, sys, time
a = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for number in range(500):
    a.sendto(str(time.monotonic()).encode(), (sys.argv[1], 9))
    time.sleep(0.0005)
"""
    count = """
import json, socket, time
b = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
b.bind(("0.0.0.0", 9))
print("ready", flush=True)
b.settimeout(1.0)
delays = []
try:
    while True:
        data = b.recv(100)
        delays.append(time.monotonic() - float(data))
except TimeoutError:
    print(json.dumps([len(delays), min(delays)]), flush=True)
"""
    with (
        long_link(Link(rate_mbit=100.0, rtt_ms=60.0, loss=0.2)) as link,
        subprocess.Popen(
            [*link.inside(1), sys.executable, "-c", count], stdout=subprocess.PIPE, text=True
        ) as counter,
    ):
        assert counter.stdout is not None
        assert counter.stdout.readline() == "ready\n"
        command = [*link.inside(0), sys.executable, "-c", probe, link.address(1)]
        subprocess.run(command, check=True)
        arrived, delay_s = json.loads(counter.stdout.readline())
    assert 330 <= arrived <= 470
    assert delay_s >= 0.030
