"""A peer that averages some rounds and says what it then knows of everybody's bandwidth."""

from __future__ import annotations

import argparse
import json
import sys

import torch

import moshpit
from moshpit.types import short


def main() -> None:
    """Join, average so often, print a JSON line for each averaging."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--ticket", required=True)
    parser.add_argument("--listen", required=True)
    parser.add_argument("--peers", type=int, required=True)
    parser.add_argument("--numel", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    vector = torch.ones(args.numel)
    with moshpit.join(args.ticket, listen=args.listen, identity="new") as swarm:
        swarm.wait_for_peers(args.peers, timeout_s=60)
        for _ in range(args.rounds):
            _, report = swarm.average([vector])
            (last,) = report.rounds
            records = {short(record.peer): record for record in swarm.peers()}
            me = records[short(swarm.peer_id)]
            print(
                json.dumps(
                    {
                        "peer": short(swarm.peer_id),
                        "outcome": report.outcome.value,
                        "sent": last.bytes_sent,
                        "received": last.bytes_received,
                        "moving_s": last.moving_s,
                        "up": me.up,
                        "down": me.down,
                    }
                ),
                flush=True,
            )
        sys.stdin.read()  # until the others are done, too


if __name__ == "__main__":
    main()
