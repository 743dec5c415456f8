"""A peer's process, again and again: started, listened to, signalled, looked at, ended."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.real.harness import environment, told

from .network import Site
from .record import GRACE_S, Event, Held, Life

SCRIPT = Path(__file__).with_name("trainer.py")
PORT = 7000
LOG_LINES = 12


def held(pid: int) -> Held | None:
    """Look at a process; None if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        links: list[str] = []
        for fd in os.listdir(f"/proc/{pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                links.append(os.readlink(f"/proc/{pid}/fd/{fd}"))
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
    if "VmRSS" not in fields:  # it has just ended
        return None
    sockets = sum(link.startswith("socket:") for link in links)
    return Held(
        at=time.monotonic(),
        threads=int(fields["Threads"]),
        sockets=sockets,
        files=len(links) - sockets,
        memory_mb=int(fields["VmRSS"].split()[0]) / 1024,
    )


class Process:
    """One process of a peer. What it says arrives in the queue given, as (process, event); its
    end as (process, None)."""

    def __init__(
        self,
        peer: int,
        site: Site,
        said: queue.SimpleQueue[tuple[Process, Event | None]],
        *,
        ticket: str,
        folder: Path,
        args: list[str],
    ) -> None:
        self.peer = peer
        self.life = Life(peer, started=time.monotonic())
        self._stopped_at = 0.0
        self._closed = False
        self._said = said
        self._log_path = folder / "log"
        self._log_from = self._log_path.stat().st_size if self._log_path.exists() else 0
        where = ("--role", "client") if not site.address else ("--listen", f"{site.address}:{PORT}")
        run = ["--ticket", ticket, "--identity", str(folder / "key"), *where]
        run += ["--resume", str(folder / "saved"), "--grace", f"{GRACE_S:g}s"]
        script = ["--checkpoints", str(folder / "saved"), "--weights", str(folder / "weights")]
        with self._log_path.open("a") as log:
            self._process = subprocess.Popen(
                site.inside.inside(
                    *(sys.executable, "-m", "moshpit", "run", *run, str(SCRIPT), *script, *args)
                ),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=environment(),
                start_new_session=True,  # Ctrl-C reaches the suite only, which then ends them
            )
        self.pid = self._process.pid
        self._reader = threading.Thread(target=self._read, name=f"chaos-p{peer}", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for event in told(self._process.stdout):
            self._said.put((self, event))
        self.life.code = self._process.wait()
        self.life.ended = time.monotonic()
        self._said.put((self, None))

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """What this process, and no former one of the same peer, has written."""
        with self._log_path.open(errors="replace") as log:
            log.seek(self._log_from)
            return log.read()

    @property
    def last_words(self) -> str:
        return "\n".join(self.log.splitlines()[-LOG_LINES:])

    def tell(self, **order: object) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # its end is told by the reader
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()

    def look(self) -> None:
        """Note what it holds."""
        now = held(self.pid)
        if now is not None:
            self.life.held.append(now)

    def kill(self) -> None:
        self.life.expected = "killed"
        self._process.kill()

    def leave(self) -> None:
        self.life.expected = "left"
        self.life.told_to_leave = time.monotonic()
        self._process.terminate()

    def stop(self) -> None:
        self._stopped_at = time.monotonic()
        self._process.send_signal(signal.SIGSTOP)

    def go_on(self) -> None:
        self._process.send_signal(signal.SIGCONT)
        self.life.stopped.append((self._stopped_at, time.monotonic()))

    def wait(self) -> None:
        """Wait for the end of a killed process."""
        self._process.wait()

    def end(self) -> None:
        """Whatever it does, it is gone afterwards."""
        if self.alive:
            self._process.kill()
        self._process.wait()
        self._reader.join()
        if self._closed:
            return
        self._closed = True
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
