"""The messages by which two transports keep their connections. Machines never see them."""

from __future__ import annotations

from moshpit.wire.base import Message


class BulkOffer(Message, frozen=True, tag=30):
    """Keys for a bulk connection that I am about to dial to you (design §4).

    Handled by the transport, never seen by machines.
    """

    token: bytes
    """32 random bytes that open the connection, once."""
    key_out: bytes
    """The key by which I seal what I send on it."""
    key_in: bytes
    """The key by which you seal what you send on it."""
    sealed: bool
    stripe: int = 0
    """Which of our parallel bulk connections; 0 is the first."""


class BulkAsk(Message, frozen=True, tag=31):
    """Please offer me a bulk connection and dial it. Transport only, like the next three."""

    last: bytes
    """The token of the last offer that I have had from you; empty: none."""
    reversed: bool
    """It would be my turn to dial, but I cannot reach you."""
    stripe: int = 0


class BulkRefused(Message, frozen=True, tag=32):
    """No bulk connection can be had between us, and why."""

    reason: str
    stripe: int = 0


class LinkProbe(Message, frozen=True, tag=33):
    """Is this connection alive? Sent back with ``reply`` True."""

    reply: bool


class LinkClose(Message, frozen=True, tag=34):
    """I close this connection on purpose. ``idle``: dial again when you need me."""

    reason: str


LinkMessage = BulkOffer | BulkAsk | BulkRefused | LinkProbe | LinkClose
