"""What every transport offers, and what it expects of whoever uses it.

A transport carries control messages and chunks between proved peers. All calls and all
callbacks happen in one asyncio loop; nothing on the hot path is awaited. Connections are made
on demand: `Transport.send` and `Transport.send_chunk` dial where there is no link.

Rules that users may rely on:

* Messages to one peer arrive in the order in which they were sent, or the link is lost.
* A chunk that is announced by `on_chunk` is exactly what its sender handed in.
* Callbacks are never made from within `send`, `send_chunk` or `drop`.
* A chunk that was accepted may be lost with its bulk connection. `Handler.bulk_reset` says so,
  and whoever wants it to arrive hands it in again.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from moshpit.events import Notice
from moshpit.types import Address, PeerId
from moshpit.wire.framing import ChunkHeader
from moshpit.wire.messages import Admission, AnyMessage, Message

CODEC_SLACK_BYTES = 4096  # guess: what a codec may add to a chunk's own bytes


class Handler(Protocol):
    """The user of a transport: the runtime's driver, or a test."""

    def on_link(self, peer: PeerId, admission: Admission) -> None:
        """A proved control connection exists (again)."""
        ...

    def on_lost(self, peer: PeerId, refused: bool, detail: str) -> None:
        """The link is gone and one quick redial did not bring it back.

        Also the answer to a send that could not be delivered. ``refused``: nobody listens.
        """
        ...

    def on_message(self, peer: PeerId, message: AnyMessage) -> None:
        """A control message from a proved peer."""
        ...

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        """Return where a chunk's payload is to be written, or None to have it dropped.

        The sink is writable, contiguous, and ``header.length`` bytes long. The header is not
        proved yet and the sink's contents mean nothing until `on_chunk`, which never comes
        for a forged or cut chunk; the next `chunk_sink` or `on_lost` of this peer says so.
        """
        ...

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        """The sink is full and authentic."""
        ...

    def chunks_wanted(self, peer: PeerId) -> None:
        """The bulk link can take more: call `Transport.send_chunk` again."""
        ...

    def bulk_reset(self, peer: PeerId) -> None:
        """The bulk connection broke or was replaced: chunks that it had accepted may be lost.

        `Transport.send_chunk` may be called from here, with those again.
        """
        ...

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        """Return where to dial a peer, the best first; empty if it cannot be dialled."""
        ...

    def on_notice(self, notice: Notice) -> None:
        """Something was refused, and whose fault it is."""
        ...


class MessagesOnly:
    """The part of a `Handler` that someone has who takes no chunks and is told no notices."""

    def chunk_sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        """Drop every chunk."""
        return None

    def on_chunk(self, peer: PeerId, header: ChunkHeader) -> None:
        """Never happens: there is no sink."""

    def chunks_wanted(self, peer: PeerId) -> None:
        """There are none to send."""

    def bulk_reset(self, peer: PeerId) -> None:
        """Nothing was sent, so nothing is lost."""

    def addresses_of(self, peer: PeerId) -> Sequence[Address]:
        """Return none: only `Transport.dial` dials."""
        return ()

    def on_notice(self, notice: Notice) -> None:
        """Ignore it."""


@dataclass(slots=True)
class LinkStats:
    """What went over the links to one peer, since it first appeared."""

    control_in: int = 0
    """Bytes of control frames received."""
    control_out: int = 0
    bulk_in: int = 0
    """Bytes of chunks received, headers and tags included."""
    bulk_out: int = 0
    rtt_s: float = 0.0
    """The last handshake's round trip, proof to answer; 0 is unknown."""


@dataclass(frozen=True, slots=True)
class Flow:
    """What went over the bulk connections to all other machines so far.

    It may shrink when a peer is forgotten.
    """

    sent: int = 0
    """Bytes that the other sides' kernels have acknowledged."""
    received: int = 0
    limited_s: float = 0.0
    """How long data to be sent waited for the network, summed over connections."""

    def __add__(self, other: Flow) -> Flow:
        return Flow(
            self.sent + other.sent,
            self.received + other.received,
            self.limited_s + other.limited_s,
        )


class Bulk(Protocol):
    """The bulk connections to one peer, to be watched and paced."""

    @property
    def far(self) -> bool:
        """Whether they lead to another machine."""
        ...

    @property
    def backlog(self) -> int:
        """Bytes that were handed in and have not left this process."""
        ...

    def flow(self) -> Flow:
        """Return what went over them, if to another machine."""
        ...

    def pace(self, bytes_per_s: float) -> None:
        """Let them send at most so fast together; infinite is as fast as they can. A system that
        cannot do that lets them send as fast as they can."""
        ...


class Transport(ABC):
    """Carries messages and chunks; see the module's rules.

    Attributes:
        addresses: where it really listens; empty for clients, and before `start`.
    """

    addresses: tuple[Address, ...] = ()

    @abstractmethod
    async def start(self, handler: Handler) -> None:
        """Begin to listen; raises `LocalError` if the address cannot be had."""

    @abstractmethod
    async def close(self) -> None:
        """Close all links after what is queued, and leave nothing behind. May be repeated."""

    @abstractmethod
    async def dial(self, address: Address, expect: PeerId | None = None) -> PeerId:
        """Connect to whoever is at an address; returns who it proved to be.

        Raises:
            UnreachableError: nobody answered there.
            HandshakeError: the other side broke the handshake, or is not ``expect``.
            AdmissionError: one side refused the other's admission.
            ClosedError: the transport is closed.
        """

    @abstractmethod
    async def reach(self, address: Address, expect: PeerId) -> None:
        """See that a peer answers at an address with its key, even if it is connected already.

        No connection is kept, and none that exists is touched; nobody is told of a new one.

        Raises:
            As `dial`.
        """

    @abstractmethod
    def send(self, peer: PeerId, message: Message) -> None:
        """Queue a message; dials if there is no link.

        A peer whose queue exceeds ``control_queue_bytes_max`` is dropped with `on_lost`.
        """

    @abstractmethod
    def send_chunk(self, peer: PeerId, header: ChunkHeader, payload: memoryview) -> bool:
        """Hand in a chunk; the payload is not needed any more when this returns.

        Returns:
            False if the link is full or not up yet; it is made on demand, and
            `Handler.chunks_wanted` (or `Handler.on_lost`) follows.
        """

    @abstractmethod
    def drop(self, peer: PeerId, reason: str) -> None:
        """Close the links to a peer, forget what is queued, and tell it why. No `on_lost`."""

    @abstractmethod
    def connected(self, peer: PeerId) -> bool:
        """Whether a proved control connection exists."""

    @abstractmethod
    def remote(self, peer: PeerId) -> Address | None:
        """Return the far end of the control connection to a peer; None if there is none.

        Of a peer that dialled, the port is not one at which it listens.
        """

    @abstractmethod
    def stats(self, peer: PeerId) -> LinkStats:
        """What went over the links to this peer; zeros for an unknown one."""

    def flow(self) -> Flow | None:
        """What went over bulk connections to other machines; None if nobody counts it."""
        return None

    def bulk(self, peer: PeerId) -> Bulk | None:
        """Return the bulk connections to a peer; None if there never were any, or none can be
        paced."""
        return None
