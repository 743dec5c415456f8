"""Real processes under `moshpit run` that are asked to end, by real signals."""

from __future__ import annotations

import contextlib
import json
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moshpit.identity.tickets import RunKey
from moshpit.training.shelf import read, saved_in
from moshpit.types import Address

from .harness import free_port

SCRIPT = Path(__file__).with_name("trainer.py")
Event = dict[str, Any]


class Trainer:
    """A process of `moshpit run trainer.py`."""

    def __init__(self, folder: Path, number: int, ticket: str, listen: str, *args: str) -> None:
        self.checkpoints = folder / f"ckpt{number}"
        run = [*("run", "--preset", "local", "--ticket", ticket, "--listen", listen)]
        run += ["--identity", str(folder / f"key{number}")]
        grace = args[args.index("--grace") :][:2] if "--grace" in args else ()
        script = [a for a in args if a not in grace]
        self._errors = folder / f"stderr{number}"
        self.name = ""
        with self._errors.open("w") as errors:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "moshpit", *run, *grace, str(SCRIPT)]
                + ["--checkpoints", str(self.checkpoints), "--seed", str(number), *script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self._events: queue.Queue[Event | None] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._events.put(json.loads(line))
        self._events.put(None)

    def tell(self, do: str, **fields: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **fields}) + "\n")
        self.process.stdin.flush()

    def expect(self, kind: str, timeout_s: float = 90.0) -> Event:
        deadline = time.monotonic() + timeout_s
        while True:
            event = self._events.get(timeout=max(0.01, deadline - time.monotonic()))
            assert event is not None, f"it ended while {kind!r} was awaited:\n{self.errors}"
            if event["event"] == kind:
                return event

    def ended(self, timeout_s: float = 60.0) -> int:
        return self.process.wait(timeout_s)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    @property
    def errors(self) -> str:
        return self._errors.read_text()

    def said(self, text: str) -> None:
        """Wait until it has said something on standard error."""
        deadline = time.monotonic() + 60.0
        while text not in self.errors:
            assert time.monotonic() < deadline, self.errors
            time.sleep(0.01)

    def stop(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            with contextlib.suppress(OSError):
                stream.close()


@contextlib.contextmanager
def trainers(n: int, folder: Path, *args: str) -> Iterator[list[Trainer]]:
    port = free_port()
    ticket = RunKey.generate().invite().ticket((Address("127.0.0.1", port),)).encode()
    started: list[Trainer] = []
    try:
        for number in range(n):
            listen = f"127.0.0.1:{port if number == 0 else 0}"
            started.append(Trainer(folder, number, ticket, listen, *args))
        for trainer in started:
            trainer.name = trainer.expect("joined")["peer"]
            trainer.expect("ready")
        for trainer in started:
            trainer.tell("peers", n=n)
        for trainer in started:
            trainer.expect("met")
        yield started
    finally:
        for trainer in started:
            trainer.stop()


def saved_weights(trainer: Trainer) -> tuple[int, torch.Tensor]:
    newest, *_ = saved_in(trainer.checkpoints)
    state = read(newest.path)
    return newest.epoch, state.tensors["model.weight"]


def test_three_leave_one_after_the_other(tmp_path: Path) -> None:
    with trainers(3, tmp_path, "--grace", "20s") as (one, two, three):
        # In the middle of an averaging: it is finished, and nobody's mean is poorer for it.
        one.tell("step", samples=20_000)  # which meets the target: it waits for the others
        one.expect("began")
        one.signal(signal.SIGTERM)
        one.said("SIGTERM: leaving, within 20 s")
        for other in (two, three):
            other.tell("epoch")
        reports = [other.expect("averaged") for other in (two, three)]
        goodbye = one.expect("leaving")
        one.expect("finally")
        assert one.ended() == 0, one.errors
        for report in reports:
            assert report["outcome"] == "complete", report
            assert set(report["contributors"]) == {t.name for t in (one, two, three)}
            assert report["digest"] == goodbye["digest"]
        assert saved_weights(one)[0] == 1

        # The next one does not count on who is gone.
        two.tell("step", samples=20_000)
        three.tell("epoch")
        report = three.expect("averaged")
        assert (report["epoch"], report["outcome"]) == (1, "complete")
        assert set(report["contributors"]) == {two.name, three.name}
        two.expect("stepped")
        two.tell("count")
        assert two.expect("count")["peers"] == 2

        # A round that does not end is left to the others.
        two.tell("step", samples=20_000)
        two.expect("began")  # and three never comes
        two.signal(signal.SIGTERM)
        two.expect("leaving")
        two.expect("finally")
        assert two.ended() == 0, two.errors
        assert saved_weights(two)[0] >= 2

        # Twice is at once.
        three.signal(signal.SIGINT)
        three.said("SIGINT: leaving")
        three.signal(signal.SIGINT)
        assert three.ended() == 128 + signal.SIGINT
        assert "ending at once" in three.errors


@pytest.mark.soak
def test_two_leave_wherever_they_are(tmp_path: Path) -> None:
    with trainers(2, tmp_path, "--overlap", "--epoch-samples", "256", "--grace", "20s") as both:
        # In a loop that trains on while averagings are under way.
        one, two = both
        for trainer in both:
            trainer.tell("train" if trainer is two else "epoch")
            trainer.expect("began")
        two.signal(signal.SIGINT)
        two.expect("leaving")
        two.expect("finally")
        assert two.ended() == 0, two.errors
        assert "Traceback" not in two.errors
        assert torch.isfinite(saved_weights(two)[1]).all()

        # In a script that does not come around: it reads its standard input.
        one.expect("averaged")
        one.signal(signal.SIGTERM)
        one.expect("leaving")
        one.expect("finally")
        assert one.ended() == 0, one.errors


FORKS = """
import os, signal, time
hear, tell = os.pipe()
child = os.fork()
if child == 0:
    while True:
        os.write(tell, b".")
        time.sleep(0.01)
os.kill(child, signal.SIGINT)
for _ in range(50):
    assert os.read(hear, 1) == b".", "Ctrl-C is the parent's business"
os.kill(child, signal.SIGTERM)
_, status = os.waitpid(child, 0)
print(os.waitstatus_to_exitcode(status))
"""


def test_children_can_be_ended(tmp_path: Path) -> None:
    script = tmp_path / "forks.py"
    script.write_text(FORKS)
    done = subprocess.run(
        [sys.executable, "-m", "moshpit", "run", str(script)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (0, f"{-signal.SIGTERM}\n"), done.stderr
