"""A training script for `moshpit run` that trains on command and says what happens.

Reads JSON lines from standard input, writes JSON lines to standard output.
"""

from __future__ import annotations

import argparse
import ctypes
import hashlib
import json
import sys
import time
from typing import Any

import torch

import moshpit
from moshpit.types import short
from tests.real.script import say

BATCH = 8


class Telling:
    """A swarm that also says when an averaging has begun."""

    def __init__(self, swarm: moshpit.Swarm) -> None:
        self._swarm = swarm

    def __getattr__(self, name: str) -> object:
        return getattr(self._swarm, name)

    def begin_averaging(self, *args: Any, **options: Any) -> object:
        averaging = self._swarm.begin_averaging(*args, **options)
        say("began", epoch=self._swarm.epoch)
        return averaging


class Trainer:
    def __init__(self, swarm: moshpit.Swarm, args: argparse.Namespace) -> None:
        torch.manual_seed(args.seed)
        self.model = torch.nn.Linear(64, 64)
        self.optimizer = moshpit.Optimizer(
            torch.optim.AdamW(self.model.parameters(), lr=0.01),
            Telling(swarm),  # pyright: ignore[reportArgumentType]
            moshpit.LocalSGD(args.epoch_samples, overlap=args.overlap),
            model=self.model,
            checkpoint=moshpit.Checkpoint(args.checkpoints, every=1000),
        )

    def step(self, samples: float | None = None) -> None:
        x = torch.randn(BATCH, 64)
        (self.model(x) - x.sin()).square().mean().backward()
        self.optimizer.step(samples=samples)
        self.optimizer.zero_grad()

    def digest(self) -> str:
        weights = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        return hashlib.sha256(weights.numpy().tobytes()).hexdigest()

    def one_epoch(self) -> None:
        epoch = self.optimizer.epoch
        while self.optimizer.epoch == epoch:
            self.step()
            time.sleep(0.01)
        report = self.optimizer.last_report
        assert report is not None
        say(
            "averaged",
            epoch=report.epoch,
            outcome=report.outcome.value,
            contributors=[short(p) for p in report.rounds[-1].contributors()],
            digest=self.digest(),
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--epoch-samples", type=float, default=10_000.0)
    parser.add_argument("--overlap", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with moshpit.join() as swarm:
        say("joined", peer=short(swarm.peer_id))
        try:
            trainer = Trainer(swarm, args)
            say("ready")
            for line in sys.stdin:
                command = json.loads(line)
                match command["do"]:
                    case "peers":
                        swarm.wait_for_peers(command["n"])
                        while not all(p.schema for p in swarm.peers()):
                            time.sleep(0.01)
                        say("met")
                    case "step":
                        trainer.step(command.get("samples"))
                        say("stepped", epoch=trainer.optimizer.epoch)
                    case "epoch":
                        trainer.one_epoch()
                    case "count":
                        say("count", peers=len(swarm.peers()))
                    case "sleep":  # as a step that waits for something, and does not come around
                        say("sleeping", digest=trainer.digest())
                        time.sleep(600)
                    case "hang":  # as a step in which no signal is looked at
                        say("hanging")
                        lock = ctypes.CDLL(None).pthread_mutex_lock
                        mutex = ctypes.create_string_buffer(256)
                        for _ in range(2):  # whoever holds it waits for itself
                            lock(mutex)
                    case "train":
                        say("training")
                        while True:
                            trainer.step()
                            time.sleep(0.01)
        except moshpit.Leaving:
            say("leaving", digest=trainer.digest())
            raise
        finally:
            say("finally")


if __name__ == "__main__":
    main()
