"""Run a scenario: the one function that tests, the command line and experiments call."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any, TextIO

from moshpit.sim.scenario import Scenario
from moshpit.sim.world import World


@dataclass(frozen=True, slots=True)
class Finding:
    """What became of one invariant.

    Attributes:
        invariant: its name in design §5.
        ok: whether it always held.
        checked: how often it was looked at.
        violations: how often it did not hold.
        first: the first violation, in words.
    """

    invariant: str
    ok: bool
    checked: int
    violations: int
    first: str


@dataclass(frozen=True, slots=True)
class Result:
    """What a run has shown. All but ``real_s`` is a pure function of scenario and seed.

    Attributes:
        scenario, seed, peers: what was run.
        trace_hash: of every event and effect; the same for the same arguments.
        findings: one per invariant.
        epochs: the epoch that the swarm reached.
        rounds: ended rounds by outcome, counted at every member.
        stale: averagings that came too late.
        heal_epochs: how many averagings, from the last fault on, left the peers apart; None: the
            scenario does not ask for that.
        states: how many training states were fetched from others.
        processes: how many were started in all.
        bulk_bytes: payload sent per process and epoch, bytes.
        membership_messages, membership_bytes: sent per process and second of its life.
        control_messages: all other control messages, per process and second.
        events: how many events nodes handled.
        virtual_s, real_s: how long it took, in the world and here.
    """

    scenario: str
    seed: int
    peers: int
    trace_hash: str
    findings: tuple[Finding, ...]
    epochs: int
    rounds: dict[str, int]
    stale: int
    heal_epochs: int | None
    states: int
    processes: int
    bulk_bytes: float
    membership_messages: float
    membership_bytes: float
    control_messages: float
    events: int
    virtual_s: float
    real_s: float

    @property
    def ok(self) -> bool:
        """Whether every invariant held."""
        return all(finding.ok for finding in self.findings)

    def to_builtins(self) -> dict[str, Any]:
        """Return the result as data for JSON."""
        return {"ok": self.ok} | asdict(self)


def run_all(
    scenario: Scenario, seeds: Sequence[int], peers: int | None = None, jobs: int = 1
) -> Iterator[Result]:
    """Run a scenario under many seeds, in so many processes; yield the results in their order.

    Raises:
        ConfigError: a number of peers that makes no swarm.
    """
    one = partial(run, scenario, peers=peers)
    if jobs == 1:
        yield from map(one, seeds)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        yield from pool.map(one, seeds)


def run(
    scenario: Scenario, seed: int, peers: int | None = None, log: TextIO | None = None
) -> Result:
    """Run a scenario under a seed.

    Args:
        scenario: what happens; see `moshpit.sim.scenario.load`.
        seed: the source of all randomness.
        peers: how many peers, instead of the scenario's number.
        log: where to write the readable trace.

    Raises:
        ConfigError: a number of peers that makes no swarm.
    """
    scenario = scenario.with_peers(peers)
    began = time.perf_counter()
    world = World(scenario, seed, log)
    collects = gc.isenabled()
    gc.disable()  # a thousand views of a thousand records: walking them costs an eighth of the time
    try:
        world.run()
    finally:
        if collects:
            gc.enable()
    end = world.schedule.now
    lives = [(p.died if p.died is not None else end) - p.born for p in world.processes]
    life_s = max(sum(lives), 1e-9)
    traffic = [p.traffic for p in world.processes]
    epochs = max(world.top_epoch, 1)
    return Result(
        scenario=scenario.title,
        seed=seed,
        peers=scenario.swarm.peers,
        trace_hash=world.trace.digest(),
        findings=tuple(
            Finding(v.name, v.ok, v.checked, v.violations, v.first)
            for v in world.checkers.verdicts.values()
        ),
        epochs=world.top_epoch,
        rounds=dict(world.checkers.outcomes),
        stale=world.checkers.stale,
        heal_epochs=world.checkers.heal_epochs,
        states=world.checkers.states.fetched_states if world.checkers.states is not None else 0,
        processes=len(world.processes),
        bulk_bytes=sum(t.bulk_sent for t in traffic) / scenario.swarm.peers / epochs,
        membership_messages=sum(t.membership_messages for t in traffic) / life_s,
        membership_bytes=sum(t.membership_bytes for t in traffic) / life_s,
        control_messages=sum(t.control_messages for t in traffic) / life_s,
        events=world.trace.events,
        virtual_s=end,
        real_s=time.perf_counter() - began,
    )
