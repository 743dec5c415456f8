"""A peer that trains until it is told to finish, and says what it gave to each averaging.

python -m tests.real.divided TICKET ADDRESS PLACE
"""

from __future__ import annotations

import sys
import threading
import time
from typing import Any

import torch

import moshpit
from tests.real.script import say

BATCH = 8
EPOCH_SAMPLES = 1600


class Telling:
    """A swarm that also says what an averaging begins with."""

    def __init__(self, swarm: moshpit.Swarm, model: torch.nn.Module) -> None:
        self._swarm = swarm
        self._model = model
        self.samples = 0

    def __getattr__(self, name: str) -> object:
        return getattr(self._swarm, name)

    def begin_averaging(self, vector: torch.Tensor, weight: float, **options: Any) -> object:
        say("gave", samples=self.samples, weight=weight, values=values_of(self._model))
        return self._swarm.begin_averaging(vector, weight, **options)


def values_of(model: torch.nn.Module) -> list[float]:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()


def main() -> None:
    ticket, address, place = sys.argv[1:]
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 1)
    told = threading.Event()
    with moshpit.join(ticket, listen=f"{address}:7000", identity="new", preset="local") as swarm:
        telling = Telling(swarm, model)
        optimizer = moshpit.Optimizer(
            torch.optim.SGD(model.parameters(), lr=0.01),
            telling,  # pyright: ignore[reportArgumentType]
            moshpit.LocalSGD(EPOCH_SAMPLES, overlap=False),
            batch_size=BATCH,
        )
        say("joined")
        swarm.wait_for_peers(int(sys.stdin.readline()))
        threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
        report = None
        while not told.is_set():
            noise = torch.randn(BATCH, 6)
            loss = (model(noise) - float(place)).square().mean()
            loss.backward()
            telling.samples += BATCH
            optimizer.step()
            optimizer.zero_grad()
            time.sleep(0.02)
            if optimizer.last_report is not report:
                report = optimizer.last_report
                assert report is not None
                peers = len(report.rounds[-1].peers) if report.rounds else 1
                say(
                    "averaged",
                    epoch=report.epoch,
                    peers=0 if report.stale else peers,
                    values=values_of(model),
                )
        say("left", caught_up=optimizer.caught_up)


if __name__ == "__main__":
    main()
