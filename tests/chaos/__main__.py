"""A chaos run: its schedule as it goes, its timeline, figures, and the verdict."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from tests.real.namespaces import why_not
from tests.real.script import STRATEGIES

from .controller import Training
from .report import figures, timeline
from .run import Losses, disturbed, undisturbed
from .schedule import Kind, Setup, draw, places
from .verdict import judge

SAMPLES_PER_PEER = 96.0  # an epoch of three seconds, at the default pace


def main() -> int:
    args = arguments()
    setup = Setup(
        peers=args.peers,
        seconds=args.seconds,
        first_s=min(10.0, 0.1 * args.seconds),
        calm_s=max(15.0, 0.1 * args.seconds) if args.calm is None else args.calm,
        gap_s=args.gap,
        kinds=tuple(Kind(k) for k in args.kinds.split(",")) if args.kinds else tuple(Kind),
    )
    if args.show:
        show(args.seed, setup)
        return 0
    if why_not():
        print(f"not here: {why_not()}", file=sys.stderr)
        return 2
    samples = args.samples or args.peers * SAMPLES_PER_PEER
    training = Training(samples, args.batch, args.pace, args.lr, args.strategy)
    with tempfile.TemporaryDirectory(prefix="moshpit-chaos-") as made:
        folder = Path(made) if args.keep is None else args.keep
        return run(args.seed, setup, training, folder, compare=not args.alone)


def run(seed: int, setup: Setup, training: Training, folder: Path, *, compare: bool) -> int:
    started = time.monotonic()

    def tell(words: str) -> None:
        print(f"{time.monotonic() - started:7.1f}  {words}", flush=True)

    print(f"seed {seed}: {setup.peers} peers, {setup.seconds:.0f} s, {training.strategy}")
    record, loss = disturbed(seed, setup, training, folder / "disturbed", tell)
    print("", *timeline(record), "", *figures(record), sep="\n")
    wrong = judge(record)
    if compare:
        print("\nthe same without faults:")
        place = folder / "undisturbed"
        quiet, quiet_loss = undisturbed(record, setup.peers, training, place, tell)
        wrong += [f"undisturbed: {words}" for words in judge(quiet)]
        losses = Losses(loss, quiet_loss)
        wrong += losses.wrong()
        print(
            f"validation loss {losses.disturbed:.4f}; undisturbed {losses.undisturbed:.4f} "
            f"({losses.more:+.1%})"
        )
    print("")
    for words in wrong:
        print(f"RED: {words}")
    if not wrong:
        print("All of it holds.")
    return 1 if wrong else 0


def show(seed: int, setup: Setup) -> None:
    print("places: " + ", ".join(f"p{n} {p}" for n, p in enumerate(places(seed, setup))))
    for fault in draw(seed, setup):
        print(f"{fault.at_s:7.1f}  {fault}")


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__)
    parser.add_argument("--seed", type=int, default=1, help="chooses the faults")
    parser.add_argument("--peers", type=int, default=8, help="from the start; a quarter more join")
    parser.add_argument("--seconds", type=float, default=600.0, help="with the calm at the end")
    parser.add_argument("--calm", type=float, help="seconds without faults at the end")
    parser.add_argument("--gap", type=float, default=7.0, help="mean seconds between two faults")
    parser.add_argument("--kinds", default="", help="only these, with commas between them")
    parser.add_argument("--strategy", default="local", choices=STRATEGIES)
    parser.add_argument("--samples", type=float, help="of an epoch, all together")
    parser.add_argument("--batch", type=int, default=8, help="samples of a step")
    parser.add_argument("--pace", type=float, default=4.0, help="steps a second of each peer")
    parser.add_argument("--lr", type=float, default=0.1, help="learning rate")
    parser.add_argument("--alone", action="store_true", help="no undisturbed run beside it")
    parser.add_argument("--keep", type=Path, help="write logs and checkpoints there, and keep them")
    parser.add_argument("--show", action="store_true", help="only print the schedule")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
