"""What each codec costs and loses: `python -m benchmarks.codecs`, with `--write` into the docs.

Data: normal numbers, and the gradients of the demo's small transformer over twenty steps of
training. Speed is measured in CPU seconds of one thread, on chunks of 512 KB out of 8 MB, codecs
and a plain copy in turn; the best of the turns counts, since others may use the machine.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import torch

from moshpit.cli.demo_model import Batches, CharTransformer, corpus, loss_of
from moshpit.tensors.codecs import CODECS, Codec, ErrorFeedback
from moshpit.tensors.powersgd import PowerSGD

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "codecs.md"
CHUNK = 131072
CHUNKS = 16
ROUNDS = 20
RANKS = (1, 2, 4, 8)


@dataclass(frozen=True)
class Training:
    """The gradients of some steps: each (numel,), and the shapes of the parameters."""

    gradients: list[torch.Tensor]
    shapes: list[torch.Size]


def training(steps: int, warm_up: int = 30) -> Training:
    """Train the demo's model for a while, then keep the gradients of so many steps."""
    text = corpus()
    model = CharTransformer(text.characters)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    batches = Batches(text.train, seed=0)
    gradients: list[torch.Tensor] = []
    for step in range(warm_up + steps):
        optimizer.zero_grad()
        loss_of(model, *batches.draw(16)).backward()
        if step >= warm_up:
            gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        optimizer.step()
    return Training(gradients, [p.shape for p in model.parameters()])


def chunks_of(vector: torch.Tensor) -> Iterator[slice]:
    for start in range(0, vector.numel(), CHUNK):
        yield slice(start, min(start + CHUNK, vector.numel()))


def through(codec: Codec, vector: torch.Tensor) -> torch.Tensor:
    """Return a vector as it arrives, chunk by chunk."""
    return torch.cat([codec.decode(codec.encode(vector[place])) for place in chunks_of(vector)])


def error(got: torch.Tensor, expected: torch.Tensor) -> float:
    return ((got - expected).norm() / expected.norm()).item()


def kept(codec: Codec, vectors: list[torch.Tensor]) -> torch.Tensor:
    """Return the sum of what arrives of some vectors, with error feedback."""
    feedback, total = ErrorFeedback(vectors[0].numel()), torch.zeros_like(vectors[0])
    for vector in vectors:
        for place in chunks_of(vector):
            total[place] += codec.decode(feedback.encode(codec, place, vector[place]))
        feedback.commit()
    return total


# --- speed ------------------------------------------------------------------------------------


def speeds(turns: int) -> dict[str, tuple[float, float]]:
    """Return GB of float32 a CPU second, encoding and decoding, by codec; and of a copy."""
    random = torch.Generator().manual_seed(1)
    sources = [torch.randn(CHUNK, generator=random) for _ in range(CHUNKS)]
    into = [torch.empty(CHUNK) for _ in range(CHUNKS)]

    def copy() -> None:
        for source, destination in zip(sources, into, strict=True):
            destination.copy_(source)

    work: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {"a copy": (copy, copy)}
    for codec in CODECS.values():
        payloads = [bytearray(codec.encode(source)) for source in sources]

        def encode(codec: Codec = codec) -> None:
            for source in sources:
                codec.encode(source)

        def decode(codec: Codec = codec, payloads: list[bytearray] = payloads) -> None:
            for payload, destination in zip(payloads, into, strict=True):
                codec.decode_into(payload, destination)

        work[codec.name] = (encode, decode)
    best = {name: [float("inf"), float("inf")] for name in work}
    for _ in range(turns):
        for name, pair in work.items():
            for index, call in enumerate(pair):
                began = time.thread_time()
                call()
                best[name][index] = min(best[name][index], time.thread_time() - began)
    volume = CHUNKS * CHUNK * 4 / 1e9
    return {name: (volume / encode, volume / decode) for name, (encode, decode) in best.items()}


# --- the page ---------------------------------------------------------------------------------


def percent(share: float) -> str:
    return "0" if share == 0 else f"{100 * share:.2g} %"


def sizes_table() -> str:
    """What follows from the formats alone; a test holds the page against it."""
    lines = [
        "| codec | number | bytes per number | smaller by | needs feedback | only for differences "
        "| results in |\n|---|---|---|---|---|---|---|\n"
    ]
    for codec in CODECS.values():
        size = codec.encoded_bytes(CHUNK) / CHUNK
        flags = " | ".join("yes" if f else "" for f in (codec.biased, codec.differences_only))
        lines.append(
            f"| `{codec.name}` | {codec.number} | {size:.3f} | {4 / size:.2f} | {flags} "
            f"| `{codec.result_codec.name}` |\n"
        )
    return "".join(lines)


def errors_table(data: Training) -> str:
    normal = torch.randn(4 * CHUNK, generator=torch.Generator().manual_seed(2))
    total = torch.stack(data.gradients).sum(0)
    lines = [
        f"| codec | normal numbers | a gradient | sum of {ROUNDS} gradients, without feedback "
        "| with feedback |\n|---|---|---|---|---|\n"
    ]
    for codec in CODECS.values():
        bare = torch.stack([through(codec, gradient) for gradient in data.gradients]).sum(0)
        figures = (
            error(through(codec, normal), normal),
            error(through(codec, data.gradients[0]), data.gradients[0]),
            error(bare, total),
            error(kept(codec, data.gradients), total),
        )
        lines.append(f"| `{codec.name}` | {' | '.join(map(percent, figures))} |\n")
    return "".join(lines)


def powersgd_table(data: Training) -> str:
    total = torch.stack(data.gradients).sum(0)
    lines = [
        f"| rank | bytes per number | smaller by | a gradient | sum of {ROUNDS} gradients, with "
        "feedback | CPU s per GB |\n|---|---|---|---|---|---|\n"
    ]
    for rank in RANKS:
        power = PowerSGD(data.shapes, rank)
        sent: list[torch.Tensor] = []
        began = time.thread_time()
        for gradient in data.gradients:
            sent.append(power.decompress(power.compress_q(power.compress_p(gradient))))
        cost = (time.thread_time() - began) / (ROUNDS * power.numel * 4 / 1e9)
        size = 4 * (power.p_numel + power.q_numel) / power.numel
        figures = map(
            percent, (error(sent[0], data.gradients[0]), error(torch.stack(sent).sum(0), total))
        )
        lines.append(
            f"| {rank} | {size:.3f} | {4 / size:.1f} | {' | '.join(figures)} | {cost:.1f} |\n"
        )
    return "".join(lines)


def speeds_table(measured: dict[str, tuple[float, float]]) -> str:
    lines = ["| codec | encode GB/s | decode GB/s |\n|---|---|---|\n"]
    for name, pair in measured.items():
        shown = name if name == "a copy" else f"`{name}`"
        figures = ("no work" if s > 100 else f"{s:.1f}" for s in pair)
        lines.append(f"| {shown} | {' | '.join(figures)} |\n")
    return "".join(lines)


def page(turns: int) -> str:
    """Measure everything and return the page."""
    data = training(ROUNDS)
    numel = data.gradients[0].numel()
    return f"""\
<!-- Made by benchmarks/codecs.py. Repeat it with `python -m benchmarks.codecs --write`. -->

# Codecs

How the numbers of a chunk are written on the wire. Each is one entry of the registry in
`moshpit.tensors.codecs`; `codec_named("int8")` finds it.

{sizes_table()}
- *Smaller by*: than float32, in a chunk of {CHUNK} numbers, everything counted.
- *Needs feedback*: numbers that are small beside their neighbours are lost in every round; with
  `ErrorFeedback` they are sent later instead.
- *Only for differences*: for gradients and differences of parameters. In parameters it would erase
  what a few steps change.
- *Results in*: how the means of what came in this codec are sent. A mean of sparse contributions is
  dense.

`bfp` and `bfp16` are block floating point with blocks of 64 and 16 numbers, `int8` and `int4` have
blocks of 64 and 32, `topk` and `topk64` send one number of 16 and of 64.

## What they lose

Relative errors, ‖got - meant‖ / ‖meant‖. The gradients are those of the demo's transformer
({numel} parameters) in {ROUNDS} successive steps of training.

{errors_table(data)}
## What they cost

GB of float32 a CPU second of one thread, on chunks of 512 KB; beside them, in the same run, a plain
copy. `float32` is sent from the memory that it is in, and received by one copy.

{speeds_table(speeds(turns))}
## PowerSGD

It works on whole matrices and not on chunks, so it is no codec: `moshpit.tensors.powersgd` makes
two vectors that are averaged one after the other, in any codec. Sizes are those in float32; at rank
1 and 2 the small tensors that travel as they are weigh most in so small a model.

{powersgd_table(data)}
Measured {date.today().isoformat()} on {os.cpu_count()} cores, one thread, torch \
{torch.__version__.partition("+")[0]}.
"""


def main() -> None:
    """Measure, and print the page or write it."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead")
    parser.add_argument("--turns", type=int, default=20)
    args = parser.parse_args()
    torch.set_num_threads(1)
    text = page(args.turns)
    if args.write:
        PAGE.write_text(text, encoding="utf-8")
    else:
        print(text)


if __name__ == "__main__":
    main()
