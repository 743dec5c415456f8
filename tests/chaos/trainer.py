"""A peer of the chaos suite: trains the demo's model under `moshpit run`, and says what happens.

Reads JSON lines from standard input: ``{"until": epoch}`` (train to its end, then finish),
``{"pace": steps per second}``, ``{"end": true}``. Writes JSON lines to standard output. Times are
of the machine's monotonic clock, which all processes share.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

import moshpit
from moshpit.cli.demo_model import Batches, CharTransformer, corpus, loss_of, save_weights
from moshpit.events import EpochReport
from moshpit.protocol.matchmaking import HOLD_MARGIN_S, JOINS_MAX
from moshpit.types import short
from tests.real.script import STRATEGIES, say, strategy_of

ORPHANED = 3
TOLD_S = 0.1  # shorter waits are not worth a line
MATCHMAKING = moshpit.preset("lan").matchmaking
MEETING_S = 2 * MATCHMAKING.window_s_max + HOLD_MARGIN_S + JOINS_MAX * MATCHMAKING.join_timeout_s
"""How long a peer may look for a group, by what matchmaking promises."""
CATCH_UP_S = 60.0
"""How long fetching the swarm's state may hold a peer up here; it is a megabyte or two."""


def learning_rate(epoch: int, peak: float) -> float:
    """A function of the epoch alone, since nobody knows how long a disturbed run will be."""
    return peak * min(1.0, (epoch + 1) / 4) / math.sqrt(1 + epoch / 40)


class Orders:
    """What the parent has said last."""

    def __init__(self, pace: float) -> None:
        self.until = sys.maxsize
        self.pace = pace
        self.end = threading.Event()
        threading.Thread(target=self._listen, name="orders", daemon=True).start()

    def _listen(self) -> None:
        # Unbuffered: the interpreter cannot end while a thread holds a buffered reader's lock.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                order = json.loads(line)
                self.until = order.get("until", self.until)
                self.pace = order.get("pace", self.pace)
                if "end" in order:
                    self.end.set()
        os._exit(ORPHANED)


class Pacer:
    """Lets steps come at the rate that is asked for; 0: as fast as they go."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._due = time.monotonic()

    def wait(self) -> None:
        if not self._orders.pace:
            return
        now = time.monotonic()
        self._due = max(self._due + 1 / self._orders.pace, now - 0.5)
        time.sleep(max(0.0, self._due - now))


def promised_s(report: EpochReport) -> float:
    """Return how long an averaging may take, by what its groups have promised.

    A search that ends since the swarm has gone on is in no round's report.
    """
    search_s = MEETING_S if report.stale else 0.0
    return search_s + sum(MEETING_S + (r.deadline_s if not r.span else 0.0) for r in report.rounds)


class Trainer:
    def __init__(self, swarm: moshpit.Swarm, args: argparse.Namespace) -> None:
        data = corpus()
        self.swarm, self.args = swarm, args
        self.model = CharTransformer(data.characters)
        inner = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
        self.optimizer = moshpit.Optimizer(
            inner,
            swarm,
            strategy_of(args.strategy, args.samples, own_samples=args.parts * args.batch),
            batch_size=args.batch,
            model=self.model,
            checkpoint=moshpit.Checkpoint(args.checkpoints, every=2, keep=args.keep),
        )
        self.batches = Batches(data.part(args.index, args.parts), args.seed)

    def run(self, orders: Orders) -> None:
        pacer = Pacer(orders)
        losses: list[float] = []
        epoch = -1
        while self.optimizer.epoch < orders.until:
            losses.append(self.step())
            if self.optimizer.epoch != epoch:
                epoch = self.optimizer.epoch
                self.tell_epoch(epoch, sum(losses) / len(losses))
                losses.clear()
            pacer.wait()
        self.finish()

    def step(self) -> float:
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(self.optimizer.epoch, self.args.lr)
        loss = loss_of(self.model, *self.batches.draw(self.args.batch))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.watched(self.optimizer.step)
        self.optimizer.zero_grad()
        return loss.item()

    def watched(self, call: Any) -> None:
        """Call it, and say how long this peer has waited in it, and how long it might have."""
        began, waited = time.monotonic(), self.optimizer.waited_s
        caught_up, report = self.optimizer.caught_up, self.optimizer.last_report
        behind = self.swarm.epoch > self.optimizer.epoch + 1  # then it tries to catch up
        call()
        waited = self.optimizer.waited_s - waited
        new = self.optimizer.last_report
        promise = 0.0
        if new is not None and new is not report:
            promise += promised_s(new)
            say(
                "averaged",
                began=time.monotonic() - new.seconds,
                seconds=new.seconds,
                promised_s=promised_s(new),
                epoch=new.epoch,
                outcome=new.outcome.value,
                stale=new.stale,
                together=len(new.rounds[-1].peers) if new.rounds else 0,
            )
        if behind or self.optimizer.caught_up > caught_up:
            promise += CATCH_UP_S
        if self.optimizer.caught_up > caught_up:
            say("caught up", epoch=self.optimizer.epoch)
        if waited > TOLD_S:
            say("waited", began=began, seconds=waited, promised_s=promise)

    def tell_epoch(self, epoch: int, loss: float) -> None:
        peers = len(self.swarm.peers())
        say("epoch", epoch=epoch, loss=loss, peers=peers, samples=self.optimizer.stats.samples)

    def finish(self) -> None:
        self.watched(self.optimizer.finish)
        save_weights(self.model, Path(self.args.weights))
        weights = torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])
        say(
            "finished",
            epoch=self.optimizer.epoch,
            digest=hashlib.sha256(weights.numpy().tobytes()).hexdigest(),
            finite=bool(weights.isfinite().all()),
            longest_wait_s=self.optimizer.longest_wait_s,
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--index", type=int, required=True)
    parser.add_argument("--parts", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--peers", type=int, default=1)
    parser.add_argument("--strategy", default="local", choices=STRATEGIES)
    parser.add_argument("--samples", type=float, required=True)
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--pace", type=float, required=True)
    parser.add_argument("--lr", type=float, required=True)
    parser.add_argument("--checkpoints", required=True)
    parser.add_argument("--keep", type=int, required=True)
    parser.add_argument("--weights", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    orders = Orders(args.pace)
    with moshpit.join() as swarm:
        say("joined", peer=short(swarm.peer_id), addresses=[str(a) for a in swarm.addresses])
        swarm.wait_for_peers(args.peers, 120.0)
        trainer = Trainer(swarm, args)
        say("training", epoch=trainer.optimizer.epoch)
        trainer.run(orders)
        orders.end.wait()
        trainer.optimizer.close()
    orders.end.clear()
    say("closed")  # what is left now has been leaked: the parent looks
    orders.end.wait()


if __name__ == "__main__":
    main()
