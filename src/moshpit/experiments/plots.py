"""Figures in one style: readable when small, printed in grey, or seen by the colour-blind.

matplotlib is an extra (``pip install 'moshpit[experiments]'``) and is imported when a figure is
made. Lines differ in colour, dash and marker, and are named at their end instead of in a legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moshpit.errors import ConfigError

Floats = NDArray[np.float64]

# Okabe & Ito's colours, which people with any of the common colour-blindnesses tell apart.
COLOURS = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#7F7F7F",
    "#8C510A", "#5D3A9B", "#4D9221",
)  # fmt: skip
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "h")
DASHES = (
    "-", "--", "-.", ":", (0, (5, 1)), (0, (1, 1)), (0, (3, 1, 1, 1)), (0, (8, 2)), (0, (2, 1)),
    (0, (6, 1, 1, 1)), (0, (4, 1)),
)  # fmt: skip
WIDTH_IN, HEIGHT_IN = 6.4, 4.0  # text of 10.5 points in it is readable on a phone
LABEL_GAP = 0.058  # of the axes' height, between two names at the right

_STYLE = {
    "font.size": 10.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "axes.axisbelow": True,
    "figure.facecolor": "white",
    "svg.fonttype": "path",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A curve with its band.

    Attributes:
        name: stands at its end.
        x, y: (points,).
        low, high: (points,), the edges of the band; or None.
        style: which colour, marker and dash: a number that means the same line in all figures.
        dots: only markers, as for measured points against a band.
    """

    name: str
    x: Floats
    y: Floats
    low: Floats | None = None
    high: Floats | None = None
    style: int = 0
    dots: bool = False


def drawing(*, wide: int = 1, height_in: float = HEIGHT_IN) -> tuple[Any, list[Any]]:
    """Return a new figure and its axes, side by side.

    Args:
        wide: how many axes.
        height_in: the height in inches; the width is always the same.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        matplotlib = import_module("matplotlib")
        matplotlib.use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError as error:
        raise ConfigError(
            "figures need matplotlib: install it with  pip install 'moshpit[experiments]'"
        ) from error
    with matplotlib.rc_context(_STYLE):
        figure, axes = pyplot.subplots(
            1, wide, figsize=(WIDTH_IN, height_in), squeeze=False, layout="constrained"
        )
    return figure, list(axes[0])


def draw(axes: Any, lines: Sequence[Line], *, floor: float | None = None) -> None:
    """Draw curves with their bands, and their names at the right.

    Args:
        axes: matplotlib's.
        lines: the curves.
        floor: logarithmic, and nothing below this value is told apart from it.
    """
    if floor is not None:
        axes.set_yscale("log")
    ends: list[tuple[float, float, Line]] = []
    for line in lines:
        x, y = line.x, _above(line.y, floor)
        colour = COLOURS[line.style % len(COLOURS)]
        if line.low is not None and line.high is not None:
            axes.fill_between(
                x, _above(line.low, floor), _above(line.high, floor),
                color=colour, alpha=0.2, linewidth=0,
            )  # fmt: skip
        axes.plot(
            x, y,
            color=colour, linewidth=0 if line.dots else 1.8,
            linestyle=DASHES[line.style % len(DASHES)],
            marker=MARKERS[line.style % len(MARKERS)],
            markersize=7 if line.dots else 4.5, markevery=max(1, len(x) // 12),
            markerfacecolor="white" if line.dots else colour,
        )  # fmt: skip
        ends.append((float(x[-1]), float(y[-1]), line))
    if floor is not None:
        axes.set_ylim(bottom=floor * 0.3)
    _name_ends(axes, ends)


def _above(values: Floats, floor: float | None) -> Floats:
    return values if floor is None else np.maximum(values, floor)


def _name_ends(axes: Any, ends: Sequence[tuple[float, float, Line]]) -> None:
    """Write each line's name beside its end, moved up or down where names would overlap."""
    axes.figure.canvas.draw()  # limits are known now
    to_axes = axes.transAxes.inverted()
    at = [float(to_axes.transform(axes.transData.transform((x, y)))[1]) for x, y, _ in ends]
    order = sorted(range(len(at)), key=at.__getitem__)
    places = spread_out([at[i] for i in order], LABEL_GAP)
    for place, index in zip(places, order, strict=True):
        x, y, line = ends[index]
        axes.annotate(
            line.name,
            xy=(x, y), xycoords="data", xytext=(1.03, place), textcoords="axes fraction",
            color=COLOURS[line.style % len(COLOURS)], va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#aaaaaa", "linewidth": 0.6, "shrinkA": 0},
        )  # fmt: skip


def spread_out(places: Sequence[float], gap: float) -> list[float]:
    """Move sorted places apart, as little as one sweep up and one down need.

    Args:
        places: ascending, each from 0 to 1.
        gap: the least distance of two that follow each other.

    Example:
        >>> [round(place, 2) for place in spread_out([0.0, 0.02, 0.9, 1.0, 1.0], 0.1)]
        [0.0, 0.1, 0.8, 0.9, 1.0]
    """
    moved: list[float] = []
    for place in places:
        moved.append(max(place, moved[-1] + gap) if moved else place)
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


def svg(figure: Any) -> str:
    """Return a figure as an SVG document, the same bytes each time, and close it."""
    text = StringIO()
    _save(figure, text, "svg")
    return text.getvalue()


def write(figure: Any, path: Path) -> None:
    """Write a figure to a file, in the format of its name (``.svg``, ``.png``, ``.pdf``).

    Raises:
        ConfigError: the file cannot be written, or not in that format.
    """
    kind = path.suffix.removeprefix(".").lower() or "png"
    image = BytesIO()
    try:
        _save(figure, image, kind)
        path.write_bytes(image.getvalue())
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path}: {error}") from error


def _save(figure: Any, file: Any, kind: str) -> None:
    matplotlib = import_module("matplotlib")
    style = _STYLE | {"svg.hashsalt": "moshpit"}
    stamp = {"Date": None} if kind == "svg" else {}
    try:
        with matplotlib.rc_context(style):
            figure.savefig(file, format=kind, metadata=stamp or None, dpi=150)
    finally:
        import_module("matplotlib.pyplot").close(figure)
