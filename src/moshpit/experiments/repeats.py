"""Many runs with other seeds: side by side on the machine's processors, and what they say together.

Every run has a processor to itself, so it takes as long as if it were alone; its results do not
depend on that, since its time is virtual.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Final, TypeVar

P = TypeVar("P")
R = TypeVar("R")

_log: Final = logging.getLogger("moshpit")

# Student's t, 97.5 %, by degrees of freedom from 1 on; beyond, the normal value is close enough.
_T_975: Final = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
)  # fmt: skip
_NORMAL_975: Final = 1.96


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over runs, and where the true one lies with 95 % confidence.

    Attributes:
        mean: of what was measured.
        low, high: the interval; infinite both ways for a single run.
        runs: how many.
    """

    mean: float
    low: float
    high: float
    runs: int


def mean_of(values: Sequence[float]) -> Estimate:
    """Return the mean with Student's interval.

    Example:
        >>> e = mean_of([1.0, 2.0, 3.0])
        >>> round(e.mean, 2), round(e.low, 2), round(e.high, 2)
        (2.0, -0.48, 4.48)
    """
    runs, mean = len(values), fmean(values)
    if runs == 1:
        return Estimate(mean, -math.inf, math.inf, 1)
    t = _T_975[runs - 2] if runs - 2 < len(_T_975) else _NORMAL_975
    half = t * stdev(values) / math.sqrt(runs)
    return Estimate(mean, mean - half, mean + half, runs)


def ratio_of(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """Return the ratio of two positive quantities that were measured in pairs: the geometric mean
    of the pairs' ratios, with Student's interval of their logarithms.

    Example:
        >>> e = ratio_of([2.0, 6.0, 5.0], [1.0, 3.0, 2.5])
        >>> round(e.mean, 6), round(e.low, 6), round(e.high, 6)
        (2.0, 2.0, 2.0)
    """
    logs = mean_of([math.log(a / b) for a, b in zip(above, below, strict=True)])
    return Estimate(math.exp(logs.mean), math.exp(logs.low), _exp(logs.high), logs.runs)


def _exp(value: float) -> float:
    return math.inf if value == math.inf else math.exp(value)


def run_all(
    run: Callable[[P], R], plans: Sequence[P], jobs: int, told: Callable[[P, R], object]
) -> list[R]:
    """Run each plan, ``jobs`` at a time, each in a process of its own if that is more than one.

    Args:
        run: a function of a module, so that other processes find it.
        plans: what each run is given.
        jobs: how many at a time. What simulated peers log is nobody's news: it is dropped.
        told: called here with every plan and its result, in the order of the plans.

    Raises:
        Whatever a run raises.
    """
    results: list[R] = []
    if jobs <= 1 or len(plans) <= 1:
        for plan in plans:
            with _hushed():
                results.append(run(plan))
            told(plan, results[-1])
        return results
    # Not forked: torch's threads would not be there.
    context = multiprocessing.get_context("spawn")
    workers = min(jobs, len(plans))
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_hush) as pool:
        for plan, result in zip(plans, pool.map(run, plans), strict=True):
            results.append(result)
            told(plan, result)
    return results


def _hush() -> None:
    _log.setLevel(logging.CRITICAL)


@contextlib.contextmanager
def _hushed() -> Generator[None]:
    before = _log.level
    _hush()
    try:
        yield
    finally:
        _log.setLevel(before)
