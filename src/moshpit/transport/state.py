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
