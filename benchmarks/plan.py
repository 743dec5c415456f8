"""Does `moshpit plan` tell the truth? Predicted against measured time of one averaging.

For each case real peers average over shaped links, each in a network namespace of its own
(`moshpit bench averaging --link-mbit`, so this needs root), and the plan's cost model predicts
the same. Median of the measured rounds; the ratio is measured by predicted.

    python -m benchmarks.plan --rounds 5 --json out.json

Prints a table in Markdown; `load` is the machine's load average before each case, since on a
busy machine the cores and not the links decide. Exit status 1: some case failed, or is off by
more than 20 %.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path

from moshpit.planning.codecs import codec_named
from moshpit.planning.swarm import PlannedPeer, PlannedSwarm
from moshpit.planning.wire import Costs, averaging_cost

TOLERANCE = 0.2
BYTES_PER_MBIT = 1e6 / 8


@dataclass(frozen=True)
class Case:
    """One swarm and one vector."""

    mbit: tuple[float, ...]
    mb: int
    group_size: int
    schedule: str = "grid"
    codec: str = "float32"

    @property
    def name(self) -> str:
        """For the table."""
        speeds = {f"{speed:g}": self.mbit.count(speed) for speed in self.mbit}
        links = ", ".join(f"{count} × {speed}" for speed, count in speeds.items())
        groups = "one group"
        if self.group_size < len(self.mbit):
            groups = f"{self.schedule} of {self.group_size}"
        return f"{links} Mbit/s; {self.mb} MB; {groups}; {self.codec}"

    @property
    def numel(self) -> int:
        """Numbers in the vector; the benchmark's MB are binary."""
        return self.mb * (1 << 20) // 4


CASES = (
    Case((100.0,) * 4, 16, 4),
    Case((100.0,) * 8, 16, 8),
    Case((500.0,) * 4, 64, 4),
    Case((500.0,) * 8, 64, 8),
    Case((1000.0, 500.0, 200.0, 100.0), 16, 4),
    Case((500.0,) * 2 + (100.0,) * 6, 16, 8),
    Case((100.0,) * 9, 16, 3),
    Case((100.0,) * 9, 16, 3, schedule="torus"),
    Case((100.0,) * 4, 32, 4, codec="int8"),
    Case((100.0,) * 4, 32, 4, codec="topk"),
)


def predict(case: Case) -> float:
    """Return the seconds that the plan says. All peers share this machine's cores."""
    peers = tuple(PlannedPeer(m * BYTES_PER_MBIT, m * BYTES_PER_MBIT) for m in case.mbit)
    costs = Costs(cores=min(1.0, (os.cpu_count() or 1) / len(peers)))
    found = averaging_cost(
        PlannedSwarm(peers),
        case.numel,
        codec_named(case.codec),
        case.schedule,
        group_size=case.group_size,
        costs=costs,
    )
    return found.seconds


def measure(case: Case, rounds: int, folder: Path) -> dict[str, float] | None:
    """Run the peers; return the median of their rounds, and what they sent; None if it failed."""
    path = folder / "measured.json"
    command = [
        sys.executable, "-m", "moshpit", "bench", "averaging",
        "--peers", str(len(case.mbit)),
        "--group-size", str(case.group_size),
        "--mb", str(case.mb),
        "--codec", case.codec,
        "--schedule", case.schedule,
        "--link-mbit", ",".join(f"{speed:g}" for speed in case.mbit),
        "--rounds", str(rounds),
        "--json", str(path),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"{' '.join(command[2:])} failed:\n{done.stderr}", file=sys.stderr)
        return None
    result = json.loads(path.read_text())
    moshpit = result["engines"]["moshpit"]
    return {
        "median_s": moshpit["seconds"]["median"],
        "cpu_s": moshpit["cpu_s"],
        "sent_copies": moshpit["sent_copies"],
        "load_before": result["machine"]["load_before"],
    }


def main() -> None:
    """Run the cases one after the other."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", type=int, nargs="*", help="numbers of cases, from 0")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    chosen = [CASES[number] for number in args.only] if args.only else CASES
    rows: list[dict[str, object]] = []
    off = 0
    print("| links, vector, groups, codec | predicted | measured | ratio | load |")
    print("|---|---|---|---|---|")
    for case in chosen:
        predicted = predict(case)
        with tempfile.TemporaryDirectory() as folder:
            measured = measure(case, args.rounds, Path(folder))
        if measured is None:
            off += 1
            print(f"| {case.name} | {predicted:.2f} s | failed | | |", flush=True)
            continue
        ratio = measured["median_s"] / predicted
        off += abs(ratio - 1) > TOLERANCE
        rows.append({**asdict(case), "predicted_s": predicted, **measured, "ratio": ratio})
        seconds = f"{predicted:.2f} s | {measured['median_s']:.2f} s"
        print(
            f"| {case.name} | {seconds} | {ratio:.2f} | {measured['load_before']:.0f} |", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=2) + "\n")
    raise SystemExit(1 if off else 0)


if __name__ == "__main__":
    main()
