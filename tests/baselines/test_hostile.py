"""Baselines among peers that send what they should not: refused by name, or without effect."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moshpit.baselines import server as server_module
from moshpit.baselines.handover import _pack, take
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
        [0.0, 3, 0, 0, 1 << 13, 0, 0, 3],
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


def forge(t, liar, parcel, numbers, weight=1.0):
    """Put a parcel for the present step in the place of all that has come from others."""
    world, step = t.strategy.muster.world, t.strategy._completed
    t.strategy.muster._kept.clear()
    while t.strategy.swarm.parcels.poll(parcel) is not None:
        pass
    vector = torch.tensor(numbers, dtype=torch.float32)
    liar.parcels.send(t.strategy.swarm.peer_id, world.tag(parcel, step), vector, weight)


@pytest.mark.parametrize(("number", "weight"), [(1.0, 0.0), (1.0, 3.0), (1.0, 1e29), (3.4e38, 0.5)])
def test_a_half_that_cannot_be_one_is_refused_and_nothing_is_lost(
    number, weight, parcel_swarm, together
):
    swarm = parcel_swarm(2)
    group = trainers(swarm, "sgp")
    together(*[lambda t=t: t.run(3) for t in group])
    t = group[0]
    t.strategy.numerator.fill_(3.4e38 if number > 1e38 else 0.5)
    x = t.x().clone()
    forge(t, swarm.peers[1], Kind.MASS, [number] * 6, weight)
    t.strategy._move = lambda usable: torch.zeros(6)  # the step as such is not what is looked at
    ratio = t.strategy.numerator / t.strategy.weight
    with pytest.raises(RemoteError, match=f"peer {short(swarm.peers[1].peer_id)}: bad-parcel"):
        t.step()
    assert torch.equal(t.x(), x)
    state = t.strategy.state_dict()  # at once: what was refused is not waited for again
    torch.testing.assert_close(state["numerator"] / state["weight"], ratio)


def test_weights_that_honest_peers_have_are_taken(parcel_swarm, together):
    """Also after the dead have left theirs to the others, and from a checkpoint of more peers."""
    swarm = parcel_swarm(4)
    group = trainers(swarm, "sgp")
    together(*[lambda t=t: t.run(4) for t in group])
    t = group[0].strategy
    assert t._all_weights == 4
    t.load_state_dict(t.state_dict())
    assert t._all_weights >= 4


@pytest.mark.parametrize(
    ("kind", "parcel", "weight"),
    [("all-reduce", Kind.RING, 1.0), ("server", Kind.GRADIENT, 10.0)],
)
def test_sums_that_overflow_end_the_run_by_name(kind, parcel, weight, parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, kind)
    together(*[lambda t=t: t.run(3) for t in group])
    t = group[0]
    x = t.x().clone()
    t.strategy._flat_gradient = lambda: torch.full((6,), 1.5e38)
    numbers = [3.4e38] * (3 if kind == "all-reduce" else 6)
    forge(t, swarm.peers[1], parcel, numbers, weight)
    with pytest.raises(RemoteError, match=f"peer {short(swarm.peers[1].peer_id)}: bad-parcel"):
        t.step()
    assert torch.equal(t.x(), x)


def test_a_mean_of_large_numbers_does_not_overflow(parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, "dpsgd")
    together(*[lambda t=t: t.run(3) for t in group])
    t = group[0]
    t.strategy._flat = lambda tensors=None: torch.full((6,), 3.4e38)
    t.strategy._move = lambda usable: torch.zeros(6)
    forge(t, swarm.peers[1], Kind.NEIGHBOUR, [3.4e38] * 6)
    t.step()
    assert torch.isfinite(t.x()).all()


@pytest.mark.parametrize("asked", [False, True])
def test_pairs_refuse_what_does_not_fit_and_say_so_once(asked, parcel_swarm, together, caplog):
    swarm = parcel_swarm(2)
    group = trainers(swarm, "adpsgd-free")
    march(group, "adpsgd-free", 2, together)
    me, other = (1, 0) if asked else (0, 1)  # the first is active, and asks
    strategy = group[me].strategy
    if not asked:
        strategy._pending = (99, swarm.peers[other].peer_id, torch.full((6,), -3.4e38))
    before = strategy._x.clone()
    kind, numbers = (Kind.PAIR, [1.0] * 5) if asked else (Kind.PAIRED, [3.4e38] * 6)
    for _ in range(3):
        lie(swarm.peers[other], swarm.peers[me], (kind, 99), numbers)
    assert torch.equal(strategy._x, before)
    named = [r.message for r in caplog.records if r.message.startswith("bad-parcel")]
    assert len(named) == 1
    assert short(swarm.peers[other].peer_id) in named[0]


def test_statistics_of_another_optimizer_are_refused_by_name(parcel_swarm, together):
    swarm = parcel_swarm(2)
    group = trainers(swarm, "all-reduce", momentum=0.9)
    together(*[lambda t=t: t.run(2) for t in group])
    t, liar = group[0], swarm.peers[1]
    world = replace(t.strategy.muster.world, fronts=(2, 3))
    parts = [_pack("v:exp_avg"), torch.ones(6), torch.ones(6)]
    for part, vector in enumerate(parts):
        tag = world.tag(Kind.HANDOVER, 0, part)
        liar.parcels.send(swarm.peers[0].peer_id, tag, vector)
    x = t.x().clone()
    with pytest.raises(RemoteError, match=f"peer {short(liar.peer_id)}: bad-handover"):
        take(t.strategy.muster, world, t.strategy.parameters(), t.strategy.inner)
    assert torch.equal(t.x(), x)
