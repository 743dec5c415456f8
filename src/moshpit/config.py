"""Settings as frozen data, with presets for the kinds of network people have.

Every limit is named with its unit and says where its value comes from. A preset is chosen
by name (`preset`); single values are changed with `dataclasses.replace`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from moshpit.errors import ConfigError

_ALIGN = 16  # numbers: chunks begin on cache lines

PresetName = Literal["local", "lan", "internet"]
Schedule = Literal["auto", "torus", "grid"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MembershipConfig:
    """SWIM-style failure detection and dissemination."""

    probe_interval_s: float = 1.0  # SWIM, memberlist LAN
    probe_timeout_s: float = 0.5  # memberlist LAN
    indirect_probes: int = 3  # memberlist LAN
    suspicion_multiplier: float = 4.0  # memberlist LAN: × log10(N+1) × probe interval
    retransmit_multiplier: float = 4.0  # memberlist: × log10(N+1) sends of each rumour
    rumors_per_message_max: int = 24  # guess: about 10 KB a message
    exchange_interval_s: float = 15.0  # memberlist LAN push/pull 30 s, shortened for churn
    dead_kept_s: float = 300.0  # guess: how long a death is remembered, against ghosts
    peers_max: int = 20_000  # guess: the view's bound


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgressConfig:
    """When a peer tells others how far it is."""

    report_interval_s: float = 0.5  # guess: the shortest time between two reports
    report_error: float = 0.1  # guess: report when extrapolation is off by this share
    report_max_interval_s: float = 30.0  # guess


@dataclass(frozen=True, slots=True, kw_only=True)
class MatchmakingConfig:
    """How groups assemble."""

    group_size: int = 16  # paper §4 uses 8 to 32
    group_size_limit: int = 64  # seats fit the 64-bit mask of a chunk header
    schedule: Schedule = "auto"  # docs/decisions/0015; the host of a row decides for it
    call_timeout_s: float = 1.0  # guess: how long a called peer may stay silent
    join_timeout_s: float = 1.5  # guess: how long a host may stay silent
    window_s_max: float = 30.0  # guess: waiting for peers that say they will come
    window_s_first: float = 10.0  # guess: the same before any spread was measured


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundConfig:
    """Faults inside a group all-reduce."""

    heartbeat_s: float = 0.25  # guess: a quarter of stall_s
    stall_s: float = 1.0  # guess: silence after which a groupmate is left out
    laggard_factor: float = 3.0  # guess: a sender may take this × the others' time
    deadline_s_min: float = 10.0  # guess
    deadline_factor: float = 4.0  # guess: × the time predicted from bandwidths
    bandwidth_floor: float = 1e6  # bytes/s assumed where nothing is known; guess
    linger_s: float = 3.0  # guess: results are served this long to late groupmates


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportConfig:
    """Sockets: sizes, counts and waits."""

    control_frame_bytes_max: int = 1 << 20
    handshake_frame_bytes_max: int = 4096
    handshake_timeout_s: float = 5.0
    dial_timeout_s: float = 3.0
    unauthenticated_max: int = 64  # sockets that have not proved anything yet
    links_max: int = 256
    control_queue_bytes_max: int = 8 << 20
    chunk_bytes: int = 1 << 20  # the most; measured, decision 0022
    chunk_bytes_min: int = 4096
    chunks_per_vector: int = 64  # guess: what is cut finer moves more evenly, but costs more work
    chunk_bytes_small: int = 256 * 1024  # finer than this, work outweighs evenness; measured
    chunks_per_vector_min: int = 16  # so that the seats of a usual group have parts that fit
    sealed: bool = True  # False is --plaintext: bulk data is not encrypted
    congestion: str = "auto"  # cubic, and BBR where a link loses packets; or a name; "": default
    stripes_min: int = 1  # bulk connections to each peer, from the start
    stripes_max: int = 8  # and where a link loses packets; measured, benchmarks/longlink.py

    def chunk_numel(self, numel: int) -> int:
        """Return how many numbers a chunk of a vector has; it depends on nothing else, so that
        all peers cut alike.

        There are ``chunks_per_vector`` chunks, but none above ``chunk_bytes``. Where they would be
        below ``chunk_bytes_small`` they are fewer, down to ``chunks_per_vector_min``; and none is
        below ``chunk_bytes_min``.

        Example:
            >>> [TransportConfig().chunk_numel(n) for n in (64 << 20, 16 << 20, 1 << 20, 1000)]
            [262144, 262144, 65536, 1024]
        """
        most = max(1, self.chunk_bytes // 4)
        least = max(1, min(most, self.chunk_bytes_min // 4))
        few = min(self.chunk_bytes_small // 4, -(-numel // self.chunks_per_vector_min))
        wanted = max(few, -(-numel // self.chunks_per_vector))
        if most >= _ALIGN:
            wanted = -(-wanted // _ALIGN) * _ALIGN
        return max(least, min(most, wanted))


@dataclass(frozen=True, slots=True, kw_only=True)
class ReachConfig:
    """How a peer finds out whether others can dial it (docs/decisions/0027)."""

    witnesses: int = 3  # guess: peers that are asked each time; two must agree
    first_s: float = 2.0  # guess: after joining, so that there are several to ask
    confirm_s: float = 3.0  # guess: until what was found is asked again, before it is acted on
    confirmations: int = 2  # guess: in a row
    unknown_s: float = 20.0  # guess: until the next question, if nothing could be told
    steady_s: float = 600.0  # guess: routers forget; asked again as often
    hidden_s: float = 60.0  # guess: the same of a peer that could not be dialled; doubles
    hold_s_max: float = 3600.0  # guess: how long one that changes to and fro stays a client
    addresses_s: float = 30.0  # guess: how often this machine's own addresses are looked at
    remind_s: float = 600.0  # guess: until what somebody has to mend is said again
    no_reducer_s: float = 10.0  # guess: how long nobody can be dialled before it is said


@dataclass(frozen=True, slots=True, kw_only=True)
class SwarmConfig:
    """All settings of one peer (docs/reference/settings.md). `preset` makes it; to change some:

    >>> from dataclasses import replace
    >>> config = preset("internet")
    >>> config = replace(config, round=replace(config.round, stall_s=5.0))
    >>> config.preset, config.round.stall_s
    ('internet', 5.0)
    """

    preset: str = "lan"
    membership: MembershipConfig = field(default_factory=MembershipConfig)
    progress: ProgressConfig = field(default_factory=ProgressConfig)
    matchmaking: MatchmakingConfig = field(default_factory=MatchmakingConfig)
    round: RoundConfig = field(default_factory=RoundConfig)
    transport: TransportConfig = field(default_factory=TransportConfig)
    reach: ReachConfig = field(default_factory=ReachConfig)


def preset(name: str = "lan") -> SwarmConfig:
    """Return the settings for a kind of network.

    ``local``: processes on one machine. ``lan``: the default, one site or good links.
    ``internet``: homes and clouds, hundreds of milliseconds, loss.

    Raises:
        ConfigError: no such preset.

    Example:
        >>> preset("internet").round.stall_s
        3.0
    """
    base = SwarmConfig(preset=name)
    match name:
        case "lan":
            return base
        case "local":
            return replace(
                base,
                membership=replace(base.membership, probe_timeout_s=0.3),
            )
        case "internet":
            return replace(
                base,
                membership=replace(base.membership, probe_interval_s=2.0, probe_timeout_s=1.5),
                matchmaking=replace(base.matchmaking, call_timeout_s=1.5, join_timeout_s=3.0),
                round=replace(
                    base.round, heartbeat_s=0.5, stall_s=3.0, deadline_s_min=30.0, linger_s=6.0
                ),
                transport=replace(base.transport, dial_timeout_s=8.0, handshake_timeout_s=10.0),
            )
        case _:
            raise ConfigError(f"preset {name!r}: choose local, lan or internet")
