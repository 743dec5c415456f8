"""Who averages something else, and so will never meet this peer: said once of each; and what
an aux peer takes from the others' records."""

from __future__ import annotations

from moshpit.events import Notice
from moshpit.protocol.machine import Effect, Emit, View
from moshpit.protocol.view import Entry
from moshpit.types import PeerId, Role

MISFITS_MAX = 64  # guess: peers with another model that are named


class Misfits:
    """Finds peers with another schema among the records that change.

    Args:
        view: the picture of the swarm.
    """

    def __init__(self, view: View) -> None:
        self._view = view
        self._named: dict[PeerId, bytes] = {}
        self._changed: dict[PeerId, None] = {}
        """Whose records have changed since misfits were looked for."""

    def note(self, entry: Entry) -> None:
        """A record has changed."""
        if entry.record.schema != self._view.me.schema:
            self._changed[PeerId(entry.record.peer)] = None

    def name(self) -> list[Effect]:
        """Say who is new among them."""
        mine = self._view.me.schema
        if not mine:
            return []
        effects: list[Effect] = []
        changed, self._changed = self._changed, {}
        for peer in changed:
            record = self._view.record(peer)
            if record is None or len(self._named) >= MISFITS_MAX:
                continue
            if record.schema not in (b"", mine, self._named.get(peer)):
                self._named[peer] = record.schema
                effects.append(Emit(Notice("other-model", peer, "averages other tensors")))
        return effects


def schema_to_reduce(view: View) -> bytes:
    """Return what the others average, for an aux peer that does not know yet: it has no model.
    Empty: this is none, or nobody has said."""
    if view.me.role != Role.AUX or view.me.schema:
        return b""
    known = (view.record(peer) for peer in view.live)
    return next((r.schema for r in known if r is not None and r.schema), b"")
