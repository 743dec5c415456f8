"""Musters: views that differ for a while end in one world, and in one model."""

from __future__ import annotations

from random import Random

import pytest
import torch

from moshpit.errors import ConfigError
from tests.baselines.test_baselines import BASELINES, Trainer, of, trainers


def flap(peer, rng, looks):
    """Have a peer miss somebody, now this one and now that, until it has looked so often."""
    true, count, missing = peer.peers_now, 0, None

    def peers_now():
        nonlocal count, missing
        seen = true()
        count += 1
        if count >= looks:
            return seen
        if rng.random() < 0.3:
            others = [p for p in seen if p != peer.peer_id]
            missing = rng.choice(others) if others and rng.random() < 0.7 else None
        return [p for p in seen if p != missing]

    peer.peers_now = peers_now


@pytest.mark.parametrize("kind", ["all-reduce", "sgp", "dpsgd"])
@pytest.mark.parametrize("seed", range(3))
def test_views_that_differ_for_a_while_end_in_one_world(kind, seed, parcel_swarm, together):
    swarm = parcel_swarm(4)
    group = trainers(swarm, kind)
    rng = Random(f"{kind} {seed}")
    for peer in swarm.peers:
        flap(peer, Random(rng.random()), looks=15)
    together(*[lambda t=t: t.train(25) for t in group])
    assert len({tuple(t.x().tolist()) for t in group}) == 1
    assert group[0].x().isfinite().all()


def test_after_a_finish_training_can_go_on_together(parcel_swarm, together):
    group = trainers(parcel_swarm(3), "all-reduce")
    together(*[lambda t=t: t.train(3) for t in group])
    worlds = [t.strategy.muster.world for t in group]
    assert worlds == [None] * 3
    # All at once or one by one: who is alone at first hears of the others in the next step.
    together(*[lambda t=t: t.train(40) for t in group])
    assert torch.equal(group[0].x(), group[2].x())


def test_nobody_waits_for_one_that_has_finished(parcel_swarm, together):
    swarm = parcel_swarm(3)
    group = [Trainer(p, of("sgp", 3), i) for i, p in enumerate(swarm.peers)]
    together(*[lambda t=t, n=n: t.train(n) for t, n in zip(group, (5, 12, 20), strict=True)])
    assert [t.steps for t in group] == [5, 12, 20]
    assert torch.equal(group[0].x(), group[1].x())
    assert torch.equal(group[0].x(), group[2].x())


@pytest.mark.parametrize("kind", BASELINES)
def test_a_peer_that_others_cannot_dial_is_told(kind, parcel_swarm):
    swarm = parcel_swarm(1)
    (trainer,) = trainers(swarm, kind)
    swarm.peers[0].peers_now = list  # a client is in nobody's list, its own included
    with pytest.raises(ConfigError, match="behind-a-router"):
        trainer.step()
