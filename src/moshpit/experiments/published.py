"""The table of the released averaging experiment, and the same numbers computed here.

The released program seeds numpy's old generator with 0 to 9 and draws from it the values, then in
each round who lives and, for random groups, the shuffle. numpy still draws the same numbers from
such a seed, so those columns can be compared digit by digit. Only the placement on the paper's
grid was drawn without a seed, once for all ten runs: there, the whole experiment is repeated with
many placements, and the published number must be one of those to be expected.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from moshpit.experiments.repeats import run_all
from moshpit.experiments.section import Nature, Table
from moshpit.sim.averaging import Method, RandomGroups, Spreads, run_once
from moshpit.sim.rivals import AllReduce, Gossip, PaperGrid, ReleasedSGP

GROUP_SIZE, DIMS, ROUNDS_MAX, SEEDS = 32, 2, 50, 10
FINE, COARSE = 1e-9, 1e-4
ROUNDED = 0.05  # the published numbers have one decimal
TOLERANCE = 0.15  # rounds, for what is deterministic
ERRORS_MAX = 2.0  # standard errors, for what is placed at random

ALGORITHMS = ("All-Reduce", "Gossip", "SGP (released)", "Random groups", "Paper's grid")
"""The columns of the table."""

# paper §4.1, by (N, p): rounds until the variance is below 1e-9, and below 1e-4 where it is known.
PUBLISHED: dict[tuple[int, float], tuple[tuple[float, float | None], ...]] = {
    (512, 0.0): ((1.0, None), (50, None), (47.6, 15.6), (6.1, 3.0), (8.2, 3.6)),
    (512, 0.005): ((10.9, None), (50, None), (47.8, 15.6), (6.3, 3.0), (8.8, 3.9)),
    (768, 0.0): ((1.0, None), (50, None), (43.2, 13.8), (6.2, 3.0), (6.0, 3.0)),
    (768, 0.001): ((1.8, None), (50, None), (43.2, 13.8), (6.5, 3.0), (6.0, 3.0)),
    (768, 0.005): ((28.7, None), (50, None), (43.2, 14.1), (6.6, 3.0), (6.6, 3.0)),
    (900, 0.0): ((1.0, None), (50, None), (45.0, 14.7), (6.4, 3.0), (5.0, 2.9)),
    (900, 0.01): ((50, None), (50, None), (45.6, 14.9), (7.0, 3.1), (6.5, 3.0)),
}


@dataclass(frozen=True, slots=True)
class Replayed:
    """One cell of the table, computed here.

    Attributes:
        mean: rounds, the mean over the ten seeds (and over the placements).
        error: the standard deviation of such a mean of ten seeds from placement to placement; 0
            where nothing is drawn without a seed.
        placements: how many were drawn.
    """

    mean: float
    error: float
    placements: int

    def agrees(self, published: float) -> bool:
        """Say whether the published number is one that this experiment gives."""
        if not self.error:
            return abs(self.mean - published) <= TOLERANCE
        error = self.error * np.sqrt(1 + 1 / self.placements)
        return bool(abs(self.mean - published) <= ERRORS_MAX * error + ROUNDED)


def replay(n: int, death: float, algorithm: str, placements: int) -> tuple[Replayed, Replayed]:
    """Run the released experiment; returns the rounds until 1e-9 and until 1e-4.

    Args:
        n: N.
        death: p.
        algorithm: one of `ALGORITHMS`.
        placements: how many placements on the grid; at least 2.
    """
    makers: dict[str, Callable[[np.random.RandomState], Method]] = {
        "All-Reduce": lambda _: AllReduce(),
        "Gossip": lambda _: Gossip(),
        "SGP (released)": lambda _: ReleasedSGP(n),
        "Random groups": lambda dice: RandomGroups(GROUP_SIZE, dice),
    }
    if algorithm in makers:
        runs = [_ten_seeds(n, death, makers[algorithm])]
    else:
        runs = [
            _ten_seeds(
                n, death,
                lambda _, number=number: PaperGrid(
                    n, GROUP_SIZE, DIMS, np.random.default_rng((number, n))
                ),
            )
            for number in range(placements)
        ]  # fmt: skip
    fine, coarse = (
        _summary([run.rounds_until(threshold).mean() for run in runs])
        for threshold in (FINE, COARSE)
    )
    return fine, coarse


def _ten_seeds(n: int, death: float, make: Callable[[np.random.RandomState], Method]) -> Spreads:
    each: list[np.ndarray] = []
    for seed in range(SEEDS):
        dice = np.random.RandomState(seed)
        each.append(run_once(make(dice), dice, n=n, death=death, rounds=ROUNDS_MAX))
    return Spreads(np.array(each))


def _summary(means: list[float]) -> Replayed:
    error = float(np.std(means, ddof=1)) if len(means) > 1 else 0.0
    return Replayed(float(np.mean(means)), error, len(means))


def _replay(cell: tuple[int, float, str, int]) -> tuple[Replayed, Replayed]:
    return replay(*cell)


def published_table(placements: int, jobs: int = 1) -> Table:
    """Compute the whole table and set it beside the published one.

    Args:
        placements: on the grid, as of `replay`.
        jobs: how many processes compute at a time.
    """
    rows: list[tuple[str, ...]] = []
    marked: list[tuple[int, int]] = []
    asked = [(*setting, name, placements) for setting in PUBLISHED for name in ALGORITHMS]
    replayed = iter(run_all(_replay, asked, jobs, lambda _cell, _found: None))
    for (n, death), cells in PUBLISHED.items():
        row = [str(n), f"{death:g}"]
        for fine, coarse in cells:
            ours = next(replayed)
            wanted = [(fine, ours[0])] + ([(coarse, ours[1])] if coarse is not None else [])
            if not all(found.agrees(value) for value, found in wanted):
                marked.append((len(rows), len(row)))
            row.append(f"{_said([v for v, _ in wanted])}\n{_found([f for _, f in wanted])}")
        rows.append(tuple(row))
    count = len(rows) * len(ALGORITHMS)
    return Table(
        title="The paper's table: published, and below it computed here",
        head=("N", "p", *ALGORITHMS),
        rows=tuple(rows),
        text=(
            "Rounds until the variance is below 1e-9, in brackets below 1e-4; 50 is the limit. "
            "M = 32, two axes, ten seeds. The first four columns use the released experiment's own "
            "seeds, so they must agree to the last digit; the placement on the paper's grid was "
            f"drawn without one, so there the mean over {placements} placements stands with the "
            f"standard deviation from one to another. {count - len(marked)} of {count} cells agree."
        ),
        natures=(Nature.QUOTED, Nature.REAL),
        marked=frozenset(marked),
    )


def _said(values: list[float | None]) -> str:
    first, *rest = (f"{value:.1f}" for value in values if value is not None)
    return f"{first} ({rest[0]})" if rest else first


def _found(cells: list[Replayed]) -> str:
    first, *rest = (
        f"{c.mean:.1f} ± {c.error:.1f}" if c.placements > 1 else f"{c.mean:.1f}" for c in cells
    )
    return f"{first} ({rest[0]})" if rest else first
