"""Leaving in good order when the process is asked to end.

Under `moshpit run`, SIGTERM or Ctrl-C does not tear a training loop apart: it is noted, and the
next ``optimizer.step()`` that returns to the loop finishes the averaging under way, tells the
swarm, saves, and raises `Leaving`. Everything has a time: a loop that does not come around,
or a round that does not end, is interrupted at a share of the grace, wherever it is, and what it
had after its last step is saved; and when the grace is over, the process ends. A script without
such a loop is interrupted at once.

Python runs a signal's handler in the main thread, when that comes back to Python. One that waits
in C code for something that does not come (a mutex, a device) never does; so the grace is kept by
a thread of its own, to which the signal itself writes (`signal.set_wakeup_fd`).

Signals belong to the process, and so does this module's state: one `Departure`.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from types import FrameType
from typing import Final, Protocol, final

from moshpit.errors import MoshpitError

ROUND_SHARE = 0.5  # guess: of the grace, for the averaging under way; the rest is for saving
INTERRUPT_SHARE = 0.6  # guess: of the grace, for the loop to come around by itself
HANDLED_S = 0.5  # guess: so soon the main thread handles a signal, if it can
OURS: Final = "moshpit."
OUTSIDE: Final = (__name__, "moshpit.cli.run")
"""Modules of ours that a loop may be interrupted in without being in the midst of a step."""


class Saver(Protocol):
    """Keeps what a training loop has: `moshpit.Checkpoint`."""

    def save(self, timeout_s: float | None = None) -> object:
        """Save what there is between two steps, within so many seconds."""
        ...


class Leaving(SystemExit):
    """The process was asked to end and everything is in order: let it pass.

    Not an `Exception`, so that ``except Exception`` lets it through; ``finally`` blocks run. The
    exit code is 0.

    Example:
        >>> issubclass(Leaving, Exception), Leaving().code
        (False, 0)
    """

    def __init__(self) -> None:
        super().__init__(0)


@final
class Departure:
    """How far the end of this process has come. Made by `on_signals`.

    Args:
        grace_s: seconds from the first signal to the end, at most.
    """

    def __init__(self, grace_s: float) -> None:
        self.grace_s = grace_s
        self.looping = False
        """Whether a training loop runs, so that the next step will see what is asked."""
        self.saver: Saver | None = None
        """Saves what the loop has."""
        self.interrupted = False
        """Whether the loop did not come around by itself."""
        self._owner = os.getpid()
        self._heard, self._wake = os.pipe()
        os.set_blocking(self._wake, False)
        self._asked_at = 0.0
        self._number = signal.SIGTERM
        self._asked = threading.Event()
        self._unwinding = threading.Event()
        self._interrupt = False
        # Made now: a signal's handler may start no thread, for it may have interrupted one start.
        threading.Thread(target=self._watch, name="moshpit-grace", daemon=True).start()

    def listen(self) -> None:
        """Have signals wake the thread that keeps the grace. For the main thread."""
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        # A child's signals are none of this process.
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))

    @property
    def asked(self) -> bool:
        """Whether the process is to end."""
        return self._asked.is_set()

    def left_s(self, share: float = 1.0) -> float:
        """Return how many seconds are left of a share of the grace; 0 if none."""
        return max(0.0, self._asked_at + share * self.grace_s - time.monotonic())

    def unwind(self) -> None:
        """The loop has seen it: it needs no interruption any more."""
        self._unwinding.set()

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What a signal does."""
        if os.getpid() != self._owner:
            _in_a_child(number)
        elif self._interrupt:
            self._interrupt = False
            self.interrupted = True
            self._unwinding.set()
            raise Leaving
        elif not self.asked:
            self._note(number)
            self._asked.set()
            with contextlib.suppress(BlockingIOError):
                os.write(self._wake, b"\0")  # an event loop may have taken the signals' own writing
            _say(
                f"{self._number.name}: leaving, within {self.grace_s:g} s"
                + (" (again: at once)" if number == signal.SIGINT else "")
            )
            if not self.looping:
                self._unwinding.set()
                raise Leaving
        elif number == signal.SIGINT:
            _say("interrupted again: ending at once")
            os._exit(128 + number)

    def _note(self, number: int) -> None:
        """The first signal has come; whoever sees it first says so."""
        if not self._asked_at:
            self._number, self._asked_at = signal.Signals(number), time.monotonic()

    def _watch(self) -> None:
        while not self._asked_at:
            self._hear(None)
        while not self._unwinding.is_set() and self.left_s(INTERRUPT_SHARE):
            self._hear(self.left_s(INTERRUPT_SHARE))
        if not self._unwinding.is_set():
            self._interrupt = True
            main = threading.main_thread().ident
            assert main is not None
            signal.pthread_kill(main, signal.SIGTERM)  # also ends its wait in a system call
        while self.left_s():
            self._hear(self.left_s())
        _say(f"not done {self.grace_s:g} s after {self._number.name}, ending now")
        os._exit(128 + self._number)

    def _hear(self, timeout_s: float | None) -> None:
        """Wait for signals, for a while."""
        if not select.select([self._heard], [], [], timeout_s)[0]:
            return
        for number in os.read(self._heard, 64):
            if number not in (signal.SIGTERM, signal.SIGINT):
                continue
            if self._asked_at and number == signal.SIGINT and not self._asked.wait(HANDLED_S):
                _say("interrupted again: ending at once")
                os._exit(128 + number)
            self._note(number)


class _Process:
    departure: Departure | None = None


def departure() -> Departure | None:
    """Return this process's departure; None where nobody handles signals."""
    return _Process.departure


def on_signals(grace_s: float) -> None:
    """Make SIGTERM and SIGINT end this process in good order. For its main thread."""
    _Process.departure = Departure(grace_s)
    _Process.departure.listen()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, _Process.departure.handle)


def looping(running: bool, saver: Saver | None = None) -> None:
    """Say that a training loop runs here, or that it has ended, and what saves its state."""
    if _Process.departure is not None:
        _Process.departure.looping = running
        _Process.departure.saver = saver


def last_words(error: Leaving) -> None:
    """Save what an interrupted loop has, when everything has unwound.

    Not if it was in the midst of a step, or of an averaging: a state that is half of one and half
    of another is worth less than the last checkpoint.
    """
    leaving = _Process.departure
    if leaving is None or not leaving.interrupted or leaving.saver is None:
        return
    trace = error.__traceback__
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith(OURS) and module not in OUTSIDE:
            _say(f"interrupted in the midst of {module}: the last checkpoint stands")
            return
        trace = trace.tb_next
    try:
        saved = leaving.saver.save(leaving.left_s())
    except MoshpitError as failure:
        _say(f"nothing saved: {failure}")
    else:
        _say("saved what the loop had after its last step" if saved else "nothing saved")


def _in_a_child(number: int) -> None:
    """A forked child, such as a data loader's worker, has inherited the handler."""
    if number != signal.SIGINT:  # Ctrl-C goes to the whole group, and the parent decides
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _say(text: str) -> None:
    # Not `print`: the signal may have come in the middle of one, and buffers cannot be entered
    # twice.
    with contextlib.suppress(OSError):
        os.write(2, f"moshpit: {text}\n".encode())
