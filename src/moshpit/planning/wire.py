r"""How long one averaging takes, and how many bytes it moves.

A member that sends a share u and receives v of S encoded bytes is busy for

.. math:: \max(u S / up, \; v S / down, \; cpu / cores)

seconds in a phase; the group is done when its slowest member is, and a group begins when all
its members are done with the phase before. Besides, each phase costs half a round trip for
every hop, and each group that has to assemble a meeting.

Left out: faults, peers that come late, and other traffic on the links.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass, fields
from functools import lru_cache

from moshpit.planning.codecs import RAW_BYTES, CodecCost
from moshpit.planning.schedules import Phase, chunks_of, phases
from moshpit.planning.swarm import PlannedSwarm

_EPOCHS = 4  # guess: groups differ from epoch to epoch; the mean over so many orders
_EPOCHS_PEERS_MAX = 1000  # above, one order is as good as the mean over several


@dataclass(frozen=True, slots=True)
class Costs:
    """What the machine and the network take, apart from bandwidth.

    Attributes:
        meeting_s: to assemble a group, without the way.
        meeting_round_trips: join, announcement, first beat.
        goodput: payload as a share of the link, after TCP, IP and Ethernet.
        cpu_s_per_gb: CPU seconds per GB sent, and as much per GB received, sealed.
        cores: how many cores a peer has for its network: the thread it runs in.
    """

    meeting_s: float = 0.03  # measured, benchmarks/meeting.py: 25 ms median with 16 peers
    meeting_round_trips: float = 2.0  # docs/internals/protocol.md "Matchmaking"
    goodput: float = 0.94  # measured, design §6: 94 Mbit/s of 100
    cpu_s_per_gb: float = 0.65  # measured, design §6: 1.3 CPU s per GB for both sides together
    cores: float = 1.0


@dataclass(frozen=True, slots=True)
class AveragingCost:
    """One averaging of the whole swarm.

    Attributes:
        seconds: from the snapshot to the mean, at the last peer.
        meeting_s: of these, for groups to assemble and for the way.
        bytes_mean: sent by a peer, on average.
        bytes_max: sent by the peer that sends most.
        swarm_bytes: sent by all together.
        cpu_s: CPU seconds of the busiest peer.
        part_share: the largest share of the vector that a peer reduces or holds.
    """

    seconds: float
    meeting_s: float
    bytes_mean: float
    bytes_max: float
    swarm_bytes: float
    cpu_s: float
    part_share: float

    @property
    def moving_s(self) -> float:
        """The rest: bytes on their way."""
        return self.seconds - self.meeting_s


def averaging_cost(
    swarm: PlannedSwarm,
    numel: int,
    codec: CodecCost,
    schedule: str,
    *,
    group_size: int,
    costs: Costs | None = None,
) -> AveragingCost:
    """Predict one averaging of ``numel`` numbers.

    Args:
        swarm: who takes part.
        numel: numbers in the vector.
        codec: how they are written on the wire.
        schedule: ``grid`` or ``torus``; with one axis both are one group all-reduce.
        group_size: M, the size that groups should have.
        costs: of the machine and the network.

    Example:
        >>> from moshpit.planning.codecs import CODECS
        >>> from moshpit.planning.swarm import swarm_of
        >>> four = swarm_of([(4, 12.5e6, 12.5e6)])
        >>> ring = averaging_cost(four, 2**22, CODECS[0], "grid", group_size=16)
        >>> ring.bytes_mean / 2**24, round(ring.seconds, 2)
        (1.5, 2.17)
    """
    spent = costs or Costs()
    epochs = 1 if len(swarm.peers) > _EPOCHS_PEERS_MAX or _alike(swarm) else _EPOCHS
    runs = [
        _run(
            swarm,
            schedule_phases(swarm, schedule, group_size, chunks_of(numel), epoch),
            numel,
            codec,
            spent,
        )
        for epoch in range(epochs)
    ]
    means = (statistics.fmean(getattr(run, f.name) for run in runs) for f in fields(AveragingCost))
    return AveragingCost(*means)


def _alike(swarm: PlannedSwarm) -> bool:
    return all(peer == swarm.peers[0] for peer in swarm.peers)


@lru_cache(maxsize=256)
def schedule_phases(
    swarm: PlannedSwarm, schedule: str, group_size: int, chunks: int, epoch: int
) -> tuple[Phase, ...]:
    """Return `phases`, kept for the next codec: they do not depend on it."""
    return tuple(phases(swarm, schedule, group_size, chunks, epoch))


def _run(
    swarm: PlannedSwarm,
    steps: tuple[Phase, ...],
    numel: int,
    codec: CodecCost,
    costs: Costs,
) -> AveragingCost:
    """Follow one averaging from group to group."""
    count = len(swarm.peers)
    ready, sent, cpu = [0.0] * count, [0.0] * count, [0.0] * count
    values, means = numel * codec.bytes_per_number, numel * codec.bytes_per_mean
    raw_gb = numel * RAW_BYTES / 1e9
    fixed = part = 0.0
    for phase in steps:
        latency = phase.hops * swarm.round_trip_s / 2
        if phase.meets:
            latency += costs.meeting_s + costs.meeting_round_trips * swarm.round_trip_s
        fixed += latency
        for group in phase.groups:
            slowest = 0.0
            for share in group:
                peer = swarm.peers[share.peer]
                up = share.sent_values * values + share.sent_means * means
                down = share.got_values * values + share.got_means * means
                # A value is encoded once, a mean too, however many it is sent to.
                encoded = min(1.0, share.sent_values) + (share.part if share.sent_means else 0.0)
                decoded = share.got_values + share.got_means
                work = costs.cpu_s_per_gb * (up + down) / 1e9 + raw_gb * (
                    codec.encode_s_per_gb * encoded + codec.decode_s_per_gb * decoded
                )
                wire_s = max(up / peer.up, down / peer.down) / costs.goodput
                slowest = max(slowest, wire_s, work / costs.cores)
                sent[share.peer] += up
                cpu[share.peer] += work
                part = max(part, share.part)
            end = max(ready[share.peer] for share in group) + latency + slowest
            for share in group:
                ready[share.peer] = end
    return AveragingCost(max(ready), fixed, sum(sent) / count, max(sent), sum(sent), max(cpu), part)
