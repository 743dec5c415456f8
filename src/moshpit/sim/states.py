"""State transfer between simulated peers, by the machines of `moshpit.protocol`.

Theory of operation. `Desks` does for all processes what `moshpit.runtime.statesync` does for one:
it hands messages, pieces and time to `StateFetch` and `StateGiving`, and moves what they want
moved over the virtual network. Training's side is that of `moshpit.training.standing`: who has
missed more epochs than its own values can bear steps back, so that nobody plans with it, fetches
what the others hold, and takes part again; a snapshot for those who ask is taken when an
averaging has just been adopted, or between two steps of whoever lets somebody wait.

A state is the peer's values, one piece for each chunk of the vector, and a manifest. A piece's
name is a hash of what is in it, as with real bytes, and whoever gets one looks at that.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from moshpit.protocol.machine import (
    ChunkArrived,
    Emit,
    Event,
    LinkDown,
    Received,
    Rng,
    Send,
    carried_out,
)
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
    donors_in,
)
from moshpit.sim.checkers import Checkers
from moshpit.sim.network import Network
from moshpit.sim.process import Process
from moshpit.sim.scenario import Scenario, Transfer
from moshpit.sim.schedule import Schedule
from moshpit.sim.statechecks import StateChecks
from moshpit.sim.store import Manifest, Payload, Piece
from moshpit.sim.trainer import SCHEMA
from moshpit.types import GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.transfer import STATE_MESSAGES, StateDone, StateOffer, StateWant

T = TypeVar("T")

BEHIND_MAX = 1  # epochs that do no harm, as in moshpit.training.standing
PATIENCE_S = 3.0  # how long an asker waits for the end of an averaging, there too
TRIES_MAX = 8
_MANIFEST_HEAD_BYTES = 64
_HASH_BYTES = 32


def name_of(piece: Piece | Manifest) -> bytes:
    """Return the hash of what a piece holds."""
    if isinstance(piece, Piece):
        data = struct.pack("<id", piece.index, piece.value)
    else:
        data = struct.pack("<q", piece.epoch) + b"".join(piece.names)
    return hashlib.blake2b(data, digest_size=_HASH_BYTES).digest()


def _can_ask(process: Process, peer: PeerId) -> bool:
    view = process.node.view
    known = peer != process.peer and view.reachable(peer)
    return known and (view.dialable(peer) or view.linked(peer))


class Image:
    """A snapshot of a peer's values, in pieces.

    Attributes:
        manifest: what it is made of.
        pieces: all of it, by name.
    """

    __slots__ = ("manifest", "pieces", "values")

    def __init__(self, epoch: int, values: list[float]) -> None:
        self.values = tuple(values)
        made = [Piece(index, value) for index, value in enumerate(values)]
        names = [name_of(piece) for piece in made]
        self.manifest = Manifest(epoch, tuple(names))
        self.pieces: dict[bytes, Piece | Manifest] = dict(zip(names, made, strict=True))
        self.pieces[name_of(self.manifest)] = self.manifest


@dataclass(slots=True)
class _Taking:
    """One attempt to get a state."""

    machine: StateFetch
    sharing: StateSharing
    manifest: Manifest | None = None
    pieces: dict[bytes, Piece | Manifest] = field(default_factory=dict[bytes, Piece | Manifest])


class Desk:
    """What one process gives and takes.

    Attributes:
        giving: its side as a donor.
        taking: its side as a joiner, while it is one.
        shared: its latest fetch, whose pieces it passes on.
        wanted_s: since when somebody waits for a snapshot.
        tries: how often it has asked since it fell behind.
        seq: the number of its latest attempt.
        timer: when it is to be looked at.
    """

    __slots__ = ("giving", "images", "rng", "seq", "shared", "taking", "timer", "tries", "wanted_s")

    def __init__(self, rng: Rng) -> None:
        self.giving = StateGiving()
        self.giving.able = True
        self.images: dict[int, Image] = {}
        self.rng = rng
        self.taking: _Taking | None = None
        self.shared: _Taking | None = None
        self.wanted_s: float | None = None
        self.tries = 0
        self.seq = 0
        self.timer: float | None = None


class Training(Protocol):
    """What desks need of the world."""

    def declare(self, process: Process, schema: bytes, epoch: int) -> None:
        """Tell the swarm what a process averages, and of which epoch its values are."""
        ...

    def restored(self, process: Process, values: list[float] | None) -> None:
        """Go on training, with these values if there are any."""
        ...

    def note(self, text: str) -> None:
        """Write a line into the trace."""
        ...


class Surroundings(Training, Protocol):
    """The world, as `desks_of` sees it."""

    scenario: Scenario
    schedule: Schedule
    network: Network
    checkers: Checkers

    def generator(self, purpose: str) -> Rng: ...


def desks_of(world: Surroundings) -> Desks:
    """Return the state transfer of a world whose scenario has one."""
    transfer, checks = world.scenario.transfer, world.checkers.states
    assert transfer is not None, "else there is none"
    assert checks is not None, "made with it"

    def rng(process: Process) -> Rng:
        return world.generator(f"state/{process.index}")

    chunks = world.scenario.work.chunks
    return Desks(transfer, chunks, world.schedule, world.network, checks, world, rng)


class Desks:
    """The state transfer of all processes.

    Args:
        transfer: how large a state is.
        chunks: of the vector.
        schedule: the clock.
        network: carries messages and pieces.
        checks: are told what was given and what arrived.
        training: what values come from and go to.
        rng: makes a process's own randomness.
    """

    def __init__(  # noqa: PLR0917 - the parts of one world
        self,
        transfer: Transfer,
        chunks: int,
        schedule: Schedule,
        network: Network,
        checks: StateChecks,
        training: Training,
        rng: Callable[[Process], Rng],
    ) -> None:
        self._schedule = schedule
        self._network = network
        self._checks = checks
        self._training = training
        self._rng = rng
        self._manifest_bytes = _MANIFEST_HEAD_BYTES + _HASH_BYTES * chunks
        self._piece_bytes = max(self._manifest_bytes, transfer.state_bytes // chunks)
        self._numbers = 0

    def open(self, process: Process) -> None:
        """A process has started."""
        process.desk = Desk(self._rng(process))

    # --- training's side ------------------------------------------------------------------

    def behind(self, process: Process) -> bool:
        """Whether the swarm has gone on so far that its state should be fetched."""
        if process.node.merging is not None:  # it has something to give instead
            return False
        return process.node.epoch - process.trainer.epoch > BEHIND_MAX

    def catch_up(self, process: Process) -> None:
        """Step back and fetch the swarm's state; `Training.restored` comes of it."""
        desk = process.desk
        assert desk is not None, "opened when it started"
        desk.tries = 0
        desk.giving.able = False
        self._give(process, desk, desk.giving.unable())
        self._training.declare(process, b"", 0)
        self._try(process, desk)

    def serve(self, process: Process, *, boundary: bool) -> None:
        """Take a snapshot for those who wait for one, if this is the moment."""
        desk = process.desk
        if desk is None or desk.wanted_s is None:
            return
        now = self._schedule.now
        if not boundary and now - desk.wanted_s <= PATIENCE_S:
            return
        epoch = process.trainer.epoch
        if epoch != process.node.epoch:
            return
        desk.wanted_s = None
        image = Image(epoch, process.trainer.values)
        self._checks.gave(image.manifest, image.values)
        self._numbers += 1
        desk.images[self._numbers] = image
        manifest = (name_of(image.manifest),)
        schema = process.node.view.me.schema
        offer = StateOffer(0, epoch, schema, manifest, self._manifest_bytes, self._piece_bytes)
        known = Snapshot(self._numbers, epoch, offer, image.pieces)
        self._give(process, desk, desk.giving.snapshot(known, self._clock(process)))
        self._arm(process, desk)

    # --- events ---------------------------------------------------------------------------

    def takes(self, process: Process, event: Event, payload: Payload | None) -> bool:
        """Take an event if it is about states; return whether the node need not see it."""
        desk = process.desk
        assert desk is not None, "opened when it started"
        if type(event) is Received:
            if not isinstance(event.message, STATE_MESSAGES):
                return False
            now, epoch = self._clock(process), process.node.epoch
            if desk.taking is not None:
                self._take(
                    process, desk, desk.taking.machine.received(event.peer, event.message, now)
                )
            shared, message = desk.shared, event.message
            if shared is not None and isinstance(message, StateDone):
                shared.sharing.lost(event.peer)
            fellow = shared is not None and not desk.giving.serves(event.peer)
            if shared is not None and fellow and isinstance(message, StateWant):
                effects = shared.sharing.wanted(event.peer, message.hashes, now)
                self._share(process, desk, shared, effects)
            else:
                self._give(process, desk, desk.giving.received(event.peer, message, epoch, now))
        elif type(event) is ChunkArrived:
            if event.header.kind is not ChunkKind.STATE:
                return False
            self._arrived(process, desk, event, payload)
        elif type(event) is LinkDown:
            self._give(process, desk, desk.giving.lost(event.peer))
            if desk.shared is not None:
                desk.shared.sharing.lost(event.peer)
            if desk.taking is not None:
                effects = desk.taking.machine.lost(event.peer, self._clock(process))
                self._take(process, desk, effects)
            self._arm(process, desk)
            return False
        else:
            return False
        self._arm(process, desk)
        return True

    def _arrived(
        self, process: Process, desk: Desk, event: ChunkArrived, payload: Payload | None
    ) -> None:
        taking, header = desk.taking, event.header
        wanted = taking.machine.expected(event.peer, header.group) if taking is not None else None
        if taking is None or wanted is None or not isinstance(payload, Piece | Manifest):
            return
        piece, length = wanted
        fault = ""
        if header.length != length:
            fault = f"a piece of {header.length} bytes, {length} were wanted"
        elif name_of(payload) != piece:
            fault = "a piece has other bytes than its hash says"
        else:
            taking.pieces[piece] = payload
        self._checks.judged(self._schedule.now, process, event.peer, fault)
        effects = taking.machine.arrived(event.peer, piece, fault, self._clock(process))
        if not fault:
            self._share(process, desk, taking, taking.sharing.arrived(piece))
        self._take(process, desk, effects)

    # --- fetching -------------------------------------------------------------------------

    def _try(self, process: Process, desk: Desk) -> None:
        view = process.node.view
        donors = donors_in(view, process.peer, 0)
        epochs = [record.epoch for peer in donors if (record := view.record(peer)) is not None]
        newest = max(epochs, default=-1)
        desk.tries += 1
        if newest < 0 or desk.tries > TRIES_MAX:
            self._give_up(process, desk)
            return
        now = self._clock(process)
        least = max(newest, process.trainer.epoch)
        machine = StateFetch(
            donors_in(view, process.peer, least),
            piece_bytes_max=self._piece_bytes,
            epoch_min=least,
            rng=desk.rng,
            seq=desk.seq,
            now=now,
            shares=view.dialable(process.peer),
            reach=lambda peer: _can_ask(process, peer),
        )
        desk.seq += 1000
        desk.taking = desk.shared = _Taking(machine, StateSharing(machine, now))
        self._take(process, desk, machine.start(now))
        self._arm(process, desk)

    def _take(self, process: Process, desk: Desk, effects: list[FetchEffect]) -> None:
        for effect in self._carried_out(process, effects):
            match effect:
                case ReadManifest(offer=offer):
                    self._read(process, desk, offer)
                case Fetched(offer=offer):
                    self._fetched(process, desk, offer)
                case FetchFailed(reason=reason):
                    self._training.note(f"{process.name} fetched no state: {reason}")
                    self._give_up(process, desk)

    def _read(self, process: Process, desk: Desk, offer: StateOffer) -> None:
        taking = desk.taking
        assert taking is not None, "it wants its manifest read"
        manifest = taking.pieces[offer.manifest[0]]
        pieces: list[tuple[bytes, int]] = []
        fault = ""
        if isinstance(manifest, Manifest) and manifest.epoch == offer.epoch:
            taking.manifest = manifest
            pieces = [(name, self._piece_bytes) for name in manifest.names]
        else:
            fault = f"no manifest of epoch {offer.epoch}"
        now = self._clock(process)
        self._take(process, desk, taking.machine.manifest_read(pieces, fault, now))

    def _fetched(self, process: Process, desk: Desk, offer: StateOffer) -> None:
        taking = desk.taking
        assert taking is not None, "it says so"
        assert taking.manifest is not None, "the manifest comes first"
        self._end(process, desk, taking, complete=True)
        values: list[float] = []
        for name in taking.manifest.names:
            piece = taking.pieces[name]
            assert isinstance(piece, Piece), "the checks of a manifest see to that"
            values.append(piece.value)
        now = self._schedule.now
        self._checks.fetched(now, process, taking.manifest, offer.epoch, values)
        self._training.note(f"{process.name} has fetched the state of epoch {offer.epoch}")
        process.trainer.epoch = offer.epoch
        process.trainer.values = values
        if self.behind(process):  # the swarm has gone on meanwhile
            self._try(process, desk)
            return
        desk.giving.able = True
        self._training.declare(process, offer.schema, offer.epoch)
        self._checks.back(process)
        self._training.restored(process, values)

    def _give_up(self, process: Process, desk: Desk) -> None:
        """Go on with the own values; the next mean brings them back."""
        if desk.taking is not None:
            self._end(process, desk, desk.taking, complete=False)
        desk.giving.able = True
        process.trainer.epoch = process.node.epoch
        self._training.declare(process, SCHEMA, 0)
        self._training.restored(process, None)

    def _end(self, process: Process, desk: Desk, taking: _Taking, *, complete: bool) -> None:
        desk.taking = None
        effects = taking.sharing.ended(complete, self._clock(process))
        self._share(process, desk, taking, effects)
        self._arm(process, desk)

    def _carried_out(self, process: Process, effects: Iterable[T | Send | Emit]) -> Iterator[T]:
        return carried_out(
            effects,
            partial(self._network.send, process),
            lambda notice: self._checks.told(self._schedule.now, process, notice),
        )

    # --- giving ---------------------------------------------------------------------------

    def _share(
        self, process: Process, desk: Desk, taking: _Taking, effects: list[ShareEffect]
    ) -> None:
        for want in self._carried_out(process, effects):
            self._send_piece(process, desk, want.peer, want.piece)
            taking.sharing.sent(want.peer)
        if taking.sharing.over and desk.shared is taking:
            desk.shared = None

    def _give(self, process: Process, desk: Desk, effects: list[GiveEffect]) -> None:
        for effect in self._carried_out(process, effects):
            match effect:
                case WantSnapshot():
                    desk.wanted_s = self._schedule.now
                case SendPiece(peer=peer, piece=piece):
                    self._send_piece(process, desk, peer, piece)
                    desk.giving.sent(peer)
                case DropSnapshots(kept=kept):
                    desk.images = {n: image for n, image in desk.images.items() if n in kept}

    def _send_piece(self, process: Process, desk: Desk, peer: PeerId, name: bytes) -> None:
        held = (image.pieces.get(name) for image in desk.images.values())
        piece = next((piece for piece in held if piece is not None), None)
        if piece is None and desk.shared is not None:
            piece = desk.shared.pieces.get(name)
        if piece is not None:
            length = self._piece_bytes if type(piece) is Piece else self._manifest_bytes
            if process.corrupt and type(piece) is Piece:
                piece = Piece(piece.index, piece.value + 1.0)
            group = GroupId(name[:NAME_BYTES])
            header = ChunkHeader(ChunkKind.STATE, 0, 0, length, 0, group, 0.0, 0)
            event = ChunkArrived(process.peer, header, "")
            self._network.send_chunk(process, peer, event, piece)

    # --- time -----------------------------------------------------------------------------

    def _clock(self, process: Process) -> float:
        return self._schedule.now + process.offset

    def _arm(self, process: Process, desk: Desk) -> None:
        wakeups = (
            desk.giving.wakeup,
            desk.taking.machine.wakeup if desk.taking else None,
            desk.shared.sharing.wakeup if desk.shared else None,
        )
        due = min((at for at in wakeups if at is not None), default=None)
        if due is None:
            return
        due = max(due - process.offset, self._schedule.now)
        if desk.timer is None or due < desk.timer:
            desk.timer = due
            self._schedule.at(due, self._tick, process, due)

    def _tick(self, process: Process, due: float) -> None:
        desk = process.desk
        if desk is None or desk.timer != due or not process.alive:
            return
        desk.timer = None
        if not process.paused:
            self.tick(process)

    def tick(self, process: Process) -> None:
        """Time has passed for a process, or it goes on after a pause."""
        desk = process.desk
        assert desk is not None, "opened when it started"
        # What rounding took from the offset must not make a tick that changes nothing.
        now = self._clock(process) + 1e-6
        if desk.taking is not None and desk.taking.machine.wakeup <= now:
            self._take(process, desk, desk.taking.machine.tick(now))
        if desk.shared is not None:
            desk.shared.sharing.tick(now)
            self._share(process, desk, desk.shared, [])
        if desk.giving.wakeup is not None and desk.giving.wakeup <= now:
            self._give(process, desk, desk.giving.tick(now))
        self._arm(process, desk)
