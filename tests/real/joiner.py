"""A training script that joins a run, says what happens, and ends at the epoch that it is told.

Reads JSON lines from standard input, writes JSON lines to standard output.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import sys
import threading
import time

import torch

import moshpit
from moshpit.types import short
from tests.real.script import say, strategy_of

BATCH = 8
PEERS = 3  # about so many share an epoch


class Orders:
    """What the test has told so far."""

    def __init__(self) -> None:
        self.last_epoch = sys.maxsize
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            self.last_epoch = json.loads(line)["until"]


def tell_arrivals(swarm: moshpit.Swarm) -> None:
    """Say when some of a state has come, and the rest has not."""
    while True:
        taking = swarm._driver.states._taking
        assembler = taking.assembler if taking is not None else None
        if assembler is not None and len(assembler.missing) < len(assembler.manifest.hashes):
            say("arriving", missing=len(assembler.missing))
            return
        time.sleep(0.001)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ticket", required=True)
    parser.add_argument("--listen", default="127.0.0.1:0")
    parser.add_argument("--strategy", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--peers", type=int, default=1)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--samples", type=float, default=256.0)
    parser.add_argument("--directory", default=None)
    parser.add_argument("--keep", type=int, default=3)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    logging.basicConfig(level=logging.INFO, format="%(relativeCreated)d %(message)s")
    orders = Orders()
    swarm = moshpit.join(args.ticket, listen=args.listen, identity="new", preset="local")
    with swarm:
        say("joined", peer=short(swarm.peer_id))
        swarm.wait_for_peers(args.peers)
        threading.Thread(target=tell_arrivals, args=(swarm,), daemon=True).start()
        model = torch.nn.Sequential(
            torch.nn.Linear(8, args.width), torch.nn.Tanh(), torch.nn.Linear(args.width, args.width)
        )
        inner = torch.optim.AdamW(model.parameters(), lr=0.01)
        strategy = strategy_of(args.strategy, args.samples, own_samples=PEERS * BATCH)
        checkpoint = None
        if args.directory is not None:
            checkpoint = moshpit.Checkpoint(args.directory, keep=args.keep, resume=args.resume)
        optimizer = moshpit.Optimizer(
            inner, swarm, strategy, batch_size=BATCH, model=model, checkpoint=checkpoint
        )
        say("begins", epoch=optimizer.epoch)
        epoch = -1
        while optimizer.epoch < orders.last_epoch:
            x = torch.randn(BATCH, 8)
            (model(x) - x.sum()).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if optimizer.epoch != epoch:
                epoch = optimizer.epoch
                say("epoch", epoch=epoch, caught_up=optimizer.caught_up)
            time.sleep(0.02)
        report = optimizer.finish()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        say(
            "finished",
            epoch=optimizer.epoch,
            digest=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            caught_up=optimizer.caught_up,
            contributors=[short(p) for p in report.rounds[-1].contributors()],
            outcome=report.outcome.value,
            realignments=getattr(strategy, "realignments", 0),
            finite=bool(weights.isfinite().all()),
        )


if __name__ == "__main__":
    main()
