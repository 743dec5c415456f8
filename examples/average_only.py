"""Average tensors with whoever else runs this, without training anything.

T=$(moshpit ticket new)
moshpit run --ticket $T --listen 127.0.0.1:7000 examples/average_only.py --peers 2 1 2 3
moshpit run --ticket $T examples/average_only.py --peers 2 5 6 7
"""

from __future__ import annotations

import argparse

import torch

import moshpit


def main() -> None:
    parser = argparse.ArgumentParser(description="Average some numbers over a swarm.")
    parser.add_argument("--peers", type=int, default=2, help="how many peers to wait for")
    parser.add_argument("--weight", type=float, default=1.0, help="how much these numbers weigh")
    parser.add_argument("numbers", type=float, nargs="+")
    options = parser.parse_args()

    with moshpit.join() as swarm:
        swarm.wait_for_peers(options.peers)
        (mean,), report = swarm.average([torch.tensor(options.numbers)], weight=options.weight)
        print(f"{report.outcome}: {mean.tolist()}", flush=True)


if __name__ == "__main__":
    main()
