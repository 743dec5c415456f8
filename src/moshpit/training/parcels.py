"""What a strategy that sends vectors to single peers asks of a swarm, beyond `Averager`.

The strategies of `moshpit.baselines` know nothing else of the network. `moshpit.Swarm` is one
implementation; tests/baselines has the conformance suite of this contract.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from moshpit.tensors.parcel import Parcel, Tag
from moshpit.training.averager import Averager
from moshpit.types import PeerId

__all__ = ["Parcel", "ParcelSwarm", "Parcels", "Tag"]


class Parcels(Protocol):
    """Vectors sent to one peer each.

    A parcel that was sent arrives once, as long as both peers live; those of one sender may
    overtake each other. Memory is bounded: a few vectors of the attached length for each pair
    of peers. What is beyond that is dropped, and a notice says so.
    """

    def send(self, to: PeerId, tag: Tag, vector: torch.Tensor, weight: float = 1.0) -> None:
        """Send a copy of ``vector`` (float32, one dimension, finite, not longer than what is
        attached, or 64 numbers), and do not wait. To a dead peer it is dropped.

        Raises:
            ConfigError: what nobody would take.
        """
        ...

    def take(
        self, tag: Tag, *, sender: PeerId | None = None, timeout_s: float | None = None
    ) -> Parcel:
        """Wait for a parcel with this tag, of one sender or of anybody, and take it.

        Raises:
            TimeoutError: none came within ``timeout_s`` seconds.
            PeerLostError: none is there, and that sender is dead.
            ClosedError: the swarm is closed.
        """
        ...

    def poll(self, kind: int) -> Parcel | None:
        """Take the oldest parcel of a kind that is there; None if there is none. No wait."""
        ...

    def serve(self, kind: int, handler: Callable[[Parcel], None]) -> None:
        """Have ``handler`` called with every parcel of a kind as it arrives, from now on.

        Calls come one at a time, for all kinds together, in another thread than training's, also
        while that computes or waits. A handler may `send`; it must not wait for parcels, and it
        keeps what it shares with training behind a lock.
        """
        ...


class ParcelSwarm(Averager, Protocol):
    """A swarm that also carries parcels."""

    @property
    def parcels(self) -> Parcels:
        """The parcels; peers whose strategies never ask for this take none. First asked for
        before `Averager.attach`, so that whoever is in `peers_now` of others takes them."""
        ...

    def peers_now(self) -> list[PeerId]:
        """Return the live workers that average the same as this peer (itself included), sorted
        by id. None before `Averager.attach`."""
        ...
