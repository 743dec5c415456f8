"""Benches for the transports, and a relay that can cut, refuse and rewrite what passes."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Awaitable, Callable
from dataclasses import replace

from moshpit.config import TransportConfig
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey
from moshpit.transport.conformance import Bench, Party
from moshpit.transport.memory import Exchange, MemoryTransport
from moshpit.transport.recorder import Recorder
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, PeerId

QUICK = TransportConfig(handshake_timeout_s=5.0, dial_timeout_s=5.0)


def run(work: Callable[[], Awaitable[None]], *, uvloop: bool = False) -> None:
    """Run a test's coroutine; whatever the loop complains about fails the test."""
    if uvloop:
        import uvloop as uv

        factory = uv.new_event_loop
    else:
        factory = asyncio.new_event_loop
    complaints: list[dict[str, object]] = []

    async def main() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: complaints.append(what))
        await work()

    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main())
    gc.collect()  # ResourceWarnings belong to the test that left something open
    if complaints:
        raise AssertionError(complaints)


Tap = Callable[[bytes, bool, bytes], bytes]
"""Given the first bytes of a connection, the direction (True: to the target) and what
passes, return what is passed on."""


class Relay:
    """Passes connections on to a port. Tests stand in the middle of everything with it."""

    def __init__(self, host: str, target: Address) -> None:
        self.host = host
        self.target = target
        self.tap: Tap = lambda first, inward, data: data
        self.control = asyncio.Event()  # cleared: control connections are held up
        self.control.set()
        self.pairs: list[tuple[asyncio.StreamWriter, asyncio.StreamWriter]] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def open(self) -> Address:
        self._server = await asyncio.start_server(self._pass, self.host, 0)
        return Address(self.host, self._server.sockets[0].getsockname()[1])

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._tasks.append(asyncio.current_task())
        try:
            inward, outward = await asyncio.open_connection(self.target.host, self.target.port)
        except OSError:
            writer.transport.abort()
            return
        self.pairs.append((writer, outward))
        first = await reader.read(1 << 18)
        outward.write(self.tap(first, True, first))
        gate = self.control if first.startswith(b"\x16") else None
        await asyncio.gather(
            _pump(reader, outward, lambda data: self.tap(first, True, data), gate),
            _pump(inward, writer, lambda data: self.tap(first, False, data), gate),
        )

    def cut(self) -> None:
        for pair in self.pairs:
            for writer in pair:
                writer.transport.abort()
        self.pairs.clear()

    async def close(self) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()


async def _pump(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    tap: Callable[[bytes], bytes],
    gate: asyncio.Event | None,
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 18):
            if gate is not None:
                await gate.wait()
            writer.write(tap(data))
            await writer.drain()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()


class TcpBench(Bench):
    """Peers on loopback, each behind its own relay."""

    def __init__(self, host: str = "127.0.0.1", *, sealed: bool = True, stripes: int = 1) -> None:
        self.host = host
        self.options = {"sealed": sealed, "stripes_min": stripes}
        self.ordered = stripes == 1
        self.run = RunKey.generate()
        self.ticket = self.run.invite().ticket(())
        self.book: dict[PeerId, tuple[Address, ...]] = {}
        self.relays: dict[PeerId, Relay] = {}
        self.transports: list[TcpTransport] = []

    async def party(
        self,
        *,
        listens: bool = True,
        config: TransportConfig | None = None,
        key: PeerKey | None = None,
    ) -> Party:
        key = key or PeerKey.generate()
        config = replace(config or QUICK, **self.options)
        admission = self.ticket.admit(key.peer)
        listen = Address(self.host, 0) if listens else None
        transport = TcpTransport(key, self.run.run, admission, config, listen=listen)
        heard = Recorder(self.book)
        heard.transport = transport
        await transport.start(heard)
        self.transports.append(transport)
        if listens:
            relay = Relay(self.host, transport.addresses[0])
            self.relays[key.peer] = relay
            self.book[key.peer] = (await relay.open(),)
        return Party(key.peer, transport, heard, admission)

    def sever(self, one: Party, other: Party) -> None:
        for party in (one, other):
            if party.peer in self.relays:
                self.relays[party.peer].cut()

    async def vanish(self, party: Party) -> None:
        party.heard.book = {}  # the dead dial nobody
        for relay in self.relays.values():
            relay.cut()
        await self.relays.pop(party.peer).close()

    async def close(self) -> None:
        for transport in self.transports:
            await transport.close()
        for relay in self.relays.values():
            await relay.close()
        self.relays.clear()


class MemoryBench(Bench):
    """Peers of one exchange."""

    def __init__(self) -> None:
        self.exchange = Exchange()
        self.ticket = RunKey.generate().invite().ticket(())
        self.book: dict[PeerId, tuple[Address, ...]] = {}
        self.parties: list[Party] = []

    async def party(self, *, listens: bool = True, config: TransportConfig | None = None) -> Party:
        peer = PeerKey.generate().peer
        admission = self.ticket.admit(peer)
        transport = MemoryTransport(
            self.exchange, peer, admission, config or QUICK, listens=listens
        )
        heard = Recorder(self.book)
        heard.transport = transport
        await transport.start(heard)
        if listens:
            self.book[peer] = transport.addresses
        party = Party(peer, transport, heard, admission)
        self.parties.append(party)
        return party

    def sever(self, one: Party, other: Party) -> None:
        self.exchange.break_link(one.transport, other.transport)

    async def vanish(self, party: Party) -> None:
        self.exchange.kill(party.transport)

    async def close(self) -> None:
        for party in self.parties:
            await party.transport.close()
