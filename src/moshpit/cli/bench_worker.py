"""One process of `moshpit bench averaging`, whatever it is that averages.

The benchmark writes one JSON object a line to the process's standard input and reads one a line
from its standard output:

| the benchmark says | the process answers |
|---|---|
| the assignment | ``listening`` (an address, where there is one), then ``joined`` |
| ``fill`` and a round's number | ``filled``: the vector holds this round's values |
| ``go`` | ``done``: how long it took, as soon as the mean is there |
| ``check``, when all are done | ``checked``: CPU seconds, memory, how far off the mean is |
| ``leave``, or the end of the input | nothing: it ends |

Between these it is blocked on the pipe. The file imports nothing of Moshpit, since a rival may
live in a Python of its own; there it is run as a script.
"""

from __future__ import annotations

import json
import math
import os
import queue
import resource
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

import torch

PATTERN = 8191
"""Every this many numbers the values repeat; a prime, so that no chunk or part is like another."""
SLICE = 8 * PATTERN  # numbers compared at once: 256 KB, so that a check hardly needs memory
_ORPHANED = 3

Fields = dict[str, Any]


class Engine(Protocol):
    """Something that averages a vector with the same of the other processes."""

    def average(self, vector: torch.Tensor) -> tuple[torch.Tensor, Fields]:
        """Return the result, and what is to be told of how it went."""
        ...

    def mean(self, result: torch.Tensor) -> torch.Tensor:
        """Return the mean, from a result; not measured."""
        ...

    def cpu_s(self) -> float:
        """Return the CPU seconds spent so far, user and system."""
        ...

    def close(self) -> None:
        """End what must be ended."""
        ...


# --- the pipes -------------------------------------------------------------------------------


class Pipes:
    """The two ends. Reads in a thread, so that the benchmark's end is this process's, too."""

    def __init__(self) -> None:
        self._lines: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
        # What others print must not get between the lines.
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        threading.Thread(target=self._read, name="bench-parent", daemon=True).start()

    def _read(self) -> None:
        # Unbuffered: the interpreter cannot end while a thread holds a buffered reader's lock.
        with open(sys.stdin.fileno(), "rb", buffering=0, closefd=False) as lines:
            for line in lines:
                self._lines.put(line)
        os._exit(_ORPHANED)

    def ask(self) -> Fields:
        """Wait for the next line."""
        return json.loads(self._lines.get())

    def tell(self, event: str, **fields: object) -> None:
        """Write a line."""
        self._out.write(json.dumps({"event": event, **fields}).encode() + b"\n")


# --- the vector ------------------------------------------------------------------------------


def coefficients(index: int, number: int) -> tuple[float, float]:
    """Return a and b of process ``index`` in round ``number``: its values are a·p + b, where p
    is the pattern of `fill`. No two processes and no two rounds have the same.

    >>> coefficients(2, 3)
    (1.5, 2.75)
    """
    return 1.0 + index / 4, index + (number % 8) / 4


def fill(vector: torch.Tensor, a: float, b: float) -> None:
    """Set every number to a·p + b; p depends on its place, rising from -1 to 1 again and again."""
    pattern = torch.linspace(-1.0, 1.0, PATTERN).mul_(a).add_(b)
    whole = vector.numel() // PATTERN * PATTERN
    vector[:whole].view(-1, PATTERN).copy_(pattern)
    vector[whole:].copy_(pattern[: vector.numel() - whole])


def expected(peers: int, number: int) -> tuple[float, float]:
    """Return a and b of the mean over all processes."""
    all_of_them = [coefficients(index, number) for index in range(peers)]
    return sum(a for a, _ in all_of_them) / peers, sum(b for _, b in all_of_them) / peers


def error_of(mean: torch.Tensor, peers: int, number: int) -> float:
    """Return the largest difference from the true mean, relative to the largest true number;
    infinite where it holds something that is no number."""
    a, b = expected(peers, number)
    wanted = torch.empty(min(SLICE, mean.numel()))
    fill(wanted, a, b)
    worst = 0.0
    for start in range(0, mean.numel(), wanted.numel()):
        piece = mean[start : start + wanted.numel()]
        off = (piece - wanted[: piece.numel()]).abs().max().item()
        worst = max(worst, off if math.isfinite(off) else math.inf)
    return worst / (abs(a) + abs(b))


# --- memory and CPU --------------------------------------------------------------------------


def resident_bytes(line: str) -> int | None:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the most since `reset_peak`); None where the system
    does not say."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return None
    for entry in status.splitlines():
        name, _, value = entry.partition(":")
        if name == line:
            return int(value.split()[0]) * 1024
    return None


def reset_peak() -> None:
    """Let ``VmHWM`` begin anew."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def own_cpu_s() -> float:
    """Return the CPU seconds of this process, user and system."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def tree_cpu_s() -> float:
    """Return the CPU seconds of this process and all below it, to a tick (10 ms)."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                words = (folder / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            parents[int(folder.name)] = int(words[1])
            ticks[int(folder.name)] = int(words[11]) + int(words[12])

    def below(pid: int) -> bool:
        while pid in parents and pid != os.getpid():
            pid = parents[pid]
        return pid == os.getpid()

    return sum(ticks[pid] for pid in ticks if below(pid)) / os.sysconf("SC_CLK_TCK")


# --- the loop --------------------------------------------------------------------------------


def serve(pipes: Pipes, work: Fields, engine: Engine) -> None:
    """Average on command until told to leave."""
    vector = torch.empty(work["numel"], dtype=torch.float32)
    fill(vector, *coefficients(work["index"], 0))
    error_of(vector, work["peers"], 0)  # so that what this needs of PyTorch is in memory, too
    base = resident_bytes("VmRSS")
    number, cpu_before = 0, 0.0
    result: torch.Tensor | None = None
    pipes.tell("joined")
    while True:
        asked = pipes.ask()
        match asked["do"]:
            case "fill":
                number = asked["round"]
                fill(vector, *coefficients(work["index"], number))
                reset_peak()
                cpu_before = engine.cpu_s()
                pipes.tell("filled")
            case "go":
                began = time.monotonic()
                result, fields = engine.average(vector)
                pipes.tell("done", seconds=time.monotonic() - began, **fields)
            case "check":
                cpu_s = engine.cpu_s() - cpu_before
                peak = resident_bytes("VmHWM")
                assert result is not None
                pipes.tell(
                    "checked",
                    cpu_s=cpu_s,
                    extra_bytes=None if peak is None or base is None else peak - base,
                    error=error_of(engine.mean(result), work["peers"], number),
                )
                result = None
            case _:
                return


def start() -> tuple[Pipes, Fields]:
    """Set up the process and read its assignment."""
    torch.set_num_threads(1)
    pipes = Pipes()
    return pipes, pipes.ask()


# --- rivals ----------------------------------------------------------------------------------


class Gloo:
    """`torch.distributed.all_reduce` over gloo; on the same grid where there is one: in the
    row, then in the column. The division that makes a mean of the sum is not measured."""

    def __init__(self, work: Fields) -> None:
        dist: Any = import_module("torch.distributed")
        self._dist = dist
        peers, rows, rank = work["peers"], work["rows"], work["index"]
        dist.init_process_group(
            "gloo", init_method=f"file://{work['meeting_file']}", rank=rank, world_size=peers
        )
        self._groups: list[Any] = [None]
        self._peers = peers
        if rows > 1:
            columns = peers // rows
            self._groups = []
            for row in range(rows):
                group = dist.new_group([row * columns + c for c in range(columns)])
                if row == rank // columns:
                    self._groups.append(group)
            for column in range(columns):
                group = dist.new_group([r * columns + column for r in range(rows)])
                if column == rank % columns:
                    self._groups.append(group)

    def average(self, vector: torch.Tensor) -> tuple[torch.Tensor, Fields]:
        """Sum in place."""
        for group in self._groups:
            self._dist.all_reduce(vector, group=group)
        return vector, {}

    def mean(self, result: torch.Tensor) -> torch.Tensor:
        """Divide by the number of processes."""
        return result / self._peers

    def cpu_s(self) -> float:
        """Return this process's CPU seconds; gloo's threads are in it."""
        return own_cpu_s()

    def close(self) -> None:
        """End the process group."""
        self._dist.destroy_process_group()


class Hivemind:
    """hivemind's `DecentralizedAverager`, in one group of all peers."""

    def __init__(self, work: Fields, pipes: Pipes) -> None:
        hivemind: Any = import_module("hivemind")
        self._numel = work["numel"]
        dht: Any = hivemind.DHT(
            host_maddrs=[f"/ip4/{work['host']}/tcp/0"],
            initial_peers=work["contacts"],
            use_ipfs=False,
            start=True,
        )
        pipes.tell("listening", addresses=[str(a) for a in dht.get_visible_maddrs()])
        self._averager: Any = hivemind.DecentralizedAverager(
            averaged_tensors=[torch.zeros(self._numel)],
            dht=dht,
            prefix="bench",
            target_group_size=work["peers"],
            min_group_size=work["peers"],
            allow_state_sharing=False,
            start=True,
        )
        self._dht = dht

    def average(self, vector: torch.Tensor) -> tuple[torch.Tensor, Fields]:
        """Give it the values, step, and read them; it shares them with its own process."""
        with self._averager.get_tensors() as (tensor,):
            tensor.copy_(vector)
        self._averager.step(allow_retries=False)
        with self._averager.get_tensors() as (tensor,):
            return tensor.clone(), {}

    def mean(self, result: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return result

    def cpu_s(self) -> float:
        """Return the CPU seconds of this process and those it started."""
        return tree_cpu_s()

    def close(self) -> None:
        """End its processes."""
        self._averager.shutdown()
        self._dht.shutdown()


def main() -> None:
    """Be one process of a rival."""
    pipes, work = start()
    engine: Engine = Hivemind(work, pipes) if work["engine"] == "hivemind" else Gloo(work)
    serve(pipes, work, engine)
    engine.close()


if __name__ == "__main__":
    main()
