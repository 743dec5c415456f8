"""The trace of a run: a hash that proves that a replay is one, and a log that people can read.

Both are of the same sequence: every event that a node is given, with the effects that came of
it, and every fault.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from enum import Enum
from typing import TextIO

import msgspec

from moshpit.protocol.machine import (
    Accumulate,
    AccumulateOwn,
    AdoptResult,
    AveragingDue,
    AveragingEnded,
    BeginAveraging,
    CancelSends,
    ChunkArrived,
    CloseRound,
    Effect,
    Emit,
    Event,
    Finalize,
    GroupReady,
    Leave,
    LinkDown,
    LinkUp,
    LocalProgress,
    Received,
    ResetSum,
    RoundEnded,
    SeekFailed,
    Send,
    SendContribution,
    SendResult,
    TakeResult,
    Tick,
)
from moshpit.sim.process import Process
from moshpit.types import short
from moshpit.wire.messages import Message

_FLUSH_BYTES = 1 << 16
_EVENTS: dict[type, int] = {
    t: i
    for i, t in enumerate(
        (Tick, LinkUp, LinkDown, Received, ChunkArrived, BeginAveraging, LocalProgress, Leave)
    )
}
_EFFECTS: dict[type, int] = {
    t: i
    for i, t in enumerate(
        (
            Send, Emit, GroupReady, SeekFailed, SendContribution, Accumulate, AccumulateOwn,
            ResetSum, Finalize, SendResult, TakeResult, CancelSends, RoundEnded, CloseRound,
            AveragingDue, AveragingEnded, AdoptResult,
        )
    )
}  # fmt: skip
_TAGS: dict[type, int] = {}
_head = struct.Struct("<dIBB").pack
_chunk = struct.Struct("<IIBdQ").pack
_mass = struct.Struct("<Id").pack
_HIDDEN = frozenset(("signature", "admission", "gossip", "joins", "bounds", "next_path", "schema"))


def _tag(message: Message) -> int:
    kind = type(message)
    tag = _TAGS.get(kind)
    if tag is None:
        tag = _TAGS[kind] = int(kind.__struct_config__.tag or 0)
    return tag


class Trace:
    """Keeps the hash, and the log where one is wanted.

    Args:
        log: where to write what people can read.
        name: how a peer is called in it.
    """

    def __init__(self, log: TextIO | None, name: Callable[[bytes], str]) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        self._pending = bytearray()
        self._log = log
        self._name = name
        self.events = 0

    def event(self, now: float, process: Process, event: Event, effects: list[Effect]) -> None:
        """Record what a node was given and what it wants done."""
        self.events += 1
        pending = self._pending
        code = _EVENTS[type(event)]
        pending += _head(now, process.index, code, len(effects) & 0xFF)
        match event:
            case Received(peer=peer, message=message):
                pending.append(_tag(message))
                pending += peer[:4]
            case ChunkArrived(peer=peer, header=h):
                pending += _chunk(h.chunk, h.ballot, h.kind, h.mass, h.seats)
                pending += peer[:4]
            case LinkUp(peer=peer) | LinkDown(peer=peer):
                pending += peer[:4]
            case _:
                pass
        for effect in effects:
            pending.append(_EFFECTS[type(effect)])
            match effect:
                case Send(peer=peer, message=message):
                    pending.append(_tag(message))
                    pending += peer[:4]
                case Finalize(chunk=chunk, mass=mass) | AdoptResult(chunk=chunk, mass=mass):
                    pending += _mass(chunk, mass)
                case _:
                    pass
        if len(pending) > _FLUSH_BYTES:
            self._hash.update(pending)
            pending.clear()
        if self._log is not None:
            self._tell(self._log, now, process, event, effects)

    def note(self, now: float, text: str) -> None:
        """Record something that the world did."""
        self._pending += struct.pack("<d", now) + text.encode()
        if self._log is not None:
            self._log.write(f"{now:11.6f} *** {text}\n")

    def digest(self) -> str:
        """Return the hash of everything so far."""
        self._hash.update(self._pending)
        self._pending.clear()
        return self._hash.hexdigest()

    # --- for people -----------------------------------------------------------------------

    def _tell(
        self, log: TextIO, now: float, process: Process, event: Event, effects: list[Effect]
    ) -> None:
        log.write(f"{now:11.6f} {process.name:<8} {self._words(event)}\n")
        for effect in effects:
            log.write(f"{'':20}   -> {self._words(effect)}\n")

    def _words(self, thing: object) -> str:
        if isinstance(thing, msgspec.Struct):
            fields = (
                f"{name}={self._words(getattr(thing, name))}"
                for name in thing.__struct_fields__
                if name not in _HIDDEN
            )
            return f"{type(thing).__name__}({', '.join(fields)})"
        if isinstance(thing, bytes):
            return self._name(thing) if len(thing) == 32 else short(thing)
        if isinstance(thing, float):
            return f"{thing:.6g}"
        if isinstance(thing, Enum):
            return thing.name.lower()
        if isinstance(thing, tuple):
            items: tuple[object, ...] = thing  # type: ignore[assignment]
            shown = ", ".join(self._words(item) for item in items[:16])
            return f"({shown}{', …' if len(items) > 16 else ''})"
        return repr(thing)
