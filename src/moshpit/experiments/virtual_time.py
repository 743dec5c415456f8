"""Virtual time: a loop whose clock jumps, and threads that run one at a time.

Theory of operation
-------------------
The network side of every peer lives in one asyncio loop, as it does in a process of its own. This
loop's clock stands still while anybody computes, and jumps to the next timer when nobody has
anything to do. So what happens takes as long as the model says, and not as long as it takes here.

The training of every peer is a plain function, a *script*, in a thread of its own, since training
code blocks. A baton passes between the loop and the scripts: a script runs until it waits for
something (`Stage.wait_for`), and then the loop goes on; the loop goes on until a future that a
script waits for is done, and then that script does. Exactly one of them runs at any time, in an
order that follows from timers and numbers only. So the same seed gives the same run.

`VirtualWaiting` and `VirtualBridge` are what a `moshpit.Swarm` needs to live here.
"""

from __future__ import annotations

import asyncio
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Executor
from random import Random
from types import TracebackType
from typing import Any, Final, NoReturn, TypeVar, TypeVarTuple, final

import torch

from moshpit.errors import ClosedError, LocalError
from moshpit.runtime.waiting import Condition, Event

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

RESOLUTION_S: Final = 1e-9  # timers that are so close are due together


class StalledError(LocalError):
    """Everybody waits, and nothing is going to happen any more."""


@final
class _Selector(selectors.BaseSelector):
    """Watches no files: where others sleep, it moves the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self._keys: dict[int, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: object = None) -> selectors.SelectorKey:
        """See `selectors.BaseSelector`; the loop's own pipe comes here."""
        number = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        key = selectors.SelectorKey(fileobj, number, events, data)
        self._keys[number] = key
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """See `selectors.BaseSelector`."""
        return self._keys.pop(fileobj if isinstance(fileobj, int) else fileobj.fileno())

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Let time pass."""
        if timeout is None:
            raise StalledError("everybody waits for something that nothing will bring about")
        self.now += max(0.0, timeout)
        return []

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """See `selectors.BaseSelector`."""
        return self._keys


@final
class VirtualLoop(asyncio.SelectorEventLoop):
    """A loop whose clock begins at 0 and goes on only when nothing is left to do."""

    def __init__(self) -> None:
        self._virtual = _Selector()
        super().__init__(self._virtual)
        self._clock_resolution = RESOLUTION_S

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self._virtual.now

    def run_in_executor(
        self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts
    ) -> asyncio.Future[T]:
        """Run it here and now: a thread would run beside virtual time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:
            future.set_exception(error)
        return future


class Killed(BaseException):
    """This script's peer is dead: the thread ends. Nothing catches it but `finally` blocks."""


@final
class Script:
    """A function in a thread of its own, which runs only when it has the baton.

    Args:
        stage: who passes it.
        function: what runs.
        name: of the thread.
    """

    def __init__(self, stage: Stage, function: Callable[[], object], name: str) -> None:
        self._stage = stage
        self._function = function
        self._go, self._back = threading.Lock(), threading.Lock()  # released: the other may go
        self._go.acquire()
        self._back.acquire()
        self._waits = 0
        self.name = name
        self.killed = False
        self.ended = False
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        self._go.acquire()
        torch.set_num_threads(1)  # one at a time runs, so more would not make it faster
        try:
            if not self.killed:
                self._function()
        except BaseException as error:
            if not self.killed:  # what a dead process stumbles over, nobody hears of
                self.error = error
        finally:
            self.ended = True
            self._back.release()

    def resume(self, wait: int) -> None:
        """Hand over the baton, if it still waits for this; in the loop's thread."""
        if wait != self._waits or self.ended:
            return
        before, self._stage.current = self._stage.current, self
        self._go.release()
        self._back.acquire()
        self._stage.current = before
        if self.ended:
            self._thread.join()
            self._stage.left(self)

    def pause(self, future: asyncio.Future[Any]) -> None:
        """Give the baton back until a future is done; in this script's thread."""
        self.check()
        self._waits += 1
        wait = self._waits
        future.add_done_callback(lambda _: self.resume(wait))
        self._back.release()
        self._go.acquire()
        self.check()

    def check(self) -> None:
        """Raise `Killed` if it is."""
        if self.killed:
            raise Killed

    def kill(self) -> None:
        """End it where it waits; in the loop's thread."""
        self.killed = True
        self.resume(self._waits)


@final
class Stage:
    """Where scripts run, one at a time.

    Args:
        loop: whose clock is theirs.

    Attributes:
        current: the script that has the baton; None: the loop has it.
    """

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.current: Script | None = None
        self._scripts: dict[Script, None] = {}
        self._done: asyncio.Future[None] = loop.create_future()
        self._planned = 0

    def start_at(self, when: float, start: Callable[[], object]) -> None:
        """Call something at a time that will start scripts; until then, they have not all ended."""
        self._planned += 1

        def due() -> None:
            self._planned -= 1
            start()

        self.loop.call_at(when, due)

    def start(self, function: Callable[[], object], name: str) -> Script:
        """Start a script, now."""
        script = Script(self, function, name)
        self._scripts[script] = None
        self.loop.call_soon(script.resume, 0)
        return script

    def left(self, script: Script) -> None:
        """A script has ended."""
        self._scripts.pop(script, None)
        if self._done.done():
            return
        if script.error is not None:
            self._done.set_exception(script.error)
        elif not self._scripts and not self._planned:
            self._done.set_result(None)

    def run(self, limit_s: float) -> bool:
        """Run until all scripts have ended; return whether they have within ``limit_s``.

        Raises:
            Exception: whatever the first script that failed has raised.
            StalledError: all wait for each other.
        """
        timer = self.loop.call_later(limit_s, self._time_is_over)
        try:
            self.loop.run_until_complete(self._done)
        except TimeoutError:
            return False
        finally:
            timer.cancel()
        return True

    def stop(self) -> None:
        """End `run`, wherever the scripts are."""
        if not self._done.done():
            self._done.set_result(None)

    def _time_is_over(self) -> None:
        if not self._done.done():
            self._done.set_exception(TimeoutError())

    def close(self) -> None:
        """End all scripts where they are, then the loop and its tasks."""
        self.stop()
        self._done.exception()  # `run` has raised it, or nobody ran
        for script in list(self._scripts):
            script.kill()
        self.loop.run_until_complete(_end_others())
        self.loop.close()

    def wait_for(self, future: asyncio.Future[T]) -> T:
        """Block the script that has the baton until a future is done; return its result."""
        script = self.current
        if script is None:
            raise LocalError("only a script can wait; callbacks of the network cannot")
        if not future.done():
            script.pause(future)
        return future.result()

    def sleep(self, seconds: float) -> None:
        """Let time pass."""
        future: asyncio.Future[None] = self.loop.create_future()
        timer = self.loop.call_later(seconds, future.set_result, None)
        try:
            self.wait_for(future)
        finally:
            timer.cancel()


@final
class VirtualEvent:
    """See `moshpit.runtime.waiting.Event`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._set = False
        self._waiters: dict[asyncio.Future[None], None] = {}

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._set

    def set(self) -> None:
        """It has happened."""
        self._set = True
        for future in self._waiters:
            if not future.done():
                future.set_result(None)

    def wait(self, timeout: float | None = None) -> bool:
        """Block until it has; return whether it has."""
        if self._set or (timeout is not None and timeout <= 0):
            return self._set
        loop = self._stage.loop
        future: asyncio.Future[None] = loop.create_future()
        self._waiters[future] = None
        timer = None if timeout is None else loop.call_later(timeout, _wake, future)
        try:
            self._stage.wait_for(future)
        finally:
            del self._waiters[future]
            if timer is not None:
                timer.cancel()
        return self._set


async def _end_others() -> None:
    left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in left:
        task.cancel()
    await asyncio.gather(*left, return_exceptions=True)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


@final
class VirtualCondition:
    """See `moshpit.runtime.waiting.Condition`. There is nothing to lock: one at a time runs."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self._news = VirtualEvent(stage)

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc_val: BaseException | None,
        exc_tb: TracebackType | None,
        /,
    ) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Block until the predicate holds; return whether it does."""
        end = None if timeout is None else self._stage.loop.time() + timeout
        while not predicate():
            left = None if end is None else end - self._stage.loop.time()
            if left is not None and left <= RESOLUTION_S:
                return False
            self._news.wait(left)
        return True

    def notify_all(self) -> None:
        """Something has changed."""
        news, self._news = self._news, VirtualEvent(self._stage)
        news.set()


@final
class VirtualWaiting:
    """See `moshpit.runtime.waiting.Waiting`."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage
        self.clock = stage.loop.time

    def event(self) -> Event:
        """See `Waiting.event`."""
        return VirtualEvent(self._stage)

    def condition(self) -> Condition:
        """See `Waiting.condition`."""
        return VirtualCondition(self._stage)


@final
class VirtualBridge:
    """Between a peer's script and its network side (see `moshpit.runtime.background.Bridge`).

    Args:
        stage: where the script runs.
        rng: what the network side draws from.
    """

    def __init__(self, stage: Stage, rng: Random) -> None:
        self.waiting = VirtualWaiting(stage)
        self.rng = rng
        self.running = True
        self._stage = stage

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float | None = None) -> T:
        """See `Bridge.call`."""
        if not self.running:
            self._stage.loop.create_task(work)  # done without the dead one
            _closed()
        if timeout_s is not None:
            work = asyncio.wait_for(work, timeout_s)
        task = self._stage.loop.create_task(work)
        try:
            return self._stage.wait_for(task)
        except BaseException:
            task.cancel()
            raise

    def post(self, function: Callable[..., object], *args: object) -> None:
        """See `Bridge.post`."""
        if not self.running:
            _closed()
        self._stage.loop.call_soon(function, *args)

    def stop(self) -> None:
        """See `Bridge.stop`."""
        self.running = False


def _closed() -> NoReturn:
    raise ClosedError("the swarm is closed; join again to go on")
