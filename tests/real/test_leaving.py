"""Real processes under `moshpit run` that are asked to end, by real signals."""

from __future__ import annotations

import contextlib
import hashlib
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch

from moshpit.identity.tickets import RunKey
from moshpit.training.shelf import read, saved_in
from moshpit.types import Address

from .harness import Child, free_port

SCRIPT = Path(__file__).with_name("trainer.py")
JOINER = Path(__file__).with_name("joiner.py")


class Trainer(Child):
    """A process of `moshpit run trainer.py`."""

    def __init__(self, folder: Path, number: int, ticket: str, listen: str, *args: str) -> None:
        self.checkpoints = folder / f"ckpt{number}"
        run = [*("run", "--preset", "local", "--ticket", ticket, "--listen", listen)]
        run += ["--identity", str(folder / f"key{number}")]
        grace = args[args.index("--grace") :][:2] if "--grace" in args else ()
        script = [a for a in args if a not in grace]
        self.name = ""
        super().__init__(
            [sys.executable, "-m", "moshpit", *run, *grace, str(SCRIPT)]
            + ["--checkpoints", str(self.checkpoints), "--seed", str(number), *script],
            folder / f"stderr{number}",
        )

    def tell(self, do: str, **fields: object) -> None:
        self.send(do=do, **fields)


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


def digest(tensors: Mapping[str, torch.Tensor], prefix: str) -> str:
    """As the trainer's, of a saved state."""
    weights = torch.cat([tensors[prefix + name].reshape(-1) for name in ("weight", "bias")])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()


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


def test_a_step_that_does_not_come_around(tmp_path: Path) -> None:
    with trainers(2, tmp_path, "--grace", "5s") as (one, two):
        for trainer in (one, two):
            trainer.tell("step")
            trainer.expect("stepped")
        # One waits: it is interrupted, and what it had after its last step is saved.
        one.tell("sleep")
        had = one.expect("sleeping")["digest"]
        one.signal(signal.SIGTERM)
        assert one.expect("leaving")["digest"] == had
        one.expect("finally")
        assert one.ended() == 0, one.errors
        assert "saved what the loop had" in one.errors
        newest, *_ = saved_in(one.checkpoints)
        assert digest(read(newest.path).tensors, "model.") == had

        # One hears no signal: when the grace is over, it is ended.
        two.tell("hang")
        two.expect("hanging")
        while "futex" not in waits_in(two.process.pid):  # then no handler runs any more
            time.sleep(0.01)
        began = time.monotonic()
        two.signal(signal.SIGTERM)
        assert two.ended() == 128 + signal.SIGTERM, two.errors
        assert time.monotonic() - began >= 5.0
        assert "not done 5 s after SIGTERM, ending now" in two.errors


def waits_in(pid: int) -> str:
    """What a process's main thread waits in; where nobody tells, as if it were a lock."""
    try:
        return Path(f"/proc/{pid}/wchan").read_text()
    except FileNotFoundError:
        return "futex"


@pytest.mark.soak
def test_a_donor_leaves_in_the_middle(tmp_path: Path) -> None:
    port = free_port()
    ticket = RunKey.generate().invite().ticket((Address("127.0.0.1", port),)).encode()

    def start(number: int, *args: str) -> Child:
        listen = f"127.0.0.1:{port if number == 0 else 0}"
        run = [sys.executable, "-m", "moshpit", "run", "--grace", "30s", str(JOINER)]
        script = ["--ticket", ticket, "--listen", listen, "--strategy", "gradients"]
        script += ["--width", "2000", "--samples", "1000", "--seed", str(number), *args]
        child = Child([*run, *script], tmp_path / f"stderr{number}")
        started.append(child)
        return child

    started: list[Child] = []
    try:
        donors = [start(number, "--peers", "2", "--seed", "0") for number in range(2)]
        for donor in donors:
            donor.expect("epoch", epoch=1)
        late = start(2)
        late.expect("arriving")
        donors[0].signal(signal.SIGTERM)
        assert donors[0].ended() == 0, donors[0].errors
        assert "caught up" not in donors[0].errors
        late.expect("epoch", epoch=1, caught_up=1)
        last = late.latest["epoch"]["epoch"] + 2
        for peer in (donors[1], late):
            peer.send(until=last)
        ends = [peer.expect("finished") for peer in (donors[1], late)]
        assert len({end["digest"] for end in ends}) == 1
        assert all(len(end["contributors"]) == 2 for end in ends)
    finally:
        for child in started:
            child.stop()


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


DEAF = """
import signal, time
from moshpit.runtime import leaving
leaving.on_signals(0.5)
signal.set_wakeup_fd(-1)  # as event loops in the main thread do
while True:
    try:
        print("ready", flush=True)
        time.sleep(60)
    except BaseException:
        pass
"""


def test_the_grace_is_kept_beside_an_event_loop() -> None:
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(60) == 128 + signal.SIGTERM
        finally:
            child.kill()
