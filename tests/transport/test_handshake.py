"""Who must not get in, and what they are told: real sockets, and somebody in the middle."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec
import pytest

from moshpit.errors import AdmissionError, HandshakeError, RemoteError
from moshpit.identity.certificates import client_tls, server_tls
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import RunKey
from moshpit.transport.conformance import Party
from moshpit.transport.recorder import PATIENCE_S, Recorder
from moshpit.transport.tcp import TcpTransport
from moshpit.types import Address, PeerId, Role
from moshpit.wire.framing import LENGTH
from moshpit.wire.messages import Admission, Ping
from tests.transport.benches import QUICK, TcpBench, run

PREFIX = 10  # magic and version, before the hello's fields


def codes(party: Party) -> list[str]:
    return [notice.code for notice in party.heard.notices]


async def peer_of(
    bench: TcpBench, *, key: PeerKey | None = None, listen: bool = True, **changes
) -> Party:
    """A peer of the bench with something about it changed: run, admission, config, now, known."""
    key = key or PeerKey.generate()
    settings = {
        "run": bench.run.run,
        "admission": bench.ticket.admit(key.peer),
        "config": QUICK,
        "listen": Address("127.0.0.1", 0) if listen else None,
    } | changes
    transport = TcpTransport(key, **settings)
    heard = Recorder(bench.book)
    heard.transport = transport
    await transport.start(heard)
    bench.transports.append(transport)
    return Party(key.peer, transport, heard, settings["admission"])


async def refused(dialer: Party, server: Party, kind: type[RemoteError], reason: str) -> None:
    """Check that a dial is refused on both sides, and that nobody thinks it connected."""
    with pytest.raises(kind) as caught:
        await dialer.transport.dial(server.transport.addresses[0])
    assert caught.value.reason == reason
    await server.heard.until(lambda: bool(server.heard.notices), "the notice")
    assert codes(server) == [reason]
    assert not server.heard.links
    assert not dialer.heard.links


# --- admissions -----------------------------------------------------------------------------


def other_run(bench: TcpBench, key: PeerKey) -> Admission:
    return RunKey.generate().invite().ticket(()).admit(key.peer)


def of_another_peer(bench: TcpBench, key: PeerKey) -> Admission:
    return bench.ticket.admit(PeerKey.generate().peer)


def more_roles(bench: TcpBench, key: PeerKey) -> Admission:
    client = bench.run.invite(roles=(Role.CLIENT,)).ticket(()).admit(key.peer)
    return msgspec.structs.replace(client, roles=("worker", "client", "aux"))


def later_expiry(bench: TcpBench, key: PeerKey) -> Admission:
    old = bench.run.invite(expires_at=1000).ticket(()).admit(key.peer)
    return msgspec.structs.replace(old, expires_at=0)


def invited_by_a_peer(bench: TcpBench, key: PeerKey) -> Admission:
    """An invite that an admitted peer made up, signed by its own key."""
    own = bench.ticket.admit(key.peer)
    return msgspec.structs.replace(own, invite=key.peer, peer_signature=key.sign(key.peer))


def garbage(bench: TcpBench, key: PeerKey) -> Admission:
    return Admission(b"", ("x" * 500,), -(1 << 60), b"short", b"")


@pytest.mark.parametrize(
    "forge", [other_run, of_another_peer, more_roles, later_expiry, invited_by_a_peer, garbage]
)
def test_forged_admissions(forge: Callable[[TcpBench, PeerKey], Admission]) -> None:
    async def work() -> None:
        bench = TcpBench()
        server = await peer_of(bench)
        key = PeerKey.generate()
        dialer = await peer_of(bench, key=key, admission=forge(bench, key))
        await refused(dialer, server, AdmissionError, "not-admitted")
        assert server.heard.notices[0].peer == key.peer  # it proved its key, so it is named
        # And the other way round: whoever dials does not take it either.
        with pytest.raises(AdmissionError) as caught:
            await server.transport.dial(dialer.transport.addresses[0])
        assert caught.value.reason == "not-admitted"
        honest = await peer_of(bench)
        assert await honest.transport.dial(server.transport.addresses[0]) == server.peer
        await bench.close()

    run(work)


def test_expired_invites_admit_nobody_new() -> None:
    async def work() -> None:
        bench = TcpBench()
        key, returning = PeerKey.generate(), PeerKey.generate()
        ticket = bench.run.invite(expires_at=int(time.time()) - 700).ticket(())
        server = await peer_of(bench, known=lambda peer: peer == returning.peer)
        dialer = await peer_of(bench, key=key, admission=ticket.admit(key.peer))
        await refused(dialer, server, AdmissionError, "expired")
        # Who was in the run before may come back.
        old = await peer_of(bench, key=returning, admission=ticket.admit(returning.peer))
        await old.transport.dial(server.transport.addresses[0])
        # A clock that is off by some minutes does no harm.
        slow = await peer_of(bench, now=lambda: time.time() - 300)
        await dialer.transport.dial(slow.transport.addresses[0])
        await bench.close()

    run(work)


def test_another_run() -> None:
    async def work() -> None:
        bench, other = TcpBench(), TcpBench()
        server, dialer = await peer_of(bench), await peer_of(other)
        await refused(dialer, server, HandshakeError, "other-run")
        await bench.close()
        await other.close()

    run(work)


def test_sealed_and_plain_do_not_mix() -> None:
    async def work() -> None:
        bench = TcpBench()
        server = await peer_of(bench)
        dialer = await peer_of(bench, config=replace(QUICK, sealed=False))
        await refused(dialer, server, HandshakeError, "plaintext-mismatch")
        await bench.close()

    run(work)


def test_two_processes_with_one_key() -> None:
    async def work() -> None:
        bench = TcpBench()
        key = PeerKey.generate()
        server = await peer_of(bench)
        first, second = await peer_of(bench, key=key), await peer_of(bench, key=key)
        await first.transport.dial(server.transport.addresses[0])
        await server.heard.until(lambda: bool(server.heard.links), "the first")
        with pytest.raises(HandshakeError) as caught:
            await second.transport.dial(server.transport.addresses[0])
        assert caught.value.reason == "duplicate-key"
        assert codes(server) == ["duplicate-key"]
        assert server.transport.connected(key.peer)
        with pytest.raises(HandshakeError) as caught:
            await second.transport.dial(first.transport.addresses[0])
        assert caught.value.reason == "duplicate-key"
        # When the first one has gone, the key is free.
        await first.transport.close()
        await server.heard.until(lambda: bool(server.heard.lost), "the first one's end")
        await second.transport.dial(server.transport.addresses[0])
        await bench.close()

    run(work)


def test_a_restarted_peer_replaces_its_silent_connection() -> None:
    """A machine that died without a word comes back before its connection times out."""

    async def work() -> None:
        bench = TcpBench()
        key = PeerKey.generate()
        server = await bench.party(config=replace(QUICK, handshake_timeout_s=0.8))
        first, second = await peer_of(bench, key=key), await peer_of(bench, key=key)
        await first.transport.dial(bench.book[server.peer][0])
        await server.heard.until(lambda: bool(server.heard.links), "the first")
        bench.relays[server.peer].tap = lambda first, inward, data: b""  # a dead machine
        await second.transport.dial(server.transport.addresses[0])
        await server.heard.until(lambda: len(server.heard.links) == 2, "the second")
        assert not server.heard.lost
        second.transport.send(server.peer, Ping(7))
        await server.heard.until(lambda: bool(server.heard.messages), "a message")
        assert server.heard.messages == [(key.peer, Ping(7))]
        await bench.close()

    run(work)


def test_dials_that_nobody_needs_are_no_fault() -> None:
    """Who is connected already, or only looks, leaves a handshake without a complaint."""

    async def work() -> None:
        bench = TcpBench()
        server, dialer = await peer_of(bench), await peer_of(bench)
        where = server.transport.addresses[0]
        await dialer.transport.reach(where, server.peer)
        assert not dialer.heard.links
        assert await dialer.transport.dial(where) == server.peer
        assert await dialer.transport.dial(where) == server.peer
        await dialer.transport.reach(where, server.peer)
        await server.heard.until(lambda: bool(server.heard.links), "the link")
        await dialer.transport.close()  # waits until the server has closed all its ends
        await server.heard.until(lambda: bool(server.heard.lost), "the end")
        assert len(server.heard.links) == 1
        assert not server.heard.notices
        await bench.close()

    run(work)


def test_a_dial_that_is_given_up_says_so() -> None:
    async def work() -> None:
        bench = TcpBench()
        dialer = await peer_of(bench)
        key = PeerKey.generate()
        heard: list[bytes] = []

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            frames = Frames(reader, writer)
            heard.append(await frames.read())  # the dialer's hello, which is not answered
            dial.cancel()
            heard.append(await frames.read())
            await frames.close()
            done.set()

        done = asyncio.Event()
        tls = server_tls(key.private).context
        server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
        where = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        dial = asyncio.create_task(dialer.transport.dial(where, key.peer))
        async with asyncio.timeout(PATIENCE_S):
            await done.wait()
        with pytest.raises(asyncio.CancelledError):
            await dial
        assert msgspec.msgpack.decode(heard[1])[:2] == [2, "withdrawn"]
        server.close()
        await server.wait_closed()
        await bench.close()

    run(work)


# --- in the middle --------------------------------------------------------------------------


@dataclass
class Frames:
    """Frames over TLS, spoken by hand."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @classmethod
    async def dial(cls, address: Address) -> Frames:
        return cls(
            *await asyncio.open_connection(
                address.host, address.port, ssl=client_tls(), server_hostname=""
            )
        )

    async def read(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            (length,) = LENGTH.unpack(await self.reader.readexactly(4))
            return await self.reader.readexactly(length)

    def write(self, body: bytes) -> None:
        self.writer.write(LENGTH.pack(len(body)) + body)

    async def close(self) -> None:
        self.writer.close()
        with contextlib.suppress(OSError):
            await self.writer.wait_closed()


Rewrite = Callable[[str, bytes], bytes]


class Middle:
    """Ends TLS with its own certificate and passes frames on, rewritten, to the real server.

    Frames are named: ``server-hello``, ``dialer-hello``, ``dialer-proof``, ``answer``.
    """

    def __init__(self, key: PeerKey, target: Address, rewrite: Rewrite) -> None:
        self.key, self.target, self.rewrite = key, target, rewrite
        self.passed: list[str] = []

    async def __aenter__(self) -> Address:
        tls = server_tls(self.key.private).context
        self.tasks: list[asyncio.Task[None]] = []
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=tls)
        return Address("127.0.0.1", self.server.sockets[0].getsockname()[1])

    async def __aexit__(self, *_) -> None:
        self.server.close()
        await asyncio.gather(*self.tasks)
        await self.server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.tasks.append(asyncio.current_task())
        victim = Frames(reader, writer)
        try:
            server = await Frames.dial(self.target)
        except OSError:  # the victim left at once, and then the test ended
            await victim.close()
            return
        try:
            victim.write(self._pass("server-hello", await server.read()))
            server.write(self._pass("dialer-hello", await victim.read()))
            server.write(self._pass("dialer-proof", await victim.read()))
            victim.write(self._pass("answer", await server.read()))
        except (asyncio.IncompleteReadError, OSError):
            pass
        await server.close()
        await victim.close()

    def _pass(self, name: str, frame: bytes) -> bytes:
        self.passed.append(name)
        return self.rewrite(name, frame)


def renamed(frame: bytes, peer: PeerId) -> bytes:
    """A server's hello, with another peer in it."""
    run_id, nonce, instance, _ = msgspec.msgpack.decode(frame[PREFIX:])
    return frame[:PREFIX] + msgspec.msgpack.encode((run_id, nonce, instance, peer))


@pytest.mark.parametrize("knows", [True, False])
def test_swapped_certificate(knows: bool) -> None:
    async def work() -> None:
        bench = TcpBench()
        server, victim = await peer_of(bench), await peer_of(bench)
        middle = Middle(PeerKey.generate(), server.transport.addresses[0], lambda _, frame: frame)
        async with middle as address:
            with pytest.raises(HandshakeError) as caught:
                await victim.transport.dial(address, server.peer if knows else None)
        assert caught.value.reason == "swapped-certificate"
        assert "dialer-proof" not in middle.passed  # the victim did not even say who it is
        assert not server.heard.links
        assert not victim.heard.links
        await bench.close()

    run(work)


def test_an_insider_in_the_middle_cannot_pass_proofs_on() -> None:
    """Somebody admitted, whom the victim dials, uses the victim's proof at another peer."""

    async def work() -> None:
        bench = TcpBench()
        server, victim = await peer_of(bench), await peer_of(bench)
        key = PeerKey.generate()

        def rewrite(name: str, frame: bytes) -> bytes:
            return renamed(frame, key.peer) if name == "server-hello" else frame

        middle = Middle(key, server.transport.addresses[0], rewrite)
        async with middle as address:
            with pytest.raises(HandshakeError) as caught:
                await victim.transport.dial(address)
        assert caught.value.reason == "bad-signature"
        assert "dialer-proof" in middle.passed
        assert codes(server) == ["bad-signature"]
        assert server.heard.notices[0].peer is None  # nobody proved to be the victim
        assert not server.heard.links
        await bench.close()

    run(work)


def test_a_replayed_proof() -> None:
    """The very bytes that were good on one connection are worth nothing on the next."""

    async def work() -> None:
        bench = TcpBench()
        server, honest = await peer_of(bench), await peer_of(bench)
        recorded: dict[str, bytes] = {}
        # The recorder holds the twin's own key: it sees what a broken TLS would show.
        key = PeerKey.generate()
        twin = await peer_of(bench, key=key)
        async with Middle(key, twin.transport.addresses[0], recorded.setdefault) as address:
            assert await honest.transport.dial(address, key.peer) == key.peer
        assert twin.heard.links[0][0] == honest.peer
        await twin.heard.until(lambda: len(recorded) == 4, "a whole handshake")
        for target, hello in ((twin, recorded["dialer-hello"]), (server, recorded["dialer-hello"])):
            frames = await Frames.dial(target.transport.addresses[0])
            await frames.read()
            frames.write(hello)
            frames.write(recorded["dialer-proof"])
            answer = msgspec.msgpack.decode(await frames.read())
            assert answer[:2] == [2, "bad-signature"]
            await frames.close()
            assert codes(target)[-1] == "bad-signature"
        assert not server.heard.links
        await bench.close()

    run(work)


# --- versions, garbage, limits ---------------------------------------------------------------


def test_versions_are_told() -> None:
    async def work() -> None:
        bench = TcpBench()
        server, dialer = await peer_of(bench), await peer_of(bench)
        frames = await Frames.dial(server.transport.addresses[0])
        hello = await frames.read()
        frames.write(hello[:8] + b"\x00\x00" + b"whatever version 0 says here")
        answer = msgspec.msgpack.decode(await frames.read())
        assert answer[:2] == [2, "other-version"]
        assert "version 0" in answer[2]
        await frames.close()
        assert codes(server) == ["other-version"]

        def newer(name: str, frame: bytes) -> bytes:
            return frame[:8] + b"\x07\x00" + b"news" if name == "server-hello" else frame

        async with Middle(PeerKey.generate(), server.transport.addresses[0], newer) as address:
            with pytest.raises(HandshakeError) as caught:
                await dialer.transport.dial(address)
        assert caught.value.reason == "other-version"
        assert "7" in str(caught.value)
        await bench.close()

    run(work)


GARBAGE = {
    "oversized": (lambda hello: LENGTH.pack(1 << 20), "oversized"),
    "huge": (lambda hello: b"\xff" * 4, "oversized"),
    "empty": (lambda hello: LENGTH.pack(0), "not-moshpit"),
    "other-magic": (lambda hello: LENGTH.pack(20) + b"x" * 20, "not-moshpit"),
    "cut": (lambda hello: LENGTH.pack(PREFIX) + hello[:PREFIX], "undecodable"),
    "noise": (lambda hello: LENGTH.pack(60) + hello[:PREFIX] + b"\xc1" * 50, "undecodable"),
    "no-proof": (
        lambda hello: (LENGTH.pack(len(hello)) + hello) + LENGTH.pack(3) + b"\x93\x01\x02",
        "undecodable",
    ),
}


@pytest.mark.parametrize("name", GARBAGE)
def test_garbage_inside_tls(name: str) -> None:
    async def work() -> None:
        bench = TcpBench()
        server = await peer_of(bench)
        make, reason = GARBAGE[name]
        frames = await Frames.dial(server.transport.addresses[0])
        frames.writer.write(make(await frames.read()))
        answer = msgspec.msgpack.decode(await frames.read())
        assert answer[:2] == [2, reason]
        await frames.close()
        assert codes(server) == [reason]
        honest = await peer_of(bench)
        assert await honest.transport.dial(server.transport.addresses[0]) == server.peer
        await bench.close()

    run(work)


def test_what_a_stranger_says_forges_no_line_of_the_log() -> None:
    """Nor does it reach a terminal: the words of a refusal are the other side's own."""
    forged = "\n12:00:00 peer-dead azvcby75 \x1b[2J\u202e"

    async def work() -> None:
        bench = TcpBench()
        key = PeerKey.generate()
        server, dialer = await peer_of(bench, key=key), await peer_of(bench)
        frames = await Frames.dial(server.transport.addresses[0])
        frames.write(await frames.read())  # its own hello is of its run
        frames.write(msgspec.msgpack.encode([2, "expired", forged]))
        await server.heard.until(lambda: bool(server.heard.notices), "the notice")
        [notice] = server.heard.notices
        assert notice.code == "expired"
        assert "peer-dead azvcby75" in notice.detail
        assert notice.detail.isprintable()
        await frames.close()

        def lie(name: str, frame: bytes) -> bytes:
            told = msgspec.msgpack.encode([2, "full", forged])
            return told if name == "answer" else frame

        async with Middle(key, server.transport.addresses[0], lie) as address:
            with pytest.raises(HandshakeError, match="peer-dead azvcby75") as caught:
                await dialer.transport.dial(address)
        assert str(caught.value).isprintable()
        await bench.close()

    run(work)


STRANGERS = {
    "http": (b"GET / HTTP/1.1\r\n\r\n", "not-moshpit"),
    "zeros": (bytes(100), "not-moshpit"),
    "tls-garbage": (b"\x16" + bytes(range(100)), "handshake-broken"),
    "bulk-garbage": (b"M" + bytes(99), "not-moshpit"),
    "tls-slow": (b"\x16\x03", "handshake-timeout"),
    "bulk-slow": (b"MPB1abc", "handshake-timeout"),
    "silent": (b"", "handshake-timeout"),
}


def test_who_only_looks_whether_somebody_listens_is_not_told_of() -> None:
    """As a port check does, `moshpit doctor`'s for one."""

    async def work() -> None:
        bench = TcpBench()
        server = await peer_of(bench)
        where = server.transport.addresses[0]
        _, writer = await asyncio.open_connection(where.host, where.port)
        writer.close()
        await writer.wait_closed()
        async with asyncio.timeout(PATIENCE_S):
            while server.transport._port.strangers:
                await asyncio.sleep(0.001)
        honest = await peer_of(bench)
        assert await honest.transport.dial(where) == server.peer
        assert codes(server) == []
        await bench.close()

    run(work)


@pytest.mark.parametrize("name", STRANGERS)
def test_strangers_at_the_port(name: str) -> None:
    async def work() -> None:
        bench = TcpBench()
        server = await peer_of(bench, config=replace(QUICK, handshake_timeout_s=1.0))
        data, reason = STRANGERS[name]
        where = server.transport.addresses[0]
        _, writer = await asyncio.open_connection(where.host, where.port)
        writer.write(data)
        await server.heard.until(lambda: bool(server.heard.notices), "the notice")
        assert codes(server) == [reason]
        writer.transport.abort()
        honest = await peer_of(bench)
        assert await honest.transport.dial(where) == server.peer
        await bench.close()

    run(work)


def test_a_crowd_of_strangers_does_not_keep_peers_out() -> None:
    async def work() -> None:
        bench = TcpBench()
        server = await peer_of(bench, config=replace(QUICK, unauthenticated_max=4))
        honest = await peer_of(bench)
        where = server.transport.addresses[0]
        crowd = []
        for _ in range(40):
            crowd.append(await asyncio.open_connection(where.host, where.port))
        await server.heard.until(lambda: "unauthenticated-max" in codes(server), "the notice")
        assert len(server.heard.notices) <= 12  # the log is not flooded either
        assert await honest.transport.dial(where) == server.peer
        for _, writer in crowd:
            writer.transport.abort()
        await bench.close()

    run(work)


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (LENGTH.pack(3) + b"\xc1\xc1\xc1", "undecodable"),
        (LENGTH.pack(2) + b"\x91\x63", "undecodable"),
        (LENGTH.pack((1 << 20) + 1), "oversized"),
    ],
)
def test_a_peer_that_breaks_the_framing_is_dropped(frame: bytes, reason: str) -> None:
    async def work() -> None:
        bench = TcpBench()
        server, insider = await peer_of(bench), await peer_of(bench)
        await insider.transport.dial(server.transport.addresses[0])
        await server.heard.until(lambda: bool(server.heard.links), "the insider")
        state = insider.transport._peers[server.peer]
        state.link.send(frame)
        await server.heard.until(lambda: bool(server.heard.lost), "the end")
        assert [(n.code, n.peer) for n in server.heard.notices] == [(reason, insider.peer)]
        await insider.heard.until(lambda: bool(insider.heard.lost), "being told")
        assert reason in insider.heard.lost[0][2]
        assert server.heard.messages == []
        await bench.close()

    run(work)


def test_links_beyond_the_limit_are_closed_and_dialled_again() -> None:
    async def work() -> None:
        bench = TcpBench()
        few = await bench.party(config=replace(QUICK, links_max=3))
        others = [await bench.party() for _ in range(6)]
        for seq in range(3):
            for other in others:
                few.transport.send(other.peer, Ping(seq))
                await other.heard.until(lambda o=other, s=seq: len(o.heard.messages) > s, "a ping")
        assert sum(few.transport.connected(other.peer) for other in others) <= 3
        for other in others:
            assert [m.seq for _, m in other.heard.messages] == [0, 1, 2]
            assert not other.heard.lost
        assert not few.heard.lost
        await bench.close()

    run(work)
