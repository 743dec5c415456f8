"""Where the peers that resume from checkpoints agree on an epoch: the driver of
`moshpit.protocol.reunion`, in the network thread, beside `StateDesk`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import final

from moshpit.events import Notice
from moshpit.protocol.machine import View, carried_out
from moshpit.protocol.reunion import Chosen, Reunion, ReunionEffect
from moshpit.runtime.waiting import REAL_TIME, Waiting
from moshpit.transport.base import Transport
from moshpit.types import PeerId
from moshpit.wire.transfer import StateHeld

EARLY_MAX = 4096  # guess: peers that may tell before this one asks


@final
class Choosing:
    """A choice under way. The network thread writes it, training waits for it."""

    def __init__(self, waiting: Waiting = REAL_TIME) -> None:
        self._ended = waiting.event()
        self.choice: Chosen | None = None
        """What the swarm starts from; None: not known yet, or the swarm was closed."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until it has ended, for so long at most; return whether it has."""
        return self._ended.wait(timeout_s)

    def end(self, choice: Chosen | None) -> None:
        """Called by the network thread."""
        if not self._ended.is_set():
            self.choice = choice
            self._ended.set()


@final
class ReunionDesk:
    """Takes part in the choice, once, and tells it to those that come later.

    Args:
        transport: by which messages go.
        tell: whom to tell what was refused.
    """

    def __init__(self, transport: Transport, tell: Callable[[Notice], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport = transport
        self._tell = tell
        self._machine: Reunion | None = None
        self._choosing: Choosing | None = None
        self._early: dict[PeerId, StateHeld] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def begin(
        self, view: View, held: Sequence[int], company: int, wait_s: float, choosing: Choosing
    ) -> None:
        """Take part; see `Reunion`."""
        if self._closed or self._machine is not None:
            choosing.end(self._machine.choice if self._machine is not None else None)
            return
        now = self._loop.time()
        self._choosing = choosing
        machine = self._machine = Reunion(view, held, company, wait_s, now)
        early, self._early = self._early, {}
        for peer, message in early.items():
            self._execute(machine.received(peer, message, now))
        self._execute(machine.start(now))

    def handle(self, peer: PeerId, message: StateHeld) -> None:
        """Take a message of a proved peer."""
        if self._machine is not None:
            self._execute(self._machine.received(peer, message, self._loop.time()))
        elif len(self._early) < EARLY_MAX:
            self._early[peer] = message

    def close(self) -> None:
        """Give up."""
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._choosing is not None:
            self._choosing.end(None)

    def _execute(self, effects: list[ReunionEffect]) -> None:
        for chosen in carried_out(effects, self._transport.send, self._tell):
            assert self._choosing is not None
            self._choosing.end(chosen)
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._machine is not None and self._machine.wakeup is not None and not self._closed:
            self._timer = self._loop.call_at(self._machine.wakeup, self._tick)

    def _tick(self) -> None:
        self._timer = None
        if self._machine is not None:
            self._execute(self._machine.tick(self._loop.time()))
