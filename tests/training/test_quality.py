"""How good the models are that come out, on the demo's model: only under `make soak`."""

from __future__ import annotations

import pytest
import torch

from moshpit.cli.demo_model import Batches, CharTransformer, corpus, loss_of, validation_loss
from moshpit.training.optimizer import Optimizer
from moshpit.training.strategies import DiLoCo, LocalSGD

PEERS, STEPS, EPOCHS, BATCH = 3, 20, 30, 8


def trained(make, swarm, text):
    """Train in turns, each peer on its part of the text; return the loss on text held out."""
    torch.manual_seed(0)
    peers = []
    for i, peer in enumerate(swarm.peers):
        model = CharTransformer(text.characters, width=32, layers=1, heads=2)
        inner = torch.optim.AdamW(model.parameters(), lr=3e-3)
        opt = Optimizer(inner, peer, make(PEERS * STEPS * BATCH), batch_size=BATCH)
        peers.append((model, opt, Batches(text.part(i, PEERS), seed=i)))
    steps = 0
    while swarm.epoch < EPOCHS:
        for model, opt, batches in peers:
            loss_of(model, *batches.draw(BATCH)).backward()
            opt.step()
            opt.zero_grad()
        steps += 1
    return steps, validation_loss(peers[0][0], text.held_out[:16384])


@pytest.mark.soak
def test_diloco_learns_the_demos_text_about_as_well_as_local_sgd(memory_swarm):
    text = corpus()
    local_steps, local = trained(LocalSGD, memory_swarm(PEERS), text)
    steps, outer = trained(DiLoCo, memory_swarm(PEERS), text)
    assert steps == local_steps, "the samples are the same"
    assert outer < 1.1 * local
