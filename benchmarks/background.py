"""Thread or process for the network? How much a busy training loop is slowed by either.

One trainer (a compute-bound torch loop on one thread) averages a vector again and again with
another peer, paced to about the bytes of a given link. Three arrangements, in turn, several
times: no averaging at all; the network in a thread of the trainer's process (as Moshpit has
it); the network in a process of its own, with the vector in shared memory.

    python benchmarks/background.py --mb 16 --mbit 200 --seconds 8 --repeat 3 --json out.json

Prints local steps per second of each arrangement, and the slow-down against none.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import torch
import torch.multiprocessing as mp

import moshpit
from moshpit.identity.tickets import RunKey
from moshpit.types import Address


def train(seconds: float) -> float:
    """Run a compute-bound loop; return steps per second."""
    model = torch.nn.Sequential(
        torch.nn.Linear(256, 512), torch.nn.GELU(), torch.nn.Linear(512, 256)
    )
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(64, 256)
    steps = 0
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        loss = (model(data) - data).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        steps += 1
    return steps / seconds


class Worker(Protocol):
    """A thread or a process."""

    def start(self) -> None: ...
    def join(self) -> None: ...


class Flag(Protocol):
    """An event of `threading` or `multiprocessing`."""

    def set(self) -> None: ...
    def is_set(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...


def keep_averaging(
    ticket: str,
    listen: str,
    vector: torch.Tensor,
    mbit: float,
    *,
    stop: Callable[[], bool],
    under_way: Callable[[], object] = lambda: None,
) -> None:
    """Average again and again, at most as often as the link would allow."""
    with moshpit.join(ticket, listen=listen, identity="new") as swarm:
        swarm.wait_for_peers(2)
        period_s = 2 * vector.numel() * 4 * 8 / (mbit * 1e6)
        while not stop():
            began = time.perf_counter()
            swarm.average([vector])
            under_way()
            time.sleep(max(0.0, period_s - (time.perf_counter() - began)))


def peer_main(ticket: str, listen: str, numel: int, mbit: float) -> None:
    """The other peer: ends when its parent does."""
    torch.set_num_threads(1)
    parent = os.getppid()
    orphaned = lambda: os.getppid() != parent  # noqa: E731
    keep_averaging(ticket, listen, torch.zeros(numel), mbit, stop=orphaned)


def network_main(
    run: tuple[str, str, float], vector: torch.Tensor, stop: Flag, under_way: Flag
) -> None:
    """The network's side, in a thread or in a process of its own (``vector`` is shared then)."""
    torch.set_num_threads(1)
    ticket, listen, mbit = run
    keep_averaging(ticket, listen, vector, mbit, stop=stop.is_set, under_way=under_way.set)


def run(arrangement: str, numel: int, mbit: float, seconds: float, port: int) -> float:
    """Return the steps per second under one arrangement."""
    if arrangement == "none":
        return train(seconds)
    addresses = (Address("127.0.0.1", port),)
    ticket = RunKey.generate().invite().ticket(addresses).encode()
    listen = f"127.0.0.1:{port}"
    other = subprocess.Popen(
        [sys.executable, __file__, "--peer", ticket, "--mb", str(numel * 4 / 2**20)]
        + ["--mbit", str(mbit)]
    )
    vector = torch.zeros(numel)
    if arrangement == "thread":
        flags: tuple[Flag, Flag] = (threading.Event(), threading.Event())
        worker: Worker = threading.Thread(
            target=network_main, args=((ticket, listen, mbit), vector, *flags)
        )
    else:
        context = mp.get_context("spawn")
        flags = (context.Event(), context.Event())
        vector.share_memory_()
        worker = context.Process(target=network_main, args=((ticket, listen, mbit), vector, *flags))
    stop, under_way = flags
    worker.start()
    try:
        if not under_way.wait(60.0):
            raise TimeoutError("the peers did not meet")
        return train(seconds)
    finally:
        stop.set()
        worker.join()
        other.terminate()
        other.wait()


def main() -> None:
    """Measure all arrangements in turn and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=16)
    parser.add_argument("--mbit", type=float, default=200)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    numel = int(args.mb * 2**20 / 4)
    if args.peer:
        peer_main(args.peer, "127.0.0.1:0", numel, args.mbit)
        return
    rates: dict[str, list[float]] = {"none": [], "thread": [], "process": []}
    for turn in range(args.repeat):
        for number, arrangement in enumerate(rates):
            port = 24000 + 10 * turn + number
            rates[arrangement].append(run(arrangement, numel, args.mbit, args.seconds, port))
    medians = {name: statistics.median(values) for name, values in rates.items()}
    result = {
        "mb": args.mb,
        "mbit": args.mbit,
        "steps_per_s": medians,
        "slowdown": {n: 1 - medians[n] / medians["none"] for n in ("thread", "process")},
        "runs": rates,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
