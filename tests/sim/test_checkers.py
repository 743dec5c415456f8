"""The checkers see what is wrong: nodes that lie, forget and go on forever are caught."""

from __future__ import annotations

import msgspec
import pytest

from moshpit.events import Blame
from moshpit.protocol.machine import (
    AccumulateOwn,
    AveragingEnded,
    CloseRound,
    Effect,
    Event,
    Finalize,
    RoundEnded,
    Send,
    TakeResult,
)
from moshpit.protocol.node import Node
from moshpit.sim.process import NodeMachine, Process
from moshpit.sim.scenario import Scenario, load
from moshpit.sim.world import World
from moshpit.types import PeerId
from moshpit.wire.messages import JoinAck, Refusal

CULPRIT = 1


class Broken:
    """A sound node whose effects are tampered with on their way to the driver."""

    def __init__(self, node: Node) -> None:
        self.node = node

    @property
    def wakeup(self) -> float | None:
        return self.node.wakeup

    @property
    def view(self) -> object:
        return self.node.view

    @property
    def epoch(self) -> int:
        return self.node.epoch

    @property
    def merging(self) -> float | None:
        return self.node.merging

    def attach(self, schema: bytes, target: float, now: float, epoch: int = 0) -> list[Effect]:
        return self.node.attach(schema, target, now, epoch)

    def handle(self, event: Event, now: float) -> list[Effect]:
        return [made for effect in self.node.handle(event, now) for made in self.tamper(effect)]

    def tamper(self, effect: Effect) -> list[Effect]:
        return [effect]


class CountsTwice(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        return [effect] * (2 if type(effect) is AccumulateOwn else 1)


class ForgetsItself(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        return [] if type(effect) is AccumulateOwn else [effect]


class InflatesMass(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        if type(effect) is Finalize:
            return [msgspec.structs.replace(effect, mass=effect.mass * 1.01)]
        return [effect]


class NamesOthers(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        if type(effect) is Finalize:
            return [msgspec.structs.replace(effect, seats=effect.seats ^ 1)]
        return [effect]


class TakesNothing(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        return [] if type(effect) is TakeResult else [effect]


class ReducesTwice(Broken):
    """Makes a second mean under the same ballot, of another value."""

    def tamper(self, effect: Effect) -> list[Effect]:
        if type(effect) is Finalize:
            again = AccumulateOwn(effect.group, effect.chunk, effect.mass)
            return [effect, again, effect]
        return [effect]


class BlamesTheHonest(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        if type(effect) is RoundEnded and len(effect.report.peers) > 1:
            blames = (Blame(effect.report.peers[0], "non-finite"),)
            return [RoundEnded(msgspec.structs.replace(effect.report, blames=blames))]
        return [effect]


class RefusesWithoutReason(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        if type(effect) is RoundEnded and len(effect.report.peers) > 1:
            other = effect.report.peers[effect.report.seat - 1]
            return [effect, Send(PeerId(other), Refusal(effect.report.group, "", ""))]
        return [effect]


class NeverEnds(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        return [] if type(effect) in (RoundEnded, CloseRound, AveragingEnded) else [effect]


class NeverCloses(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        return [] if type(effect) is CloseRound else [effect]


class IgnoresJoins(Broken):
    def tamper(self, effect: Effect) -> list[Effect]:
        return [] if type(effect) is Send and type(effect.message) is JoinAck else [effect]


class Spins(Broken):
    @property
    def wakeup(self) -> float | None:
        return 0.0


def calm() -> Scenario:
    """Return the calm scenario with checks that end soon, long enough that all peers host."""
    scenario = load("calm")
    swarm = msgspec.structs.replace(scenario.swarm, epochs=12)
    checks = msgspec.structs.replace(
        scenario.checks, time_limit_s=90.0, averaging_s_max=20.0, drain_s=60.0
    )
    return msgspec.structs.replace(scenario, checks=checks, swarm=swarm).with_peers(6)


def verdicts(kind: type[Broken], seed: int = 0) -> dict[str, str]:
    """Run with one broken node; return the first violation of each invariant."""

    class Sabotaged(World):
        def make_node(self, process: Process) -> NodeMachine:
            node = super().make_node(process)
            assert isinstance(node, Node)
            return kind(node) if process.index == CULPRIT else node  # type: ignore[return-value]

    world = Sabotaged(calm(), seed)
    world.run()
    return {v.name: v.first for v in world.checkers.verdicts.values() if not v.ok}


def test_a_node_that_is_not_tampered_with_is_sound() -> None:
    assert verdicts(Broken) == {}


@pytest.mark.parametrize(
    ("kind", "invariant", "words"),
    [
        (CountsTwice, "S1", "counts twice"),
        (ForgetsItself, "S1", "mass"),
        (InflatesMass, "S1", "ledger has mass"),
        (NamesOthers, "S1", "ledger has seats"),
        (TakesNothing, "S1", "does not hold"),
        (ReducesTwice, "S2", "elsewhere"),
        (BlamesTheHonest, "S4", "blames honest"),
        (RefusesWithoutReason, "S4", "without a reason"),
        (NeverEnds, "L1", "has not ended"),
        (NeverCloses, "L1", "never closed"),
        (IgnoresJoins, "L1", "without an answer"),
        (Spins, "L1", "ticks without end"),
        (ForgetsItself, "E", "mean"),
    ],
)
def test_what_is_wrong_is_seen(kind: type[Broken], invariant: str, words: str) -> None:
    found = verdicts(kind)
    assert words in found[invariant]


def test_relapses_are_single_averagings(monkeypatch: pytest.MonkeyPatch) -> None:
    scenario = load("churn")
    swarm = msgspec.structs.replace(scenario.swarm, peers=4)
    world = World(msgspec.structs.replace(scenario, swarm=swarm, churn=None), 0)
    world.run()
    checkers, live = world.checkers, [p for p in world.processes if p.host.process is p]
    verdict = checkers.verdicts["L2"]
    assert verdict.ok
    assert max(checkers._epochs) > 8
    for relapses, apart, found in [
        (0, [5], 1), (1, [5], 0), (1, [5, 6], 1), (1, [5, 7], 1), (2, [5, 7], 0), (2, [5, 6], 1)
    ]:  # fmt: skip
        checkers._checks = msgspec.structs.replace(scenario.checks, relapses=relapses)
        monkeypatch.setattr(checkers, "spread", lambda epoch, apart=apart: float(epoch in apart))
        verdict.violations = 0
        checkers.finish(world.schedule.now, live, 0, True)
        assert verdict.violations == found, (relapses, apart)
