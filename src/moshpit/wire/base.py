"""The base of all messages."""

from __future__ import annotations

import msgspec


class Message(msgspec.Struct, frozen=True, array_like=True, tag=True, forbid_unknown_fields=True):
    """The base of everything that travels on a control connection after the handshake."""
