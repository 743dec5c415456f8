"""What the demo trains: a small character-level transformer on Python's own manual.

The text ships with every Python (`pydoc_data.topics`), so the demo needs no download. Every
tenth block of the text is held out for validation, so that it is like the text trained on.
"""

from __future__ import annotations

import math
import pydoc_data.topics as manual
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

_files: Any = import_module("safetensors.torch")  # without types

CONTEXT = 64
_BLOCK = 1024
_PASSAGE = 4096
_RECENT = 4
_BATCH = 64
_HELD_OUT_EVERY = 10


@dataclass(frozen=True, slots=True)
class Corpus:
    """Encoded text: ``train`` and ``held_out`` are (n,) int64, one number a character."""

    train: torch.Tensor
    held_out: torch.Tensor
    characters: int

    def part(self, index: int, parts: int) -> torch.Tensor:
        """Return the part of the training text that one peer trains on: passages dealt in turn,
        so that no two peers share one, and a peer that dies takes no whole subject along."""
        starts = range(index * _PASSAGE, len(self.train), parts * _PASSAGE)
        return torch.cat([self.train[at : at + _PASSAGE] for at in starts])


def corpus() -> Corpus:
    """Return Python's manual, each page once, in the pages' alphabetical order."""
    topics: dict[str, str] = manual.topics
    text = "\n".join(dict.fromkeys(topics[name] for name in sorted(topics)))
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    codes = torch.tensor([alphabet[c] for c in text])
    blocks = [codes[at : at + _BLOCK] for at in range(0, len(codes), _BLOCK)]
    held_out = [b for i, b in enumerate(blocks) if i % _HELD_OUT_EVERY == _HELD_OUT_EVERY // 2]
    train = [b for i, b in enumerate(blocks) if i % _HELD_OUT_EVERY != _HELD_OUT_EVERY // 2]
    return Corpus(torch.cat(train), torch.cat(held_out), len(alphabet))


class Batches:
    """Random windows of a text: each draw is (inputs, targets), both (size, CONTEXT)."""

    def __init__(self, text: torch.Tensor, seed: int) -> None:
        self._text = text
        self._random = torch.Generator().manual_seed(seed)

    def draw(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return one batch."""
        starts = torch.randint(len(self._text) - CONTEXT, (size, 1), generator=self._random)
        windows = self._text[starts + torch.arange(CONTEXT + 1)]
        return windows[:, :-1], windows[:, 1:]


class _Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.before_mlp = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before_attention(x)).view(batch, length, 3, self.heads, -1)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.before_mlp(x))))


class CharTransformer(nn.Module):
    """A causal transformer over characters, (batch, length) int64 to logits (…, characters).

    Its initial weights depend on nothing but ``seed``.
    """

    def __init__(
        self, characters: int, *, width: int = 96, layers: int = 2, heads: int = 4, seed: int = 0
    ) -> None:
        super().__init__()
        self.token = nn.Embedding(characters, width)
        self.place = nn.Embedding(CONTEXT, width)
        self.recent = nn.Conv1d(width, width, _RECENT, groups=width, bias=False)
        self.blocks = nn.ModuleList([_Block(width, heads) for _ in range(layers)])
        self.last = nn.LayerNorm(width)
        self.head = nn.Linear(width, characters, bias=False)
        random = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.dim() >= 2:
                scale = 0.3 if name == "recent.weight" else 0.02
                if name.endswith(("out.weight", "down.weight")):
                    scale /= math.sqrt(2 * layers)
                nn.init.normal_(parameter, std=scale, generator=random)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.token(tokens)
        # Each place sees the last few characters at once; attention alone learns that slowly.
        x = x + self.recent(F.pad(x.transpose(1, 2), (_RECENT - 1, 0))).transpose(1, 2)
        x = x + self.place.weight[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.last(x))


def loss_of(model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean negative log-likelihood of a character, in nats."""
    return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


@torch.no_grad()
def validation_loss(model: nn.Module, held_out: torch.Tensor) -> float:
    """Return the loss over all of the held-out text, in windows that do not overlap."""
    usable = (len(held_out) - 1) // CONTEXT * CONTEXT
    inputs = held_out[:usable].view(-1, CONTEXT)
    targets = held_out[1 : usable + 1].view(-1, CONTEXT)
    total = 0.0
    for at in range(0, len(inputs), _BATCH):
        part = inputs[at : at + _BATCH]
        total += loss_of(model, part, targets[at : at + _BATCH]).item() * len(part)
    return total / len(inputs)


def learning_rate(progress: float, peak: float = 0.3, warm_up: float = 0.08) -> float:
    """Return the learning rate after a share ``progress`` of all samples: a linear warm-up,
    then a cosine down to a twentieth."""
    if progress < warm_up:
        return peak * (0.1 + 0.9 * progress / warm_up)
    fraction = min(1.0, (progress - warm_up) / (1 - warm_up))
    return peak * (0.05 + 0.95 * (1 + math.cos(math.pi * fraction)) / 2)


def save_weights(model: nn.Module, path: Path) -> None:
    """Write a model's weights (safetensors)."""
    _files.save_file(dict(model.state_dict()), path)


def load_weights(path: Path) -> dict[str, torch.Tensor]:
    """Read what `save_weights` wrote."""
    return _files.load_file(path)
