"""The invariants of design §5, checked while the world runs.

Each check says in words what it saw first that must not be; how often it looked is counted, so
that a check that never looked at anything is seen for what it is.

- S1: each mean is the weighted mean of the contributions in its ledger, each once, and each of
  them is the value that its seat brought to the round.
  In a row of the torus: what was held goes out as the mean of the column, or as it is; and what
  goes up a column is what the row made, with its mass.
- S2: one (group, chunk, ballot) has one value everywhere.
- S4: refusals and blames name a peer and a reason, broken data is blamed on who broke it.
- L1: rounds end by their deadline and are closed, joins are answered, averagings end.
- L2: after the last fault one view, one epoch, no spread.
- E: without faults every epoch ends at the exact weighted mean.
- T: state transfer; see `moshpit.sim.statechecks`.
"""

from __future__ import annotations

import math

from moshpit.config import SwarmConfig
from moshpit.events import EpochReport, Outcome, Reach, RoundReport
from moshpit.protocol.machine import (
    AdoptResult,
    BeginAveraging,
    ChunkArrived,
    Effect,
    Finalize,
    Send,
)
from moshpit.sim.process import Process
from moshpit.sim.scenario import Checks
from moshpit.sim.statechecks import NAME as TRANSFER
from moshpit.sim.statechecks import StateChecks
from moshpit.sim.store import Mean, Round
from moshpit.sim.watch import EpochSeen, Verdict, Watch
from moshpit.types import GroupId, PeerId, short
from moshpit.wire.messages import GroupFormed, JoinAck, JoinRefused, Redirect, Refusal

TOLERANCE = 1e-9  # relative; float64 sums over at most a few thousand peers
SLACK_S = 1.0  # a machine may be as late as its next wake-up
_ANSWERS = (JoinAck, JoinRefused, Redirect, GroupFormed)
_DATA_REASONS = frozenset(("non-finite", "wrong-size", "undecodable", "bad-mass"))


class Checkers:
    """All checks of one run.

    Args:
        checks: which, with their bounds.
        config: the settings of the peers.
        peers: how many peers a scenario without faults has.
        transfer: whether peers that are behind fetch the state of others.
    """

    def __init__(
        self, checks: Checks, config: SwarmConfig, peers: int, *, transfer: bool = False
    ) -> None:
        self._checks = checks
        self._round_config = config.round
        self._peers = peers
        self._groups: dict[GroupId, dict[int, Round]] = {}
        self._formed: dict[GroupId, GroupFormed] = {}
        self._values: dict[GroupId, dict[tuple[int, int], float]] = {}
        self._epochs: dict[int, EpochSeen] = {}
        self._watches: dict[int, Watch] = {}
        self._corrupt: dict[PeerId, None] = {}
        names = ("S1", "S2", "S4", "L1", *(("L2",) if checks.heals else ()))
        names += (TRANSFER,) if transfer else ()
        self.states = StateChecks(self) if transfer else None
        self.verdicts = {n: Verdict(n) for n in (*names, *(("E",) if checks.exact else ()))}
        self.outcomes = {outcome.value: 0 for outcome in Outcome}
        self.stale = 0
        self.heal_epochs: int | None = None
        """How many epochs began with the last fault until all that followed left no spread."""

    # --- keeping score --------------------------------------------------------------------

    def fail(self, name: str, now: float, process: Process | None, text: str) -> None:
        """Note a violation."""
        verdict = self.verdicts[name]
        verdict.violations += 1
        if verdict.violations == 1:
            who = f" {process.name}" if process is not None else ""
            verdict.first = f"at {now:.3f} s{who}: {text}"

    def count(self, name: str) -> None:
        """Note that an invariant was looked at."""
        self.verdicts[name].checked += 1

    def _watch(self, process: Process) -> Watch:
        watch = self._watches.get(process.index)
        if watch is None:
            watch = self._watches[process.index] = Watch()
        return watch

    # --- faults that the checks must know of ----------------------------------------------

    def corrupting(self, process: Process) -> None:
        """From now on this peer may be blamed for its data."""
        self._corrupt[process.peer] = None

    def is_corrupt(self, peer: PeerId) -> bool:
        """Whether a peer's data may be broken."""
        return peer in self._corrupt

    def died(self, process: Process) -> None:
        """A dead process owes nothing."""
        self._watches.pop(process.index, None)
        self.excuse(process)

    def excuse(self, process: Process) -> None:
        """What befalls this process excuses it from what its own doing had promised."""
        if self.states is not None:
            self.states.excuse(process)

    def paused(self, process: Process, seconds: float) -> None:
        """A process that stood still has that much more time."""
        self.excuse(process)
        watch = self._watch(process)
        if watch.began is not None:
            watch.began += seconds
        for bounds in watch.rounds.values():
            bounds[0] += seconds

    # --- rounds ---------------------------------------------------------------------------

    def group_ready(self, now: float, process: Process, formed: GroupFormed, round_: Round) -> None:
        """A process has entered a round."""
        group = GroupId(formed.group)
        self._groups.setdefault(group, {})[round_.seat] = round_
        self._formed[group] = formed
        watch = self._watch(process)
        watch.rounds[group] = [now + formed.deadline_s + SLACK_S]
        if formed.key.axis == 0:
            watch.weighed = formed.joins[round_.seat].weighs
        if formed.joins[round_.seat].peer != process.peer:
            self.fail("S1", now, process, f"sits in seat {round_.seat}, which is not its own")

    def is_held(self, group: GroupId, round_: Round, chunk: int, ballot: int) -> bool:
        """Whether a mean that was made here is to go up a column first."""
        columns = self._formed[group].columns
        if columns is None or ballot:
            return False
        first, end = columns.spans[round_.seat]
        return first <= chunk < end

    def adopted(
        self, now: float, process: Process, effect: AdoptResult, row: Round, column: Round
    ) -> None:
        """A held mean goes out: S1 for what the column, or nobody, has made of it."""
        self.count("S1")
        chunk = effect.chunk
        label = f"group {short(effect.group)} chunk {chunk}"
        held = row.held.get(chunk)
        seats = held.seats if held is not None else 0
        made = held if effect.source is None else column.means.get(chunk)
        if made is None:
            self.fail("S1", now, process, f"{label}: adopts what is not there")
            return
        if effect.source is not None and not made.seats >> column.seat & 1:
            seats = 0
        if (effect.seats, effect.mass) != (seats, made.mass):
            self.fail(
                "S1", now, process,
                f"{label}: goes out with seats {effect.seats:#x} and mass {effect.mass}, "
                f"was made of {seats:#x} and {made.mass}",
            )  # fmt: skip
        if effect.reach == Reach.ALL:
            self._judge_reach(now, process, effect, label, made)

    def _judge_reach(
        self, now: float, process: Process, effect: AdoptResult, label: str, made: Mean
    ) -> None:
        columns = self._formed[effect.group].columns
        formed = self._formed.get(effect.source) if effect.source is not None else None
        if columns is None or formed is None or len(formed.joins) < columns.rows:
            self.fail("S1", now, process, f"{label}: is not the mean of all rows")
        elif made.seats != sum(1 << s for s, join in enumerate(formed.joins) if join.weighs):
            self.fail("S1", now, process, f"{label}: somebody of its column is missing")

    def finalize(self, now: float, process: Process, effect: Finalize, round_: Round) -> None:
        """A reducer makes a mean: S1, before the store acts on it."""
        self.count("S1")
        parts = round_.sums.get(effect.chunk, [])
        label = f"group {short(effect.group)} chunk {effect.chunk} ballot {effect.ballot}"
        mask = 0
        formed = self._formed[effect.group]
        for seat, value, weight in parts:
            if mask >> seat & 1:
                self.fail("S1", now, process, f"{label}: seat {seat} counts twice")
            mask |= 1 << seat
            brought = self._groups[effect.group].get(seat)
            if brought is not None and brought.local[effect.chunk] != value:
                self.fail("S1", now, process, f"{label}: not what seat {seat} brought")
            if brought is not None and formed.key.span:
                held = brought.held.get(effect.chunk)
                same = sum(j.weighs and j.origin == formed.joins[seat].origin for j in formed.joins)
                if held is None or not math.isclose(held.mass, weight * same, rel_tol=TOLERANCE):
                    text = f"{label}: not the mass of what seat {seat} brought"
                    self.fail("S1", now, process, text)
        # Seats that said that they have nothing to give may be named. So may the reducer: that
        # its value has no mass shows in the mass of the sum.
        may = mask | round_.empty.get(effect.chunk, 0) | 1 << round_.seat
        if mask & ~effect.seats or effect.seats & ~may:
            self.fail(
                "S1", now, process,
                f"{label}: ledger has seats {effect.seats:#x}, the sum has {mask:#x}",
            )  # fmt: skip
        mass = math.fsum(weight for _, _, weight in parts)
        if not (effect.mass > 0.0 and math.isclose(mass, effect.mass, rel_tol=TOLERANCE)):
            self.fail("S1", now, process, f"{label}: ledger has mass {effect.mass}, sum {mass}")

    def mean(self, now: float, process: Process, group: GroupId, chunk: int, mean: Mean) -> None:
        """A process holds a mean, made by it or received: S2."""
        self.count("S2")
        values = self._values.setdefault(group, {})
        known = values.setdefault((chunk, mean.ballot), mean.value)
        if known != mean.value:
            self.fail(
                "S2", now, process,
                f"group {short(group)} chunk {chunk} ballot {mean.ballot}: {mean.value!r} here, "
                f"{known!r} elsewhere",
            )  # fmt: skip

    def round_ended(
        self, now: float, process: Process, report: RoundReport, round_: Round, absent: list[int]
    ) -> None:
        """A round is over: the report must say what the store holds."""
        self.count("L1")
        self.outcomes[report.outcome.value] += 1
        label = f"group {short(report.group)}"
        if absent:
            self.fail("S1", now, process, f"{label}: reports chunks {absent} that it does not hold")
        first = report.span[0] if report.span else 0
        for chunk, mean in round_.means.items():
            if chunk in report.missing:
                continue
            at = chunk - first
            held = (mean.seats, mean.ballot, mean.reach)
            reach = report.reach[at] if report.reach else 0
            told = (report.ledger[at], report.attempts[at], reach)
            if held != told or report.masses[at] != mean.mass:
                self.fail(
                    "S1", now, process,
                    f"{label} chunk {chunk}: reports (seats, ballot, reach) {told} and mass "
                    f"{report.masses[at]}, holds {held} and {mean.mass}",
                )  # fmt: skip
                break
        watch = self._watch(process)
        bounds = watch.rounds.get(report.group)
        if bounds is None:
            self.fail("L1", now, process, f"{label}: ended a round that it never entered, or twice")
        else:
            if now > bounds[0]:
                late = now - bounds[0] + SLACK_S
                self.fail("L1", now, process, f"{label}: ended {late:.3f} s after its deadline")
            bounds[0] += self._round_config.linger_s  # others may need it until the deadline
            watch.ended[report.group] = now
        self._judge_blames(now, process, report, watch.broken.pop(report.group, []))

    def _judge_blames(
        self, now: float, process: Process, report: RoundReport, broken: list[PeerId]
    ) -> None:
        self.count("S4")
        for blame in report.blames:
            if blame.peer not in report.peers or not blame.reason:
                self.fail("S4", now, process, f"a blame without a groupmate or a reason: {blame}")
            if blame.reason in _DATA_REASONS and blame.peer not in self._corrupt:
                self.fail(
                    "S4", now, process,
                    f"blames honest {short(blame.peer)} for {blame.reason} data",
                )  # fmt: skip
        blamed = [blame.peer for blame in report.blames]
        for peer in broken:
            if peer not in blamed:
                self.fail(
                    "S4", now, process,
                    f"got broken data from {short(peer)} in group {short(report.group)} "
                    "and blames nobody for it",
                )  # fmt: skip

    def closed(self, now: float, process: Process, group: GroupId) -> None:
        """A round was closed."""
        watch = self._watch(process)
        bounds = watch.rounds.pop(group, None)
        label = f"group {short(group)}"
        if bounds is None or watch.ended.pop(group, None) is None:
            self.fail("L1", now, process, f"{label}: closed a round that was not ended")
        elif now > bounds[0]:
            self.fail("L1", now, process, f"{label}: closed {now - bounds[0]:.3f} s too late")

    def forget(self, group: GroupId) -> None:
        """No process has this group open any more."""
        self._groups.pop(group, None)
        self._values.pop(group, None)
        self._formed.pop(group, None)

    # --- messages -------------------------------------------------------------------------

    def received_chunk(
        self, now: float, process: Process, event: ChunkArrived, accumulated: bool
    ) -> None:
        """A chunk was judged; broken ones must not get into a sum."""
        if not event.fault and math.isfinite(event.header.mass):
            return
        self.count("S4")
        if accumulated:
            self.fail("S1", now, process, f"accepts broken data from {short(event.peer)}")
        watch = self._watch(process)
        group = event.header.group
        if group in watch.rounds and group not in watch.ended:
            watch.broken.setdefault(group, []).append(event.peer)

    def received_join(
        self, now: float, process: Process, peer: PeerId, effects: list[Effect]
    ) -> None:
        """A join must be answered at once; its host may not be there later."""
        self.count("L1")
        for effect in effects:
            if (
                type(effect) is Send
                and effect.peer == peer
                and isinstance(effect.message, _ANSWERS)
            ):
                return
        self.fail("L1", now, process, f"leaves a join of {short(peer)} without an answer")

    def sent(self, now: float, process: Process, message: Refusal | JoinRefused) -> None:
        """A refusal must say why."""
        self.count("S4")
        if not message.reason:
            self.fail("S4", now, process, f"a refusal without a reason: {message}")

    # --- epochs ---------------------------------------------------------------------------

    def began(
        self, now: float, process: Process, epoch: int, event: BeginAveraging, values: list[float]
    ) -> None:
        """A process has handed in its snapshot."""
        self._watch(process).began = now
        if self._checks.exact:
            seen = self._epochs.setdefault(epoch, EpochSeen())
            seen.weights.append(event.weight)
            seen.values.append(list(values))

    def averaging_ended(
        self, now: float, process: Process, report: EpochReport, values: list[float]
    ) -> None:
        """A process goes on to its next epoch."""
        self.count("L1")
        watch = self._watch(process)
        if watch.began is None:
            self.fail("L1", now, process, "ended an averaging that it never began")
        elif now - watch.began > self._checks.averaging_s_max:
            self.fail(
                "L1", now, process,
                f"averaging of epoch {report.epoch} took {now - watch.began:.1f} s",
            )  # fmt: skip
        watch.began = None
        if report.stale:
            self.stale += 1
            return
        if self.states is not None:
            self.states.averaged(now, process, report.epoch, weighed=watch.weighed)
        watch.weighed = False
        seen = self._epochs.setdefault(report.epoch, EpochSeen())
        seen.ended += 1
        seen.incomplete += report.outcome is not Outcome.COMPLETE
        if not seen.low:
            seen.low, seen.high = list(values), list(values)
        else:
            seen.low = [min(pair) for pair in zip(seen.low, values, strict=True)]
            seen.high = [max(pair) for pair in zip(seen.high, values, strict=True)]
        if self._checks.exact and seen.ended == self._peers:
            self._judge_exact(now, report.epoch, seen)

    def _judge_exact(self, now: float, epoch: int, seen: EpochSeen) -> None:
        self.count("E")
        if seen.incomplete:
            self.fail("E", now, None, f"epoch {epoch}: {seen.incomplete} peers were not complete")
        total = math.fsum(seen.weights)
        for chunk, (low, high) in enumerate(zip(seen.low, seen.high, strict=True)):
            parts = [w * v[chunk] for w, v in zip(seen.weights, seen.values, strict=True)]
            mean = math.fsum(parts) / total
            scale = math.fsum(map(abs, parts)) / total
            error = max(abs(low - mean), abs(high - mean))
            if not error <= TOLERANCE * scale:
                self.fail(
                    "E", now, None,
                    f"epoch {epoch} chunk {chunk}: mean {mean!r}, peers have {low!r} to {high!r} "
                    f"({len(seen.weights)} snapshots)",
                )  # fmt: skip
                break
        seen.values.clear()

    def spread(self, epoch: int) -> float:
        """Return how far apart the peers were after an epoch, relative."""
        seen = self._epochs.get(epoch)
        return seen.spread() if seen is not None else 0.0

    # --- the end --------------------------------------------------------------------------

    def finish(self, now: float, live: list[Process], healed_epoch: int, finished: bool) -> None:
        """The run is over: what is still owed, and whether the swarm has healed."""
        for process in live:
            self._judge_debts(now, process)
        if self.states is not None:
            self.states.finish(now, live)
        if self._checks.exact:
            done = self.verdicts["E"].checked
            if done == 0:
                self.fail("E", now, None, "no epoch was completed by all peers")
        if not self._checks.heals:
            if not finished:
                self.fail("L1", now, None, "time limit: the epochs were not completed")
            return
        self.count("L2")
        if not finished:
            ages = ", ".join(f"{p.name}: {p.node.epoch}" for p in live[:20])
            self.fail("L2", now, None, f"time limit: the epochs were not completed ({ages})")
        self._judge_views(now, live)
        if not any(process.role.reduces for process in live):
            return  # clients cannot reach each other: each is a swarm of its own
        epochs = [process.node.epoch for process in live]
        if epochs and max(epochs) - min(epochs) > 1:
            self.fail("L2", now, None, f"live peers are at epochs {min(epochs)} to {max(epochs)}")
        last = max(self._epochs, default=0)
        apart = [e for e in range(healed_epoch, last) if self.spread(e) > self._checks.spread_max]
        self.heal_epochs = max(apart) + 1 - healed_epoch if apart else 0
        relapses, again = self._checks.relapses, False
        for epoch in range(healed_epoch + self._checks.heal_epochs, last):
            self.count("L2")
            if self.spread(epoch) <= self._checks.spread_max:
                again = False
            elif relapses and not again:
                relapses, again = relapses - 1, True
            else:
                self.fail(
                    "L2", now, None,
                    f"after epoch {epoch} the spread is {self.spread(epoch):.3g}; "
                    f"the last fault ended in epoch {healed_epoch}",
                )  # fmt: skip

    def _judge_views(self, now: float, live: list[Process]) -> None:
        names = {process.peer: process.name for process in live}
        true = sorted(names)
        # Of clients alone, nobody can reach anybody: who lives they cannot know, only who does not.
        alone = not any(process.role.reduces for process in live)
        for process in live:
            view = list(process.node.view.live)
            seen = frozenset(view)
            missing = [] if alone else [names[peer] for peer in true if peer not in seen]
            ghosts = [short(peer) for peer in view if peer not in names]
            if not missing and not ghosts:
                continue
            self.fail(
                "L2", now, process,
                f"view lacks {missing[:10]} and holds {ghosts[:10]} that are gone",
            )  # fmt: skip

    def _judge_debts(self, now: float, process: Process) -> None:
        watch = self._watch(process)
        if watch.began is not None and now - watch.began > self._checks.averaging_s_max:
            self.fail("L1", now, process, f"averaging since {watch.began:.3f} s has not ended")
        for group, bounds in watch.rounds.items():
            if now > bounds[0]:
                what = "closed" if group in watch.ended else "ended"
                self.fail("L1", now, process, f"group {short(group)}: never {what}")
