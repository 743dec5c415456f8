"""A small residual network that reads handwritten digits, for comparing methods.

The data are scikit-learn's digits: 1,797 images of 8 by 8 points. The network has group
normalisation, which does not mind small batches. It stands for ResNet-50 on ImageNet (paper
§4.2): the lines of the peers are as much thinner as the vector is shorter, so that sending the
vector takes as long, and a step takes as long as there (`moshpit.experiments.fleets`).
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from random import Random
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn import functional

from moshpit.errors import ConfigError
from moshpit.experiments.trials import Task

WIDTH: Final = 16
GROUPS: Final = 4
CLASSES: Final = 10
HELD_OUT: Final = 400
SPLIT_SEED: Final = 0
MOMENTUM: Final = 0.9  # paper §4.2, with Nesterov's form
WEIGHT_DECAY: Final = 1e-4  # paper §4.2


@final
class Residual(nn.Module):
    """Two convolutions and a way around them.

    Args:
        inputs, outputs: channels.
        stride: of the first convolution, and of the way around.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.first_norm = nn.GroupNorm(GROUPS, outputs)
        self.second = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.second_norm = nn.GroupNorm(GROUPS, outputs)
        same = inputs == outputs and stride == 1
        self.around = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, outputs, ...) for (n, inputs, ...)."""
        y = functional.relu(self.first_norm(self.first(x)))
        return functional.relu(self.second_norm(self.second(y)) + self.around(x))


def network(width: int = WIDTH) -> nn.Sequential:
    """Return the network: (n, 1, 8, 8) to (n, 10)."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, 1, 1, bias=False),
        nn.GroupNorm(GROUPS, width),
        nn.ReLU(),
        Residual(width, width, 1),
        Residual(width, 2 * width, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * width, CLASSES),
    )


@cache
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images, (1797, 1, 8, 8) from -1 to 1, and what they show, (1797,).

    Raises:
        ConfigError: scikit-learn is not installed.
    """
    try:
        found: Any = import_module("sklearn.datasets").load_digits()
    except ImportError as error:
        raise ConfigError(
            "the digits come with scikit-learn: pip install 'moshpit[experiments]'"
        ) from error
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8.0 - 1.0
    return images, torch.tensor(found.target)


@final
class Digits(Task):
    """Reading digits; the score is the share of the held-out images that are read right.

    Attributes:
        held: (400, 1, 8, 8), the held-out images.
    """

    def __init__(self) -> None:
        images, labels = digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(SPLIT_SEED))
        held, rest = order[:HELD_OUT], order[HELD_OUT:]
        self.held = images[held]
        self._held_labels = labels[held]
        self._images, self._labels = images[rest], labels[rest]

    def model(self) -> nn.Module:
        """See `Task.model`."""
        return network()

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """See `Task.optimizer`."""
        return torch.optim.SGD(
            model.parameters(), rate, momentum=MOMENTUM, nesterov=True, weight_decay=WEIGHT_DECAY
        )

    def loss(self, model: nn.Module, rng: Random, batch: int) -> torch.Tensor:
        """See `Task.loss`."""
        drawn = torch.tensor(rng.choices(range(len(self._images)), k=batch))
        return functional.cross_entropy(model(self._images[drawn]), self._labels[drawn])

    def score(self, model: nn.Module) -> float:
        """See `Task.score`."""
        images, labels = self.held, self._held_labels
        with torch.no_grad():
            return (model(images).argmax(1) == labels).float().mean().item()
