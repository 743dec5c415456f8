"""The network's own thread, and the one bridge to it.

Training and network share a process but not a thread: the loop below runs in a daemon
thread (measured against a process of its own in docs/decisions/). Everything of the network
side is touched in that thread only; the trainer asks through `call` and `post`.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any, Protocol, TypeVar

import torch

from moshpit.errors import ClosedError
from moshpit.runtime.waiting import REAL_TIME, Waiting

T = TypeVar("T")

STDERR = 2


def new_loop() -> asyncio.AbstractEventLoop:
    """Return a fresh event loop: uvloop's where it is installed, asyncio's elsewhere."""
    _fill_standard_streams()
    if sys.platform != "win32":
        try:
            import uvloop
        except ImportError:
            pass
        else:
            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


def _fill_standard_streams() -> None:
    """Open what somebody has closed of descriptors 0 to 2, as a daemon's parent may have.

    A socket would get such a number: libuv aborts the process when it closes one, and whatever
    prints would print to a peer.
    """
    while (free := os.open(os.devnull, os.O_RDWR)) <= STDERR:
        os.set_inheritable(free, True)
    os.close(free)


class Bridge(Protocol):
    """Where the network side of a peer lives, as the trainer's side sees it.

    Attributes:
        waiting: the clock of both sides, and how the trainer waits.
        rng: what the network side draws from.
    """

    @property
    def waiting(self) -> Waiting: ...
    @property
    def rng(self) -> Random: ...
    @property
    def running(self) -> bool:
        """Whether it takes calls."""
        ...

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine over there and wait for its result."""
        ...

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run a function over there soon, without waiting."""
        ...

    def stop(self) -> None:
        """End it. Idempotent."""
        ...


class NetworkThread:
    """Owns the thread and the loop in it. Made by `Swarm`, ended by `Swarm.close`."""

    def __init__(self, name: str) -> None:
        self.waiting = REAL_TIME
        self.rng = Random()
        self._loop = new_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._single = threading.Event()
        threads = torch.get_num_threads()
        self._thread.start()
        self._single.wait()
        torch.set_num_threads(threads)  # what new threads get; the loop's keeps its own

    def _run(self) -> None:
        # Chunks are small: more threads for each of them would only take them from training.
        torch.get_num_threads()  # makes this thread's setting, which the next line changes
        torch.set_num_threads(1)
        self._single.set()
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        finally:
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            self._loop.close()

    @property
    def running(self) -> bool:
        """Whether the thread is alive and takes calls."""
        return self._thread.is_alive() and not self._loop.is_closed()

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """Run a coroutine in the network thread and wait for its result."""
        if not self.running:
            work.close()
            raise ClosedError("the swarm is closed; join again to go on")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result(timeout_s)
        except BaseException:  # also KeyboardInterrupt: nobody waits for it any more
            future.cancel()
            raise

    def post(self, function: Callable[..., object], *args: object) -> None:
        """Run a function in the network thread soon, without waiting."""
        try:
            self._loop.call_soon_threadsafe(function, *args)
        except RuntimeError as error:
            raise ClosedError("the swarm is closed; join again to go on") from error

    def stop(self) -> None:
        """Stop the loop and join the thread. Idempotent."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
