"""What a checkpoint costs: the copy that training waits for, and the writing beside it.

    python benchmarks/checkpoint.py [--mb 400] [--directory DIR]

The state is that of a model under AdamW, so a third of it are parameters. Prints seconds, and
ratios to a plain copy of as many bytes and to a plain write of them with fsync.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from moshpit.training.shelf import read, write
from moshpit.training.state import Capture

OWNER = "aaaaaaaa"


def timed(work: Callable[[], object], times: int = 5) -> tuple[float, float]:
    """Return the medians of wall and CPU seconds."""
    walls: list[float] = []
    cpus: list[float] = []
    for _ in range(times):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return median(walls), median(cpus)


def plain_write(path: Path, data: bytes) -> None:
    with path.open("wb", buffering=0) as file:
        file.write(data)
        os.fsync(file.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mb", type=float, default=400.0)
    parser.add_argument("--directory", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    width = int((args.mb * 1e6 / 3 / 4 / 8) ** 0.5)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, width)).sum().backward()
    optimizer.step()
    state = Capture(optimizer, model, epoch=1).finish({})
    image = state.image()
    data = b"".join(image.chunk(i) for i in range(len(image)))
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    print(f"{len(data) / 1e6:.0f} MB in {len(state.tensors)} tensors, {len(image)} chunks")
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        directory = Path(folder)
        rows = {
            "plain copy": timed(flat.clone),
            "copy of the state": timed(lambda: Capture(optimizer, model, epoch=1)),
            "plain write, fsync": timed(lambda: plain_write(directory / "plain", data)),
            "hashing": timed(state.image),
            "writing, fsync": timed(lambda: write(directory, OWNER, image)),
            "reading, checked": timed(lambda: read(next(directory.glob("epoch-*")))),
        }
    for name, (wall, cpu) in rows.items():
        print(f"{name:20s} {wall:7.3f} s  {cpu:7.3f} CPU s  {len(data) / 1e9 / wall:6.2f} GB/s")


if __name__ == "__main__":
    main()
