"""The host's side of matchmaking: joins come in, a group goes out.

Rules:

- Every join is answered: acknowledged, refused with a reason, redirected, or announced.
- The first join of a key opens an *assembly*. The plan of this peer's view says who else is
  expected; they are called. An expected peer is waited for while it is `Waiting`; it stops
  being so when it joins, declines, is unreachable, keeps silent, or its time is up.
- With nobody left to wait for, the group forms in that same call. No timer is involved where
  all come, and none outlives the window.
- A joiner that planned for more peers than this view has knows something that is still on its
  way here: the assembly stays open for it, a fraction of what a call may take, and is planned
  anew as the view grows.
- Clients cannot be dialled, so they are not called: they are waited for, while the view has
  them alive, as peers that cannot say when they come.
- Who is host is a matter of views. A join that belongs elsewhere is redirected, unless an
  assembly is open here or the joiner insists. Two hosts that learn of each other through a
  member (`Redirect` from a called peer) merge at the one that comes first on the ring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from moshpit.config import MatchmakingConfig, RoundConfig
from moshpit.events import Notice
from moshpit.protocol import announcement, grid, torus
from moshpit.protocol.machine import Effect, Emit, Rng, Send, Signer, Silent, View
from moshpit.protocol.ranking import Rankings
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

ASSEMBLIES_MAX = 64  # guess: keys that one peer hosts at once
CLOSED_MAX = 64  # guess: announcements kept to answer repeated joins
EPOCHS_AHEAD_MAX = 4  # guess: how far the swarm may be ahead of this host's own epoch
CALLS_MAX = 3  # a call and two more before a peer counts as silent
NEWS_SHARE = 0.8  # guess: × call_timeout_s, how long news of more peers may take to come
RECALL_S = 1.0  # guess: how often a peer that said it comes is asked again
REDIRECTS_NAMED = 3  # hosts in a redirect
SPREAD_SMOOTHING = 0.3  # guess: weight of the newest spread in the moving mean
WINDOW_FACTOR = 4.0  # guess: × the usual spread of arrivals
WINDOW_MARGIN_S = 1.0  # guess


@dataclass(slots=True)
class Waiting:
    """An expected peer that has not joined yet."""

    until: float
    """When it is given up."""
    call_at: float
    """When it is called (again); infinity for clients that have no link to here."""
    calls: int = 0
    """Calls since it last answered."""
    answered: bool = False
    limit: float = 0.0
    """How far its answers can move ``until``; set by the first one."""


@dataclass(slots=True)
class Assembly:
    """A group in the making."""

    key: GroupKey
    schema: bytes
    chunks: int
    opened_at: float
    ack_at: float
    plan: grid.Plan | None = None
    torus: torus.Torus | None = None
    """The layout of the torus schedule, where the plan has one."""
    expected: tuple[PeerId, ...] = ()
    """By slot."""
    joins: dict[PeerId, Join] = field(default_factory=dict[PeerId, Join])
    waiting: dict[PeerId, Waiting] = field(default_factory=dict[PeerId, Waiting])
    won_back: dict[PeerId, bool] = field(default_factory=dict[PeerId, bool])
    """Members that went away and were called once more."""
    last_join_at: float = 0.0
    planned: int = 0
    """The most peers that a joiner planned for."""
    informed_at: float = 0.0
    """When the view is believed, although it has fewer."""

    @property
    def uninformed(self) -> bool:
        """Whether a joiner knows of more peers than the plan has."""
        return self.planned > (self.plan.n if self.plan else 0)

    def due(self) -> float:
        """When the next thing happens without a message."""
        times = (min(waiting.until, waiting.call_at) for waiting in self.waiting.values())
        # While members are waited for, their times count, and this one may lie in the past.
        informed_at = self.informed_at if self.uninformed and not self.waiting else self.ack_at
        return min(self.ack_at, informed_at, min(times, default=self.ack_at))


class Hosting:
    """All the groups that assemble at this peer. Driven by `Matchmaker`.

    Attributes:
        epoch: joins for keys below it are stale, unless their group is assembling already or
            they are only a little late.
        over_at: when the epoch before was over here.
        rankings: by which plan groups meet.
    """

    def __init__(
        self,
        signer: Signer,
        view: View,
        config: MatchmakingConfig,
        round_config: RoundConfig,
        rng: Rng,
    ) -> None:
        self.epoch = 0
        self.over_at = -math.inf
        self._signer = signer
        self._view = view
        self._config = config
        self._round_config = round_config
        self._assemblies: dict[GroupKey, Assembly] = {}
        self._closed: dict[GroupKey, GroupFormed] = {}
        self._spread_s: float | None = None
        # Two lives of one peer must not make the same group id.
        self._serial = rng.getrandbits(64) << 32
        self.rankings = Rankings(view, config.group_size)
        self._seen_generation = view.generation

    @property
    def wakeup(self) -> float | None:
        """When `tick` is due."""
        if not self._assemblies:
            return None
        return min(assembly.due() for assembly in self._assemblies.values())

    @property
    def assembling(self) -> tuple[GroupKey, ...]:
        """The keys that are assembling here, oldest first."""
        return tuple(self._assemblies)

    # --- what comes in --------------------------------------------------------------------

    def joined(self, sender: PeerId, join: Join, now: float) -> list[Effect]:
        """Take, refuse or redirect a join."""
        flaw = self._judge(sender, join)
        if flaw:
            reason, detail = flaw
            notice = Notice("refused", sender, f"join: {reason}: {detail}")
            return [Emit(notice), self._refusal(sender, join, reason, detail)]
        key = join.key
        closed = self._closed.get(key)
        if closed is not None and join in closed.joins:
            return [Send(sender, closed)]
        assembly = self._assemblies.get(key)
        if assembly is None:
            if key.epoch < self.epoch and not self._late(key, now):
                return [self._refusal(sender, join, "stale", f"epoch {key.epoch} is over")]
            better = self._better_hosts(key)
            if better and not join.insist:
                return [Send(sender, Redirect(key, join.nonce, better))]
            if len(self._assemblies) >= ASSEMBLIES_MAX:
                return [self._refusal(sender, join, "full", f"{ASSEMBLIES_MAX} groups here")]
            assembly = self._open(join, now)
        elif (join.schema, join.vector_chunks) != (assembly.schema, assembly.chunks):
            return self._other_vector(sender, join, assembly.schema, assembly.chunks)
        known = assembly.joins.get(sender)
        if known is not None and join.nonce < known.nonce:
            return [self._refusal(sender, join, "replayed", "a newer join of yours is here")]
        if known is None:
            assembly.last_join_at = now
        assembly.joins[sender] = join
        assembly.planned = max(assembly.planned, join.planned)
        assembly.waiting.pop(sender, None)
        if len(assembly.joins) >= self._config.group_size_limit:
            assembly.waiting.clear()
        effects = self._review(assembly, now)
        if key in self._assemblies:
            effects.insert(0, Send(sender, JoinAck(key, join.nonce)))
        return effects

    def unjoined(self, sender: PeerId, message: Unjoin, now: float) -> list[Effect]:
        """Let a member go, and ask it back once: it may have taken a slow host for a dead one."""
        assembly = self._assemblies.get(message.key)
        if assembly is None or assembly.joins.pop(sender, None) is None:
            return []
        if sender in assembly.expected and sender not in assembly.won_back:
            assembly.won_back[sender] = True
            self._wait_for(assembly, sender, now)
        return self._review(assembly, now)

    def replied(self, sender: PeerId, reply: CallReply, now: float) -> list[Effect]:
        """Take a called peer's answer."""
        assembly = self._assemblies.get(reply.key)
        waiting = assembly and assembly.waiting.get(sender)
        if assembly is None or waiting is None:
            return []
        if not reply.coming:
            del assembly.waiting[sender]
            return self._review(assembly, now)
        ready_s = reply.ready_s
        if not (math.isfinite(ready_s) and ready_s >= 0):
            ready_s = -1.0
        # At least until it was asked again: a join may be late by what a busy machine is late.
        soon = max(2 * ready_s, RECALL_S) + self._config.call_timeout_s
        if not waiting.answered:
            window = min(self._config.window_s_max, max(self._window_s(), soon))
            waiting.limit = assembly.opened_at + window
        waiting.until = min(waiting.limit, now + soon) if ready_s >= 0 else waiting.limit
        waiting.answered = True
        waiting.calls = 0
        waiting.call_at = now + RECALL_S
        return []

    def redirected(self, sender: PeerId, message: Redirect, now: float) -> list[Effect]:
        """A called peer says where else this group assembles: merge, if that host is better."""
        assembly = self._assemblies.get(message.key)
        if assembly is None or sender not in assembly.expected:
            return []
        waiting = assembly.waiting.get(sender)
        named = message.hosts[0] if message.hosts else b""
        if waiting is not None and not self._view.reachable(named):
            # Its host is gone, as far as is known here. It will see that, too, and come.
            waiting.calls = 0
            waiting.call_at = now + self._config.call_timeout_s / 2
            return []
        assembly.waiting.pop(sender, None)
        effects: list[Effect] = []
        better = self._better_hosts(message.key)
        if message.hosts and message.hosts[0] in better:
            there = (PeerId(message.hosts[0]),)
            movable = [join for join in assembly.joins.values() if not join.insist]
            for join in movable:
                peer = PeerId(join.peer)
                del assembly.joins[peer]
                effects.append(Send(peer, Redirect(message.key, join.nonce, there)))
        return effects + self._review(assembly, now)

    def lost(self, peer: PeerId, now: float) -> list[Effect]:
        """A peer's link is gone: it is neither member nor awaited."""
        effects: list[Effect] = []
        for assembly in list(self._assemblies.values()):
            gone = assembly.joins.pop(peer, None) is not None
            # A client that never dialled this host has no link to lose.
            waiting = assembly.waiting.get(peer)
            if waiting is not None and waiting.call_at < math.inf:
                del assembly.waiting[peer]
                gone = True
            if gone:
                effects += self._review(assembly, now)
        return effects

    def tick(self, now: float) -> list[Effect]:
        """Do what is due by time, or by a change of the view."""
        changed = self._view.generation != self._seen_generation
        self._seen_generation = self._view.generation
        effects: list[Effect] = []
        for assembly in list(self._assemblies.values()):
            if changed:
                if assembly.uninformed:
                    self._plan(assembly, now)
                for peer in [p for p in assembly.waiting if not self._may_come(p)]:
                    del assembly.waiting[peer]
                for peer in [p for p in assembly.joins if self._died(p)]:
                    del assembly.joins[peer]
            if changed or assembly.due() <= now:
                effects += self._review(assembly, now)
        return effects

    # --- judging --------------------------------------------------------------------------

    def _judge(self, sender: PeerId, join: Join) -> tuple[str, str] | None:
        """Return why a join cannot be taken whatever the assembly, or None."""
        if join.peer != sender:
            return "forged", "sent by somebody else than its peer"
        flaw = announcement.join_flaw(join)
        if flaw:
            return "malformed", flaw
        if join.key.epoch > self.epoch + EPOCHS_AHEAD_MAX:
            return "early", f"epoch {join.key.epoch}, here it is {self.epoch}"
        record = self._view.record(sender)
        if record is not None and record.role != join.role:
            return "role", f"joins as {join.role}, is known as {record.role}"
        mine = self._view.me.schema
        if mine and join.schema != mine:
            return "schema", f"{short(join.schema)}, here it is {short(mine)}"
        if sender != self._signer.peer and not self._signer.verify_message(join, sender):
            return "forged", "not signed by its peer"
        return None

    def _late(self, key: GroupKey, now: float) -> bool:
        """Whether a fault has held up those that meet here in an epoch that is just over."""
        waits_s = self._config.call_timeout_s + self._config.join_timeout_s
        late_s = now - self.over_at if key.epoch == self.epoch - 1 else math.inf
        return key.axis > 0 and not key.span and late_s <= 2 * waits_s + self._round_config.stall_s

    def _other_vector(self, sender: PeerId, join: Join, schema: bytes, chunks: int) -> list[Effect]:
        """Refuse a join whose vector is not the one that assembles here."""
        detail = (
            f"schema {short(join.schema)} in {join.vector_chunks} chunks; "
            f"here it is {short(schema)} in {chunks}"
        )
        notice = Notice("refused", sender, f"join: schema: {detail}")
        return [Emit(notice), self._refusal(sender, join, "schema", detail)]

    def _refusal(self, sender: PeerId, join: Join, reason: str, detail: str) -> Send:
        return Send(sender, JoinRefused(join.key, join.nonce, reason, detail, self.epoch))

    def _better_hosts(self, key: GroupKey) -> tuple[PeerId, ...]:
        """Return the reachable peers that come before this one on the key's ring."""
        me = self._signer.peer
        start = announcement.key_hash(self._signer.run, key)
        before: list[PeerId] = []
        for peer in announcement.candidates(self._view, start):
            if peer == me or len(before) == REDIRECTS_NAMED:
                break
            if self._view.reachable(peer):
                before.append(peer)
        return tuple(before)

    def _may_come(self, peer: PeerId) -> bool:
        """Whether an expected peer can still be hoped for."""
        if announcement.can_host(self._view, peer):
            return peer == self._signer.peer or self._view.reachable(peer)
        return announcement.is_live(self._view, peer)

    def _is_past(self, peer: PeerId, key: GroupKey) -> bool:
        """Whether a peer has told that it is at a later epoch, so it will not come."""
        record = self._view.record(peer)
        return record is not None and record.epoch > key.epoch

    def _died(self, peer: PeerId) -> bool:
        """Whether a member is known, and known to be alive no more."""
        return self._view.record(peer) is not None and not announcement.is_live(self._view, peer)

    # --- assembling -----------------------------------------------------------------------

    def _window_s(self) -> float:
        """How long peers that cannot say when they come are waited for."""
        if self._spread_s is None:
            return min(self._config.window_s_first, self._config.window_s_max)
        return min(self._config.window_s_max, WINDOW_FACTOR * self._spread_s + WINDOW_MARGIN_S)

    def _open(self, join: Join, now: float) -> Assembly:
        key = join.key
        assembly = Assembly(
            key=key,
            schema=join.schema,
            chunks=join.vector_chunks,
            opened_at=now,
            ack_at=now + self._config.join_timeout_s / 3,
            informed_at=now + self._config.call_timeout_s * NEWS_SHARE,
        )
        self._plan(assembly, now)
        self._assemblies[key] = assembly
        return assembly

    def _plan(self, assembly: Assembly, now: float) -> None:
        """See who is expected, and wait for those that were not before."""
        key, before = assembly.key, assembly.expected
        plan, peers = self.rankings.of(key, assembly.schema) or (None, [])
        ranks: Sequence[int] = plan.members(key.axis, key.path) if plan else ()
        assembly.plan = plan
        assembly.torus = None
        if plan is not None and plan.axes == 2:
            reduces = [self._view.dialable(peer) for peer in peers]
            assembly.torus = torus.torus(plan, reduces, assembly.chunks, self._config.schedule)
        if key.span:
            ranks = assembly.torus.members(key.path) if assembly.torus else ()
        assembly.expected = tuple(peers[rank] for rank in ranks)
        for peer in [p for p in assembly.waiting if p not in assembly.expected]:
            del assembly.waiting[peer]
        for peer in assembly.expected:
            if peer not in before and peer not in assembly.joins:
                self._wait_for(assembly, peer, now)

    def _wait_for(self, assembly: Assembly, peer: PeerId, now: float) -> None:
        """Wait for an expected peer, if it can be hoped for; call it if it can be called."""
        if not self._may_come(peer):
            return
        if announcement.can_host(self._view, peer) or self._view.linked(peer):
            silent_at = now + CALLS_MAX * self._config.call_timeout_s / 2
            assembly.waiting[peer] = Waiting(silent_at, now)
        else:
            assembly.waiting[peer] = Waiting(now + self._window_s(), math.inf)

    def _review(self, assembly: Assembly, now: float) -> list[Effect]:
        """Call, acknowledge, give up and close, as far as it is time."""
        effects: list[Effect] = []
        if not assembly.joins:
            del self._assemblies[assembly.key]
            return effects
        for peer, waiting in list(assembly.waiting.items()):
            if self._is_past(peer, assembly.key):
                del assembly.waiting[peer]
            elif now >= waiting.until or (waiting.calls >= CALLS_MAX and now >= waiting.call_at):
                del assembly.waiting[peer]
                if waiting.calls >= CALLS_MAX or (waiting.calls > 0 and not waiting.answered):
                    effects.append(Silent(peer))
            elif now >= waiting.call_at:
                waiting.calls += 1
                waiting.call_at = now + self._config.call_timeout_s / 2
                effects.append(Send(peer, Call(assembly.key)))
        if not assembly.waiting and not (assembly.uninformed and now < assembly.informed_at):
            return effects + self._close(assembly)
        if now >= assembly.ack_at:
            assembly.ack_at = now + self._config.join_timeout_s / 3
            for join in assembly.joins.values():
                effects.append(Send(PeerId(join.peer), JoinAck(assembly.key, join.nonce)))
        return effects

    def _close(self, assembly: Assembly) -> list[Effect]:
        """Form the group, or say to everybody why there is none."""
        key = assembly.key
        del self._assemblies[key]
        joins = list(assembly.joins.values())
        formed = self._form(assembly)
        if formed is None:
            detail = (
                f"all {len(joins)} members are clients, nobody can reduce: start at least one "
                "peer that can be dialled (role worker or aux)"
            )
            return [self._refusal(PeerId(j.peer), j, "no-reducer", detail) for j in joins]
        if len(joins) > 1:
            spread = max(0.0, assembly.last_join_at - assembly.opened_at)
            before = spread if self._spread_s is None else self._spread_s
            self._spread_s = before + SPREAD_SMOOTHING * (spread - before)
        self._closed.pop(key, None)
        self._closed[key] = formed
        while len(self._closed) > CLOSED_MAX:
            del self._closed[next(iter(self._closed))]
        return [Send(PeerId(join.peer), formed) for join in joins]

    def _form(self, assembly: Assembly) -> GroupFormed | None:
        """Seat the members and announce the group; None where nobody of them reduces."""
        key, plan, layout = assembly.key, assembly.plan, assembly.torus
        seated = self._seated(assembly)
        joins = [join for _, join in seated]
        next_path: list[grid.Path] = [() for _ in seated]
        row = None
        ranks = plan.members(key.axis, key.path) if plan else ()
        if layout is not None and key.axis == 0 and ranks:
            holders = layout.holders[layout.row(ranks)]
            planned = [ranks[slot] if slot < len(ranks) else -1 for slot, _ in seated]
            columns = [holders.index(rank) if rank in holders else -1 for rank in planned]
            reduces = [announcement.reduces(join) for join in joins]
            seats = torus.seat_row(layout, assembly.chunks, columns, reduces)
            if seats is not None:
                row = announcement.Row(seats, layout.rows, self._config.window_s_max)
                joins = [joins[index] for index in seats.order]
                next_path = [(column, 0) if column >= 0 else () for column in seats.columns]
        elif plan is not None and not key.span:
            next_path = [plan.next_path(key.axis, key.path, slot) for slot, _ in seated]
        self._serial += 1
        serial = self._serial.to_bytes(16, "little") + joins[0].nonce.to_bytes(8, "little")
        return announcement.form(self._signer, joins, next_path, self._round_config, serial, row)

    def _seated(self, assembly: Assembly) -> list[tuple[int, Join]]:
        """Return the joins with their slots: planned peers in theirs, others in free ones."""
        left = dict(assembly.joins)
        seated: list[tuple[int, Join]] = []
        free: list[int] = []
        for slot, peer in enumerate(assembly.expected):
            join = left.pop(peer, None)
            if join is None:
                free.append(slot)
            else:
                seated.append((slot, join))
        beyond = len(assembly.expected)
        for position, peer in enumerate(sorted(left)):
            slot = free[position] if position < len(free) else beyond + position - len(free)
            seated.append((slot, left[peer]))
        return sorted(seated, key=lambda pair: pair[0])
