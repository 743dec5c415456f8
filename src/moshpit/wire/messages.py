"""Every control message, as a schema. What does not fit the schema is refused.

Messages travel as MessagePack arrays whose first item is the tag. They arrive over a
connection whose peer is proved, so the sender is known; what is relayed on somebody else's
behalf (records, joins, group announcements) carries that peer's own signature.

Sets of chunks or seats travel as little-endian bit masks in bytes (`pack_mask`).
"""

from __future__ import annotations

import msgspec

from moshpit.wire.base import Message
from moshpit.wire.help import HelpMessage
from moshpit.wire.links import LinkMessage
from moshpit.wire.parcels import ParcelMessage
from moshpit.wire.shown import Shown
from moshpit.wire.transfer import StateMessage

PROTOCOL_VERSION = 1


# --- identity -----------------------------------------------------------------------------


class Admission(msgspec.Struct, frozen=True, array_like=True):
    """The chain by which a peer may take part: run key → invite → peer (design §4)."""

    invite: bytes
    """The invite's public key, 32 bytes."""
    roles: tuple[str, ...]
    """The roles that the invite allows."""
    expires_at: int
    """Unix seconds after which the invite admits nobody new; 0 is never."""
    invite_signature: bytes
    """The run key's signature over the invite (64 bytes)."""
    peer_signature: bytes
    """The invite key's signature over the peer's id (64 bytes)."""


# --- membership ---------------------------------------------------------------------------


class PeerRecord(Shown, frozen=True, array_like=True):
    """What a peer says of itself. Signed by it; nobody else can alter it.

    The newer of two records of a peer is the one with the higher (incarnation, version).
    """

    peer: bytes
    incarnation: int
    """Rises when the peer starts anew, or refutes a suspicion."""
    version: int
    """Rises with every change within one incarnation."""
    role: str
    addresses: tuple[tuple[str, int], ...]
    """Where it can be dialled, the best first. Empty for clients."""
    via: tuple[bytes, ...]
    """For clients: the peers that it keeps connections to, through which to probe it."""
    up: float
    """Bytes per second it can send; 0 is unknown."""
    down: float
    """Bytes per second it can receive; 0 is unknown."""
    schema: bytes
    """Hash (8 bytes) of the names, shapes and dtypes that it averages; empty: none yet."""
    epoch: int
    """The epoch that it is working on."""
    samples: float
    """Samples it has processed in this epoch."""
    rate: float
    """Samples per second."""
    group_key: tuple[int, ...]
    """Its grid coordinates, for display."""
    step_s: float
    """Seconds that one local step takes; 0 is unknown. How soon it can answer a call."""
    left: bool
    """It has left on purpose."""
    admission: Admission
    signature: bytes = b""
    lineage: bytes = b""
    """Labels of some of its averagings, newest first: epoch (4 bytes), label (2 bytes) each."""
    merges_from: int = -1
    """It is about to merge with peers that were cut off from it: the first epoch that the sides
    have not averaged together. Its weight is all that it has done since. -1: it is not."""


class Suspicion(msgspec.Struct, frozen=True, array_like=True):
    """A rumour that a peer does not answer (``dead`` False) or is dead (True)."""

    peer: bytes
    incarnation: int
    dead: bool
    by: bytes


class Mention(msgspec.Struct, frozen=True, array_like=True):
    """That there is news of a peer, and which; whoever lacks it asks for it (`NewsAsk`)."""

    peer: bytes
    """The first 6 bytes of its id."""
    incarnation: int
    version: int
    """Of its record; -1: it is suspected; -2: it is dead."""


class Gossip(msgspec.Struct, frozen=True, array_like=True):
    """News that rides on other messages."""

    records: tuple[PeerRecord, ...] = ()
    suspicions: tuple[Suspicion, ...] = ()
    mentions: tuple[Mention, ...] = ()


NO_GOSSIP = Gossip()


class Ping(Message, frozen=True, tag=1):
    """Are you there? Answered by `Ack` with the same number."""

    seq: int
    gossip: Gossip = NO_GOSSIP


class Ack(Message, frozen=True, tag=2):
    """I am (or: the peer that you asked me to probe is)."""

    seq: int
    gossip: Gossip = NO_GOSSIP


class PingReq(Message, frozen=True, tag=3):
    """Please probe ``target`` for me; answer with `Ack` of this number if it answers."""

    seq: int
    target: bytes
    gossip: Gossip = NO_GOSSIP


class News(Message, frozen=True, tag=4):
    """News worth a message of its own."""

    gossip: Gossip


class Digest(Message, frozen=True, tag=5):
    """A summary of my view in buckets; the receiver answers with `Difference`s, or an `Outline`."""

    buckets: tuple[bytes, ...]
    """For each bucket of peer ids, a hash of its live records, but for their progress."""


class Difference(Message, frozen=True, tag=6):
    """Records in buckets whose hashes differed; ``reply`` asks for the other's in turn."""

    gossip: Gossip
    reply: tuple[int, ...] = ()
    """Buckets whose contents the sender wants back."""


class ViewAsk(Message, frozen=True, tag=7):
    """Send me all records that you have (`moshpit peers`); answered by `Difference`s."""


class Goodbye(Message, frozen=True, tag=8):
    """I am leaving on purpose; do not wait for me."""

    record: PeerRecord


class Outline(Message, frozen=True, tag=9):
    """What I have in buckets whose hashes differed: the receiver asks for what it lacks."""

    buckets: tuple[int, ...]
    hashes: tuple[bytes, ...]
    """For each bucket, the first 6 bytes of the hash of each live record, one after the other."""
    back: bool = False
    """The sender wants the receiver's outline of these buckets, too."""
    asks: bool = False
    """Not what I have, but what I lack: please send me these records."""


class NewsAsk(Message, frozen=True, tag=18):
    """You have mentioned news of these peers: tell me. Answered by `News`."""

    peers: tuple[bytes, ...]
    """The first 6 bytes of each one's id."""


# --- matchmaking --------------------------------------------------------------------------


class GroupKey(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Who should meet: an epoch, a grid axis, and the coordinates on the other axes."""

    epoch: int
    axis: int
    path: tuple[int, ...]
    span: tuple[int, ...] = ()
    """Torus columns average a slice: the chunks from the first number up to the second."""


class Join(Message, frozen=True, tag=10):
    """I want to be in the group of this key. Signed: the host shows it to the others."""

    peer: bytes
    key: GroupKey
    nonce: int
    """Rises with every join of this peer; an old join cannot be used again."""
    role: str
    schema: bytes
    vector_chunks: int
    """How many chunks the vector has; must be the same for all."""
    bandwidth: float
    """min(up, down) in bytes per second; 0 is unknown."""
    weighs: bool
    """Whether it has something to contribute (False: weight 0, it only takes the mean)."""
    origin: bytes
    """The group whose mean it brings; empty on the first axis."""
    signature: bytes = b""
    vector_bytes: int = 0
    """Bytes of the whole vector, for the round's deadline; 0 is unknown."""
    insist: bool = False
    """I was redirected here before and cannot do better: take me even if you are not the host."""
    planned: int = 0
    """How many peers this one planned for. A host that knows of fewer has news to wait for."""
    fill_s: float = 0.0
    """How many seconds it expects to need until its vector is complete."""


class JoinAck(Message, frozen=True, tag=11):
    """I am the host for this key and have your join; silence later means I am gone."""

    key: GroupKey
    nonce: int


class JoinRefused(Message, frozen=True, tag=12):
    """I cannot take your join. ``reason``: schema, stale, full, not-admitted, ...

    ``epoch`` is the epoch that the refuser knows the swarm to be at.
    """

    key: GroupKey
    nonce: int
    reason: str
    detail: str
    epoch: int


class Redirect(Message, frozen=True, tag=13):
    """I am not the host for this key; these peers come first in my view."""

    key: GroupKey
    nonce: int
    hosts: tuple[bytes, ...]


class Unjoin(Message, frozen=True, tag=14):
    """I no longer wait at you for this key."""

    key: GroupKey


class Call(Message, frozen=True, tag=15):
    """A group is assembling under this key and I expect you. Answered by `CallReply`."""

    key: GroupKey


class CallReply(Message, frozen=True, tag=16):
    """I will come in about ``ready_s`` seconds (negative: cannot say), or not at all."""

    key: GroupKey
    coming: bool
    ready_s: float


class Columns(msgspec.Struct, frozen=True, array_like=True):
    """The torus schedule: what a row's seats take to their columns before they give it out."""

    spans: tuple[tuple[int, int], ...]
    """For each seat, the chunks (from, up to) whose mean it holds and takes to its column."""
    rows: int
    """How many members a whole column has."""
    hold_s: float
    """How long a seat may hold what it has reduced."""
    column_s: float
    """How much of that is for the column's own round."""


class GroupFormed(Message, frozen=True, tag=17):
    """The group: its joins in the order of the seats, and who reduces what.

    Signed by the host, so that members can pass it on when the host dies.
    """

    group: bytes
    host: bytes
    key: GroupKey
    joins: tuple[Join, ...]
    bounds: tuple[int, ...]
    """Part j is the chunks from bounds[j] up to bounds[j+1]; M+1 numbers."""
    next_path: tuple[tuple[int, ...], ...]
    """For each seat, the path of the next axis' key; empty tuples after the last axis."""
    deadline_s: float
    """How long the round may last at most, in each member's own time."""
    signature: bytes = b""
    columns: Columns | None = None


# --- group all-reduce ---------------------------------------------------------------------


class Beat(Message, frozen=True, tag=20):
    """I am in this round and alive. The first one is the permission to send me chunks."""

    group: bytes


class GroupAsk(Message, frozen=True, tag=21):
    """You speak of a group that I have not been told of; answer with its `GroupFormed`."""

    group: bytes


class Takeover(Message, frozen=True, tag=22):
    """I take over this part; ballot n means seat (part + n) mod M reduces it.

    Whoever answers promises to take no result of a lower ballot for it any more.
    """

    group: bytes
    part: int
    ballot: int


class Held(Message, frozen=True, tag=23):
    """My answer to `Takeover`: the chunks of the vector whose results I have."""

    group: bytes
    part: int
    ballot: int
    chunks: bytes


class Redo(Message, frozen=True, tag=24):
    """Nobody has these chunks of the part; send me your contributions for them again."""

    group: bytes
    part: int
    ballot: int
    chunks: bytes


class Want(Message, frozen=True, tag=25):
    """Please send me the results of these chunks, if you have them."""

    group: bytes
    chunks: bytes


class MemberDone(Message, frozen=True, tag=26):
    """I have every result of this round."""

    group: bytes


class RoundOver(Message, frozen=True, tag=27):
    """I have nothing (more) to do with this round; the swarm is at ``epoch``."""

    group: bytes
    epoch: int


class Refusal(Message, frozen=True, tag=28):
    """I refused something of yours in this round, and why."""

    group: bytes
    reason: str
    detail: str


AnyMessage = (
    Ping | Ack | PingReq | News | Digest | Difference | ViewAsk | Goodbye | Outline | NewsAsk
    | Join | JoinAck | JoinRefused | Redirect | Unjoin | Call | CallReply | GroupFormed
    | Beat | GroupAsk | Takeover | Held | Redo | Want | MemberDone | RoundOver | Refusal
    | LinkMessage | HelpMessage | StateMessage | ParcelMessage
)  # fmt: skip

MEMBERSHIP_MESSAGES = (
    Ping, Ack, PingReq, News, Digest, Difference, ViewAsk, Goodbye, Outline, NewsAsk
)  # fmt: skip
MATCHMAKING_MESSAGES = (
    Join, JoinAck, JoinRefused, Redirect, Unjoin, Call, CallReply, GroupFormed
)  # fmt: skip
ROUND_MESSAGES = (Beat, Takeover, Held, Redo, Want, MemberDone, RoundOver, Refusal)
RoundMessage = Beat | Takeover | Held | Redo | Want | MemberDone | RoundOver | Refusal

Signed = PeerRecord | Join | GroupFormed


_CONTEXTS: dict[type, bytes] = {
    PeerRecord: b"moshpit/1 record",
    Join: b"moshpit/1 join",
    GroupFormed: b"moshpit/1 group",
}
_encoder = msgspec.msgpack.Encoder()


def signing_bytes(message: Signed) -> bytes:
    """Return what a record, join or announcement is signed over: context and content."""
    bare = msgspec.structs.replace(message, signature=b"")
    return _CONTEXTS[type(message)] + b"\0" + _encoder.encode(bare)


def pack_mask(mask: int) -> bytes:
    """Pack a set of small numbers, given as a bit mask, for the wire.

    >>> unpack_mask(pack_mask(0b101))
    5
    """
    return mask.to_bytes((mask.bit_length() + 7) // 8, "little")


def unpack_mask(data: bytes) -> int:
    """The inverse of `pack_mask`."""
    return int.from_bytes(data, "little")
