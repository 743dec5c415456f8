"""What training scripts of tests share: how they talk to their test, and their strategies."""

from __future__ import annotations

import json
import sys
import time

import moshpit
from moshpit.training.strategies import Strategy

STRATEGIES = ("local", "local-waits", "gradients", "overlapped", "diloco")


def say(event: str, **fields: object) -> None:
    """Tell the test something, with the time of the clock that all processes share.

    In one write: other threads have something to say, too.
    """
    sys.stdout.write(json.dumps({"event": event, "at": time.monotonic(), **fields}) + "\n")
    sys.stdout.flush()


def strategy_of(name: str, samples: float, *, own_samples: float) -> Strategy:
    """Make a strategy.

    Args:
        name: one of `STRATEGIES`.
        samples: of an epoch, all peers together.
        own_samples: of a step of this peer; who counts batches makes about as long epochs of them.
    """
    match name:
        case "local":
            return moshpit.LocalSGD(samples)
        case "local-waits":
            return moshpit.LocalSGD(samples, overlap=False)
        case "gradients":
            return moshpit.GradientAveraging(samples)
        case "overlapped":
            return moshpit.OverlappedGradientAveraging(max(1, round(samples / own_samples)))
        case "diloco":
            return moshpit.DiLoCo(samples)
        case _:
            raise SystemExit(f"no strategy {name!r}; there are {', '.join(STRATEGIES)}")
