"""What membership costs a peer, by the size of the swarm: measured where nobody trains.

All peers know all others from the start (as after hours in a real swarm), so that what is counted
is what it costs to keep that so: probes, news, exchanges of views. With churn, peers die and new
ones come at the rate of a half-life, and after the last death it is also measured how long it
takes until every view is right again.
"""

from __future__ import annotations

import gc
from dataclasses import asdict, dataclass
from typing import Any

from moshpit.errors import ConfigError
from moshpit.sim.scenario import Checks, Churn, Scenario, Swarm, Wires, Work
from moshpit.sim.world import World

SETTLE_S = 5.0  # not counted: until timers have lost the step in which they began
LOOK_S = 0.5  # how often it is looked whether all views are right
HEAL_S_MAX = 120.0
REJOIN_S = (2.0, 10.0)


@dataclass(frozen=True, slots=True)
class Load:
    """What a peer sends for membership.

    Attributes:
        peers: how many there are.
        half_life_s: after which half of them have gone and others have come; 0: nobody goes.
        seconds: over which it was counted.
        changes: deaths, farewells and arrivals in the whole swarm, per second.
        messages, bytes: sent per peer and second.
        bytes_per_change: what a change costs each peer, beyond what quiet does; 0 without.
        healed_s: from the last change until all views were right; None: not within `HEAL_S_MAX`.
    """

    peers: int
    half_life_s: float
    seconds: float
    changes: float
    messages: float
    bytes: float
    bytes_per_change: float
    healed_s: float | None

    def to_builtins(self) -> dict[str, Any]:
        """Return it as data for JSON."""
        return asdict(self)


def scenario_of(peers: int, *, half_life_s: float, seconds: float) -> Scenario:
    """Return the scenario in which it is measured.

    Raises:
        ConfigError: numbers that make no swarm.
    """
    churn = None
    try:
        if half_life_s:
            end = SETTLE_S + seconds
            churn = Churn(half_life_s=half_life_s, until_s=end, rejoin_s=REJOIN_S)
        return Scenario(
            title="membership",
            preset="internet",
            swarm=Swarm(peers=peers, start="warm"),
            work=Work(mode="rest", chunks=1),
            network=Wires(regions=6, latency_ms=(2.0, 60.0)),
            churn=churn,
            checks=Checks(heals=False),
        )
    except ValueError as error:
        raise ConfigError(f"membership of {peers} peers: {error}") from error


def measure(peers: int, *, half_life_s: float, seconds: float, seed: int, quiet: float) -> Load:
    """Count what a peer sends.

    Args:
        peers: how many.
        half_life_s: of their lives; 0: nobody goes.
        seconds: to count, of the simulated time.
        seed: of everything.
        quiet: bytes per peer and second without churn, to tell what the changes cost.

    Raises:
        ConfigError: numbers that make no swarm.

    Example:
        >>> load = measure(10, half_life_s=0.0, seconds=10.0, seed=1, quiet=0.0)
        >>> load.changes, load.healed_s, 10.0 < load.bytes < 1000.0
        (0.0, 0.0, True)
    """
    scenario = scenario_of(peers, half_life_s=half_life_s, seconds=seconds)
    world = World(scenario, seed)
    collects = gc.isenabled()
    gc.disable()  # as in moshpit.sim.simulate
    try:
        world.begin()
        world.schedule.run(SETTLE_S)
        before = _sent(world)
        world.schedule.run(SETTLE_S + seconds)
        messages, sent = (b - a for a, b in zip(before, _sent(world), strict=True))
        events = [p.born for p in world.processes] + [p.died for p in world.processes]
        window = [at for at in events if at is not None and SETTLE_S < at <= world.schedule.now]
        changes = len(window) / seconds
        healed_s = _heal(world)
    finally:
        if collects:
            gc.enable()
    each = peers * seconds
    extra = (sent / each - quiet) / changes if changes else 0.0
    return Load(peers, half_life_s, seconds, changes, messages / each, sent / each, extra, healed_s)


def _sent(world: World) -> tuple[int, int]:
    traffic = [process.traffic for process in world.processes]
    return (
        sum(t.membership_messages for t in traffic),
        sum(t.membership_bytes for t in traffic),
    )


def _heal(world: World) -> float | None:
    """Go on until everybody knows everybody who is there, and nobody else."""
    until = world.schedule.now + HEAL_S_MAX
    while not _all_know(world):
        if world.schedule.now >= until:
            return None
        world.schedule.run(world.schedule.now + LOOK_S)
    return max(0.0, world.schedule.now - world.faults.healed_s) if world.faults.healed_s else 0.0


def _all_know(world: World) -> bool:
    if world.faults.pending:
        return False
    living = world.living()
    true = sorted(process.peer for process in living)
    return all(list(process.node.view.live) == true for process in living)
