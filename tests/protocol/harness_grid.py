"""All peers' averaging by the plan, the announcements and the all-reduce machines, without time.

Membership and meeting are left out (they are the simulator's business), and so are delays and
faults: what is sent arrives at once, in order. So thousands of peers cost seconds. Every group
is announced by the code of a host (`announcement.form`), so parts follow random bandwidths.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from moshpit.config import RoundConfig
from moshpit.events import Outcome, RoundReport
from moshpit.protocol import announcement, grid
from moshpit.protocol.allreduce import AllReduce
from moshpit.protocol.machine import (
    Accumulate,
    AccumulateOwn,
    ChunkArrived,
    CloseRound,
    Effect,
    Finalize,
    Received,
    RoundEnded,
    Send,
    SendContribution,
    SendResult,
    TakeResult,
)
from moshpit.sim.signer import SimSigner
from moshpit.types import NO_GROUP, GroupId, PeerId
from moshpit.wire.framing import ChunkHeader, ChunkKind
from moshpit.wire.messages import GroupFormed, GroupKey, Join, MemberDone

CONFIG = RoundConfig()
CHUNK_BYTES = 4


@dataclass
class Peer:
    """A peer, its values and what is behind them, by chunk."""

    rank: int
    id: PeerId
    values: list[float]
    masses: list[float]
    path: grid.Path
    bandwidth: float = 0.0
    role: str = "worker"
    origin: GroupId = NO_GROUP
    rounds: int = 0


@dataclass
class Seat:
    """A peer in a round: its machine, and what a driver holds for it."""

    peer: Peer
    machine: AllReduce
    sums: dict[int, tuple[float, float]] = field(default_factory=dict)
    results: dict[int, float] = field(default_factory=dict)
    report: RoundReport | None = None

    def add(self, chunk: int, mass: float, value: float) -> None:
        total, weighted = self.sums.get(chunk, (0.0, 0.0))
        self.sums[chunk] = (total + mass, weighted + mass * value)


class Group:
    """One round of one group, from the announcement to the end."""

    def __init__(self, formed: GroupFormed, peers: Sequence[Peer]) -> None:
        self._group = GroupId(formed.group)
        self._queue: deque[tuple[int, Received | ChunkArrived, float]] = deque()
        self.seats = [
            Seat(
                peer,
                AllReduce(formed, seat, peer.masses, SimSigner(peer.id), CONFIG, 0.0),
            )
            for seat, peer in enumerate(peers)
        ]
        self._seat_of = {peer.id: seat for seat, peer in enumerate(peers)}

    def run(self) -> None:
        """Let everything happen that follows from the start."""
        for seat, there in enumerate(self.seats):
            self._do(seat, there.machine.start(0.0), 0.0)
        while self._queue:
            seat, event, payload = self._queue.popleft()
            machine = self.seats[seat].machine
            if not machine.closed:
                self._do(seat, machine.handle(event, 0.0), payload)

    def _do(self, seat: int, effects: list[Effect], payload: float) -> None:
        here = self.seats[seat]
        for effect in effects:
            match effect:
                case Send(peer=to, message=message):
                    there = self._seat_of[to]
                    ended = isinstance(message, MemberDone)
                    assert ended or not self.seats[there].machine.closed
                    self._queue.append((there, Received(here.peer.id, message), 0.0))
                case SendContribution(peer=to, chunk=chunk):
                    self._send(seat, to, ChunkKind.CONTRIBUTION, effect, here.peer.values[chunk])
                case SendResult(peer=to, chunk=chunk):
                    value = here.results[chunk] if effect.mass > 0 else float("nan")
                    self._send(seat, to, ChunkKind.RESULT, effect, value)
                case Accumulate(chunk=chunk, mass=mass):
                    here.add(chunk, mass, payload)
                case AccumulateOwn(chunk=chunk, mass=mass):
                    here.add(chunk, mass, here.peer.values[chunk])
                case Finalize(chunk=chunk):
                    total, weighted = here.sums.pop(chunk)
                    here.results[chunk] = weighted / total
                case TakeResult(chunk=chunk):
                    assert chunk not in here.results
                    here.results[chunk] = payload
                case RoundEnded(report=report):
                    here.report = report
                case CloseRound():
                    pass
                case _:
                    raise AssertionError(f"unexpected {effect}")

    def _send(
        self,
        seat: int,
        to: PeerId,
        kind: ChunkKind,
        effect: SendContribution | SendResult,
        value: float,
    ) -> None:
        seats = effect.seats if isinstance(effect, SendResult) else 0
        header = ChunkHeader(
            kind, effect.ballot, effect.chunk, CHUNK_BYTES, 0, self._group, effect.mass, seats
        )
        event = ChunkArrived(self.seats[seat].peer.id, header, "")
        self._queue.append((self._seat_of[to], event, value))


class Averaging:
    """One epoch's averaging of a whole swarm.

    Args:
        group_size: M.
        weights: by peer; 0 only takes.
        values: by peer and chunk.
        rng: ids (where none are given) and bandwidths.
        ids: by peer.
        epoch: which order of the peers.
        clients: how many of the peers cannot be dialled.
    """

    def __init__(
        self,
        group_size: int,
        weights: Sequence[float],
        values: Sequence[Sequence[float]],
        rng: random.Random,
        *,
        ids: Sequence[PeerId] = (),
        epoch: int = 0,
        clients: int = 0,
    ) -> None:
        self.epoch = epoch
        self.chunks = len(values[0])
        ids = ids or [PeerId(rng.randbytes(32)) for _ in weights]
        outside = frozenset(rng.sample(ids, clients))
        self.plan, ranked = grid.arrange(sorted(ids), epoch, group_size, lambda p: p not in outside)
        rank_of = {peer: rank for rank, peer in enumerate(ranked)}
        self.peers = [
            Peer(
                rank_of[peer],
                peer,
                list(map(float, value)),
                [float(weight)] * self.chunks,
                self.plan.path(rank_of[peer], 0),
                rng.choice([0.0, 1e6, rng.uniform(1e5, 1e9)]),
                "client" if peer in outside else "worker",
            )
            for peer, weight, value in zip(ids, weights, values, strict=True)
        ]

    def run(self) -> Averaging:
        """Run all rounds."""
        for axis in range(self.plan.axes):
            self.run_axis(axis)
        assert all(peer.path == () for peer in self.peers)
        return self

    def run_axis(self, axis: int, away: Sequence[int] = ()) -> None:
        """Run an axis' rounds. Peers that are away miss theirs, and go on where planned."""
        groups: dict[grid.Path, list[Peer]] = {}
        for index, peer in enumerate(self.peers):
            if index not in away:
                groups.setdefault(peer.path, []).append(peer)
        for path, members in groups.items():
            self._round(GroupKey(self.epoch, axis, path), members)
        for index in away:
            peer = self.peers[index]
            peer.path = self.plan.next_path(axis, peer.path, self.plan.slot(peer.rank, axis))

    def _round(self, key: GroupKey, members: list[Peer]) -> None:
        seated = sorted(members, key=lambda peer: self.plan.slot(peer.rank, key.axis))
        slots = [self.plan.slot(peer.rank, key.axis) for peer in seated]
        following = [self.plan.next_path(key.axis, key.path, slot) for slot in slots]
        joins = [
            Join(
                peer=peer.id,
                key=key,
                nonce=1,
                role=peer.role,
                schema=b"schema__",
                vector_chunks=self.chunks,
                bandwidth=peer.bandwidth,
                weighs=any(mass > 0 for mass in peer.masses),
                origin=peer.origin,
                vector_bytes=self.chunks * CHUNK_BYTES,
            )
            for peer in seated
        ]
        formed = announcement.form(SimSigner(seated[0].id), joins, following, CONFIG, b"serial")
        assert formed is not None, "nobody in this group reduces"
        group = Group(formed, seated)
        group.run()
        for seat, there in enumerate(group.seats):
            peer, report = there.peer, there.report
            assert report is not None, "the round has not ended"
            assert report.outcome is Outcome.COMPLETE
            for chunk in range(self.chunks):
                if chunk not in report.missing:
                    peer.values[chunk] = there.results[chunk]
            peer.masses = list(there.machine.masses_after)
            peer.path = formed.next_path[seat]
            peer.origin = GroupId(formed.group)
            peer.rounds += 1
