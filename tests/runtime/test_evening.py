"""Flows that go on together end together, whatever the network makes of them."""

from __future__ import annotations

import asyncio
import math
import socket
import sys
import time

import numpy as np
import numpy.typing as npt
import pytest

from moshpit.runtime.evening import LOOK_S, Evener, Evenness
from moshpit.transport.base import Flow
from moshpit.transport.sockets import pace
from moshpit.types import PeerId

Array = npt.NDArray[np.float64]


def peer(number: int) -> PeerId:
    return PeerId(number.to_bytes(32, "big"))


def number(name: PeerId) -> int:
    return int.from_bytes(name, "big")


def speeds(weights: Array, paces: Array, links: Array) -> Array:
    """How fast flows are (from the peer of the row to that of the column) that compete for the
    links at both their ends, each with its weight, and are paced."""
    speed = np.zeros_like(weights)
    rising = weights > 0
    up, down = links.copy(), links.copy()
    while rising.any():
        pull = np.where(rising, weights, 0.0)
        steps = [np.min(np.where(rising, (paces - speed) / np.maximum(weights, 1e-9), np.inf))]
        for free, total in (up, pull.sum(axis=1)), (down, pull.sum(axis=0)):
            steps.append(np.min(np.where(total > 0, free / np.maximum(total, 1e-9), np.inf)))
        gain = min(steps) * pull
        speed += gain
        up -= gain.sum(axis=1)
        down -= gain.sum(axis=0)
        full = (up <= 1e-9 * links)[:, None] | (down <= 1e-9 * links)[None, :]
        rising &= ~full & (speed < paces * (1 - 1e-9))
    return speed


def all_reduce(links: Array, part: Array, *, even: bool, seed: int) -> float:
    """How long a round takes, in seconds, when the network favours some flows up to four times
    over others. Everybody sends a contribution to each part, and its own part's result as far
    as all contributions to it have come."""
    peers = len(links)
    others = ~np.eye(peers, dtype=bool)
    weights = np.random.default_rng(seed).uniform(0.5, 2.0, (peers, peers)) * others
    contributions, results = np.tile(part, (peers, 1)) * others, part[:, None] * others
    sent = np.zeros((peers, peers))
    paces = np.full((peers, peers), np.inf)
    eveners = [Evener() for _ in links]
    now = 0.0
    while (sent < contributions + results - 1.0).any():
        come = np.where(others, np.minimum(sent, contributions) / part, 1.0).min(axis=0)
        left = contributions + results * come[:, None] - sent
        speed = speeds(np.where(left > 1e-6, weights, 0.0), paces, links)
        sent += np.minimum(left, speed * LOOK_S)
        now += LOOK_S
        for me, evener in enumerate(eveners if even else ()):
            waiting = {peer(n): float(left[me, n]) for n in range(peers) if left[me, n] > 1e-6}
            counts = {peer(n): int(sent[me, n]) for n in range(peers) if n != me}
            for name, pace_now in evener.look(now, waiting, counts).items():
                paces[me, number(name)] = pace_now
    return now


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize(
    "links",
    [[12.5e6] * 8, [12.5e6] * 4, [12.5e6, 12.5e6, 6e6, 3e6]],
    ids=["eight", "four", "unequal"],
)
def test_unfair_flows_end_together(links: list[float], seed: int) -> None:
    bandwidth = np.array(links)
    part = 40e6 * bandwidth / bandwidth.sum()  # the slower a link, the smaller its peer's part
    moved = part.sum() - part + (len(links) - 1) * part
    bound = float(np.max(moved / bandwidth))
    alone = all_reduce(bandwidth, part, even=False, seed=seed)
    evened = all_reduce(bandwidth, part, even=True, seed=seed)
    assert evened <= 1.06 * bound
    assert evened < alone


def looks(
    evener: Evener, speeds: dict[int, float], left: dict[int, float], start: float = 0.0
) -> dict[int, float]:
    """Have an evener look at flows of these speeds for two seconds; returns the paces that hold."""
    held: dict[int, float] = {}
    for look in range(round(2 / LOOK_S)):
        now = start + look * LOOK_S
        told = evener.look(
            now,
            {peer(n): value for n, value in left.items()},
            {peer(n): round(speed * now) for n, speed in speeds.items()},
        )
        held.update({number(name): value for name, value in told.items()})
    return {n: value for n, value in held.items() if not math.isinf(value)}


def test_what_is_ahead_is_paced_to_end_with_the_others_and_what_is_behind_is_not() -> None:
    paces = looks(Evener(), {1: 3e6, 2: 1e6, 3: 2e6}, {1: 1e6, 2: 1e6, 3: 1e6})
    assert set(paces) == {1}
    assert paces[1] == pytest.approx(2e6, rel=0.02)


def test_who_has_more_to_come_may_be_faster() -> None:
    assert looks(Evener(), {1: 3e6, 2: 1e6}, {1: 3e6, 2: 1e6}) in (
        {},
        {1: pytest.approx(3e6, rel=0.02)},
    )
    assert set(looks(Evener(), {1: 2e6, 2: 2e6}, {1: 3e6, 2: 1e6})) == {2}


def test_one_flow_alone_is_never_paced() -> None:
    assert looks(Evener(), {1: 3e6, 2: 0.0}, {1: 1e6}) == {}


def test_a_paced_flow_is_free_when_it_has_nothing_left_or_falls_behind() -> None:
    evener = Evener()
    assert set(looks(evener, {1: 3e6, 2: 1e6}, {1: 1e6, 2: 1e6})) == {1}
    now = 2.0
    told = evener.look(now, {peer(2): 1e6, peer(3): 1e6}, {peer(1): 6_000_000, peer(2): 2_000_000})
    assert told[peer(1)] == math.inf

    evener = Evener()
    assert set(looks(evener, {1: 3e6, 2: 1e6}, {1: 1e6, 2: 1e6})) == {1}
    sent = {1: 6e6, 2: 2e6}
    held = math.nan
    for look in range(40):
        sent = {1: sent[1] + 0.1e6 * LOOK_S, 2: sent[2] + 3e6 * LOOK_S}
        told = evener.look(
            2.0 + (look + 1) * LOOK_S,
            {peer(1): 1e6, peer(2): 1e6},
            {peer(n): round(value) for n, value in sent.items()},
        )
        held = told.get(peer(1), held)
    assert held == math.inf


def test_odd_counters_are_survived() -> None:
    evener = Evener()
    everything = {peer(1): 1e6, peer(2): 1e6}
    evener.look(1.0, everything, {peer(1): 5, peer(2): 7})
    evener.look(1.0, everything, {peer(1): 5, peer(2): 7})  # no time has passed
    evener.look(0.5, everything, {peer(1): 5, peer(2): 7})  # a clock that went back
    evener.look(2.0, everything, {peer(1): 0, peer(2): 0})  # a new connection begins at 0
    evener.look(3.0, {}, {})
    for told in (evener.look(4.0 + n, everything, {peer(1): n, peer(2): 9 * n}) for n in range(3)):
        assert all(value > 0 for value in told.values())


class Line:
    """Connections to one peer that send as fast as they are let, but at most so fast."""

    def __init__(self, speed: float, *, far: bool = True) -> None:
        self.far = far
        self.backlog = 0
        self.paces: list[float] = [math.inf]
        self._speed = speed
        self._sent = 0.0
        self._at = time.monotonic()

    def flow(self) -> Flow:
        now = time.monotonic()
        self._sent += min(self._speed, self.paces[-1]) * (now - self._at)
        self._at = now
        return Flow(sent=round(self._sent))

    def pace(self, bytes_per_s: float) -> None:
        self.flow()
        self.paces.append(bytes_per_s)


def test_connections_to_other_machines_are_paced_while_chunks_wait() -> None:
    async def work() -> None:
        lines = {peer(1): Line(3e6), peer(2): Line(1e6), peer(3): Line(9e9, far=False)}
        left = dict.fromkeys([*lines, peer(4)], 1e6)  # nothing leads to the last one
        evenness = Evenness(lines.get, left.items)
        for _ in range(2):
            evenness.start()
            evenness.start()
            while lines[peer(1)].paces[-1] > 2.2e6:  # half of what both send together
                await asyncio.sleep(LOOK_S)
            evenness.stop()
            assert [line.paces[-1] for line in lines.values()] == [math.inf] * 3
        assert lines[peer(3)].paces == [math.inf]
        assert not [pace for pace in lines[peer(2)].paces if pace < 0.9e6]

    asyncio.run(work())


@pytest.mark.skipif(sys.platform != "linux", reason="pacing is Linux's")
def test_the_kernel_takes_a_pace_and_lets_go() -> None:
    with socket.socket() as sock:
        option = 47  # SO_MAX_PACING_RATE
        pace(sock, 1.5e6)
        assert sock.getsockopt(socket.SOL_SOCKET, option) == 1_500_000
        pace(sock, math.inf)
        assert sock.getsockopt(socket.SOL_SOCKET, option) == -1
        pace(sock, 0.0)
        assert sock.getsockopt(socket.SOL_SOCKET, option) > 0
    pace(sock, 1e6)  # closed meanwhile
