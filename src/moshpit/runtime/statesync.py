"""State transfer with real bytes: what joiners fetch, and what donors give.

`StateDesk` lives in the network thread, beside the node: it drives the two machines
(`moshpit.protocol.statesync`, `stategiving`), owns the pieces that come and go, and judges
every one by its hash. Training's side is `moshpit.runtime.states`.

Pieces go over the bulk connections, behind whatever a round has to send to the same peer. A
snapshot is hashed in a thread of its own. What is fetched is passed on to others that fetch the
same (`statesharing`), out of the memory that it is assembled in.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from random import Random
from typing import final

import msgspec

from moshpit.errors import MoshpitError, StateError
from moshpit.events import Notice
from moshpit.protocol.machine import carried_out
from moshpit.protocol.stategiving import (
    NAME_BYTES,
    DropSnapshots,
    GiveEffect,
    SendPiece,
    Snapshot,
    StateGiving,
    WantSnapshot,
)
from moshpit.protocol.statesharing import ShareEffect, StateSharing
from moshpit.protocol.statesync import (
    Fetched,
    FetchEffect,
    FetchFailed,
    ReadManifest,
    StateFetch,
)
from moshpit.runtime.reunion import ReunionDesk
from moshpit.runtime.states import FetchedState, Fetching
from moshpit.tensors.image import Manifest, StateAssembler, StateImage, content_hash
from moshpit.transport.base import Transport
from moshpit.types import GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.transfer import StateDone, StateHeld, StateMessage, StateOffer, StateWant

NICENESS = 5  # guess: of the thread that hashes; a third of what training gets


@dataclass(slots=True)
class _Given:
    """A snapshot's bytes."""

    image: StateImage
    manifest: dict[bytes, bytes]
    chunks: dict[bytes, int]

    def piece(self, name: bytes) -> bytes | None:
        if name in self.manifest:
            return self.manifest[name]
        index = self.chunks.get(name)
        return None if index is None else self.image.chunk(index)


@final
class _Taking:
    """The bytes of one fetch."""

    def __init__(self, machine: StateFetch, size_max: int, fetching: Fetching, now: float) -> None:
        self.machine = machine
        self.sharing = StateSharing(machine, now)
        self.size_max = size_max
        self.fetching = fetching
        self.manifest: dict[bytes, bytes] = {}
        self.assembler: StateAssembler | None = None
        self.places: dict[bytes, list[int]] = {}
        self.sinks: dict[tuple[PeerId, GroupId], bytearray] = {}

    def take(self, piece: bytes, data: bytearray) -> str:
        """Keep a piece; return what is wrong with it."""
        if content_hash(data) != piece:
            return "a piece has other bytes than its hash says"
        if piece in self.places and self.assembler is not None:
            for index in self.places[piece]:
                self.assembler.add(index, data)
        else:
            self.manifest[piece] = bytes(data)
        return ""

    def piece(self, piece: bytes) -> bytes | None:
        """Return a piece that has come."""
        if piece in self.places and self.assembler is not None and self.machine.has(piece):
            return self.assembler.chunk(self.places[piece][0])
        return self.manifest.get(piece)

    def read(self, offer: StateOffer, chunk_bytes_max: int) -> list[tuple[bytes, int]]:
        """Read the manifest, and make room for what it names; raises `StateError`."""
        data = b"".join(self.manifest[piece] for piece in offer.manifest)
        manifest = Manifest.decode(data, self.size_max)
        if manifest.chunk_bytes > chunk_bytes_max or manifest.epoch != offer.epoch:
            raise StateError(
                f"a manifest of epoch {manifest.epoch}, offered as of {offer.epoch}, with chunks "
                f"of {manifest.chunk_bytes} bytes"
            )
        fresh = StateAssembler(manifest)
        if self.assembler is not None:
            fresh.reuse(self.assembler)
        self.assembler = fresh
        self.places = {}
        for index, piece in enumerate(manifest.hashes):
            self.places.setdefault(piece, []).append(index)
        missing = dict.fromkeys(manifest.hashes[index] for index in fresh.missing)
        return [(piece, manifest.length(self.places[piece][0])) for piece in missing]


@final
class StateDesk:
    """Fetches and gives states. In the network thread only, but for `wanted`.

    Args:
        transport: by which messages and pieces go.
        tell: whom to tell what was refused.
        piece_bytes_max: the transport's limit for a chunk.
        rng: what the machines draw from.
    """

    def __init__(
        self,
        transport: Transport,
        tell: Callable[[Notice], None],
        piece_bytes_max: int,
        rng: Random,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._tell = tell
        self.piece_bytes_max = piece_bytes_max
        self._giving = StateGiving()
        self._given: dict[int, _Given] = {}
        self._numbers = itertools.count()
        self._queues: dict[PeerId, deque[tuple[bytes, Callable[[PeerId], None]]]] = {}
        self._taking: _Taking | None = None
        self._shared: _Taking | None = None
        """The latest fetch, under way or just ended: what is passed on."""
        self._seq = itertools.count(1, 1000)
        self._rng = rng
        self._timer: asyncio.TimerHandle | None = None
        self._hashing: asyncio.Task[None] | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._closed = False
        self.wanted_since: float | None = None
        """Since when somebody waits for a snapshot, by the loop's clock; None: nobody does."""
        self.epoch: Callable[[], int] = lambda: 0
        """Returns the epoch that this peer works on."""
        self.reunion = ReunionDesk(transport, tell)
        self.bytes_given = 0
        """Of pieces that were sent to others."""

    async def close(self) -> None:
        """Give up what is under way."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._taking is not None:
            self._taking.fetching.end(None, "the swarm was closed")
        self.reunion.close()
        if self._hashing is not None:
            await asyncio.gather(self._hashing, return_exceptions=True)
        if self._pool is not None:
            self._pool.shutdown()
        self._given.clear()
        self._shared = None

    # --- from the transport -----------------------------------------------------------------

    def handle(self, peer: PeerId, message: StateMessage) -> None:
        """Take a message of a proved peer."""
        if self._closed:
            return
        if isinstance(message, StateHeld):
            self.reunion.handle(peer, message)
            return
        now = self._loop.time()
        if self._taking is not None:
            self._take_effects(self._taking, self._taking.machine.received(peer, message, now))
        sharing = self._shared.sharing if self._shared is not None else None
        if sharing is not None and isinstance(message, StateDone):
            sharing.lost(peer)
        if sharing is not None and isinstance(message, StateWant) and not self._giving.serves(peer):
            self._share_effects(sharing, sharing.wanted(peer, message.hashes, now))
        else:
            self._give_effects(self._giving.received(peer, message, self.epoch(), now))
        self._arm()

    def lost(self, peer: PeerId) -> None:
        """A peer is gone."""
        self._queues.pop(peer, None)
        self._give_effects(self._giving.lost(peer))
        if self._shared is not None:
            self._shared.sharing.lost(peer)
        taking = self._taking
        if taking is not None:
            for key in [key for key in taking.sinks if key[0] == peer]:
                del taking.sinks[key]
            self._take_effects(taking, taking.machine.lost(peer, self._loop.time()))
        self._arm()

    def sink(self, peer: PeerId, header: ChunkHeader) -> memoryview | None:
        """Return where a piece goes; None if it was not asked for."""
        taking = self._taking
        wanted = taking.machine.expected(peer, header.group) if taking is not None else None
        if taking is None or wanted is None:
            return None
        piece, length = wanted
        if header.length != length:
            fault = f"a piece of {header.length} bytes, {length} were wanted"
            self._loop.call_soon(self._arrived, peer, piece, fault)
            return None
        buffer = taking.sinks[(peer, header.group)] = bytearray(length)
        return memoryview(buffer)

    def arrived(self, peer: PeerId, header: ChunkHeader) -> None:
        """A piece is there."""
        taking = self._taking
        buffer = taking.sinks.pop((peer, header.group), None) if taking is not None else None
        wanted = taking.machine.expected(peer, header.group) if taking is not None else None
        if taking is not None and buffer is not None and wanted is not None:
            self._arrived(peer, wanted[0], taking.take(wanted[0], buffer))

    def _arrived(self, peer: PeerId, piece: bytes, fault: str) -> None:
        if self._taking is not None:
            now = self._loop.time()
            taking = self._taking
            effects = taking.machine.arrived(peer, piece, fault, now)
            if not fault:
                self._share_effects(taking.sharing, taking.sharing.arrived(piece))
            self._take_effects(taking, effects)
            self._arm()

    def pump(self, peer: PeerId) -> None:
        """Send what a link takes now."""
        queue = self._queues.get(peer)
        while queue:
            piece, sent = queue[0]
            data = self._piece(piece)
            if data is not None:
                name = GroupId(piece[:NAME_BYTES])
                header = ChunkHeader(ChunkKind.STATE, 0, 0, len(data), 0, name, 0.0, 0)
                if not self._transport.send_chunk(peer, header, memoryview(data)):
                    return
                self.bytes_given += len(data)
            queue.popleft()
            sent(peer)

    # --- fetching ---------------------------------------------------------------------------

    def fetch(
        self,
        donors: Sequence[PeerId],
        fetching: Fetching,
        size_max: int,
        epoch_min: int,
        *,
        shares: bool = False,
        reach: Callable[[PeerId], bool] | None = None,
    ) -> None:
        """Begin to fetch a state; see `StateSync.fetch`, and `StateFetch` for the last two."""
        if self._closed or self._taking is not None:
            fetching.end(None, "closed, or another one is being fetched")
            return
        now = self._loop.time()
        machine = StateFetch(
            donors,
            piece_bytes_max=self.piece_bytes_max,
            epoch_min=epoch_min,
            rng=self._rng,
            seq=next(self._seq),
            now=now,
            shares=shares,
            reach=reach,
        )
        self._taking = self._shared = _Taking(machine, size_max, fetching, now)
        self._take_effects(self._taking, machine.start(now))
        self._arm()

    def stop(self, fetching: Fetching) -> None:
        """Nobody waits for it any more."""
        if self._taking is not None and self._taking.fetching is fetching:
            self._take_effects(self._taking, self._taking.machine.stop())
            self._end(self._taking, None, "given up")

    def _take_effects(self, taking: _Taking, effects: list[FetchEffect]) -> None:
        for effect in carried_out(effects, self._transport.send, self._tell):
            match effect:
                case ReadManifest(offer=offer):
                    self._read(taking, offer)
                case Fetched(offer=offer):
                    assert taking.assembler is not None, "the manifest comes first"
                    self._end(taking, FetchedState(taking.assembler, offer.schema))
                case FetchFailed(reason=reason):
                    self._end(taking, None, reason)

    def _read(self, taking: _Taking, offer: StateOffer) -> None:
        pieces: list[tuple[bytes, int]] = []
        fault = ""
        try:
            pieces = taking.read(offer, self.piece_bytes_max)
        except StateError as error:
            fault = str(error)
        effects = taking.machine.manifest_read(pieces, fault, self._loop.time())
        self._take_effects(taking, effects)

    def _end(self, taking: _Taking, state: FetchedState | None, reason: str = "") -> None:
        self._taking = None
        taking.sinks.clear()
        complete = state is not None
        self._share_effects(taking.sharing, taking.sharing.ended(complete, self._loop.time()))
        taking.fetching.end(state, reason)
        self._arm()

    # --- giving -----------------------------------------------------------------------------

    def able(self, able: bool) -> None:
        """Say whether snapshots can be taken."""
        if able:
            self._giving.able = True
        elif self._hashing is not None:  # that snapshot still counts
            self._giving.able = False
        else:
            self.wanted_since = None
            self._give_effects(self._giving.unable())

    def give(self, make: Callable[[], StateImage], schema: bytes) -> None:
        """A snapshot was taken; ``make`` hashes it."""
        if not self._closed and self._hashing is None:
            self.wanted_since = None
            self._hashing = self._loop.create_task(self._hash(make, schema))

    async def _hash(self, make: Callable[[], StateImage], schema: bytes) -> None:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(1, "moshpit-state", _give_way)
        try:
            work = self._loop.run_in_executor(self._pool, _given, make, self.piece_bytes_max)
            given, offer = await work
        except MoshpitError as error:
            self._tell(Notice("state-failed", None, str(error)))
            self.able(False)
            return
        finally:
            self._hashing = None
        if self._closed:
            return
        self.wanted_since = None
        number = next(self._numbers)
        self._given[number] = given
        offer = msgspec.structs.replace(offer, schema=schema)
        pieces = {**given.manifest, **given.chunks}
        known = Snapshot(number, offer.epoch, offer, pieces)
        self._give_effects(self._giving.snapshot(known, self._loop.time()))
        self._arm()

    def _piece(self, piece: bytes) -> bytes | None:
        for given in self._given.values():
            data = given.piece(piece)
            if data is not None:
                return data
        return self._shared.piece(piece) if self._shared is not None else None

    def _share_effects(self, sharing: StateSharing, effects: list[ShareEffect]) -> None:
        for want in carried_out(effects, self._transport.send, self._tell):
            self._send(want.peer, want.piece, sharing.sent)
        if sharing.over and self._shared is not None and self._shared.sharing is sharing:
            self._shared = None

    def _send(self, peer: PeerId, piece: bytes, sent: Callable[[PeerId], None]) -> None:
        self._queues.setdefault(peer, deque()).append((piece, sent))
        self.pump(peer)

    def _give_effects(self, effects: list[GiveEffect]) -> None:
        for effect in carried_out(effects, self._transport.send, self._tell):
            match effect:
                case WantSnapshot():
                    self.wanted_since = self._loop.time()
                case SendPiece(peer=peer, piece=piece):
                    self._send(peer, piece, self._giving.sent)
                case DropSnapshots(kept=kept):
                    self._given = {n: g for n, g in self._given.items() if n in kept}

    # --- time -------------------------------------------------------------------------------

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        times = [
            self._giving.wakeup,
            self._taking.machine.wakeup if self._taking else None,
            self._shared.sharing.wakeup if self._shared else None,
        ]
        due = [at for at in times if at is not None]
        if due and not self._closed:
            self._timer = self._loop.call_at(min(due), self._tick)

    def _tick(self) -> None:
        self._timer = None
        now = self._loop.time()
        if self._taking is not None:
            self._take_effects(self._taking, self._taking.machine.tick(now))
        if self._shared is not None:
            self._shared.sharing.tick(now)
            self._share_effects(self._shared.sharing, [])
        self._give_effects(self._giving.tick(now))
        self._arm()


def _give_way() -> None:
    """Let training have the processor first: nobody waits for a hash as training does."""
    if sys.platform == "linux":  # elsewhere this is about processes
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)


def _given(make: Callable[[], StateImage], piece_bytes: int) -> tuple[_Given, StateOffer]:
    """Hash a snapshot. In a thread of its own."""
    image = make()
    data = image.manifest.encode()
    cuts = [data[at : at + piece_bytes] for at in range(0, len(data), piece_bytes)]
    manifest = {content_hash(cut): cut for cut in cuts}
    chunks = {piece: index for index, piece in enumerate(image.manifest.hashes)}
    names = tuple(content_hash(cut) for cut in cuts)
    offer = StateOffer(0, image.manifest.epoch, b"", names, len(data), piece_bytes)
    return _Given(image, manifest, chunks), offer
