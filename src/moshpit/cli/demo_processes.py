"""The demo's processes: started, listened to, killed, and never left behind."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO

import msgspec

from moshpit.cli.demo_messages import Assignment, Done, Epoch, Go, Joined, Listening, Step, Told
from moshpit.errors import LocalError

_EXIT_TIMEOUT_S = 20.0
_TOLD_TYPES = Listening | Joined | Epoch | Step | Done
_LOG_LINES = 15


class Worker:
    """One process. What it says arrives in the queue given, as (worker, message); its end as
    (worker, None)."""

    def __init__(
        self, name: str, index: int, inbox: queue.SimpleQueue[tuple[Worker, Told | None]]
    ) -> None:
        self.name = name
        self.index = index
        self.killed_at: float | None = None
        self._inbox = inbox
        self._log: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moshpit.cli.demo_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,  # Ctrl-C reaches the demo only, which then ends its workers
        )
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        decoder = msgspec.json.Decoder(_TOLD_TYPES)
        for line in self.process.stdout:
            try:
                message = decoder.decode(line)
            except msgspec.DecodeError:  # the last line of a killed process may be cut
                break
            self._inbox.put((self, message))
        self._inbox.put((self, None))

    def give(self, message: Assignment | Go) -> None:
        """Write one line to the process; one that is gone does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is reported by the reader
            self.process.stdin.write(msgspec.json.encode(message) + b"\n")
            self.process.stdin.flush()

    def kill(self) -> None:
        """Kill the process at once (SIGKILL), as a power cut would."""
        self.killed_at = time.monotonic()
        self.process.send_signal(signal.SIGKILL)

    def log_tail(self) -> str:
        """Return the last lines that the process wrote to its standard error."""
        if self._log.closed:
            return ""
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-_LOG_LINES:])

    def end(self) -> int:
        """Wait for the process to end, if necessary end it, and return its exit code."""
        try:
            code = self.process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait()
        self.close()
        return code

    def close(self) -> None:
        """Close the pipes and the log of a process that has ended."""
        self._reader.join()
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdout.close()
        with contextlib.suppress(BrokenPipeError):  # what it no longer read is of no interest
            self.process.stdin.close()
        self._log.close()


class Workers:
    """Some processes and one queue of what they say. Ends them all when left."""

    def __init__(self) -> None:
        self.all: list[Worker] = []
        self._inbox: queue.SimpleQueue[tuple[Worker, Told | None]] = queue.SimpleQueue()
        self.folder = tempfile.TemporaryDirectory(prefix="moshpit-demo-")

    def start(self, name: str, index: int) -> Worker:
        """Start one process; it waits for its `Assignment`."""
        worker = Worker(name, index, self._inbox)
        self.all.append(worker)
        return worker

    def weights_path(self, name: str) -> Path:
        """Return where a worker writes its final weights."""
        return Path(self.folder.name) / f"{name}.safetensors"

    def next(self, timeout_s: float) -> tuple[Worker, Told] | None:
        """Return the next message, or None if there was none in time.

        Raises:
            LocalError: a process has ended that was not killed on purpose; with its log.
        """
        try:
            worker, message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            return None
        if message is not None:
            return worker, message
        if worker.killed_at is None and worker.process.wait() != 0:
            raise LocalError(
                f"the demo's process {worker.name} ended by itself (exit code "
                f"{worker.process.returncode}); its last words:\n{worker.log_tail()}"
            )
        return None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        for worker in self.all:
            if worker.process.poll() is None:
                worker.process.kill()
            worker.process.wait()
            worker.close()
        self.folder.cleanup()
