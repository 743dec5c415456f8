"""An averaging that begins before its vector is complete, and gives out means before its end.

Gradients become final one by one, from the last layer to the first. A chunk that is *filled* is
averaged; all that concerns one that is not is *put off* until it is, chunk by chunk and in
order, so that no machine needs to know. The trainer waits for the means of a few numbers only.

The two threads meet here: the trainer fills and waits, the network thread does the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from moshpit.errors import LocalError
from moshpit.protocol.machine import SendContribution, SendResult
from moshpit.runtime.waiting import REAL_TIME, Waiting
from moshpit.tensors.layout import ChunkPlan
from moshpit.types import GroupId, PeerId

Deed = Callable[[], object]
Shipment = SendContribution | SendResult


class Filling:
    """Which chunks of a vector are there, and what waits for those that are not.

    Args:
        plan: how the vector is cut.
        waiting: how the trainer waits.
    """

    def __init__(self, plan: ChunkPlan, waiting: Waiting = REAL_TIME) -> None:
        self._plan = plan
        self._lock = waiting.condition()
        # By place in the vector: what the trainer fills, and what it waits for.
        self._lacking = [0] * plan.chunks
        self._chunk_at = [0] * plan.chunks
        for chunk in range(plan.chunks):
            self._lacking[plan.place(chunk)] = plan.size(chunk)
            self._chunk_at[plan.place(chunk)] = chunk
        self._landed = bytearray(plan.chunks)
        self._fresh: list[int] = []
        self._ended = False
        # The network thread's: the deeds that wait, by chunk.
        self._open: dict[int, list[tuple[Deed, Shipment | None]]] = {
            chunk: [] for chunk in range(plan.chunks)
        }

    # --- the trainer's side ---------------------------------------------------------------

    def fill(self, start: int, stop: int) -> bool:
        """Note that these numbers are final; each is to be named once.

        Returns:
            Whether the network thread is to be told, by having it call `filled`.

        Raises:
            LocalError: some of them were final before.
        """
        with self._lock:
            news = not self._fresh
            for place, count in self._pieces(start, stop):
                self._lacking[place] -= count
                if self._lacking[place] < 0:
                    raise LocalError(f"numbers {start} to {stop} of the vector came twice")
                if self._lacking[place] == 0:
                    self._fresh.append(self._chunk_at[place])
            return news and bool(self._fresh)

    def wait_for(self, start: int, stop: int, timeout_s: float | None = None) -> bool:
        """Block until the means of these numbers are here, or the averaging has ended; return
        whether that is so, after ``timeout_s`` seconds at the latest."""
        places = [place for place, _ in self._pieces(start, stop)]

        def here() -> bool:
            return self._ended or all(self._landed[place] for place in places)

        with self._lock:
            return self._lock.wait_for(here, timeout_s)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Return the places (in chunks) that a range touches, and how many of its numbers lie
        in each."""
        size = self._plan.chunk_numel
        for place in range(start // size, -(-stop // size) if stop > start else 0):
            yield place, min(stop, (place + 1) * size) - max(start, place * size)

    # --- the network thread's side --------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether every chunk is filled, as far as `filled` has told."""
        return not self._open

    def filled(self) -> Iterator[Deed]:
        """Return what was put off for chunks that are filled now, in order."""
        with self._lock:
            fresh, self._fresh = self._fresh, []
        for chunk in fresh:
            for deed, _ in self._open.pop(chunk):
                yield deed

    def waits(self, chunk: int, *, own: bool) -> bool:
        """Return whether what concerns a chunk is to be put off.

        Args:
            chunk: which.
            own: it needs this peer's own value. What does not is put off only if something
                else was, so that nothing is done out of turn.
        """
        return chunk in self._open and (own or bool(self._open[chunk]))

    def put_off(self, chunk: int, deed: Deed, shipment: Shipment | None = None) -> None:
        """Do this as soon as a chunk is filled."""
        self._open[chunk].append((deed, shipment))

    def cancel(self, peer: PeerId, group: GroupId | None = None) -> None:
        """Forget what is to be sent to a peer, in one round or in all."""
        for chunk, deeds in self._open.items():
            self._open[chunk] = [
                (deed, shipment)
                for deed, shipment in deeds
                if shipment is None
                or shipment.peer != peer
                or (group is not None and shipment.group != group)
            ]

    def open_chunks(self) -> dict[int, None]:
        """Return the chunks that are not filled, in order."""
        return dict.fromkeys(self._open)

    def landed(self, chunk: int) -> None:
        """The mean of a chunk is here, and stays as it is."""
        with self._lock:
            self._landed[self._plan.place(chunk)] = 1
            self._lock.notify_all()

    def end(self) -> None:
        """The averaging has ended: nothing more comes."""
        with self._lock:
            self._ended = True
            self._lock.notify_all()
