"""The messages by which one peer asks another for help with its own network.

Asked by `moshpit doctor`, answered by the runtime's help desk, never seen by machines.
"""

from __future__ import annotations

import msgspec

from moshpit.wire.base import Message


class Echo(Message, frozen=True, tag=40):
    """What time is it there, and how fast is this link? Answered by `EchoReply`."""

    seq: int
    sent_at: float
    """The sender's wall clock, Unix seconds."""
    reply_bytes: int
    """How many bytes of padding the answer is to carry."""
    padding: bytes = b""
    """Not looked at; what is measured is how long it takes."""


class EchoReply(Message, frozen=True, tag=41):
    """The answer to `Echo`."""

    seq: int
    sent_at: float
    """As in the question."""
    wall: float
    """The answerer's wall clock, Unix seconds."""
    padding: bytes = b""


class DialBack(Message, frozen=True, tag=42):
    """Can you reach me at these addresses? Answered by `DialBackReply`.

    Only the host that the asker's own connection comes from is dialled; an empty host means
    that one, for askers that do not know how they look from outside.
    """

    seq: int
    addresses: tuple[tuple[str, int], ...]


class DialResult(msgspec.Struct, frozen=True, array_like=True):
    """What came of dialling one address."""

    host: str
    """The host that was dialled; for an empty one, that of the asker's connection."""
    port: int
    outcome: str
    """``reached``, ``refused``, ``unreachable``, ``no-handshake``, or ``foreign``: not dialled,
    because the asker's connection comes from elsewhere."""
    detail: str = ""


class DialBackReply(Message, frozen=True, tag=43):
    """The answer to `DialBack`."""

    seq: int
    seen: str
    """The host that the asker's connection comes from; empty if it cannot be told."""
    results: tuple[DialResult, ...]
    """In the order of the question; empty if the answerer has been asked too often."""


HelpMessage = Echo | EchoReply | DialBack | DialBackReply
HELP_MESSAGES = (Echo, EchoReply, DialBack, DialBackReply)
