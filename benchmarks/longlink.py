"""How much of a long link that loses packets one peer's chunks to another get.

Two processes, each in a network namespace of its own, with a relay between them that has a
rate, a delay, a queue and random losses (`tests/real/relay.py`). One sends sealed chunks as fast
as the transport takes them, by each congestion control in turn: cubic with one connection, cubic
with stripes, bbr, and the default, which begins with cubic and goes on with bbr. Needs root.

    python -m benchmarks.longlink --loss 0.01 --json out.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from tests.real.relay import Link, LongLink, long_link, unable

from moshpit.config import TransportConfig, preset
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.transport.base import MessagesOnly
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import Admission, AnyMessage

PORT = 7000
VARIANTS = {
    "cubic, 1 connection": {"congestion": "cubic", "stripes_max": 1},
    "cubic, stripes": {"congestion": "cubic"},
    "bbr": {"congestion": "bbr"},
    "auto": {"congestion": "auto"},
}
GROUP = GroupId(bytes(16))


class End(MessagesOnly):
    """One end: takes chunks and drops their contents, or sends the same one again and again."""

    def __init__(self, config: TransportConfig) -> None:
        self.config = config
        self.arrived = 0
        self.began = 0.0
        self.other: PeerId | None = None
        self.gone = asyncio.Event()
        self.transport: TcpTransport
        self._payload = memoryview(bytearray(config.chunk_bytes))
        self._sink = memoryview(bytearray(config.chunk_bytes))
        self._number = 0

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        self.other = peer

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        self.gone.set()

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        pass

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        return ()

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview:
        return self._sink[: header.length]

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        self.arrived += header.length
        self.began = self.began or time.monotonic()

    def chunks_wanted(self, peer: PeerId) -> None:
        self.feed()

    def feed(self) -> None:
        assert self.other is not None
        while True:
            header = ChunkHeader(
                ChunkKind.RESULT, 0, self._number, len(self._payload), 0, GROUP, 1.0, 1
            )
            if not self.transport.send_chunk(self.other, header, self._payload):
                return
            self._number += 1


async def receive(end: End, warmup_s: float, seconds: float) -> dict[str, float]:
    """Count what arrives, from ``warmup_s`` after the sender has come."""
    async with asyncio.timeout(60):
        while end.other is None:
            await asyncio.sleep(0.01)
    began = time.monotonic()
    await asyncio.sleep(warmup_s)
    before = end.transport.stats(end.other).bulk_in
    at = time.monotonic()
    await asyncio.sleep(seconds)
    moved = end.transport.stats(end.other).bulk_in - before
    took_s = time.monotonic() - at
    whole = end.arrived * 8 / 1e6 / (time.monotonic() - began)
    width = end.transport.state_of(end.other).pair.width
    return {"mbit": moved * 8 / 1e6 / took_s, "mbit_with_start": whole, "connections": width}


async def one_end(args: argparse.Namespace) -> None:
    """The process at one end of the link."""
    options = json.loads(args.options)
    config = replace(preset("internet").transport, **options)
    ticket = Ticket.decode(args.ticket)
    key = PeerKey.generate()
    listen = Address(args.listen, PORT) if args.listen else None
    transport = TcpTransport(key, ticket.run, ticket.admit(key.peer), config, listen=listen)
    end = End(config)
    end.transport = transport
    await transport.start(end)
    try:
        if listen is not None:
            print("listening", flush=True)
            print(json.dumps(await receive(end, args.warmup, args.seconds)), flush=True)
        else:
            end.other = await transport.dial(Address(args.dial, PORT))
            end.feed()
            await end.gone.wait()
    finally:
        await transport.close()


def measure(
    link: LongLink, options: dict[str, object], warmup_s: float, seconds: float
) -> dict[str, float]:
    """Run the two ends with these transport settings."""
    ticket = RunKey.generate().invite().ticket(()).encode()
    base = [sys.executable, "-m", "benchmarks.longlink", "--options", json.dumps(options)]
    base += ["--ticket", ticket, "--warmup", str(warmup_s), "--seconds", str(seconds)]
    here, there = link.inside(0), link.inside(1)
    pipe = subprocess.PIPE
    with subprocess.Popen(
        [*there, *base, "--listen", link.address(1)], stdout=pipe, text=True
    ) as receiver:
        assert receiver.stdout is not None
        assert receiver.stdout.readline() == "listening\n", "the receiver did not start"
        with subprocess.Popen([*here, *base, "--dial", link.address(1)]):
            return json.loads(receiver.stdout.readline())


def allowed(congestion: str) -> bool:
    """Whether this system lets a socket use an algorithm (the default needs bbr)."""
    congestion = "bbr" if congestion == "auto" else congestion
    with socket.socket() as probe:
        try:
            probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        except OSError:
            return False
    return True


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0)
    parser.add_argument("--rtt-ms", type=float, default=50.0)
    parser.add_argument("--loss", type=float, default=0.01)
    parser.add_argument("--queue-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--warmup", type=float, default=8.0, help="seconds not counted")
    parser.add_argument("--seconds", type=float, default=15.0)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--json", type=Path)
    for name in ("--ticket", "--options", "--listen", "--dial"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure and print."""
    args = arguments()
    if args.ticket:
        asyncio.run(one_end(args))
        return
    if why := unable():
        raise SystemExit(f"no link can be made here: {why}")
    shape = Link(args.mbit, args.rtt_ms, args.loss, args.queue_ms, args.seed)
    print(f"{shape}, goodput of sealed chunks after {args.warmup:g} s")
    results: list[dict[str, object]] = []
    with long_link(shape) as link:
        for turn in range(args.repeat):
            for name, options in VARIANTS.items():
                if not allowed(str(options["congestion"])):
                    print(f"{name:22} is not allowed on this system")
                    continue
                got = measure(link, options, args.warmup, args.seconds)
                share = got["mbit"] / args.mbit
                results.append({"variant": name, "turn": turn, "share": share, **got})
                print(
                    f"{name:22} {got['mbit']:6.1f} Mbit/s  {share:6.1%} of the link  "
                    f"{got['connections']:.0f} connections; with the start "
                    f"{got['mbit_with_start']:.1f} Mbit/s",
                    flush=True,
                )
    if args.json:
        args.json.write_text(json.dumps({"link": repr(shape), "results": results}, indent=2))


if __name__ == "__main__":
    main()
