"""Questions to one peer of a run: its clock, the way to it, and whether it can reach this machine.

The asker is a visitor, as in `moshpit.cli.visit`, but listens while it asks, so that the peer
can dial it back. What the peer answers is judged before it is believed.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

from moshpit.cli.visit import ANSWER_S_MAX, in_either_way
from moshpit.config import TransportConfig
from moshpit.errors import LocalError, RemoteError, UnreachableError, WireError
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import Ticket
from moshpit.runtime.helpdesk import (
    ADDRESSES_MAX,
    DETAIL_CHARS_MAX,
    HOST_CHARS_MAX,
    PADDING_BYTES_MAX,
    WALL_S_MAX,
    padding,
    plain_host,
)
from moshpit.runtime.record import advertised
from moshpit.transport.base import MessagesOnly
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, PeerId, short
from moshpit.wire.help import DialBack, DialBackReply, DialResult, Echo, EchoReply
from moshpit.wire.messages import Admission, AnyMessage

ECHOES = 8  # guess: the one with the least round trip says most about the clock
MEASURE_S = 0.5  # for each direction
MEASURE_BYTES_MAX = 16 << 20  # guess: for each direction; a fast link needs no more
WINDOW = 16  # guess: echoes under way, so that a long link is filled
FIRST_BYTES = 4096  # padding, doubled while answers come faster than this:
FAST_S = 0.2  # guess
DIAL_BACK_S_MAX = 15.0  # the longest preset's dial timeout, and time to answer
OUTCOMES = ("reached", "refused", "unreachable", "no-handshake", "foreign")


@dataclass(frozen=True, slots=True)
class Consultation:
    """What a peer said, and what was measured while it did.

    Attributes:
        host: the peer that was asked.
        round_trip_s: the least round trip of `ECHOES`.
        clock_offset_s: its clock minus this machine's; off by half a round trip at most.
        up, down: bytes per second to the peer and from it, over the control connection.
        advertised: where others would be told to dial this machine.
        leads_to: the same, with IP addresses for names.
        not_listening: why this machine could not listen; empty if it did.
        seen: the host that the peer sees this machine at.
        dials: what came of dialling back; empty if the peer would not, or nothing listened.
    """

    host: PeerId
    round_trip_s: float
    clock_offset_s: float
    up: float
    down: float
    advertised: tuple[Address, ...]
    leads_to: tuple[Address, ...]
    not_listening: str
    seen: str
    dials: tuple[DialResult, ...]


@final
class _Asker(MessagesOnly):
    """The transport's user: matches answers to questions."""

    def __init__(self) -> None:
        self.waiting: dict[int, asyncio.Future[EchoReply | DialBackReply]] = {}

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        pass

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        self._fail(UnreachableError(short(peer), "lost", detail))

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        if isinstance(message, EchoReply | DialBackReply):
            answer = self.waiting.pop(message.seq, None)
            if answer is None:
                detail = f"an answer to question {message.seq}, which was not asked"
                self._fail(WireError(short(peer), "unasked-answer", detail))
            elif not answer.done():
                answer.set_result(message)

    def _fail(self, error: RemoteError) -> None:
        for answer in self.waiting.values():
            if not answer.done():
                answer.set_exception(error)


@final
@dataclass(slots=True)
class _Questions:
    """Asks one peer."""

    transport: TcpTransport
    asker: _Asker
    host: PeerId
    asked: int = 0

    async def echo(self, up: int = 0, down: int = 0) -> tuple[Echo, EchoReply, float]:
        """Send an echo; return it, its answer, and the round trip in seconds."""
        self.asked += 1
        question = Echo(self.asked, time.time(), down, padding(PADDING_BYTES_MAX)[:up])
        start = time.perf_counter()
        answer = await self._ask(question, ANSWER_S_MAX)
        took = time.perf_counter() - start
        judge_echo(question, answer, short(self.host))
        assert isinstance(answer, EchoReply)
        return question, answer, took

    async def dial_back(self, addresses: Sequence[tuple[str, int]]) -> DialBackReply:
        """Ask to be dialled."""
        self.asked += 1
        question = DialBack(self.asked, tuple(addresses[:ADDRESSES_MAX]))
        answer = await self._ask(question, DIAL_BACK_S_MAX)
        judge_dial_back(question, answer, short(self.host))
        assert isinstance(answer, DialBackReply)
        return answer

    async def clock(self) -> tuple[float, float]:
        """Return the least round trip, and the clock's offset by that echo."""
        best, offset = float("inf"), 0.0
        for _ in range(ECHOES):
            question, answer, took = await self.echo()
            if took < best:
                best, offset = took, answer.wall - (question.sent_at + took / 2)
        return best, offset

    async def speed(self, *, up: bool) -> float:
        """Return bytes per second of padding that go to the peer, or come from it.

        A lower bound: it starts slowly, and includes the round trips of the first and the last.
        """
        start = last = time.perf_counter()
        size, asked, moved = FIRST_BYTES, 0, 0
        under_way: deque[tuple[int, asyncio.Task[tuple[Echo, EchoReply, float]]]] = deque()
        try:
            while True:
                while (
                    len(under_way) < WINDOW
                    and asked < MEASURE_BYTES_MAX
                    and time.perf_counter() - start < MEASURE_S
                ):
                    echo = self.echo(up=size) if up else self.echo(down=size)
                    under_way.append((size, asyncio.create_task(echo)))
                    asked += size
                if not under_way:
                    return moved / (last - start)
                carried, task = under_way[0]
                _, _, took = await task
                under_way.popleft()
                last = time.perf_counter()
                moved += carried
                if took < FAST_S:
                    size = min(2 * size, PADDING_BYTES_MAX)
        finally:
            for _, task in under_way:
                task.cancel()
            await asyncio.gather(*(task for _, task in under_way), return_exceptions=True)

    async def _ask(self, question: Echo | DialBack, patience_s: float) -> EchoReply | DialBackReply:
        answer = asyncio.get_running_loop().create_future()
        self.asker.waiting[question.seq] = answer
        self.transport.send(self.host, question)
        try:
            async with asyncio.timeout(patience_s):
                return await answer
        except TimeoutError:
            detail = f"no answer to {type(question).__name__} within {patience_s:g} s"
            raise UnreachableError(short(self.host), "silent", detail) from None


def judge_echo(question: Echo, answer: EchoReply | DialBackReply, who: str) -> None:
    """Raise `WireError` if this cannot be the answer of an honest peer."""
    fault = ""
    if not isinstance(answer, EchoReply):
        fault = f"a {type(answer).__name__}"
    elif answer.sent_at != question.sent_at:
        fault = f"it says that the question was sent at {answer.sent_at}"
    elif len(answer.padding) != question.reply_bytes:
        fault = f"{len(answer.padding)} bytes instead of {question.reply_bytes}"
    elif not 0 <= answer.wall <= WALL_S_MAX:
        fault = f"its clock shows {answer.wall}"
    if fault:
        raise WireError(who, "bad-answer", fault)


def judge_dial_back(question: DialBack, answer: EchoReply | DialBackReply, who: str) -> None:
    """Raise `WireError` if this cannot be the answer of an honest peer."""
    fault = ""
    if not isinstance(answer, DialBackReply):
        fault = f"a {type(answer).__name__}"
    elif len(answer.seen) > HOST_CHARS_MAX:
        fault = f"a host of {len(answer.seen)} characters"
    elif answer.results:
        asked = [(host or answer.seen, port) for host, port in question.addresses]
        if [(r.host or answer.seen, r.port) for r in answer.results] != asked:
            fault = "results for other addresses than were asked for"
        elif any(r.outcome not in OUTCOMES for r in answer.results):
            fault = "an outcome that there is none of"
        elif any(len(r.detail) > DETAIL_CHARS_MAX for r in answer.results):
            fault = "an endless detail"
    if fault:
        raise WireError(who, "bad-answer", fault)


def consult(
    ticket: Ticket,
    address: Address,
    config: TransportConfig,
    *,
    listen: Address,
    advertise: Address | None = None,
) -> Consultation:
    """Ask the peer at an address everything.

    Args:
        ticket: admits to its run.
        address: where to dial it.
        config: waits and limits.
        listen: where this machine listens meanwhile.
        advertise: where others are to dial this machine, if it differs.

    Raises:
        RemoteError: it does not let the visitor in, does not answer, or answers nonsense.
    """

    async def ask(config: TransportConfig) -> Consultation:
        return await _consult(ticket, address, config, listen, advertise)

    return asyncio.run(in_either_way(config, ask))


async def _consult(
    ticket: Ticket,
    address: Address,
    config: TransportConfig,
    listen: Address,
    advertise: Address | None,
) -> Consultation:
    key, asker, not_listening = PeerKey.generate(), _Asker(), ""
    admission = ticket.admit(key.peer)
    transport = TcpTransport(key, ticket.run, admission, config, listen=listen)
    try:
        await transport.start(asker)
    except LocalError as error:
        not_listening = str(error)
        transport = TcpTransport(key, ticket.run, admission, config)
        await transport.start(asker)
    try:
        questions = _Questions(transport, asker, await transport.dial(address))
        round_trip_s, offset_s = await questions.clock()
        up = await questions.speed(up=True)
        down = await questions.speed(up=False)
        known = (advertise,) if advertise is not None else advertised(transport.addresses)
        leads_to = [Address(host, a.port) for a in known for host in await hosts_of(a.host)]
        seen, dials = "", tuple[DialResult, ...]()
        if not not_listening:
            port = (advertise or transport.addresses[0]).port
            reply = await questions.dial_back([("", port), *((a.host, a.port) for a in leads_to)])
            seen, dials = reply.seen, tuple(dict.fromkeys(reply.results))
    finally:
        await transport.close()
    return Consultation(
        host=questions.host,
        round_trip_s=round_trip_s,
        clock_offset_s=offset_s,
        up=up,
        down=down,
        advertised=known,
        leads_to=tuple(leads_to),
        not_listening=not_listening,
        seen=seen,
        dials=dials,
    )


async def hosts_of(host: str) -> list[str]:
    """Return the IP addresses of a name; none if it has none."""
    try:
        entries = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return []
    return [plain_host(str(where[0])) for *_, where in entries]
