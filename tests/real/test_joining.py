"""Real processes that join a job under way, or come back to it, and catch up by state transfer."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks import joining

from moshpit.identity.tickets import RunKey
from moshpit.training.shelf import saved_in
from moshpit.types import Address

from .harness import PATIENCE_S, Child, Event, crowding, free_port

SCRIPT = Path(__file__).with_name("joiner.py")


class Job:
    """Processes of one run."""

    def __init__(self, folder: Path, *args: str) -> None:
        self._port = free_port()
        invite = RunKey.generate().invite()
        self._ticket = invite.ticket((Address("127.0.0.1", self._port),)).encode()
        self._folder, self._args = folder, args
        self.peers: list[Peer] = []

    def add(self, *args: str, port: int = 0) -> Peer:
        number = len(self.peers)
        listen = f"127.0.0.1:{self._port if number == 0 else port}"
        command = ["--ticket", self._ticket, "--listen", listen, *self._args, *args]
        peer = Peer(command, self._folder / f"stderr{number}")
        self.peers.append(peer)
        return peer

    def at_contact(self, *args: str) -> Peer:
        """Start a peer where the ticket says that somebody is."""
        return self.add(*args, port=self._port)

    def finish(self, peers: list[Peer], after: int = 4) -> list[Event]:
        """Have peers train on for some epochs and end; return what they say then."""
        last = max(peer.epoch for peer in peers) + after
        for peer in peers:
            peer.send(until=last)
        return [peer.expect("finished") for peer in peers]


class Peer(Child):
    """A process of `joiner.py`."""

    def __init__(self, command: list[str], errors: Path) -> None:
        super().__init__([sys.executable, str(SCRIPT), *command], errors)

    @property
    def epoch(self) -> int:
        """The newest that it has told."""
        return self.latest.get("epoch", {"epoch": 0})["epoch"]


@contextlib.contextmanager
def job(folder: Path, *args: str) -> Iterator[Job]:
    running = Job(folder, *args)
    try:
        yield running
    finally:
        for peer in running.peers:
            peer.stop()


def start_two(running: Job, *args: str) -> list[Peer]:
    both = [running.add("--seed", "0", "--peers", "2", *args) for _ in range(2)]
    for peer in both:
        peer.expect("epoch", epoch=2)
    return both


def check_all_alike(peers: list[Peer], ends: list[Event]) -> None:
    logs = "\n---\n".join(peer.errors for peer in peers)
    assert len({end["digest"] for end in ends}) == 1, logs
    assert all(end["finite"] for end in ends)
    for end in ends:
        assert end["outcome"] == "complete", logs
        assert len(end["contributors"]) == len(peers), logs


LONG = pytest.mark.soak


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco",
        pytest.param("gradients", marks=LONG),
        pytest.param("overlapped", marks=LONG),
        pytest.param("local-waits", marks=LONG),
        pytest.param("local", marks=LONG),
    ],
)
def test_a_latecomer_takes_part(strategy: str, tmp_path: Path) -> None:
    with job(tmp_path, "--strategy", strategy) as running:
        both = start_two(running)
        late = running.add("--seed", "7")  # another start: all that it has comes from the others
        first = late.expect("epoch", epoch=1)
        assert first["caught_up"] >= 1, late.errors
        peers = [*both, late]
        ends = running.finish(peers)
        check_all_alike(peers, ends)
        assert all(end["realignments"] == 0 for end in ends), "it had the outer momentum, too"


@LONG
def test_epochs_may_be_shorter_than_a_transfer(tmp_path: Path) -> None:
    with job(tmp_path, "--strategy", "gradients", "--width", "2000", "--samples", "32") as running:
        both = start_two(running)
        late = running.add("--seed", "7")
        late.expect("epoch", epoch=1)
        assert "means since" in late.errors
        peers = [*both, late]
        check_all_alike(peers, running.finish(peers, after=8))


def test_a_donor_is_killed_in_the_middle(tmp_path: Path) -> None:
    with job(tmp_path, "--strategy", "gradients", "--width", "2000") as running:
        long = ("--samples", "1000")
        both = start_two(running, *long)
        late = running.add("--seed", "7", *long)
        late.expect("arriving")
        for donor in both:
            donor.process.send_signal(signal.SIGSTOP)
        assert "caught up" not in late.errors, "it was too fast for this test"
        killed, other = both
        killed.process.kill()
        other.process.send_signal(signal.SIGCONT)
        late.expect("epoch", epoch=1)
        peers = [other, late]
        check_all_alike(peers, running.finish(peers, after=2))


@pytest.mark.parametrize(
    "strategy",
    [
        "diloco",
        pytest.param("gradients", marks=LONG),
        pytest.param("overlapped", marks=LONG),
    ],
)
def test_who_was_paused_comes_back(strategy: str, tmp_path: Path) -> None:
    with job(tmp_path, "--strategy", strategy) as running:
        peers = [running.add("--seed", "0", "--peers", "3") for _ in range(3)]
        for peer in peers:
            peer.expect("epoch", epoch=2)
        one, two, paused = peers
        paused.process.send_signal(signal.SIGSTOP)
        before = max(peer.epoch for peer in peers)
        for peer in (one, two):
            peer.expect("epoch", epoch=before + 4)
        paused.process.send_signal(signal.SIGCONT)
        paused.expect("epoch", epoch=before + 4, caught_up=1)
        check_all_alike(peers, running.finish(peers))


# --- the last peer, and none ----------------------------------------------------------------


@LONG
def test_the_last_peer_trains_on_and_others_join_it(tmp_path: Path) -> None:
    """Also where those that are gone were the address in the ticket."""
    with job(tmp_path, "--strategy", "diloco") as running:
        contact, last = start_two(running)
        contact.process.kill()
        before = last.epoch
        last.expect("epoch", epoch=before + 3)
        again = running.at_contact("--seed", "7", "--peers", "2")
        first = again.expect("epoch", epoch=1)
        assert first["caught_up"] >= 1, again.errors
        peers = [last, again]
        check_all_alike(peers, running.finish(peers))


def kill_all(peers: list[Peer]) -> None:
    for peer in peers:
        peer.process.kill()
    for peer in peers:
        peer.process.wait()


def wait_until(there: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def epochs_in(directory: Path) -> list[int]:
    return sorted({saved.epoch for saved in saved_in(directory)}, reverse=True)


def forget(directory: Path, epochs: list[int]) -> None:
    """What this peer's disk has lost, or has never got."""
    for saved in saved_in(directory):
        if saved.epoch in epochs:
            shutil.rmtree(saved.path)


def test_all_die_and_start_again_from_the_newest_epoch_that_all_hold(tmp_path: Path) -> None:
    """One after the other: the last one trains on alone, so it holds newer ones."""
    folders = [tmp_path / "ckpt0", tmp_path / "ckpt1"]
    with job(tmp_path, "--strategy", "gradients", "--peers", "2", "--keep", "999") as running:
        both = [running.add("--seed", "0", "--directory", str(f)) for f in folders]
        for peer in both:
            peer.expect("epoch", epoch=3)
        kill_all(both[:1])
        alone = both[1].epoch
        both[1].expect("epoch", epoch=alone + 3)
        kill_all(both)
        common = sorted(set(epochs_in(folders[0])) & set(epochs_in(folders[1])), reverse=True)
        newest = epochs_in(folders[1])[0]
        resume = ("--seed", "9", "--resume", "--directory")
        again = [
            running.at_contact(*resume, str(folders[0])),
            running.add(*resume, str(folders[1])),
        ]
        for peer in again:
            assert peer.expect("begins")["epoch"] == common[0] < newest, peer.errors
        words = again[0].errors + again[1].errors
        assert f"starting again from epoch {common[0]}, the newest that all 2 peers" in words
        assert f"(the newest of all is {newest})" in words
        assert f"epoch {common[0]}, as " in words
        ends = running.finish(again, after=3)
        check_all_alike(again, ends)
        assert all(end["caught_up"] == 0 for end in ends), "nothing had to be fetched"


@LONG
@pytest.mark.parametrize("strategy", ["gradients", "diloco", "local-waits"])
def test_who_holds_nothing_fetches_what_the_others_start_from(
    strategy: str, tmp_path: Path
) -> None:
    folders = [tmp_path / f"ckpt{i}" for i in range(3)]
    with job(tmp_path, "--strategy", strategy, "--peers", "3") as running:
        three = [running.add("--seed", "0", "--directory", str(f)) for f in folders]
        for peer in three:
            peer.expect("epoch", epoch=5)
        wait_until(lambda: len(epochs_in(folders[0])) > 1 and len(epochs_in(folders[1])) > 0)
        kill_all(three)
        shutil.rmtree(folders[2])
        forget(folders[1], epochs_in(folders[1])[1:])
        forget(folders[0], epochs_in(folders[1]))
        newest = max(epochs_in(folders[0])[0], epochs_in(folders[1])[0])
        resume = ("--seed", "9", "--resume", "--directory")
        again = [running.at_contact(*resume, str(folders[0]))]
        again += [running.add(*resume, str(f)) for f in folders[1:]]
        for peer in again:
            peer.expect("begins")
        ends = running.finish(again, after=newest + 4)
        words = "".join(peer.errors for peer in again)
        assert f"no epoch is held by all 3 peers that resume: starting again from {newest}" in (
            words.replace("from epoch", "from")
        )
        assert "this peer holds none and will fetch the state" in words
        check_all_alike(again, ends)
        assert ends[2]["caught_up"] >= 1


@LONG
def test_a_joiner_whose_donors_are_all_gone_waits_for_one_from_a_checkpoint(
    tmp_path: Path,
) -> None:
    long = ("--samples", "500", "--width", "2000", "--directory", str(tmp_path / "ckpt"))
    with job(tmp_path, "--strategy", "gradients") as running:
        only = running.add("--seed", "0", *long)
        only.expect("epoch", epoch=2)
        late = running.add("--seed", "7", "--width", "2000", "--samples", "500")
        late.expect("arriving")
        only.process.send_signal(signal.SIGSTOP)
        assert "caught up" not in late.errors, "it was too fast for this test"
        only.process.kill()
        late.said("are gone: waiting for somebody who has it")
        again = running.at_contact("--seed", "9", "--resume", *long)
        assert again.expect("begins")["epoch"] >= 2
        late.expect("epoch", epoch=2, caught_up=1)
        peers = [again, late]
        check_all_alike(peers, running.finish(peers, after=2))


@LONG
def test_eight_joiners_cost_a_donor_about_as_much_as_two() -> None:
    """Without passing on, eight would cost each of two donors four states."""
    args = argparse.Namespace(mb=8.0, donors=2, samples=4000.0, seconds=1.0)
    crowded = crowding()
    two, eight = (joining.measure(args, count, free_port()) for count in (2, 8))
    most = [max(row["given_by_donors"]) for row in (two, eight)]
    # A joiner that a busy machine holds up counts as stalled, and the donor gives its pieces again.
    assert most[1] <= min(2.0, max(1.3, 1.5 * most[0]) * max(crowded, crowding())), most
    assert sum(eight["passed_on"]) >= 5.0, "the rest came from other joiners"
