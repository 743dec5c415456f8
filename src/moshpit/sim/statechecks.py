"""What must hold of state transfer: T, in the simulator's reports.

- What a peer has fetched is, number by number, one snapshot that somebody took, of the epoch that
  was offered: nothing of another epoch is in it.
- Broken pieces are blamed on whoever sent them, and nobody else is blamed for his state.
- Who has fetched a state takes part, with weight, in an averaging by the end of the next epoch.
"""

from __future__ import annotations

from typing import Protocol

from moshpit.events import Notice
from moshpit.sim.process import Process
from moshpit.sim.store import Manifest
from moshpit.types import PeerId, short

NAME = "T"


class Score(Protocol):
    """The part of `Checkers` that counts and blames."""

    def count(self, name: str) -> None: ...
    def fail(self, name: str, now: float, process: Process | None, text: str) -> None: ...
    def is_corrupt(self, peer: PeerId) -> bool: ...


class StateChecks:
    """The checks of one run.

    Attributes:
        fetched_states: how many states have arrived.
        blamed: how often somebody was blamed for a broken piece.
    """

    def __init__(self, score: Score) -> None:
        self._score = score
        self._given: dict[Manifest, tuple[float, ...]] = {}
        self._broken: dict[int, PeerId] = {}
        self._back: dict[int, int] = {}
        self.fetched_states = 0
        self.blamed = 0

    def gave(self, manifest: Manifest, values: tuple[float, ...]) -> None:
        """Somebody took a snapshot."""
        self._given[manifest] = values

    def judged(self, now: float, process: Process, sender: PeerId, fault: str) -> None:
        """A piece has come, and was looked at."""
        if not fault:
            return
        self._score.count(NAME)
        self._broken[process.index] = sender
        if not self._score.is_corrupt(sender):
            self._score.fail(NAME, now, process, f"{fault}, from honest {short(sender)}")

    def told(self, now: float, process: Process, notice: Notice) -> None:
        """A machine tells people something."""
        if notice.code != "state-refused":
            return
        self._score.count(NAME)
        self.blamed += 1
        if notice.peer is None or notice.peer != self._broken.pop(process.index, None):
            self._score.fail(NAME, now, process, f"blames an honest donor: {notice}")

    def fetched(
        self, now: float, process: Process, manifest: Manifest, epoch: int, values: list[float]
    ) -> None:
        """A state is complete."""
        self._score.count(NAME)
        self.fetched_states += 1
        given = self._given.get(manifest)
        if given is None or manifest.epoch != epoch:
            self._score.fail(NAME, now, process, f"fetched a state of epoch {epoch} of nobody's")
        elif given != tuple(values):
            text = f"fetched a torn state of epoch {epoch}: {values}, {given} was given"
            self._score.fail(NAME, now, process, text)

    def back(self, process: Process) -> None:
        """It trains again."""
        self._back[process.index] = process.node.epoch

    def excuse(self, process: Process) -> None:
        """It stands still, or is cut off or gone: its promise is void."""
        self._back.pop(process.index, None)

    def averaged(self, now: float, process: Process, epoch: int, *, weighed: bool) -> None:
        """A process has averaged an epoch; ``weighed``: its own value had a weight."""
        since = self._back.get(process.index)
        if since is None:
            return
        if weighed or epoch > since + 1:
            del self._back[process.index]
            self._score.count(NAME)
        if epoch > since + 1:
            text = f"had the state in epoch {since}, and takes part in {epoch}"
            self._score.fail(NAME, now, process, text)

    def finish(self, now: float, live: list[Process]) -> None:
        """The run is over: who still owes its part?"""
        for process in live:
            since = self._back.get(process.index)
            if since is not None and process.node.epoch > since + 2:
                text = f"had the state in epoch {since}, is at {process.node.epoch}, never averaged"
                self._score.fail(NAME, now, process, text)
