"""What stands for tensors: one float64 per chunk, and who is in it.

The store does what the payload effects say and nothing else. It keeps the contributions that
went into a sum, so that a checker can compute the mean anew.
"""

from __future__ import annotations

from dataclasses import dataclass

from moshpit.types import GroupId


class Contribution:
    """A local value on its way to a reducer; the payload of a contribution chunk."""

    __slots__ = ("seat", "value")

    def __init__(self, seat: int, value: float) -> None:
        self.seat = seat
        self.value = value


class Mean:
    """A reduced chunk; the payload of a result chunk, made once and only passed on."""

    __slots__ = ("ballot", "made_by", "mass", "reach", "seats", "value")

    def __init__(  # noqa: PLR0917 - a plain record
        self, value: float, ballot: int, mass: float, seats: int, made_by: int, reach: int = 0
    ) -> None:
        self.value = value
        self.ballot = ballot
        self.mass = mass
        self.seats = seats
        self.made_by = made_by
        self.reach = reach


@dataclass(frozen=True, slots=True)
class Piece:
    """One value of a peer's state, on its way to a joiner."""

    index: int
    value: float


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a state is made of: the names of its pieces, by index."""

    epoch: int
    names: tuple[bytes, ...]


Payload = Contribution | Mean | Piece | Manifest


class Round:
    """What one process holds of one group all-reduce."""

    __slots__ = ("empty", "held", "local", "means", "seat", "span", "sums")

    def __init__(self, seat: int, local: list[float], span: tuple[int, ...] = ()) -> None:
        self.seat = seat
        self.local = local
        self.span = span
        """The chunks that the round is about; (): all."""
        self.sums: dict[int, list[tuple[int, float, float]]] = {}
        """For each chunk being summed: (seat, value, mass) of what is in it."""
        self.means: dict[int, Mean] = {}
        self.held: dict[int, Mean] = {}
        """Torus. In a row: means that were made here and are to go up the column before
        anybody gets them. In a column: the row's, as this seat brought them."""
        self.empty: dict[int, int] = {}
        """For each chunk, the bit mask of the seats that said that they have nothing to give."""

    def add(self, chunk: int, seat: int, value: float, mass: float) -> None:
        """Add a contribution to a sum."""
        entry = self.sums.get(chunk)
        if entry is None:
            self.sums[chunk] = [(seat, value, mass)]
        else:
            entry.append((seat, value, mass))

    def reset(self, chunk: int) -> None:
        """Forget a sum."""
        self.sums.pop(chunk, None)

    def finalize(self, chunk: int, ballot: int, mass: float, seats: int) -> Mean:
        """Make the mean of what is in the sum, with the mass that the machine says."""
        total = sum(value * weight for _, value, weight in self.sums.pop(chunk, ()))
        mean = Mean(total / mass if mass else 0.0, ballot, mass, seats, self.seat)
        self.means[chunk] = mean
        return mean

    def lacks(self, missing: tuple[int, ...]) -> list[int]:
        """Return the chunks without a mean that are not ``missing``."""
        first, end = self.span or (0, len(self.local))
        return [c for c in range(first, end) if c not in missing and c not in self.means]


class Store:
    """The open rounds of one process."""

    __slots__ = ("rounds", "vector")

    def __init__(self) -> None:
        self.rounds: dict[GroupId, Round] = {}
        self.vector: list[float] = []
        """The values that this epoch's rounds pass on from one to the next."""

    def open(self, group: GroupId, seat: int) -> Round:
        """Make room for a round on the values as they are now."""
        made = Round(seat, list(self.vector))
        self.rounds[group] = made
        return made

    def open_column(
        self, group: GroupId, seat: int, source: GroupId, span: tuple[int, ...]
    ) -> Round:
        """Make room for a column's round on what the row has reduced here."""
        row = self.rounds[source]
        made = Round(seat, list(row.local), span)
        for chunk in range(*span):
            held = row.held.get(chunk)
            if held is not None:
                made.local[chunk] = held.value
                made.held[chunk] = held
        self.rounds[group] = made
        return made

    def adopt(self, round_: Round, missing: tuple[int, ...]) -> None:
        """Take over a round's means, except where ``missing``."""
        for chunk, mean in round_.means.items():
            if chunk not in missing:
                self.vector[chunk] = mean.value
