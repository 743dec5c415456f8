"""The transport of real swarms: TLS for control, sealed chunks for bulk, one open port.

`Port` sorts who connects, `Doors` proves control connections, a `BulkPair` per peer keeps its
bulk connection. Here is what holds them together: the peers, their queues, and their losses.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Final, TypeVar, final

from moshpit.config import TransportConfig
from moshpit.errors import (
    ClosedError,
    LocalError,
    RemoteError,
    UnreachableError,
    WireError,
)
from moshpit.events import Notice
from moshpit.identity.certificates import server_tls
from moshpit.identity.keys import PeerKey
from moshpit.identity.tickets import admission_fault
from moshpit.transport import bulk, handshake
from moshpit.transport.base import CODEC_SLACK_BYTES, Bulk, Flow, Handler, LinkStats, Transport
from moshpit.transport.control import ControlLink
from moshpit.transport.doors import CLOSE_S, Doors
from moshpit.transport.handshake import Proved
from moshpit.transport.notices import KEY_IN_USE, NoticeLimiter
from moshpit.transport.pair import BulkPair
from moshpit.transport.port import TLS_RECORD, Port
from moshpit.transport.sockets import COUNTS_FLOW
from moshpit.transport.state import PeerState
from moshpit.transport.stripes import PairContext
from moshpit.types import Address, PeerId, RunId, short
from moshpit.wire.framing import ChunkHeader, decode_message, encode_message
from moshpit.wire.links import BulkAsk, BulkOffer, BulkRefused, LinkClose, LinkProbe
from moshpit.wire.messages import Admission, Message

T = TypeVar("T")

STATES_PER_LINK: Final = 4  # guess: peers remembered beyond those connected
ADDRESSES_TRIED: Final = 8  # guess: a record can name many
REMEMBERED_MAX: Final = 20_000  # as peers_max


@final
class TcpTransport(Transport):
    """Real sockets (see the module's text).

    Args:
        key: this peer's key.
        run: the run.
        admission: this peer's admission to it, from `Ticket.admit`.
        config: limits and waits.
        listen: where to listen (port 0: any free one); None for clients.
        known: whether a peer has been in the run before; it may come back although its
            invite has expired.
        now: Unix time, for the expiry of invites.
    """

    def __init__(
        self,
        key: PeerKey,
        run: RunId,
        admission: Admission,
        config: TransportConfig,
        *,
        listen: Address | None = None,
        known: Callable[[PeerId], bool] = lambda peer: False,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._config = config
        self._listen = listen
        self._known = known
        self._now = now
        self._run = run
        self._server_tls = server_tls(key.private)
        self._me = handshake.Self(
            key=key,
            run=run,
            admission=admission,
            sealed=config.sealed,
            listens=listen is not None,
            instance=secrets.token_bytes(16),
            judge=self._judge,
            certificate=self._server_tls.certificate,
        )
        self._peers: dict[PeerId, PeerState] = {}
        self._proved_before: dict[PeerId, None] = {}
        self._tasks: list[asyncio.Task[Any]] = []
        self._owners: dict[ControlLink, PeerState] = {}
        self._port: Port | None = None
        self._closed = False
        self.addresses: tuple[Address, ...] = ()

    # --- life -----------------------------------------------------------------------------

    async def start(self, handler: Handler) -> None:
        """See `Transport.start`."""
        self._loop = asyncio.get_running_loop()
        self._handler = handler
        self._notices = NoticeLimiter(handler.on_notice, self._loop.time)
        self._context = PairContext(
            handler=handler,
            config=self._config,
            me=self._me.key.peer,
            listens=self._me.listens,
            spawn=self._own,
            send=self.send,
            failed=self._give_up,
        )
        self._doors = Doors(self, self._me, self._config, self._server_tls.context, self._notices)
        if self._listen is not None:
            welcomes = {TLS_RECORD: self._doors.welcome, bulk.MAGIC[0]: self._context.welcome}
            self._port = Port(
                welcomes,
                self._notices,
                self._config.handshake_timeout_s,
                self._config.unauthenticated_max,
            )
            self.addresses = (await self._port.open(self._listen),)

    async def close(self) -> None:
        """See `Transport.close`."""
        self._closed = True
        if self._port is not None:
            await self._port.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        ending: list[ControlLink | bulk.BulkLink] = []
        for state in self._peers.values():
            ending += state.pair.close(graceful=True)
            if state.link is not None:
                state.link.send(encode_message(LinkClose("closing")))
                state.link.close()
        ending += self._doors.links
        self._peers.clear()
        gone = [link.closed for link in ending]
        if gone:
            await asyncio.wait(gone, timeout=CLOSE_S)
        for link in ending:
            if not link.closed.done():
                link.abort()
        if gone:
            await asyncio.wait(gone)

    def _spawn(self, work: Coroutine[None, None, T]) -> asyncio.Task[T]:
        task = self._loop.create_task(work)
        self._tasks.append(task)
        task.add_done_callback(self._tasks.remove)
        return task

    def _own(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Spawn a task that nobody awaits; if it fails, that is a bug and the loop says so."""
        task = self._spawn(work)
        task.add_done_callback(self._report)
        return task

    def _report(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and task.exception() is not None:
            self._loop.call_exception_handler(
                {"message": "a task of the transport failed", "exception": task.exception()}
            )

    # --- use ------------------------------------------------------------------------------

    def connected(self, peer: PeerId) -> bool:
        """See `Transport.connected`."""
        state = self._peers.get(peer)
        return state is not None and state.usable is not None

    def remote(self, peer: PeerId) -> Address | None:
        """See `Transport.remote`."""
        state = self._peers.get(peer)
        return state.link.remote if state is not None and state.link is not None else None

    def stats(self, peer: PeerId) -> LinkStats:
        """See `Transport.stats`."""
        state = self._peers.get(peer)
        if state is None:
            return LinkStats()
        state.pair.count()
        self._count(state)
        return replace(state.stats)

    def flow(self) -> Flow | None:
        """See `Transport.flow`."""
        total = sum((state.pair.flow() for state in self._peers.values()), Flow())
        return total if COUNTS_FLOW else None

    def bulk(self, peer: PeerId) -> Bulk | None:
        """See `Transport.bulk`."""
        state = self._peers.get(peer)
        return state.pair if state is not None and COUNTS_FLOW else None

    def send(self, peer: PeerId, message: Message) -> None:
        """See `Transport.send`."""
        if self._closed:
            return
        frame = encode_message(message)
        if len(frame) > self._config.control_frame_bytes_max:
            raise LocalError(
                f"a {type(message).__name__} of {len(frame)} bytes is over the limit of "
                f"{self._config.control_frame_bytes_max}; nobody would take it"
            )
        state = self.state_of(peer)
        state.used_at = self._loop.time()
        link = state.usable
        waiting = state.queue_bytes if link is None else link.backlog
        if waiting + len(frame) > self._config.control_queue_bytes_max:
            self._handler_soon(Notice("control-queue-full", peer, f"{waiting} bytes wait"))
            self._give_up(peer, False, "its control queue is full")
        elif link is not None:
            link.send(frame)
        else:
            state.queue.append(frame)
            state.queue_bytes += len(frame)
            self._ensure_dial(state)

    def send_chunk(self, peer: PeerId, header: ChunkHeader, payload: memoryview) -> bool:
        """See `Transport.send_chunk`."""
        if payload.nbytes != header.length:
            raise LocalError(f"a chunk of {payload.nbytes} bytes with a header for {header.length}")
        limit = self._config.chunk_bytes + CODEC_SLACK_BYTES
        if header.length > limit:
            raise LocalError(f"a chunk of {header.length} bytes is over the limit of {limit}")
        if self._closed:
            return False
        state = self.state_of(peer)
        state.used_at = self._loop.time()
        return state.pair.send_chunk(header, payload)

    def drop(self, peer: PeerId, reason: str) -> None:
        """See `Transport.drop`."""
        state = self._peers.get(peer)
        if state is not None:
            self._cut(state, reason)

    async def dial(self, address: Address, expect: PeerId | None = None) -> PeerId:
        """See `Transport.dial`."""
        if self._closed:
            raise ClosedError("the transport is closed")
        if expect is not None and self.connected(expect):
            return expect
        try:
            return await self._spawn(self._doors.connect(address, expect))
        except asyncio.CancelledError:
            if self._closed:
                raise ClosedError("the transport was closed while it dialled") from None
            raise

    async def reach(self, address: Address, expect: PeerId) -> None:
        """See `Transport.reach`."""
        if self._closed:
            raise ClosedError("the transport is closed")
        try:
            await self._spawn(self._doors.reach(address, expect))
        except asyncio.CancelledError:
            if self._closed:
                raise ClosedError("the transport was closed while it dialled") from None
            raise

    # --- peers ----------------------------------------------------------------------------

    def state_of(self, peer: PeerId) -> PeerState:
        """See `DoorsHost`."""
        state = self._peers.get(peer)
        if state is None:
            if peer == self._me.key.peer:
                raise LocalError("a peer sends nothing to itself")
            self._prune()
            stats = LinkStats()
            state = PeerState(peer, BulkPair(self._context, peer, stats), stats)
            self._peers[peer] = state
        return state

    def _prune(self) -> None:
        """Forget peers that have gone, when they are many."""
        if len(self._peers) < STATES_PER_LINK * self._config.links_max:
            return
        for peer, state in list(self._peers.items()):
            busy = state.link or state.dialling or state.proving or state.waiters or state.queue
            if not busy and not state.pair.active and not state.lost_planned:
                del self._peers[peer]

    def _count(self, state: PeerState) -> None:
        if state.link is not None:
            state.stats.control_in += state.link.bytes_in
            state.stats.control_out += state.link.bytes_out
            state.link.bytes_in = state.link.bytes_out = 0

    def _cut(self, state: PeerState, reason: str) -> None:
        """End everything with a peer and tell it why."""
        state.queue.clear()
        state.queue_bytes = 0
        state.pair.close()
        if state.dialling is not None and state.dialling is not asyncio.current_task():
            state.dialling.cancel()
            state.dialling = None
        link = state.link
        if link is not None:
            self._count(state)
            state.link = None
            state.draining = False
            link.send(encode_message(LinkClose(reason[: handshake.DETAIL_MAX])))
            link.close()
            state.change()

    def _give_up(self, peer: PeerId, refused: bool, detail: str) -> None:
        """Cut a peer off and say so, but not from within the caller's call."""
        state = self.state_of(peer)
        self._cut(state, detail)
        if not state.lost_planned:
            state.lost_planned = True
            self._loop.call_soon(self._lost, state, refused, detail)

    def _lost(self, state: PeerState, refused: bool, detail: str) -> None:
        state.lost_planned = False
        if not self._closed:
            self._handler.on_lost(state.peer, refused, detail)

    def _handler_soon(self, notice: Notice) -> None:
        self._loop.call_soon(self._handler.on_notice, notice)

    def _judge(self, peer: PeerId, admission: Admission, dialled: bool) -> str:
        """Say what is wrong with a peer's admission.

        Expiry keeps out who is new. Not so who was in before, and not a peer that was dialled:
        its address is in the ticket or in a member's record, and members outlive their invites.
        """
        was_in = dialled or peer in self._proved_before or self._known(peer)
        return admission_fault(admission, self._run, peer, None if was_in else self._now())

    # --- dialling -------------------------------------------------------------------------

    def _ensure_dial(self, state: PeerState) -> None:
        # A link that is closing has its peer dialled again when it is gone.
        if state.dialling is not None or state.link is not None:
            return
        if not self._addresses(state):
            self._give_up(state.peer, False, "it has no address that can be dialled")
            return
        state.dialling = self._own(self._dial_peer(state))

    def _addresses(self, state: PeerState) -> list[Address]:
        return state.pair.dial_addresses()[:ADDRESSES_TRIED]

    async def _dial_peer(self, state: PeerState) -> None:
        """Try a peer's addresses, once each; `on_lost` if none leads to it."""
        refused = True
        detail = "it has no address that can be dialled"
        for address in self._addresses(state):
            try:
                await self._doors.connect(address, state.peer)
                break
            except UnreachableError as error:
                refused = refused and error.reason == "refused"
                detail = str(error)
            except RemoteError as error:
                refused = False
                detail = str(error)
                code = KEY_IN_USE if error.reason == "duplicate-key" else error.reason
                self._notices.tell(code, state.peer, detail)
        state.dialling = None
        if state.link is None:
            self._give_up(state.peer, refused, detail)

    # --- links ----------------------------------------------------------------------------

    def establish(
        self, state: PeerState, link: ControlLink, proved: Proved, address: Address | None
    ) -> None:
        """See `DoorsHost`; replaces any other connection to this peer."""
        self._count(state)
        old, state.link = state.link, link
        if old is not None:
            self._owners.pop(old, None)
            old.abort()
        self._owners[link] = state
        link.where = short(state.peer)
        replaced = state.meet(proved, address)
        state.used_at = self._loop.time()
        self._remember(state.peer)
        for frame in state.queue:
            link.send(frame)
        state.queue.clear()
        state.queue_bytes = 0
        link.open(self)
        state.change()
        self._handler.on_link(state.peer, proved.admission)
        if replaced:
            state.pair.begin_again()
        state.pair.control_answered()
        self.make_room()

    def _remember(self, peer: PeerId) -> None:
        self._proved_before[peer] = None
        if len(self._proved_before) > REMEMBERED_MAX:
            del self._proved_before[next(iter(self._proved_before))]

    def owner(self, link: ControlLink) -> PeerState | None:
        """See `DoorsHost`."""
        return self._owners.get(link)

    def make_room(self) -> bool:
        """See `DoorsHost`."""
        return not self._full() or self._evict()

    def _full(self) -> bool:
        return sum(s.link is not None for s in self._peers.values()) >= self._config.links_max

    def _evict(self) -> bool:
        """Ask the peer that was quiet longest, and can be dialled again, to close its link."""
        idle = [
            s
            for s in self._peers.values()
            if s.usable is not None and not s.pair.active and self._addresses(s)
        ]
        if not idle:
            return False
        state = min(idle, key=lambda s: s.used_at)
        link = state.link
        assert link is not None
        link.send(encode_message(LinkClose("idle")))
        state.draining = True
        state.farewell = "idle"
        self._loop.call_later(CLOSE_S, link.close)
        return True

    # --- a link's events (ControlEvents) ---------------------------------------------------

    def control_frame(self, link: ControlLink, body: bytes) -> None:
        """See `ControlEvents`."""
        state = self._owners.get(link)
        if state is None or state.link is not link:
            return
        state.used_at = self._loop.time()
        try:
            message = decode_message(body, link.where)
            match message:
                case LinkProbe():
                    self._probe(state, link, message)
                case LinkClose():
                    state.farewell = message.reason or "closed"
                    link.close()
                case BulkOffer() | BulkAsk() | BulkRefused():
                    state.pair.handle(message)
                case _:
                    self._handler.on_message(state.peer, message)
        except WireError as error:
            self.control_fault(link, error)

    def _probe(self, state: PeerState, link: ControlLink, message: LinkProbe) -> None:
        if not message.reply:
            link.send(encode_message(LinkProbe(reply=True)))
            return
        state.pair.control_answered()
        if state.probed is not None and not state.probed.done():
            state.probed.set_result(None)

    def control_fault(self, link: ControlLink, error: WireError) -> None:
        """See `ControlEvents`."""
        state = self._owners.get(link)
        if state is not None:
            self._handler.on_notice(Notice(error.reason, state.peer, error.detail))
            self._give_up(state.peer, False, f"it was refused: {error.reason}")

    def control_closed(self, link: ControlLink, detail: str) -> None:
        """See `ControlEvents`."""
        state = self._owners.pop(link, None)
        if state is None or state.link is not link or self._closed:
            return
        self._count(state)
        state.link = None
        state.draining = False
        state.change()
        farewell, state.farewell = state.farewell, ""
        if farewell == "idle":
            state.pair.close()
            if state.queue:
                self._ensure_dial(state)
        elif farewell:
            self._give_up(state.peer, farewell == "closing", f"it closed the link: {farewell}")
        elif state.dialling is None:
            if self._addresses(state):
                state.dialling = self._own(self._dial_peer(state))
            else:
                self._give_up(state.peer, False, f"its link was lost: {detail}")
