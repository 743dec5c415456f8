"""A disturbed run, an undisturbed one to the same epoch, and how their losses compare."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from moshpit.cli.demo_model import CharTransformer, corpus, load_weights, validation_loss

from .controller import Training, chaos
from .record import Record
from .schedule import Setup, draw, places

LOSS_MORE_MAX = 0.03  # above the undisturbed run's, at equal samples

Tell = Callable[[str], None]


@dataclass(frozen=True)
class Losses:
    """On the held-out text, in nats per character."""

    disturbed: float
    undisturbed: float

    @property
    def more(self) -> float:
        """By which share the disturbed run's is above the other's."""
        return self.disturbed / self.undisturbed - 1

    def wrong(self) -> list[str]:
        """Return what is wrong with that."""
        if self.more <= LOSS_MORE_MAX:
            return []
        return [
            f"validation loss {self.disturbed:.4f}, {self.more:.1%} above that of the "
            f"undisturbed run ({self.undisturbed:.4f})"
        ]


def disturbed(
    seed: int, setup: Setup, training: Training, folder: Path, tell: Tell
) -> tuple[Record, float]:
    """Run with the faults of a seed; returns what happened, and the validation loss."""
    with chaos(folder, training, seed, tell) as run:
        record = run.run(places(seed, setup), setup.peers, draw(seed, setup), setup.seconds)
    record.spread = spread_in(folder)
    return record, loss_in(folder)


def undisturbed(
    like: Record, peers: int, training: Training, folder: Path, tell: Tell
) -> tuple[Record, float]:
    """Run without faults and as fast as it goes, up to the epoch that another run came to."""
    with chaos(folder, replace(training, pace=0.0), 0, tell) as run:
        record = run.run_undisturbed(peers, max(life.epoch for life in like.last_lives))
    record.spread = spread_in(folder)
    return record, loss_in(folder)


def spread_in(folder: Path) -> float:
    """Return by how much any number in the weights that a run's peers have written differs most."""
    written = [load_weights(path) for path in sorted(folder.glob("p*/weights"))]
    apart = [
        (weights[name] - tensor).abs().max().item()
        for weights in written[1:]
        for name, tensor in written[0].items()
    ]
    return max(apart, default=0.0)


def loss_in(folder: Path) -> float:
    """Return the validation loss of the weights that a run's peers have written; infinite if
    nobody has come so far."""
    written = sorted(folder.glob("p*/weights"))
    if not written:
        return float("inf")
    data = corpus()
    model = CharTransformer(data.characters)
    model.load_state_dict(load_weights(written[0]))
    return validation_loss(model, data.held_out)
