"""How control connections come to be: by dialling, and by being dialled.

*One control connection per pair.* Two peers that dial each other at once agree without another
message. A dialer numbers its dials, and sends its proof only while it has no connection to that
peer. A peer that receives a proof while its own proof is under way keeps the lower id's dial:
it refuses the other one as ``crossed``, or gives up its own and says so (``void``: my dials up
to this number are given up). So a proof that arrives where a connection exists is either void,
or says that the connection is dead at the other end, and replaces it. A proof by another
process with the same key is refused (``duplicate-key``) if the old connection still answers.

Messages wait in the peer's queue until the one connection is up, so none is lost in a crossing.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Final, Protocol, final

from moshpit.config import TransportConfig
from moshpit.errors import HandshakeError, RemoteError, UnreachableError
from moshpit.identity.certificates import client_tls
from moshpit.transport import handshake
from moshpit.transport.control import ControlLink
from moshpit.transport.handshake import CrossedError, Greeting, Proved, WithdrawnError
from moshpit.transport.notices import NoticeLimiter
from moshpit.transport.sockets import connect_any, tune
from moshpit.transport.state import PeerState
from moshpit.types import Address, PeerId, short
from moshpit.wire.framing import encode_message
from moshpit.wire.links import LinkProbe

CLOSE_S: Final = 1.0  # guess: how long a connection may take to close politely
PROBE_S: Final = 1.0  # guess: how soon a living connection answers a probe


class DoorsHost(Protocol):
    """The transport, as its doors see it."""

    def state_of(self, peer: PeerId) -> PeerState:
        """Return what is known of a peer, making it if it is new."""
        ...

    def owner(self, link: ControlLink) -> PeerState | None:
        """Return whose established connection this is."""
        ...

    def make_room(self) -> bool:
        """Whether one more connection may be established."""
        ...

    def establish(
        self, state: PeerState, link: ControlLink, proved: Proved, address: Address | None
    ) -> None:
        """Make a proved connection the one to its peer."""
        ...


@final
class Doors:
    """Makes proved control connections and hands them to its host.

    Attributes:
        links: connections that are not gone yet, proved or not.
    """

    def __init__(
        self,
        host: DoorsHost,
        me: handshake.Self,
        config: TransportConfig,
        server: ssl.SSLContext,
        notices: NoticeLimiter,
    ) -> None:
        self.links: list[ControlLink] = []
        self._host = host
        self._me = me
        self._config = config
        self._server_tls = server
        self._client_tls = client_tls()
        self._notices = notices
        self._loop = asyncio.get_running_loop()
        self._attempts = 0

    # --- dialling -------------------------------------------------------------------------

    async def connect(self, address: Address, expect: PeerId | None) -> PeerId:
        """Dial an address and prove both sides; returns who is there, connected."""
        async with self._dialled(address, expect) as (link, greeting):
            return await self._prove(link, greeting, address)

    async def reach(self, address: Address, expect: PeerId) -> None:
        """Dial an address, see that ``expect`` answers there with its key, and leave."""
        async with self._dialled(address, expect) as (link, _):
            handshake.withdraw(link, "it only wanted to see who answers")

    @asynccontextmanager
    async def _dialled(
        self, address: Address, expect: PeerId | None
    ) -> AsyncGenerator[tuple[ControlLink, Greeting]]:
        """Give a link to the server at an address, which has shown whose it is.

        Whatever goes wrong, also in the block, comes out as the errors of `Transport.dial`; a
        link that is nobody's at the end is closed.
        """
        if expect == self._me.key.peer:
            raise HandshakeError(str(address), "self-dial", "a peer cannot dial itself")
        try:
            sock, where = await connect_any((address,), self._config.dial_timeout_s)
        except OSError as error:
            raise _unreached(address, error) from error
        link = self._new_link(where)
        try:
            async with asyncio.timeout(self._config.handshake_timeout_s):
                await self._loop.create_connection(
                    lambda: link,
                    sock=sock,
                    ssl=self._client_tls,
                    server_hostname="",
                    ssl_shutdown_timeout=CLOSE_S,
                )
                self._track(link)
                greeting = await handshake.greet_server(link, self._me, expect)
                if greeting.peer == self._me.key.peer:
                    raise self._myself(str(address), greeting.instance)
                yield link, greeting
        except TimeoutError as error:
            detail = f"no answer within {self._config.handshake_timeout_s:g} s"
            raise HandshakeError(where, "handshake-timeout", detail) from error
        except OSError as error:
            raise HandshakeError(where, "handshake-broken", str(error)) from error
        except asyncio.CancelledError:
            if link in self.links and not link.proof_sent:
                handshake.withdraw(link, "it gave this dial up")
            raise
        finally:
            if self._host.owner(link) is None:
                link.close()  # the loop owns the socket, also where TLS did not come up

    async def _prove(self, link: ControlLink, greeting: Greeting, address: Address) -> PeerId:
        """Prove this peer on a link, unless the two are connected otherwise meanwhile."""
        state = self._host.state_of(greeting.peer)
        while state.proving:
            await state.changed()
        if state.link is not None and state.link.alive:
            handshake.withdraw(link, "the two are connected otherwise meanwhile")
            return state.peer
        self._attempts += 1
        state.proving = greeting.instance
        link.proof_sent = True
        try:
            proved = await handshake.prove_to_server(link, self._me, greeting, self._attempts)
        except CrossedError:
            while state.link is None:  # within the deadline of the handshake
                await state.changed()
            return state.peer
        finally:
            state.proving = b""
            state.change()
        other = state.proved if state.link is not None else None
        if other is None or other.attempt <= proved.void:
            self._host.establish(state, link, proved, address)
        return state.peer

    def _myself(self, where: str, instance: bytes) -> HandshakeError:
        if instance == self._me.instance:
            return HandshakeError(where, "self-dial", "this peer listens there itself")
        return HandshakeError(
            where, "duplicate-key", "another process uses this peer's key: give it its own"
        )

    # --- being dialled --------------------------------------------------------------------

    async def welcome(self, sock: socket.socket, where: str) -> None:
        """Prove a dialer, or tell it why not; owns the socket."""
        tune(sock)
        link = self._new_link(where)
        try:
            await self._loop.connect_accepted_socket(
                lambda: link, sock, ssl=self._server_tls, ssl_shutdown_timeout=CLOSE_S
            )
            self._track(link)
            greeting, proved = await handshake.greet_dialer(link, self._me)
            refusal = await self._refusal(proved, where)
            if refusal is not None:
                handshake.reject(link, refusal.reason, refusal.detail)
                raise refusal
            handshake.prove_to_dialer(link, self._me, greeting, proved.peer, self._attempts)
            self._host.establish(self._host.state_of(proved.peer), link, proved, None)
        except (CrossedError, WithdrawnError):
            return  # no fault: this peer's own dial stays, or the dialer needs none any more
        except RemoteError as error:
            self._notices.tell(error.reason, link.proved, error.told)
        finally:
            if self._host.owner(link) is None:
                link.close()  # the loop owns the socket, also where TLS did not come up

    async def _refusal(self, proved: Proved, where: str) -> RemoteError | None:
        """Decide about a proved dialer: None, or why it is refused (see the module's text)."""
        if proved.peer == self._me.key.peer:
            return self._myself(where, proved.instance)
        state = self._host.state_of(proved.peer)
        while state.link is not None and state.proved is not None:
            if state.proved.instance == proved.instance:
                if proved.attempt <= state.proved.void:
                    return CrossedError(where, "crossed", "a later connection exists")
                return None  # it would not dial if it still had the old one
            if await self._answers(state, state.link):
                detail = f"another process with the key of {short(proved.peer)} is connected"
                return HandshakeError(where, "duplicate-key", detail)
        if state.proving == proved.instance and self._me.key.peer < proved.peer:
            return CrossedError(where, "crossed", "the lower id's dial stays")
        if not self._host.make_room():
            return HandshakeError(where, "full", f"{self._config.links_max} links")
        return None

    async def _answers(self, state: PeerState, link: ControlLink) -> bool:
        """Ask whether a connection is alive; if not, forget it."""
        if state.probed is None or state.probed.done():
            state.probed = self._loop.create_future()
        link.send(encode_message(LinkProbe(reply=False)))
        done, _ = await asyncio.wait(
            [state.probed], timeout=min(PROBE_S, self._config.handshake_timeout_s / 2)
        )
        if done:
            return True
        if state.link is link:
            state.link = None
            link.abort()
        return False

    def _new_link(self, where: str) -> ControlLink:
        config = self._config
        return ControlLink(where, config.handshake_frame_bytes_max, config.control_frame_bytes_max)

    def _track(self, link: ControlLink) -> None:
        self.links.append(link)
        link.closed.add_done_callback(lambda _: self.links.remove(link))


def _unreached(address: Address, error: OSError) -> UnreachableError:
    if isinstance(error, ConnectionRefusedError):
        return UnreachableError(str(address), "refused", "nobody listens there")
    return UnreachableError(str(address), "unreachable", str(error).removeprefix(f"{address}: "))
