"""The baselines over real swarms: sockets, encryption and clocks, three peers in one process."""

from __future__ import annotations

import pytest
import torch

from moshpit.identity.tickets import RunKey
from tests.baselines.test_baselines import FREE, IN_STEP, Trainer, of, regret
from tests.training.test_over_sockets import PATIENCE_S, joined, patient

PATIENT = patient(PATIENCE_S)


@pytest.fixture
def swarms():
    with joined(RunKey.generate().invite(), 3, PATIENT) as three:
        yield three


@pytest.mark.parametrize("kind", ["all-reduce", "sgp-overlap", "dpsgd", "server", *FREE])
def test_three_peers_end_with_the_same_bytes(kind, swarms, together):
    group = [Trainer(s, of(kind, 3, patience_s=60.0), i, lr=0.2) for i, s in enumerate(swarms)]
    together(*[lambda t=t: t.train(12) for t in group])
    assert len({tuple(t.x().tolist()) for t in group}) == 1
    if kind not in FREE:  # where nobody waits, the machine says who makes its steps when
        assert regret(group) < 0.5
    assert all(s.stats().bytes_sent > 0 for s in swarms)


@pytest.mark.parametrize("kind", ["all-reduce", "sgp"])
def test_one_that_leaves_stalls_the_others_until_it_is_found_gone(kind, swarms, together):
    assert kind in IN_STEP
    group = [Trainer(s, of(kind, 3, patience_s=60.0), i, lr=0.2) for i, s in enumerate(swarms)]

    def leave():
        group[1].run(4)
        swarms[1].close()

    together(leave, *[lambda t=t: t.train(25) for t in (group[0], group[2])])
    assert torch.equal(group[0].x(), group[2].x())
    assert all(t.strategy.regroups >= 1 for t in (group[0], group[2]))
    assert regret([group[0], group[2]]) < 0.2
