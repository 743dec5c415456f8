"""Asking the router to let others in: UPnP port mappings, by the package miniupnpc.

A router that speaks UPnP is found by a question to everybody on the local network (SSDP), and
forwards a TCP port for as long as it is asked to (a lease, renewed at half of its time). The
mapping is removed at the end. The package's calls block, so they have a thread of their own.

Whether others really get in, they say themselves: see `moshpit.runtime.reach`.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol, TypeVar, cast, final
from urllib.parse import urlsplit

from moshpit.errors import ConfigError
from moshpit.types import Address

LEASE_S: Final = 3600  # guess: a peer that dies without a word leaves the port open for so long
DISCOVER_MS: Final = 2000  # as miniupnpc's own client
TRY_AGAIN_S: Final = 300.0  # guess: a router may have been restarting
PORTS_TRIED: Final = 5  # guess: other machines of this network may have taken the first ones
CLOSE_S: Final = 3.0  # guess: how long the end may wait for a router
DESCRIPTION: Final = "moshpit"
T = TypeVar("T")


class _Gateway(Protocol):
    """Of `miniupnpc.UPnP`, what is used here."""

    discoverdelay: int
    lanaddr: str

    def discover(self) -> int: ...
    def selectigd(self) -> str: ...
    def externalipaddress(self) -> str: ...
    def getspecificportmapping(self, port: int, protocol: str) -> tuple[str, int] | None: ...
    def addportmapping(  # noqa: PLR0917 - the package takes no names
        self, outside: int, protocol: str, host: str, port: int, what: str, remote: str, lease: int
    ) -> bool: ...
    def deleteportmapping(self, port: int, protocol: str) -> bool: ...


@final
@dataclass(frozen=True, slots=True)
class Mapping:
    """A port that the router forwards.

    Attributes:
        outside: where the world can dial it.
        by: the router, as people know it.
        again_s: seconds until it is to be asked again.
    """

    outside: Address
    by: str
    again_s: float


@final
@dataclass(frozen=True, slots=True)
class NoMapping:
    """There is none, and why."""

    detail: str
    again_s: float = TRY_AGAIN_S


class _FailedError(Exception):
    """Says in words why there is no mapping."""


@final
class PortMapper:
    """Keeps one TCP port of the router mapped. Used in the network's loop only.

    Raises:
        ConfigError: the package is not installed.
    """

    def __init__(self) -> None:
        try:
            module = importlib.import_module("miniupnpc")
        except ImportError:
            raise ConfigError(
                "UPnP needs the package miniupnpc: pip install 'moshpit[upnp]'. Or leave it out, "
                "and forward the port by hand; docs/howto/behind-a-router.md"
            ) from None
        self._make = cast(Callable[[], _Gateway], module.UPnP)
        self._gateway: _Gateway | None = None
        self._router = ""
        self._outside = 0  # the port that is mapped; 0: none
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        # Made at once: at the interpreter's end no thread can be started any more.
        self._thread = threading.Thread(target=self._run, name="moshpit-upnp", daemon=True)
        self._thread.start()

    async def map(self, listening: Address) -> Mapping | NoMapping:
        """Map the port that this peer listens at, or renew that."""
        return await self._call(lambda: self._map(listening))

    async def close(self) -> None:
        """Take the mapping back, if the router answers soon. Idempotent."""
        if self._outside:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._call(self._unmap), CLOSE_S)
        self._work.put(None)

    # --- the thread -----------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    async def _call(self, function: Callable[[], T]) -> T:
        """Run a function in the thread."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(cast(T, result))

        def work() -> None:
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop may be gone: nobody waits
                loop.call_soon_threadsafe(settle, result, failure)

        self._work.put(work)
        return await future

    def _map(self, listening: Address) -> Mapping | NoMapping:
        try:
            gateway = self._find()
            host = gateway.lanaddr if listening.wildcard else listening.host
            outside = _outside_address(gateway, self._router)
            self._outside = self._add(gateway, host, listening.port)
        except _FailedError as error:
            self._gateway = None  # look for another one the next time
            return NoMapping(str(error))
        return Mapping(Address(outside, self._outside), self._router, LEASE_S / 2)

    def _find(self) -> _Gateway:
        if self._gateway is not None:
            return self._gateway
        gateway = self._make()
        gateway.discoverdelay = DISCOVER_MS
        url = ""
        with contextlib.suppress(
            Exception
        ):  # the package raises nothing else, even if none is there
            gateway.discover()
            url = gateway.selectigd()
        if not url:
            raise _FailedError(
                "no router of this network answers: UPnP may be switched off in it. Switch it on, "
                "or forward the port by hand; docs/howto/behind-a-router.md"
            )
        self._router = f"the router at {urlsplit(url).hostname or url}"
        self._gateway = gateway
        return gateway

    def _add(self, gateway: _Gateway, host: str, port: int) -> int:
        """Have a port forwarded, if possible the same; return which."""
        refusals: list[str] = []
        first = self._outside or port
        for outside in range(first, min(first + PORTS_TRIED, 65536)):
            try:
                taken = gateway.getspecificportmapping(outside, "TCP")
                if taken is not None and tuple(taken[:2]) != (host, port):
                    refusals.append(f"{outside} leads to {taken[0]}:{taken[1]}")
                    continue
                _add_leased(gateway, outside, host, port)
            except Exception as error:
                refusals.append(f"{outside}: {error}")
                continue
            return outside
        self._outside = 0
        raise _FailedError(f"{self._router} maps no port to {host}:{port}: {', '.join(refusals)}")

    def _unmap(self) -> None:
        port, self._outside = self._outside, 0
        if self._gateway is not None:
            # The lease ends by itself where this fails.
            with contextlib.suppress(Exception):
                self._gateway.deleteportmapping(port, "TCP")


def _outside_address(gateway: _Gateway, router: str) -> str:
    try:
        address = gateway.externalipaddress()
        outside = ipaddress.ip_address(address)
    except Exception as error:
        raise _FailedError(f"{router} does not know its own outside address: {error}") from error
    if not outside.is_global:
        raise _FailedError(
            f"{router} has the outside address {address}, which the world cannot dial: another "
            "router, perhaps the provider's, is before it. Go on as a client (--role client)"
        )
    return address


def _add_leased(gateway: _Gateway, outside: int, host: str, port: int) -> None:
    """Add a mapping that ends by itself; where the router cannot do that, one that does not."""
    try:
        gateway.addportmapping(outside, "TCP", host, port, DESCRIPTION, "", LEASE_S)
    except Exception as error:
        if "permanent" not in str(error).lower():
            raise
        gateway.addportmapping(outside, "TCP", host, port, DESCRIPTION, "", 0)
