"""What simulated swarms cost: this machine, by their size; and their peers, in bytes.

For each size a process of its own runs the scenario `thousand` with that many peers for a few
epochs, and says how much processor time an epoch took, for each peer, and how much memory.

    python -m benchmarks.simulator --peers 100,1000 --epochs 3
    python -m benchmarks.simulator --peers 100 --epochs 12 --storm
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

from moshpit.sim.scenario import Fault, Scenario, load
from moshpit.sim.simulate import run

HALF_LIFE_EPOCHS = 10
EPOCH_S = 5.0  # about what one lasts in that scenario
LOSS = 0.05
CUTS = (  # as in the scenario `storm`
    Fault(kind="partition", at_epoch=2, after_s=(0.0, 4.0), for_s=(1.0, 4.0), share=0.25),
    Fault(kind="partition", at_epoch=4, after_s=(0.0, 4.0), for_s=(8.0, 20.0), share=0.34),
)


def scenario_of(peers: int, epochs: int, *, churn: bool, storm: bool = False) -> Scenario:
    """Return `thousand` for other numbers, with a half-life of ten epochs or without deaths, and
    in a storm also with losses and two partitions that heal."""
    replace, base = msgspec.structs.replace, load("thousand")
    assert base.churn is not None
    if storm:
        base = replace(
            base,
            network=replace(base.network, loss=LOSS),
            faults=CUTS,
            # As in `storm`, where packets are lost for as long as it lasts.
            checks=replace(base.checks, heal_epochs=6, relapses=1, drain_s=30.0),
        )
    return replace(
        base,
        swarm=replace(base.swarm, peers=peers, epochs=epochs),
        churn=replace(
            base.churn, half_life_s=HALF_LIFE_EPOCHS * EPOCH_S, until_epoch=max(1, epochs - 3)
        )
        if churn
        else None,
    )


def measure(peers: int, epochs: int, *, churn: bool, storm: bool) -> dict[str, object]:
    """Run it in this process."""
    began = time.process_time()
    result = run(scenario_of(peers, epochs, churn=churn, storm=storm), 1)
    cpu_s = time.process_time() - began
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return {
        "peers": peers,
        "epochs": result.epochs,
        "churn": churn,
        "storm": storm,
        "ok": result.ok,
        "violations": [finding.first for finding in result.findings if not finding.ok],
        "heal_epochs": result.heal_epochs,
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
    parser.add_argument("--storm", action="store_true", help="churn, losses and partitions")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    sizes = [int(part) for part in arguments.peers.split(",")]
    churn = arguments.churn or arguments.storm
    if arguments.here:
        shown = measure(sizes[0], arguments.epochs, churn=churn, storm=arguments.storm)
        print(json.dumps(shown))
        return
    for peers in sizes:
        command = [sys.executable, "-m", "benchmarks.simulator", "--here", "--peers", str(peers)]
        command += ["--epochs", str(arguments.epochs), *(["--churn"] * churn)]
        command += ["--storm"] * arguments.storm
        subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
