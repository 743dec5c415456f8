"""Who is there: peers in classes of equal links, as a plan knows them beforehand."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

from moshpit.errors import ConfigError
from moshpit.types import PeerId

PEERS_MAX = 20_000  # as many as a view holds, config.MembershipConfig.peers_max


@dataclass(frozen=True, slots=True)
class PlannedPeer:
    """One peer's link.

    Attributes:
        up: bytes per second that it can send.
        down: bytes per second that it can receive.
        reduces: whether it can be dialled; clients cannot, and reduce nothing.
    """

    up: float
    down: float
    reduces: bool = True

    @property
    def bandwidth(self) -> float:
        """What counts for its part of the vector: min(up, down)."""
        return min(self.up, self.down)


@dataclass(frozen=True, slots=True)
class PlannedSwarm:
    """All peers of a run, and how far apart they are.

    Attributes:
        peers: at least two.
        round_trip_s: from any peer to any other and back.

    Raises:
        ConfigError: too few or too many peers, a link without bandwidth, or nobody that can
            be dialled.
    """

    peers: tuple[PlannedPeer, ...]
    round_trip_s: float = 0.0

    def __post_init__(self) -> None:
        if not 2 <= len(self.peers) <= PEERS_MAX:
            raise ConfigError(f"{len(self.peers)} peers: a plan is for 2 to {PEERS_MAX}")
        if not all(0 < speed < math.inf for peer in self.peers for speed in (peer.up, peer.down)):
            raise ConfigError("every peer needs a bandwidth above 0 and below infinity")
        if not any(peer.reduces for peer in self.peers):
            raise ConfigError("all peers are clients: at least one must be reachable, to reduce")
        if not 0 <= self.round_trip_s < math.inf:
            raise ConfigError(f"a round trip of {self.round_trip_s} s: give 0 or more")

    def ids(self) -> list[PeerId]:
        """Return an id for each peer, scattered like real keys and always the same."""
        return [
            PeerId(hashlib.blake2b(number.to_bytes(4, "big"), digest_size=32).digest())
            for number in range(len(self.peers))
        ]

    @property
    def clients(self) -> int:
        """How many peers cannot be dialled."""
        return sum(not peer.reduces for peer in self.peers)


def swarm_of(
    classes: list[tuple[int, float, float]], clients: int = 0, round_trip_s: float = 0.0
) -> PlannedSwarm:
    """Return the swarm of these classes; the slowest ``clients`` peers cannot be dialled.

    Args:
        classes: of each, how many peers, and bytes per second up and down.
        clients: how many peers are behind routers. The slowest are taken for them, since
            homes are slow.
        round_trip_s: between any two.

    Raises:
        ConfigError: as `PlannedSwarm`, or more clients than peers.

    Example:
        >>> two = swarm_of([(1, 1e8, 1e8), (2, 1e6, 4e6)], clients=1)
        >>> [(peer.bandwidth, peer.reduces) for peer in two.peers]
        [(100000000.0, True), (1000000.0, True), (1000000.0, False)]
    """
    count = sum(number for number, _, _ in classes)
    if not 2 <= count <= PEERS_MAX:
        raise ConfigError(f"{count} peers: a plan is for 2 to {PEERS_MAX}")
    if not 0 <= clients < count:
        raise ConfigError(
            f"{clients} clients among {count} peers: at least one must be reachable, to reduce"
        )
    links = sorted(
        ((up, down) for number, up, down in classes for _ in range(number)),
        key=lambda link: -min(link),
    )
    return PlannedSwarm(
        tuple(PlannedPeer(*link, place < count - clients) for place, link in enumerate(links)),
        round_trip_s,
    )
