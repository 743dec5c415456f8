"""Two living processes with one key, each of them known to other peers of a large swarm."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest

from moshpit.protocol.machine import Effect, Emit, Event, LinkUp, Received
from moshpit.protocol.roster import TWIN
from moshpit.protocol.twins import NEW_S, QUIET_S, ROUNDS, Twins
from moshpit.protocol.view import Status
from moshpit.runtime.doubles import Doubles
from moshpit.types import PeerId

from .harness_membership import Host, Net, machine, peer_id, record_of

SIZE = 40
BOTH = 3  # whose key both have
TWIN_AT = PeerId(b"\xff" * 32)  # where the network finds the second one
BOUND_S = 30.0


@dataclass
class Twinned(Net):
    """A swarm in which some peers know the second process with a key, and the others the first.
    Each refuses the one that it does not know, which counts that (`Doubles`)."""

    theirs: list[int] = field(default_factory=list)
    gone: dict[PeerId, float] = field(default_factory=dict)
    doubles: dict[PeerId, Doubles] = field(default_factory=dict)

    def __init__(self, seed: int, theirs: list[int]) -> None:
        super().__init__(seed)
        self.theirs = theirs
        self.gone = {}
        self.doubles = {TWIN_AT: Doubles(), peer_id(BOTH): Doubles()}

    def start_twin(self, address: tuple[str, int]) -> None:
        made = machine(BOTH, seed=99, now=self.now, addresses=(address,))
        self.hosts[TWIN_AT] = Host(made)
        self.numbers[TWIN_AT] = BOTH
        self._plan_tick(TWIN_AT)
        for number in self.theirs[:2]:
            self._post(0.0, TWIN_AT, LinkUp(peer_id(number)))
            self._post(0.0, peer_id(number), LinkUp(peer_id(BOTH)))

    def _send(self, a, b, message) -> None:
        twins = a in (TWIN_AT, peer_id(BOTH))
        if twins and (self.numbers[b] in self.theirs) != (a == TWIN_AT):
            knows = len(self.theirs) if a == TWIN_AT else SIZE - 1 - len(self.theirs)
            if self.doubles[a].refused(b, knows, self.now):
                self._go(a)
            return
        source = peer_id(BOTH) if a == TWIN_AT else a
        if b == peer_id(BOTH) and self.numbers[a] in self.theirs:
            b = TWIN_AT
        target = self.hosts.get(b)
        if target is not None and target.alive:
            self._post(self.rng.uniform(0.002, 0.03), b, Received(source, message))

    def _handle(self, peer: PeerId, event: Event | None) -> None:
        if peer not in self.gone:
            super()._handle(peer, event)

    def _effects(self, peer: PeerId, effects: list[Effect]) -> None:
        super()._effects(peer, effects)
        if any(isinstance(e, Emit) and e.notice.code == TWIN for e in effects):
            self._go(peer)

    def _go(self, peer: PeerId) -> None:
        self.gone[peer] = self.now
        self.hosts[peer].alive = False


@pytest.mark.parametrize(
    ("known_to", "last"),
    [
        (20, True),
        pytest.param(20, False, marks=pytest.mark.soak),
        pytest.param(12, True, marks=pytest.mark.soak),
        pytest.param(12, False, marks=pytest.mark.soak),
        (2, False),
    ],
)
def test_the_newcomer_is_told_soon_whoever_knows_it(known_to: int, last: bool) -> None:
    others = [number for number in range(SIZE) if number != BOTH]
    net = Twinned(known_to, random.Random(known_to).sample(others, known_to))
    net.grow(SIZE)
    net.theirs, theirs = [], net.theirs
    net.run_until(lambda: net.agree(list(range(SIZE))), 30.0)
    net.run(60.0)
    net.theirs = theirs
    began = net.now
    net.start_twin(("10.250.0.1" if last else "1.0.0.1", 7000))
    net.run_until(lambda: bool(net.gone), BOUND_S)
    assert list(net.gone) == [TWIN_AT], "the first one stays"
    net.theirs = []  # the network finds the first one again
    net.run_until(lambda: net.agree(list(range(SIZE))), BOUND_S)
    assert net.gone[TWIN_AT] - began < BOUND_S
    net.run(2 * QUIET_S)
    assert list(net.gone) == [TWIN_AT]
    mine = record_of(BOTH).addresses
    assert all(net.view(n).record(peer_id(BOTH)).addresses == mine for n in others)
    assert net.everywhere(BOTH, Status.ALIVE)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(3))
def test_two_that_have_long_been_there_do_not_both_go(seed: int) -> None:
    """Sides of a swarm that were cut off from each other, each with one of them."""
    theirs = [number for number in range(SIZE) if number % 2]
    theirs.remove(BOTH)
    net = Twinned(seed, theirs)
    sides = {number: number in theirs for number in range(SIZE)}
    net.grow(SIZE)
    net.run_until(lambda: net.agree(list(range(SIZE))), 30.0)
    net.apart = lambda a, b: sides[a] != sides[b]
    cut = net._send
    net._send = lambda a, b, m: None if net.apart(*ends(net, a, b)) else cut(a, b, m)
    net.start_twin(("10.250.0.1", 7000))
    net.run(90.0)
    assert not net.gone
    net.apart = lambda a, b: False
    net.run_until(lambda: bool(net.gone), 120.0)
    net.run(5.0)
    assert list(net.gone) == [TWIN_AT], "its addresses come last"


def ends(net: Twinned, a: PeerId, b: PeerId) -> tuple[int, int]:
    """Two peers on either side; the second process is on that of those who know it."""
    side = net.theirs[0]
    if a == TWIN_AT:
        return side, net.numbers[b]
    if b == peer_id(BOTH) and net.numbers[a] in net.theirs:
        return net.numbers[a], side
    return net.numbers[a], net.numbers[b]


# --- the rule ---------------------------------------------------------------------------------

FIRST, LAST = (msgspec.structs.replace(record_of(1), addresses=((h, 7000),)) for h in "ab")


def stands(new: bool, mine, theirs) -> int:
    twins = Twins(0.0)
    at = 1.0 if new else NEW_S + 1.0
    for rounds in range(1, 100):
        if twins.outdone(mine, theirs, at + rounds * 0.3):
            return rounds
    raise AssertionError("it stands for ever")


def test_of_two_one_stands_for_clearly_longer() -> None:
    newcomers = [stands(True, LAST, FIRST), stands(True, FIRST, LAST)]
    elders = [stands(False, LAST, FIRST), stands(False, FIRST, LAST)]
    told = [*newcomers, *elders]
    assert told == sorted(ROUNDS.values())
    assert all(b - a >= 3 for a, b in pairwise(told))


def test_rounds_long_ago_are_of_another_duel() -> None:
    twins = Twins(0.0)
    for rounds in range(50):
        assert not twins.outdone(FIRST, LAST, 1.0 + rounds * (QUIET_S + 1.0))
