"""Parcels: whole vectors that one peer sends to one other, beside all rounds.

`ParcelDesk` lives in the network thread. A parcel goes as chunks over the bulk connection and is
kept by its sender until the receiver says that it is complete (`ParcelGot`): what a broken
connection has lost is sent again, and what comes twice is dropped by its serial number. So a
parcel arrives once, as long as both live. `SwarmParcels` is training's side: it waits at the
`Mailbox`, which both share.

What others can make this peer keep is bounded: for each of them `VECTORS_MAX` vectors of the
attached length, in parcels that are on their way or wait to be taken, and nothing at all before
a strategy has asked for parcels.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, final

import torch

from moshpit.errors import ClosedError, ConfigError, PeerLostError, WaitTimeoutError
from moshpit.events import Notice
from moshpit.protocol.machine import View
from moshpit.runtime.background import Bridge
from moshpit.runtime.waiting import Waiting
from moshpit.tensors.parcel import Parcel, Tag, tag_fault
from moshpit.tensors.reduce import is_finite
from moshpit.transport.base import Transport
from moshpit.transport.notices import NoticeLimiter
from moshpit.types import PeerId, short
from moshpit.wire.framing import ChunkHeader, ChunkKind, parcel_name, read_parcel_name
from moshpit.wire.parcels import ParcelGot, ParcelMessage, ParcelRefused

VECTORS_MAX: Final = 4  # guess: for each sender, and waiting for each receiver
PARCELS_MAX: Final = 1024  # guess: the same, however small they are
NUMBERS_MIN: Final = 64  # a parcel may have so many numbers, however short the vectors are
WEIGHT_MAX: Final = 1e30  # as the mass of a contribution
SERIALS: Final = 1 << 16  # what the header's field takes
REMEMBERED: Final = 4 * PARCELS_MAX  # guess: complete ones whose chunks may come again
STALE_S: Final = 60.0  # guess: parcels of the dead that nobody has taken are dropped then


@final
class Mailbox:
    """Parcels that wait to be taken: the network puts, training takes."""

    def __init__(self, waiting: Waiting) -> None:
        self._waiting = waiting
        self._changed = waiting.condition()
        self._parcels: list[tuple[float, Parcel]] = []  # when they came, oldest first
        self._live: frozenset[PeerId] = frozenset()
        self._closed = False

    def put(self, parcel: Parcel) -> None:
        """Keep a parcel."""
        with self._changed:
            self._parcels.append((self._waiting.clock(), parcel))
            self._changed.notify_all()

    def kept(self, sender: PeerId) -> tuple[int, int]:
        """Return how many parcels of a sender wait, and how many numbers they have."""
        with self._changed:
            sizes = [p.vector.numel() for _, p in self._parcels if p.sender == sender]
        return len(sizes), sum(sizes)

    def view(self, live: Iterable[PeerId]) -> None:
        """Say who is alive; what the dead have sent long ago goes."""
        with self._changed:
            self._live = frozenset(live)
            now = self._waiting.clock()
            self._parcels = [
                (at, p) for at, p in self._parcels if p.sender in self._live or now - at < STALE_S
            ]
            self._changed.notify_all()

    def close(self) -> None:
        """Nothing will come any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def first(self, wanted: Callable[[Parcel], bool]) -> Parcel | None:
        """Take the oldest parcel that is as wanted."""
        with self._changed:
            return self._first(wanted)

    def wait(self, tag: Tag, sender: PeerId | None, timeout_s: float | None) -> Parcel:
        """See `moshpit.training.parcels.Parcels.take`."""
        found: list[Parcel] = []

        def look() -> bool:
            parcel = self._first(lambda p: p.tag == tag and sender in (None, p.sender))
            if parcel is not None:
                found.append(parcel)
            return parcel is not None or self._closed or self._lost(sender)

        with self._changed:
            if not self._changed.wait_for(look, timeout_s):
                whose = "" if sender is None else f" of peer {short(sender)}"
                raise WaitTimeoutError(f"no parcel {tag}{whose} within {timeout_s:g} s")
            if found:
                return found[0]
            if self._closed:
                raise ClosedError("the swarm is closed; join again to go on")
        assert sender is not None, "only who is waited for can be lost"
        raise PeerLostError(short(sender), "lost", f"parcel {tag} has not come from it")

    def _first(self, wanted: Callable[[Parcel], bool]) -> Parcel | None:
        for index, (_, parcel) in enumerate(self._parcels):
            if wanted(parcel):
                del self._parcels[index]
                return parcel
        return None

    def _lost(self, sender: PeerId | None) -> bool:
        return sender is not None and sender not in self._live


@dataclass(slots=True)
class _Outgoing:
    """A parcel until its receiver has it."""

    serial: int
    tag: Tag
    vector: torch.Tensor
    weight: float
    at: int = 0
    """The number from which on it is still to be handed to the transport."""


@dataclass(slots=True)
class _Incoming:
    """A parcel of which something has come."""

    tag: Tag
    weight: float
    vector: torch.Tensor
    came: dict[int, None] = field(default_factory=dict[int, None])
    numbers: int = 0


@dataclass(slots=True)
class _Sender:
    """What is on its way from a peer, in one life of its process."""

    session: int
    coming: dict[int, _Incoming] = field(default_factory=dict[int, _Incoming])
    done: dict[int, None] = field(default_factory=dict[int, None])
    refused: dict[int, None] = field(default_factory=dict[int, None])

    def end(self, serial: int, *, refused: bool) -> None:
        self.coming.pop(serial, None)
        where = self.refused if refused else self.done
        where[serial] = None
        while len(where) > REMEMBERED:
            del where[next(iter(where))]


@dataclass(slots=True)
class _Receiver:
    """What is on its way to a peer."""

    next_serial: int = 0
    queue: deque[_Outgoing] = field(default_factory=deque[_Outgoing])


@final
class ParcelDesk:
    """Sends and receives parcels. In the network thread only.

    Args:
        transport: by which chunks and messages go.
        tell: whom to tell what was refused or dropped.
        waiting: the clock, and the mailbox's condition.
        chunk_bytes: the transport's limit for a chunk; the same at all peers.
        session: a random number below 2**32, so that serial numbers of an earlier life of this
            process mean nothing.
    """

    def __init__(
        self,
        transport: Transport,
        tell: Callable[[Notice], None],
        waiting: Waiting,
        chunk_bytes: int,
        session: int,
    ) -> None:
        self._transport = transport
        self._notices = NoticeLimiter(tell, waiting.clock)
        self._stride = max(1, chunk_bytes // 4)
        self._session = session
        self.mailbox = Mailbox(waiting)
        self._handlers: dict[int, Callable[[Parcel], None]] = {}
        self._senders: dict[PeerId, _Sender] = {}
        self._receivers: dict[PeerId, _Receiver] = {}
        self._live: frozenset[PeerId] = frozenset()
        self._open = False
        self._numel = 0
        self.bytes_sent = 0

    def open(self) -> None:
        """Take parcels from now on."""
        self._open = True

    def attach(self, numel: int) -> None:
        """Say how long this peer's vectors are."""
        self._numel = max(self._numel, numel)

    def view(self, live: Sequence[PeerId]) -> None:
        """Say who is alive; to the others nothing is on its way any more."""
        self._live = frozenset(live)
        for gone in [p for p in self._receivers if p not in self._live]:
            del self._receivers[gone]
        for gone in [p for p in self._senders if p not in self._live]:
            self._senders[gone].coming.clear()
        self.mailbox.view(self._live)

    def close(self) -> None:
        """Drop everything; who waits is told."""
        self._open = False
        self._receivers.clear()
        self._senders.clear()
        self.mailbox.close()

    def serve(self, kind: int, handler: Callable[[Parcel], None]) -> None:
        """Hand parcels of a kind to ``handler``, those that are there first."""
        self._handlers[kind] = handler
        while (parcel := self.mailbox.first(lambda p: p.tag[0] == kind)) is not None:
            handler(parcel)

    @property
    def numbers_max(self) -> int:
        """How many numbers a parcel may have."""
        return max(NUMBERS_MIN, self._numel)

    # --- out ------------------------------------------------------------------------------

    def send(self, to: PeerId, tag: Tag, vector: torch.Tensor, weight: float) -> None:
        """Send a vector, which belongs to this desk from now on."""
        if not self._open or to not in self._live:
            return
        receiver = self._receivers.setdefault(to, _Receiver())
        waiting = sum(item.vector.numel() for item in receiver.queue)
        if (
            len(receiver.queue) >= PARCELS_MAX
            or waiting + vector.numel() > VECTORS_MAX * self.numbers_max
        ):
            detail = f"{len(receiver.queue)} parcels wait to be sent; {tag} is dropped"
            self._notices.tell("parcel-dropped", to, detail)
            return
        receiver.queue.append(_Outgoing(receiver.next_serial, tag, vector, weight))
        receiver.next_serial = (receiver.next_serial + 1) % SERIALS
        self.pump(to)

    def pump(self, peer: PeerId) -> None:
        """Send what the link takes now."""
        receiver = self._receivers.get(peer)
        for item in receiver.queue if receiver is not None else ():
            while item.at < item.vector.numel():
                piece = item.vector[item.at : item.at + self._stride]
                header = ChunkHeader(
                    kind=ChunkKind.PARCEL,
                    ballot=item.serial,
                    chunk=item.at,
                    length=4 * piece.numel(),
                    codec=0,
                    group=parcel_name(*item.tag, self._session),
                    mass=item.weight,
                    seats=item.vector.numel(),
                )
                payload = piece.numpy().data.cast("B")
                if not self._transport.send_chunk(peer, header, payload):
                    return
                item.at += piece.numel()
                self.bytes_sent += header.length

    def again(self, peer: PeerId) -> None:
        """A connection broke or came back: what is not known to have arrived is sent again."""
        receiver = self._receivers.get(peer)
        if receiver is not None:
            for item in receiver.queue:
                item.at = 0
            self.pump(peer)

    def handle(self, peer: PeerId, message: ParcelMessage) -> None:
        """Take a message of a proved peer."""
        receiver = self._receivers.get(peer)
        if receiver is None or message.session != self._session:
            return
        item = next((i for i in receiver.queue if i.serial == message.serial), None)
        if item is None:
            return
        receiver.queue.remove(item)
        if isinstance(message, ParcelRefused):
            detail = f"it does not take parcel {item.tag}: {message.reason[:100]}"
            self._notices.tell("parcel-refused", peer, detail)

    # --- in -------------------------------------------------------------------------------

    def sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        """Return where a chunk goes; None drops it."""
        if not self._open or not self._numel:
            return None
        _, _, session = read_parcel_name(header.group)
        sender = self._senders.get(peer)
        if sender is None or sender.session != session:
            sender = self._senders[peer] = _Sender(session)
        if header.ballot in sender.done:
            self._transport.send(peer, ParcelGot(session, header.ballot))
            return None
        if header.ballot in sender.refused:
            return None
        coming = sender.coming.get(header.ballot)
        reason, detail = self._fault(peer, sender, coming, header)
        if reason:
            self._refuse(peer, sender, header.ballot, reason, detail)
            return None
        if coming is None:
            kind, number, _ = read_parcel_name(header.group)
            vector = torch.empty(header.seats, dtype=torch.float32)
            coming = _Incoming((kind, number), header.mass, vector)
            sender.coming[header.ballot] = coming
        if header.chunk in coming.came:
            return None
        stop = header.chunk + header.length // 4
        return coming.vector[header.chunk : stop].numpy().data.cast("B")

    def _fault(
        self, peer: PeerId, sender: _Sender, coming: _Incoming | None, header: ChunkHeader
    ) -> tuple[str, str]:
        """Judge the header of a chunk: a reason and words, empty if nothing is wrong."""
        total, at = header.seats, header.chunk
        kind, number, _ = read_parcel_name(header.group)
        wrong = tag_fault((kind, number))
        if not 1 <= total <= self.numbers_max:
            wrong = f"a parcel of {total} numbers; vectors here have {self._numel}"
        elif not (0 <= header.mass <= WEIGHT_MAX):
            wrong = f"weight {header.mass}"
        elif at % self._stride or at >= total:
            wrong = f"a piece that begins at {at} of {total}"
        elif header.length != 4 * min(self._stride, total - at) or header.codec:
            wrong = f"a piece of {header.length} bytes in codec {header.codec}"
        elif coming is not None and (
            coming.tag != (kind, number)
            or coming.vector.numel() != total
            or coming.weight != header.mass
        ):
            wrong = f"pieces of parcel {coming.tag} that do not belong together"
        if wrong:
            return "bad-parcel", wrong
        if coming is not None:
            return "", ""
        parcels, numbers = self.mailbox.kept(peer)
        parcels += len(sender.coming)
        numbers += sum(c.vector.numel() for c in sender.coming.values())
        if parcels >= PARCELS_MAX or numbers + total > VECTORS_MAX * self.numbers_max:
            return "too-many-parcels", f"{parcels} parcels of it wait here already"
        return "", ""

    def _refuse(self, peer: PeerId, sender: _Sender, serial: int, reason: str, detail: str) -> None:
        sender.end(serial, refused=True)
        self._notices.tell(reason, peer, detail)
        self._transport.send(peer, ParcelRefused(sender.session, serial, reason))

    def arrived(self, peer: PeerId, header: ChunkHeader) -> None:
        """A chunk is there."""
        sender = self._senders.get(peer)
        coming = None if sender is None else sender.coming.get(header.ballot)
        if sender is None or coming is None or header.chunk in coming.came:
            return
        coming.came[header.chunk] = None
        coming.numbers += header.length // 4
        if coming.numbers < coming.vector.numel():
            return
        if not is_finite(coming.vector):
            detail = f"parcel {coming.tag} holds NaN or infinity"
            self._refuse(peer, sender, header.ballot, "non-finite", detail)
            return
        sender.end(header.ballot, refused=False)
        self._transport.send(peer, ParcelGot(sender.session, header.ballot))
        self._deliver(Parcel(peer, coming.tag, coming.vector, coming.weight))

    def _deliver(self, parcel: Parcel) -> None:
        handler = self._handlers.get(parcel.tag[0])
        if handler is None:
            self.mailbox.put(parcel)
        else:
            handler(parcel)


@final
class SwarmParcels:
    """Training's side (implements `moshpit.training.parcels.Parcels`). Made by `Swarm`.

    Args:
        bridge: to the network thread.
        desk: there.
        view: returns the swarm's picture, in the network thread.
    """

    def __init__(self, bridge: Bridge, desk: ParcelDesk, view: Callable[[], View]) -> None:
        self._bridge = bridge
        self._desk = desk
        self._view = view
        bridge.post(desk.open)

    def send(self, to: PeerId, tag: Tag, vector: torch.Tensor, weight: float = 1.0) -> None:
        """See `moshpit.training.parcels.Parcels.send`."""
        fault = tag_fault(tag)
        if fault:
            raise ConfigError(fault)
        if vector.dim() != 1 or vector.dtype != torch.float32 or not vector.numel():
            raise ConfigError(
                f"a parcel of shape {tuple(vector.shape)} and {vector.dtype}: expected one "
                "dimension, at least one number, and torch.float32"
            )
        if vector.numel() > self._desk.numbers_max:
            raise ConfigError(
                f"a parcel of {vector.numel()} numbers: {self._desk.numbers_max} at most, by the "
                "length of what is attached"
            )
        if not 0 <= weight <= WEIGHT_MAX:
            raise ConfigError(f"a parcel of weight {weight}: must be from 0 to {WEIGHT_MAX:g}")
        if not math.isfinite(vector.sum().item()) and not is_finite(vector):
            raise ConfigError(
                "a parcel with NaN or infinite values; the other peer would refuse it"
            )
        copy = vector.detach().to("cpu", copy=True).contiguous()
        self._bridge.post(self._desk.send, to, tag, copy, weight)

    def take(
        self, tag: Tag, *, sender: PeerId | None = None, timeout_s: float | None = None
    ) -> Parcel:
        """See `moshpit.training.parcels.Parcels.take`."""
        return self._desk.mailbox.wait(tag, sender, timeout_s)

    def poll(self, kind: int) -> Parcel | None:
        """See `moshpit.training.parcels.Parcels.poll`."""
        return self._desk.mailbox.first(lambda parcel: parcel.tag[0] == kind)

    def serve(self, kind: int, handler: Callable[[Parcel], None]) -> None:
        """See `moshpit.training.parcels.Parcels.serve`. The thread is the network's."""
        self._bridge.post(self._desk.serve, kind, handler)

    def peers_now(self) -> list[PeerId]:
        """See `moshpit.training.parcels.ParcelSwarm.peers_now`."""

        async def read() -> list[PeerId]:
            return workers_like_me(self._view())

        return self._bridge.call(read())


def workers_like_me(view: View) -> list[PeerId]:
    """Return the live workers that average the same as this peer, sorted by id."""
    schema = view.me.schema
    records = [view.record(peer) for peer in view.live]
    return [
        PeerId(r.peer)
        for r in records
        if r is not None and schema and r.schema == schema and r.role == "worker"
    ]
