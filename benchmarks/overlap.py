"""What overlapping is worth: step times of `OverlappedGradientAveraging` on shaped links.

Each peer is a process in a network namespace of its own, with a link of a given bandwidth
(`moshpit.cli.bench_links`; needs root). The model's layers wait in their forward pass, and twice
as long in their backward pass, without holding the interpreter: so the time of the computing is
known, and does not depend on how many peers share this machine's cores. What it costs beyond that
(gradients, vectors, encryption, the network thread) is real.

A step is what moves all peers' parameters once. In one run, in turn: computing alone,
communicating alone (`Swarm.average_` of a vector of the model's size), `GradientAveraging`,
`OverlappedGradientAveraging`; for computing that takes twice as long as the link needs, as long,
and half as long.

    python -m benchmarks.overlap --peers 2,4 --mb 16 --mbit 100 --steps 8 --json out.json

Prints medians in seconds, and the step's ratio to max(computing, communicating).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import moshpit
from moshpit.cli.bench_links import Links, check_root
from moshpit.identity.tickets import RunKey
from moshpit.types import Address

ROOT = Path(__file__).parents[1]
LAYERS = 32
WARM_UP = 2
RATIOS = (2.0, 1.0, 0.5)  # computing to communicating
PHASES = ("communicating", "plain", "overlapped")
FORWARD_SHARE = 1 / 3
PATIENCE_S = 600.0


class _Busy(torch.autograd.Function):
    """Adds a number of the weight, and takes its time."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds, ctx.shape = seconds, weight.shape
        time.sleep(seconds * FORWARD_SHARE)
        return x + weight[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        time.sleep(ctx.seconds * (1 - FORWARD_SHARE))
        (gradient,) = gradients
        return gradient, gradient.mean().expand(ctx.shape).contiguous(), None


class Layer(torch.nn.Module):
    """A weight of so many numbers, and a forward and backward pass of so many seconds."""

    def __init__(self, numel: int, seconds: float) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.linspace(-1, 1, numel))
        self.seconds = seconds

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Busy.apply(x, self.weight, self.seconds)


def build(numel: int, seconds: float) -> torch.nn.Module:
    """Return a model of about so many numbers whose two passes take so long."""
    layers = [Layer(numel // LAYERS, seconds / LAYERS) for _ in range(LAYERS)]
    return torch.nn.Sequential(*layers)


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, count: int) -> list[float]:
    """Return how long each step took."""
    x = torch.ones(8, 1)
    times: list[float] = []
    for _ in range(count):
        began = time.monotonic()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.monotonic() - began)
    return times


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the optimizer that is wrapped."""
    return torch.optim.SGD(model.parameters(), lr=1e-4)


def train_together(
    swarm: moshpit.Swarm, strategy: Any, numel: int, seconds: float, count: int
) -> list[float]:
    """Train with the others, each step with all of them."""
    model = build(numel, seconds)
    optimizer = moshpit.Optimizer(sgd(model), swarm, strategy, batch_size=8, model=model)
    times: list[float] = []
    began = time.monotonic()
    while optimizer.epoch < count:  # peers may need more than one batch to see the target met
        epoch = optimizer.epoch
        train(model, optimizer, 1)
        if optimizer.epoch > epoch:
            times.append(time.monotonic() - began)
            began = time.monotonic()
    optimizer.finish()
    return times


def communicate(swarm: moshpit.Swarm, numel: int, count: int) -> list[float]:
    """Return how long it takes to average a vector of the model's size."""
    vector = torch.linspace(-1, 1, numel)
    times: list[float] = []
    for _ in range(count):
        began = time.monotonic()
        swarm.average_([vector])
        times.append(time.monotonic() - began)
    return times


def peer(job: dict[str, Any]) -> None:
    """Be one peer: prints the seconds of each step, by phase."""
    torch.set_num_threads(1)
    numel, seconds, count = job["numel"], job["seconds"], job["steps"] + WARM_UP
    model = build(numel, seconds)
    found = {"computing": train(model, sgd(model), count)}
    size = job["peers"]
    phases: dict[str, Callable[[moshpit.Swarm], list[float]]] = {
        "communicating": lambda swarm: communicate(swarm, numel, count),
        "plain": lambda swarm: train_together(
            swarm, moshpit.GradientAveraging(8 * size), numel, seconds, count
        ),
        "overlapped": lambda swarm: train_together(
            swarm, moshpit.OverlappedGradientAveraging(), numel, seconds, count
        ),
    }
    for phase, measure in phases.items():
        listen = f"{job['host']}:{job['ports'][phase]}"
        ticket = job["tickets"][phase]
        with moshpit.join(ticket, listen=listen, identity="new", preset="lan") as swarm:
            swarm.wait_for_peers(size)
            found[phase] = measure(swarm)
    print(json.dumps(found), flush=True)


def run(peers: int, numel: int, seconds: float, options: argparse.Namespace) -> dict[str, float]:
    """Measure one arrangement; return the median seconds of a step, by phase."""
    ports = {phase: 24100 + number for number, phase in enumerate(PHASES)}
    with Links([options.mbit] * peers) as links:
        tickets = {
            phase: RunKey.generate().invite().ticket((Address(links.hosts[0], port),)).encode()
            for phase, port in ports.items()
        }
        job = {
            "numel": numel,
            "seconds": seconds,
            "steps": options.steps,
            "peers": peers,
            "ports": ports,
            "tickets": tickets,
        }
        processes = [
            subprocess.Popen(
                [*links.prefix(index), sys.executable, "-m", "benchmarks.overlap", "--peer"]
                + [json.dumps({**job, "host": host})],
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
            )
            for index, host in enumerate(links.hosts)
        ]
        try:
            said = [process.communicate(timeout=PATIENCE_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
    if any(process.returncode for process in processes):
        raise SystemExit("a peer failed; see above")
    found = [json.loads(text) for text in said]
    return {
        phase: statistics.median(t for times in found for t in times[phase][WARM_UP:])
        for phase in ("computing", *PHASES)
    }


def main() -> None:
    """Measure all arrangements and print them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="2,4")
    parser.add_argument("--ratios", default=",".join(map(str, RATIOS)))
    parser.add_argument("--mb", type=float, default=16)
    parser.add_argument("--mbit", type=float, default=100)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--peer", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peer:
        peer(json.loads(options.peer))
        return
    check_root(loss=False)
    numel = int(options.mb * 2**20 / 4) // LAYERS * LAYERS
    rows: list[dict[str, float]] = []
    print("peers  compute  communicate    plain  overlapped   /max  plain/max")
    for peers in map(int, options.peers.split(",")):
        link_s = 2 * (peers - 1) / peers * 4 * numel * 8 / (options.mbit * 1e6 * 0.956)
        for ratio in map(float, options.ratios.split(",")):
            s = run(peers, numel, ratio * link_s, options)
            longest = max(s["computing"], s["communicating"])
            shares = {name: s[name] / longest for name in ("overlapped", "plain")}
            rows.append({"peers": peers, "ratio": ratio, **s})
            print(
                f"{peers:5}  {s['computing']:7.2f}  {s['communicating']:11.2f}  {s['plain']:7.2f}"
                f"  {s['overlapped']:10.2f}  {shares['overlapped']:5.2f}  {shares['plain']:9.2f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps({"mb": options.mb, "mbit": options.mbit, "rows": rows}))


if __name__ == "__main__":
    main()
