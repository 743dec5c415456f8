"""Scenarios: a swarm, its network, its faults and what must hold, as frozen data from TOML.

Every table and key is checked; what is not known is refused with the path to it.
`shipped` lists the scenarios that come with Moshpit, `load` reads one by name or path.
"""

from __future__ import annotations

import dataclasses
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal

import msgspec

from moshpit.config import SwarmConfig, preset
from moshpit.errors import ConfigError

Range = tuple[float, float]


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of a scenario file."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _check_range(name: str, value: Range, low: float = 0.0) -> None:
    _require(low <= value[0] <= value[1] < float("inf"), f"{name}: needs {low} ≤ low ≤ high")


class Swarm(_Table, frozen=True):
    """Who takes part, and for how long."""

    peers: int
    group_size: int = 16
    epochs: int = 4
    start: Literal["join", "warm"] = "join"
    """``join``: everybody dials first addresses; ``warm``: everybody knows everybody."""
    join_spread_s: float = 2.0
    """Over what time the first peers start."""
    nat_share: float = 0.0
    aux_share: float = 0.0

    def __post_init__(self) -> None:
        _require(1 <= self.peers <= 100_000, "peers: 1 to 100000")
        _require(2 <= self.group_size <= 64, "group_size: 2 to 64")
        _require(1 <= self.epochs <= 10_000, "epochs: 1 to 10000")
        _require(self.join_spread_s >= 0, "join_spread_s: not below 0")
        _require(0 <= self.nat_share <= 0.9, "nat_share: 0 to 0.9; somebody must reduce")
        _require(0 <= self.aux_share <= 0.9, "aux_share: 0 to 0.9; somebody must train")


class Work(_Table, frozen=True):
    """What is trained, in the simulator's terms."""

    mode: Literal["train", "average", "rest"] = "train"
    """``train``: samples until the swarm's target is met; ``average``: only average; ``rest``:
    neither, for what the swarm itself costs (`moshpit.sim.traffic`)."""
    target_samples: float = 0.0
    """Samples per epoch of the whole swarm; 0: enough for about ``epoch_s``."""
    epoch_s: float = 10.0
    rate_median: float = 100.0
    """Samples per second of the median peer."""
    rate_sigma: float = 0.4
    """Spread of the rates, log-normal."""
    step_s: Range = (0.2, 0.6)
    report_s: float = 0.0
    """A trainer tells its node how far it is at most this often; 0: at every step."""
    drift: float = 0.1
    """Standard deviation of what an epoch's work adds to each value."""
    chunks: int = 8
    vector_bytes: int = 4_000_000

    def __post_init__(self) -> None:
        _require(self.target_samples >= 0, "target_samples: not below 0")
        _require(self.epoch_s > 0 and self.rate_median > 0, "epoch_s, rate_median: above 0")
        _require(self.rate_sigma >= 0 and self.drift >= 0, "rate_sigma, drift: not below 0")
        _check_range("step_s", self.step_s, 1e-3)
        _require(1 <= self.chunks <= 100_000, "chunks: 1 to 100000")
        _require(self.vector_bytes >= self.chunks, "vector_bytes: at least a byte per chunk")


class Wires(_Table, frozen=True):
    """The network before any fault."""

    regions: int = 1
    latency_ms: Range = (1.0, 1.0)
    """One way: the first within a region, up to the second between the farthest."""
    jitter_ms: float = 0.5
    up_mbit: Range = (1000.0, 1000.0)
    down_mbit: Range = (1000.0, 1000.0)
    loss: float = 0.0
    silence_s: float = 8.0
    """How long a stream waits for an answer before it gives up."""
    handshake_ms: float = 2.0

    def __post_init__(self) -> None:
        _require(1 <= self.regions <= 100, "regions: 1 to 100")
        _check_range("latency_ms", self.latency_ms, 0.01)
        _check_range("up_mbit", self.up_mbit, 1e-3)
        _check_range("down_mbit", self.down_mbit, 1e-3)
        _require(self.jitter_ms >= 0 and self.handshake_ms >= 0, "jitter_ms, handshake_ms: ≥ 0")
        _require(0 <= self.loss < 0.9, "loss: 0 to 0.9")
        _require(self.silence_s > 0, "silence_s: above 0")


class Churn(_Table, frozen=True):
    """Random deaths with a half-life, and replacements."""

    half_life_s: float
    until_epoch: int | None = None
    """From here on nobody dies any more."""
    until_s: float | None = None
    """The same, by the time."""
    rejoin_s: Range = (2.0, 10.0)
    new_key_share: float = 0.5
    leave_share: float = 0.25
    """Of those that go, how many say goodbye."""
    dark_share: float = 0.0
    """Of those that die, how many lose power, so that nothing answers."""

    def __post_init__(self) -> None:
        _require(self.half_life_s > 0, "half_life_s: above 0")
        _require(
            self.until_epoch is not None or self.until_s is not None,
            "churn needs an end: until_epoch or until_s",
        )
        _check_range("rejoin_s", self.rejoin_s)
        for name in ("new_key_share", "leave_share", "dark_share"):
            _require(0 <= getattr(self, name) <= 1, f"{name}: 0 to 1")


class Transfer(_Table, frozen=True):
    """Peers that are behind fetch the state of others, instead of taking the next mean."""

    state_bytes: int = 12_000_000
    """Of the parameters and what an optimizer keeps of them."""

    def __post_init__(self) -> None:
        _require(1 <= self.state_bytes <= 1 << 40, "state_bytes: 1 to 2**40")


FaultKind = Literal[
    "crash", "restart", "pause", "slow", "partition", "bandwidth", "loss", "corrupt", "leave",
    "join",
]  # fmt: skip


class Fault(_Table, frozen=True):
    """One thing that goes wrong, when, for whom, and for how long.

    ``crash``: dies (``dark``: its machine too). ``restart``: dies and comes back after
    ``for_s``, with ``new_key`` or the same. ``pause``: stopped and continued. ``slow``:
    steps take ``factor`` times as long. ``partition``: cut off from the rest. ``bandwidth``:
    up and down times ``factor``. ``loss``: of packets, on their lines. ``corrupt``: the
    contributions that it sends are broken (``how``). ``leave``: says goodbye. ``join``:
    new peers come.
    """

    kind: FaultKind
    at_s: float | None = None
    at_epoch: int | None = None
    moment: Literal["work", "round", "column"] = "work"
    """With ``at_epoch``: at the epoch's start, or when its first group (of a torus: its first
    column) has formed."""
    after_s: Range = (0.0, 0.0)
    """Later than that by a random time in this range, one for each victim."""
    for_s: Range | None = None
    """How long it lasts; nothing: for good."""
    count: int | None = None
    share: float | None = None
    hosts: tuple[int, ...] | None = None
    dark: bool = False
    new_key: bool = False
    factor: float = 1.0
    loss: float = 0.0
    how: Literal["non-finite", "wrong-size", "undecodable", "bad-mass"] = "non-finite"

    def __post_init__(self) -> None:
        _require(
            (self.at_s is None) != (self.at_epoch is None), "a fault needs either at_s or at_epoch"
        )
        _require(self.at_s is None or self.at_s >= 0, "at_s: not below 0")
        _require(self.at_epoch is None or self.at_epoch >= 0, "at_epoch: not below 0")
        _require(self.at_s is None or self.moment == "work", "moment needs at_epoch")
        _check_range("after_s", self.after_s)
        if self.for_s is not None:
            _check_range("for_s", self.for_s)
        given = [v is not None for v in (self.count, self.share, self.hosts)]
        _require(sum(given) == 1, "a fault needs one of count, share, hosts")
        _require(self.count is None or self.count >= 1, "count: at least 1")
        _require(self.share is None or 0 < self.share <= 1, "share: above 0, up to 1")
        _require(self.factor > 0, "factor: above 0")
        _require(0 <= self.loss < 0.9, "loss: 0 to 0.9")
        needs_end = self.kind in ("restart", "pause", "partition")
        _require(not needs_end or self.for_s is not None, f"{self.kind} needs for_s")


class Checks(_Table, frozen=True):
    """What must hold, and the bounds. S1, S2, S4 and L1 always must."""

    exact: bool = False
    """E: every epoch ends with the exact weighted mean at every peer."""
    heals: bool = True
    """L2: after the last fault one view, one epoch, no spread."""
    heal_epochs: int = 3
    """How many epochs that may take."""
    relapses: int = 0
    """How many averagings after that, never two in a row, may leave peers apart again: where
    packets are lost all the time, faults never stop."""
    spread_max: float = 1e-9
    """The spread at the end, relative to the largest value."""
    time_limit_s: float = 600.0
    """Virtual seconds in which all epochs must be over."""
    averaging_s_max: float = 120.0
    """The longest that one epoch's averaging may take at one peer."""
    meeting_s_max: float = 5.0
    """How long a join may stay without an answer."""
    drain_s: float = 20.0
    """How long the world goes on after the last epoch, so that rounds can close."""


class Scenario(_Table, frozen=True):
    """A whole scenario."""

    title: str
    swarm: Swarm
    preset: Literal["local", "lan", "internet"] = "lan"
    work: Work = Work()
    network: Wires = Wires()
    churn: Churn | None = None
    transfer: Transfer | None = None
    faults: tuple[Fault, ...] = ()
    checks: Checks = Checks()
    settings: dict[str, dict[str, float | int | bool | str]] = {}
    """Changes to the preset: settings.round.stall_s = 2.0 and the like."""

    def __post_init__(self) -> None:
        _require(
            not self.checks.exact or (not self.faults and self.churn is None),
            "checks.exact holds only without faults and churn",
        )
        _require(
            self.transfer is None or self.work.mode == "train",
            "transfer: without training nobody is ever behind",
        )

    def with_peers(self, peers: int | None) -> Scenario:
        """Return the scenario with another number of peers.

        Raises:
            ConfigError: a number that makes no swarm.
        """
        if peers is None:
            return self
        swarm = msgspec.to_builtins(self.swarm) | {"peers": peers}
        try:
            return msgspec.structs.replace(self, swarm=msgspec.convert(swarm, Swarm))
        except msgspec.ValidationError as error:
            raise ConfigError(f"scenario {self.title!r}: {error}") from error

    def config(self) -> SwarmConfig:
        """Return the settings of every peer.

        Raises:
            ConfigError: ``settings`` names something that is no setting.
        """
        config = preset(self.preset)
        parts: dict[str, Any] = {
            "matchmaking": dataclasses.replace(
                config.matchmaking, group_size=self.swarm.group_size
            ),
        }
        for name, changes in self.settings.items():
            part = parts.get(name, getattr(config, name, None))
            if not dataclasses.is_dataclass(part) or isinstance(part, type):
                raise ConfigError(f"scenario {self.title!r}: settings.{name}: no such settings")
            try:
                parts[name] = dataclasses.replace(part, **changes)
            except TypeError as error:
                raise ConfigError(f"scenario {self.title!r}: settings.{name}: {error}") from error
        return dataclasses.replace(config, **parts)


def shipped() -> list[str]:
    """Return the names of the scenarios that come with Moshpit."""
    folder = files("moshpit.sim").joinpath("scenarios")
    return sorted(f.name[:-5] for f in folder.iterdir() if f.name.endswith(".toml"))


def load(name: str | Path) -> Scenario:
    """Read a scenario: the name of a shipped one, or the path of a file.

    Raises:
        ConfigError: no such scenario, or a file that is none; says where and why.

    Example:
        >>> load("calm").checks.exact
        True
    """
    if isinstance(name, str) and name in shipped():
        text = files("moshpit.sim").joinpath("scenarios", f"{name}.toml").read_text("utf-8")
        return parse(text, name)
    path = Path(name)
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"scenario {str(name)!r}: neither a shipped one ({', '.join(shipped())}) "
            f"nor a readable file: {error}"
        ) from error
    return parse(text, str(path))


def parse(text: str, name: str) -> Scenario:
    """Read a scenario from TOML; raises `ConfigError` with the path to what is wrong."""
    try:
        scenario = msgspec.toml.decode(text, type=Scenario)
    except (msgspec.DecodeError, ValueError) as error:
        raise ConfigError(f"scenario {name}: {error}") from error
    scenario.config()
    return scenario
