"""Carries out a schedule on real processes, and notes what happens."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moshpit.identity.tickets import RunKey
from moshpit.types import Address

from .child import PORT, Process
from .network import Network, Site, network
from .record import KEEP, Event, Record
from .schedule import Fault, Kind, Place
from .verdict import healed_at

START_S = 240.0  # patience with the peers' start; only a failing run needs it
FINISH_S = 240.0  # and with their end
SETTLE_S = 120.0  # and with their coming together
CLOSE_S = 60.0
LOOK_EVERY_S = 1.0
DISK_MB = 24  # room for a few checkpoints of the demo's model
EPOCHS_TO_FINISH = 3
BUSY_S = 0.05


@dataclass(frozen=True)
class Training:
    """What the peers do.

    Attributes:
        samples: of an epoch, all peers together.
        batch: samples of a step.
        pace: steps per second of each peer; 0: as fast as it goes.
        lr: peak of the learning rate.
        strategy: one of `tests.real.script.STRATEGIES`.
    """

    samples: float = 768.0
    batch: int = 8
    pace: float = 4.0
    lr: float = 0.1
    strategy: str = "local"


class Peer:
    """A peer: its place, its folder, and its process while it has one."""

    def __init__(self, number: int, site: Site, folder: Path) -> None:
        self.number, self.site, self.folder = number, site, folder
        self.process: Process | None = None
        self.wanted = False
        """Whether it is to be started as soon as its former process is gone."""
        self.lives = 0
        self.closed = False
        self.saved = folder / "saved"
        self.saved.mkdir(parents=True)
        size = f"size={DISK_MB}m"
        subprocess.run(["mount", "-t", "tmpfs", "-o", size, "tmpfs", self.saved], check=True)

    def forget(self) -> None:
        """Make it another machine: no key, nothing saved."""
        (self.folder / "key").unlink(missing_ok=True)
        for path in sorted(self.saved.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()

    def fill_disk(self) -> None:
        with (self.saved / "filler").open("wb", buffering=0) as filler:
            try:
                while True:
                    filler.write(bytes(1 << 16))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise

    def empty_disk(self) -> None:
        (self.saved / "filler").unlink(missing_ok=True)

    def close(self) -> None:
        if self.process is not None:
            self.process.end()
        subprocess.run(["umount", self.saved], check=True)


class Chaos:
    """A run under way.

    Args:
        net: where the peers stand.
        folder: where they write.
        training: what they do.
        seed: of their data.
        tell: takes a line about what happens.
    """

    def __init__(
        self,
        net: Network,
        folder: Path,
        training: Training,
        seed: int,
        tell: Callable[[str], None],
    ) -> None:
        self._net, self._folder, self._training = net, folder, training
        self._seed, self._tell = seed, tell
        self._invite = RunKey.generate().invite()
        self._said: queue.SimpleQueue[tuple[Process, Event | None]] = queue.SimpleQueue()
        self._looked = 0.0
        self._until = 0
        self._processes: list[Process] = []
        self.peers: list[Peer] = []
        self.record = Record()

    # --- a run --------------------------------------------------------------------------------

    def run(
        self, where: tuple[Place, ...], first: int, faults: tuple[Fault, ...], seconds: float
    ) -> Record:
        """Start ``first`` peers at the first places, carry out the faults, and let them finish
        after so many seconds."""
        self._begin(where, first)
        self._carry_out(faults, self.record.began + seconds)
        self._settle()
        newest = max((p.process.life.epoch for p in self._living()), default=0)
        self._finish(newest + EPOCHS_TO_FINISH)
        return self.record

    def run_undisturbed(self, peers: int, until: int) -> Record:
        """The same without faults, up to an epoch."""
        self._begin((Place.PUBLIC,) * peers, peers)
        self.record.calm = self.record.began
        self._finish(until, FINISH_S + 20.0 * until)
        self.record.told = self.record.ended
        return self.record

    def _begin(self, where: tuple[Place, ...], first: int) -> None:
        for number, place in enumerate(where):
            site = self._net.add(place)
            self.peers.append(Peer(number, site, self._folder / f"p{number}"))
        addresses = [p.site.address for p in self.peers[:first] if p.site.address]
        contacts = tuple(Address(a, PORT) for a in addresses)
        self._ticket = self._invite.ticket(contacts).encode()
        for peer in self.peers[:first]:
            self._start(peer, wait_for=first)
        self._wait_for("training", self._living(), START_S)
        for peer in self.peers[:first]:
            process = peer.process
            if process is None or process.life.last_of("training") is None:
                words = process.last_words if process is not None else ""
                raise RuntimeError(f"p{peer.number} does not train:\n{words}")
        self.record.began = time.monotonic()
        self._tell(f"{first} peers train: " + ", ".join(where[:first]))

    def _carry_out(self, faults: tuple[Fault, ...], until: float) -> None:
        self.record.faults = faults
        agenda = [(f.at_s, False, n) for n, f in enumerate(faults)]
        agenda += [(f.until_s, True, n) for n, f in enumerate(faults) if f.kind is not Kind.JOIN]
        for at_s, over, number in sorted(agenda):
            self._listen_until(self.record.began + at_s)
            fault = faults[number]
            if not over:
                self._tell(str(fault))
                self._inflict(number, fault)
            else:
                self._tell(f"over: {fault}")
                self._mend(number, fault)
        self.record.calm = time.monotonic()
        self._listen_until(until)

    def _settle(self) -> None:
        """Wait until all have come together, if they have not; a busy machine needs its time."""
        deadline = time.monotonic() + SETTLE_S
        while healed_at(self.record) is None and time.monotonic() < deadline:
            self._listen_until(time.monotonic() + LOOK_EVERY_S)

    def _finish(self, epoch: int, patience_s: float = FINISH_S) -> None:
        self.record.told = time.monotonic()
        self._until = epoch
        self._tell(f"all are to finish at epoch {epoch}")
        living = self._living()
        for peer in living:
            peer.process.tell(until=epoch)
        self._wait_for("finished", living, patience_s)
        self.record.ended = time.monotonic()
        done = [p for p in living if p.process.life.last_of("finished") is not None]
        for peer in done:
            peer.process.life.expected = "finished"
            peer.process.look()
            peer.process.tell(end=True)
        self._wait_for("closed", done, CLOSE_S)
        for peer in done:
            process = peer.process
            before = len(process.life.held)
            process.look()
            if len(process.life.held) > before and process.life.last_of("closed"):
                process.life.after = process.life.held.pop()
            process.tell(end=True)
        deadline = time.monotonic() + CLOSE_S
        while any(p.process.alive for p in done) and time.monotonic() < deadline:
            self._listen(BUSY_S)
        for peer in self.peers:
            self.record.left_on_disk[peer.number] = sorted(p.name for p in peer.saved.iterdir())

    # --- processes ----------------------------------------------------------------------------

    def _living(self) -> list[_Running]:
        return [_Running(p, p.process) for p in self.peers if p.process and p.process.alive]

    def _start(self, peer: Peer, wait_for: int = 1) -> None:
        if peer.process is not None and peer.process.alive:
            peer.wanted = True
            return
        peer.wanted = False
        training = self._training
        args = ["--index", str(peer.number), "--parts", str(len(self.peers))]
        args += ["--seed", str(self._seed * 10_000 + peer.number * 100 + peer.lives)]
        args += ["--peers", str(wait_for), "--strategy", training.strategy]
        args += ["--samples", str(training.samples), "--batch", str(training.batch)]
        args += ["--pace", str(training.pace), "--lr", str(training.lr), "--keep", str(KEEP)]
        if peer.process is not None:
            peer.process.end()
        peer.lives += 1
        peer.process = Process(
            peer.number,
            peer.site,
            self._said,
            ticket=self._ticket,
            folder=peer.folder,
            args=args,
        )
        self._processes.append(peer.process)
        self.record.lives.append(peer.process.life)
        if self._until:
            peer.process.tell(until=self._until)

    # --- faults -------------------------------------------------------------------------------

    def _hit(self, fault: Fault) -> list[Peer]:
        return [self.peers[n] for n in fault.peers] if fault.peers else list(self.peers)

    def _inflict(self, number: int, fault: Fault) -> None:
        hit = self._hit(fault)
        sites = [p.site for p in hit]
        rest = [p.site for p in self.peers if p not in hit]
        match fault.kind:
            case Kind.KILL | Kind.REPLACE | Kind.BLACKOUT:
                self._kill(hit)
            case Kind.STORM:
                self._kill(hit)
                for peer in hit:
                    self._start(peer)
            case Kind.LEAVE:
                for running in self._running(hit):
                    running.process.leave()
            case Kind.PAUSE:
                for running in self._running(hit):
                    running.process.stop()
            case Kind.JOIN:
                for peer in hit:
                    self._start(peer)
            case Kind.CUT:
                self._net.cut(number, sites, rest, one_way=False)
            case Kind.PAIR:
                self._net.cut(number, sites[:1], sites[1:], one_way=False)
            case Kind.DEAF:
                self._net.cut(number, rest, sites, one_way=True)
            case Kind.MUTE:
                self._net.cut(number, sites, rest, one_way=True)
            case _:
                self._set(fault, hit)

    def _set(self, fault: Fault, hit: list[Peer]) -> None:
        for peer in hit:
            match fault.kind:
                case Kind.LOSS:
                    peer.site.outside.lose(fault.amount)
                case Kind.RATE:
                    peer.site.outside.shape(fault.amount, fault.amount)
                case Kind.DELAY:
                    peer.site.delay(fault.amount)
                case Kind.DISK:
                    peer.fill_disk()
                case _:
                    assert fault.kind is Kind.SLOW
                    for running in self._running([peer]):
                        running.process.tell(pace=self._training.pace * fault.amount)

    def _mend(self, number: int, fault: Fault) -> None:
        hit = self._hit(fault)
        match fault.kind:
            case Kind.KILL | Kind.LEAVE:
                for peer in hit:
                    self._start(peer)
            case Kind.REPLACE:
                for peer in hit:
                    peer.forget()
                    self._start(peer)
            case Kind.STORM:
                self._kill(hit)
                for peer in hit:
                    self._start(peer)
            case Kind.BLACKOUT:
                for peer in hit:
                    if peer.lives:  # who has not come yet does not come because of that
                        self._start(peer)
            case Kind.PAUSE:
                for running in self._running(hit):
                    running.process.go_on()
            case Kind.CUT | Kind.PAIR | Kind.DEAF | Kind.MUTE:
                self._net.mend(number)
            case _:
                self._unset(fault, hit)

    def _unset(self, fault: Fault, hit: list[Peer]) -> None:
        for peer in hit:
            match fault.kind:
                case Kind.LOSS:
                    peer.site.outside.lose(0.0)
                case Kind.RATE:
                    peer.site.outside.shape(None, None)
                case Kind.DELAY:
                    peer.site.delay(0.0)
                case Kind.DISK:
                    peer.empty_disk()
                case _:
                    assert fault.kind is Kind.SLOW
                    for running in self._running([peer]):
                        running.process.tell(pace=self._training.pace)

    def _running(self, peers: list[Peer]) -> list[_Running]:
        return [r for r in self._living() if r.peer in peers]

    def _kill(self, peers: list[Peer]) -> None:
        killed = self._running(peers)
        for running in killed:
            running.process.kill()
        for running in killed:
            running.process.wait()

    # --- listening ----------------------------------------------------------------------------

    def _listen_until(self, when: float) -> None:
        while (left := when - time.monotonic()) > 0:
            self._listen(min(left, BUSY_S))

    def _wait_for(self, kind: str, whom: list[_Running], patience_s: float) -> None:
        """Wait until all have said it, have ended, or the patience has."""
        deadline = time.monotonic() + patience_s
        while time.monotonic() < deadline:
            if all(r.process.life.last_of(kind) or not r.process.alive for r in whom):
                return
            self._listen(BUSY_S)
        late = [f"p{r.peer.number}" for r in whom if not r.process.life.last_of(kind)]
        self._tell(f"after {patience_s:.0f} s {', '.join(late)} not {kind}")

    def _listen(self, for_s: float) -> None:
        """Take one thing that a process says, or nothing; look at all of them now and then."""
        with contextlib.suppress(queue.Empty):
            process, event = self._said.get(timeout=for_s)
            if event is not None:
                process.life.events.append(event)
                self._heard(process, event)
            else:
                self._ended(process)
        now = time.monotonic()
        if now - self._looked >= LOOK_EVERY_S:
            self._looked = now
            for running in self._living():
                running.process.look()

    def _heard(self, process: Process, event: Event) -> None:
        if event["event"] in ("caught up", "finished") or (
            event["event"] == "training" and self.record.began
        ):
            self._tell(f"p{process.peer} {event['event']}, epoch {event['epoch']}")

    def _ended(self, process: Process) -> None:
        life = process.life
        life.complaints = complaints(process.log)
        if not life.expected:
            self._tell(f"p{process.peer} has ended, exit code {life.code}:\n{process.last_words}")
        elif life.expected == "left":
            took = life.ended - life.told_to_leave
            self._tell(f"p{process.peer} has left in {took:.1f} s, exit code {life.code}")
        for peer in self.peers:
            if peer.process is process and peer.wanted:
                self._start(peer)

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.end()
        for peer in self.peers:
            peer.close()


@dataclass(frozen=True)
class _Running:
    """A peer that has a process now."""

    peer: Peer
    process: Process


def complaints(log: str) -> list[str]:
    """Return the lines of a log that say that the program itself is broken."""
    words = (
        "Traceback",
        "Task exception",
        "was never awaited",
        "ResourceWarning",
        "never retrieved",
    )
    return [line for line in log.splitlines() if any(word in line for word in words)]


@contextmanager
def chaos(
    folder: Path, training: Training, seed: int, tell: Callable[[str], None]
) -> Iterator[Chaos]:
    """Give a run to come; afterwards no process, namespace or mount of it is left."""
    os.makedirs(folder)
    with network() as net:
        run = Chaos(net, folder, training, seed, tell)
        try:
            yield run
        finally:
            run.close()
