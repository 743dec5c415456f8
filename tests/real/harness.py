"""Starts real peers (`peer.py`), talks to them, kills them, and leaves none behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from moshpit.identity.tickets import RunKey
from moshpit.types import Address

from .namespaces import Machine

SHIFTED = """
import runpy, sys, time
shift, really = float(sys.argv[1]), time.time
time.time = lambda: really() + shift
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PEER = Path(__file__).with_name("peer.py")
Event = dict[str, Any]
PATIENCE_S = 200.0  # only reached by a failing test
ROOT = Path(__file__).parents[2]


def environment() -> dict[str, str]:
    """Return that of a child: one thread to compute, and it finds the tests' own modules."""
    path = os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def told(lines: Iterable[str]) -> Iterator[Event]:
    """Read what a process says, in JSON lines, until its end; the last line of one that was killed
    may be cut."""
    for line in lines:
        try:
            yield json.loads(line)
        except json.JSONDecodeError:
            return


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def crowding() -> float:
    """How many seconds a process needs here and now for a second's work: 1 on a quiet machine.

    What a fault may cost is a time on a quiet machine, and so many times that on a busy one.
    """
    wall, cpu = time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu < 0.1:
        pass
    return max(1.0, (time.perf_counter() - wall) / 0.1)


class Child:
    """A process that says what happens in JSON lines, and takes commands in JSON lines.

    Attributes:
        latest: the last event of each kind.
    """

    def __init__(self, command: list[str], errors: Path | None = None) -> None:
        """``errors``: the file for what it says on standard error; None: this process's own."""
        self._errors = errors
        with contextlib.ExitStack() as stack:
            stderr = None if errors is None else stack.enter_context(errors.open("w"))
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=environment(),
            )
        self.latest: dict[str, Event] = {}
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for event in told(self.process.stdout):
            self.heard(event)
            self.latest[event["event"]] = event
            self._events.put(event)
        self._events.put(None)

    def heard(self, event: Event) -> None:
        """It has said something; called by the thread that reads, before anybody else knows."""

    def send(self, **fields: object) -> None:
        """Give it a command."""
        self.write(json.dumps(fields))

    def write(self, line: str) -> None:
        """Give it a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def expect(self, kind: str, timeout_s: float = PATIENCE_S, **at_least: int) -> Event:
        """Wait for an event of a kind, with numbers that are large enough; skip all others."""
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            assert event is not None, f"it ended while {kind!r} was awaited:\n{self.errors}"
            if event["event"] == kind and all(event.get(k, 0) >= n for k, n in at_least.items()):
                return event
            assert event["event"] != "error", event

    @property
    def errors(self) -> str:
        """What it has said on standard error so far."""
        return "" if self._errors is None else self._errors.read_text()

    def said(self, text: str) -> None:
        """Wait until it has said something on standard error."""
        deadline = time.monotonic() + PATIENCE_S
        while text not in self.errors:
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.01)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def ended(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait until it ends by itself; return its exit code."""
        return self.process.wait(timeout_s)

    def stop(self) -> None:
        """Leave nothing of it behind."""
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):  # what was written to a dead peer is not missed
                stream.close()


class RealPeer(Child):
    """One process of `peer.py`."""

    def __init__(
        self,
        ticket: str,
        number: int,
        numel: int,
        *args: str,
        at: Machine | None = None,
        clock_s: float = 0.0,
    ) -> None:
        """``clock_s``: by how much its wall clock is wrong, from before anything is imported."""
        self.number = number
        shifted = ["-c", SHIFTED, str(clock_s)] if clock_s else []
        command = [sys.executable, *shifted, str(PEER), "--ticket", ticket]
        command += ["--number", str(number), "--numel", str(numel), *args]
        super().__init__(command if at is None else at.inside(*command))
        self.name = ""
        self.addresses: list[str] = []

    def joined(self, timeout_s: float = PATIENCE_S) -> None:
        event = self.expect("joined", timeout_s)
        self.name = event["peer"]
        self.addresses = event["addresses"]

    def tell(self, do: str, **fields: object) -> None:
        self.send(do=do, **fields)

    def end(self) -> int:
        """Ask it to leave; kill it if it does not."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(60)
        self.stop()
        assert self.process.returncode is not None
        return self.process.returncode


class RealSwarm:
    """Some peers of one run; the first listens at the address that is in the ticket."""

    def __init__(self, numel: int, *args: str, expires_at: int = 0) -> None:
        self.port = free_port()
        self._invite = RunKey.generate().invite(expires_at=expires_at)
        self.ticket = self._invite.ticket((Address("127.0.0.1", self.port),)).encode()
        self.numel = numel
        self.args = args
        self.peers: list[RealPeer] = []

    def add(self, *args: str, clock_s: float = 0.0) -> RealPeer:
        number = len(self.peers)
        listen = ("--listen", f"127.0.0.1:{self.port}") if number == 0 else ()
        args = (*self.args, *listen, *args)
        peer = RealPeer(self.ticket, number, self.numel, *args, clock_s=clock_s)
        self.peers.append(peer)
        return peer

    def start(self, n: int) -> None:
        for _ in range(n):
            self.add()
        for peer in self.peers:
            peer.joined()
        self.meet(self.peers)

    def meet(self, peers: list[RealPeer]) -> None:
        for peer in peers:
            peer.tell("wait", peers=len(peers))
        for peer in peers:
            peer.expect("ready")

    def replace(self, victim: RealPeer) -> None:
        """A new process takes a dead one's place; its ticket names those that live.

        Nobody waits for a peer of which it is not known what it averages, so it does that once.
        """
        victim.end()
        self.peers.remove(victim)
        addresses = tuple(Address.parse(a) for p in self.peers for a in p.addresses)
        ticket = self._invite.ticket(addresses).encode()
        fresh = RealPeer(ticket, victim.number, self.numel, *self.args)
        self.peers.append(fresh)
        fresh.joined()
        self.meet(self.peers)
        self.average(self.peers)

    def numbers(self, peers: list[RealPeer]) -> dict[str, int]:
        return {p.name: p.number for p in peers}

    def average(self, peers: list[RealPeer], **fields: object) -> list[Event]:
        self.begin(peers, **fields)
        return [p.expect("averaged") for p in peers]

    def begin(self, peers: list[RealPeer], **fields: object) -> None:
        fields.setdefault("numbers", self.numbers(peers))
        for peer in peers:
            peer.tell("average", **fields)


@contextmanager
def real_swarm(numel: int, *args: str, expires_at: int = 0) -> Iterator[RealSwarm]:
    """A swarm whose processes are all gone afterwards."""
    swarm = RealSwarm(numel, *args, expires_at=expires_at)
    try:
        yield swarm
    finally:
        for peer in swarm.peers:
            if peer.process.poll() is None:
                peer.signal(signal.SIGCONT)
            peer.end()
