"""One of the parallel bulk connections between two peers: who opens it, and how.

One of the two dials: the one that can; where both can, the lower id. The other asks for it over
control (`BulkAsk`). A dialer that cannot get through, or whom nobody answers (a process that
hangs still has its kernel accept), asks the other to try (``reversed``). So two peers never open
connections against each other, and each new one replaces the old of the same number. Each has
fresh keys.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Final, Protocol, final

from moshpit.config import TransportConfig
from moshpit.errors import HandshakeError, RemoteError
from moshpit.transport.base import CODEC_SLACK_BYTES, Flow, Handler, LinkStats
from moshpit.transport.bulk import BulkEvents, BulkKeys, BulkLink, admit, knock, read_token
from moshpit.transport.sockets import TcpInfo, connect_any, same_machine, tcp_info, tune
from moshpit.types import Address, PeerId, short
from moshpit.wire.links import BulkAsk, BulkOffer, BulkRefused
from moshpit.wire.messages import Message

USED_TOKENS_KEPT: Final = 256  # guess: so that a reuse is named as one
OPENINGS_MAX: Final = 2  # guess: a control connection that changes can lose one offer


@final
@dataclass(slots=True)
class PairContext:
    """What all pairs of a transport share.

    Attributes:
        handler, config: the transport's.
        me: this peer.
        listens: whether others can dial this peer.
        offers: by token, the stripes that wait for a dialer.
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
    offers: dict[bytes, Stripe] = field(default_factory=dict[bytes, "Stripe"])
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
            stripe = self.offers.get(token) or await self._offer(token, where)
            await stripe.welcome(sock, where)
        except BaseException:
            sock.close()
            raise

    async def _offer(self, token: bytes, where: str) -> Stripe:
        """Wait for an offer that may still be on its way over control."""
        loop = asyncio.get_running_loop()
        awaited = self.awaited.setdefault(token, loop.create_future())
        try:
            await asyncio.wait([awaited], timeout=self.config.handshake_timeout_s / 2)
        finally:
            self.awaited.pop(token, None)
        stripe = self.offers.get(token)
        if stripe is None:
            raise HandshakeError(where, "unknown-token", "no bulk connection was offered to it")
        return stripe


class StripeEvents(BulkEvents, Protocol):
    """Who owns the stripes of a pair."""

    @property
    def congestion(self) -> str:
        """The congestion control that connections ask for; empty is the system's."""
        ...

    def dial_addresses(self) -> list[Address]:
        """Return where to dial the other side, the best first."""
        ...

    def stripe_up(self, stripe: Stripe, replaced: bool) -> None:
        """It has a new connection; ``replaced``: and had one before."""
        ...

    def stripe_cut(self, stripe: Stripe) -> None:
        """The other side has lost its end, so this end was closed."""
        ...

    def stripe_failed(self, stripe: Stripe, refused: bool, detail: str) -> None:
        """It was to be opened by this side, and cannot be."""
        ...

    def stripe_absent(self, stripe: Stripe, detail: str) -> None:
        """The other side was to open it, and did not."""
        ...


@final
class Stripe:
    """One numbered bulk connection to one peer.

    Attributes:
        index: its number; 0 is the pair's first.
        link: the open connection.
        far: whether it leads to another machine.
    """

    def __init__(
        self,
        context: PairContext,
        peer: PeerId,
        index: int,
        owner: StripeEvents,
        stats: LinkStats,
    ) -> None:
        self.index = index
        self.link: BulkLink | None = None
        self._gone = Flow()  # of connections that are
        self.far = False
        self._sock: socket.socket | None = None
        self._context = context
        self._peer = peer
        self._owner = owner
        self._stats = stats
        self._opening: asyncio.Task[None] | None = None
        self._offered: BulkKeys | None = None  # by the other side; its dial is awaited
        self._last_made = b""  # token of my last offer
        self._last_had = b""  # token of its last offer
        self._deadline: asyncio.TimerHandle | None = None
        self._admitting = False  # a dialer has proved itself; its connection is nearly open

    # --- the open connection ----------------------------------------------------------------

    def info(self) -> TcpInfo | None:
        """Return what the kernel says of the open connection."""
        return tcp_info(self._sock) if self._sock is not None else None

    @property
    def sock(self) -> socket.socket | None:
        """The open connection's socket, to be looked at only."""
        return self._sock

    def flow(self) -> Flow:
        """Return what went over this stripe to another machine."""
        self.count()
        info = self.info() if self.far else None
        if info is None:
            return self._gone
        return self._gone + Flow(info.acknowledged, 0, info.limited_s)

    def count(self) -> None:
        """Bring the byte counts of the open connection into the statistics."""
        if self.link is not None:
            if self.far:
                self._gone += Flow(0, self.link.bytes_in)
            self._stats.bulk_in += self.link.bytes_in
            self._stats.bulk_out += self.link.bytes_out
            self.link.bytes_in = self.link.bytes_out = 0

    def take_link(self) -> BulkLink | None:
        """Forget the open connection; returns it."""
        self._gone = self.flow()
        link, self.link = self.link, None
        self._sock, self.far = None, False
        return link

    def close(self) -> BulkLink | None:
        """Forget everything; returns the connection that was open."""
        self._withdraw()
        if self._opening is not None:
            self._opening.cancel()
            self._opening = None
        return self.take_link()

    # --- opening ----------------------------------------------------------------------------

    def request(self, peer_listens: bool) -> None:
        """See that this connection is opened, by one side or the other."""
        waiting = self._opening is not None or self._deadline is not None or self._admitting
        if waiting or self.link is not None:
            return
        context = self._context
        mine = not context.listens or context.me < self._peer
        if peer_listens and mine:
            self._opening = context.spawn(self._open())
        else:
            self._ask(reversed_roles=False)

    def control_renewed(self) -> None:
        """A new control connection: what was on its way on the old one may be lost."""
        self._last_made = b""
        self._last_had = b""

    def _ask(self, *, reversed_roles: bool) -> None:
        self._context.send(self._peer, BulkAsk(self._last_had, reversed_roles, self.index))
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
        self._owner.stripe_absent(self, f"no bulk connection came within {wait_s} s")

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
        failure: Exception = OSError("it has no address that can be dialled")
        answered = True
        failed: list[str] = []  # tried last
        for _ in range(OPENINGS_MAX):
            try:
                sock, where = await connect_any(
                    sorted(self._owner.dial_addresses(), key=lambda a: str(a) in failed),
                    context.config.dial_timeout_s,
                    self._owner.congestion,
                )
            except OSError as error:
                failure, answered = error, False
                break
            try:
                link = await self._knock(sock, where)
            except (OSError, RemoteError) as error:  # TimeoutError is an OSError
                failure, answered = error, not isinstance(error, TimeoutError)
                failed.append(where)
                continue
            self._opening = None
            self._up(link, sock)
            return
        self._opening = None
        if not answered and context.listens and not reversed_roles:
            self._ask(reversed_roles=True)
            return
        if not answered:
            context.send(self._peer, BulkRefused("unreachable", self.index))
        refused = isinstance(failure, ConnectionRefusedError)
        detail = str(failure) or "it did not open in time"
        self._owner.stripe_failed(self, refused, f"no bulk connection: {detail}")

    async def _knock(self, sock: socket.socket, where: str) -> BulkLink:
        """Offer keys over control and open the connection by them; owns the socket."""
        context = self._context
        keys = BulkKeys.fresh(context.config.sealed)
        try:
            self._last_made = keys.token
            context.send(self._peer, keys.offer(self.index))
            async with asyncio.timeout(context.config.handshake_timeout_s):
                await knock(sock, keys, where)
            link = self._new_link(keys)
            await asyncio.get_running_loop().create_connection(lambda: link, sock=sock)
        except BaseException:
            sock.close()
            raise
        return link

    def _new_link(self, keys: BulkKeys) -> BulkLink:
        payload_max = self._context.config.chunk_bytes + CODEC_SLACK_BYTES
        return BulkLink(self._peer, keys, payload_max, self._owner)

    async def welcome(self, sock: socket.socket, where: str) -> None:
        """Take a connection that came with the token of this stripe's offer; owns the socket.

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
            self._admitting = True
            self._context.used.append(keys.token)
            tune(sock, self._owner.congestion)
            link = self._new_link(keys)
            await asyncio.get_running_loop().connect_accepted_socket(lambda: link, sock)
        except BaseException:
            sock.close()
            raise
        finally:
            self._admitting = False
        self._up(link, sock)

    def _up(self, link: BulkLink, sock: socket.socket) -> None:
        old = self.take_link()
        self.link, self._sock, self.far = link, sock, not same_machine(sock)
        if old is not None:
            old.abort()
        self._owner.stripe_up(self, old is not None)

    # --- what the other side says over control ------------------------------------------------

    def handle(self, message: BulkOffer | BulkAsk | BulkRefused) -> None:
        """Take a control message about this connection; raises `WireError`."""
        match message:
            case BulkOffer():
                keys = BulkKeys.offered(message, short(self._peer))
                if keys.sealed != self._context.config.sealed:
                    self._context.send(self._peer, BulkRefused("plaintext-mismatch", self.index))
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
                self._owner.stripe_absent(self, f"bulk refused: {message.reason[:80]}")

    def _asked(self, *, reversed_roles: bool) -> None:
        if self._opening is not None:
            return
        # If it asks although it has had my offer, its end is gone, whatever mine looks like.
        link = self.take_link()
        if link is not None:
            link.abort()
        if reversed_roles:
            self._withdraw()
        self._opening = self._context.spawn(self._open(reversed_roles=reversed_roles))
        if link is not None:
            self._owner.stripe_cut(self)
