"""The process of one peer in `moshpit bench averaging`; see `moshpit.cli.bench_worker`."""

from __future__ import annotations

from dataclasses import replace

import torch

import moshpit
from moshpit.cli.bench_worker import Fields, Pipes, own_cpu_s, serve, start
from moshpit.config import SwarmConfig

JOIN_TIMEOUT_S = 120.0


class Peer:
    """A peer that averages one vector with the others."""

    def __init__(self, work: Fields, pipes: Pipes) -> None:
        self._swarm = moshpit.join(
            work["ticket"],
            listen=f"{work['host']}:0",
            identity="new",
            config=settings(work),
            plaintext=work["plaintext"],
            group_size=work["group_size"],
            bandwidth_mbit=work["bandwidth_mbit"],
        )
        self._in_place: bool = work["in_place"]
        self._codec: str = work["codec"]
        pipes.tell("listening", addresses=[str(a) for a in self._swarm.addresses])
        self._swarm.wait_for_peers(work["peers"], JOIN_TIMEOUT_S)

    def average(self, vector: torch.Tensor) -> tuple[torch.Tensor, Fields]:
        """Average, and tell what the reports of the rounds say."""
        result = vector
        if self._in_place:
            report = self._swarm.average_([vector], codec=self._codec)
        else:
            (result,), report = self._swarm.average([vector], codec=self._codec)
        blames = [f"{b.peer.hex()[:8]}: {b.reason}" for r in report.rounds for b in r.blames]
        meeting_s = min(report.seconds, sum(r.meeting_s for r in report.rounds))
        return result, {
            "outcome": report.outcome.value,
            "groups": [len(r.peers) for r in report.rounds],
            "meeting_s": meeting_s,
            # Not the rounds' own sum: on a torus their movings overlap.
            "moving_s": report.seconds - meeting_s,
            "bytes_sent": sum(r.bytes_sent for r in report.rounds),
            "blames": blames,
        }

    def mean(self, result: torch.Tensor) -> torch.Tensor:
        """Return it as it is."""
        return result

    def cpu_s(self) -> float:
        """Return this process's CPU seconds; the network thread is in it."""
        return own_cpu_s()

    def close(self) -> None:
        """Leave the run."""
        self._swarm.close()


def settings(work: Fields) -> SwarmConfig:
    """Return the preset's settings, but for what is being measured."""
    config = moshpit.preset(work["preset"])
    return replace(config, matchmaking=replace(config.matchmaking, schedule=work["schedule"]))


def main() -> None:
    """Be one peer."""
    pipes, work = start()
    engine = Peer(work, pipes)
    serve(pipes, work, engine)
    engine.close()


if __name__ == "__main__":
    main()
