"""What simulated swarms cost: this machine, by their size; and their peers, in bytes.

For each size a process of its own runs the scenario `thousand` with that many peers for a few
epochs, and says how much processor time an epoch took, for each peer, and how much memory.

    python -m benchmarks.simulator --peers 100,1000 --epochs 3
    moshpit sim --membership 100,1000 --half-life 600      # the bytes
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

import msgspec

from moshpit.sim.scenario import Scenario, load
from moshpit.sim.simulate import run

HALF_LIFE_EPOCHS = 10
EPOCH_S = 5.0  # about what one lasts in that scenario


def scenario_of(peers: int, epochs: int, *, churn: bool) -> Scenario:
    """Return `thousand` for other numbers, with a half-life of ten epochs or without deaths."""
    replace, base = msgspec.structs.replace, load("thousand")
    assert base.churn is not None
    return replace(
        base,
        swarm=replace(base.swarm, peers=peers, epochs=epochs),
        churn=replace(
            base.churn, half_life_s=HALF_LIFE_EPOCHS * EPOCH_S, until_epoch=max(1, epochs - 3)
        )
        if churn
        else None,
    )


def measure(peers: int, epochs: int, *, churn: bool) -> dict[str, object]:
    """Run it in this process."""
    began = time.process_time()
    result = run(scenario_of(peers, epochs, churn=churn), 1)
    cpu_s = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "peers": peers,
        "epochs": result.epochs,
        "churn": churn,
        "ok": result.ok,
        "cpu_s": round(cpu_s, 1),
        "cpu_ms_per_peer_and_epoch": round(1e3 * cpu_s / peers / result.epochs, 2),
        "events_per_peer_and_epoch": round(result.events / peers / result.epochs),
        "peak_mb": round(peak / 1e6),
        "bytes_per_pair": round(peak / peers**2),
    }


def main() -> None:
    """Measure every size in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", default="100,1000", help="sizes, with commas")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--churn", action="store_true", help="a half-life of ten epochs")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(part) for part in arguments.peers.split(",")]
    if arguments.here:
        print(json.dumps(measure(sizes[0], arguments.epochs, churn=arguments.churn)))
        return
    for peers in sizes:
        command = [sys.executable, "-m", "benchmarks.simulator", "--here", "--peers", str(peers)]
        command += ["--epochs", str(arguments.epochs), *(["--churn"] * arguments.churn)]
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
