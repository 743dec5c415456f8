"""The help desk answers what it is asked, within limits, and dials nobody but who asks."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest

from moshpit.events import Notice
from moshpit.runtime import helpdesk
from moshpit.runtime.helpdesk import HelpDesk
from moshpit.transport.conformance import Bench, Party
from moshpit.types import Address, PeerId
from moshpit.wire.help import DialBack, DialBackReply, DialResult, Echo, EchoReply, HelpMessage
from tests.transport.benches import MemoryBench, TcpBench, run

WALL = 1_790_000_000.0
DIAL_S = 2.0


@dataclass
class Scene:
    """An asker and the desk of another peer, connected."""

    bench: Bench
    asker: Party
    host: Party
    desk: HelpDesk
    told: list[Notice]
    time: list[float]
    taken: int = 0

    async def ask(self, message: HelpMessage) -> HelpMessage:
        """Send over the wire, hand to the desk, wait for the answer."""
        before = len(self.asker.heard.messages)
        await self.tell(message)
        await self.asker.heard.until(lambda: len(self.asker.heard.messages) > before, "an answer")
        peer, answer = self.asker.heard.messages[-1]
        assert peer == self.host.peer
        assert isinstance(answer, EchoReply | DialBackReply)
        return answer

    async def tell(self, message: HelpMessage) -> None:
        """Send over the wire and hand to the desk."""
        self.asker.transport.send(self.host.peer, message)
        heard = self.host.heard
        await heard.until(lambda: len(heard.messages) > self.taken, "the question")
        self.taken += 1
        self.desk.handle(*heard.messages[-1])

    async def refused(self, message: HelpMessage, code: str) -> None:
        """Check that a message is not answered, and its sender named."""
        told, heard = len(self.told), len(self.asker.heard.messages)
        await self.tell(message)
        assert [(n.code, n.peer) for n in self.told[told:]] == [(code, self.asker.peer)]
        assert self.told[-1].detail
        assert len(self.asker.heard.messages) == heard


@asynccontextmanager
async def scene(bench: Bench) -> AsyncIterator[Scene]:
    asker, host = await bench.party(), await bench.party()
    where = bench.book[host.peer][0]
    assert await asker.transport.dial(where) == host.peer
    await host.heard.until(lambda: bool(host.heard.links), "the link")
    told: list[Notice] = []
    time = [1000.0]
    desk = HelpDesk(
        host.transport, told.append, dial_s=DIAL_S, clock=lambda: time[0], wall=lambda: WALL
    )
    try:
        yield Scene(bench, asker, host, desk, told, time)
    finally:
        await desk.close()
        await bench.close()


def play(make: Callable[[], Bench], part: Callable[[Scene], Awaitable[None]]) -> None:
    async def work() -> None:
        async with scene(make()) as s:
            await part(s)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    run(work)


# --- echoes ---------------------------------------------------------------------------------


def test_an_echo_says_the_time_and_carries_what_was_asked_for() -> None:
    async def part(s: Scene) -> None:
        assert await s.ask(Echo(7, 12.5, 0)) == EchoReply(7, 12.5, WALL)
        answer = await s.ask(Echo(8, 0.0, helpdesk.PADDING_BYTES_MAX, b"x" * 1000))
        assert isinstance(answer, EchoReply)
        assert len(answer.padding) == helpdesk.PADDING_BYTES_MAX
        assert len(set(answer.padding)) == 256  # nothing that a network could compress
        assert not s.told

    play(MemoryBench, part)


@pytest.mark.parametrize(
    "question",
    [
        Echo(1, float("nan"), 0),
        Echo(1, float("inf"), 0),
        Echo(1, -1.0, 0),
        Echo(1, 1e300, 0),
        Echo(-1, 0.0, 0),
        Echo(1 << 63, 0.0, 0),
        Echo(1, 0.0, -1),
        Echo(1, 0.0, helpdesk.PADDING_BYTES_MAX + 1),
        Echo(1, 0.0, 1 << 62),
        Echo(1, 0.0, 0, bytes(helpdesk.PADDING_BYTES_MAX + 1)),
    ],
    ids=lambda q: f"{q.seq}-{q.sent_at}-{q.reply_bytes}-{len(q.padding)}",
)
def test_impossible_echoes_are_refused(question: Echo) -> None:
    play(MemoryBench, lambda s: s.refused(question, "bad-echo"))


@pytest.mark.parametrize(
    "question",
    [
        DialBack(1, ()),
        DialBack(1, (("", 7000),) * (helpdesk.ADDRESSES_MAX + 1)),
        DialBack(1, (("", 0),)),
        DialBack(1, (("", 65536),)),
        DialBack(1, (("", -1),)),
        DialBack(1, (("x" * 256, 7000),)),
        DialBack(-1, (("", 7000),)),
    ],
)
def test_impossible_dials_are_refused(question: DialBack) -> None:
    play(MemoryBench, lambda s: s.refused(question, "bad-dial-back"))


@pytest.mark.parametrize("answer", [EchoReply(1, 0.0, WALL), DialBackReply(1, "", ())])
def test_answers_that_nobody_asked_for_are_refused(answer: HelpMessage) -> None:
    play(MemoryBench, lambda s: s.refused(answer, "unasked-answer"))


def test_an_asker_may_cost_so_much_and_no_more() -> None:
    async def part(s: Scene) -> None:
        size = helpdesk.PADDING_BYTES_MAX
        whole = Echo(1, 0.0, size, bytes(size))
        for _ in range(helpdesk.BYTES_PER_ASKER // (2 * size)):
            await s.ask(whole)
        await s.refused(Echo(2, 0.0, 0), "help-limit")
        # Time brings more, but slowly; and another asker is not touched by it.
        s.time[0] += 1.0
        rate = helpdesk.BYTES_PER_ASKER_PER_S
        for _ in range(int(rate) // helpdesk.ECHO_BYTES_MIN):
            await s.ask(Echo(3, 0.0, 0))
        await s.refused(Echo(4, 0.0, 0), "help-limit")
        s.asker, s.taken = await s.bench.party(), 0
        s.host.heard.messages.clear()
        await s.asker.transport.dial(s.bench.book[s.host.peer][0])
        assert await s.ask(Echo(5, 0.0, 0)) == EchoReply(5, 0.0, WALL)

    play(MemoryBench, part)


def test_few_dials_are_made_for_one_asker() -> None:
    async def part(s: Scene) -> None:
        question = DialBack(1, (("", s.asker.transport.addresses[0].port),))
        for _ in range(helpdesk.DIAL_BACKS_PER_ASKER):
            answer = await s.ask(question)
            assert [r.outcome for r in answer.results] == ["reached"]
        assert await s.ask(question) == DialBackReply(1, "memory", ())
        assert [(n.code, n.peer) for n in s.told] == [("help-limit", s.asker.peer)]
        s.time[0] += 1 / helpdesk.DIAL_BACKS_PER_ASKER_PER_S
        assert len((await s.ask(question)).results) == 1

    play(MemoryBench, part)


def test_budgets_are_kept_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(helpdesk, "ASKERS_MAX", 3)

    async def part(s: Scene) -> None:
        for number in range(10):
            s.desk.handle(PeerId(bytes([number]) * 32), Echo(1, 0.0, -1))
            s.desk._budget(PeerId(bytes([number]) * 32))
        assert len(s.desk._budgets) == 3

    play(MemoryBench, part)


# --- dials back -----------------------------------------------------------------------------


def closed_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def test_a_dial_back_says_what_can_be_reached() -> None:
    async def part(s: Scene) -> None:
        [mine] = s.asker.transport.addresses
        closed = closed_port()
        other = s.host.transport.addresses[0].port  # somebody listens there, with another key
        answer = await s.ask(
            DialBack(
                3, (("", mine.port), ("::ffff:127.0.0.1", mine.port), ("", closed), ("", other))
            )
        )
        assert isinstance(answer, DialBackReply)
        assert (answer.seq, answer.seen) == (3, "127.0.0.1")
        assert [(r.host, r.port, r.outcome) for r in answer.results] == [
            ("127.0.0.1", mine.port, "reached"),
            ("::ffff:127.0.0.1", mine.port, "reached"),
            ("127.0.0.1", closed, "refused"),
            ("127.0.0.1", other, "no-handshake"),
        ]
        assert len(s.asker.heard.links) == 1  # it was looked at, and no connection was kept
        assert not s.asker.heard.notices
        assert not s.told

    play(TcpBench, part)


def test_nobody_else_is_dialled() -> None:
    async def part(s: Scene) -> None:
        accepted: list[object] = []
        with socket.create_server(("127.0.0.2", 0)) as victim:
            victim.setblocking(False)
            where = victim.getsockname()
            names = (("127.0.0.2", where[1]), ("localhost", where[1]), ("192.0.2.1", 7000))
            answer = await s.ask(DialBack(1, names))
            with pytest.raises(BlockingIOError):
                accepted.append(victim.accept())
        assert [r.outcome for r in answer.results] == ["foreign"] * 3
        assert all("127.0.0.1" in r.detail for r in answer.results)
        assert not accepted

    play(TcpBench, part)


def test_what_its_record_says_is_dialled_and_no_more_told_than_whether_it_is_there() -> None:
    async def part(s: Scene) -> None:
        s.desk._dial_s = 0.2
        port = s.asker.transport.addresses[0].port
        with socket.create_server(("127.0.0.1", 0)) as other:
            taken = other.getsockname()[1]
            hosts = [("localhost", port), ("localhost", taken), ("10.0.0.1", 7000)]
            s.desk._known = lambda peer: [Address(*h) for h in hosts]
            began = asyncio.get_running_loop().time()
            answer = await s.ask(DialBack(1, (*hosts, ("localhost", taken + 1))))
            assert asyncio.get_running_loop().time() - began >= 0.2
        assert [(r.host, r.outcome) for r in answer.results] == [
            ("localhost", "reached"),
            ("localhost", "unreachable"),  # somebody else: no word of who, or how
            ("10.0.0.1", "foreign"),
            ("localhost", "foreign"),
        ]
        assert not any(r.detail for r in answer.results[:2])

    play(TcpBench, part)


def test_answers_are_taken_by_who_has_asked() -> None:
    async def part(s: Scene) -> None:
        heard: list[DialBackReply] = []
        s.desk.answered = lambda peer, reply: reply.seq == 5 and not heard.append(reply)
        await s.tell(DialBackReply(5, "", ()))
        assert heard == [DialBackReply(5, "", ())]
        assert not s.told
        await s.refused(DialBackReply(6, "", ()), "unasked-answer")

    play(MemoryBench, part)


def test_a_port_that_says_nothing_costs_the_dial_timeout_and_not_more() -> None:
    async def part(s: Scene) -> None:
        s.desk._dial_s = 0.2
        with socket.create_server(("127.0.0.1", 0)) as silent:
            answer = await s.ask(DialBack(1, (("", silent.getsockname()[1]),)))
        [result] = answer.results
        assert result == DialResult(
            "127.0.0.1", result.port, "unreachable", "no answer within 0.2 s"
        )

    play(TcpBench, part)


def test_closing_ends_the_dials() -> None:
    async def part(s: Scene) -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            await s.tell(DialBack(1, (("", silent.getsockname()[1]),)))
            await s.desk.close()
        assert not s.asker.heard.messages
        s.desk.handle(s.asker.peer, Echo(1, 0.0, 0))  # it is closed: nothing happens
        assert not s.told

    play(TcpBench, part)


def test_an_asker_that_has_gone_is_not_dialled_to_be_answered() -> None:
    async def part(s: Scene) -> None:
        s.desk._dial_s = 0.2
        with socket.create_server(("127.0.0.1", 0)) as silent:
            await s.tell(DialBack(1, (("", silent.getsockname()[1]),)))
            await s.asker.transport.close()
            await s.host.heard.until(lambda: bool(s.host.heard.lost), "the end")
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await asyncio.gather(*tasks, return_exceptions=True)
        assert len(s.host.heard.lost) == 1

    play(TcpBench, part)
