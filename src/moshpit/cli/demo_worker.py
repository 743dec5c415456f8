"""One process of `moshpit demo`: a peer, or the single process that it is compared with.

Started as ``python -m moshpit.cli.demo_worker``; see `moshpit.cli.demo_messages`.
"""

from __future__ import annotations

import logging
import os
import queue
import sys
import threading
import time
from pathlib import Path

import msgspec
import torch

import moshpit
from moshpit.cli.demo_messages import Assignment, Done, Epoch, Go, Joined, Listening, Step, Told
from moshpit.cli.demo_model import (
    Batches,
    CharTransformer,
    Corpus,
    corpus,
    learning_rate,
    loss_of,
    save_weights,
)
from moshpit.types import short

JOIN_TIMEOUT_S = 60.0
_STEPS_PER_REPORT = 8
_ORPHANED = 3


class Parent:
    """The pipes to the demo. Reads in a thread, so that its end is noticed at once."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._read, name="demo-parent", daemon=True).start()

    def _read(self) -> None:
        # Unbuffered: the interpreter cannot end while a thread holds a buffered reader's lock.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                self._lines.put(line)
        os._exit(_ORPHANED)

    def assignment(self) -> Assignment:
        """Wait for what to do."""
        return msgspec.json.decode(self._lines.get(), type=Assignment)

    def wait_for_go(self) -> None:
        """Wait for the word."""
        msgspec.json.decode(self._lines.get(), type=Go)

    def tell(self, message: Told) -> None:
        """Write one line."""
        sys.stdout.buffer.write(msgspec.json.encode(message) + b"\n")
        sys.stdout.buffer.flush()


class Training:
    """The model, its optimizer and its data, the same in every process but for the data."""

    def __init__(self, work: Assignment, text: torch.Tensor, characters: int) -> None:
        self.model = CharTransformer(characters)
        # Plain SGD: the mean of local steps is then nearly the step of the mean gradient. Adam
        # divides by the noise of the batch, which is larger in a peer's small batch than in the
        # single process's large one, so with Adam the two would need different learning rates.
        self.inner = torch.optim.SGD(self.model.parameters(), lr=1.0, momentum=0.9, nesterov=True)
        self._batches = Batches(text, work.seed)
        self._batch_size = work.batch_size

    def step(self, optimizer: torch.optim.Optimizer, progress: float) -> float:
        """Make one step at this share of the whole training; return the loss."""
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress)
        loss = loss_of(self.model, *self._batches.draw(self._batch_size))
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def save(self, path: str) -> None:
        """Write the weights."""
        save_weights(self.model, Path(path))


def train_as_peer(work: Assignment, parent: Parent, data: Corpus) -> None:
    """Join, train with the others until the last epoch, and tell about every epoch."""
    training = Training(work, data.part(work.index, work.peers), data.characters)
    with moshpit.join(work.ticket, listen="127.0.0.1:0", identity="new", preset="local") as swarm:
        parent.tell(Listening([str(a) for a in swarm.addresses]))
        optimizer = moshpit.Optimizer(
            training.inner,
            swarm,
            strategy=moshpit.LocalSGD(work.samples_per_epoch),
            batch_size=work.batch_size,
            model=training.model,
        )
        swarm.wait_for_peers(work.peers, JOIN_TIMEOUT_S)
        parent.tell(Joined(short(swarm.peer_id)))
        parent.wait_for_go()
        _run_epochs(work, parent, training, optimizer, swarm)
        optimizer.finish()
        training.save(work.weights_path)
        counts = swarm.stats()
        parent.tell(
            Done(
                samples=optimizer.stats.samples,
                rounds=counts.rounds,
                rounds_partial=counts.rounds_partial,
                rounds_failed=counts.rounds_failed,
                bytes_sent=counts.bytes_sent,
                final_epoch=optimizer.epoch,
            )
        )
        parent.wait_for_go()


def _run_epochs(
    work: Assignment,
    parent: Parent,
    training: Training,
    optimizer: moshpit.Optimizer,
    swarm: moshpit.Swarm,
) -> None:
    while optimizer.epoch < work.epochs:
        epoch, began, samples = optimizer.epoch, time.monotonic(), optimizer.stats.samples
        losses: list[float] = []
        waits: list[float] = []
        while optimizer.epoch == epoch:
            waited = optimizer.waited_s
            losses.append(training.step(optimizer, epoch / work.epochs))
            waits.append(optimizer.waited_s - waited)
        now = time.monotonic()
        report = optimizer.last_report
        if report is None:  # the swarm was ahead: nothing was averaged here yet
            continue
        last = report.rounds[-1] if report.rounds else None
        parent.tell(
            Epoch(
                epoch=optimizer.epoch,
                loss=sum(losses) / len(losses),
                samples=optimizer.stats.samples,
                rate=(optimizer.stats.samples - samples) / (now - began),
                group=[short(p) for p in last.peers] if last is not None else [],
                outcome=str(report.outcome),
                bytes_sent=swarm.stats().bytes_sent,
                averaging_s=report.seconds,
                seconds=now - began,
                waited_s=sum(waits),
                longest_wait_s=max(waits),
                at=now,
            )
        )


def train_alone(work: Assignment, parent: Parent, data: Corpus) -> None:
    """Train on as many samples as all peers together, in batches as large as all of theirs."""
    training = Training(work, data.train, data.characters)
    parent.wait_for_go()
    samples = 0
    losses: list[float] = []
    while samples < work.samples:
        losses.append(training.step(training.inner, samples / work.samples))
        samples += work.batch_size
        if len(losses) == _STEPS_PER_REPORT or samples >= work.samples:
            parent.tell(Step(samples, sum(losses) / len(losses)))
            losses.clear()
    training.save(work.weights_path)
    parent.tell(Done(samples=samples))
    parent.wait_for_go()


def main() -> None:
    """Do what the first line of the standard input says."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    parent = Parent()
    work = parent.assignment()
    torch.set_num_threads(1)  # the processes share the cores; threads would wait for each other
    data = corpus()
    if work.index < 0:
        train_alone(work, parent, data)
    else:
        train_as_peer(work, parent, data)


if __name__ == "__main__":
    main()
