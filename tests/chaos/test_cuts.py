"""Cuts of all shapes, one after the other and at once, between real optimizers in virtual time.

What the chaos suite does to real processes, for what cuts alone can do, in seconds and the same
for every seed: two that do not reach each other, one that only hears, one that is alone, two
sides; for less than a suspicion, for longer than a death, and while the last one has not healed.
"""

from __future__ import annotations

from random import Random

import pytest

from moshpit.experiments.virtual import Machine, VirtualCluster, VirtualPeer
from moshpit.experiments.virtual_net import Line
from moshpit.transport.memory import Exchange, Wire
from moshpit.types import PeerId
from tests.training.test_merging import BATCH, STEP_S, STRATEGIES, Trainee

PEERS = 5
FIRST_S, LAST_S, CALM_S = 8.0, 68.0, 52.0
GAP_S = 6.0
LASTING_S = (0.7, 2.0, 4.0, 8.0, 15.0, 25.0)
EPOCHS_TO_FINISH = 4

Way = tuple[int, int]
"""From one peer to another."""


class LossyWire(Wire):
    """A wire that carries nothing on some ways."""

    def __init__(self, exchange: Exchange, cluster: VirtualCluster) -> None:
        self._exchange, self._inner, self._cluster = exchange, exchange.wire, cluster
        self._cuts: list[list[Way]] = []

    def _lost(self, source: PeerId, target: PeerId) -> bool:
        numbers = {peer.peer_id: number for number, peer in enumerate(self._cluster.peers)}
        way = numbers[source], numbers[target]
        return any(way in cut for cut in self._cuts)

    def cut(self, ways: list[Way]) -> None:
        self._cuts.append(ways)

    def heal(self, ways: list[Way]) -> None:
        """End a cut. Connections that were silent for long are gone."""
        self._cuts.remove(ways)
        there = {transport.peer: transport for transport in self._exchange.listening.values()}
        for a, b in ways:
            ends = [there.get(self._cluster.peers[number].peer_id) for number in (a, b)]
            if ends[0] is not None and ends[1] is not None:
                self._exchange.break_link(ends[0], ends[1])

    def dial_s(self, source: PeerId, target: PeerId | None) -> float:
        return self._inner.dial_s(source, target)

    def message(self, source, target, deliver) -> None:
        if not self._lost(source, target):
            self._inner.message(source, target, deliver)

    def chunk(self, source, target, size, sent, deliver) -> None:
        if not self._lost(source, target):
            self._inner.chunk(source, target, size, sent, deliver)


def ways_of(rng: Random) -> list[Way]:
    """Return which ways a cut closes."""
    one, other = rng.sample(range(PEERS), 2)
    rest = [peer for peer in range(PEERS) if peer != one]
    shape = rng.choice(["pair", "mute", "alone", "sides"])
    if shape == "pair":
        return [(one, other), (other, one)]
    if shape == "mute":
        return [(one, peer) for peer in rest]
    if shape == "alone":
        return [(one, peer) for peer in rest] + [(peer, one) for peer in rest]
    side = (one, other)
    return [(a, b) for a in range(PEERS) for b in range(PEERS) if (a in side) != (b in side)]


def train(kind: str, seed: int) -> list[Trainee]:
    """Train under random cuts, then in peace, and finish at one epoch."""
    cluster = VirtualCluster(seed)
    wire = cluster.exchange.wire = LossyWire(cluster.exchange, cluster)
    trainees: list[Trainee] = []
    last_epoch: list[int] = []

    def script(peer: VirtualPeer) -> None:
        with peer.join() as swarm:
            swarm.wait_for_peers(PEERS)
            trainee = Trainee(peer, swarm, STRATEGIES[kind](PEERS * BATCH * 4))
            trainees.append(trainee)
            while not last_epoch or trainee.optimizer.epoch < last_epoch[0]:
                trainee.step()
            trainee.optimizer.finish()

    for index in range(PEERS):
        cluster.add(Machine(Line(1e6, 1e6), slowness=STEP_S * (1.0 + 0.1 * index)), script)
    rng, at = Random(seed), FIRST_S
    while at < LAST_S:
        ways = ways_of(rng)
        cluster.at(at, lambda ways=ways: wire.cut(ways))
        until = min(at + rng.choice(LASTING_S), LAST_S)
        cluster.at(until, lambda ways=ways: wire.heal(ways))
        at += rng.expovariate(1 / GAP_S)

    def end() -> None:
        last_epoch.append(max(t.optimizer.epoch for t in trainees) + EPOCHS_TO_FINISH)

    cluster.at(LAST_S + CALM_S, end)
    with cluster:
        assert cluster.run(1e4), "everybody comes to the end"
    return sorted(trainees, key=lambda t: t.peer.index)


def check(kind: str, seed: int) -> None:
    trainees = train(kind, seed)
    assert len({t.optimizer.epoch for t in trainees}) == 1
    assert len({t.values.numpy().tobytes() for t in trainees}) == 1
    assert trainees[0].optimizer.epoch > 25, "nobody stood still for long"


@pytest.mark.parametrize("kind", STRATEGIES)
def test_peers_end_alike_whatever_was_cut(kind: str) -> None:
    check(kind, seed=9)


@pytest.mark.soak
@pytest.mark.parametrize("kind", STRATEGIES)
@pytest.mark.parametrize("seed", range(20))
def test_peers_end_alike_for_many_seeds(kind: str, seed: int) -> None:
    check(kind, seed)
