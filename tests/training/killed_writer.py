"""Kills processes while they write checkpoints, and looks at what they leave behind.

A program of its own, because it forks: each child writes one epoch after the other, says which
are on the disk, keeps one, and is killed at some moment. Prints, as JSON, how often it was
caught in the middle of writing.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sys
import time
from pathlib import Path

import torch

from moshpit.training.shelf import prune, read, saved_in, sweep, write
from moshpit.training.state import TrainingState

OWNER = "aaaaaaaa"
NUMEL = 300_000


def state_of(epoch: int) -> TrainingState:
    return TrainingState(epoch, {"model.w": torch.full((NUMEL,), float(epoch))}, {})


def write_until_killed(directory: Path, first: int, tell: int) -> None:
    for epoch in range(first, first + 1000):
        saved = write(directory, OWNER, state_of(epoch).image())
        os.write(tell, epoch.to_bytes(4, "little"))
        prune(directory, 1, saved)


def newest_good(directory: Path) -> int:
    """Everything that has a name is whole, and holds what its name says."""
    epochs = [saved.epoch for saved in saved_in(directory, OWNER)]
    for saved in saved_in(directory, OWNER):
        state = read(saved.path)
        assert state.epoch == saved.epoch
        assert torch.equal(state.tensors["model.w"], torch.full((NUMEL,), float(saved.epoch)))
    return max(epochs, default=0)


def main(directory: Path, kills: int, seed: int) -> None:
    torch.set_num_threads(1)
    rng = random.Random(seed)
    caught = durable = 0
    for _ in range(kills):
        hear, tell = os.pipe()
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException):
                write_until_killed(directory, durable + 1, tell)
            os._exit(1)
        os.close(tell)
        first = os.read(hear, 4)  # so that there is something to lose
        time.sleep(rng.uniform(0.0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        told = first + os.read(hear, 1 << 16)
        os.close(hear)
        durable = max(durable, int.from_bytes(told[-4:], "little"))
        newest = newest_good(directory)
        assert newest >= durable, f"epoch {durable} was on the disk, and {newest} is the newest"
        durable = newest
        caught += any(name.startswith(".moshpit-") for name in os.listdir(directory))
        sweep(directory, OWNER)
        assert not any(name.startswith(".") for name in os.listdir(directory))
    print(json.dumps({"caught": caught, "epochs": durable}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
