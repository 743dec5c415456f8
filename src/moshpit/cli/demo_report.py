"""What the demo found: the numbers, whether they hold, in words, as JSON and as a picture."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from math import isnan
from pathlib import Path
from typing import Any

import msgspec
import torch

from moshpit.cli.demo_messages import Done, Epoch, Step
from moshpit.cli.demo_model import CharTransformer, Corpus, load_weights, validation_loss
from moshpit.cli.parse import human_s
from moshpit.errors import ConfigError

LOSS_RATIO_MAX = 1.03
WAITING_SHARE_MAX = 0.02
STALL_S_MAX = 2.0  # guess: more than stall_s and a probe would mean that somebody waits


@dataclass
class PeerTrace:
    """All that one peer told, in order."""

    name: str
    peer: str = ""
    epochs: list[Epoch] = field(default_factory=list[Epoch])
    done: Done | None = None
    killed_at: float | None = None


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """The demo in numbers; the keys of ``--json``.

    Attributes:
        peers: how many there were.
        killed: the names of those that were killed on purpose.
        epochs: epochs that the survivors made.
        samples: of all peers together, and of the single process.
        initial_val_loss, final_val_loss, single_process_val_loss: in nats per character,
            over the held-out text: before, of the swarm, of one process on as many samples.
        rounds, rounds_partial, rounds_failed: of all survivors together.
        stall_s_after_kill: the longest stop of any survivor's training after the kill.
        longest_epoch_s_after_kill, median_epoch_s: how long epochs took.
        waiting_share: how much of a survivor's time its training stood still, in epochs that
            the kill did not touch; the worst survivor.
        max_param_diff: the largest difference between two survivors' final weights.
        bytes_sent: payload of all survivors.
        seconds: the whole demo; training_seconds: the swarm's part of it.
        failed_checks: what did not hold; empty if all is well.
    """

    peers: int
    killed: list[str]
    epochs: int
    samples: int
    initial_val_loss: float
    final_val_loss: float
    single_process_val_loss: float
    rounds: int
    rounds_partial: int
    rounds_failed: int
    stall_s_after_kill: float
    longest_epoch_s_after_kill: float
    median_epoch_s: float
    waiting_share: float
    max_param_diff: float
    bytes_sent: int
    training_seconds: float
    seconds: float
    failed_checks: list[str] = []


def undisturbed(epochs: Sequence[Epoch], killed_at: Sequence[float]) -> list[Epoch]:
    """Return the epochs during which nobody was killed and whose averaging was complete. The
    first one is left out too: it holds the start."""
    return [
        e
        for e in epochs[1:]
        if e.outcome == "complete" and not any(e.at - e.seconds <= k <= e.at for k in killed_at)
    ]


def waiting_share(trace: PeerTrace, killed_at: Sequence[float]) -> float:
    """Return the share of a peer's undisturbed time in which its training stood still."""
    counted = undisturbed(trace.epochs, killed_at)
    seconds = sum(e.seconds for e in counted)
    return sum(e.waited_s for e in counted) / seconds if seconds else 0.0


def max_difference(weights: Sequence[Mapping[str, torch.Tensor]]) -> float:
    """Return the largest absolute difference between any two peers' weights, for any number;
    NaN (which equals nothing) counts as infinitely different."""
    first, *others = weights
    worst = 0.0
    for other in others:
        if first.keys() != other.keys():
            return float("inf")
        for name, tensor in first.items():
            difference = (tensor.double() - other[name].double()).abs().max().item()
            worst = max(worst, float("inf") if isnan(difference) else difference)
    return worst


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """The numbers of `Result` that come from the weights and the traces."""

    initial_val_loss: float
    final_val_loss: float
    single_process_val_loss: float
    max_param_diff: float
    stall_s_after_kill: float
    longest_epoch_s_after_kill: float
    median_epoch_s: float
    waiting_share: float


def measure(
    survivors: Sequence[PeerTrace],
    killed: Sequence[PeerTrace],
    weights: Sequence[Path],
    single_weights: Path,
    data: Corpus,
) -> Measured:
    """Look at the final weights and at what the survivors told."""
    model = CharTransformer(data.characters)
    initial = validation_loss(model, data.held_out)
    final = [load_weights(path) for path in weights]
    model.load_state_dict(final[0])
    swarm = validation_loss(model, data.held_out)
    model.load_state_dict(load_weights(single_weights))
    single = validation_loss(model, data.held_out)
    kills = [k.killed_at for k in killed if k.killed_at is not None]
    first_kill = min(kills, default=float("inf"))
    after = [e for t in survivors for e in t.epochs if e.at >= first_kill]
    return Measured(
        initial_val_loss=initial,
        final_val_loss=swarm,
        single_process_val_loss=single,
        max_param_diff=max_difference(final),
        stall_s_after_kill=max((e.longest_wait_s for e in after), default=0.0),
        longest_epoch_s_after_kill=max((e.seconds for e in after), default=0.0),
        median_epoch_s=statistics.median(e.seconds for t in survivors for e in t.epochs),
        waiting_share=max(waiting_share(t, kills) for t in survivors),
    )


def failed_checks(result: Result, *, kill: int) -> list[str]:
    """Return what does not hold, one line each; empty if the demo shows what it claims."""
    ratio = result.final_val_loss / result.single_process_val_loss
    claims = [
        (
            len(result.killed) == kill,
            f"{len(result.killed)} peers were killed, not {kill}: the rest ended before it",
        ),
        (
            result.max_param_diff == 0.0,
            f"survivors' weights differ by up to {result.max_param_diff:.3g}; they must be equal",
        ),
        (result.rounds > 0, "nothing was averaged"),
        (result.rounds_failed == 0, f"{result.rounds_failed} rounds averaged nothing"),
        (
            result.final_val_loss < result.initial_val_loss,
            f"the loss did not fall: {result.initial_val_loss:.3f} to {result.final_val_loss:.3f}",
        ),
        (
            ratio <= LOSS_RATIO_MAX,
            f"the swarm's loss is {ratio:.3f} × the single process's; at most {LOSS_RATIO_MAX}",
        ),
        (
            result.waiting_share <= WAITING_SHARE_MAX,
            f"training stood still {result.waiting_share:.1%} of the time; at most "
            f"{WAITING_SHARE_MAX:.0%}",
        ),
        (
            result.stall_s_after_kill <= STALL_S_MAX,
            f"a survivor stood still for {result.stall_s_after_kill:.1f} s after the kill; at "
            f"most {STALL_S_MAX:.1f} s",
        ),
    ]
    return [words for holds, words in claims if not holds]


def summary(result: Result) -> str:
    """Return the result in words."""
    survivors = result.peers - len(result.killed)
    ratio = result.final_val_loss / result.single_process_val_loss
    lines = [
        f"{result.peers} peers trained together for {result.epochs} epochs, "
        f"{result.samples} samples in {human_s(result.training_seconds)}.",
    ]
    if result.killed:
        lines += [
            f"Killed halfway: {', '.join(result.killed)}. The {survivors} others went on: none of "
            f"them stood still for more than {human_s(result.stall_s_after_kill)} at a time.",
            f"Of {result.rounds} rounds at the survivors, {result.rounds_partial} missed some "
            f"contribution and {result.rounds_failed} failed.",
        ]
    same = "are the same, bit for bit" if result.max_param_diff == 0 else "differ"
    lines += [
        f"Waiting for the network took {result.waiting_share:.2%} of a peer's time at most.",
        f"The {survivors} peers' final weights {same}.",
        f"Loss on held-out text: {result.initial_val_loss:.3f} before, "
        f"{result.final_val_loss:.3f} after; one process alone on as many samples reaches "
        f"{result.single_process_val_loss:.3f} ({ratio:.3f} ×).",
    ]
    return "\n".join(lines)


def check_plot_path(path: Path | None) -> None:
    """Fail before two minutes of training rather than after it.

    Raises:
        ConfigError: the picture cannot be drawn, or cannot be written there.
    """
    if path is None:
        return
    try:
        import_module("matplotlib")
    except ImportError:
        raise ConfigError(
            "--plot needs matplotlib: pip install 'moshpit[demo]', or leave it out"
        ) from None
    if not path.resolve().parent.is_dir():
        raise ConfigError(f"--plot {path}: there is no folder {path.resolve().parent}")


def plot_losses(
    path: Path, traces: Sequence[PeerTrace], steps: Sequence[Step], result: Result
) -> None:
    """Draw the training losses over the samples that the whole swarm has seen."""
    import matplotlib

    matplotlib.use("Agg")
    pyplot: Any = import_module("matplotlib.pyplot")
    figure, axes = pyplot.subplots(figsize=(8, 5))
    axes.plot([s.samples for s in steps], [s.loss for s in steps], color="black", lw=2, alpha=0.6)
    axes.lines[-1].set_label("one process")
    for trace in traces:
        x = [_swarm_samples(traces, e.at) for e in trace.epochs]
        (line,) = axes.plot(x, [e.loss for e in trace.epochs], lw=1)
        label = f"{trace.name} ({trace.peer})"
        if trace.killed_at is not None and x:
            axes.plot(x[-1], trace.epochs[-1].loss, "x", ms=12, mew=3, color=line.get_color())
            label += ", killed"
        line.set_label(label)
    axes.axhline(result.final_val_loss, ls="--", lw=1, color="tab:green")
    axes.axhline(result.single_process_val_loss, ls=":", lw=1, color="black")
    axes.set_xlabel("samples seen by the whole swarm")
    axes.set_ylabel("training loss (nats per character)")
    axes.set_title(
        f"held-out loss: swarm {result.final_val_loss:.3f} (dashed), "
        f"one process {result.single_process_val_loss:.3f} (dotted)"
    )
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _swarm_samples(traces: Sequence[PeerTrace], at: float) -> float:
    """Return how many samples all peers together had seen at a time."""
    return sum(max((e.samples for e in t.epochs if e.at <= at), default=0.0) for t in traces)
