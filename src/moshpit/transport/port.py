"""The one open port: who connects says by its first bytes what it wants.

A TLS record (0x16) is a control connection, the bulk magic a bulk connection; everything else
is closed. What has not proved itself is a stranger: each has a deadline, and there are at most
`unauthenticated_max`. When they are more, the oldest stranger of the address that has most of
them goes, so that honest dialers, who are done in a few round trips, still get in.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, final

from moshpit.errors import LocalError, RemoteError
from moshpit.transport.notices import NoticeLimiter
from moshpit.types import Address

TLS_RECORD: Final = 0x16
BACKLOG: Final = 256
ACCEPTS_PER_TURN: Final = 64  # guess: other callbacks get their turn
EXHAUSTED_PAUSE_S: Final = 0.5  # guess: out of file descriptors: try again then

_ADVICE: Final = {
    errno.EADDRINUSE: "end the process that has it, or choose another port (0: any that is free)",
    errno.EADDRNOTAVAIL: "this machine has no such address: listen at 0.0.0.0, or at [::], and "
    "advertise the address that leads here",
    errno.EACCES: "not allowed: ports below 1024 are the administrator's, choose a higher one",
}

Welcome = Callable[[socket.socket, str], Awaitable[None]]
"""Takes a stranger's socket (which it owns from then on) and its address, and proves it."""


@dataclass(slots=True, eq=False)
class _Stranger:
    sock: socket.socket
    host: str
    where: str
    task: asyncio.Task[None] | None = None
    evicted: bool = False
    handed_over: bool = False  # somebody else closes the socket


@final
class Port:
    """A listening socket and the strangers at it."""

    def __init__(
        self,
        welcomes: Mapping[int, Welcome],
        notices: NoticeLimiter,
        timeout_s: float,
        strangers_max: int,
    ) -> None:
        self._welcomes = welcomes
        self._notices = notices
        self._timeout_s = timeout_s
        self._strangers_max = strangers_max
        self._strangers: list[_Stranger] = []  # the oldest first
        self._sock: socket.socket | None = None
        self._loop = asyncio.get_running_loop()
        self._pause: asyncio.TimerHandle | None = None

    @property
    def strangers(self) -> int:
        """How many sockets have not proved anything yet."""
        return len(self._strangers)

    async def open(self, address: Address) -> Address:
        """Listen; returns where. Raises `LocalError` if the address cannot be had."""
        try:
            found = await self._loop.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
            )
            family, kind, proto, _, where = found[0]
            sock = socket.socket(family, kind, proto)
        except OSError as error:
            raise _not_here(address, error) from error
        try:
            sock.setblocking(False)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # "::" takes IPv4 too; any other IPv6 address means just itself.
                only = 0 if address.host == "::" else 1
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            sock.bind(where)
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise _not_here(address, error) from error
        self._sock = sock
        self._loop.add_reader(sock, self._accept, sock)
        return Address(address.host, sock.getsockname()[1])

    async def close(self) -> None:
        """Stop listening and send all strangers away."""
        if self._pause is not None:
            self._pause.cancel()
        if self._sock is not None:
            self._loop.remove_reader(self._sock)
            self._sock.close()
            self._sock = None
        tasks = [s.task for s in self._strangers if s.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _accept(self, listener: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, source = listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    raise
                self._notices.tell("out-of-sockets", None, str(error))
                self._loop.remove_reader(listener)
                self._pause = self._loop.call_later(EXHAUSTED_PAUSE_S, self._resume, listener)
                return
            sock.setblocking(False)
            host, port = source[0], source[1]
            if len(self._strangers) >= self._strangers_max:
                self._evict()
            stranger = _Stranger(sock, host, str(Address(host, port)))
            self._strangers.append(stranger)
            stranger.task = self._loop.create_task(self._receive(stranger))
            stranger.task.add_done_callback(partial(self._done, stranger))

    def _done(self, stranger: _Stranger, task: asyncio.Task[None]) -> None:
        # Not in the task itself: one that is cancelled before it ran never gets there.
        if not stranger.handed_over:
            stranger.sock.close()
        if stranger in self._strangers:
            self._strangers.remove(stranger)
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": "receiving a stranger failed", "exception": task.exception()}
            )

    def _resume(self, listener: socket.socket) -> None:
        self._loop.add_reader(listener, self._accept, listener)

    def _evict(self) -> None:
        count: dict[str, int] = {}
        for stranger in self._strangers:
            count[stranger.host] = count.get(stranger.host, 0) + 1
        most = max(count.values())
        victim = next(s for s in self._strangers if count[s.host] == most)
        self._strangers.remove(victim)
        victim.evicted = True
        if victim.task is not None:
            victim.task.cancel()
        detail = f"{self._strangers_max} sockets have proved nothing; {victim.where} was closed"
        self._notices.tell("unauthenticated-max", None, detail)

    async def _receive(self, stranger: _Stranger) -> None:
        """Own a stranger until it is proved or gone."""
        sock, where = stranger.sock, stranger.where
        try:
            async with asyncio.timeout(self._timeout_s):
                first = await peek(sock)
                if not first:
                    return  # it only looked whether somebody listens, as `moshpit doctor` does
                welcome = self._welcomes.get(first[0])
                if welcome is None:
                    self._notices.tell("not-moshpit", None, f"{where} sent {first!r} first")
                    return
                stranger.handed_over = True
                await welcome(sock, where)
        except TimeoutError:
            detail = f"{where} did not prove itself within {self._timeout_s} s"
            self._notices.tell("handshake-timeout", None, detail)
        except RemoteError as error:
            self._notices.tell(error.reason, None, error.told)
        except OSError as error:
            detail = f"{where}: {error or 'the connection was reset'}"
            self._notices.tell("handshake-broken", None, detail)
        except asyncio.CancelledError:
            # The port closes, or this stranger had to make room: either way it is over.
            if not stranger.evicted:
                raise


def _not_here(address: Address, error: OSError) -> LocalError:
    """Return why this process cannot listen at an address, and what to do."""
    said = f"cannot listen at {address}: {error.strerror or error}"
    advice = _ADVICE.get(error.errno or 0)
    return LocalError(f"{said}; {advice}" if advice else said)


async def readable(sock: socket.socket) -> None:
    """Wait until a socket has something to read."""
    loop = asyncio.get_running_loop()
    ready = loop.create_future()
    loop.add_reader(sock, _set, ready)
    try:
        await ready
    finally:
        loop.remove_reader(sock)


def _set(ready: asyncio.Future[None]) -> None:
    if not ready.done():
        ready.set_result(None)


async def peek(sock: socket.socket) -> bytes:
    """Return the first byte without taking it; empty at the end of the stream."""
    while True:
        await readable(sock)
        try:
            return sock.recv(1, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            continue
