"""Admitted peers that send nonsense: refused with blame, and the others finish (S3, S4)."""

from __future__ import annotations

import collections
import contextlib
import logging
import random
import socket
import threading
import types
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import msgspec
import pytest
import torch

import moshpit
from moshpit.events import EpochReport, Notice
from moshpit.identity.tickets import RunKey
from moshpit.runtime.jobs import Averaging
from moshpit.tensors.codecs import codec_named
from moshpit.types import Address, GroupId
from moshpit.wire import links, messages
from moshpit.wire.framing import ChunkHeader, ChunkKind

from .harness import free_port

NUMEL = 50_000


class Crowd:
    """Three honest peers and a hostile one, each with a network thread of its own."""

    def __init__(self) -> None:
        address = Address("127.0.0.1", free_port())
        ticket = self.ticket = RunKey.generate().invite().ticket((address,)).encode()
        self.notices: list[Notice] = []
        self.honest = [
            moshpit.join(ticket, listen=str(address), identity="new"),
            moshpit.join(ticket, listen="127.0.0.1:0", identity="new"),
            moshpit.join(ticket, listen="127.0.0.1:0", identity="new"),
        ]
        self.evil = moshpit.join(ticket, listen="127.0.0.1:0", identity="new")
        for swarm in self.honest:
            swarm.listen(self.notices.append)
        for swarm in [*self.honest, self.evil]:
            swarm.wait_for_peers(4)
        layout = torch.zeros(NUMEL)
        with ThreadPoolExecutor(4) as pool:  # everybody attaches, everything is well
            all_in = list(pool.map(lambda s: s.average([layout]), [*self.honest, self.evil]))
        assert {r.outcome.value for _, r in all_in} == {"complete"}

    def average(self, evil: Callable[[], object]) -> list[tuple[torch.Tensor, EpochReport]]:
        with ThreadPoolExecutor(4) as pool:
            wrong = pool.submit(evil)
            right = [
                pool.submit(s.average, [torch.full((NUMEL,), float(i))], 1.0, 100.0)
                for i, s in enumerate(self.honest)
            ]
            results = [f.result() for f in right]
            wrong.result()
        return [(tensors[0], report) for tensors, report in results]

    def close(self) -> None:
        for swarm in [*self.honest, self.evil]:
            swarm.close()


@pytest.fixture
def crowd() -> object:
    made = Crowd()
    yield made
    made.close()


def bypass(crowd: Crowd, vector: torch.Tensor) -> Averaging:
    """Average what `Swarm.average` would refuse to send."""
    plan = crowd.evil._plan
    assert plan is not None
    job = Averaging(vector, plan, codec_named("float32"))
    crowd.evil._begin(job, vector, 1.0, None, always_weighs=True)
    with contextlib.suppress(moshpit.MoshpitError):
        job.wait(30.0)
    return job


def blamed(crowd: Crowd, results: list[tuple[torch.Tensor, EpochReport]]) -> set[str]:
    return {
        blame.reason
        for _, report in results
        for r in report.rounds
        for blame in r.blames
        if blame.peer == crowd.evil.peer_id
    }


def assert_honest_mean(results: list[tuple[torch.Tensor, EpochReport]], evil: float) -> None:
    """Every value is the mean of the honest three, or of all four where evil sent sense."""
    first = results[0][0]
    assert all(torch.equal(first, r) for r, _ in results)
    expected = {1.0, (3.0 + evil) / 4}
    assert set(first.unique().tolist()) <= expected, first.unique()


def test_average_refuses_to_send_poison() -> None:
    ticket = RunKey.generate().invite().ticket(()).encode()
    with (
        moshpit.join(ticket, listen="127.0.0.1:0", identity="new") as swarm,
        pytest.raises(moshpit.MoshpitError, match="NaN or infinite"),
    ):
        swarm.average([torch.zeros(3), torch.tensor([1.0, float("nan")])])


def tamper(crowd: Crowd, change: Callable[[ChunkHeader, memoryview], tuple]) -> None:
    """From now on the hostile peer's chunks are changed just before they are sealed."""
    transport = crowd.evil._driver._transport
    honest_send = transport.send_chunk

    def send_chunk(peer: bytes, header: ChunkHeader, payload: memoryview) -> bool:
        return honest_send(peer, *change(header, payload))

    transport.send_chunk = send_chunk


def with_value(payload: memoryview, value: float) -> memoryview:
    data = bytearray(payload)
    memoryview(data).cast("f")[len(data) // 8] = value
    return memoryview(data)


def with_length(payload: memoryview, length: int) -> memoryview:
    data = bytearray(length)
    data[: min(length, len(payload))] = payload[:length]
    return memoryview(data)


WRONG = {
    "nan": lambda h, p: (h, with_value(p, float("nan"))),
    "infinite": lambda h, p: (h, with_value(p, float("-inf"))),
    "short": lambda h, p: (msgspec.structs.replace(h, length=8), with_length(p, 8)),
    "empty": lambda h, p: (msgspec.structs.replace(h, length=0), with_length(p, 0)),
    "long": lambda h, p: (
        msgspec.structs.replace(h, length=len(p) + 4),
        with_length(p, len(p) + 4),
    ),
    "chunk": lambda h, p: (msgspec.structs.replace(h, chunk=10_000), p),
    "codec": lambda h, p: (msgspec.structs.replace(h, codec=77), p),
    "mass-nan": lambda h, p: (msgspec.structs.replace(h, mass=float("nan")), p),
    "mass-negative": lambda h, p: (msgspec.structs.replace(h, mass=-3.0), p),
    "group": lambda h, p: (msgspec.structs.replace(h, group=GroupId(b"g" * 16)), p),
    "random": lambda h, p: (
        ChunkHeader(
            ChunkKind.CONTRIBUTION, 3, 1 << 20, len(p), 255, h.group, float("inf"), 1 << 63
        ),
        p,
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_chunks_are_refused_and_the_others_finish(crowd: Crowd, kind: str) -> None:
    tamper(crowd, WRONG[kind])
    results = crowd.average(lambda: bypass(crowd, torch.full((NUMEL,), 5.0)))
    assert_honest_mean(results, 5.0)
    told = blamed(crowd, results) | {n.code for n in crowd.notices if n.peer == crowd.evil.peer_id}
    assert told, "nobody was told whose fault it was"
    # The run goes on without it.
    crowd.evil.close()
    again = crowd.average(lambda: None)
    assert_honest_mean(again, 5.0)


def random_message(rng: random.Random, crowd: Crowd) -> messages.Message:
    """A message of a random kind that the schema takes and nothing else about is right."""
    kinds = [k for k in messages.AnyMessage.__args__ if k is not links.BulkOffer]
    return random_value(rng.choice(kinds), rng, crowd)


def random_value(kind: object, rng: random.Random, crowd: Crowd) -> object:
    name = str(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        hints = msgspec.structs.fields(kind)
        return kind(*(random_value(f.type, rng, crowd) for f in hints))
    if kind is int:
        return rng.choice([0, 1, -1, 2**31, 2**63 - 1, -(2**63), rng.randrange(100)])
    if kind is float:
        return rng.choice([0.0, -1.0, 1e308, float("nan"), float("inf"), rng.random()])
    if kind is bool:
        return rng.random() < 0.5
    if kind is bytes:
        known = [s.peer_id for s in [*crowd.honest, crowd.evil]]
        return rng.choice([b"", rng.randbytes(16), rng.randbytes(32), rng.randbytes(300), *known])
    if kind is str:
        return rng.choice(["", "worker", "client", "x" * 1000, "\0"])
    if name.startswith("tuple"):
        parts = kind.__args__
        if len(parts) == 2 and parts[1] is Ellipsis:
            return tuple(random_value(parts[0], rng, crowd) for _ in range(rng.randrange(3)))
        return tuple(random_value(p, rng, crowd) for p in parts)
    if isinstance(kind, types.UnionType):
        return random_value(rng.choice(kind.__args__), rng, crowd)
    if kind is types.NoneType:
        return None
    raise AssertionError(f"no random value for {kind}")


@pytest.mark.parametrize("seed", range(3))
def test_random_messages_from_an_admitted_peer_change_nothing(crowd: Crowd, seed: int) -> None:
    crowd.average(lambda: None)  # from now on it is known who averages what
    rng = random.Random(seed)
    nonsense = [random_message(rng, crowd) for _ in range(1500)]
    stop = threading.Event()

    def flood() -> None:
        driver = crowd.evil._driver
        for message in nonsense:
            for swarm in crowd.honest:
                crowd.evil._thread.post(driver._transport.send, swarm.peer_id, message)
        stop.set()

    flood()
    crowd.evil._thread.post(setattr, crowd.evil._driver.node._matchmaker, "declines", True)
    results = crowd.average(lambda: None)
    assert stop.is_set()
    assert all(torch.equal(results[0][0], r) for r, _ in results)
    assert set(results[0][0].unique().tolist()) == {1.0}
    assert all(len(s.peers()) >= 3 for s in crowd.honest)
    crowd.evil.close()
    again = crowd.average(lambda: None)
    assert set(again[0][0].unique().tolist()) == {1.0}


OPENINGS = (
    b"",  # half open
    b"\x16\x03",  # TLS that never goes on
    b"\x16\x03\x01\x3f\xff\x01" + bytes(40),  # and claims to be long
    b"MPB1" + bytes(100),  # bulk data by a token that nobody has given
    b"GET / HTTP/1.1\r\n\r\n",
    random.Random(7).randbytes(3000),
)


def test_a_thousand_strangers_stop_nobody(crowd: Crowd, caplog: pytest.LogCaptureFixture) -> None:
    """They keep their connections open, and the peers average, and take somebody in, meanwhile."""
    address = crowd.honest[0].addresses[0]
    limit = moshpit.preset().transport.unauthenticated_max
    port = crowd.honest[0]._driver._transport._port
    opened: list[socket.socket] = []
    caplog.set_level(logging.INFO, "moshpit")
    crowd.evil.close()

    def besiege() -> None:
        for number in range(1000):
            stranger = socket.create_connection((address.host, address.port), timeout=60.0)
            opened.append(stranger)
            with contextlib.suppress(OSError):  # it was thrown out at once
                stranger.sendall(OPENINGS[number % len(OPENINGS)])

    try:
        results = crowd.average(besiege)
        assert set(results[0][0].unique().tolist()) == {1.0}
        assert port.strangers <= limit
        with moshpit.join(crowd.ticket, listen="127.0.0.1:0", identity="new") as newcomer:
            newcomer.wait_for_peers(4)
    finally:
        for stranger in opened:
            stranger.close()
    said = collections.Counter(record.getMessage().split(":")[0] for record in caplog.records)
    assert said["unauthenticated-max"] > 0
    assert said.total() < 500, said
