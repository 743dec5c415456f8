"""The processes of `moshpit bench averaging`: started, asked, and never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Generator
from types import FrameType, TracebackType
from typing import IO, Any

from moshpit.errors import LocalError

Event = dict[str, Any]

_LEAVE_S = 20.0
_LOG_LINES = 6


class Process:
    """One process, and what it says."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str]) -> None:
        self.name = name
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in end()
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            start_new_session=True,  # Ctrl-C reaches the benchmark only, which then ends them
        )
        self._reader = threading.Thread(target=self._read, name=f"bench-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with contextlib.suppress(json.JSONDecodeError):  # a killed process's last line
                self._events.put(json.loads(line))
        self._events.put(None)

    def tell(self, **fields: object) -> None:
        """Write one line; that it has ended is noticed when its answer is awaited."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(fields).encode() + b"\n")
            self._process.stdin.flush()

    def expect(self, kind: str, deadline: float) -> Event:
        """Wait for an event, until this time of `time.monotonic`.

        Raises:
            LocalError: the process has ended, or the time is over; with its last words.
        """
        try:
            event = self._events.get(timeout=max(0.0, deadline - time.monotonic()))
        except queue.Empty:
            raise LocalError(
                f"{self.name} did not come to {kind!r} in time; its last words: {self._last()}"
            ) from None
        if event is None:
            code = self._process.wait()
            raise LocalError(
                f"{self.name} ended (exit code {code}) before {kind!r}; "
                f"its last words: {self._last()}"
            )
        if event["event"] != kind:
            raise LocalError(f"{self.name} said {event['event']!r} instead of {kind!r}")
        return event

    def _last(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:]) or "none"

    def kill(self) -> None:
        """Kill it and what it has started (hivemind starts more) at once."""
        with contextlib.suppress(ProcessLookupError):
            # Its session is its process group; the group outlives the process that led it.
            os.killpg(self._process.pid, signal.SIGKILL)

    def wait(self, deadline: float) -> None:
        """Wait until it has left by itself; kill it, if it does not."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, deadline - time.monotonic()))

    def end(self) -> None:
        """See to it that nothing of it is left."""
        self.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        self._log.close()


class Processes:
    """All processes of a run. Ends them when left."""

    def __init__(self) -> None:
        self._all: list[Process] = []

    def start(self, name: str, command: list[str], environment: dict[str, str]) -> Process:
        """Start one."""
        process = Process(name, command, environment)
        self._all.append(process)
        return process

    def leave(self) -> None:
        """Ask all to end in the ordinary way, and wait for it."""
        for process in self._all:
            process.tell(do="leave")
        deadline = time.monotonic() + _LEAVE_S
        for process in self._all:
            process.wait(deadline)

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for process in self._all:
            process.end()


@contextlib.contextmanager
def ending_in_order() -> Generator[None]:
    """Turn the first SIGTERM, SIGINT or SIGHUP into the end of the program, with all its
    ``with`` blocks left one by one; ignore the next, so that they are left to the last."""
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
    before = {number: signal.getsignal(number) for number in numbers}

    def end(number: int, frame: FrameType | None) -> None:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        raise SystemExit(128 + number)

    for number in numbers:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
