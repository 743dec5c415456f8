"""The contract of every protocol machine: events in, effects out, time as an argument.

A machine is a plain object with ``handle(event, now) -> list[Effect]`` and an attribute
``wakeup``: the time at which it wants a `Tick` even if nothing else happens (None: never).
``now`` is seconds on a clock that never jumps back; machines compare its values and never
read a clock. Randomness comes from the generator given to the constructor. Ids are never
iterated in set order, so that the same seed gives the same trace.

Nothing here touches tensors: payloads are named by (group, chunk), the driver owns the bytes.
Both drivers, `moshpit.runtime` and `moshpit.sim`, execute the effects in order, before they
hand in the next event.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from typing import Protocol, TypeVar

import msgspec

from moshpit.events import EpochReport, Notice, RoundReport
from moshpit.types import GroupId, PeerId, RunId
from moshpit.wire.framing import ChunkHeader
from moshpit.wire.messages import AnyMessage, GroupFormed, Message, PeerRecord, Signed

S = TypeVar("S", bound=Signed)
T = TypeVar("T")


class Rng(Protocol):
    """The part of `random.Random` that machines use."""

    def random(self) -> float: ...
    def randrange(self, start: int, stop: int | None = None, step: int = 1, /) -> int: ...
    def getrandbits(self, k: int, /) -> int: ...
    def shuffle(self, x: MutableSequence[PeerId], /) -> None: ...


class Signer(Protocol):
    """Keys, as machines see them. The runtime gives Ed25519, the simulator a cheap stand-in."""

    @property
    def peer(self) -> PeerId:
        """Whose key this is."""
        ...

    @property
    def run(self) -> RunId:
        """The run whose admissions count."""
        ...

    def sign(self, payload: bytes) -> bytes:
        """Sign by this peer's key."""
        ...

    def verify(self, peer: bytes, payload: bytes, signature: bytes) -> bool:
        """Whether ``peer`` signed the payload."""
        ...

    def admitted(self, record: PeerRecord) -> bool:
        """Whether the record's admission chain leads from the run key to its peer and role."""
        ...

    def sign_message(self, message: S) -> S:
        """Return the message with this peer's signature in it."""
        ...

    def verify_message(self, message: Signed, signer: bytes) -> bool:
        """Whether ``signer`` signed this message."""
        ...


class _Data(msgspec.Struct, frozen=True, gc=False):
    """Plain frozen data; compared by value, so that tests compare whole lists.

    It is never part of a cycle, so the garbage collector need not look at it."""


# --- events: what the driver tells a machine ----------------------------------------------


class Tick(_Data, frozen=True):
    """Time has passed, at least to ``wakeup``."""


class LinkUp(_Data, frozen=True):
    """A proved control connection to a peer exists now."""

    peer: PeerId


class LinkDown(_Data, frozen=True):
    """The connection to a peer is gone and dialling again did not bring it back.

    ``refused`` is True where its machine answered that nobody listens: the process is gone.
    Also the answer to a `Send` that could not be delivered.
    """

    peer: PeerId
    refused: bool
    detail: str


class Received(_Data, frozen=True):
    """A control message from a proved peer."""

    peer: PeerId
    message: AnyMessage


class ChunkArrived(_Data, frozen=True):
    """A chunk's payload lies in the driver's buffer and waits for a decision.

    The effects of handling this event say what becomes of it: `Accumulate`, `TakeResult`,
    or nothing (dropped). ``fault`` is empty, or why the driver found the payload unusable:
    ``"non-finite"``, ``"wrong-size"``, ``"undecodable"``.
    """

    peer: PeerId
    header: ChunkHeader
    fault: str


class BeginAveraging(_Data, frozen=True):
    """The peer's vector is snapshotted: average it now.

    ``weight`` is the mass of the peer's own value (samples); 0 only takes the mean.
    """

    weight: float
    schema: bytes
    chunks: int
    vector_bytes: int
    due_epoch: int | None = None
    """The epoch that the snapshot is of: stale if the swarm has gone on. None: the current one."""
    always_weighs: bool = False
    """The value counts even if this peer missed epochs (averaging without training)."""
    fill_s: float = 0.0
    """Seconds until the vector, which fills while it is averaged, will be complete."""
    earlier: float = 0.0
    """So much of the weight is work that was in an earlier snapshot, too."""
    merges: bool = False
    """The snapshot is one for a merging of sides (`merging.py`): its weight counts all that was
    done since they have parted."""


class LocalProgress(_Data, frozen=True):
    """The peer's own training: samples in this epoch so far, per second, seconds per step."""

    samples: float
    rate: float
    step_s: float


class Leave(_Data, frozen=True):
    """The user wants out."""


Event = Tick | LinkUp | LinkDown | Received | ChunkArrived | BeginAveraging | LocalProgress | Leave

# --- effects: what a machine wants done ---------------------------------------------------


class Send(_Data, frozen=True):
    """Send a control message; dial if there is no connection; `LinkDown` if it cannot be."""

    peer: PeerId
    message: Message


class Emit(_Data, frozen=True):
    """Tell people."""

    notice: Notice


class GroupReady(_Data, frozen=True):
    """A group exists: make room for its round. Precedes every payload effect of the group."""

    formed: GroupFormed
    seat: int
    source: GroupId | None = None
    """For a column of the torus schedule (``formed.key.span``): this peer's row. What the row
    has finalized there is the local value of the column's round, and the column's results
    take its place (`AdoptResult`)."""


class SeekFailed(_Data, frozen=True):
    """No group could be had under this key (matchmaking to node; the driver ignores it)."""

    reason: str
    epoch: int
    """The epoch that the swarm is at, as far as the refuser knew."""


class Silent(_Data, frozen=True):
    """A peer owes an answer and does not give it (to the node; the driver ignores it).

    Until it is heard again nobody here waits for it.
    """

    peer: PeerId


class PartReduced(_Data, frozen=True):
    """Torus: what this peer takes to its column is reduced (to the node; drivers ignore it)."""

    group: GroupId


class HoldOver(_Data, frozen=True):
    """Torus: it is held too long already (to the node; drivers ignore it)."""

    group: GroupId


class SendContribution(_Data, frozen=True):
    """Send the round's local value of a chunk to the peer that reduces it.

    With mass 0 it only says that there is none; nobody looks at the payload.
    """

    peer: PeerId
    group: GroupId
    chunk: int
    ballot: int
    mass: float


class Accumulate(_Data, frozen=True):
    """Add the payload that just arrived to the chunk's sum, times mass."""

    group: GroupId
    chunk: int
    mass: float


class AccumulateOwn(_Data, frozen=True):
    """Add this peer's own local value of the chunk to its sum, times mass."""

    group: GroupId
    chunk: int
    mass: float


class ResetSum(_Data, frozen=True):
    """Forget the chunk's sum; a part was taken over or given up."""

    group: GroupId
    chunk: int


class Finalize(_Data, frozen=True):
    """Divide the chunk's sum by the mass, encode, keep the decoded result as this peer's."""

    group: GroupId
    chunk: int
    ballot: int
    mass: float
    seats: int


class SendResult(_Data, frozen=True):
    """Send the result of a chunk, as it was encoded once by its reducer, to a groupmate.

    Mass 0 says that nobody had a value: there is no result here, and any payload will do.
    """

    peer: PeerId
    group: GroupId
    chunk: int
    ballot: int
    mass: float
    seats: int
    reach: int = 0


class AdoptResult(_Data, frozen=True):
    """Torus: a chunk that was finalized and held goes out now, with this header.

    Its value is the result of the same chunk in the round ``source``, this peer's column;
    where ``source`` is None it is the row's own, as it was finalized. The column's chunks that
    have no result when its `RoundEnded` is executed must hold the row's again from then on.
    """

    group: GroupId
    chunk: int
    source: GroupId | None
    ballot: int
    mass: float
    seats: int
    reach: int


class TakeResult(_Data, frozen=True):
    """The payload that just arrived is the chunk's result: keep it as this peer's."""

    group: GroupId
    chunk: int


class CancelSends(_Data, frozen=True):
    """Forget what is queued for this peer in this round and not yet on the wire."""

    peer: PeerId
    group: GroupId


class RoundEnded(_Data, frozen=True):
    """The round is over for this peer; chunks in ``report.missing`` keep the local value.

    The result can be used now, but must stay readable until `CloseRound`: groupmates may
    still want it.
    """

    report: RoundReport


class CloseRound(_Data, frozen=True):
    """Nobody needs this round any more; free what it holds."""

    group: GroupId


class AveragingDue(_Data, frozen=True):
    """The swarm's target is met, or groupmates call: snapshot and hand in `BeginAveraging`."""

    epoch: int


class AveragingEnded(_Data, frozen=True):
    """The epoch's averaging is over; the peer works on ``next_epoch`` now."""

    report: EpochReport
    next_epoch: int


Effect = (
    Send | Emit | GroupReady | SeekFailed | Silent | PartReduced | HoldOver | SendContribution
    | Accumulate | AccumulateOwn | ResetSum | Finalize | SendResult | AdoptResult | TakeResult
    | CancelSends | RoundEnded | CloseRound | AveragingDue | AveragingEnded
)  # fmt: skip


ROUTINE = frozenset(
    {Send, SendContribution, SendResult, Accumulate, AccumulateOwn, TakeResult, Finalize, Emit}
)
"""Effects that only the driver has to do with; most are of these kinds."""


class Machine(Protocol):
    """What every machine of the protocol offers its driver."""

    @property
    def wakeup(self) -> float | None:
        """When a `Tick` is due."""
        ...

    def handle(self, event: Event, now: float) -> list[Effect]:
        """Take one event; return what is to be done, in order."""
        ...


class View(Protocol):
    """The picture of the swarm that membership keeps and the other machines read."""

    @property
    def me(self) -> PeerRecord:
        """This peer's own record."""
        ...

    @property
    def live(self) -> Sequence[PeerId]:
        """All peers believed alive, this one included, sorted by id."""
        ...

    def record(self, peer: bytes) -> PeerRecord | None:
        """What is known of a peer, alive or not."""
        ...

    def reachable(self, peer: bytes) -> bool:
        """Believed alive, and not known to be cut off from this peer right now."""
        ...

    def averaging(self, schema: bytes) -> Sequence[PeerId]:
        """The live peers that average this schema, sorted by id. Not to be changed."""
        ...

    def dialable(self, peer: bytes, /) -> bool:
        """Whether a peer can be dialled, as far as its record says, and so host and reduce."""
        ...

    def linked(self, peer: bytes) -> bool:
        """Whether a connection to the peer exists, so that even a client can be told things."""
        ...

    @property
    def generation(self) -> int:
        """Rises whenever `live`, `reachable` or a record's role or schema changes."""
        ...


def carried_out(
    effects: Iterable[T | Send | Emit],
    send: Callable[[PeerId, Message], object],
    tell: Callable[[Notice], object],
) -> Iterator[T]:
    """Carry out what every machine asks for, in its turn, and yield the other effects.

    >>> notice = Notice("late", None, "by a second")
    >>> list(carried_out([Emit(notice), "rest"], print, lambda told: print(told.code)))
    late
    ['rest']
    """
    for effect in effects:
        if isinstance(effect, Send):
            send(effect.peer, effect.message)
        elif isinstance(effect, Emit):
            tell(effect.notice)
        else:
            yield effect
