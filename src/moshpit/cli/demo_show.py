"""The course of the demo: start the peers, kill some halfway, compare with one process."""

from __future__ import annotations

import time
from dataclasses import dataclass
from random import Random

from moshpit.cli import output
from moshpit.cli.demo_messages import Assignment, Done, Epoch, Go, Joined, Listening, Step, Told
from moshpit.cli.demo_model import corpus
from moshpit.cli.demo_processes import Worker, Workers
from moshpit.cli.demo_report import PeerTrace, Result, measure
from moshpit.cli.demo_view import Row, View, view_for
from moshpit.cli.parse import human_s
from moshpit.errors import LocalError
from moshpit.identity.tickets import Invite, RunKey
from moshpit.types import Address

SILENCE_TIMEOUT_S = 90.0  # guess: starting four times torch on a slow machine included
_POLL_S = 0.5
_SINGLE = "single process"
_SAYS_EVERY = 5  # steps' reports of the single process per line


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What the demo is asked to do; see `moshpit.cli.demo.demo`."""

    peers: int
    kill: int
    epochs: int
    samples_per_epoch: int
    batch_size: int
    seed: int


class Show:
    """One run of the demo. `run` does it; the traces are there afterwards.

    Attributes:
        traces: what each peer told.
        steps: what the single process told.
    """

    def __init__(self, plan: Plan, *, plain: bool = False) -> None:
        self.plan = plan
        self.traces = [PeerTrace(f"peer {i}") for i in range(plan.peers)]
        self.steps: list[Step] = []
        self._victims = sorted(Random(plan.seed).sample(range(plan.peers), plan.kill))
        self._rows = [Row(t.name) for t in self.traces]
        self._plain = plain
        self._view: View
        self._said_at = 0.0

    def run(self) -> Result:
        """Train together, then alone, and measure.

        Raises:
            LocalError: a process ended that nobody killed, or nothing happened for too long.
        """
        began = time.monotonic()
        with Workers() as workers:
            training_s = self._train_together(workers)
            survivors = [t for t in self.traces if t.killed_at is None]
            samples = round(sum(_samples(t) for t in self.traces))
            self._train_alone(workers, samples)
            measured = measure(
                survivors,
                [t for t in self.traces if t.killed_at is not None],
                [workers.weights_path(t.name) for t in survivors],
                workers.weights_path(_SINGLE),
                corpus(),
            )
        done = [t.done for t in survivors if t.done is not None]
        return Result(
            peers=self.plan.peers,
            killed=[t.name for t in self.traces if t.killed_at is not None],
            epochs=max(d.final_epoch for d in done),
            samples=samples,
            rounds=sum(d.rounds for d in done),
            rounds_partial=sum(d.rounds_partial for d in done),
            rounds_failed=sum(d.rounds_failed for d in done),
            bytes_sent=sum(d.bytes_sent for d in done),
            training_seconds=training_s,
            seconds=time.monotonic() - began,
            initial_val_loss=measured.initial_val_loss,
            final_val_loss=measured.final_val_loss,
            single_process_val_loss=measured.single_process_val_loss,
            max_param_diff=measured.max_param_diff,
            stall_s_after_kill=measured.stall_s_after_kill,
            longest_epoch_s_after_kill=measured.longest_epoch_s_after_kill,
            median_epoch_s=measured.median_epoch_s,
            waiting_share=measured.waiting_share,
        )

    # --- together ---------------------------------------------------------------------------

    def _train_together(self, workers: Workers) -> float:
        """Run the peers from the first to the last epoch; return how many seconds that took."""
        peers = [workers.start(trace.name, i) for i, trace in enumerate(self.traces)]
        view = view_for(output.stdout(), self.plan.epochs, self._rows, plain=self._plain)
        with view as self._view:
            victims = " and ".join(self.traces[v].name for v in self._victims) or "nobody"
            self._view.say(
                f"{self.plan.peers} peers on this machine; {victims} will be killed halfway "
                f"(seed {self.plan.seed})"
            )
            self._gather(workers, peers)
            began = time.monotonic()
            for worker in peers:
                worker.give(Go())
            self._watch(workers, peers)
            seconds = time.monotonic() - began
        for worker in peers:
            worker.give(Go())
        for worker in peers:
            worker.end()
        return seconds

    def _gather(self, workers: Workers, peers: list[Worker]) -> None:
        """Bring all peers into one run: the first one says where it listens, the others dial."""
        invite = RunKey.generate().invite()
        peers[0].give(self._assignment(workers, 0, invite, ()))
        joined = 0
        while joined < len(peers):
            worker, message = self._next(workers)
            match message:
                case Listening(addresses=addresses) if worker is peers[0]:
                    known = tuple(Address.parse(a) for a in addresses)
                    for other in peers[1:]:
                        other.give(self._assignment(workers, other.index, invite, known))
                case Joined(peer=peer):
                    joined += 1
                    row, trace = self._rows[worker.index], self.traces[worker.index]
                    row.peer = trace.peer = peer
                    row.state = "joined"
                case _:
                    pass

    def _assignment(
        self, workers: Workers, index: int, invite: Invite, addresses: tuple[Address, ...]
    ) -> Assignment:
        return Assignment(
            index=index,
            peers=self.plan.peers,
            seed=self.plan.seed + index,
            epochs=self.plan.epochs,
            samples_per_epoch=self.plan.samples_per_epoch,
            batch_size=self.plan.batch_size,
            ticket=invite.ticket(addresses).encode(),
            weights_path=str(workers.weights_path(self.traces[index].name)),
        )

    def _watch(self, workers: Workers, peers: list[Worker]) -> None:
        """Follow the peers until those that live are done; kill the victims halfway."""
        while any(t.done is None and t.killed_at is None for t in self.traces):
            worker, message = self._next(workers)
            trace, row = self.traces[worker.index], self._rows[worker.index]
            if isinstance(message, Epoch):
                trace.epochs.append(message)
                row.last = message
                if row.state != "killed":
                    row.state = "training"
                if message.epoch >= self.plan.epochs // 2:
                    self._kill_victims(peers)
            elif isinstance(message, Done):
                trace.done = message
                row.state = "done"
            self._view.changed(row)

    def _kill_victims(self, peers: list[Worker]) -> None:
        for victim in self._victims:
            trace, row = self.traces[victim], self._rows[victim]
            if trace.killed_at is None and trace.done is None:
                peers[victim].kill()
                trace.killed_at = peers[victim].killed_at
                row.state = "killed"
                epoch = row.last.epoch if row.last is not None else 0
                self._view.say(f"killed {trace.name} ({trace.peer}) in its epoch {epoch}: SIGKILL")

    # --- alone ------------------------------------------------------------------------------

    def _train_alone(self, workers: Workers, samples: int) -> None:
        """Train one process, with one thread like each peer, on as many samples."""
        console = output.stdout()
        console.print(f"now one process alone, on the same {samples} samples", highlight=False)
        worker = workers.start(_SINGLE, -1)
        worker.give(
            Assignment(
                index=-1,
                peers=1,
                seed=self.plan.seed + self.plan.peers,
                epochs=self.plan.epochs,
                samples_per_epoch=self.plan.samples_per_epoch,
                batch_size=self.plan.batch_size * self.plan.peers,
                samples=samples,
                weights_path=str(workers.weights_path(_SINGLE)),
            )
        )
        worker.give(Go())
        began = time.monotonic()
        while True:
            _, message = self._next(workers)
            if isinstance(message, Done):
                break
            if isinstance(message, Step):
                self.steps.append(message)
                if len(self.steps) % _SAYS_EVERY == 0:
                    console.print(
                        f"{_SINGLE}  {message.samples:.0f}/{samples} samples  "
                        f"loss {message.loss:.3f}  {human_s(time.monotonic() - began)}",
                        highlight=False,
                    )
        worker.give(Go())
        worker.end()

    def _next(self, workers: Workers) -> tuple[Worker, Told]:
        """Return the next message; raises `LocalError` if there is none for too long."""
        deadline = time.monotonic() + SILENCE_TIMEOUT_S
        while time.monotonic() < deadline:
            told = workers.next(_POLL_S)
            if told is not None:
                return told
        raise LocalError(
            f"no process of the demo has said anything for {human_s(SILENCE_TIMEOUT_S)}; "
            "the machine may be overloaded\n" + "\n".join(w.log_tail() for w in workers.all)
        )


def _samples(trace: PeerTrace) -> float:
    """Return all samples that a peer is known to have seen."""
    if trace.done is not None:
        return trace.done.samples
    return trace.epochs[-1].samples if trace.epochs else 0.0
