"""A small masked language model with shared layers, on text that every Python has.

ALBERT in small (Lan et al. 2019): one transformer layer is applied several times, and embeddings
are factorised. A convolution in front of it tells what stands where, so that the model learns from
context within tens of steps instead of thousands. The text is `pydoc_data.topics`, Python's own
documentation, and the docstrings of its standard library: characters, 15 % of them hidden, to be
guessed from the others.
"""

from __future__ import annotations

import ast
import sysconfig
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics
from random import Random
from typing import Final, final

import torch
from torch import nn
from torch.nn import functional

from moshpit.experiments.trials import Task
from moshpit.training.optim import LAMB

ALPHABET: Final = "\n" + "".join(chr(code) for code in range(32, 127))
MASK: Final = len(ALPHABET)
HIDDEN_SHARE: Final = 0.15  # BERT, ALBERT
LENGTH: Final = 48
WIDTH: Final = 64
EMBEDDING: Final = 32
LAYERS: Final = 3  # the same one, so often
HEADS: Final = 4
INNER: Final = 128
REACH: Final = 7  # characters that the convolution sees; so it also tells places apart
BLOCK_CHARS: Final = 1000
HELD_EVERY: Final = 20  # blocks: all parts of the text are in what is held out
HELD_BATCH: Final = 256
DECAY: Final = 0.01  # paper §4.3: LAMB as for ALBERT, Lan et al. 2019
TEXT_CHARS_MAX: Final = 520_000  # parsing more of the library takes longer than it helps
DOCSTRING_CHARS_MIN: Final = 200
"""Shorter ones are hardly text."""


@cache
def text() -> str:
    """Return the text; what is not ASCII is left out."""
    pieces = [topics[name] for name in sorted(topics)]
    length = sum(map(len, pieces))
    for piece in _docstrings(Path(sysconfig.get_paths()["stdlib"])):
        if length >= TEXT_CHARS_MAX:
            break
        pieces.append(piece)
        length += len(piece)
    dropped = set(joined := "\n".join(pieces)[:TEXT_CHARS_MAX]) - set(ALPHABET)
    return joined.translate(dict.fromkeys(map(ord, dropped)))


def _docstrings(library: Path) -> Iterator[str]:
    """Yield the docstrings of the modules at the top of the standard library, in order."""
    for path in sorted(library.glob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                found = ast.get_docstring(node)
                if found is not None and len(found) >= DOCSTRING_CHARS_MIN:
                    yield found


@final
class Layer(nn.Module):
    """A transformer layer; normalised first, so that it needs no warm-up to be stable."""

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.between = nn.LayerNorm(WIDTH)
        self.wide = nn.Linear(WIDTH, INNER)
        self.narrow = nn.Linear(INNER, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (n, length, WIDTH) for the same."""
        n, length, _ = x.shape
        mixed = self.mix(self.before(x)).view(n, length, 3, HEADS, WIDTH // HEADS)
        queries, keys, values = mixed.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(queries, keys, values)
        x = x + self.out(seen.transpose(1, 2).reshape(n, length, WIDTH))
        return x + self.narrow(functional.gelu(self.wide(self.between(x))))


@final
class SharedLayers(nn.Module):
    """The model: characters to the logits of characters, (n, LENGTH) to (n, LENGTH, letters)."""

    def __init__(self) -> None:
        super().__init__()
        self.letters = nn.Embedding(len(ALPHABET) + 1, EMBEDDING)
        self.widen = nn.Linear(EMBEDDING, WIDTH)
        self.near = nn.Conv1d(WIDTH, WIDTH, REACH, padding=REACH // 2)
        self.layer = Layer()
        self.last = nn.LayerNorm(WIDTH)
        self.guess = nn.Linear(WIDTH, len(ALPHABET))

    def forward(self, letters: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        x = self.widen(self.letters(letters))
        x = x + functional.gelu(self.near(x.transpose(1, 2))).transpose(1, 2)
        for _ in range(LAYERS):
            x = self.layer(x)
        return self.guess(self.last(x))


@final
class MaskedText(Task):
    """Guessing hidden characters; the score is the loss on held-out text, in nats a character."""

    def __init__(self) -> None:
        place = {char: index for index, char in enumerate(ALPHABET)}
        letters = torch.tensor([place[char] for char in text()], dtype=torch.int64)
        block = torch.arange(len(letters)) // BLOCK_CHARS % HELD_EVERY
        self._letters, held = letters[block != 0], letters[block == 0]
        rng = Random(0)
        self._held = self._draw(held, rng, HELD_BATCH)

    def _draw(
        self, letters: torch.Tensor, rng: Random, batch: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        starts = [rng.randrange(len(letters) - LENGTH) for _ in range(batch)]
        rows = torch.stack([letters[at : at + LENGTH] for at in starts])
        draws = torch.tensor([[rng.random() for _ in range(LENGTH)] for _ in starts])
        return rows, draws < HIDDEN_SHARE

    def model(self) -> nn.Module:
        """See `Task.model`."""
        return SharedLayers()

    def optimizer(self, model: nn.Module, rate: float) -> torch.optim.Optimizer:
        """See `Task.optimizer`."""
        parameters = list(model.parameters())
        return LAMB(
            [
                {"params": [p for p in parameters if p.dim() > 1], "weight_decay": DECAY},
                {"params": [p for p in parameters if p.dim() == 1]},  # biases and norms
            ],
            lr=rate,
        )

    def loss(self, model: nn.Module, rng: Random, batch: int) -> torch.Tensor:
        """See `Task.loss`."""
        return _loss(model, *self._draw(self._letters, rng, batch))

    def score(self, model: nn.Module) -> float:
        """See `Task.score`."""
        with torch.no_grad():
            return _loss(model, *self._held).item()


def _loss(model: nn.Module, rows: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
    logits = model(rows.masked_fill(hidden, MASK))
    # A batch of one may hide nothing: then its loss is 0, and so is its gradient.
    losses = functional.cross_entropy(logits[hidden], rows[hidden], reduction="sum")
    return losses / max(1, int(hidden.sum()))
