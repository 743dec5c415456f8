"""Checkpoints: to the bit, whole or not there, and never in the way of training."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import moshpit
from moshpit.errors import ConfigError, LocalError, StateError
from moshpit.identity.tickets import RunKey
from moshpit.runtime.ambient import set_resume
from moshpit.training import checkpoint as checkpoint_module
from moshpit.training.shelf import saved_in
from moshpit.types import PeerId, short

HERE = Path(__file__).parent
OWNER = short(PeerId(bytes(32)))
Train = Callable[..., "Trainer"]


class Trainer:
    """One peer, alone in its swarm; every second step ends an epoch."""

    def __init__(
        self,
        swarm: Any,
        checkpoint: moshpit.Checkpoint,
        *,
        seed: int = 0,
        width: int = 8,
        epoch_samples: float = 16.0,
    ) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
        inner = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.checkpoint = checkpoint
        self.optimizer = moshpit.Optimizer(
            inner,
            swarm.peers[-1],
            moshpit.LocalSGD(epoch_samples, overlap=False),
            batch_size=8,
            model=self.model,
            checkpoint=checkpoint,
        )

    def step(self) -> None:
        x = torch.randn(8, 4)
        (self.model(x) - x[:, :2]).square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        settle()

    def train(self, epoch: int) -> Trainer:
        while self.optimizer.epoch < epoch:
            self.step()
        return self

    def finish(self) -> Trainer:
        self.optimizer.finish()
        return self

    def weights(self) -> torch.Tensor:
        return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()])


def settle() -> None:
    """Wait for what is being written, so that the test knows which epochs are."""
    for thread in threading.enumerate():
        # One that another trainer is just starting is not alive yet, nor this one's business.
        if thread.name == "moshpit-checkpoint" and thread.is_alive():
            thread.join()


def epochs(directory: Path) -> list[int]:
    return [saved.epoch for saved in saved_in(directory)]


@pytest.fixture
def trainer(memory_swarm: Any, tmp_path: Path) -> Train:
    def make(directory: Path = tmp_path / "ckpt", *, peer: int = 0, seed: int = 0, **options: Any):
        width = options.pop("width", 8)
        swarm = memory_swarm(1)
        swarm.peers[0].peer_id = PeerId(bytes([peer]) * 32)
        return Trainer(swarm, moshpit.Checkpoint(directory, **options), seed=seed, width=width)

    return make


# --- when, and how many --------------------------------------------------------------------


def test_every_and_keep(trainer: Train, tmp_path: Path) -> None:
    training = trainer(every=3, keep=2)
    seen = []
    for _ in range(23):
        training.step()
        seen.append(epochs(tmp_path / "ckpt"))
    # one step after the epoch's last: it is complete when the loop has come around
    assert seen == 6 * [[]] + 6 * [[3]] + 6 * [[6, 3]] + 5 * [[9, 6]]
    training.finish()
    assert epochs(tmp_path / "ckpt") == [12, 9]


def test_save_at_once(trainer: Train, tmp_path: Path) -> None:
    training = trainer(every=100).train(1)
    first = training.checkpoint.save()
    assert first == tmp_path / "ckpt" / f"epoch-00000001-{OWNER}"
    second = training.checkpoint.save()
    assert second == tmp_path / "ckpt" / f"epoch-00000001-{OWNER}-2"
    assert os.listdir(tmp_path / "ckpt") == [second.name]
    assert training.checkpoint.latest() == second


def test_others_can_read_it(trainer: Train) -> None:
    training = trainer().train(3)
    path = training.checkpoint.save()
    assert path is not None
    tensors = safetensors.torch.load_file(path / "state.safetensors")
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    prefix = "model."
    model.load_state_dict(
        {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
    )
    assert torch.equal(
        training.weights(), torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    )
    manifest = json.loads((path / "manifest.json").read_text())["manifest"]
    assert manifest["epoch"] == 3
    assert manifest["contents"]["groups"][0]["lr"] == 0.01


def test_strangers_are_left_alone(trainer: Train, tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    strangers = ["notes.txt", "epoch-1", "epoch-00000000-upper1AA.bak", "epoch-00000001-aaaaaaaa"]
    for name in strangers[:-1]:
        (directory / name).mkdir(parents=True)
    (directory / strangers[-1]).write_text("a file, and no directory")
    trainer(keep=1).train(4).finish()
    assert sorted(os.listdir(directory)) == sorted([*strangers, f"epoch-00000005-{OWNER}"])


# --- beginning with one --------------------------------------------------------------------


def test_goes_on_in_another_process_to_the_bit(tmp_path: Path) -> None:
    def run(*args: str) -> dict[str, Any]:
        done = subprocess.run(
            [sys.executable, str(HERE / "resuming.py"), str(tmp_path / "key"), *args],
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    directory = str(tmp_path / "ckpt")
    straight = run("--steps", "12")
    half = run("--steps", "6", "--directory", directory)
    again = run("--steps", "12", "--directory", directory, "--resume", "--seed", "9")
    for kind in ("AdamW", "SGD"):
        assert half[kind]["epoch"] == 2
        assert again[kind]["first"] == 6
        assert again[kind]["digest"] == straight[kind]["digest"] != half[kind]["digest"]
        assert again[kind]["next"] == straight[kind]["next"]


def test_resume_takes_the_newest(trainer: Train, caplog: pytest.LogCaptureFixture) -> None:
    one = trainer().train(4).finish()
    other = trainer(seed=1, resume=True)
    assert torch.equal(other.weights(), one.weights())
    assert other.optimizer.epoch == 5
    assert other.optimizer._swarm.epoch == 5
    assert other.checkpoint.resumed is not None
    assert other.train(8).optimizer.epoch == 8
    assert not caplog.records


@pytest.mark.parametrize("added_before", [True, False])
def test_a_scheduler_goes_on(trainer: Train, added_before: bool) -> None:
    def schedule(training: Trainer) -> torch.optim.lr_scheduler.LRScheduler:
        return torch.optim.lr_scheduler.ExponentialLR(training.optimizer.inner, 0.5)

    one = trainer(every=100)
    ours = one.checkpoint.add("schedule", schedule(one))
    for _ in range(3):
        one.step()
        ours.step()
    one.checkpoint.save()
    if added_before:  # to the Checkpoint, before there is a moshpit.Optimizer
        other = trainer(resume=False)
        checkpoint = moshpit.Checkpoint(one.checkpoint.directory, resume=True)
        theirs = checkpoint.add("schedule", schedule(other))
        checkpoint.attach(other.optimizer, other.model, OWNER)
    else:
        other = trainer(resume=True)
        theirs = other.checkpoint.add("schedule", schedule(other))
    assert theirs.last_epoch == 3
    assert other.optimizer.param_groups[0]["lr"] == 0.01 / 8
    other.step()
    theirs.step()
    assert other.optimizer.param_groups[0]["lr"] == 0.01 / 16


def test_adding_in_vain_is_said(trainer: Train, caplog: pytest.LogCaptureFixture) -> None:
    trainer().train(2).finish()
    training = trainer(resume=True)
    step = torch.optim.lr_scheduler.ExponentialLR(training.optimizer.inner, 0.5)
    training.checkpoint.add("new", step)
    assert "nothing was saved as 'new'" in caplog.text
    with pytest.raises(ConfigError, match="already"):
        training.checkpoint.add("new", step)
    training.step()
    with pytest.raises(ConfigError, match="before the first step"):
        training.checkpoint.add("late", step)

    class Odd:
        def state_dict(self) -> dict[str, object]:
            return {"lock": threading.Lock()}

        def load_state_dict(self, state: object) -> None: ...

    with pytest.raises(StateError, match=r"odd\.lock: a lock cannot be saved"):
        moshpit.Checkpoint("x").add("odd", Odd())


def test_run_resume_says_where(trainer: Train, tmp_path: Path, memory_swarm: Any) -> None:
    one = trainer(tmp_path / "old").train(2).finish()
    set_resume(tmp_path / "old")
    try:
        other = trainer(tmp_path / "new", seed=1)
        assert torch.equal(other.weights(), one.weights())
        assert trainer(tmp_path / "new", resume=False, seed=1).checkpoint.resumed is None
        inner = torch.optim.SGD(other.model.parameters(), lr=0.1)
        with pytest.raises(ConfigError, match=r"makes no moshpit\.Checkpoint"):
            moshpit.Optimizer(inner, memory_swarm(1).peers[0], moshpit.LocalSGD(8))
    finally:
        set_resume(None)
    other.finish()
    assert epochs(tmp_path / "new") == [4]
    assert epochs(tmp_path / "old")[0] == 3


def test_nothing_there_is_a_beginning(
    trainer: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert trainer(tmp_path / "none", resume=True).optimizer.epoch == 0
    assert "no checkpoint in" in caplog.text
    caplog.clear()
    trainer().train(2).finish()
    assert not caplog.records
    assert trainer().optimizer.epoch == 0
    assert "moshpit run --resume" in caplog.text


def test_peers_may_share_a_directory(trainer: Train, tmp_path: Path) -> None:
    directory = tmp_path / "ckpt"
    one = trainer(peer=1, seed=1, keep=2).train(5).finish()
    two = trainer(peer=2, seed=2, keep=2).train(5).finish()
    assert epochs(directory) == [6, 6, 5, 5]
    trainer(peer=3, seed=3, keep=2, every=1, resume=True).train(7).finish()
    assert set(epochs(directory)) == {7, 8}  # the last two, whoever wrote them
    shutil.rmtree(directory)
    one.checkpoint.save()
    torch.manual_seed(5)
    two.checkpoint.save()
    drawn = torch.rand(1)
    for peer, weights in ((1, one.weights()), (2, two.weights())):
        again = trainer(peer=peer, resume=True)
        assert torch.equal(again.weights(), weights), "each its own, where there is one"
        assert (torch.rand(1) == drawn) == (peer == 2)
    stranger = trainer(peer=4, resume=True)
    assert any(torch.equal(stranger.weights(), t.weights()) for t in (one, two))
    assert torch.rand(1) != drawn, "the random generators stay each peer's own"


@pytest.mark.soak
def test_two_real_peers_start_again_at_the_newest_epoch(
    trainer: Train, tmp_path: Path, together: Any
) -> None:
    """One has missed five epochs: it follows, and its old values weigh nothing."""
    trainer(tmp_path / "new", seed=1).train(12).checkpoint.save()
    trainer(tmp_path / "old", seed=2).train(7).checkpoint.save()
    invite = RunKey.generate().invite()
    options: dict[str, Any] = {"listen": "127.0.0.1:0", "identity": "new", "preset": "local"}

    def make(swarm: moshpit.Swarm, name: str) -> Trainer:
        checkpoint = moshpit.Checkpoint(tmp_path / name, every=100, resume=True)
        training = Trainer(SimpleNamespace(peers=[swarm]), checkpoint, epoch_samples=512)
        training.optimizer.param_groups[0]["lr"] = 0.0
        return training

    with contextlib.ExitStack() as stack:
        first = stack.enter_context(moshpit.join(invite.ticket(()).encode(), **options))
        ticket = invite.ticket(first.addresses).encode()
        second = stack.enter_context(moshpit.join(ticket, **options))
        first.wait_for_peers(2)
        trainers = (make(first, "new"), make(second, "old"))
        assert trainers[0].optimizer.epoch == 12
        newest = trainers[0].weights()
        assert not torch.allclose(newest, trainers[1].weights(), atol=1e-3)
        deadline = time.monotonic() + 60.0
        while second.epoch < 12 or len([p for p in first.peers() if p.epoch == 12]) < 2:
            assert time.monotonic() < deadline, "the news does not spread"
            time.sleep(0.01)
        together(*(lambda t=t: t.train(14).finish() for t in trainers))
    assert torch.equal(*(t.weights() for t in trainers))
    assert torch.allclose(trainers[0].weights(), newest, atol=1e-6), "pulled back by old values"


# --- faults --------------------------------------------------------------------------------


def cut(path: Path, name: str, length: int) -> None:
    with (path / name).open("r+b") as file:
        file.truncate(length)


def flip(path: Path, name: str, at: int) -> None:
    data = bytearray((path / name).read_bytes())
    data[at] ^= 0x10
    (path / name).write_bytes(data)


STATE, MANIFEST = "state.safetensors", "manifest.json"
FAULTS: dict[str, Callable[[Path], object]] = {
    "state cut": lambda p: cut(p, STATE, 500),
    "state cut by a byte": lambda p: cut(p, STATE, (p / STATE).stat().st_size - 1),
    "state empty": lambda p: cut(p, STATE, 0),
    "state gone": lambda p: (p / STATE).unlink(),
    "state's header altered": lambda p: flip(p, STATE, 20),
    "state's last byte altered": lambda p: flip(p, STATE, -1),
    "state longer": lambda p: (p / STATE).open("ab").write(b"x"),
    "manifest cut": lambda p: cut(p, MANIFEST, 100),
    "manifest empty": lambda p: cut(p, MANIFEST, 0),
    "manifest gone": lambda p: (p / MANIFEST).unlink(),
    "manifest altered": lambda p: flip(p, MANIFEST, 100),
    "manifest of another": lambda p: shutil.copy(
        next(p.parent.glob(f"epoch-00000001-*/{MANIFEST}")), p
    ),
    "empty directory": lambda p: [f.unlink() for f in p.iterdir()],
    "state a directory": lambda p: ((p / STATE).unlink(), (p / STATE).mkdir()),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of the test's own append
def test_what_is_broken_is_said_and_passed_over(
    trainer: Train, fault: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = trainer(keep=9).train(3)
    weights = training.weights()
    training.checkpoint.save()
    training.train(4)
    newest = training.checkpoint.save()
    assert newest is not None
    FAULTS[fault](newest)
    other = trainer(seed=1, resume=True)
    assert f"{newest} cannot be used" in caplog.text
    assert other.optimizer.epoch == 3
    assert torch.equal(other.weights(), weights)
    assert other.checkpoint.latest() == other.checkpoint.resumed


def test_another_models_is_passed_over(
    trainer: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trainer(keep=9).train(2).finish()
    trainer(peer=1, width=5, keep=9).train(6).finish()
    caplog.clear()
    assert trainer(resume=True).optimizer.epoch == 3
    assert "(5, 4) float32 there and (8, 4) float32 here" in caplog.text
    with pytest.raises(StateError, match=r"none of the \d+ checkpoints .* can be used"):
        trainer(resume=True, width=6)


def test_a_kill_at_any_moment_leaves_the_last_good_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(HERE / "killed_writer.py"), str(tmp_path), "30", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["caught"] > 0, "no kill came while something was written"


def assert_survives_a_full_disk(
    training: Trainer, caplog: pytest.LogCaptureFixture, full: Any
) -> None:
    training.train(2)
    training.checkpoint.save()
    good = training.checkpoint.latest()
    assert good is not None
    with full():
        training.train(5)
        assert training.checkpoint.save() is None
    [warning] = [r.getMessage() for r in caplog.records]  # once: an epoch may take a second
    assert "could not be saved" in warning
    assert f"{good.name} stays" in warning
    directory = training.checkpoint.directory
    assert os.listdir(directory) == [good.name], "what was there stays, and nothing else"
    caplog.clear()
    training.train(6).finish()
    assert epochs(directory)[0] == 7
    assert not caplog.records


@contextlib.contextmanager
def small_files(limit: int) -> Iterator[None]:
    """A real limit of the system: writes beyond it fail."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_file_that_may_not_grow(trainer: Train, caplog: pytest.LogCaptureFixture) -> None:
    training = trainer(keep=1, width=50_000)
    assert_survives_a_full_disk(training, caplog, lambda: small_files(1 << 20))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk(trainer: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16m", "none", str(disk)],
        capture_output=True,
        check=False,
    )
    if mount.returncode:
        pytest.skip(f"no small disk to be had: {mount.stderr.decode()}")

    @contextlib.contextmanager
    def full() -> Iterator[None]:
        ballast = disk / "ballast"
        with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
            while file.write(bytes(1 << 16)):
                pass
        yield
        ballast.unlink()

    try:
        training = trainer(disk / "ckpt", keep=1, width=50_000)
        assert_survives_a_full_disk(training, caplog, full)
        assert "No space left" not in caplog.text  # cleared: the disk has room again
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_directory_that_cannot_be(
    trainer: Train, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    training = trainer(tmp_path / "file" / "ckpt")
    assert "checkpoints cannot be saved in" in caplog.text  # at once, not an hour later
    assert "Not a directory; give a directory" in caplog.text
    caplog.clear()
    training.train(3)
    assert training.checkpoint.save() is None
    assert "Not a directory" in caplog.text
    training.finish()


def test_a_failure_to_save_is_said_again_after_a_while(
    trainer: Train, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = trainer(width=50_000)
    with small_files(1 << 20):
        for count, repeat_s in ((1, 3600.0), (1, 3600.0), (2, 0.0), (3, 0.0)):
            monkeypatch.setattr(checkpoint_module, "REPEAT_S", repeat_s)
            assert training.checkpoint.save() is None
            assert len(caplog.records) == count


def test_a_directory_that_vanishes_is_made_again(trainer: Train, tmp_path: Path) -> None:
    training = trainer().train(3)
    shutil.rmtree(tmp_path / "ckpt")
    training.train(5).finish()
    assert epochs(tmp_path / "ckpt")[0] == 6


def test_a_state_that_has_no_form_stops_at_the_first_checkpoint(trainer: Train) -> None:
    training = trainer().train(1)
    training.optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(StateError, match=r"groups\.0\.odd: a object cannot be saved"):
        training.step()


def test_what_makes_no_sense_is_said(trainer: Train, tmp_path: Path) -> None:
    for options in ({"every": 0}, {"keep": 0}):
        with pytest.raises(ConfigError, match="1 or more"):
            moshpit.Checkpoint("x", **options)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match="give seconds, 0 or more"):
            moshpit.Checkpoint("x", resume_wait_s=seconds)
    with pytest.raises(LocalError, match=r"give the checkpoint to a moshpit\.Optimizer"):
        moshpit.Checkpoint("x").save()
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ConfigError, match=r"cannot be read: .*Not a directory"):
        trainer(tmp_path / "file")
    training = trainer()
    with pytest.raises(ConfigError, match="already belongs"):
        training.checkpoint.attach(training.optimizer, training.model, OWNER)


def test_nothing_is_left_running(trainer: Train) -> None:
    logging.getLogger("moshpit.training").info("before")
    trainer().train(3).finish()
    assert [t.name for t in threading.enumerate() if t.name.startswith("moshpit-ch")] == []
