"""`moshpit doctor` asks a real peer; what it is told is judged, and put into words."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest
from tests.real.harness import RealSwarm, free_port, real_swarm

from moshpit.cli.checks import Check, Status
from moshpit.cli.consult import Consultation, judge_dial_back, judge_echo
from moshpit.cli.peerchecks import (
    check_consultation,
    judge_bandwidth,
    judge_clock,
    judge_reachability,
)
from moshpit.config import TransportConfig
from moshpit.errors import WireError
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.transport.conformance import Recorder
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, PeerId, short
from moshpit.wire.help import DialBack, DialBackReply, DialResult, Echo, EchoReply
from moshpit.wire.messages import AnyMessage

from .conftest import Moshpit

# --- against a real peer --------------------------------------------------------------------


@pytest.fixture(scope="module")
def swarm() -> Iterator[RealSwarm]:
    with real_swarm(10) as swarm:
        swarm.start(1)
        yield swarm


def test_a_whole_consultation_for_programs(swarm: RealSwarm, moshpit: Moshpit) -> None:
    done = moshpit("doctor", "--ticket", swarm.ticket, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    found = {check["subject"]: check for check in json.loads(done.stdout)}
    clock = found["peer's clock"]
    assert clock["status"] == "ok"
    # One machine has one clock, and nobody sees it more exactly than the way there and back.
    assert clock["figures"]["round_trip_s"] > 0
    assert abs(clock["figures"]["clock_offset_s"]) <= clock["figures"]["round_trip_s"]
    speed = found["bandwidth"]["figures"]
    assert 1e5 < speed["up_bytes_per_s"] < 1e11
    assert 1e5 < speed["down_bytes_per_s"] < 1e11
    reach = found["reachability"]
    assert reach["status"] == "ok"
    assert reach["figures"]["seen_at"] == "127.0.0.1"
    [port] = {Address.parse(a).port for a in reach["figures"]["advertised"]}
    assert {d["port"] for d in reach["figures"]["dials"]} == {port}
    assert "reached" in [d["outcome"] for d in reach["figures"]["dials"]]
    assert "peers" in found[f"visit 127.0.0.1:{swarm.port}"]["figures"]


def test_a_whole_consultation_for_people(swarm: RealSwarm, moshpit: Moshpit) -> None:
    unused = f"127.0.0.1:{free_port()}"
    done = moshpit(
        *("doctor", "--ticket", swarm.ticket, "--peer", f"127.0.0.1:{swarm.port}"),
        *("--listen", unused, "--advertise", unused),
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert any(line.startswith("ok    peer's clock ") for line in lines)
    assert any("a lower bound" in line for line in lines if line[6:].startswith("bandwidth"))
    assert any(f"can dial this machine at {unused}" in line for line in lines)
    # The visitor is not in the run, and has left no trace in it.
    swarm.peers[0].tell("peers")
    assert len(swarm.peers[0].expect("peers")["peers"]) == 1


def test_a_way_in_that_does_not_exist(swarm: RealSwarm, moshpit: Moshpit) -> None:
    closed = f"127.0.0.1:{free_port()}"
    done = moshpit("doctor", "--ticket", swarm.ticket, "--advertise", closed, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    [reach] = [c for c in json.loads(done.stdout) if c["subject"] == "reachability"]
    assert reach["status"] == "warn"
    assert f"{closed} refused" in reach["found"]
    assert "--role client" in reach["advice"]


def test_without_a_peer_the_machine_is_checked(moshpit: Moshpit) -> None:
    ticket = RunKey.generate().invite().ticket((Address("127.0.0.1", free_port()),)).encode()
    done = moshpit("doctor", "--ticket", ticket, "--json")
    assert done.returncode == 1
    found = {check["subject"]: check["status"] for check in json.loads(done.stdout)}
    assert found["torch"] == found["listen"] == "ok"
    assert "fail" in found.values()
    assert "reachability" not in found


def test_a_port_that_is_taken_leaves_the_rest_of_the_consultation(swarm: RealSwarm) -> None:
    where = Address("127.0.0.1", swarm.port)  # the peer has it
    clock, bandwidth, reach = check_consultation(Ticket.decode(swarm.ticket), where, where, None)
    assert (clock.status, bandwidth.status, reach.status) == (Status.OK, Status.OK, Status.WARN)
    assert "not tested" in reach.found


# --- against a peer that lies ---------------------------------------------------------------


class Liar(Recorder):
    """A peer that answers every echo by something else."""

    answers: tuple[EchoReply | DialBackReply, ...] = ()

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        assert self.transport is not None
        if isinstance(message, Echo):
            for answer in self.answers:
                self.transport.send(peer, answer)


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ((EchoReply(1, 0.0, float("nan")),), "bad-answer"),
        ((DialBackReply(1, "", ()),), "bad-answer"),
        ((EchoReply(99, 0.0, 1.8e9),), "unasked-answer"),
        ((), "silent"),
    ],
)
def test_a_liar_is_named(
    monkeypatch: pytest.MonkeyPatch, answers: tuple[EchoReply, ...], reason: str
) -> None:
    monkeypatch.setattr("moshpit.cli.consult.ANSWER_S_MAX", 60.0 if answers else 0.3)
    key, invite = PeerKey.generate(), RunKey.generate().invite()
    ticket = invite.ticket(())
    where: queue.Queue[Address] = queue.Queue()
    over = threading.Event()

    async def lie() -> None:
        liar = Liar({})
        liar.answers = answers
        transport = liar.transport = TcpTransport(
            key,
            ticket.run,
            ticket.admit(key.peer),
            TransportConfig(),
            listen=Address("127.0.0.1", 0),
        )
        await transport.start(liar)
        where.put(transport.addresses[0])
        await asyncio.to_thread(over.wait)
        await transport.close()

    thread = threading.Thread(target=lambda: asyncio.run(lie()))
    thread.start()
    try:
        [check] = check_consultation(ticket, where.get(timeout=60), Address("127.0.0.1", 0), None)
    finally:
        over.set()
        thread.join()
    assert check.status is Status.FAIL
    assert f"{short(key.peer)}: {reason}" in check.found
    assert check.advice


# --- judging ----------------------------------------------------------------------------------

ECHO = Echo(3, 100.0, 10)
GOOD = EchoReply(3, 100.0, 1.8e9, bytes(10))


@pytest.mark.parametrize(
    "changes",
    [
        {"sent_at": 101.0},
        {"sent_at": float("nan")},
        {"wall": float("nan")},
        {"wall": float("inf")},
        {"wall": -1.0},
        {"wall": 1e300},
        {"padding": bytes(9)},
        {"padding": bytes(11)},
    ],
)
def test_impossible_echo_replies(changes: dict[str, object]) -> None:
    judge_echo(ECHO, GOOD, "them")
    with pytest.raises(WireError, match="them") as caught:
        judge_echo(ECHO, msgspec.structs.replace(GOOD, **changes), "them")
    assert caught.value.reason == "bad-answer"


ASKED = DialBack(4, (("", 7000), ("192.0.2.1", 7000)))
FIRST, SECOND = (
    DialResult("198.51.100.1", 7000, "reached"),
    DialResult("192.0.2.1", 7000, "foreign"),
)


@pytest.mark.parametrize(
    "answer",
    [
        DialBackReply(4, "198.51.100.1", (FIRST,)),
        DialBackReply(4, "198.51.100.1", (SECOND, FIRST)),
        DialBackReply(4, "198.51.100.9", (FIRST, SECOND)),
        DialBackReply(4, "x" * 300, ()),
        DialBackReply(4, "198.51.100.1", (FIRST, DialResult("192.0.2.1", 7000, "wonderful"))),
        DialBackReply(4, "198.51.100.1", (FIRST, DialResult("192.0.2.1", 7001, "reached"))),
        DialBackReply(
            4, "198.51.100.1", (FIRST, DialResult("192.0.2.1", 7000, "refused", "x" * 9999))
        ),
        GOOD,
    ],
)
def test_impossible_dial_back_replies(answer: DialBackReply | EchoReply) -> None:
    judge_dial_back(ASKED, DialBackReply(4, "198.51.100.1", (FIRST, SECOND)), "them")
    judge_dial_back(ASKED, DialBackReply(4, "198.51.100.1", ()), "them")
    with pytest.raises(WireError, match="them"):
        judge_dial_back(ASKED, answer, "them")
    with pytest.raises(WireError, match="them"):
        judge_echo(ECHO, DialBackReply(3, "", ()), "them")


# --- words --------------------------------------------------------------------------------------

HOME = (Address("192.168.1.5", 7000),)
FINE = Consultation(
    host=PeerId(bytes(32)),
    round_trip_s=0.02,
    clock_offset_s=0.1,
    up=5e6,
    down=5e6,
    advertised=HOME,
    leads_to=HOME,
    not_listening="",
    seen="203.0.113.9",
    dials=(DialResult("203.0.113.9", 7000, "reached"), DialResult("192.168.1.5", 7000, "foreign")),
)


def test_clocks_in_words() -> None:
    assert judge_clock(FINE).status is Status.OK
    for offset, words in ((-3.0, "behind"), (3.0, "ahead")):
        off = judge_clock(replace(FINE, clock_offset_s=offset))
        assert off.status is Status.WARN
        assert words in off.found
        assert "10m00s" in off.advice
        assert "exceeds" not in off.advice
    assert "exceeds" in judge_clock(replace(FINE, clock_offset_s=601.0)).advice


def test_bandwidth_in_words() -> None:
    assert judge_bandwidth(FINE).status is Status.OK
    slow = judge_bandwidth(replace(FINE, up=100_000.0))
    assert slow.status is Status.WARN
    assert "bandwidth_mbit=0.8" in slow.advice


def dials(outcome: str, host: str = "203.0.113.9") -> tuple[DialResult, ...]:
    return (DialResult(host, 7000, outcome), FINE.dials[1])


@pytest.mark.parametrize(
    ("found", "status", "advice"),
    [
        (FINE, Status.WARN, "--advertise 203.0.113.9:7000"),
        (replace(FINE, leads_to=(Address("203.0.113.9", 7000),)), Status.OK, ""),
        (replace(FINE, dials=dials("unreachable")), Status.WARN, "forward"),
        (replace(FINE, dials=dials("refused")), Status.WARN, "--role client"),
        (replace(FINE, dials=dials("no-handshake")), Status.WARN, "somebody else"),
        (replace(FINE, dials=FINE.dials[1:]), Status.WARN, "--advertise"),
        (replace(FINE, dials=()), Status.WARN, "a minute"),
        (replace(FINE, not_listening="no"), Status.WARN, "--listen"),
        (replace(FINE, seen="127.0.0.1", dials=dials("reached", "127.0.0.1")), Status.OK, ""),
    ],
)
def test_reachability_in_words(found: Consultation, status: Status, advice: str) -> None:
    check: Check = judge_reachability(found)
    assert check.status is status
    assert advice in check.advice
    assert bool(check.advice) == bool(advice)
    assert json.loads(msgspec.json.encode(check))["figures"]["seen_at"] == found.seen
