"""Runs of real processes under the faults of a seed; `make chaos SEED=...` repeats one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.real.namespaces import needs_namespaces

from .__main__ import run
from .controller import Training
from .report import figures, timeline
from .run import disturbed
from .schedule import BLACKOUT_RUN_S_MIN, Kind, Setup, draw
from .verdict import judge

SHORT = Setup(
    peers=4,
    seconds=13.0,
    first_s=1.0,
    calm_s=3.0,
    gap_s=1.2,
    kinds=(Kind.KILL, Kind.PAUSE, Kind.CUT, Kind.LOSS, Kind.RATE, Kind.DISK),
)
UNTRAINED = 4.63  # ln 103: what guessing costs


@needs_namespaces
def test_a_short_run(tmp_path: Path) -> None:
    record, loss = disturbed(6, SHORT, Training(samples=192.0), tmp_path / "run", print)
    print(*timeline(record), *figures(record), sep="\n")
    assert judge(record) == []
    assert loss < 0.6 * UNTRAINED


@pytest.mark.soak
@pytest.mark.timeout(900)
@needs_namespaces
@pytest.mark.parametrize("kind", list(Kind))
def test_a_kind_alone(kind: Kind, tmp_path: Path) -> None:
    seconds = BLACKOUT_RUN_S_MIN if kind is Kind.BLACKOUT else 40.0
    setup = Setup(4, seconds, first_s=2.0, calm_s=10.0, gap_s=5.0, kinds=(kind,))
    seed = next(seed for seed in range(100) if draw(seed, setup))
    record, _ = disturbed(seed, setup, Training(samples=192.0), tmp_path / "run", print)
    print(*timeline(record), *figures(record), sep="\n")
    assert {fault.kind for fault in record.faults} == {kind}
    assert judge(record) == []


@pytest.mark.soak
@pytest.mark.timeout(3600)
@needs_namespaces
@pytest.mark.parametrize(
    ("seed", "peers", "seconds", "strategy"),
    [
        (1, 8, 600.0, "local"),
        (2, 16, 600.0, "local"),
        (3, 8, 300.0, "gradients"),
        (4, 8, 300.0, "diloco"),
    ],
)
def test_a_long_run(seed: int, peers: int, seconds: float, strategy: str, tmp_path: Path) -> None:
    setup = Setup(peers, seconds)
    training = Training(samples=96.0 * peers, strategy=strategy)
    assert run(seed, setup, training, tmp_path, compare=True) == 0
