"""How long groups take to meet, and what waiting costs.

Real processes on this machine average a small vector again and again. For every round: from the
arrival of the last peer (its call of `Swarm.average`) until the last one has its group. Then
they idle, and one peer alone waits in a swarm of its own: the share of a core that each spends.

    python -m benchmarks.meeting --peers 16 --rounds 100 --json out.json
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

from tests.real.harness import RealPeer, RealSwarm, real_swarm


def meet(swarm: RealSwarm, rounds: int) -> list[float]:
    """Return the seconds from the last arrival to the last group, for each round."""
    delays: list[float] = []
    for _ in range(rounds):
        swarm.begin(swarm.peers)
        arrivals = [peer.expect("averaging")["at"] for peer in swarm.peers]
        results = [peer.expect("averaged") for peer in swarm.peers]
        firsts = [result["rounds"][0] for result in results]
        sizes = {len(r["peers"]) for r in firsts}
        assert sizes == {len(swarm.peers)}, f"groups of {sizes}"
        assert {r["outcome"] for r in firsts} == {"complete"}
        formed = [a + r["meeting_s"] for a, r in zip(arrivals, firsts, strict=True)]
        delays.append(max(formed) - max(arrivals))
    return delays


def idle(peers: list[RealPeer], seconds: float) -> list[float]:
    """Return the share of a core that each peer uses while nothing happens."""
    before = [cpu(peer) for peer in peers]
    time.sleep(seconds)
    after = [cpu(peer) for peer in peers]
    return [(b[0] - a[0]) / (b[1] - a[1]) for a, b in zip(before, after, strict=True)]


def cpu(peer: RealPeer) -> tuple[float, float]:
    """Return CPU seconds of a peer's process so far, and the time."""
    peer.tell("cpu")
    event = peer.expect("cpu")
    return event["process_s"], event["at"]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--peers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with real_swarm(1_000) as swarm:
        swarm.start(args.peers)
        meet(swarm, 3)  # connections are made in the first rounds
        delays = meet(swarm, args.rounds)
        shares = idle(swarm.peers, args.idle_seconds)
    with real_swarm(1_000) as swarm:
        swarm.start(1)
        alone = idle(swarm.peers, args.idle_seconds)[0]
    result = {
        "peers": args.peers,
        "rounds": args.rounds,
        "meeting_ms_median": 1e3 * statistics.median(delays),
        "meeting_ms_p90": 1e3 * statistics.quantiles(delays, n=10)[-1],
        "meeting_ms_max": 1e3 * max(delays),
        "idle_share_mean": statistics.mean(shares),
        "idle_share_max": max(shares),
        "alone_share": alone,
    }
    print(json.dumps(result, indent=2))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
