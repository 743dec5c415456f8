"""What joiners cost those that train: bytes, step times, and waits.

    python -m benchmarks.joining [--joiners 1 2 4 8] [--mb 24] [--donors 2] [--seconds 10]

For each number of joiners a fresh run of real processes: donors train, joiners have started
Python already and come at the same moment. Prints what each donor has given, in states; what a
step takes while they come over what it took before; and how long a donor waited for its copy,
beside what the copy takes when training stands still for it. On a machine with few cores the
joiners' own work slows the donors, too: `step, CPU` counts only the training thread's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import subprocess
import sys
import threading
import time
from pathlib import Path
from statistics import median
from typing import Any

import torch

import moshpit
from moshpit.identity.tickets import RunKey
from moshpit.training.state import TrainingState
from moshpit.types import Address

BATCH = 128
PATIENCE_S = 600.0


def say(event: str, **fields: object) -> None:
    print(json.dumps({"event": event, **fields}), flush=True)


# --- a peer ---------------------------------------------------------------------------------


class Meter:
    """Steps of the training loop, in spans that the parent names."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.walls: list[float] = []
        self.cpus: list[float] = []
        self.copy_waits: list[float] = []
        self.meetings: list[float] = []

    def report(self) -> dict[str, object]:
        return {
            "steps": len(self.walls),
            "step_s": median(self.walls) if self.walls else 0.0,
            "step_cpu_s": median(self.cpus) if self.cpus else 0.0,
            "copy_wait_s": max(self.copy_waits, default=0.0),
            "meeting_s": max(self.meetings, default=0.0),
        }


def model_of(mb: float) -> torch.nn.Module:
    width = int((mb * 1e6 / 3 / 4 / 4) ** 0.5)
    layers = [torch.nn.Linear(width, width) for _ in range(4)]
    return torch.nn.Sequential(*layers)


def peer(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    orders: queue.Queue[str] = queue.Queue()

    def hear() -> None:
        for line in sys.stdin:
            orders.put(line.strip())
        orders.put("quit")

    threading.Thread(target=hear, daemon=True).start()
    model = model_of(args.mb)
    width = model[0].in_features
    inner = torch.optim.AdamW(model.parameters(), lr=1e-4)
    say("ready")
    if args.role == "joiner":
        assert orders.get() == "go"
    swarm = moshpit.join(args.ticket, listen=args.listen, identity="new", preset="local")
    with swarm:
        if args.role == "donor":
            swarm.wait_for_peers(args.donors)
        strategy = moshpit.GradientAveraging(args.samples)
        optimizer = moshpit.Optimizer(inner, swarm, strategy, batch_size=BATCH, model=model)
        if args.role == "joiner":
            optimizer.inner.param_groups[0]["lr"] = 1e-4
        train(args, optimizer, model, width, orders)


def train(
    args: argparse.Namespace,
    optimizer: moshpit.Optimizer,
    model: torch.nn.Module,
    width: int,
    orders: queue.Queue[str],
) -> None:
    meter = Meter()
    began, epoch = time.perf_counter(), 0
    last_report = None
    while True:
        wall, cpu = time.perf_counter(), time.thread_time()
        x = torch.randn(BATCH, width)
        (model(x) - x).square().mean().backward()
        before = optimizer.waited_s
        optimizer._standing.between_steps(optimizer._note_wait)  # what step() does first
        meter.copy_waits.append(optimizer.waited_s - before)
        before = optimizer.waited_s
        optimizer.step()
        optimizer.zero_grad()
        waited = optimizer.waited_s - before
        if optimizer.last_report is not last_report:  # an averaging is no step
            last_report = optimizer.last_report
            meter.meetings += [r.meeting_s for r in last_report.rounds]
        else:
            meter.walls.append(time.perf_counter() - wall - waited)
            meter.cpus.append(time.thread_time() - cpu)
        if optimizer.epoch != epoch:
            epoch = optimizer.epoch
            say("epoch", epoch=epoch)
        if args.role == "joiner" and optimizer.caught_up:
            state = optimizer._swarm.states
            say("caught-up", seconds=time.perf_counter() - began, given=state.bytes_given)
            optimizer._swarm.leave()
            while orders.get() != "quit":  # stays to pass on what it has
                say("given", given=state.bytes_given)
            return
        try:
            order = orders.get_nowait()
        except queue.Empty:
            continue
        if order == "quit":
            return
        say("report", given=optimizer._swarm.states.bytes_given, **meter.report())
        meter.clear()
        if order == "copy":
            started = time.perf_counter()
            state = TrainingState.capture(optimizer, model, epoch=0, generators=False)
            took = time.perf_counter() - started
            image = state.image(1 << 19)
            say("copied", seconds=took, size=image.manifest.size + len(image.manifest.encode()))


# --- the parent -----------------------------------------------------------------------------


class Child:
    def __init__(self, args: argparse.Namespace, role: str, ticket: str, listen: str) -> None:
        command = [sys.executable, "-m", "benchmarks.joining", "--role", role, "--ticket", ticket]
        command += ["--listen", listen, "--mb", str(args.mb), "--donors", str(args.donors)]
        command += ["--samples", str(args.samples)]
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=Path(__file__).parent.parent,
        )
        self.events: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.put(json.loads(line))
        self.events.put({"event": "end"})

    def end(self) -> None:
        """Leave nothing of it behind, once it was killed."""
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(BrokenPipeError):
                stream.close()

    def tell(self, order: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(order + "\n")
        self.process.stdin.flush()

    def expect(self, kind: str, epoch: int = 0) -> dict[str, Any]:
        while True:
            event = self.events.get(timeout=PATIENCE_S)
            if event["event"] == "end":
                raise SystemExit(f"a peer ended while {kind!r} was awaited")
            if event["event"] == kind and event.get("epoch", 0) >= epoch:
                return event


def measure(args: argparse.Namespace, count: int, port: int) -> dict[str, Any]:
    address = Address("127.0.0.1", port)
    ticket = RunKey.generate().invite().ticket((address,)).encode()
    children: list[Child] = []
    try:
        donors = [
            Child(args, "donor", ticket, f"127.0.0.1:{port if i == 0 else 0}")
            for i in range(args.donors)
        ]
        joiners = [Child(args, "joiner", ticket, "127.0.0.1:0") for _ in range(count)]
        children += [*donors, *joiners]
        for child in children:
            child.expect("ready")
        for donor in donors:
            donor.expect("epoch", epoch=2)
            donor.tell("report")
            donor.expect("report")
        time.sleep(args.seconds)
        before = [ask(donor, "report") for donor in donors]
        for joiner in joiners:
            joiner.tell("go")
        came = [joiner.expect("caught-up") for joiner in joiners]
        during = [ask(donor, "report") for donor in donors]
        for donor in donors:
            donor.tell("copy")
        copied = [donor.expect("copied") for donor in donors]
        size = copied[0]["size"]
        for joiner in joiners:
            joiner.tell("given")
        passed = [joiner.expect("given")["given"] / size for joiner in joiners]
        return {
            "joiners": count,
            "state_mb": size / 1e6,
            "given_by_donors": [d["given"] / size for d in during],
            "passed_on": passed,
            "seconds": max(c["seconds"] for c in came),
            "step": ratio(during, before, "step_s"),
            "step_cpu": ratio(during, before, "step_cpu_s"),
            "copy_wait_s": max(d["copy_wait_s"] for d in during),
            "copy_at_once_s": max(c["seconds"] for c in copied),
            "meeting_s": [max(d["meeting_s"] for d in span) for span in (before, during)],
        }
    finally:
        for child in children:
            child.process.kill()
        for child in children:
            child.end()


def ask(child: Child, order: str) -> dict[str, Any]:
    child.tell(order)
    return child.expect("report")


def ratio(after: list[dict[str, Any]], before: list[dict[str, Any]], name: str) -> float:
    return median(a[name] / max(1e-9, b[name]) for a, b in zip(after, before, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--joiners", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--donors", type=int, default=2)
    parser.add_argument("--mb", type=float, default=24.0, help="of a state")
    parser.add_argument("--samples", type=float, default=4000.0, help="of an epoch")
    parser.add_argument("--seconds", type=float, default=10.0, help="of training without joiners")
    parser.add_argument("--port", type=int, default=47310)
    parser.add_argument("--json", type=Path, default=None)
    parser.add_argument("--role", choices=["donor", "joiner"], help=argparse.SUPPRESS)
    parser.add_argument("--ticket", help=argparse.SUPPRESS)
    parser.add_argument("--listen", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role is not None:
        peer(args)
        return
    rows: list[dict[str, Any]] = []
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {args.donors} donors")
    print("joiners  given by a donor  passed on   seconds  step  step, CPU  waits for its copy")
    for number, count in enumerate(args.joiners):
        row = measure(args, count, args.port + number)
        rows.append(row)
        print(
            f"{count:7d}  {max(row['given_by_donors']):9.2f} states"
            f"  {max(row['passed_on']):9.2f}  {row['seconds']:8.1f}  {row['step']:4.2f}"
            f"  {row['step_cpu']:9.2f}  {row['copy_wait_s']:.3f} s of {row['copy_at_once_s']:.3f} s"
            f"  meeting {row['meeting_s'][0]:.2f} -> {row['meeting_s'][1]:.2f} s",
            flush=True,
        )
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
