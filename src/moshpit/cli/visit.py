"""A short visit to a run: dial a peer, prove an admission, ask who is there, leave.

The visitor is a peer only as far as the transport goes. It has a key for this visit alone and
publishes no record, so the others never count on it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar, final

from moshpit.config import SwarmConfig, TransportConfig
from moshpit.errors import HandshakeError, RemoteError, UnreachableError
from moshpit.identity.keys import KeySigner, PeerKey
from moshpit.identity.tickets import Ticket
from moshpit.transport.base import MessagesOnly
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, PeerId, short
from moshpit.wire.messages import (
    Ack,
    Admission,
    AnyMessage,
    Difference,
    Gossip,
    PeerRecord,
    Ping,
    Suspicion,
    ViewAsk,
)

T = TypeVar("T")

PINGS = 5
ANSWER_S_MAX = 5.0  # guess: how long a peer may take to answer one question


@dataclass(frozen=True, slots=True)
class Visit:
    """What a visit found.

    Attributes:
        host: the peer that was asked.
        address: where it was dialled.
        dial_s: seconds from nothing to a proved connection.
        round_trips_s: seconds for each of `PINGS` questions and answers.
        records: what the host knows of each peer, itself included, sorted by id. Records that
            their peer did not sign, or that are not admitted to the run, are left out.
        suspicions: the peers that the host suspects, or knows to be dead.
    """

    host: PeerId
    address: Address
    dial_s: float
    round_trips_s: tuple[float, ...]
    records: tuple[PeerRecord, ...]
    suspicions: tuple[Suspicion, ...]


@final
class _Guest(MessagesOnly):
    """The transport's user: keeps what is told, matches answers to questions."""

    def __init__(self) -> None:
        self.records: dict[bytes, PeerRecord] = {}
        self.suspicions: dict[bytes, Suspicion] = {}
        self.answers: dict[int, asyncio.Future[None]] = {}

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        pass

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        for answer in self.answers.values():
            if not answer.done():
                answer.set_exception(UnreachableError(short(peer), "lost", detail))

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        match message:
            case Difference(gossip):
                self._learn(gossip)
            case Ack(seq):
                answer = self.answers.pop(seq, None)
                if answer is not None and not answer.done():
                    answer.set_result(None)
            case _:
                pass

    def _learn(self, gossip: Gossip) -> None:
        for record in gossip.records:
            self.records[record.peer] = record
        for suspicion in gossip.suspicions:
            self.suspicions[suspicion.peer] = suspicion


def visit(ticket: Ticket, addresses: Sequence[Address], config: SwarmConfig) -> Visit:
    """Visit the first of the addresses that answers.

    Raises:
        RemoteError: none of them let the visitor in; the error of the last one.
    """
    failure: RemoteError = UnreachableError("the run", "no-address", "the ticket names none")
    for address in addresses:
        try:
            return asyncio.run(_visit(ticket, address, config))
        except RemoteError as error:
            failure = error
    raise failure


async def _visit(ticket: Ticket, address: Address, config: SwarmConfig) -> Visit:
    return await in_either_way(config.transport, lambda config: _ask(ticket, address, config))


async def in_either_way(
    config: TransportConfig, ask: Callable[[TransportConfig], Awaitable[T]]
) -> T:
    """Ask a run that may be sealed or plain; which of the two matters to bulk data only."""
    try:
        return await ask(config)
    except HandshakeError as error:
        if error.reason != "plaintext-mismatch":
            raise
    return await ask(replace(config, sealed=not config.sealed))


async def _ask(ticket: Ticket, address: Address, config: TransportConfig) -> Visit:
    key = PeerKey.generate()
    guest = _Guest()
    transport = TcpTransport(key, ticket.run, ticket.admit(key.peer), config)
    await transport.start(guest)
    try:
        start = time.perf_counter()
        host = await transport.dial(address)
        dial_s = time.perf_counter() - start
        # The answer to a ping comes after all that was answered before it.
        transport.send(host, ViewAsk())
        times = [await _ping(transport, guest, host, seq) for seq in range(PINGS + 1)]
    finally:
        await transport.close()
    signer = KeySigner(key, ticket.run)
    records = sorted(guest.records.values(), key=lambda record: record.peer)
    return Visit(
        host=host,
        address=address,
        dial_s=dial_s,
        round_trips_s=tuple(times[1:]),
        records=tuple(
            r for r in records if signer.verify_message(r, r.peer) and signer.admitted(r)
        ),
        suspicions=tuple(guest.suspicions.values()),
    )


async def _ping(transport: TcpTransport, guest: _Guest, host: PeerId, seq: int) -> float:
    answer = guest.answers[seq] = asyncio.get_running_loop().create_future()
    start = time.perf_counter()
    transport.send(host, Ping(seq))
    try:
        async with asyncio.timeout(ANSWER_S_MAX):
            await answer
    except TimeoutError:
        detail = f"it proved its key, but did not answer within {ANSWER_S_MAX:g} s"
        raise UnreachableError(short(host), "silent", detail) from None
    return time.perf_counter() - start
