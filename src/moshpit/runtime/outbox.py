"""Chunks on their way out: a queue for each peer, as fast as its link takes them.

What a bulk connection had accepted may be lost with it. So what was sent in rounds that are
still under way is kept by name, and sent again over the next connection; who has it already
drops it.

Chunks go in the order in which they were put; those of an averaging whose vector fills while it
is under way, in the order of the vector, since what is in front is needed first.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Final

from moshpit.protocol.machine import SendContribution
from moshpit.runtime.filling import Shipment
from moshpit.runtime.jobs import Averaging
from moshpit.tensors.codecs import Codec
from moshpit.tensors.store import RoundStore
from moshpit.transport.base import Transport
from moshpit.types import GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind

_AGAIN: Final = -1  # before all else


@dataclass(slots=True)
class LiveRound:
    """A round's bytes at this peer.

    Attributes:
        store: the values.
        job: the averaging that it belongs to.
        last: its means are the averaging's.
        bytes_sent, bytes_received: payload bytes.
    """

    store: RoundStore
    job: Averaging
    last: bool = False
    bytes_sent: int = 0
    bytes_received: int = 0


class Outbox:
    """Sends chunks by name.

    Args:
        transport: where to.
        live: the rounds, by group; what is queued for others is dropped.
    """

    def __init__(self, transport: Transport, live: dict[GroupId, LiveRound]) -> None:
        self._transport = transport
        self._live = live
        self._queues: dict[PeerId, list[tuple[int, int, Shipment]]] = {}  # heaps
        self._counter = count()
        self._sent: dict[PeerId, list[Shipment]] = {}
        self._full: set[PeerId] = set()  # links that will say when they take more
        self._ready: dict[PeerId, tuple[Shipment, Codec, memoryview]] = {}  # encoded, not taken
        self.bytes_sent = 0
        self._chunks_sent = 0

    def waiting(self) -> Iterator[tuple[PeerId, float]]:
        """Yield for each peer that was sent something how many bytes wait, as far as what was
        sent so far tells: payloads of one averaging are of about one size."""
        size = self.bytes_sent / max(1, self._chunks_sent)
        for peer, queue in self._queues.items():
            yield peer, size * len(queue)

    def put(self, peer: PeerId, payload: Shipment) -> None:
        """Send a chunk when the link takes it."""
        live = self._live.get(payload.group)
        if live is None:
            return
        self._enqueue(peer, live.job.rank(payload.chunk), payload)
        if peer not in self._full:
            self.pump(peer)

    def pump(self, peer: PeerId) -> None:
        """Send what the link takes now."""
        self._full.discard(peer)
        queue = self._queues.get(peer)
        while queue:
            first = heappop(queue)
            item = first[2]
            live = self._live.get(item.group)
            if live is not None:
                if not self._send(live, item):
                    heappush(queue, first)
                    self._full.add(peer)
                    return
                self._sent.setdefault(peer, []).append(item)

    def _enqueue(self, peer: PeerId, rank: int, payload: Shipment) -> None:
        heappush(self._queues.setdefault(peer, []), (rank, next(self._counter), payload))

    def cancel(self, peer: PeerId, group: GroupId) -> None:
        """Forget what is queued for a peer in a round."""
        queue = self._queues.get(peer)
        if queue is not None:
            queue[:] = [entry for entry in queue if entry[2].group != group]
            heapify(queue)

    def forget(self, peer: PeerId) -> None:
        """Forget everything that is queued for a peer."""
        self._full.discard(peer)
        self._ready.pop(peer, None)
        self._queues.pop(peer, None)
        self._sent.pop(peer, None)

    def send_again(self, peer: PeerId) -> None:
        """The bulk connection broke: what it had accepted may not have arrived."""
        sent = [item for item in self._sent.pop(peer, []) if item.group in self._live]
        if sent:
            for item in sent:
                self._enqueue(peer, _AGAIN, item)
            self.pump(peer)

    def close_round(self, group: GroupId) -> None:
        """Nothing of this round needs to be sent again."""
        for peer, sent in self._sent.items():
            self._sent[peer] = [item for item in sent if item.group != group]

    def _send(self, live: LiveRound, item: Shipment) -> bool:
        if isinstance(item, SendContribution):
            kind, seats, reach = ChunkKind.CONTRIBUTION, 0, 0
        else:
            kind, seats, reach = ChunkKind.RESULT, item.seats, item.reach
        encoded = self._encoded(live, item)
        if encoded is None:
            return True
        codec, payload = encoded
        header = ChunkHeader(
            kind=kind,
            ballot=item.ballot,
            chunk=item.chunk,
            length=len(payload),
            codec=codec.number,
            group=item.group,
            mass=item.mass,
            seats=seats,
            reach=reach,
        )
        if not self._transport.send_chunk(item.peer, header, payload):
            if not codec.in_place:
                self._ready[item.peer] = (item, codec, payload)
            return False
        live.bytes_sent += len(payload)
        self.bytes_sent += len(payload)
        self._chunks_sent += 1
        return True

    def _encoded(self, live: LiveRound, item: Shipment) -> tuple[Codec, memoryview] | None:
        ready = self._ready.pop(item.peer, None)
        if ready is not None and ready[0] is item:
            return ready[1], ready[2]
        if isinstance(item, SendContribution):
            return live.store.contribution(item.chunk)
        return live.store.result_payload(item.chunk)
