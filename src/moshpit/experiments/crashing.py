"""Simulated swarms whose peers crash, and what every peer held after every round.

The real machines (membership, meeting, all-reduce) of hundreds of peers in the simulator. When its
round has ended a peer crashes with some probability, for good; the groups of this epoch that
planned with it go on without it, and the next epoch is planned for those that are left.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from moshpit.errors import ConfigError
from moshpit.events import RoundReport
from moshpit.protocol import grid
from moshpit.protocol.machine import AveragingEnded, Effect, GroupReady, RoundEnded, Send
from moshpit.sim.process import Process
from moshpit.sim.scenario import Checks, Scenario, Swarm, Wires, Work
from moshpit.sim.trainer import Trainer
from moshpit.sim.world import World
from moshpit.types import GroupId, PeerId
from moshpit.wire.messages import Join

GAP_S = 12.0  # between two averagings: time to find out who is dead; measured with `lan`

Round = tuple[int, int]
"""An epoch, and an axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One comparison.

    Attributes:
        peers, group_size: N and M.
        death: the probability that a peer crashes in a round.
        epochs: averagings, each of d rounds.
        values: how many numbers each peer has; each is an experiment of its own, except that
            crashes and groups are the same.
        seeds: how many swarms are simulated.
        runs: how often the model is run.
        asked: a peer that crashes has just asked for its next group; see `Observed`.

    Raises:
        ConfigError: numbers that make no experiment.
    """

    peers: int
    group_size: int = 32
    death: float = 0.005
    epochs: int = 3
    values: int = 32
    seeds: int = 4
    runs: int = 300
    asked: bool = False

    def __post_init__(self) -> None:
        if not 2 <= self.peers <= 10_000 or not 2 <= self.group_size <= grid.GROUP_SIZE_MAX:
            raise ConfigError(
                f"--peers {self.peers}, --group-size {self.group_size}: 2 to 10000 and 2 to "
                f"{grid.GROUP_SIZE_MAX}"
            )
        if not 0 <= self.death <= 0.2 or min(self.epochs, self.values, self.seeds) < 1:
            raise ConfigError("--failure: up to 0.2; --epochs, --values, --seeds: at least 1")
        if self.runs < 20:
            raise ConfigError("--runs: at least 20, for a band")

    @property
    def axes(self) -> int:
        """d."""
        return grid.plan(self.peers, self.group_size).axes

    @property
    def rounds(self) -> int:
        """Rounds of all epochs."""
        return self.epochs * self.axes

    def __str__(self) -> str:
        return f"N = {self.peers}, M = {self.group_size}, p = {self.death:g}"


class Observed(World):
    """A world in which peers crash between two rounds, and every round's end is noted.

    A peer crashes as its round ends, before it has asked for its next group. Where the case says
    ``asked``, it has sent that question: then it is dead in a group that has counted on it, if
    that has formed before anybody has noticed.

    Args:
        case: the comparison.
        seed: the source of all randomness.

    Attributes:
        first: every peer's values at the start.
        after: for each round, the values of each peer that has ended it.
        met: for each round, who was in a group that has formed.
        gave: for each round and value, whose are in the means of those that live on. Not there is a
            reducer that has died with its last means on their way: others made them again.
        last: of those that have crashed, the last round that they ended.
        crashes: how many there were.
    """

    def __init__(self, case: Case, seed: int) -> None:
        self.first: dict[PeerId, list[float]] = {}
        self.after: dict[Round, dict[PeerId, list[float]]] = {}
        self.met: dict[Round, dict[PeerId, None]] = {}
        self.gave: dict[Round, list[dict[PeerId, None]]] = {}
        self.last: dict[PeerId, Round] = {}
        self.crashes = 0
        self._case = case
        self._keys_of: dict[tuple[int, GroupId], Round] = {}
        super().__init__(scenario(case), seed)
        self._deaths = random.Random(f"{seed}/deaths")
        made, ended = self._actions[GroupReady], self._actions[RoundEnded]

        def group_ready(process: Process, effect: GroupReady) -> None:
            made(process, effect)
            self._round_begins(process, effect)

        def round_ended(process: Process, effect: RoundEnded) -> None:
            ended(process, effect)
            at = self._keys_of.pop((process.index, effect.report.group))
            self.after.setdefault(at, {})[process.peer] = list(process.store.vector)
            self.met.setdefault(at, {}).update(dict.fromkeys(effect.report.peers))
            if self._deaths.random() < self._case.death:
                self.last[process.peer] = at
                self.schedule.at(self.schedule.now, self._crash, process)
            else:
                self._note_givers(at, effect.report)

        self._actions |= {GroupReady: group_ready, RoundEnded: round_ended}

    def _trainer(self, process: Process) -> Trainer:
        trainer = super()._trainer(process)
        self.first[process.peer] = list(trainer.values)
        return trainer

    def _round_begins(self, process: Process, effect: GroupReady) -> None:
        key = effect.formed.key
        self._keys_of[process.index, GroupId(effect.formed.group)] = key.epoch, key.axis

    def _note_givers(self, at: Round, report: RoundReport) -> None:
        gave = self.gave.setdefault(at, [{} for _ in range(self._case.values)])
        for seats, givers in zip(report.ledger, gave, strict=True):
            givers.update((p, None) for seat, p in enumerate(report.peers) if seats >> seat & 1)

    def _execute(self, process: Process, effects: list[Effect]) -> None:
        for effect in effects:
            asks = type(effect) is Send and type(effect.message) is Join
            if asks and process.peer in self.last and not self._case.asked:
                self._crash(process, None)
            if process.alive:
                super()._execute(process, [effect])

    def _crash(self, process: Process, _: None) -> None:
        if process.alive:
            self.crashes += 1
            self.note(f"{process.name} crashes")
            self.kill(process, dark=False)

    def _averaging_ended(self, process: Process, effect: AveragingEnded) -> None:
        """Stand still for a while: by the next averaging everybody knows who is dead."""
        super()._averaging_ended(process, effect)
        process.trainer.stop()
        again = (self.schedule.now // GAP_S + 1.0) * GAP_S
        self.schedule.at(again, self._work_again, process)

    def _work_again(self, process: Process, _: None) -> None:
        if process.alive:
            process.trainer.resume(0.0)


def scenario(case: Case) -> Scenario:
    """Return the simulator's scenario: a warm start, a quiet network, the grid's schedule."""
    return Scenario(
        title="agreement",
        swarm=Swarm(
            peers=case.peers, group_size=case.group_size, epochs=case.epochs, start="warm"
        ),
        work=Work(
            mode="average", rate_sigma=0.0, step_s=(0.001, 0.001), drift=0.0, chunks=case.values,
            vector_bytes=4 * case.values,
        ),
        network=Wires(latency_ms=(1.0, 1.0)),
        checks=Checks(heals=False, drain_s=1.0, time_limit_s=3600.0),
        settings={"matchmaking": {"schedule": "grid"}},
    )  # fmt: skip
