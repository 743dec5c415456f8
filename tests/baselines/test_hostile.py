"""Baselines among peers that send what they should not: refused by name, or without effect."""

from __future__ import annotations

import pytest
import torch

from moshpit.baselines import server as server_module
from moshpit.baselines.kinds import Kind
from moshpit.errors import RemoteError
from moshpit.types import short
from tests.baselines.test_baselines import FREE, march, trainers


def lie(peer, to, tag, numbers):
    peer.parcels.send(to.peer_id, tag, torch.tensor(numbers, dtype=torch.float32))


@pytest.mark.parametrize(
    "numbers",
    [
        [1.0],
        [0.5] * 8,
        [-1.0] * 8,
        [3e38] * 8,
        [float(1 << 19)] * 8,
        [0.0, 1 << 19, 0, 0, 0, 0, 0, 0],
        [0.0] * 8,
        [0.0, 500_000, 0, 0, 0, 7, 0, 3],
    ],
)
@pytest.mark.parametrize("kind", ["all-reduce", "sgp"])
def test_calls_that_are_none_stop_nobody(kind, numbers, parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, kind)
    together(*[lambda t=t: t.run(2) for t in group])
    for me, other in ((0, 1), (1, 0)):
        lie(swarm.peers[me], swarm.peers[other], (Kind.MUSTER, 0), numbers)
    together(*[lambda t=t: t.train(10) for t in group])
    assert torch.equal(group[0].x(), group[1].x())


@pytest.mark.parametrize(
    ("kind", "parcel"),
    [
        ("all-reduce", Kind.RING),
        ("sgp", Kind.MASS),
        ("dpsgd", Kind.NEIGHBOUR),
        ("server", Kind.GRADIENT),
    ],
)
def test_a_parcel_of_a_wrong_length_ends_the_run_by_name(kind, parcel, parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, kind)
    together(*[lambda t=t: t.run(3) for t in group])
    t = group[0]
    world, step = t.strategy.muster.world, t.strategy._completed
    t.strategy.muster._kept.clear()
    while t.strategy.swarm.parcels.poll(parcel) is not None:
        pass
    lie(swarm.peers[1], swarm.peers[0], world.tag(parcel, step), [1.0] * 11)
    with pytest.raises(RemoteError, match=f"peer {short(swarm.peers[1].peer_id)}: bad-parcel"):
        t.step()


@pytest.mark.parametrize(
    ("part", "numbers"), [(0, [0.5]), (0, [float(0x3A71)]), (1, [1.0] * 5), (1, [1.0])]
)
def test_a_state_that_does_not_fit_is_refused_by_name(part, numbers, parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, "all-reduce")
    donor, taker = swarm.peers
    true = donor.parcels.send

    def send(to, tag, vector, weight=1.0):
        if tag[0] == Kind.HANDOVER and tag[1] & 4095 == part:
            vector = torch.tensor(numbers)
        true(to, tag, vector, weight)

    donor.parcels.send = send

    def refused():
        with pytest.raises(RemoteError, match=f"peer {short(donor.peer_id)}: bad-handover"):
            group[1].step()
        swarm.kill(1)

    together(lambda: group[0].run(1), refused)
    assert taker.peer_id not in swarm.living


@pytest.mark.parametrize("kind", FREE)
def test_what_is_of_a_wrong_length_moves_nobody_who_answers_at_once(kind, parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, kind)
    march(group, kind, 2, together)
    before = [t.x() for t in group]
    for parcel in (Kind.PAIR, Kind.PAIRED, Kind.GRADIENT):
        for me, other in ((0, 1), (1, 0)):
            lie(swarm.peers[me], swarm.peers[other], (parcel, 1), [1.0] * 11)
    assert all(torch.equal(t.x(), x) for t, x in zip(group, before, strict=True))
    march(group, kind, 2, together)


def test_a_worker_asks_a_slow_server_once(parcel_swarm, monkeypatch):
    """Asking again while the answer is on its way would delay all answers on a thin line."""
    monkeypatch.setattr(server_module, "LOOK_S", 0.01)
    swarm = parcel_swarm(2)
    group = trainers(swarm, "server-async")
    server, worker = (peer.parcels for peer in swarm.peers)
    answer, take = server.handlers[Kind.GRADIENT], worker.take
    asked, looks = [], []

    def patient(tag, **how):
        looks.append(tag)
        if len(looks) == 4:
            answer(asked[0])
        return take(tag, **how)

    server.handlers[Kind.GRADIENT] = asked.append
    worker.take = patient
    group[1].step()
    assert len(looks) == 4
    assert len(asked) == 1
    assert group[0].strategy.applied == 1


def test_what_a_server_sends_unasked_is_not_kept(parcel_swarm):
    swarm = parcel_swarm(2)
    group = trainers(swarm, "server-async")
    group[1].step()
    for number in range(5):
        lie(swarm.peers[0], swarm.peers[1], (Kind.PARAMETERS, number), [7.0] * 6)
    group[1].step()
    assert swarm.peers[1].parcels.poll(Kind.PARAMETERS) is None
    assert group[1].x().abs().max() < 5
