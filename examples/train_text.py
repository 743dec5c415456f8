"""A plain PyTorch script that trains with a swarm. The lines that Moshpit adds are marked.

It learns to continue Python's own manual, one character at a time. Try it by itself:

    python examples/train_text.py --alone

or with as many processes or machines as you like, each of them started as

    moshpit run --ticket $TICKET examples/train_text.py
"""

from __future__ import annotations

import argparse
import pydoc_data.topics

import torch
from torch import nn
from torch.nn import functional as F

import moshpit  # Moshpit
from moshpit.identity.tickets import RunKey  # only for --alone

CONTEXT = 64


class Model(nn.Module):
    def __init__(self, characters: int, width: int = 96) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, characters)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.gru(self.embed(tokens))
        return self.head(hidden)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small character model in a swarm.")
    parser.add_argument("--alone", action="store_true", help="make a run of one's own")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--samples-per-epoch", type=int, default=1024)
    parser.add_argument("--batch-size", type=int, default=32)
    options = parser.parse_args()

    text = "".join(pydoc_data.topics.topics[name] for name in sorted(pydoc_data.topics.topics))
    alphabet = {c: i for i, c in enumerate(sorted(set(text)))}
    data = torch.tensor([alphabet[c] for c in text])

    torch.manual_seed(0)  # all peers begin with the same weights ...
    model = Model(len(alphabet))
    torch.seed()  # ... and see different data
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    ticket = RunKey.generate().invite().ticket(()).encode() if options.alone else None
    swarm = moshpit.join(ticket)  # Moshpit
    strategy = moshpit.LocalSGD(samples_per_epoch=options.samples_per_epoch)  # Moshpit
    optimizer = moshpit.Optimizer(optimizer, swarm, strategy=strategy)  # Moshpit

    epoch, losses = 0, []
    while optimizer.epoch < options.epochs:
        starts = torch.randint(len(data) - CONTEXT, (options.batch_size, 1))
        windows = data[starts + torch.arange(CONTEXT + 1)]
        logits = model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if optimizer.epoch != epoch:
            epoch = optimizer.epoch
            print(f"epoch {epoch}: loss {sum(losses) / len(losses):.3f}", flush=True)
            losses.clear()

    optimizer.finish()  # Moshpit: everybody ends with the same weights
    total = sum(p.double().sum().item() for p in model.parameters())
    print(f"done; the weights' sum is {total:.12g}", flush=True)
    swarm.close()  # Moshpit


if __name__ == "__main__":
    main()
