"""The torus schedule in whole swarms: exact, for a ring's bytes, and degraded but never lost."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moshpit.events import EpochReport, Outcome, RoundReport
from moshpit.protocol.machine import (
    AdoptResult,
    AveragingEnded,
    ChunkArrived,
    Effect,
    Event,
    Finalize,
    GroupReady,
    Received,
    SendContribution,
    SendResult,
)
from moshpit.protocol.node import Node
from moshpit.sim.process import NodeMachine, Process
from moshpit.sim.scenario import Fault, Scenario, load
from moshpit.sim.simulate import Result, run
from moshpit.sim.store import Payload
from moshpit.sim.world import World
from moshpit.types import GroupId
from moshpit.wire.framing import HEADER_BYTES, TAG_BYTES

from .test_checkers import Broken

SMALL = ("crash", "restart", "churn", "pause", "partition", "slow", "nat", "loss", "corrupt")


def scheduled(scenario: Scenario, schedule: str) -> Scenario:
    settings = scenario.settings | {"matchmaking": {"schedule": schedule}}
    return msgspec.structs.replace(scenario, settings=settings)


def calm(n: int, group_size: int, epochs: int = 1, chunks: int = 8, **checks: Any) -> Scenario:
    """Return a swarm without faults that averages by the torus, weights as they come."""
    base = load("calm")
    return msgspec.structs.replace(
        scheduled(base, "torus"),
        swarm=msgspec.structs.replace(base.swarm, group_size=group_size, epochs=epochs, peers=n),
        work=msgspec.structs.replace(base.work, chunks=chunks, epoch_s=1.0),
        checks=msgspec.structs.replace(base.checks, **checks),
    )


def explain(result: Result) -> str:
    found = [f"{f.invariant}: {f.first}" for f in result.findings if not f.ok]
    return f"{result.scenario} --seed {result.seed} --peers {result.peers}\n" + "\n".join(found)


class Watched(World):
    """Keeps every report of the first epoch, and lets a test act between events."""

    def __init__(self, scenario: Scenario, seed: int = 0) -> None:
        self.reports: list[tuple[str, RoundReport]] = []
        self.columns = 0
        self.ended: dict[str, int] = {}
        self.before: Callable[[Process, Event], None] = lambda process, event: None
        super().__init__(scenario, seed)

    def _handle(self, process: Process, event: Event, payload: Payload | None) -> None:
        self.before(process, event)
        if process.alive:
            super()._handle(process, event, payload)

    def make_node(self, process: Process) -> NodeMachine:
        world = self

        class Listening(Broken):
            def tamper(self, effect: Effect) -> list[Effect]:
                if type(effect) is AveragingEnded:
                    world.ended[process.name] = world.ended.get(process.name, 0) + 1
                    if effect.report.epoch == 0:
                        world.reports += [(process.name, r) for r in effect.report.rounds]
                elif type(effect) is GroupReady and effect.source is not None:
                    world.columns += 1
                return world.tamper(process, effect)

        node = super().make_node(process)
        assert isinstance(node, Node)
        return Listening(node)  # type: ignore[return-value]

    def tamper(self, process: Process, effect: Effect) -> list[Effect]:
        return [effect]

    def rows(self) -> list[RoundReport]:
        return [report for _, report in self.reports if report.reach]

    def verdicts(self) -> dict[str, str]:
        return {v.name: v.first for v in self.checkers.verdicts.values() if not v.ok}


# --- without faults -----------------------------------------------------------------------


@pytest.mark.parametrize("n", range(2, 41))
def test_the_weighted_mean_is_exact_for_every_number_of_peers(n: int) -> None:
    result = run(calm(n, 7), n)
    assert result.ok, explain(result)
    assert result.rounds["partial"] == result.rounds["failed"] == 0


@settings(max_examples=settings.default.max_examples // 4)
@given(
    n=st.integers(2, 17),
    group_size=st.integers(2, 9),
    chunks=st.integers(1, 20),
    nat=st.sampled_from([0.0, 0.3]),
    aux=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 99),
)
def test_it_is_exact_for_random_swarms(  # noqa: PLR0917 - one by strategy
    n: int, group_size: int, chunks: int, nat: float, aux: float, seed: int
) -> None:
    scenario = calm(n, group_size, chunks=chunks)
    swarm = msgspec.structs.replace(scenario.swarm, nat_share=nat, aux_share=aux)
    result = run(msgspec.structs.replace(scenario, swarm=swarm), seed)
    assert all(f.ok for f in result.findings if f.invariant != "E"), explain(result)
    if not nat and not aux:  # the checker of exactness knows of trainers that all come
        assert result.ok, explain(result)
        assert result.rounds["partial"] == result.rounds["failed"] == 0


@pytest.mark.parametrize(("n", "group_size"), [(16, 4), (64, 8)])
def test_a_peer_sends_and_receives_what_it_would_on_a_ring(n: int, group_size: int) -> None:
    scenario = calm(n, group_size, chunks=64)
    world = Watched(scenario)
    world.run()
    assert world.verdicts() == {}
    size = scenario.work.vector_bytes
    chunk = size // 64
    epochs = world.ended["p0"]
    assert {world.ended[process.name] for process in world.processes} == {epochs}
    assert world.columns == n * epochs
    for process in world.processes:
        for payload in (process.traffic.bulk_sent, process.traffic.bulk_received):
            assert payload == epochs * 2 * (n - 1) * size // n
            wire = payload + payload // chunk * (HEADER_BYTES + TAG_BYTES)
            assert wire <= epochs * 1.05 * 2 * (1 - 1 / n) * size


def test_the_reports_say_how_far_each_mean_reaches() -> None:
    world = Watched(calm(12, 4))
    world.run()
    rows = world.rows()
    assert len(rows) == 12
    assert {reach for row in rows for reach in row.reach} == {2}
    assert {row.outcome for row in rows} == {Outcome.COMPLETE}
    assert all(row.fallback == () for row in rows)
    columns = [report for _, report in world.reports if report.span]
    assert len(columns) == 12
    assert {len(report.ledger) for report in columns} == {2}  # 8 chunks, 4 columns
    everybody = max(row.masses[0] for row in rows)
    assert {round(mass, 6) for row in rows for mass in row.masses} == {round(everybody, 6)}


def test_peers_that_want_other_schedules_do_no_harm() -> None:
    """The host of a row decides for it; rows that differ do not meet."""

    class Mixed(Watched):
        def make_node(self, process: Process) -> NodeMachine:
            kept, want = self.config, "grid" if process.index % 2 else "torus"
            self.config = scheduled(self.scenario, want).config()
            node = super().make_node(process)
            self.config = kept
            return node

    world = Mixed(calm(9, 3, epochs=4, exact=False, heals=False))
    world.run()
    assert world.verdicts() == {}
    assert any(report.reach for _, report in world.reports)
    assert any(not report.reach and report.axis == 0 for _, report in world.reports)


# --- faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
def test_the_grid_holds_too_where_it_is_asked_for(name: str) -> None:
    results = [run(scheduled(load(name), "grid"), seed, 7) for seed in range(3)]
    assert all(result.ok for result in results), "\n".join(map(explain, results))


def test_clients_give_and_take_in_a_torus() -> None:
    results = [run(scheduled(load("nat"), "torus"), seed, 7) for seed in range(5)]
    assert all(result.ok for result in results), "\n".join(map(explain, results))


KINDS = ("crash", "dark", "pause", "restart", "partition", "leave")


@pytest.mark.parametrize("kind", KINDS)
def test_invariants_hold_when_it_happens_in_the_columns(kind: str) -> None:
    for seed in range(3):
        fault = Fault(
            kind="crash" if kind == "dark" else kind,  # type: ignore[arg-type]
            at_epoch=1,
            moment="column",
            after_s=(0.0, 0.15),
            for_s=None if kind in ("crash", "dark", "leave") else (1.0, 5.0),
            dark=kind == "dark",
            count=1 + seed % 2,
        )
        base = calm(9, 3, epochs=5, exact=False, heal_epochs=3, drain_s=25.0)
        network = msgspec.structs.replace(base.network, up_mbit=(80.0, 200.0))
        result = run(msgspec.structs.replace(base, faults=(fault,), network=network), seed)
        assert result.ok, explain(result)


@pytest.mark.parametrize("victim", range(6))
def test_nothing_is_lost_when_a_peer_dies_at_any_moment(victim: int) -> None:
    """Every survivor has every chunk, at worst its row's mean, before long."""
    reached = 0
    for moment in range(3 + victim, 160, 23):
        world = Watched(calm(6, 3, exact=False, heals=False, drain_s=25.0))
        seen = 0

        def strike(process: Process, event: Event) -> None:
            nonlocal seen
            about_rounds = type(event) is ChunkArrived or (
                type(event) is Received and hasattr(event.message, "group")
            )
            if about_rounds:
                seen += 1
                if seen == moment and world.processes[victim].alive:  # noqa: B023
                    world.kill(world.processes[victim], dark=False)  # noqa: B023

        world.before = strike
        world.run()
        assert world.verdicts() == {}, moment
        reached += seen >= moment
        for name, row in world.reports:
            if row.reach and name != f"p{victim}":
                assert row.missing == (), (moment, name, row)
                assert row.outcome is not Outcome.FAILED
                assert row.moving_s < 12.0
    assert reached >= 3


def test_a_column_that_one_row_cannot_reach_leaves_that_row_its_own_mean() -> None:
    """One holder is deaf and mute in its column, and sound in its row."""

    class Deaf(Watched):
        deaf: dict[GroupId, bool]

        def tamper(self, process: Process, effect: Effect) -> list[Effect]:
            if process.index == 4 and type(effect) is GroupReady and effect.source is not None:
                self.deaf[GroupId(effect.formed.group)] = True
            mute = isinstance(effect, SendContribution | SendResult) and effect.group in self.deaf
            return [] if mute and process.index == 4 else [effect]

        def _hand(self, process: Process, event: Event, payload: Payload | None) -> None:
            group = getattr(getattr(event, "message", None), "group", None)
            if type(event) is ChunkArrived:
                group = event.header.group
            if process.index != 4 or group not in self.deaf:
                super()._hand(process, event, payload)

    Deaf.deaf = {}
    world = Deaf(calm(9, 3, exact=False, heals=False, drain_s=40.0))
    world.run()
    assert world.verdicts() == {}
    mine = next(row for name, row in world.reports if name == "p4" and row.reach)
    span = next(r.span for name, r in world.reports if name == "p4" and r.span)
    for row in world.rows():
        assert row.missing == ()
        assert row.outcome is Outcome.PARTIAL
        in_this_row = mine.peers[0] in row.peers
        for chunk, reach in enumerate(row.reach):
            at_fault = span[0] <= chunk < span[1]
            assert reach == (2 if not at_fault else 0 if in_this_row else 1)
        assert row.fallback == (tuple(range(*span)) if in_this_row else ())
        assert EpochReport(0, (row,), 1.0).parted, "everybody knows"


def test_a_holder_that_gives_nothing_out_is_replaced() -> None:
    """It lives and beats, but no result of its part ever comes: the others redo it."""

    class Hanging(Watched):
        def tamper(self, process: Process, effect: Effect) -> list[Effect]:
            return [] if process.index == 2 and type(effect) is SendResult else [effect]

    world = Hanging(calm(9, 3, exact=False, heals=False, drain_s=60.0))
    world.run()
    assert world.verdicts() == {}
    others = [(name, row) for name, row in world.reports if row.reach and name != "p2"]
    assert len(others) == 8
    assert all(row.missing == () for _, row in others)
    first, end = next(r.span for name, r in world.reports if name == "p2" and r.span)
    mates = [row for _, row in others if world.processes[2].peer in row.peers]
    assert len(mates) == 2
    for row in mates:  # reduced anew by the next seat, and so without the column
        assert row.attempts == tuple(int(first <= chunk < end) for chunk in range(8))
        assert row.fallback == tuple(range(first, end))
    assert max(row.moving_s for _, row in others) < 20.0  # of a deadline of 50


# --- the checkers see what is wrong -------------------------------------------------------


def sabotage(tamper: Callable[[Effect], list[Effect]]) -> dict[str, str]:
    class Sabotaged(Watched):
        def tamper(self, process: Process, effect: Effect) -> list[Effect]:
            return tamper(effect) if process.index == 1 else [effect]

    world = Sabotaged(calm(9, 3, epochs=2, time_limit_s=60.0))
    world.run()
    return world.verdicts()


def test_a_mean_that_goes_out_as_more_than_it_is_is_seen() -> None:
    def boast(effect: Effect) -> list[Effect]:
        if type(effect) is AdoptResult:
            return [msgspec.structs.replace(effect, mass=effect.mass * 2)]
        return [effect]

    assert "goes out with" in sabotage(boast)["S1"]


def test_a_row_that_goes_up_with_another_mass_is_seen() -> None:
    def cheat(effect: Effect) -> list[Effect]:
        if type(effect) is SendContribution:
            return [msgspec.structs.replace(effect, mass=effect.mass * 3)]
        return [effect]

    assert "not the mass of what seat" in sabotage(cheat)["S1"]


def test_an_adoption_that_is_forgotten_is_seen() -> None:
    assert "does not hold" in sabotage(lambda e: [] if type(e) is AdoptResult else [e])["S1"]


def test_a_sum_that_was_not_finished_is_seen() -> None:
    assert sabotage(lambda e: [] if type(e) is Finalize else [e])["S1"]
