"""Averagings that begin before their vectors are complete, and give out means before their end."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

import moshpit
from moshpit.config import SwarmConfig
from moshpit.errors import LocalError
from moshpit.events import EpochReport
from moshpit.identity.tickets import RunKey
from moshpit.protocol.machine import SendContribution
from moshpit.runtime.filling import Filling
from moshpit.runtime.jobs import Averaging
from moshpit.tensors.layout import ChunkPlan
from moshpit.types import GroupId, PeerId

PLAN = ChunkPlan(numel=35, chunk_numel=10).spread()  # chunks lie at 0, 2, 1 and 3
PEER, OTHER = PeerId(b"p" * 32), PeerId(b"q" * 32)
GROUP = GroupId(b"g" * 16)
LONG_S = 100.0


# --- what waits for what ------------------------------------------------------------------


def done_by(filling: Filling) -> None:
    for deed in filling.filled():
        deed()


def test_what_concerns_a_chunk_waits_for_it_and_stays_in_order() -> None:
    filling, done = Filling(PLAN), []
    assert filling.waits(1, own=True)
    assert not filling.waits(1, own=False)  # nothing to overtake
    filling.put_off(1, lambda: done.append("add"))
    assert filling.waits(1, own=False)
    filling.put_off(1, lambda: done.append("finalize"))
    filling.put_off(2, lambda: done.append("other"))
    assert not filling.fill(20, 25)
    done_by(filling)
    assert not done
    assert filling.fill(25, 30)  # chunk 1 lies there
    done_by(filling)
    assert done == ["add", "finalize"]
    assert not filling.waits(1, own=True)
    assert not filling.complete


def test_the_network_is_told_once_for_several_chunks() -> None:
    filling, done = Filling(PLAN), []
    for chunk in range(4):
        filling.put_off(chunk, lambda chunk=chunk: done.append(chunk))
    assert filling.fill(0, 20)
    assert not filling.fill(20, 35)
    done_by(filling)
    assert done == [0, 2, 1, 3]  # as the vector was filled
    assert filling.complete


def test_numbers_become_final_once() -> None:
    filling = Filling(PLAN)
    filling.fill(0, 12)
    with pytest.raises(LocalError, match="twice"):
        filling.fill(5, 10)


def test_what_was_to_be_sent_is_forgotten_with_its_receiver() -> None:
    filling, done = Filling(PLAN), []
    later = GroupId(b"h" * 16)
    for peer, group in ((PEER, GROUP), (OTHER, GROUP), (PEER, later)):
        sent = SendContribution(peer, group, 0, 0, 1.0)
        filling.put_off(0, lambda sent=sent: done.append((sent.peer, sent.group)), sent)
    filling.put_off(0, lambda: done.append("finalize"))
    filling.cancel(PEER, GROUP)
    filling.fill(0, 10)
    done_by(filling)
    assert done == [(OTHER, GROUP), (PEER, later), "finalize"]


def test_a_wait_is_for_the_means_of_a_range_or_for_the_end() -> None:
    filling = Filling(PLAN)
    assert not filling.wait_for(0, 20, timeout_s=0)
    filling.landed(0)
    filling.landed(1)
    assert filling.wait_for(0, 10, timeout_s=0)
    assert filling.wait_for(20, 30, timeout_s=0)
    assert not filling.wait_for(5, 15, timeout_s=0)
    waiting = threading.Thread(target=filling.wait_for, args=(10, 35))
    waiting.start()
    filling.end()
    waiting.join(LONG_S)
    assert not waiting.is_alive()


# --- over real sockets --------------------------------------------------------------------

NUMEL = 200_000
SCHEMA = b"8 bytes."


def patient(**matchmaking: object) -> SwarmConfig:
    """A configuration with which a busy machine is no fault."""
    local = moshpit.preset("local")
    return replace(
        local,
        matchmaking=replace(
            local.matchmaking, call_timeout_s=LONG_S, join_timeout_s=LONG_S, **matchmaking
        ),
        round=replace(local.round, stall_s=LONG_S, deadline_s_min=2 * LONG_S),
    )


@contextlib.contextmanager
def joined(size: int, config: SwarmConfig) -> Iterator[list[moshpit.Swarm]]:
    invite = RunKey.generate().invite()
    options = {"listen": "127.0.0.1:0", "identity": "new", "config": config}
    with contextlib.ExitStack() as stack:
        swarms = [stack.enter_context(moshpit.join(invite.ticket(()).encode(), **options))]
        ticket = invite.ticket(swarms[0].addresses).encode()
        swarms += [stack.enter_context(moshpit.join(ticket, **options)) for _ in range(size - 1)]
        for swarm in swarms:
            swarm.wait_for_peers(size)
            swarm.attach(SCHEMA, NUMEL, 0.0)
        for swarm in swarms:
            attached = lambda view: all(view.record(p).schema for p in view.live)  # noqa: E731
            assert swarm._wait_for(attached, LONG_S)
        yield swarms


def begin(swarm: moshpit.Swarm, codec: str = "float32") -> tuple[Averaging, torch.Tensor]:
    vector = torch.full((NUMEL,), float("nan"))  # what is not filled yet must not be looked at
    return swarm.begin_averaging(vector, 1.0, codec=codec, fill_s=LONG_S), vector


def values(seed: int) -> torch.Tensor:
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))


def fill_in_pieces(swarm: moshpit.Swarm, seed: int, codec: str = "float32") -> Averaging:
    """Fill the vector from random places in random order, as a backward pass may do it."""
    job, vector = begin(swarm, codec)
    order = random.Random(seed)
    cuts = sorted({0, NUMEL, *(order.randrange(NUMEL) for _ in range(50))})
    pieces = list(itertools.pairwise(cuts))
    order.shuffle(pieces)
    mine = values(seed)
    for start, stop in pieces:
        vector[start:stop] = mine[start:stop]
        job.ready(start, stop)
    return job


def test_the_mean_of_vectors_that_fill_in_other_orders() -> None:
    with joined(2, patient()) as swarms, ThreadPoolExecutor(2) as pool:
        for turn in range(3):
            jobs = list(pool.map(fill_in_pieces, swarms, (2 * turn, 2 * turn + 1)))
            reports = [job.wait(LONG_S) for job in jobs]
            assert all(r.outcome is moshpit.Outcome.COMPLETE for r in reports)
            assert torch.equal(jobs[0].mean, jobs[1].mean)
            torch.testing.assert_close(
                jobs[0].mean, (values(2 * turn) + values(2 * turn + 1)) / 2, rtol=1e-5, atol=1e-6
            )


def test_means_are_there_before_the_rest_of_the_vector_is() -> None:
    half = NUMEL // 2
    with joined(2, patient()) as swarms:
        begun = [begin(swarm) for swarm in swarms]
        for i, (job, vector) in enumerate(begun):
            vector[half:] = float(i)
            job.ready(half, NUMEL)
        for job, _ in begun:
            # The chunk in the middle has a part that is not filled.
            size = job.plan.chunk_numel
            assert torch.equal(job.means(half + size, NUMEL), torch.full((half - size,), 0.5))
            assert not job.done()
            assert not job.filling.wait_for(0, 1, timeout_s=0)
        job, vector = begun[0]
        vector[:half] = 0.0
        job.ready(0, half)
        assert not begun[1][0].done()
        job, vector = begun[1]
        vector[:half] = 3.0
        job.ready(0, half)
        for job, _ in begun:
            assert torch.equal(job.means(0, half), torch.full((half,), 1.5))
            assert job.wait(LONG_S).outcome is moshpit.Outcome.COMPLETE


@pytest.mark.parametrize("schedule", ["grid", "torus"])
def test_two_rounds_of_pairs(schedule: str) -> None:
    config = patient(group_size=2, schedule=schedule)
    with joined(4, config) as swarms, ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(fill_in_pieces, swarms, range(4)))
        reports: list[EpochReport] = [job.wait(LONG_S) for job in jobs]
        mean = sum(values(seed) for seed in range(4)) / 4
        for job, report in zip(jobs, reports, strict=True):
            assert len(report.rounds) == 2
            assert report.outcome is moshpit.Outcome.COMPLETE
            torch.testing.assert_close(job.mean, mean, rtol=1e-5, atol=1e-6)
            assert torch.equal(job.means(100, 200), job.mean[100:200])


def test_codecs_that_lose_end_with_the_same_bytes() -> None:
    with joined(2, patient()) as swarms, ThreadPoolExecutor(2) as pool:
        jobs = list(pool.map(fill_in_pieces, swarms, (1, 2), ("int8", "float16")))
        for job in jobs:
            assert job.wait(LONG_S).outcome is moshpit.Outcome.COMPLETE
        assert torch.equal(jobs[0].mean, jobs[1].mean)
        torch.testing.assert_close(jobs[0].mean, (values(1) + values(2)) / 2, rtol=0.0, atol=0.05)


def test_alone_it_ends_when_everything_is_filled() -> None:
    with joined(1, patient()) as (swarm,):
        job, vector = begin(swarm)
        mine = values(0)
        vector[1:] = mine[1:]
        job.ready(1, NUMEL)
        swarm._thread.call(swarm._driver.until(lambda _: True, 1.0))  # it has seen that
        assert not job.done()
        vector[0] = mine[0]
        job.ready(0, 1)
        job.wait(LONG_S)
        assert torch.equal(job.mean, mine)


def test_a_swarm_that_is_closed_leaves_nobody_waiting() -> None:
    with joined(2, patient()) as swarms, ThreadPoolExecutor(1) as pool:
        job, _ = begin(swarms[0])
        waiting = pool.submit(job.means, 0, NUMEL)
        swarms[1].close()
        swarms[0].close()
        with pytest.raises(moshpit.MoshpitError):
            waiting.result(LONG_S)
