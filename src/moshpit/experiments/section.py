"""What an experiment hands to the report: words, figures, tables, and how to repeat it.

A `Section` is plain data; `moshpit.experiments.report` makes a page of many. Every figure and
table says what kind of numbers it shows (`Nature`), so that nobody takes a calculated second
for a measured one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum


class Nature(Enum):
    """Where numbers are from."""

    REAL = "real"
    """Computed by the very algorithm, or measured: no model stands between."""
    SIMULATED = "simulated"
    """From the real protocol or real training on a simulated network and a simulated clock."""
    MODELLED = "modelled"
    """From a formula or a stated model instead of the thing itself."""
    QUOTED = "quoted"
    """From a publication."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A picture and what it shows.

    Attributes:
        title: one line that says what is to be seen.
        image: an SVG document.
        text: the legend: axes, bands, what was varied.
        natures: what kinds of numbers are in it.
        alt: the picture in a sentence, for those who cannot see it.
    """

    title: str
    image: str
    text: str
    natures: tuple[Nature, ...]
    alt: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of words.

    Attributes:
        title: one line that says what is compared.
        head: the columns.
        rows: each as long as the head; a cell may have several lines.
        text: how to read it.
        natures: what kinds of numbers are in it.
        marked: the cells, as (row, column), that are to stand out, such as those that disagree.
    """

    title: str
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text: str
    natures: tuple[Nature, ...]
    marked: frozenset[tuple[int, int]] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """What the paper says, and what came out here.

    Attributes:
        what: is measured, with its unit.
        paper: the published value, in words.
        here: ours, in words.
        natures: what kinds of numbers ours are.
    """

    what: str
    paper: str
    here: str
    natures: tuple[Nature, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """One experiment on the page.

    Attributes:
        name: short and unique, such as ``averaging``: the anchor of the section.
        title: its heading.
        text: paragraphs of plain text; what is between backquotes is set as code.
        commands: what to type in a shell to repeat exactly this.
        figures, tables: in the order in which they are to be shown.
        claims: for the table at the head of the page.
        seconds: how long it took here, all in all.
        cpu_s: how much computing that was, in seconds of one processor.
    """

    name: str
    title: str
    text: tuple[str, ...]
    commands: tuple[str, ...]
    figures: tuple[Figure, ...] = ()
    tables: tuple[Table, ...] = ()
    claims: tuple[Claim, ...] = ()
    seconds: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Context:
    """How an experiment of the catalogue is to be run.

    Attributes:
        small: a version of it that takes a minute or so.
        say: tells people how far it is, in one line.
        jobs: how many processes it may have at a time.
    """

    small: bool
    say: Callable[[str], None] = field(default=lambda _: None)
    jobs: int = 1


Experiment = Callable[[Context], Section]
"""Runs and tells; raises whatever went wrong."""
