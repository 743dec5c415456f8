"""The bulk connection between this peer and another: who opens it, when, and what if it fails.

One of the two dials: the one that can; where both can, the lower id. The other asks for it over
control (`BulkAsk`). A dialer that cannot get through asks the other to try (``reversed``). So
two peers never open connections against each other, and each new one replaces the old.

A peer that leaves says so over control and then closes both. When only the end of the bulk
connection is seen, the control connection is probed: what comes first, the farewell or the
answer, tells a departure from a loss. So only losses are told (``bulk-lost``).
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Final, final

from moshpit.config import TransportConfig
from moshpit.errors import HandshakeError, RemoteError
from moshpit.events import Notice
from moshpit.transport.base import CODEC_SLACK_BYTES, Handler, LinkStats
from moshpit.transport.bulk import BulkKeys, BulkLink, admit, knock, read_token
from moshpit.transport.port import tune
from moshpit.types import Address, PeerId, short
from moshpit.wire.framing import ChunkHeader
from moshpit.wire.messages import BulkAsk, BulkOffer, BulkRefused, LinkProbe, Message

USED_TOKENS_KEPT: Final = 256  # guess: so that a reuse is named as one
OPENINGS_MAX: Final = 2  # guess: a control connection that changes can lose one offer
FAULTS_MAX: Final = 3  # guess: faults in a row, without a good chunk between, that end a peer


@final
@dataclass(slots=True)
class PairContext:
    """What all pairs of a transport share.

    Attributes:
        handler, config: the transport's.
        me: this peer.
        listens: whether others can dial this peer.
        offers: by token, the pairs that wait for a dialer.
        awaited: by token, who waits for an offer that may still be on its way.
        used: tokens that have opened a connection, the latest ones.
        spawn: starts a task that the transport owns.
        send: queues a control message.
        failed: called when no bulk connection can be had: peer, refused, detail.
    """

    handler: Handler
    config: TransportConfig
    me: PeerId
    listens: bool
    spawn: Callable[[Coroutine[None, None, None]], asyncio.Task[None]]
    send: Callable[[PeerId, Message], None]
    failed: Callable[[PeerId, bool, str], None]
    offers: dict[bytes, BulkPair] = field(default_factory=dict[bytes, "BulkPair"])
    awaited: dict[bytes, asyncio.Future[None]] = field(
        default_factory=dict[bytes, asyncio.Future[None]]
    )
    used: deque[bytes] = field(default_factory=lambda: deque[bytes](maxlen=USED_TOKENS_KEPT))

    async def welcome(self, sock: socket.socket, where: str) -> None:
        """Take a bulk connection that somebody was offered; owns the socket.

        Raises:
            HandshakeError, OSError: nobody was, or it does not know the keys.
        """
        try:
            token = await read_token(sock, where)
            if token in self.used:
                raise HandshakeError(where, "reused-token", "its token has been used")
            pair = self.offers.get(token) or await self._offer(token, where)
            await pair.welcome(sock, where)
        except BaseException:
            sock.close()
            raise

    async def _offer(self, token: bytes, where: str) -> BulkPair:
        """Wait for an offer that may still be on its way over control."""
        loop = asyncio.get_running_loop()
        awaited = self.awaited.setdefault(token, loop.create_future())
        try:
            await asyncio.wait([awaited], timeout=self.config.handshake_timeout_s / 2)
        finally:
            self.awaited.pop(token, None)
        pair = self.offers.get(token)
        if pair is None:
            raise HandshakeError(where, "unknown-token", "no bulk connection was offered to it")
        return pair


@final
class BulkPair:
    """The one bulk connection to one peer (implements `BulkEvents`).

    Attributes:
        peer: the other one.
        address: where its control connection was dialled, if it was; tried first.
        peer_listens: whether it can be dialled, as far as it said.
    """

    def __init__(self, context: PairContext, peer: PeerId, stats: LinkStats) -> None:
        self.peer = peer
        self.address: Address | None = None
        self.peer_listens = True
        self._context = context
        self._stats = stats
        self._link: BulkLink | None = None
        self._opening: asyncio.Task[None] | None = None
        self._offered: BulkKeys | None = None  # by the other side; its dial is awaited
        self._last_made = b""  # token of my last offer
        self._last_had = b""  # token of its last offer
        self._deadline: asyncio.TimerHandle | None = None
        self._wanted = False
        self._faults = 0
        self._ended: str | None = None  # why, while it is not clear whether the peer has left

    # --- use ------------------------------------------------------------------------------

    def send_chunk(self, header: ChunkHeader, payload: memoryview) -> bool:
        """See `Transport.send_chunk`."""
        if self._link is not None and self._link.send(header, payload):
            return True
        self._wanted = True
        if self._link is None:
            self._request()
        return False

    @property
    def active(self) -> bool:
        """Whether there is a bulk connection, or somebody wants one."""
        return self._link is not None or self._wanted

    def count(self) -> None:
        """Bring the byte counts of the open connection into the statistics."""
        if self._link is not None:
            self._stats.bulk_in += self._link.bytes_in
            self._stats.bulk_out += self._link.bytes_out
            self._link.bytes_in = self._link.bytes_out = 0

    def close(self, *, graceful: bool = False) -> BulkLink | None:
        """Forget everything; returns the connection that is closing, if there is one."""
        self._wanted = False
        self._ended = None
        self._withdraw()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        link = self._link
        if link is not None:
            self.count()
            self._link = None
            if graceful:
                link.close()
            else:
                link.abort()
        return link

    # --- opening --------------------------------------------------------------------------

    def _request(self) -> None:
        if self._opening is not None or self._deadline is not None:
            return
        context = self._context
        mine = not context.listens or context.me < self.peer
        if self.peer_listens and mine:
            self._opening = context.spawn(self._open())
        else:
            self._ask(reversed_roles=False)

    def _ask(self, *, reversed_roles: bool) -> None:
        self._context.send(self.peer, BulkAsk(self._last_had, reversed_roles))
        self._await_dialer()

    def _await_dialer(self) -> None:
        config = self._context.config
        if self._deadline is not None:
            self._deadline.cancel()
        wait_s = 2 * (config.dial_timeout_s + config.handshake_timeout_s)
        loop = asyncio.get_running_loop()
        self._deadline = loop.call_later(wait_s, self._no_dialer, wait_s)

    def _no_dialer(self, wait_s: float) -> None:
        self._withdraw()
        if self._wanted and self._link is None:
            self._context.failed(self.peer, False, f"no bulk connection came within {wait_s} s")

    def _withdraw(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
        if self._offered is not None:
            self._context.offers.pop(self._offered.token, None)
            self._offered = None

    async def _open(self, *, reversed_roles: bool = False) -> None:
        """Dial and open; the other side tries if this one cannot get through."""
        context = self._context
        failure: Exception | None = None
        for _ in range(OPENINGS_MAX):
            try:
                sock, where = await self._connect()
            except OSError as error:
                self._opening = None
                if context.listens and not reversed_roles:
                    self._ask(reversed_roles=True)
                    return
                context.send(self.peer, BulkRefused("unreachable"))
                refused = isinstance(error, ConnectionRefusedError)
                context.failed(self.peer, refused, f"no bulk connection: {error}")
                return
            try:
                link = await self._knock(sock, where)
            except (OSError, TimeoutError, RemoteError) as error:
                failure = error
                continue
            self._opening = None
            self._up(link)
            return
        self._opening = None
        detail = str(failure) or "it did not open in time"
        context.failed(self.peer, False, f"no bulk connection: {detail}")

    async def _knock(self, sock: socket.socket, where: str) -> BulkLink:
        """Offer keys over control and open the connection by them; owns the socket."""
        context = self._context
        keys = BulkKeys.fresh(context.config.sealed)
        try:
            self._last_made = keys.token
            context.send(self.peer, keys.offer())
            async with asyncio.timeout(context.config.handshake_timeout_s):
                await knock(sock, keys, where)
            link = self._new_link(keys)
            await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
        except BaseException:
            sock.close()
            raise
        return link

    def control_renewed(self) -> None:
        """A new control connection: what was on its way on the old one may be lost."""
        self._last_made = b""
        self._last_had = b""

    def control_answered(self) -> None:
        """The other side is there: what had ended was lost, and not closed by a departure."""
        if self._ended is not None:
            detail, self._ended = self._ended, None
            self._context.handler.on_notice(Notice("bulk-lost", self.peer, detail))

    async def _connect(self) -> tuple[socket.socket, str]:
        addresses = list(self._context.handler.addresses_of(self.peer))
        if self.address is not None:
            addresses = [self.address, *(a for a in addresses if a != self.address)]
        return await connect_any(addresses, self._context.config.dial_timeout_s, bulk=True)

    def _new_link(self, keys: BulkKeys) -> BulkLink:
        payload_max = self._context.config.chunk_bytes + CODEC_SLACK_BYTES
        return BulkLink(self.peer, keys, payload_max, self)

    async def welcome(self, sock: socket.socket, where: str) -> None:
        """Take a connection that came with the token of this peer's offer; owns the socket.

        Raises:
            HandshakeError, OSError: it does not know the keys.
        """
        keys = self._offered
        if keys is None:
            sock.close()
            raise HandshakeError(where, "unknown-token", "its offer was withdrawn")
        try:
            await admit(sock, keys, where)
            if self._offered is not keys:
                raise HandshakeError(where, "unknown-token", "its token was used meanwhile")
            self._withdraw()  # the token opens one connection
            self._context.used.append(keys.token)
            tune(sock, bulk=True)
            link = self._new_link(keys)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: link, sock)
        except BaseException:
            sock.close()
            raise
        self._up(link)

    def _up(self, link: BulkLink) -> None:
        old = self._link
        self.count()
        self._link = link
        if old is not None:
            old.abort()
            self._context.handler.bulk_reset(self.peer)
        if self._wanted:
            self._wanted = False
            self._context.handler.chunks_wanted(self.peer)

    # --- what the other side says over control --------------------------------------------

    def handle(self, message: BulkOffer | BulkAsk | BulkRefused) -> None:
        """Take a control message about this connection; raises `WireError`."""
        match message:
            case BulkOffer():
                keys = BulkKeys.offered(message, short(self.peer))
                if keys.sealed != self._context.config.sealed:
                    self._context.send(self.peer, BulkRefused("plaintext-mismatch"))
                    return
                self._withdraw()
                self._last_had = keys.token
                self._offered = keys
                self._context.offers[keys.token] = self
                awaited = self._context.awaited.get(keys.token)
                if awaited is not None and not awaited.done():
                    awaited.set_result(None)
                self._await_dialer()
            case BulkAsk():
                if message.last != self._last_made and self._last_made:
                    return  # my latest offer was on its way when it asked
                self._asked(reversed_roles=message.reversed)
            case BulkRefused():
                self._withdraw()
                if self._wanted and self._link is None:
                    self._context.failed(self.peer, False, f"bulk refused: {message.reason[:80]}")

    def _asked(self, *, reversed_roles: bool) -> None:
        if self._opening is not None:
            return
        broken = self._link is not None
        if self._link is not None:
            # It asks although it has had my offer: its end is gone, whatever mine looks like.
            link = self._link
            self.count()
            self._link = None
            link.abort()
        if reversed_roles:
            self._withdraw()
        self._opening = self._context.spawn(self._open(reversed_roles=reversed_roles))
        if broken:
            self._context.handler.bulk_reset(self.peer)

    # --- the connection's events ----------------------------------------------------------

    def bulk_sink(self, header: ChunkHeader) -> memoryview | None:
        """See `BulkEvents`."""
        return self._context.handler.chunk_sink(self.peer, header)

    def bulk_chunk(self, header: ChunkHeader) -> None:
        """See `BulkEvents`."""
        self._faults = 0
        self._context.handler.on_chunk(self.peer, header)

    def bulk_writable(self, link: BulkLink) -> None:
        """See `BulkEvents`."""
        if self._wanted and link is self._link:
            self._wanted = False
            self._context.handler.chunks_wanted(self.peer)

    def bulk_closed(self, link: BulkLink, fault: RemoteError | None, detail: str) -> None:
        """See `BulkEvents`."""
        if link is not self._link:
            return
        self.count()
        self._link = None
        if fault is not None:
            self._context.handler.on_notice(Notice(fault.reason, self.peer, detail))
            self._faults += 1
            if self._faults >= FAULTS_MAX:
                self._context.failed(self.peer, False, detail)
                return
        else:
            self._ended = detail
            self._context.send(self.peer, LinkProbe(reply=False))
        if self._wanted:
            self._request()
        self._context.handler.bulk_reset(self.peer)


async def connect_any(
    addresses: Sequence[Address], timeout_s: float, *, bulk: bool
) -> tuple[socket.socket, str]:
    """Connect to the first address that answers; raises the last `OSError`."""
    failure: OSError = OSError("it has no address that can be dialled")
    for address in addresses:
        try:
            async with asyncio.timeout(timeout_s):
                return await _connect(address, bulk=bulk), str(address)
        except TimeoutError:
            failure = OSError(f"{address} did not answer within {timeout_s} s")
        except ConnectionRefusedError as error:
            failure = error
        except (OSError, UnicodeError) as error:
            failure = OSError(f"{address}: {error}")
    raise failure


async def _connect(address: Address, *, bulk: bool) -> socket.socket:
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)
    failure: OSError = OSError(f"{address} has no address")
    for family, kind, proto, _, where in found:
        sock = socket.socket(family, kind, proto)
        try:
            sock.setblocking(False)
            tune(sock, bulk=bulk)
            await loop.sock_connect(sock, where)
        except OSError as error:
            sock.close()
            failure = error
            continue
        except BaseException:
            sock.close()
            raise
        return sock
    raise failure
