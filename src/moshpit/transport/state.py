"""What a TCP transport keeps about one other peer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from moshpit.transport.base import LinkStats
from moshpit.transport.control import ControlLink
from moshpit.transport.handshake import Proved
from moshpit.transport.pair import BulkPair
from moshpit.types import Address, PeerId


@dataclass(slots=True, eq=False)
class PeerState:
    """All that is known of, and queued for, one other peer."""

    peer: PeerId
    pair: BulkPair
    stats: LinkStats
    link: ControlLink | None = None
    proved: Proved | None = None
    address: Address | None = None
    dialling: asyncio.Task[None] | None = None
    proving: bytes = b""  # instance of the process to which a proof of mine is under way
    queue: list[bytes] = field(default_factory=list[bytes])
    queue_bytes: int = 0
    farewell: str = ""  # why the other side says that it closes
    waiters: list[asyncio.Future[None]] = field(default_factory=list[asyncio.Future[None]])
    probed: asyncio.Future[None] | None = None
    draining: bool = False  # it was told that the link is idle: send nothing more on it
    lost_planned: bool = False
    used_at: float = 0.0

    @property
    def usable(self) -> ControlLink | None:
        """The link, if messages can be sent on it."""
        link = self.link
        return link if link is not None and link.alive and not self.draining else None

    def meet(self, proved: Proved, address: Address | None) -> bool:
        """Note who is at the other end of a new link, dialled at ``address`` or not dialled.

        Returns:
            Whether it is another process than before: what led to that one is forgotten, since
            one that hangs is connected to, and accepts connections, as if it lived.
        """
        replaced = self.proved is not None and self.proved.instance != proved.instance
        if replaced:
            self.pair.abandon()
            self.address = None
        self.proved, self.address = proved, address or self.address
        self.farewell, self.draining = "", False
        self.stats.rtt_s = proved.rtt_s
        self.pair.address, self.pair.peer_listens = self.address, proved.listens
        self.pair.control_renewed()
        return replaced

    def change(self) -> None:
        """The link came or went, or a proof ended: wake who waits for that."""
        waiters, self.waiters = self.waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def changed(self) -> None:
        """Wait for the next `change`."""
        waiter = asyncio.get_running_loop().create_future()
        self.waiters.append(waiter)
        await waiter
