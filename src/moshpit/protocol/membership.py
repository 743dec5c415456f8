"""Who is in the swarm: SWIM with suspicion, signed records, and exchanges of digests.

Theory of operation. Every probe interval one peer, in a shuffled round-robin order, is pinged.
No answer in time: `indirect_probes` others are asked to ping it (`PingReq`). Still none: it is
*suspected*, it is told so, and it has `suspicion_multiplier · log10(N+1)` intervals to refute
by a record of a higher incarnation. Then the peers that probed it themselves call it dead;
those that only heard of the suspicion begin to probe it then, so that lost messages kill nobody.
A refused connection means that the process is gone: indirect probes start at once, and a
second witness, or their failure, is death without a wait.

Changes ride on pings and acks (`gossip.Rumors`). Joins, deaths, and what changes where or what
a peer is are *urgent*: they are pushed to a few random peers at once, at most every
`PUSH_INTERVAL_S`. Records that differ in samples and rates just ride along.

Two peers that meet for the first time, and now and then two random ones, compare their views
(`exchange`).

The dead are remembered for `dead_kept_s`, so that old records of theirs do not bring them back,
and now and then one of them is pinged: that is how two halves of a swarm find each other again.

What is believed, and why, is in `roster`; this file is about when to say what to whom.
"""

from __future__ import annotations

from itertools import chain
from math import inf
from typing import Any, Final, final

from moshpit.config import MembershipConfig
from moshpit.protocol.exchange import Exchanges
from moshpit.protocol.gossip import gossip_of
from moshpit.protocol.known import Known
from moshpit.protocol.machine import (
    Effect,
    Event,
    LinkDown,
    LinkUp,
    Received,
    Rng,
    Send,
    Signer,
    Tick,
)
from moshpit.protocol.mentions import Mentions
from moshpit.protocol.probing import Probe, ProbeOrder, Probes, Relay
from moshpit.protocol.roster import Roster
from moshpit.protocol.view import BUCKETS, Entry, LiveView, Status
from moshpit.types import PeerId, Role
from moshpit.wire.messages import (
    NO_GOSSIP,
    Ack,
    AnyMessage,
    Difference,
    Digest,
    Goodbye,
    Gossip,
    Message,
    News,
    NewsAsk,
    Outline,
    PeerRecord,
    Ping,
    PingReq,
    Suspicion,
    ViewAsk,
)

PUSH_FANOUT: Final = 4  # measured: with 3, mentions reach nearly all half as fast
PUSH_INTERVAL_S: Final = 0.1  # guess
RECONNECT_INTERVALS: Final = 5  # guess: probe intervals between two pings to the dead
SUSPECTS_PROBED_MAX: Final = 4  # guess: own suspects pinged again in each interval
FAREWELLS_MAX: Final = 16  # guess: peers to whom a Goodbye is said
LEARNED_SHARE: Final = 100  # guess: what an exchange may bring of the view, one part in so many


@final
class Membership:
    """The membership machine of one peer.

    Args:
        signer: this peer's key, and what is admitted to its run.
        record: this peer's own record; it is signed here.
        config: intervals and limits.
        rng: randomness; the same seed and events give the same effects.
        now: the time.
        known: whom it knows already, if other nodes of this process know the same.

    Raises:
        ConfigError: the record is one that no peer would believe.
    """

    def __init__(
        self,
        signer: Signer,
        record: PeerRecord,
        config: MembershipConfig,
        rng: Rng,
        now: float,
        *,
        known: Known | None = None,
    ) -> None:
        self._roster = Roster(signer, record, config, now, known)
        self.view: Final[LiveView] = self._roster.view
        self._me = signer.peer
        self._config = config
        self._rng = rng
        self._probes = Probes(rng.getrandbits(31))
        self._linked = self.view.links
        self._exchanges = Exchanges(self._roster, config.probe_interval_s)
        self._mentions = Mentions(self._roster, config.probe_timeout_s)
        self._order = ProbeOrder(self.view, self._me, rng)
        self._probe_at = now + rng.random() * config.probe_interval_s
        self._exchange_at = now + rng.random() * config.exchange_interval_s
        self._push_at = inf
        self._pushed_at = -inf
        self._intervals = 0
        self._left = False
        self._wakeup = self._next()

    @property
    def wakeup(self) -> float | None:
        """When a `Tick` is due."""
        return None if self._left else self._wakeup

    # --- what happens ---------------------------------------------------------------------

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        if self._left:
            return []
        if isinstance(event, Received):
            known = self._roster.heard(event.peer, now) or event.peer in self.view.entries
            self._received(event.peer, event.message, now)
            # Whoever speaks lives, whatever it says: a probe of it need not wait for its Ack.
            self._probes.answered(event.peer)
            if not known and event.peer not in self.view.entries:
                self._exchanges.ask_stranger(event.peer, now)
        elif isinstance(event, LinkUp):
            self._link_up(event.peer, now)
        elif isinstance(event, LinkDown):
            self._link_down(event.peer, event.refused, now)
        elif isinstance(event, Tick):
            self._timers(now)
        return self._end(now)

    def heard(self, peer: PeerId, now: float) -> None:
        """Note a sign of life from a peer, such as a chunk; effects come with the next event."""
        if not self._left:
            self._roster.heard(peer, now)
            if self._roster.out:
                self._wakeup = now

    def silent(self, peer: PeerId, now: float) -> list[Effect]:
        """Take a part's word that a peer owes it an answer: not reachable until it is heard."""
        entry = self.view.entries.get(peer)
        if self._left or entry is None or peer == self._me or entry.cut:
            return []
        self.view.cut(entry, True)
        if entry.status.live:
            self._probe(entry, now)
        return self._end(now)

    def publish(self, now: float, **fields: Any) -> list[Effect]:
        """Change fields of the own record; what is not mere progress is pushed at once.

        Raises:
            ConfigError: no peer would believe a record with these values.
        """
        if self._left or not self._roster.publish(now, fields):
            return []
        return self._end(now)

    def leave(self, now: float) -> list[Effect]:
        """Say goodbye; the machine does nothing more."""
        if self._left:
            return []
        self._roster.publish(now, {"left": True})
        goodbye = Goodbye(self.view.me)
        told = dict.fromkeys(self._some(PUSH_FANOUT)) | self._linked
        effects: list[Effect] = [Send(p, goodbye) for p in list(told)[:FAREWELLS_MAX]]
        self._left = True
        return effects

    def _end(self, now: float) -> list[Effect]:
        if self._roster.urgent:
            self._roster.urgent = False
            self._push_at = min(self._push_at, max(now, self._pushed_at + PUSH_INTERVAL_S))
        if now >= self._push_at:
            self._push_at, self._pushed_at = inf, now
            self._push()
        self._wakeup = self._next()
        out = self._roster.out
        self._roster.out = []
        return out

    def _next(self) -> float:
        own = min(self._probe_at, self._exchange_at, self._push_at)
        return min(own, self._probes.wakeup, self._roster.wakeup)

    def _timers(self, now: float) -> None:
        for probe in self._probes.expired(now):
            self._probe_late(probe, now)
        for entry in self._roster.ripe(now):
            self._suspicion_over(entry, now)
        self._roster.bury_for_good(now)
        if now >= self._probe_at:
            self._probe_at = now + self._config.probe_interval_s
            self._intervals += 1
            self._roster.update_via(self._linked, now)
            self._probe_next(now)
        if now >= self._exchange_at:
            self._exchange_at = now + self._config.exchange_interval_s * (0.5 + self._rng.random())
            self._exchange(now)

    # --- sending --------------------------------------------------------------------------

    def _send(self, peer: PeerId, message: Message) -> None:
        self._roster.out.append(Send(peer, message))

    def _gossip(self, peer: PeerId, fresh: int | None = None) -> Gossip:
        gossip = self._roster.rumors.pick(len(self.view.live), fresh=fresh)
        about = self._roster.about(peer)
        if not about:
            return gossip
        first = gossip_of(about)
        return Gossip(
            first.records + gossip.records, first.suspicions + gossip.suspicions, gossip.mentions
        )

    def _push(self) -> None:
        for peer in self._some(PUSH_FANOUT):
            gossip = self._gossip(peer, PUSH_FANOUT)  # the rest of a rumour's sends rides on probes
            if gossip is NO_GOSSIP:
                return
            self._send(peer, News(gossip))

    def _can_reach(self, peer: PeerId) -> bool:
        """Whether a message sent to this peer may arrive."""
        view = self.view
        return view.reachable(peer) and (view.dialable(peer) or peer in self._linked)

    def _some(self, count: int, but: bytes = b"") -> list[PeerId]:
        """Return up to ``count`` random peers that can be reached."""
        live, randrange = self.view.live, self._rng.randrange
        first = self._intervals % len(live)
        draws = (live[randrange(len(live))] for _ in range(4 * count))
        chosen: list[PeerId] = []
        # Where nearly all are clients, luck alone finds nobody.
        rest = (live[(first + step) % len(live)] for step in range(len(live)))
        for peer in chain(draws, rest):
            if len(chosen) == count:
                break
            if peer not in (self._me, but, *chosen) and self._can_reach(peer):
                chosen.append(peer)
        return chosen

    # --- messages -------------------------------------------------------------------------

    def _received(self, peer: PeerId, message: AnyMessage, now: float) -> None:
        if isinstance(message, Ping):
            self._merge(peer, message.gossip, now)
            self._send(peer, Ack(message.seq, self._gossip(peer)))
        elif isinstance(message, Ack):
            self._merge(peer, message.gossip, now)
            self._acked(peer, message.seq, now)
        elif isinstance(message, News):
            self._merge(peer, message.gossip, now)
        elif isinstance(message, PingReq):
            self._merge(peer, message.gossip, now)
            self._ping_for(peer, message, now)
        elif isinstance(message, Digest):
            self._exchanges.digest(peer, message, now)
        elif isinstance(message, Difference):
            known = self.view.generation
            self._merge(peer, message.gossip, now)
            learned = self.view.generation - known
            if learned * LEARNED_SHARE >= len(self.view.live):
                # Rumours had missed something: compare with somebody else soon. Of a large swarm
                # there is always some news that is only under way.
                self._exchange_at = min(self._exchange_at, now + self._config.probe_interval_s)
            self._exchanges.difference(peer, message.reply)
        elif isinstance(message, Outline):
            self._exchanges.outline(peer, message, now)
        elif isinstance(message, NewsAsk):
            self._mentions.asked(peer, message)
        elif isinstance(message, ViewAsk):
            self._exchanges.send_views(peer, range(BUCKETS))
        elif isinstance(message, Goodbye):
            if message.record.peer != peer or not message.record.left:
                self._roster.refuse(peer, "goodbye for somebody else")
            else:
                self._roster.merge_record(peer, message.record, now, True)

    def _merge(self, peer: PeerId, gossip: Gossip, now: float) -> None:
        if gossip.records or gossip.suspicions:
            self._roster.merge(peer, gossip, now)
        if gossip.mentions:
            self._mentions.heard(peer, gossip.mentions, now)

    def _acked(self, peer: PeerId, seq: int, now: float) -> None:
        relay = self._probes.relayed(seq, peer)
        if relay is not None:
            self._send(relay.asker, Ack(relay.seq))
            return
        probe = self._probes.acked(seq, peer)
        if probe is not None and peer != probe.target:
            entry = self.view.entries.get(probe.target)
            if entry is not None and entry.status is Status.SUSPECT:
                self._roster.doubt(entry, now)

    def _ping_for(self, asker: PeerId, message: PingReq, now: float) -> None:
        target = PeerId(message.target)
        if target == self._me:
            self._send(asker, Ack(message.seq))
            return
        entry = self.view.entries.get(target)
        if entry is None or target == asker:
            return
        if self._roster.refused_lately(entry, now):
            self._witness(asker, entry)
        elif entry.record.role != Role.CLIENT or target in self._linked:
            seq = self._probes.relay(Relay(asker, message.seq, target))
            self._send(target, Ping(seq, self._gossip(target)))

    def _witness(self, asker: PeerId, entry: Entry) -> None:
        """Tell somebody who asked that the peer's machine refuses connections."""
        record = entry.record
        rumor = Suspicion(record.peer, record.incarnation, entry.status is Status.DEAD, self._me)
        self._send(asker, News(Gossip((), (rumor,))))

    # --- exchanges ------------------------------------------------------------------------

    def _exchange(self, now: float) -> None:
        """Compare views with a random peer, and with one whose record never came."""
        for peer in self._some(1):
            self._exchanges.begin(peer, now)
        for peer in self._linked:
            if peer not in self.view.entries:
                self._exchanges.greet(peer, now)
                break
        if len(self.view.live) == 1:
            self._exchange_at = now + self._config.probe_interval_s

    # --- links ----------------------------------------------------------------------------

    def _link_up(self, peer: PeerId, now: float) -> None:
        if peer == self._me:
            return
        self._linked[peer] = None
        if not self._roster.heard(peer, now):
            self._exchanges.greet(peer, now)
        self._roster.update_via(self._linked, now)

    def _link_down(self, peer: PeerId, refused: bool, now: float) -> None:
        self._linked.pop(peer, None)
        entry = self.view.entries.get(peer)
        if entry is None or peer == self._me:
            return
        self.view.cut(entry, True)
        self._roster.update_via(self._linked, now)
        lost = self._probes.relays_lost(peer)
        if refused:
            entry.refused_at = now
            for relay in lost:
                self._witness(relay.asker, entry)
        if not entry.status.live:
            return
        accusers = [a for a in entry.accusers if a != self._me]
        if refused and entry.status is Status.SUSPECT and accusers:
            self._roster.declare_dead(entry, self._me, now)
        elif not self._probe(entry, now, lost=True, refused=refused):
            # A client that nobody else is known to reach; if it lives, it will say so.
            self._roster.suspect(entry, self._me, now, first_hand=True)

    # --- probes ---------------------------------------------------------------------------

    def _probe_next(self, now: float) -> None:
        for peer in list(self._roster.accused)[:SUSPECTS_PROBED_MAX]:
            self._probe(self.view.entries[peer], now)
        cut = self.view.next_cut()
        if cut is not None:
            self._probe(cut, now)
        if self._intervals % RECONNECT_INTERVALS == 0:
            self._reconnect()
        for peer in self._order.next():
            entry = self.view.entries.get(peer)
            if entry is not None and entry.status.live and self._probe(entry, now):
                return

    def _reconnect(self) -> None:
        """Ping a random one of the dead, in case it was a partition."""
        graves = self._roster.graves
        if graves:
            peer = graves[self._rng.randrange(len(graves))][1]
            entry = self.view.entries.get(peer)
            if entry is not None and entry.status is Status.DEAD and self._roster.dialable(peer):
                self._send(peer, Ping(self._probes.next_seq(), self._gossip(peer)))

    def _probe(self, entry: Entry, now: float, lost: bool = False, refused: bool = False) -> bool:
        """Begin to probe a peer, or go on to the next stage; False if there is no way to.

        ``lost``: the connection to it was just lost, so only others can help.
        """
        peer = PeerId(entry.record.peer)
        client = entry.record.role == Role.CLIENT
        direct = not lost and (not client or peer in self._linked)
        patience = self._config.probe_timeout_s * (self._probes.health + 1)
        probe = self._probes.of(peer)
        if probe is None:
            if not direct and client and not self._helpers(entry):
                return False
            probe = self._probes.start(peer, now + patience)
            if probe is None:
                return False
            if direct:
                self._send(peer, Ping(probe.seq, self._gossip(peer)))
                return True
        elif direct:
            return True
        probe.refused |= refused
        if not probe.indirect:
            self._probe_indirectly(probe, entry, now)
        return True

    def _probe_indirectly(self, probe: Probe, entry: Entry, now: float) -> None:
        patience = self._config.probe_timeout_s * (self._probes.health + 1)
        probe.indirect = True
        probe.deadline = now + 2 * patience
        probe.helpers = tuple(self._helpers(entry))
        for helper in probe.helpers:
            self._send(helper, PingReq(probe.seq, probe.target, self._gossip(helper)))

    def _helpers(self, entry: Entry) -> list[PeerId]:
        record = entry.record
        if record.role != Role.CLIENT:
            return self._some(self._config.indirect_probes, record.peer)
        via = [PeerId(p) for p in record.via if p != self._me and self.view.reachable(p)]
        return [p for p in dict.fromkeys(via) if self._can_reach(p)]

    def _probe_late(self, probe: Probe, now: float) -> None:
        entry = self.view.entries.get(probe.target)
        if entry is None or not entry.status.live:
            self._probes.end(probe)
        elif not probe.indirect:
            self._probe_indirectly(probe, entry, now)
        else:
            self._probes.end(probe)
            self._probe_failed(probe, entry, now)

    def _probe_failed(self, probe: Probe, entry: Entry, now: float) -> None:
        if not probe.refused:
            self._probes.failed()
        self.view.cut(entry, True)
        if probe.refused:
            self._roster.declare_dead(entry, self._me, now)
        else:
            self._roster.suspect(entry, self._me, now, first_hand=True)

    def _suspicion_over(self, entry: Entry, now: float) -> None:
        """Nobody refuted: believe it if this peer's own probes say so, else try them."""
        peer = PeerId(entry.record.peer)
        if self._probes.full and not entry.first_hand:
            self._roster.doubt(entry, now)
        elif entry.first_hand or not (self._probes.of(peer) or self._probe(entry, now)):
            self._roster.declare_dead(entry, self._me, now)
