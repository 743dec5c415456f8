"""The messages about parcels: vectors that one peer sends to one other.

The bytes go over bulk connections (`ChunkKind.PARCEL`). Handled by the runtime's parcel desk
(`moshpit.runtime.parcels`), never seen by machines.
"""

from __future__ import annotations

from moshpit.wire.base import Message


class ParcelGot(Message, frozen=True, tag=60):
    """Your parcel is complete here; forget it."""

    session: int
    serial: int


class ParcelRefused(Message, frozen=True, tag=61):
    """I do not take this parcel of yours, and why: ``bad-parcel``, ``non-finite``,
    ``too-many-parcels``. Forget it."""

    session: int
    serial: int
    reason: str


PARCEL_MESSAGES = (ParcelGot, ParcelRefused)
ParcelMessage = ParcelGot | ParcelRefused
