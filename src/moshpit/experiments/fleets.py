"""Machines and lines of the training experiments, and what they are scaled from.

What is compared are methods, so the only figures that matter are ratios: how long the vector
takes on a line against how long a step takes, and how machines differ. A small model on a thin
line stands for a large one on a thick line if both ratios are the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from moshpit.experiments.virtual import Machine
from moshpit.experiments.virtual_net import Line

GBIT: Final = 1e9 / 8  # bytes per second


@dataclass(frozen=True, slots=True, kw_only=True)
class Original:
    """The training that a small one stands for.

    Attributes:
        name: what it is.
        numbers: in its vector; float32.
        batch: samples of a step of one worker.
        samples_s: how many a machine of slowness 1 computes per second.
        source: where these are from.
    """

    name: str
    numbers: int
    batch: int
    samples_s: float
    source: str

    @property
    def step_s(self) -> float:
        """How long a step takes."""
        return self.batch / self.samples_s

    def rate(self, gbit_s: float, numel: int) -> float:
        """Return the bytes per second at which ``numel`` numbers take as long as this vector does
        at ``gbit_s``."""
        return gbit_s * GBIT * numel / self.numbers


RESNET_50: Final = Original(
    name="ResNet-50 on ImageNet",
    numbers=25_557_032,
    batch=256,
    samples_s=360.0,
    source="paper §4.2: 256 images per worker, V100, 1 Gb/s; torchvision's resnet50 has so many "
    "parameters; about 360 images a second is what a V100 trains in single precision",
)

SLOWNESS: Final = (1.0, 1.5, 2.0, 3.0)
"""Of the four kinds of machines in the heterogeneous fleet, each a quarter of it: about V100, P40,
1080 Ti and M60, which the paper's mix spans. A stated choice."""

NOISE: Final = 0.1  # of a step's length; a stated choice
HICCUP_S: Final = 0.1  # paper §4.2: Exp(100 ms) before a round


def homogeneous(peers: int, rate: float, *, hiccup_s: float = HICCUP_S) -> list[Machine]:
    """Return equal machines on equal lines of ``rate`` bytes per second."""
    line = Line(rate, rate, hiccup_s=hiccup_s)
    return [Machine(line, noise=NOISE) for _ in range(peers)]


def heterogeneous(
    peers: int,
    rate: float,
    *,
    hiccup_s: float = HICCUP_S,
    slowness: Sequence[float] = SLOWNESS,
) -> list[Machine]:
    """Return machines of several kinds on equal lines of ``rate`` bytes per second."""
    line = Line(rate, rate, hiccup_s=hiccup_s)
    kinds = len(slowness)
    return [Machine(line, slowness[index % kinds], NOISE) for index in range(peers)]
