"""The kinds of parcels that the baselines send."""

from __future__ import annotations

from enum import IntEnum


class Kind(IntEnum):
    """The first number of a parcel's tag."""

    MUSTER = 1
    """Whom the sender sees, see `moshpit.baselines.world`."""
    HANDOVER = 2
    """Parameters and statistics for one that is behind."""
    RING = 3
    """A piece of a ring all-reduce."""
    MASS = 4
    """Half of a numerator, and half of its weight."""
    NEIGHBOUR = 5
    """A neighbour's parameters."""
    PAIR = 6
    """An active worker's parameters."""
    PAIRED = 7
    """The mean of the two, back to the active worker."""
    GRADIENT = 8
    """A worker's gradient, to the server."""
    PARAMETERS = 9
    """The server's parameters, to a worker."""
