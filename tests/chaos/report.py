"""What a person reads of a chaos run: a timeline, and figures."""

from __future__ import annotations

from statistics import median

from .record import Life, Record
from .schedule import Fault, Kind
from .verdict import growth, healed_at, healing_epochs, longest_gap, waited_s

COLUMNS = 100
SIGN = {
    Kind.CUT: "|",
    Kind.PAIR: "|",
    Kind.DEAF: "|",
    Kind.MUTE: "|",
    Kind.LOSS: "~",
    Kind.RATE: "~",
    Kind.DELAY: "~",
    Kind.DISK: "d",
    Kind.SLOW: "s",
}
LEGEND = (
    "· trains  x killed or not there  l leaving  = stopped  | cut off  ~ bad link  d disk full  "
    "s slow  c caught up"
)


def timeline(record: Record) -> list[str]:
    """Draw a row for each peer, and the epochs below."""
    length = max(record.ended, record.told, record.calm) - record.began
    step = length / COLUMNS
    rows: dict[int, list[str]] = {}
    for life in record.lives:
        rows.setdefault(life.peer, ["x"] * COLUMNS)
    for peer, row in rows.items():
        lives = [life for life in record.lives if life.peer == peer]
        for column in range(COLUMNS):
            at = column * step
            row[column] = _sign(record, peer, lives, at, at + step)
    lines = [f"{f'p{peer}':>5} {''.join(row)}" for peer, row in sorted(rows.items())]
    lines.append(f"epoch {_epochs(record, step)}")
    ruler = "".join(f"{f'{column * step:.0f} s':<20}" for column in range(0, COLUMNS, 20))
    return [*lines, f"{'':5} {ruler}", f"{'':5} {LEGEND}"]


def _sign(record: Record, peer: int, lives: list[Life], at: float, until: float) -> str:
    begin, end = record.began + at, record.began + until
    here = [life for life in lives if life.started < end and (not life.ended or life.ended > begin)]
    if any(begin <= e["at"] < end for life in here for e in life.all_of("caught up")):
        return "c"
    if any(a < end and b > begin for life in here for a, b in life.stopped):
        return "="
    if any(0 < life.told_to_leave < end for life in here):
        return "l"
    if not any(_trains(life, begin, end) for life in here):
        return "x"
    faults = [f for f in record.faults if _hits(f, peer) and f.at_s < until and f.until_s > at]
    return next((SIGN[f.kind] for f in faults if f.kind in SIGN), "·")


def _trains(life: Life, begin: float, end: float) -> bool:
    training = life.last_of("training")
    return training is not None and training["at"] < end and (not life.ended or life.ended > begin)


def _hits(fault: Fault, peer: int) -> bool:
    return not fault.peers or peer in fault.peers


def _epochs(record: Record, step: float) -> str:
    """Return the newest epoch at the beginning of every tenth column."""
    told = sorted((e["at"], e["epoch"]) for life in record.lives for e in life.all_of("epoch"))
    words = ""
    for column in range(0, COLUMNS, 10):
        before = [epoch for at, epoch in told if at <= record.began + column * step]
        words += f"{max(before, default=0):<10}"
    return words


def figures(record: Record) -> list[str]:
    """Say what is worth knowing of a run, good or not."""
    epochs = max(life.epoch for life in record.lives)
    averaged = [e for life in record.lives for e in life.all_of("averaged")]
    outcomes = {
        o: sum(e["outcome"] == o for e in averaged) for o in ("complete", "partial", "failed")
    }
    waits = [
        (waited_s(life, e["began"], e["seconds"]), e["promised_s"], life.peer)
        for life in record.lives
        for e in life.all_of("waited")
    ]
    slowest = [
        (waited_s(life, e["began"], e["seconds"]), e["promised_s"], life.peer)
        for life in record.lives
        for e in life.all_of("averaged")
    ]
    gap, at = longest_gap(record)
    healed = healed_at(record)
    caught_up = sum(len(life.all_of("caught up")) for life in record.lives)
    lines = [
        f"{len(record.faults)} faults, {len(record.lives)} processes, {epochs} epochs, "
        f"{len(averaged)} averagings: {', '.join(f'{n} {o}' for o, n in outcomes.items())}; "
        f"{caught_up} times caught up",
    ]
    for name, times in (("wait in a step", waits), ("averaging", slowest)):
        if times:
            took, promised, peer = max(times)
            middle = median(t for t, _, _ in times)
            lines.append(
                f"longest {name}: {took:.1f} s at p{peer} ({promised:.1f} s were promised); "
                f"median {middle:.2f} s"
            )
    lines.append(f"longest time without a new epoch: {gap:.1f} s, from {at - record.began:.0f} s")
    if healed is not None:
        late = max(0.0, healed - record.calm)
        epochs = healing_epochs(record, healed)
        lines.append(f"all together {late:.1f} s after the last fault, after {epochs} epochs")
    grown = [g for g in map(growth, record.last_lives) if g is not None]
    if grown:
        most = [max(values) for values in zip(*grown, strict=True)]
        lines.append(
            f"growth of a process at most: {most[0]:+.0f} threads, {most[1]:+.0f} sockets, "
            f"{most[2]:+.0f} files, {most[3]:+.1f} MB"
        )
    return lines
