"""Who reduces how much of the vector: parts by bandwidth (paper.md §3).

Member i of a group of M sends its slices to the other reducers and the mean of its part w_i
to everybody, (1 - w_i) + (M - 1) w_i of the vector, and receives as much. So the round takes
ξ = max over reducers of (1 + (M - 2) w_i) / b_i; the parts minimise it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ALIKE = 1.25  # guess: bandwidths measured this close to each other are taken as equal
_RATIO_MAX = 1e9  # guess: bandwidths further apart than this count as this far apart


def known(bandwidths: Sequence[float]) -> list[float]:
    """Return the bandwidths with the unknown ones (0, or no number) set to the known ones' mean.

    All are 1 where none is known.

    >>> known([4.0, 0.0, 2.0])
    [4.0, 3.0, 2.0]
    """
    largest = max((b for b in bandwidths if math.isfinite(b) and b > 0), default=0.0)
    if not largest:
        return [1.0] * len(bandwidths)
    scaled = [b / largest if math.isfinite(b) and b > 0 else 0.0 for b in bandwidths]
    seen = [b for b in scaled if b]
    mean = sum(seen) / len(seen) if seen else 1.0
    return [max(b or mean, 1 / _RATIO_MAX) * largest for b in scaled]


def levelled(bandwidths: Sequence[float]) -> list[float]:
    """Return the bandwidths, with the mean in place of those that hardly differ.

    Equal links are never measured as equal, and `fractions` makes much of small differences: of
    four members, two with 25 % more get nearly twice the part. Unknown ones (0) stay unknown.

    >>> levelled([94.0, 101.0, 0.0, 20.0])
    [97.5, 97.5, 0.0, 20.0]
    """
    result = list(bandwidths)
    order = [i for i, b in enumerate(bandwidths) if math.isfinite(b) and b > 0]
    order.sort(key=lambda i: bandwidths[i])
    while order:
        slowest = bandwidths[order[0]]
        alike = [i for i in order if bandwidths[i] / ALIKE <= slowest]
        mean = sum(bandwidths[i] for i in alike) / len(alike)
        for i in alike:
            result[i] = mean
        order = order[len(alike) :]
    return result


def fractions(bandwidths: Sequence[float], reduces: Sequence[bool]) -> list[float] | None:
    """Return each member's fraction of the vector, the fastest split (paper.md §3).

    ξ* = max(1 / min b, (M - 2 + R) / Σ b) over the R reducers, which is the paper's closed form
    when all M reduce; w_i ∝ max(0, ξ* b_i - 1).

    Args:
        bandwidths: bytes per second of each member, min(up, down); 0 is unknown.
        reduces: whether each member can be dialled and so reduce; the others get 0.

    Returns:
        M numbers ≥ 0 that sum to 1; None where nobody of two or more reduces.

    >>> fractions([3.0, 1.0], [True, True])
    [0.75, 0.25]
    """
    size = len(bandwidths)
    if size == 1:
        return [1.0]
    able = [seat for seat in range(size) if reduces[seat]]
    if not able:
        return None
    speeds = known([bandwidths[seat] for seat in able])
    fastest = max(speeds)
    speeds = [speed / fastest for speed in speeds]
    shares = speeds
    if size > 2:
        xi = max(1 / min(speeds), (size - 2 + len(able)) / sum(speeds))
        shares = [max(0.0, xi * speed - 1) for speed in speeds]
    total = sum(shares)
    if not total > 0:
        shares, total = [1.0] * len(able), float(len(able))
    result = [0.0] * size
    for seat, share in zip(able, shares, strict=True):
        result[seat] = share / total
    return result


def seconds(
    bandwidths: Sequence[float], parts: Sequence[float], vector_bytes: float, floor: float
) -> float:
    """Return how long a round should take: its slowest member's bytes by its bandwidth.

    ``floor`` is the bandwidth assumed where nothing is known; nobody counts as slower than a
    hundredth of it, so that no claim can stretch a round without bound.
    """
    size = len(bandwidths)
    if not any(math.isfinite(b) and b > 0 for b in bandwidths):
        bandwidths = [floor] * size
    return max(
        (1 + max(0, size - 2) * part) * vector_bytes / max(speed, floor / 100)
        for part, speed in zip(parts, known(bandwidths), strict=True)
    )


def bounds(parts: Sequence[float], chunks: int) -> tuple[int, ...]:
    """Cut ``chunks`` chunks into parts near these fractions, by largest remainders.

    Returns:
        M + 1 rising numbers from 0 to ``chunks``; part j is the chunks from number j up to
        number j + 1. A member with fraction 0 gets none.

    >>> bounds([0.5, 0.0, 0.5], 5)
    (0, 3, 3, 5)
    """
    exact = [part * chunks for part in parts]
    counts = [math.floor(amount) for amount in exact]
    by_remainder = sorted(
        (seat for seat in range(len(parts)) if parts[seat] > 0),
        key=lambda seat: (counts[seat] - exact[seat], seat),
    )
    left = chunks - sum(counts)
    for step in range(left):
        counts[by_remainder[step % len(by_remainder)]] += 1
    # Rounding up in the last digit can hand out one chunk too many.
    for _ in range(-left):
        counts[max(range(len(parts)), key=lambda seat: counts[seat])] -= 1
    edges = [0]
    for count in counts:
        edges.append(edges[-1] + count)
    return tuple(edges)
