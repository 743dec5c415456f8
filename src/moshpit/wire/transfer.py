"""The messages by which a peer fetches the training state of others.

The bytes themselves go over bulk connections, each piece named by its hash (`ChunkKind.STATE`).
"""

from __future__ import annotations

from moshpit.wire.base import Message


class StateAsk(Message, frozen=True, tag=50):
    """I need the swarm's training state. Answered by `StateComing` or `StateRefused`, at once."""

    seq: int
    """Rises with every ask of this peer."""
    shares: bool = False
    """Others may be sent to me for pieces that I was given."""


class StateComing(Message, frozen=True, tag=51):
    """You will have a `StateOffer` when my training has come to a place to take a snapshot."""

    seq: int


class StateOffer(Message, frozen=True, tag=52):
    """A snapshot of my training is there to be fetched.

    ``manifest`` are the hashes (32 bytes each) of the pieces of its manifest, which has the
    hashes of all other pieces.
    """

    seq: int
    epoch: int
    """The epoch that it is the beginning of, or a moment in."""
    schema: bytes
    """What those average that train from it (`PeerRecord.schema`)."""
    manifest: tuple[bytes, ...]
    manifest_bytes: int
    piece_bytes: int
    """How long the manifest's pieces are, but the last."""


class StateWant(Message, frozen=True, tag=53):
    """Please send me the pieces with these hashes."""

    hashes: tuple[bytes, ...]


class StateLack(Message, frozen=True, tag=54):
    """I do not have these pieces (any more)."""

    hashes: tuple[bytes, ...]


class StateRefused(Message, frozen=True, tag=55):
    """I cannot give you a state: ``no-state``, ``busy``."""

    seq: int
    reason: str


class StateDone(Message, frozen=True, tag=56):
    """I need nothing more of your state."""

    seq: int
    keeps: bool = False
    """I have all of it, and pass it on for a while."""


class StateElsewhere(Message, frozen=True, tag=57):
    """``holder`` has these pieces from me, or will soon: please ask it. Who asks me for them again
    gets them from me."""

    hashes: tuple[bytes, ...]
    holder: bytes


class StateHeld(Message, frozen=True, tag=58):
    """I resume, and can begin with these epochs. To everybody, before anything is loaded; and the
    answer of those who know already what the swarm starts from."""

    epochs: tuple[int, ...]
    """Of my checkpoints, the newest first."""
    company: int
    """How many peers trained when the newest of them was saved; 0: unknown."""
    chosen: int = -1
    """The epoch that the swarm starts from; -1: not known yet."""


STATE_MESSAGES = (
    StateAsk, StateComing, StateOffer, StateWant, StateLack, StateRefused, StateDone,
    StateElsewhere, StateHeld,
)  # fmt: skip
StateMessage = (
    StateAsk
    | StateComing
    | StateOffer
    | StateWant
    | StateLack
    | StateRefused
    | StateDone
    | StateElsewhere
    | StateHeld
)
