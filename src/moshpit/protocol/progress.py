"""How far the swarm is in this epoch: a sum of straight lines, one per training peer.

Each peer's record says how many samples it had when it signed it, and its rate. Others draw the
line on, for at most `report_max_interval_s`; a peer publishes anew when its line is off by more
than `report_error` of its part of the target. So all peers see the target met at about the same
time without any of them saying so.

What counts for a peer: its record of this epoch, live: the line; dead or gone: what its last
record said, no more, since the work may be lost but need not be done twice. A record of an
older epoch, live: a line from zero since this epoch began here, for it will come along. A
record of a later epoch: nothing. For this peer itself: exactly what its training says.

The sum is kept, not computed: one `_Group` per epoch that records show holds the sum of its
lines, ``constant + slope · t``; a new record changes two numbers, and beginning an epoch only
chooses another group. A heap says which line ends next.
"""

from __future__ import annotations

from heapq import heappop, heappush
from math import inf
from typing import Final, final

from moshpit.config import ProgressConfig
from moshpit.protocol.judge import RATE_MAX, SAMPLES_MAX, STEP_S_MAX
from moshpit.protocol.known import Entry, Known
from moshpit.protocol.view import LiveView
from moshpit.types import Role

STALL_STEPS: Final = 2  # guess: a step that takes this many times as long is not believed in
CRUMB_S: Final = 1e-3  # guess: nobody waits for less
IDLE_MAX: Final = 64  # guess: kinds of records without samples and rate: epochs × roles
EPOCH_BELIEVED_MAX: Final = 1 << 40  # no count of steps comes near


class _Line:
    """What one record adds to its group; flat from ``ends`` on."""

    __slots__ = ("constant", "ends", "epoch", "live", "rate", "slope", "trains")

    def __init__(self, entry: Entry, start: float, rate_max: float, lasts_s: float) -> None:
        record = entry.record
        self.epoch = record.epoch
        self.live = entry.status.live
        self.trains = self.live and record.role != Role.AUX
        self.rate = min(record.rate, rate_max) if self.trains else 0.0
        self.slope = self.rate
        samples = 0.0 if record.role == Role.AUX else record.samples
        self.constant = samples - self.rate * (entry.at - start)
        self.ends = entry.at + lasts_s if self.rate > 0 else inf


class _Group:
    """The sum of the lines of one epoch."""

    __slots__ = ("constant", "lines", "live", "rates", "slope")

    def __init__(self) -> None:
        self.lines = 0
        self.live = 0
        self.constant = 0.0
        self.slope = 0.0
        self.rates = 0.0
        """The slopes of all live lines, ended or not."""


@final
class Progress:
    """One peer's estimate of the swarm's epoch.

    Args:
        view: the view whose records count.
        config: when to report.
        target: samples per epoch of the whole swarm; 0: an epoch is never due by itself.
        now: the time.
    """

    def __init__(self, view: LiveView, config: ProgressConfig, target: float, now: float) -> None:
        self._view = view
        self._me = view.me.peer
        self._config = config
        self._start = now
        self._epoch = view.me.epoch
        self._began = now
        self._seen = now  # the latest time that anybody told
        self._samples = self._rate = self._step_s = 0.0
        self._samples_at = now
        self._reported_at = -inf
        self.target = target
        view.watch(self._changed)

    @property
    def target(self) -> float:
        """Samples per epoch of the whole swarm; 0: never due by itself."""
        return self._target

    @target.setter
    def target(self, target: float) -> None:
        self._target = target
        # Nobody is believed to meet the target alone between two reports.
        bound = target / self._config.report_interval_s if target > 0 else RATE_MAX
        self._rate_max = min(RATE_MAX, bound)
        self._lines: dict[bytes, _Line] = {}
        self._idle: dict[tuple[int, bool, str], _Line] = {}
        self._groups: dict[int, _Group] = {}
        self._ends: list[tuple[float, bytes]] = []
        self._trainers = 0
        self._dropped: dict[bytes, None] = {}
        known, entries = self._view.known, self._view.entries
        if known is not None:
            self._take_known(known)
        for peer in sorted(entries if known is None else self._view.seen):
            self._take(entries[peer])
        self._sum_up()

    @property
    def epoch(self) -> int:
        """The epoch that is counted."""
        return self._epoch

    # --- the swarm ------------------------------------------------------------------------

    def estimate(self, now: float) -> float:
        """Return the samples that the swarm has processed in this epoch, as far as is known."""
        self._seen = now
        self._end_lines(now)
        group = self._groups.get(self._epoch)
        others = 0.0
        if group is not None:
            others = max(0.0, group.constant + group.slope * (now - self._start))
        since = min(now - self._began, self._config.report_max_interval_s)
        return self._samples + others + self._behind * max(0.0, since)

    def due(self, now: float) -> bool:
        """Whether the swarm has met its target."""
        return self._target > 0 and self.estimate(now) >= self._target

    def advance(self, epoch: int, now: float) -> None:
        """Begin another epoch: nothing of this peer's is in it yet."""
        self._epoch = epoch
        self._began = self._seen = self._samples_at = now
        self._samples = 0.0
        self._sum_up()

    def swarm_epoch(self) -> int:
        """Return the highest epoch that live peers show, this one included."""
        return max(self._epoch, self._highest)

    def _end_lines(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            ends, peer = heappop(self._ends)
            line = self._lines.get(peer)
            if line is not None and line.ends == ends:
                rise = line.slope * (ends - self._start)
                group = self._groups[line.epoch]
                group.constant += rise
                group.slope -= line.slope
                line.constant += rise
                line.slope = 0.0
                line.ends = inf

    # --- records --------------------------------------------------------------------------

    def _changed(self, entry: Entry) -> None:
        highest = self._take(entry)
        if highest:
            self._sum_up()

    def _take(self, entry: Entry) -> bool:
        """Count an entry anew; return whether it can change the sums over groups."""
        peer = entry.record.peer
        if peer == self._me:
            return False
        old = self._lines.pop(peer, None) or self._first_line(peer)
        if old is not None:
            self._weigh(old, -1)
        if self._view.entries.get(peer) is not entry:
            if self._view.known is not None:
                self._dropped[peer] = None
            return True
        line = self._lines[peer] = self._line(entry)
        self._weigh(line, 1)
        if line.ends < inf:
            heappush(self._ends, (line.ends, peer))
        # What this epoch's own group holds is in no sum over groups.
        return not (line.epoch == self._epoch and (old is None or old.epoch == self._epoch))

    def _take_known(self, known: Known) -> None:
        """Count everybody in what the view began with, without a line for each."""
        for epoch, count in known.epochs.items():
            group = self._groups[epoch] = _Group()
            group.lines = group.live = count
        self._trainers = known.trainers
        for peer in (self._me, *self._view.forgotten):
            line = self._first_line(peer)
            if line is not None:
                self._weigh(line, -1)
            self._dropped[peer] = None

    def _first_line(self, peer: bytes) -> _Line | None:
        """Return the line that `_take_known` has counted for a peer, if it still counts."""
        known = self._view.known
        if known is None or peer not in known.records or peer in self._dropped:
            return None
        return self._line(known.entry(peer, self._start))

    def _line(self, entry: Entry) -> _Line:
        """Return the line of an entry; those that do nothing share one."""
        record = entry.record
        if record.rate > 0.0 or record.samples > 0.0:
            return _Line(entry, self._start, self._rate_max, self._config.report_max_interval_s)
        kind = (record.epoch, entry.status.live, record.role)
        line = self._idle.get(kind)
        if line is None:
            line = self._idle[kind] = _Line(entry, self._start, 0.0, 0.0)
            if len(self._idle) > IDLE_MAX:
                del self._idle[next(iter(self._idle))]
        return line

    def _weigh(self, line: _Line, sign: int) -> None:
        group = self._groups.get(line.epoch)
        if group is None:
            group = self._groups[line.epoch] = _Group()
        group.lines += sign
        group.live += sign * line.live
        group.constant += sign * line.constant
        group.slope += sign * line.slope
        group.rates += sign * line.rate
        self._trainers += sign * line.trains
        if group.lines == 0:
            del self._groups[line.epoch]

    def _sum_up(self) -> None:
        """Sum what does not lie in this epoch's group: a few groups, where all is well."""
        self._behind = sum(g.rates for epoch, g in self._groups.items() if epoch < self._epoch)
        self._highest = max(
            (e for e, g in self._groups.items() if g.live and e <= EPOCH_BELIEVED_MAX), default=0
        )

    # --- this peer's own reports ----------------------------------------------------------

    def pace(self) -> dict[str, object]:
        """Return what a record of a new epoch says beside the epoch: nothing done, as fast."""
        return {"samples": 0.0, "rate": self._rate, "step_s": self._step_s}

    def local(
        self, samples: float, rate: float, step_s: float, now: float
    ) -> dict[str, object] | None:
        """Take this peer's own progress; return what to publish, or None: not worth it.

        To be called again with the last values at `wakeup`: silence, too, can be news.
        """
        self._seen = now
        samples = _bounded(samples, SAMPLES_MAX)
        if samples != self._samples:
            self._samples_at = now
        self._samples = samples
        self._rate = _bounded(rate, RATE_MAX)
        self._step_s = _bounded(step_s, STEP_S_MAX)
        if self._view.me.role == Role.AUX or now < self._report_at():
            return None
        self._reported_at = now
        resting = now - self._samples_at > self._step_s
        return {
            "samples": self._actual(now),
            "rate": 0.0 if resting else self._rate,
            "step_s": self._step_s,
        }

    def _actual(self, now: float) -> float:
        """Return this peer's samples with the part of a step that it is probably in."""
        elapsed = max(0.0, now - self._samples_at)
        if elapsed >= STALL_STEPS * self._step_s:
            return self._samples
        return self._samples + self._rate * min(elapsed, self._step_s)

    def _published(self) -> tuple[float, float, float]:
        """Return what others extrapolate for this peer: samples, rate, since when."""
        me = self._view.me
        if me.epoch == self._epoch:
            return me.samples, min(me.rate, self._rate_max), self._view.entries[self._me].at
        return 0.0, min(me.rate, self._rate_max), self._began

    def _tolerance(self) -> float:
        """How many samples others may be off."""
        part = self._target / (self._trainers + 1)
        if self._target <= 0:
            part = max(self._samples, self._rate * self._config.report_max_interval_s)
        return max(self._config.report_error * part, 1e-9)

    def _report_at(self) -> float:
        """Return when the next report is due if no more is heard of the training."""
        samples, rate, at = self._published()
        now, tolerance = self._seen, self._tolerance()
        last = max(self._view.entries[self._me].at, self._reported_at)
        earliest = last + self._config.report_interval_s
        lasts = self._config.report_max_interval_s
        assumed = samples + rate * min(max(0.0, now - at), lasts)
        if abs(self._actual(now) - assumed) > tolerance:
            return max(earliest, now)

        def passes(level: float) -> float:
            if samples > level:
                return at
            return at + (level - samples) / rate if rate > 0 else inf

        resting = passes(self._samples + self._rate * self._step_s + tolerance)
        stalled = self._samples_at + STALL_STEPS * self._step_s
        stalled = max(stalled, passes(self._samples + tolerance))
        ends = at + lasts if rate > 0 else inf
        return max(earliest, min(resting, stalled, ends))

    # --- time -----------------------------------------------------------------------------

    @property
    def wakeup(self) -> float | None:
        """When the epoch may be due, or a report; None: nothing happens by itself."""
        at = min(self._due_at(), self._report_at())
        return None if at == inf else at

    def _due_at(self) -> float:
        """Return when the lines meet the target, at the latest when one of them ends."""
        if self._target <= 0:
            return inf
        now = self._seen
        missing = self._target - self.estimate(now)
        if missing <= 0:
            return inf  # whoever asked was told
        group = self._groups.get(self._epoch)
        slope = 0.0 if group is None else group.slope
        ends = self._ends[0][0] if self._ends else inf
        behind_ends = self._began + self._config.report_max_interval_s
        if now < behind_ends and self._behind > 0:
            slope += self._behind
            ends = min(ends, behind_ends)
        # Rounding may leave a missing crumb whose time is no time at all: never the same now.
        return min(now + max(missing / slope, CRUMB_S), ends) if slope > 0 else inf


def _bounded(value: float, limit: float) -> float:
    return min(value, limit) if value >= 0 else 0.0
