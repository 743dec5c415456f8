"""Trains alone, straight or with a checkpoint in between, and says what came out, as JSON.

A program of its own, so that a run is really continued by another process. Data and dropout
come from torch's global generator.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.optim import lr_scheduler

import moshpit
from moshpit.identity.tickets import RunKey
from moshpit.training.state import TrainingState

BATCH = 8
EPOCH = 3  # steps


def the_optimizer(kind: str, model: torch.nn.Module) -> torch.optim.Optimizer:
    if kind == "AdamW":
        return torch.optim.AdamW(model.parameters(), lr=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def train(args: argparse.Namespace, kind: str, swarm: moshpit.Swarm) -> dict[str, object]:
    torch.manual_seed(args.seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.1), torch.nn.Linear(8, 2)
    )
    checkpoint = None
    if args.directory is not None:
        checkpoint = moshpit.Checkpoint(args.directory / kind, every=2, resume=args.resume)
    optimizer = moshpit.Optimizer(
        the_optimizer(kind, model),
        swarm,
        moshpit.LocalSGD(BATCH * EPOCH, overlap=False),
        model=model,
        checkpoint=checkpoint,
    )
    schedule = lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=100)
    if checkpoint is not None:
        schedule = checkpoint.add("schedule", schedule)
    first = schedule.last_epoch
    while schedule.last_epoch < args.steps:
        x = torch.randn(BATCH, 4)
        (model(x) - x[:, :2].sin()).square().mean().backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    state = TrainingState.capture(
        optimizer.inner, model, epoch=0, added={"s": schedule}, generators=False
    )
    return {
        "next": torch.rand(1).item(),
        "first": first,
        "epoch": optimizer.epoch,
        "digest": state.image().manifest.digest.hex(),
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("identity", type=Path)
    parser.add_argument("--directory", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    results: dict[str, object] = {}
    for kind in ("AdamW", "SGD"):
        ticket = RunKey.generate().invite().ticket(()).encode()
        with moshpit.join(ticket, listen="127.0.0.1:0", identity=args.identity) as swarm:
            results[kind] = train(args, kind, swarm)
    print(json.dumps(results))  # what is not yet saved is saved at the exit, with no more steps


if __name__ == "__main__":
    main()
