"""Peers around one key, their joins and announcements, for conversations with a matchmaker."""

from __future__ import annotations

import random

import msgspec

from moshpit.config import MatchmakingConfig
from moshpit.protocol import announcement
from moshpit.protocol.machine import (
    Effect,
    Received,
    Send,
)
from moshpit.protocol.matchmaking import Matchmaker
from moshpit.sim.signer import SIM_RUN, SimSigner
from moshpit.types import PeerId
from moshpit.wire.messages import (
    GroupFormed,
    GroupKey,
    Join,
    Message,
)

from .harness_matchmaking import MATCHMAKING, ROUND, StaticView, fields, peer_id, record

KEY = GroupKey(0, 0, (0,))
_START = announcement.key_hash(SIM_RUN, KEY)
# On the ring of KEY: H is the host, then A, B, C.
H, A, B, C = sorted((peer_id(n) for n in range(4)), key=lambda peer: (peer < _START, peer))
STRANGER = peer_id(99)


def make(
    me: PeerId,
    others: tuple[PeerId, ...] = (H, A, B),
    config: MatchmakingConfig = MATCHMAKING,
    roles: dict[PeerId, str] | None = None,
) -> Matchmaker:
    """Return a peer that knows these peers."""
    roles = roles or {}
    ids = sorted({me, *others})
    view = StaticView(me, [record(peer, roles.get(peer, "worker")) for peer in ids])
    return Matchmaker(SimSigner(me), view, config, ROUND, random.Random(1))


def view_of(machine: Matchmaker) -> StaticView:
    view = machine._view
    assert isinstance(view, StaticView)
    return view


def join(peer: PeerId, nonce: int = 1, **changes: object) -> Join:
    """Return a peer's signed join for KEY."""
    said = fields()
    values: dict[str, object] = {
        "peer": peer,
        "key": KEY,
        "nonce": nonce,
        "role": said.role,
        "schema": said.schema,
        "vector_chunks": said.vector_chunks,
        "bandwidth": said.bandwidth,
        "weighs": said.weighs,
        "origin": said.origin,
        "vector_bytes": said.vector_bytes,
    }
    return SimSigner(peer).sign_message(Join(**(values | changes)))  # type: ignore[arg-type]


def got(machine: Matchmaker, sender: PeerId, message: Message, now: float = 0.0) -> list[Effect]:
    return machine.handle(Received(sender, message), now)  # type: ignore[arg-type]


def group_of(*joins: Join, host: PeerId = H, **changes: object) -> GroupFormed:
    """Return a host's signed announcement."""
    formed = announcement.form(SimSigner(host), joins, [()] * len(joins), ROUND, b"serial")
    assert formed is not None
    return SimSigner(host).sign_message(msgspec.structs.replace(formed, **changes))  # type: ignore[arg-type]


def sent(effects: list[Effect], to: PeerId) -> list[Message]:
    return [e.message for e in effects if isinstance(e, Send) and e.peer == to]


def formed_in(effects: list[Effect]) -> GroupFormed:
    return next(
        e.message for e in effects if isinstance(e, Send) and isinstance(e.message, GroupFormed)
    )
