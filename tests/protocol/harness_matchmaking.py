"""A virtual network of matchmakers: time, delays, crashes and cuts, all from one seed."""

from __future__ import annotations

import hashlib
import heapq
import random
from dataclasses import dataclass, field

import msgspec

from moshpit.config import MatchmakingConfig, RoundConfig
from moshpit.protocol.machine import Effect, GroupReady, LinkDown, Received, SeekFailed, Send, Tick
from moshpit.protocol.matchmaking import JoinFields, Matchmaker
from moshpit.protocol.ranking import ranked
from moshpit.runtime.record import own_record
from moshpit.sim.signer import SIM_ADMISSION, SimSigner
from moshpit.types import Address, PeerId, Role
from moshpit.wire.framing import LENGTH, decode_message, encode_message
from moshpit.wire.messages import GroupKey, PeerRecord

SCHEMA = b"schema.."
MATCHMAKING = MatchmakingConfig(
    schedule="grid", group_size=4, call_timeout_s=0.5, join_timeout_s=1.0
)
ROUND = RoundConfig()


def peer_id(number: int) -> PeerId:
    """Return a peer's id; ids look random, as keys do."""
    return PeerId(hashlib.blake2b(number.to_bytes(4, "big"), digest_size=32).digest())


def record(peer: PeerId, role: str = "worker", schema: bytes = SCHEMA) -> PeerRecord:
    """Return a live peer's record."""
    made = own_record(peer, Role(role), (Address("127.0.0.1", 1),), SIM_ADMISSION, 1e7)
    return msgspec.structs.replace(made, incarnation=0, schema=schema, rate=1.0)


class StaticView:
    """A view set by hand (implements `moshpit.protocol.machine.View`)."""

    def __init__(self, me: PeerId, records: list[PeerRecord]) -> None:
        self._me = me
        self._records = {r.peer: r for r in records}
        self._live = sorted(PeerId(r.peer) for r in records)
        self._cut: dict[bytes, bool] = {}
        self.links: dict[bytes, bool] = {}
        self.generation = 1

    @property
    def me(self) -> PeerRecord:
        return self._records[self._me]

    @property
    def live(self) -> list[PeerId]:
        return self._live

    def record(self, peer: bytes) -> PeerRecord | None:
        return self._records.get(peer)

    def reachable(self, peer: bytes) -> bool:
        return peer in self._live and peer not in self._cut

    def averaging(self, schema: bytes) -> list[PeerId]:
        return [p for p in self._live if self._records[p].schema == schema]

    def dialable(self, peer: bytes) -> bool:
        return peer in self._records and self._records[peer].role in ("worker", "aux")

    def linked(self, peer: bytes) -> bool:
        return peer in self.links

    def learn(self, record: PeerRecord) -> None:
        """Let the view know one more live peer."""
        self._records[record.peer] = record
        self._live = sorted([*self._live, PeerId(record.peer)])
        self.generation += 1

    def bury(self, peer: PeerId) -> None:
        """Let the peer be dead in this view."""
        if peer in self._live:
            self._live = [p for p in self._live if p != peer]
            self.generation += 1

    def cut(self, peer: PeerId) -> None:
        """Let the peer be unreachable from here."""
        self._cut[peer] = True
        self.generation += 1


def fields(weighs: bool = True, origin: bytes = b"", **changes: object) -> JoinFields:
    """Return what a peer says of itself when it seeks."""
    values: dict[str, object] = {
        "role": "worker",
        "schema": SCHEMA,
        "vector_chunks": 64,
        "vector_bytes": 1 << 20,
        "bandwidth": 1e7,
        "weighs": weighs,
        "origin": origin,
    }
    return JoinFields(**(values | changes))  # type: ignore[arg-type]


def first_key(view: StaticView, epoch: int = 0, group_size: int = 4) -> GroupKey:
    """Return the key of a peer on axis 0, from its own view, as its node does."""
    ranking = ranked(view, SCHEMA, epoch, group_size)
    assert ranking is not None
    plan, peers = ranking
    return GroupKey(epoch, 0, plan.path(peers.index(PeerId(view.me.peer)), 0))


@dataclass
class Member:
    """One simulated peer."""

    machine: Matchmaker
    view: StaticView
    groups: list[GroupReady] = field(default_factory=list[GroupReady])
    failures: list[SeekFailed] = field(default_factory=list[SeekFailed])
    alive: bool = True
    ended_at: float = -1.0
    armed: float | None = None


class World:
    """Matchmakers on a virtual network with one clock."""

    def __init__(
        self,
        count: int,
        seed: int,
        config: MatchmakingConfig = MATCHMAKING,
        clients: frozenset[int] = frozenset(),
        delay_s: tuple[float, float] = (0.0005, 0.02),
    ) -> None:
        self.now = 0.0
        self.rng = random.Random(seed)
        self.delay_s = delay_s
        self.trace: list[str] = []
        self.messages = 0
        self._queue: list[tuple[float, int, str, PeerId, object]] = []
        self._number = 0
        self._last: dict[tuple[PeerId, PeerId], float] = {}
        self.ids = [peer_id(number) for number in range(count)]
        self.members: dict[PeerId, Member] = {}
        records = [
            record(peer, "client" if number in clients else "worker")
            for number, peer in enumerate(self.ids)
        ]
        self.clients = [peer for n, peer in enumerate(self.ids) if n in clients]
        self.links: dict[tuple[PeerId, PeerId], bool] = {}
        for number, peer in enumerate(self.ids):
            view = StaticView(peer, records)
            rng = random.Random(seed * 1000 + number)
            machine = Matchmaker(SimSigner(peer), view, config, ROUND, rng)
            self.members[peer] = Member(machine, view)

    def at(self, when: float, kind: str, peer: PeerId, what: object = None) -> None:
        """Plan something: "event", "seek", "crash", "bury"."""
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, kind, peer, what))

    def seek_all(self, spread_s: float = 0.1) -> None:
        """Let every peer seek its group of axis 0 at a random time."""
        for peer in self.ids:
            self.at(self.rng.random() * spread_s, "seek", peer)

    def crash(self, peer: PeerId, when: float, noticed_s: float) -> None:
        """Kill a peer; the others learn of it up to ``noticed_s`` later, each at its own time."""
        self.at(when, "crash", peer)
        for other in self.ids:
            if other != peer:
                self.at(when + self.rng.random() * noticed_s, "bury", other, peer)

    def run(self, until: float) -> None:
        """Let everything happen up to a time."""
        while self._queue and self._queue[0][0] <= until:
            self.now, _, kind, peer, what = heapq.heappop(self._queue)
            member = self.members[peer]
            if not member.alive:
                continue
            match kind:
                case "seek":
                    key = first_key(member.view)
                    role = member.view.me.role
                    self.do(peer, member.machine.seek(key, fields(role=role), self.now))
                case "crash":
                    member.alive = False
                    for other in self.ids:
                        self.at(self.now + self._delay(), "event", other, LinkDown(peer, True, ""))
                case "bury":
                    assert isinstance(what, bytes)
                    member.view.bury(PeerId(what))
                case "tick":
                    if what == member.armed:
                        member.armed = None
                        self.do(peer, member.machine.handle(Tick(), self.now))
                case _:
                    self.do(peer, member.machine.handle(what, self.now))  # type: ignore[arg-type]

    def do(self, peer: PeerId, effects: list[Effect]) -> None:
        """Carry out a machine's effects."""
        member = self.members[peer]
        for effect in effects:
            self.trace.append(f"{self.now:.6f} {peer.hex()[:6]} {effect}")
            match effect:
                case Send(peer=target, message=message):
                    assert target != peer, "a machine sends itself nothing over the network"
                    self.messages += 1
                    self._carry(peer, target, encode_message(message))
                case GroupReady():
                    member.groups.append(effect)
                    member.ended_at = self.now
                case SeekFailed():
                    member.failures.append(effect)
                    member.ended_at = self.now
                case _:
                    pass
        wakeup = member.machine.wakeup
        if wakeup is not None and (member.armed is None or wakeup < member.armed):
            member.armed = max(wakeup, self.now)
            self.at(member.armed, "tick", peer, member.armed)

    def _delay(self) -> float:
        low, high = self.delay_s
        return low + self.rng.random() * (high - low)

    def _carry(self, source: PeerId, target: PeerId, frame: bytes) -> None:
        there = self.members.get(target)
        linked = (target, source) in self.links or (source, target) in self.links
        if target in self.clients and not linked:
            self.at(self.now, "event", source, LinkDown(target, False, "no address"))
            return
        self.links[source, target] = True
        arrival = max(self.now + self._delay(), self._last.get((source, target), 0.0))
        self._last[source, target] = arrival
        if there is None or not there.alive:
            self.at(arrival, "event", source, LinkDown(target, True, "refused"))
            return
        message = decode_message(frame[LENGTH.size :], "test")
        self.at(arrival, "event", target, Received(source, message))
