"""Matchmaking: a peer that wants a group finds the others who want the same one.

The contract is docs/internals/protocol.md "Matchmaking"; `hosting` is the other side.

- The host of a key is the first live dialable peer at or after the key's hash on the ring of
  ids. A host that is lost, silent or unhelpful is passed over for its successor.
- Each join has its own nonce. An announcement is taken if it holds one of the joins of the
  present seek, just as it was sent; so also one that a groupmate passes on after the host died.
- A seek always ends, with `GroupReady` or `SeekFailed`, after a bounded number of joins, each
  of which waits for a bounded time.
- A call from a host that comes before mine on the ring moves me there: it lives after all. A
  call from one that comes after mine is declined, and the caller is told of mine.
- This peer's own host and seeker talk by the same messages; they just never leave the process.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from moshpit.config import MatchmakingConfig, RoundConfig
from moshpit.events import Notice
from moshpit.protocol import announcement
from moshpit.protocol.hosting import EPOCHS_AHEAD_MAX, Hosting
from moshpit.protocol.machine import (
    Effect,
    Emit,
    Event,
    GroupReady,
    LinkDown,
    Received,
    Rng,
    SeekFailed,
    Send,
    Signer,
    Silent,
    Tick,
    View,
)
from moshpit.types import PeerId, short
from moshpit.wire.messages import (
    Call,
    CallReply,
    GroupFormed,
    GroupKey,
    Join,
    JoinAck,
    JoinRefused,
    Redirect,
    Unjoin,
)

JOINS_MAX = 12  # guess: joins of one seek before it fails
REDIRECTS_MAX = 2  # docs/internals/protocol.md: the third join is always taken
SCHEMA_REFUSALS_MAX = 2  # one host may lie or be the odd one out; two are believed
INVITATIONS_MAX = 16  # guess: keys whose caller is remembered
TOLD_MAX = 8  # guess: hosts that are kept hoping at once
HOLD_MARGIN_S = 5.0  # guess: how much longer than its window a host may assemble


class JoinFields(msgspec.Struct, frozen=True):
    """What a peer says of itself when it seeks a group.

    Attributes:
        role: its `Role`.
        schema: hash of what it averages, not empty.
        vector_chunks: chunks of its vector.
        vector_bytes: bytes of its vector; 0 is unknown.
        planned: how many peers its plan is for; 0 is unknown.
        bandwidth: min(up, down) in bytes per second; 0 is unknown.
        weighs: whether its value has mass.
        origin: the group whose mean it brings, empty on the first axis.
        fill_s: seconds until its vector will be complete.
    """

    role: str
    schema: bytes
    vector_chunks: int
    vector_bytes: int
    bandwidth: float
    weighs: bool
    origin: bytes
    planned: int = 0
    fill_s: float = 0.0


@dataclass(slots=True)
class _Seek:
    """A search for the group of one key."""

    key: GroupKey
    fields: JoinFields
    ring: bytes
    ends_at: float
    host: PeerId | None = None
    nonce: int = 0
    silent_at: float = 0.0
    """When the host counts as silent."""
    hold_until: float = 0.0
    """When even a host that acknowledges is passed over."""
    joins: dict[int, tuple[PeerId, Join]] = field(default_factory=dict[int, tuple[PeerId, Join]])
    """What was sent to whom, by nonce."""
    passed: dict[PeerId, str] = field(default_factory=dict[PeerId, str])
    """Hosts that were passed over, and why."""
    redirects: int = 0
    refused_epoch: int = -1
    acked_at: float = -math.inf
    """When the host last acknowledged the present join."""
    told: dict[PeerId, bool] = field(default_factory=dict[PeerId, bool])
    """Other hosts that wait for me because mine may have died."""


class Matchmaker:
    """Seeks groups for this peer, and hosts groups for others (implements `Machine`).

    Attributes:
        epoch: the epoch that this peer is at; set by its node. Joins for keys below it are
            refused as stale, unless their group already assembles here.
        ready_s: seconds until this peer could join when called; -1: it cannot say. Set by its
            node.
        declines: calls are answered with "not coming". Set by its node.
        bound: an epoch and axis, and the only key up to there that this peer will still seek
            (None: none); other calls are declined. Set by its node in a torus row.
    """

    def __init__(
        self,
        signer: Signer,
        view: View,
        config: MatchmakingConfig,
        round_config: RoundConfig,
        rng: Rng,
    ) -> None:
        self.ready_s = -1.0
        self.declines = False
        self.bound: tuple[tuple[int, int], GroupKey | None] | None = None
        self._signer = signer
        self._me = signer.peer
        self._view = view
        self._config = config
        self._hosting = Hosting(signer, view, config, round_config, rng)
        self.rankings = self._hosting.rankings
        self._seek: _Seek | None = None
        self._nonce = 0
        self._called: GroupKey | None = None
        self._invited: dict[GroupKey, PeerId] = {}
        """For keys not sought yet, the first on the ring of those that called: they live."""
        self._met = (-1, -1)
        """Epoch and axis of the latest group that this peer got into."""

    @property
    def epoch(self) -> int:
        return self._hosting.epoch

    @epoch.setter
    def epoch(self, epoch: int) -> None:
        self._hosting.epoch = epoch

    def advance(self, epoch: int, now: float) -> None:
        """An epoch is over, another one begins."""
        self._hosting.over_at = now if epoch == self.epoch + 1 else -math.inf
        self.epoch = epoch

    @property
    def called(self) -> GroupKey | None:
        """The newest key of this epoch or later for which a host called in vain so far."""
        if self._called is not None and self._called.epoch < self.epoch:
            self._called = None
        return self._called

    @property
    def seeking(self) -> GroupKey | None:
        """The key that this peer seeks now."""
        return self._seek.key if self._seek else None

    @property
    def wakeup(self) -> float | None:
        """When a `Tick` is due."""
        due = self._hosting.wakeup
        if self._seek is None:
            return due
        mine = min(self._seek.silent_at, self._seek.hold_until, self._seek.ends_at)
        return mine if due is None else min(mine, due)

    # --- what the node asks for -----------------------------------------------------------

    def seek(self, key: GroupKey, fields: JoinFields, now: float) -> list[Effect]:
        """Look for the group of a key; ends with `GroupReady` or `SeekFailed`.

        A search that is still going on is cancelled.
        """
        effects = self.cancel(now)
        waits = 2 * self._config.window_s_max + HOLD_MARGIN_S
        self._seek = _Seek(
            key=key,
            fields=fields,
            ring=announcement.key_hash(self._signer.run, key),
            ends_at=now + waits + JOINS_MAX * self._config.join_timeout_s,
        )
        if self._called is not None and _stage(self._called) <= _stage(key):
            self._called = None
        return self._local(effects + self._join_next(self._seek, now), now)

    def cancel(self, now: float) -> list[Effect]:
        """Stop looking; no `GroupReady` or `SeekFailed` will come of that search."""
        seek, self._seek = self._seek, None
        if seek is None or seek.host is None:
            return []
        return self._local([Send(seek.host, Unjoin(seek.key))], now)

    def announce(self, formed: GroupFormed, now: float) -> list[Effect]:
        """Take an announcement that a groupmate passed on; the same checks as from the host."""
        return self._local(self._formed(None, formed, now), now)

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        effects: list[Effect] = []
        match event:
            case Tick():
                effects = self._hosting.tick(now) + self._tick(now)
            case LinkDown(peer=peer):
                effects = self._hosting.lost(peer, now)
                if self._seek is not None and self._seek.host == peer:
                    effects += self._pass_over(self._seek, "lost", now)
            case Received(peer=sender, message=message):
                effects = self._receive(sender, message, now)
            case _:
                pass
        return self._local(effects, now)

    # --- routing --------------------------------------------------------------------------

    def _local(self, effects: list[Effect], now: float) -> list[Effect]:
        """Deliver what this peer sends to itself, until only effects for the driver are left."""
        result: list[Effect] = []
        queue = deque(effects)
        while queue:
            effect = queue.popleft()
            if isinstance(effect, Send) and effect.peer == self._me:
                queue.extendleft(reversed(self._receive(self._me, effect.message, now)))
            else:
                result.append(effect)
        return result

    def _receive(self, sender: PeerId, message: object, now: float) -> list[Effect]:
        match message:
            case Join():
                return self._hosting.joined(sender, message, now)
            case Unjoin():
                return self._hosting.unjoined(sender, message, now)
            case CallReply():
                return self._hosting.replied(sender, message, now)
            case Redirect(nonce=0):
                return self._hosting.redirected(sender, message, now)
            case Redirect():
                return self._redirected(sender, message, now)
            case JoinAck():
                return self._acked(sender, message, now)
            case JoinRefused():
                return self._refused(sender, message, now)
            case Call():
                return self._on_call(sender, message.key, now)
            case GroupFormed():
                return self._formed(sender, message, now)
            case _:
                return []

    # --- seeking --------------------------------------------------------------------------

    def _join(self, seek: _Seek, host: PeerId, insist: bool, now: float) -> list[Effect]:
        """Send a new join to a host."""
        # Joins of a later life of this peer have higher nonces.
        self._nonce = max(self._nonce + 1, (self._view.me.incarnation & 0x3FFFFFFF) << 32 | 1)
        fields = seek.fields
        join = self._signer.sign_message(
            Join(
                peer=self._me,
                key=seek.key,
                nonce=self._nonce,
                role=fields.role,
                schema=fields.schema,
                vector_chunks=fields.vector_chunks,
                bandwidth=fields.bandwidth,
                weighs=fields.weighs,
                origin=fields.origin,
                vector_bytes=fields.vector_bytes,
                insist=insist,
                planned=fields.planned,
                fill_s=fields.fill_s,
            )
        )
        seek.host = host
        seek.nonce = self._nonce
        seek.joins[self._nonce] = (host, join)
        seek.acked_at = -math.inf
        seek.silent_at = now + self._config.join_timeout_s
        seek.hold_until = now + self._config.window_s_max + HOLD_MARGIN_S
        return [Send(host, join)]

    def _join_next(self, seek: _Seek, now: float) -> list[Effect]:
        """Join at the first host that was not passed over, or give up."""
        seek.host = None
        host = next(
            (
                peer
                for peer in announcement.candidates(self._view, seek.ring)
                if peer not in seek.passed and (peer == self._me or self._view.reachable(peer))
            ),
            None,
        )
        inviter = self._invited.pop(seek.key, None)
        if inviter is not None and inviter not in seek.passed:
            lesser = host is None or announcement.comes_before(seek.ring, inviter, host)
            host = inviter if lesser else host
        if host is not None and len(seek.joins) < JOINS_MAX:
            return self._join(seek, host, False, now)
        reason = next(reversed(seek.passed.values()), "no-host")
        return self._fail(seek, reason, max(self.epoch, seek.refused_epoch))

    def _fail(self, seek: _Seek, reason: str, epoch: int) -> list[Effect]:
        self._seek = None
        tried = ", ".join(f"{short(peer)} {why}" for peer, why in seek.passed.items())
        detail = f"{reason}; hosts tried: {tried or 'none'}"
        effects: list[Effect] = [Send(seek.host, Unjoin(seek.key))] if seek.host else []
        return [*effects, Emit(Notice("no-group", None, detail)), SeekFailed(reason, epoch)]

    def _pass_over(self, seek: _Seek, reason: str, now: float) -> list[Effect]:
        """Give up the present host and join at the next one."""
        effects: list[Effect] = []
        if seek.host is not None:
            seek.passed[seek.host] = reason
            effects.append(Emit(Notice("host-passed-over", seek.host, reason)))
            if reason == "silent":
                effects.append(Silent(seek.host))
            if reason in ("silent", "holds", "bad-group"):
                effects.append(Send(seek.host, Unjoin(seek.key)))
        return effects + self._join_next(seek, now)

    def _tick(self, now: float) -> list[Effect]:
        seek = self._seek
        if seek is None:
            return []
        if now >= seek.ends_at:
            return self._fail(seek, "timeout", self.epoch)
        if now >= seek.hold_until:
            return self._pass_over(seek, "holds", now)
        if now >= seek.silent_at:
            return self._pass_over(seek, "silent", now)
        return []

    def _awaited(self, sender: PeerId, key: GroupKey, nonce: int) -> _Seek | None:
        """Return the seek if this is an answer to its present join."""
        seek = self._seek
        if seek is None or seek.host != sender or seek.key != key or seek.nonce != nonce:
            return None
        return seek

    def _acked(self, sender: PeerId, message: JoinAck, now: float) -> list[Effect]:
        seek = self._awaited(sender, message.key, message.nonce)
        if seek is None:
            return []
        seek.acked_at = now
        seek.silent_at = now + self._config.join_timeout_s
        return self._release(seek)

    def _release(self, seek: _Seek) -> list[Effect]:
        """Tell the other hosts that were given hope that this peer is served."""
        told, seek.told = seek.told, {}
        return [Send(host, CallReply(seek.key, False, -1.0)) for host in told if host != seek.host]

    def _refused(self, sender: PeerId, message: JoinRefused, now: float) -> list[Effect]:
        seek = self._awaited(sender, message.key, message.nonce)
        if seek is None:
            return []
        reason = message.reason[:32]
        epoch = message.epoch if 0 <= message.epoch <= announcement.EPOCH_MAX else -1
        seek.refused_epoch = max(seek.refused_epoch, epoch)
        effects: list[Effect] = [
            Emit(Notice("join-refused", sender, f"{reason}: {message.detail[:200]}"))
        ]
        final = (reason == "stale" and epoch > seek.key.epoch) or reason == "no-reducer"
        if reason == "schema":
            refusals = sum(why == "schema" for why in seek.passed.values())
            final = refusals + 1 >= SCHEMA_REFUSALS_MAX
        if final:
            seek.passed[sender] = reason
            seek.host = None
            return effects + self._fail(seek, reason, max(self.epoch, epoch))
        return effects + self._pass_over(seek, reason, now)

    def _redirected(self, sender: PeerId, message: Redirect, now: float) -> list[Effect]:
        seek = self._awaited(sender, message.key, message.nonce)
        if seek is None:
            return []
        if len(seek.joins) >= JOINS_MAX:
            return self._pass_over(seek, "redirects", now)
        seek.redirects += 1
        for host in message.hosts[:8]:
            peer = PeerId(host)
            # A silent host that others believe in may only have been slow: it has a second chance.
            if seek.redirects == 1 and seek.passed.get(peer) == "silent":
                del seek.passed[peer]
            if peer == sender or peer in seek.passed:
                continue
            if announcement.can_host(self._view, peer) and (
                peer == self._me or self._view.reachable(peer)
            ):
                return self._join(seek, peer, seek.redirects >= REDIRECTS_MAX, now)
        return self._join(seek, sender, True, now)

    def _on_call(self, caller: PeerId, key: GroupKey, now: float) -> list[Effect]:
        """Answer a host that expects this peer."""
        no: list[Effect] = [Send(caller, CallReply(key, False, -1.0))]
        if announcement.key_flaw(key):
            return [Emit(Notice("refused", caller, "call: malformed key")), *no]
        seek = self._seek
        if seek is not None and seek.key == key:
            return self._called_while_seeking(seek, caller, now)
        stage = _stage(key)
        behind = key.epoch < self.epoch or key.epoch > self.epoch + EPOCHS_AHEAD_MAX
        if self.declines or behind or stage <= self._met:
            return no
        if self.bound is not None and stage <= self.bound[0] and key != self.bound[1]:
            return no
        if seek is not None and stage <= _stage(seek.key):
            return no
        if self._called is None or stage > _stage(self._called):
            self._called = key
        self._invite(caller, key)
        return [Send(caller, CallReply(key, True, self.ready_s))]

    def _invite(self, caller: PeerId, key: GroupKey) -> None:
        """Remember which host to join at when this key is sought."""
        before = self._invited.get(key)
        if not announcement.can_host(self._view, caller):
            return
        ring = announcement.key_hash(self._signer.run, key)
        if before is None or announcement.comes_before(ring, caller, before):
            self._invited[key] = caller
        while len(self._invited) > INVITATIONS_MAX:
            del self._invited[next(iter(self._invited))]

    def _called_while_seeking(self, seek: _Seek, caller: PeerId, now: float) -> list[Effect]:
        """Answer another host of the key that this peer seeks: one of the two should have all."""
        host = seek.host
        if host == caller or host is None:
            return [Send(caller, CallReply(seek.key, True, 0.0))]
        better = announcement.comes_before(seek.ring, caller, host)
        if better and len(seek.joins) < JOINS_MAX and announcement.can_host(self._view, caller):
            seek.passed.pop(caller, None)
            return [Send(host, Unjoin(seek.key)), *self._join(seek, caller, True, now)]
        if now - seek.acked_at > self._config.join_timeout_s / 2 and len(seek.told) < TOLD_MAX:
            # Mine should have acknowledged by now; the caller may be the next that I try.
            seek.told[caller] = True
            return [Send(caller, CallReply(seek.key, True, max(0.0, seek.silent_at - now)))]
        return [Send(caller, Redirect(seek.key, 0, (host,)))]

    def _formed(self, sender: PeerId | None, formed: GroupFormed, now: float) -> list[Effect]:
        """Judge an announcement; enter the group or refuse it."""
        seek = self._seek
        source = PeerId(formed.host) if sender is None else sender
        if seek is None or formed.key != seek.key:
            return []  # a second announcement, or one for a search that is over
        seat = next((i for i, join in enumerate(formed.joins) if join.peer == self._me), None)
        nonce = -1 if seat is None else formed.joins[seat].nonce
        sent = seek.joins.get(nonce)
        if seat is None or sent is None or sent != (formed.host, formed.joins[seat]):
            flaw = "not a join of mine that this host was sent"
        else:
            flaw = announcement.formed_flaw(formed, self._signer, self._config.group_size_limit)
            mine = seek.fields
            first = formed.joins[seat]
            if not flaw and (first.schema, first.vector_chunks) != (
                mine.schema,
                mine.vector_chunks,
            ):
                flaw = "another vector"
        if flaw:
            effects: list[Effect] = [Emit(Notice("refused", source, f"group: {flaw}"))]
            if seek.host == source and sender is not None:
                effects += self._pass_over(seek, "bad-group", now)
            return effects
        assert seat is not None
        self._seek = None
        self._met = max(self._met, _stage(formed.key))
        effects = [GroupReady(formed, seat), *self._release(seek)]
        if seek.host is not None and seek.host != formed.host:
            effects.append(Send(seek.host, Unjoin(seek.key)))
        return effects


def _stage(key: GroupKey) -> tuple[int, int]:
    """Return how far in the run a key is: its epoch and axis."""
    return key.epoch, key.axis
