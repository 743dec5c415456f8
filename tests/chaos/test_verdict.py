"""The verdict on a chaos run: each rule finds what it is there to find."""

from __future__ import annotations

from typing import Any

import pytest

from .record import Held, Life, Record
from .report import figures, timeline
from .run import Losses
from .schedule import Fault, Kind
from .verdict import GROUP, all_alike, healed_at, judge, waited_s


def held(at: float, **more: float) -> Held:
    values: dict[str, Any] = {"threads": 5, "sockets": 10, "files": 8, "memory_mb": 300.0} | more
    return Held(at, **values)


def life(peer: int, *, peers: int = 2, epochs: int = 20) -> Life:
    """A process that begins at 100 s, has an epoch every second, and ends at 122 s."""
    made = Life(peer, started=98.0, ended=122.0, expected="finished", code=0)
    made.events = [{"event": "joined", "at": 99.0}, {"event": "training", "at": 100.0, "epoch": 0}]
    made.events += [
        {"event": "epoch", "at": 100.0 + n, "epoch": n, "peers": peers} for n in range(epochs)
    ]
    made.events.append(
        {"event": "finished", "at": 121.0, "epoch": epochs, "digest": "d", "finite": True}
    )
    made.held = [held(100.0 + n) for n in range(20)]
    made.after = held(121.5, sockets=0)
    return made


def record(*lives: Life) -> Record:
    return Record(
        began=100.0,
        calm=110.0,
        told=118.0,
        ended=121.0,
        faults=(Fault(Kind.LOSS, 2.0, 6.0, (1,), 0.05),),
        lives=list(lives) or [life(0), life(1)],
        left_on_disk={0: ["epoch-1-a", "epoch-2-a"]},
    )


def test_a_good_run() -> None:
    assert judge(record()) == []


def change_end(made: Record, **fields: object) -> None:
    made.lives[1].events[-1] |= fields


def waits(made: Record, seconds: float, promised_s: float) -> None:
    made.lives[1].events.insert(
        5,
        {
            "event": "waited",
            "at": 104.0 + seconds,
            "began": 104.0,
            "seconds": seconds,
            "promised_s": promised_s,
        },
    )


def never_ends(made: Record) -> None:
    del made.lives[1].events[-1]


def dies(made: Record) -> None:
    made.lives.insert(0, Life(1, started=90.0, ended=95.0, code=1))


def stands_still(made: Record) -> None:
    for each in made.lives:
        for event in each.events:
            event["at"] += 70.0 if event["at"] > 105.0 else 0.0
    made.told += 70.0


def leaves_late(made: Record) -> None:
    made.lives.insert(
        0, Life(1, started=60.0, ended=98.0, expected="left", code=0, told_to_leave=61.0)
    )


def leaves_badly(made: Record) -> None:
    leaver = Life(1, started=60.0, ended=63.0, expected="left", code=143, told_to_leave=61.0)
    leaver.events.append({"event": "joined", "at": 60.5})
    made.lives.insert(0, leaver)


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (never_ends, "p1 has not finished; it came to epoch 19"),
        (dies, "p1 has ended by itself, with 1"),
        (lambda made: setattr(made.lives[0], "code", 3), "p0 has finished, and ended with 3"),
        (lambda made: change_end(made, digest="e"), "not all alike: p0: 20 d, p1: 20 e"),
        (lambda made: change_end(made, epoch=21), "not all alike: p0: 20 d, p1: 21 d"),
        (lambda made: change_end(made, finite=False), "p1 ended with NaN or infinity"),
        (lambda made: waits(made, 9.0, 3.0), "p1 waited for 9.0 s at 4.0 s; 3.0 s were promised"),
        (stands_still, "no epoch anywhere for 71 s, from 5 s on"),
        (leaves_late, "p1 took 37.0 s to leave"),
        (leaves_badly, "p1 was asked to leave, and ended with 143"),
        (
            lambda made: made.lives[0].held.append(held(120.0, threads=12)),
            "p0 holds 7 threads more than at the beginning",
        ),
        (
            lambda made: made.lives[0].held.append(held(120.0, memory_mb=500.0)),
            "p0 holds 200 MB more than at the beginning",
        ),
        (
            lambda made: setattr(made.lives[0], "after", held(121.5, sockets=2)),
            "p0 holds 2 sockets after it has left",
        ),
        (
            lambda made: made.left_on_disk.update({1: ["epoch-1-a", ".tmp-2"]}),
            "p1 has left .tmp-2 on the disk",
        ),
        (
            lambda made: made.left_on_disk.update({1: ["epoch-1-a", "epoch-2-a", "epoch-3-a"]}),
            "p1 keeps 3 checkpoints: epoch-1-a, epoch-2-a, epoch-3-a",
        ),
        (lambda made: made.lives[0].complaints.append("Traceback"), "p0 has in its log: Traceback"),
    ],
)
def test_what_is_wrong_is_said(spoil: Any, words: str) -> None:
    made = record()
    spoil(made)
    assert judge(made) == [words]


def test_who_was_stopped_did_not_wait() -> None:
    made = record()
    waits(made, 9.0, 3.0)
    made.lives[1].stopped.append((102.0, 108.0))
    assert judge(made) == []
    assert waited_s(made.lives[1], 104.0, 9.0) == 5.0


def test_together_is_for_good() -> None:
    assert healed_at(record()) == 100.0
    lost = record()
    for event in lost.lives[1].events[4:15]:
        event["peers"] = 1
    assert healed_at(lost) == 113.0
    assert judge(lost) == []
    for event in lost.lives[1].events[15:-1]:
        event["peers"] = 1
    assert healed_at(lost) is None
    assert judge(lost) == ["not together: p0 at epoch 19 with 2, p1 at epoch 19 with 1"]
    behind = record(life(0), life(1, epochs=15))
    behind.lives[1].events[-1]["epoch"] = 20
    assert healed_at(behind) == 100.0, "it was with the others as long as it said something"
    late = record()
    for event in late.lives[1].events[2:-1]:
        event["at"] += 30.0
    assert healed_at(late) == 148.0
    assert judge(late)[0].startswith("not together: "), "only after they were to finish"


def test_coming_together_takes_few_epochs() -> None:
    slow = record(life(0, epochs=40), life(1, epochs=40))
    slow.told = 142.0
    for event in slow.lives[1].events[3:25]:
        event["peers"] = 1
    assert healed_at(slow) == 123.0
    assert judge(slow) == ["together only 13 epochs after the last fault was over"]
    slow.lives[1].events[1]["at"] = 115.0  # it had just been started
    assert judge(slow) == []


def test_losses_are_compared_at_equal_samples() -> None:
    assert Losses(2.05, 2.0).wrong() == []
    assert Losses(1.9, 2.0).wrong() == []
    (words,) = Losses(2.1, 2.0).wrong()
    assert words.startswith("validation loss 2.1000, 5.0% above")


def test_the_timeline_shows_who_was_hit() -> None:
    made = record()
    killed = Life(1, started=90.0, ended=102.0, expected="killed")
    killed.events = [{"event": "training", "at": 100.0, "epoch": 0}]
    made.lives[1].events[1]["at"] = 110.0
    made.lives.insert(1, killed)
    made.lives[0].stopped.append((115.0, 116.0))
    first, second, epochs, *_ = timeline(made)
    assert first == f"   p0 {'·' * 71}{'=' * 6}{'·' * 23}"
    assert second.startswith(f"   p1 {'·' * 9}~")
    assert "x" * 30 in second
    assert epochs.split() == ["epoch", "0", "2", "4", "6", "8", "10", "12", "14", "16", "18"]
    assert figures(made)[0].startswith("1 faults, 3 processes, 19 epochs")


@pytest.mark.parametrize(
    ("spread", "epoch", "wrong"), [(1e-6, 20, False), (1e-3, 20, True), (1e-6, 21, True)]
)
def test_columns_of_a_grid_may_differ_by_rounding(spread: float, epoch: int, wrong: bool) -> None:
    made = record(*(life(n, peers=GROUP + 1) for n in range(GROUP + 1)))
    change_end(made, digest="e", epoch=epoch)
    made.spread = spread
    assert bool(all_alike(made)) == wrong
