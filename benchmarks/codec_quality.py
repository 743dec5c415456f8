"""What codecs cost in quality: the demo's model, trained with each of them on equal samples.

Two peers (real swarms in one process) train from the same start, each on its half of the text, with
the same batches whatever the codec; then the loss on text held out is compared with float32's.
Averagings come after a fixed number of steps, so that runs differ in nothing but the codec. Both
peers say that their link is slow, so that "auto" compresses.

    python -m benchmarks.codec_quality
    python -m benchmarks.codec_quality --only GradientAveraging --samples 12800

Prints a table for docs/howto/codecs.md.
"""

from __future__ import annotations

import argparse
import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import torch

import moshpit
from moshpit.cli.demo_model import (
    Batches,
    CharTransformer,
    Corpus,
    corpus,
    loss_of,
    validation_loss,
)
from moshpit.identity.tickets import RunKey
from moshpit.training.strategies import Strategy
from moshpit.types import Address

PEERS = 2
BATCH = 16
LINK_MBIT = 20.0
NEVER = 1e12  # samples: averagings begin when we say so
HELD_OUT = 1 << 15  # characters


@dataclass(frozen=True)
class Case:
    """A way to train.

    Attributes:
        name: of the strategy, with what is special about it.
        codec: how numbers are sent.
        make: makes the strategy.
        steps: of each peer between two averagings.
        lr: of AdamW.
    """

    name: str
    codec: str
    make: Callable[[], Strategy]
    steps: int
    lr: float


def cases() -> list[Case]:
    """Return all of them; the first of each name is what the others are compared with."""

    def gradients(codec: str) -> Case:
        make = lambda: moshpit.GradientAveraging(NEVER, codec=codec)  # noqa: E731
        return Case("GradientAveraging", codec, make, 1, 3e-3)

    def diloco(name: str, outer: moshpit.Nesterov, codec: str) -> Case:
        make = lambda: moshpit.DiLoCo(NEVER, outer, overlap=False, codec=codec)  # noqa: E731
        return Case(name, codec, make, 20, 3e-3)

    def powersgd(rank: int) -> Case:
        make = lambda: moshpit.GradientAveraging(NEVER, powersgd_rank=rank)  # noqa: E731
        return Case("GradientAveraging", f"PowerSGD, rank {rank}", make, 1, 3e-3)

    usual, plain = moshpit.Nesterov(), moshpit.Nesterov(lr=1.0, momentum=0.0)
    return [
        *[gradients(c) for c in ("float32", "float16", "int8", "int4", "topk", "topk64", "auto")],
        *[powersgd(rank) for rank in (2, 4)],
        *[diloco("DiLoCo", usual, c) for c in ("float32", "int8", "int4", "topk", "auto")],
        *[
            diloco("DiLoCo, lr=1, momentum=0", plain, c)
            for c in ("float32", "int4", "topk", "topk64")
        ],
    ]


def train(case: Case, text: Corpus, samples: int) -> tuple[float, float]:
    """Return the loss on text held out, and the MB that a peer has sent."""
    local = moshpit.preset("local")
    patient = replace(local.matchmaking, call_timeout_s=60.0, join_timeout_s=60.0)
    config = replace(local, matchmaking=patient)
    invite = RunKey.generate().invite()
    with contextlib.ExitStack() as stack:

        def join(addresses: tuple[Address, ...]) -> moshpit.Swarm:
            ticket = invite.ticket(addresses).encode()
            return stack.enter_context(
                moshpit.join(
                    ticket,
                    listen="127.0.0.1:0",
                    identity="new",
                    config=config,
                    bandwidth_mbit=LINK_MBIT,
                )
            )

        first = join(())
        swarms = [first, *(join(first.addresses) for _ in range(PEERS - 1))]
        for swarm in swarms:
            swarm.wait_for_peers(PEERS)
        peers = [_Peer(case, swarm, text, at) for at, swarm in enumerate(swarms)]
        while not all(record.schema for swarm in swarms for record in swarm.peers()):
            time.sleep(0.01)  # until all know what the others average
        together = threading.Barrier(PEERS, timeout=100.0)
        with ThreadPoolExecutor(PEERS) as pool:
            for running in [pool.submit(p.train, case, samples, together) for p in peers]:
                running.result()
        sent = max(swarm.stats().bytes_sent for swarm in swarms) / 1e6
    return validation_loss(peers[0].model, text.held_out[:HELD_OUT]), sent


class _Peer:
    def __init__(self, case: Case, swarm: moshpit.Swarm, text: Corpus, at: int) -> None:
        self.model = CharTransformer(text.characters, width=64)
        inner = torch.optim.AdamW(self.model.parameters(), lr=case.lr)
        self._optimizer = moshpit.Optimizer(
            inner, swarm, case.make(), batch_size=BATCH, model=self.model
        )
        self._batches = Batches(text.part(at, PEERS), seed=at)

    def train(self, case: Case, samples: int, together: threading.Barrier) -> None:
        for _ in range(samples // (PEERS * BATCH * case.steps)):
            for _ in range(case.steps):
                loss_of(self.model, *self._batches.draw(BATCH)).backward()
                self._optimizer.step()
                self._optimizer.zero_grad()
            together.wait()  # or the call of a faster peer would come in the middle of the steps
            report = self._optimizer.finish()
            assert report.outcome is moshpit.Outcome.COMPLETE, report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=12_800, help="of all peers, in each run")
    parser.add_argument("--only", default="", help="the strategies whose names begin so")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = corpus()
    print("| strategy | codec | MB sent | smaller by | loss | more than float32 | seconds |")
    print("|---|---|---|---|---|---|---|")
    exact: dict[str, tuple[float, float]] = {}
    for case in cases():
        if not case.name.startswith(options.only):
            continue
        started = time.monotonic()
        loss, sent = train(case, text, options.samples)
        seconds = time.monotonic() - started
        exact_loss, exact_sent = exact.setdefault(case.name, (loss, sent))
        more = "" if exact_loss == loss else f"{100 * (loss / exact_loss - 1):+.1f} %"
        smaller = f"{exact_sent / sent:.1f}"
        print(
            f"| {case.name} | {case.codec} | {sent:.1f} | {smaller} | {loss:.3f} | {more} "
            f"| {seconds:.0f} |",  # of training, joining and validation
            flush=True,
        )


if __name__ == "__main__":
    main()
