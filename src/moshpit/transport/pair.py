"""The bulk connections between this peer and another: how many, and what if one fails.

Usually it is one. A single connection whose congestion control takes every loss for congestion
(cubic) reaches a few percent of a long link that loses packets; several in parallel, *stripes*,
share the losses (design §6, benchmarks/longlink.py). One with BBR does not mind them; but where
several share a short queue without such losses, BBR wastes a tenth of the link by overrunning it
(decision 0018). So links begin with cubic, and where the kernel reports losses although no queue
builds up, go on with BBR; if the system does not allow that, more are opened. Chunks are named and
go over whichever has room.

A peer that leaves says so over control and then closes all. When only the end of a bulk
connection is seen, the control connection is probed: what comes first, the farewell or the
answer, tells a departure from a loss. So only losses are told (``bulk-lost``).
"""

from __future__ import annotations

import asyncio
from typing import Final, final

from moshpit.config import TransportConfig
from moshpit.errors import RemoteError, WireError
from moshpit.events import Notice
from moshpit.transport.base import Flow, LinkStats
from moshpit.transport.bulk import BulkLink
from moshpit.transport.sockets import congestion, pace, set_congestion
from moshpit.transport.stripes import PairContext, Stripe
from moshpit.types import Address, PeerId, short
from moshpit.wire.framing import ChunkHeader
from moshpit.wire.links import BulkAsk, BulkOffer, BulkRefused, LinkProbe

FAULTS_MAX: Final = 3  # guess: faults in a row, without a good chunk between, that end a peer
STRIPES_LIMIT: Final = 64  # guess: what another peer may open, whatever this one's own settings

LOOK_S: Final = 0.5  # guess: how often the losses of a link that is full are looked at
SEGMENTS_MIN: Final = 100  # guess: fewer say nothing about losses
LOOKS: Final = 2  # guess: with losses, in a row; a queue that overflows does so now and then
LOSS_MIN: Final = 1e-3  # guess: share of segments sent again at which stripes help
RTT_S_MIN: Final = 2e-3  # guess: nearer peers recover from a loss in no time
QUEUE_FREE: Final = 1.25  # guess: a round trip this much above the shortest means a queue
WIDEN: Final = 4  # guess: 1, 4, 16 ... stripes, up to stripes_max
ADAPTIVE: Final = "auto"
FIRST: Final = "cubic"
RESISTANT: Final = "bbr"
LOSS_PROOF: Final = frozenset({"bbr", "bbr2", "bbr3"})  # measured, design §6


@final
class BulkPair:
    """The bulk connections to one peer (implements `StripeEvents` and `Bulk`).

    Attributes:
        peer: the other one.
        address: where the process that it is now was dialled, if it was; tried first.
        peer_listens: whether it can be dialled, as far as it said.
        congestion: the congestion control that its connections ask for.
    """

    def __init__(self, context: PairContext, peer: PeerId, stats: LinkStats) -> None:
        self.peer = peer
        self.address: Address | None = None
        self.peer_listens = True
        self._context = context
        self._stats = stats
        self._stripes: list[Stripe] = []
        self._ceiling = _ceiling(context.config)
        self._width = max(1, min(context.config.stripes_min, self._ceiling))
        wanted = context.config.congestion
        self._adapts = wanted == ADAPTIVE
        self.congestion = FIRST if self._adapts else wanted
        self._look: asyncio.TimerHandle | None = None
        self._seen = (0, 0)  # segments sent, and sent again, at the last look
        self._lossy = 0  # looks in a row that found losses and no queue
        self._wanted = False
        self._faults = 0
        self._abandoned = False  # a connection was, and nobody has been told
        self._ended: str | None = None  # why, while it is not clear whether the peer has left

    # --- use ------------------------------------------------------------------------------

    def send_chunk(self, header: ChunkHeader, payload: memoryview) -> bool:
        """See `Transport.send_chunk`."""
        links = self._links()
        links.sort(key=lambda link: link.backlog)
        for link in links:
            if link.send(header, payload):
                return True
        self._wanted = True
        self._open_missing()
        self._watch()
        return False

    @property
    def active(self) -> bool:
        """Whether there is a bulk connection, or somebody wants one."""
        return self._wanted or any(s.link is not None for s in self._stripes)

    @property
    def width(self) -> int:
        """How many bulk connections are open."""
        return len(self._links())

    def count(self) -> None:
        """Bring the byte counts of the open connections into the statistics."""
        for stripe in self._stripes:
            stripe.count()

    def flow(self) -> Flow:
        """Return what went over these connections, if to another machine."""
        return sum((stripe.flow() for stripe in self._stripes), Flow())

    @property
    def far(self) -> bool:
        """See `Bulk`."""
        return any(stripe.far for stripe in self._stripes)

    @property
    def backlog(self) -> int:
        """See `Bulk`."""
        return sum(link.backlog for link in self._links())

    def pace(self, bytes_per_s: float) -> None:
        """See `Bulk`."""
        socks = [s.sock for s in self._stripes if s.sock is not None]
        for sock in socks:
            pace(sock, bytes_per_s / len(socks))

    def close(self, *, graceful: bool = False) -> list[BulkLink]:
        """Forget everything; returns the connections that are closing."""
        self._wanted = False
        self._ended = None
        if self._look is not None:
            self._look.cancel()
            self._look = None
        closing = [link for s in self._stripes if (link := s.close()) is not None]
        for link in closing:
            if graceful:
                link.close()
            else:
                link.abort()
        return closing

    def abandon(self) -> None:
        """Another process has taken the peer's place: close what leads to its predecessor."""
        wanted = self._wanted
        self._abandoned = bool(self.close())
        self._wanted = wanted
        self._faults = 0

    def begin_again(self) -> None:
        """The control connection to the other process is up: open what was wanted."""
        abandoned, self._abandoned = self._abandoned, False
        if self._wanted:
            self._open_missing()
            self._watch()
        if abandoned:
            self._context.handler.bulk_reset(self.peer)

    def _links(self) -> list[BulkLink]:
        return [s.link for s in self._stripes if s.link is not None]

    # --- how many -------------------------------------------------------------------------

    def _open_missing(self) -> None:
        for index in range(self._width):
            self._stripe(index).request(self.peer_listens)

    def _stripe(self, index: int) -> Stripe:
        while len(self._stripes) <= index:
            number = len(self._stripes)
            self._stripes.append(Stripe(self._context, self.peer, number, self, self._stats))
        return self._stripes[index]

    def _watch(self) -> None:
        """While the link is full, look at its losses from time to time."""
        if self._look is None and (self._adapts or self._width < self._ceiling):
            self._look = asyncio.get_running_loop().call_later(LOOK_S, self._consider)

    def _consider(self) -> None:
        """Widen the link if it is full, and losses, not a queue, hold it back."""
        self._look = None
        if not self._wanted:
            return
        self._watch()
        infos = [info for s in self._stripes if (info := s.info()) is not None]
        seen = sum(info.segments for info in infos), sum(info.retransmitted for info in infos)
        sent, again = seen[0] - self._seen[0], seen[1] - self._seen[1]
        if 0 <= sent < SEGMENTS_MIN:
            return
        self._seen = seen
        far = all(info.rtt_s_min >= RTT_S_MIN for info in infos)
        queue = any(info.rtt_s > QUEUE_FREE * info.rtt_s_min for info in infos)
        lossy = far and not queue and again >= LOSS_MIN * sent > 0
        self._lossy = self._lossy + 1 if lossy and not self._loss_proof() else 0
        if self._lossy >= LOOKS:
            self._lossy = 0
            self._resist()

    def _resist(self) -> None:
        """Losses without a queue: take BBR, or more connections."""
        if self._adapts:
            self._adapts = False
            self.congestion = RESISTANT
            for stripe in self._stripes:
                if stripe.sock is not None:
                    set_congestion(stripe.sock, RESISTANT)
            if self._loss_proof():
                return
        self._width = min(self._ceiling, WIDEN * self._width)
        self._open_missing()

    def _loss_proof(self) -> bool:
        socks = [s.sock for s in self._stripes if s.sock is not None]
        return any(congestion(sock) in LOSS_PROOF for sock in socks)

    # --- control --------------------------------------------------------------------------

    def control_renewed(self) -> None:
        """A new control connection: what was on its way on the old one may be lost."""
        self._ceiling = _ceiling(self._context.config)
        for stripe in self._stripes:
            stripe.control_renewed()

    def control_answered(self) -> None:
        """The other side is there: what had ended was lost, and not closed by a departure."""
        if self._ended is not None:
            detail, self._ended = self._ended, None
            self._context.handler.on_notice(Notice("bulk-lost", self.peer, detail))

    def handle(self, message: BulkOffer | BulkAsk | BulkRefused) -> None:
        """Take a control message about one of the connections; raises `WireError`."""
        if not 0 <= message.stripe < STRIPES_LIMIT:
            detail = f"bulk connection number {message.stripe} of at most {STRIPES_LIMIT}"
            raise WireError(short(self.peer), "bad-bulk-offer", detail)
        if isinstance(message, BulkRefused) and message.stripe >= len(self._stripes):
            return  # of a connection that was never asked for
        self._stripe(message.stripe).handle(message)

    # --- the stripes' events (StripeEvents) -------------------------------------------------

    def dial_addresses(self) -> list[Address]:
        """See `StripeEvents`."""
        addresses = list(self._context.handler.addresses_of(self.peer))
        if self.address is not None:
            addresses = [self.address, *(a for a in addresses if a != self.address)]
        return addresses

    def stripe_up(self, stripe: Stripe, replaced: bool) -> None:
        """See `StripeEvents`."""
        links = self._links()
        if len(links) > 1:
            for link in links:
                link.stage()
        if replaced:
            self._context.handler.bulk_reset(self.peer)
        if self._wanted:
            self._wanted = False
            self._context.handler.chunks_wanted(self.peer)

    def stripe_cut(self, stripe: Stripe) -> None:
        """See `StripeEvents`."""
        self._context.handler.bulk_reset(self.peer)

    def stripe_failed(self, stripe: Stripe, refused: bool, detail: str) -> None:
        """See `StripeEvents`; the pair can do with fewer connections, but not with none."""
        if stripe.index == 0:
            self._context.failed(self.peer, refused, detail)
        else:
            self._ceiling = min(self._ceiling, stripe.index)
            self._width = min(self._width, self._ceiling)

    def stripe_absent(self, stripe: Stripe, detail: str) -> None:
        """See `StripeEvents`."""
        if stripe.index or (self._wanted and stripe.link is None):
            self.stripe_failed(stripe, False, detail)

    def bulk_sink(self, header: ChunkHeader) -> memoryview | None:
        """See `BulkEvents`."""
        return self._context.handler.chunk_sink(self.peer, header)

    def bulk_chunk(self, header: ChunkHeader) -> None:
        """See `BulkEvents`."""
        self._faults = 0
        self._context.handler.on_chunk(self.peer, header)

    def bulk_writable(self, link: BulkLink) -> None:
        """See `BulkEvents`."""
        if self._wanted and link in self._links():
            self._wanted = False
            self._context.handler.chunks_wanted(self.peer)

    def bulk_closed(self, link: BulkLink, fault: RemoteError | None, detail: str) -> None:
        """See `BulkEvents`."""
        stripe = next((s for s in self._stripes if s.link is link), None)
        if stripe is None:
            return
        stripe.take_link()
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
            self._open_missing()
        self._context.handler.bulk_reset(self.peer)


def _ceiling(config: TransportConfig) -> int:
    return max(1, min(config.stripes_max, STRIPES_LIMIT))
