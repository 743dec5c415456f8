"""What training holds of state transfer: states on their way, and the bridge to the network.

The network's side is `moshpit.runtime.statesync`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from moshpit.protocol.statesync import donors_in
from moshpit.runtime.background import Bridge
from moshpit.runtime.company import NUMEL_BYTES
from moshpit.runtime.reunion import Choosing
from moshpit.runtime.waiting import REAL_TIME, Waiting
from moshpit.tensors.image import StateAssembler, StateImage
from moshpit.types import PeerId

if TYPE_CHECKING:
    from moshpit.runtime.driver import Driver


@final
@dataclass(frozen=True, slots=True)
class FetchedState:
    """A state that has come in full.

    Attributes:
        assembler: its manifest and bytes.
        schema: what those average that train from it.
    """

    assembler: StateAssembler
    schema: bytes


@final
class Fetching:
    """A state on its way. The network thread writes it, training waits for it."""

    def __init__(self, waiting: Waiting = REAL_TIME) -> None:
        self._ended = waiting.event()
        self._state: FetchedState | None = None
        self.reason = ""
        """Why there is none."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, for so long at most; return whether it has."""
        return self._ended.wait(timeout_s)

    @property
    def state(self) -> FetchedState | None:
        """The state; None if it could not be had, or is not there yet."""
        return self._state

    def end(self, state: FetchedState | None, reason: str = "") -> None:
        """Called by the network thread."""
        if not self._ended.is_set():
            self._state, self.reason = state, reason
            self._ended.set()


@final
class StateSync:
    """What training holds of state transfer; from any thread. Made by `Swarm`.

    Args:
        thread: the network's.
        driver: whose desk and view.
        me: this peer.
        declare: tells the swarm what this peer averages, and of which epoch its values are.
    """

    def __init__(
        self,
        thread: Bridge,
        driver: Driver,
        me: PeerId,
        declare: Callable[[bytes, int], None],
    ) -> None:
        self._declare = declare
        self._thread = thread
        self._driver = driver
        self._desk = driver.states
        self._me = me

    @property
    def piece_bytes(self) -> int:
        """How long a snapshot's chunks may be."""
        return self._desk.piece_bytes_max

    @property
    def bytes_given(self) -> int:
        """How many bytes of states were sent to others."""
        return self._desk.bytes_given

    @property
    def wanted_s(self) -> float:
        """For how many seconds somebody has been waiting for a snapshot; 0: nobody is."""
        since = self._desk.wanted_since
        return 0.0 if since is None else max(1e-9, self._thread.waiting.clock() - since)

    @property
    def company(self) -> int:
        """How many live peers average what this one does, this one included."""
        view = self._driver.node.view
        mine = view.me.schema
        records = [view.record(peer) for peer in list(view.live)]
        return sum(record is not None and record.schema == mine for record in records)

    def reunite(self, held: Sequence[int], company: int, wait_s: float) -> Choosing:
        """Begin to agree with all who resume on an epoch to start from.

        Args:
            held: the epochs that this peer can begin with.
            company: how many peers trained when the newest of them was saved; 0: unknown.
            wait_s: how long to wait for so many at most.
        """
        choosing = Choosing(self._thread.waiting)
        desk, view = self._desk.reunion, self._driver.node.view
        self._thread.post(desk.begin, view, held, company, wait_s, choosing)
        return choosing

    @property
    def merging(self) -> float | None:
        """What this peer has done since sides of the swarm have parted that merge now, in samples
        of earlier epochs: its next weight counts them, too. None: nothing merges."""
        return self._driver.node.merging

    def merge(self, able: bool) -> None:
        """Say whether this peer's training heeds `merging`."""
        self._thread.post(self._driver.node.merge, able)

    def able(self, able: bool) -> None:
        """Say whether this peer has a training that snapshots can be taken of."""
        self._thread.post(self._desk.able, able)

    def give(self, make: Callable[[], StateImage]) -> None:
        """Give a snapshot to those that wait; ``make`` is called in another thread."""
        self._thread.post(self._desk.give, make, self._driver.node.view.me.schema)

    def detach(self) -> None:
        """Average nothing until the next `attach`: the others do not wait for this peer."""
        self._declare(b"", 0)

    def confirm(self, epoch: int) -> None:
        """Say that this peer's values are of an epoch now."""
        self._declare(self._driver.node.view.me.schema, epoch)

    def newest(self, numel: int | None, schema: bytes = b"") -> tuple[int, bytes]:
        """Return the newest epoch of peers that have a state, and what they average; (-1, b""):
        there is no such peer.

        Args:
            numel: how long the vector is that they exchange, if it is known.
            schema: what they exchange, if it is known.
        """

        async def look() -> tuple[int, bytes]:
            view = self._driver.node.view
            records = [view.record(p) for p in donors_in(view, self._me, 0, _ending(numel), schema)]
            known = [(r.epoch, r.schema) for r in records if r is not None]
            return max(known, default=(-1, b""))

        return self._thread.call(look())

    def fetch(
        self, *, epoch_min: int, size_max: int, numel: int | None, schema: bytes = b""
    ) -> Fetching:
        """Begin to fetch the swarm's training state.

        Args:
            epoch_min: states of earlier epochs are of no use.
            size_max: how many bytes it may have; so much memory is taken.
            numel, schema: as for `newest`.
        """
        fetching = Fetching(self._thread.waiting)

        def begin() -> None:
            view = self._driver.node.view
            donors = donors_in(view, self._me, epoch_min, _ending(numel), schema)
            self._desk.fetch(
                donors,
                fetching,
                size_max,
                epoch_min,
                shares=view.dialable(self._me),
                reach=self._reach,
            )

        self._thread.post(begin)
        return fetching

    def pause(self, seconds: float) -> None:
        """Let some time pass."""
        self._thread.waiting.event().wait(seconds)

    def _reach(self, peer: PeerId) -> bool:
        """Whether another peer can be asked for pieces."""
        view = self._driver.node.view
        known = peer != self._me and view.reachable(peer)
        return known and (view.dialable(peer) or view.linked(peer))

    def stop(self, fetching: Fetching) -> None:
        """Stop a fetch that is under way."""
        self._thread.post(self._desk.stop, fetching)


def _ending(numel: int | None) -> bytes:
    return b"" if numel is None else numel.to_bytes(NUMEL_BYTES, "little")
