"""Was it a good run? Each rule reads a `Record` and returns what is wrong, in words."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import moshpit

from .record import GRACE_S, KEEP, Life, Record

BUSY_S = 5.0  # what a crowded machine may add to any wait; none of ours
HEALING_EPOCHS = 10
STILL_S = 60.0  # so long nobody may be without an epoch, whatever is done
THREADS_MORE = 4
SOCKETS_MORE = 8  # a link and its stripes may be renewed when we look
FILES_MORE = 8
GROUP = moshpit.preset("lan").matchmaking.group_size
ROUNDING = 1e-5  # of weights of order 1, in float32
MEMORY_MORE_MB = 96.0  # an allocator's high-water mark: states for joiners, two at most
AFTER_FILES = 12

Rule = Callable[[Record], list[str]]


def all_finished(record: Record) -> list[str]:
    """Every peer that was there at the end has finished, and ended with 0."""
    wrong: list[str] = []
    for life in record.last_lives:
        if life.last_of("finished") is None:
            wrong.append(f"p{life.peer} has not finished; it came to epoch {life.epoch}")
        elif life.code != 0:
            wrong.append(f"p{life.peer} has finished, and ended with {life.code}")
    for life in record.lives:
        if life.ended and not life.expected:
            wrong.append(f"p{life.peer} has ended by itself, with {life.code}")
    return wrong


def all_alike(record: Record) -> list[str]:
    """All are at one epoch and hold the same bytes. Where they are more than one group, columns of
    the grid round differently, each in its own way: then they hold the same but for that."""
    ends = {life.peer: life.last_of("finished") for life in record.last_lives}
    told = {p: (e["epoch"], e["digest"][:8]) for p, e in ends.items() if e is not None}
    wrong: list[str] = []
    epochs, rounding = {epoch for epoch, _ in told.values()}, len(told) > GROUP
    if len(set(told.values())) > 1 and not (
        rounding and len(epochs) == 1 and record.spread <= ROUNDING
    ):
        wrong.append("not all alike: " + ", ".join(f"p{p}: {e} {d}" for p, (e, d) in told.items()))
    wrong += [f"p{p} ended with NaN or infinity" for p, e in ends.items() if e and not e["finite"]]
    return wrong


def waits_kept(record: Record) -> list[str]:
    """Nobody waited longer than was promised."""
    wrong: list[str] = []
    for life in record.lives:
        for event in life.all_of("waited") + life.all_of("averaged"):
            took = waited_s(life, event["began"], event["seconds"])
            if took > event["promised_s"] + BUSY_S:
                at = event["began"] - record.began
                wrong.append(
                    f"p{life.peer} {event['event']} for {took:.1f} s at {at:.1f} s; "
                    f"{event['promised_s']:.1f} s were promised"
                )
    return wrong


def waited_s(life: Life, began: float, seconds: float) -> float:
    """Return how long a wait was, less the time in which the process was stopped."""
    end = began + seconds
    return seconds - sum(max(0.0, min(end, to) - max(began, at)) for at, to in life.stopped)


def all_together(record: Record) -> list[str]:
    """After the faults all come together: see each other, at one epoch, within some epochs."""
    healed = healed_at(record)
    if healed is None or healed > record.told:
        last = {life.peer: life.last_of("epoch") or {} for life in record.last_lives}
        told = (f"p{p} at epoch {e.get('epoch')} with {e.get('peers')}" for p, e in last.items())
        return [f"not together: {', '.join(told)}"]
    took = healing_epochs(record, healed)
    if took > HEALING_EPOCHS:
        return [f"together only {took} epochs after the last fault was over"]
    return []


def healing_epochs(record: Record, healed: float) -> int:
    """Return how many epochs it took from when all was well, and everybody had started."""
    started = [e["at"] for life in record.last_lives for e in life.all_of("training")[:1]]
    well = max(record.calm, *started)
    told = [(e["at"], e["epoch"]) for life in record.lives for e in life.all_of("epoch")]
    before = max((epoch for at, epoch in told if at <= well), default=0)
    return max(0, max((epoch for at, epoch in told if at <= healed), default=0) - before)


def healed_at(record: Record) -> float | None:
    """Return when all were together again, for good: each has begun an epoch in which it saw all
    others, and not the oldest but one of what others were at; None: never. Who has ended by itself
    is not waited for: another rule has found that."""
    lives = [life for life in record.last_lives if life.expected or not life.ended]
    told = sorted((e["at"], life.peer, e) for life in lives for e in life.all_of("epoch"))
    together: dict[int, float] = {}
    newest = 0
    for at, peer, event in told:
        newest = max(newest, event["epoch"])
        if event["peers"] < len(lives) or event["epoch"] < newest - 1:
            together.pop(peer, None)
        elif peer not in together:
            together[peer] = at
    return max(together.values()) if lives and len(together) == len(lives) else None


def never_still(record: Record) -> list[str]:
    """Somebody always made progress."""
    gap, at = longest_gap(record)
    if gap > STILL_S:
        return [f"no epoch anywhere for {gap:.0f} s, from {at - record.began:.0f} s on"]
    return []


def longest_gap(record: Record) -> tuple[float, float]:
    """Return the longest time without a new epoch anywhere, and when it began. Where everybody was
    killed, it counts anew from when somebody trains again: processes start as they can."""
    told = [e for life in record.lives for e in life.events]
    times = sorted(e["at"] for e in told if e["event"] in ("epoch", "training"))
    edges = [record.began, *(t for t in times if t > record.began)]
    return max(((b - a, a) for a, b in pairwise(edges)), default=(0.0, 0.0))


def left_in_time(record: Record) -> list[str]:
    """Who was asked to leave has done so in good order, within the grace."""
    wrong: list[str] = []
    for life in record.lives:
        if life.expected != "left" or not life.ended:
            continue
        took = waited_s(life, life.told_to_leave, life.ended - life.told_to_leave)
        if took > GRACE_S + BUSY_S:
            wrong.append(f"p{life.peer} took {took:.1f} s to leave")
        if life.code != 0 and life.last_of("joined") is not None:
            wrong.append(f"p{life.peer} was asked to leave, and ended with {life.code}")
    return wrong


def nothing_leaked(record: Record) -> list[str]:
    """At the end, a process holds what it held at the beginning, and nothing after it has left."""
    wrong: list[str] = []
    for life in record.last_lives:
        grown = growth(life)
        if grown is not None:
            limits = (THREADS_MORE, SOCKETS_MORE, FILES_MORE, MEMORY_MORE_MB)
            names = ("threads", "sockets", "files", "MB")
            wrong += [
                f"p{life.peer} holds {more:.0f} {name} more than at the beginning"
                for more, limit, name in zip(grown, limits, names, strict=True)
                if more > limit
            ]
        if life.after is not None and life.after.sockets:
            wrong.append(f"p{life.peer} holds {life.after.sockets} sockets after it has left")
        if life.after is not None and life.after.files > AFTER_FILES:
            wrong.append(f"p{life.peer} holds {life.after.files} files after it has left")
    return wrong


def growth(life: Life) -> tuple[float, float, float, float] | None:
    """Return how many more threads, sockets, files and MB a process holds at the end than in the
    quarter of its samples after its second epoch; None if it was not there for long enough."""
    epochs = life.all_of("epoch")
    if len(epochs) < 2:
        return None
    held = [h for h in life.held if h.at > epochs[1]["at"]]
    if len(held) < 4:
        return None
    early, last = held[: max(1, len(held) // 4)], held[-1]
    return (
        last.threads - max(h.threads for h in early),
        last.sockets - max(h.sockets for h in early),
        last.files - max(h.files for h in early),
        last.memory_mb - max(h.memory_mb for h in early),
    )


def disk_is_tidy(record: Record) -> list[str]:
    """Where peers save there is what is to be kept, and nothing half written."""
    wrong: list[str] = []
    for peer, names in record.left_on_disk.items():
        odd = [n for n in names if not n.startswith("epoch-")]
        if odd:
            wrong.append(f"p{peer} has left {', '.join(odd)} on the disk")
        if len(names) > KEEP + len(odd):
            wrong.append(f"p{peer} keeps {len(names)} checkpoints: {', '.join(names)}")
    return wrong


def nothing_broken(record: Record) -> list[str]:
    """No log has a traceback."""
    return [
        f"p{life.peer} has in its log: {life.complaints[0]}"
        for life in record.lives
        if life.complaints
    ]


RULES: tuple[Rule, ...] = (
    all_finished,
    all_alike,
    waits_kept,
    all_together,
    never_still,
    left_in_time,
    nothing_leaked,
    disk_is_tidy,
    nothing_broken,
)


def judge(record: Record) -> list[str]:
    """Return all that is wrong; nothing, if it was a good run."""
    return [words for rule in RULES for words in rule(record)]
