"""What a peer believes about its own reachability, and when it acts on it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from moshpit.config import ReachConfig
from moshpit.runtime.verdicts import Finding, Patience, Verdict, agree, finding, reply_fault
from moshpit.types import Address, PeerId
from moshpit.wire.help import DialBack, DialBackReply, DialResult

WITNESS = PeerId(b"w" * 32)
SEEN = "198.51.100.9"
INNER = Address("192.168.1.2", 7000)


def reply(*results: tuple[str, int, str]) -> DialBackReply:
    return DialBackReply(1, SEEN, tuple(DialResult(h, p, outcome) for h, p, outcome in results))


@pytest.mark.parametrize(
    ("results", "given", "verdict", "at"),
    [
        ([(SEEN, 7000, "refused"), ("192.168.1.2", 7000, "reached")], False, "reached", None),
        ([("::ffff:192.168.1.2", 7000, "reached")], False, "reached", None),
        ([(SEEN, 7000, "refused"), ("192.168.1.2", 7000, "unreachable")], False, "unreached", None),
        ([(SEEN, 7000, "no-handshake")], False, "unreached", None),
        ([(SEEN, 7000, "reached"), ("192.168.1.2", 7000, "refused")], False, "elsewhere", SEEN),
        ([("192.168.1.2", 7001, "reached")], False, "elsewhere", "192.168.1.2"),
        # The user has named an address: what else fails says nothing about that.
        ([(SEEN, 7000, "refused"), ("192.168.1.2", 7000, "foreign")], True, "unknown", None),
        ([(SEEN, 7000, "refused"), ("192.168.1.2", 7000, "refused")], True, "unreached", None),
        ([("192.168.1.2", 7000, "foreign")], False, "unknown", None),
        ([], False, "unknown", None),
    ],
)
def test_what_one_witness_says(
    results: Sequence[tuple[str, int, str]], given: bool, verdict: str, at: str | None
) -> None:
    found = finding(WITNESS, reply(*results), [INNER], given=given)
    assert str(found.verdict) == verdict
    assert (found.at.host if found.at else None) == at
    assert bool(found.detail) == (verdict == "unreached")


def witnesses(text: str) -> list[Finding]:
    """``r`` reached it, ``x`` and ``y`` did elsewhere, ``n`` did not, ``?`` cannot tell."""
    places = {"x": Address("x", 1), "y": Address("y", 1)}
    verdicts = {"r": Verdict.REACHED, "n": Verdict.UNREACHED, "?": Verdict.UNKNOWN}
    return [
        Finding(verdicts.get(c, Verdict.ELSEWHERE), places.get(c), "", (PeerId(bytes([i])),))
        for i, c in enumerate(text)
    ]


@pytest.mark.parametrize(
    ("said", "others", "believed"),
    [
        ("n", 1, "unreached"),
        ("r", 1, "reached"),
        ("x", 1, "elsewhere"),
        ("n", 2, "unknown"),  # the other one has not answered
        ("n?", 5, "unknown"),
        ("nr", 2, "unknown"),
        ("nn", 2, "unreached"),
        ("nnr", 5, "unreached"),
        ("nrr", 5, "reached"),
        ("nnrr", 5, "unknown"),
        ("xx", 5, "elsewhere"),
        ("xy", 5, "unknown"),
        ("xxn", 5, "elsewhere"),
        ("xnn", 5, "unreached"),
        ("xyn", 5, "unknown"),
        ("", 5, "unknown"),
        ("", 0, "unknown"),
    ],
)
def test_no_single_witness_decides(said: str, others: int, believed: str) -> None:
    found = agree(witnesses(said), others)
    assert str(found.verdict) == believed
    if found.verdict is not Verdict.UNKNOWN:
        assert len(found.witnesses) >= min(2, others)


QUESTION = DialBack(1, (("", 7000), ("192.168.1.2", 7000)))


@pytest.mark.parametrize(
    "results",
    [
        (DialResult("198.51.100.7", 22, "reached"),),
        (DialResult(SEEN, 7000, "reached"),),
        (DialResult(SEEN, 7000, "splendid"), DialResult("192.168.1.2", 7000, "reached")),
        (DialResult(SEEN, 7000, "reached", "x" * 999), DialResult("192.168.1.2", 7000, "reached")),
    ],
)
def test_impossible_answers_are_refused(results: tuple[DialResult, ...]) -> None:
    assert reply_fault(QUESTION, DialBackReply(1, SEEN, results))
    assert reply_fault(QUESTION, DialBackReply(1, "s" * 999, ()))
    honest = (DialResult(SEEN, 7000, "refused"), DialResult("192.168.1.2", 7000, "reached"))
    assert not reply_fault(QUESTION, DialBackReply(1, SEEN, honest))


CONFIG = ReachConfig(
    first_s=2, confirm_s=3, unknown_s=20, steady_s=600, hidden_s=60, hold_s_max=300
)
NO, YES, UNKNOWN = Verdict.UNREACHED, Verdict.REACHED, Verdict.UNKNOWN


def told(patience: Patience, *verdicts: Verdict) -> list[tuple[float, bool]]:
    """Conclude whenever it is due; return when that was, and what it then was."""
    story: list[tuple[float, bool]] = []
    for verdict in verdicts:
        now = patience.due
        patience.conclude(verdict, now)
        story.append((now, patience.hidden))
    return story


def test_what_is_found_is_confirmed_before_it_is_acted_on() -> None:
    assert told(Patience(CONFIG, 0.0), NO, YES, NO, NO) == [
        (2, False), (5, False), (605, False), (608, True),
    ]  # fmt: skip


def test_what_cannot_be_told_changes_nothing() -> None:
    assert told(Patience(CONFIG, 0.0), UNKNOWN, NO, UNKNOWN, NO) == [
        (2, False), (22, False), (25, False), (45, True),
    ]  # fmt: skip


def test_who_is_hidden_asks_ever_more_rarely_and_comes_back() -> None:
    patience = Patience(CONFIG, 0.0)
    told(patience, NO, NO)
    hidden_at = 5.0
    story = told(patience, NO, NO, NO, YES, YES)
    gaps = [at - hidden_at for at, _ in story]
    assert gaps == [60, 120, 240, 480, 483]
    assert [hidden for _, hidden in story] == [True, True, True, True, False]
    assert patience.due == story[-1][0] + 600


def test_who_changes_to_and_fro_stays_a_client_for_longer_each_time() -> None:
    patience, held = Patience(CONFIG, 0.0), []
    for _ in range(5):
        while not patience.hidden:
            patience.conclude(NO, patience.due)
        since = patience.due - CONFIG.hidden_s
        while patience.hidden:
            now = patience.due
            patience.conclude(YES, now)
        held.append(now - since)
    assert held == [63, 120, 240, 300, 300]


def test_news_is_looked_into_soon() -> None:
    patience = Patience(CONFIG, 0.0)
    told(patience, NO)
    patience.soon(4.0)  # its addresses have changed: what was found was about others
    assert patience.due == 5.0
    assert told(patience, NO, NO) == [(5, False), (8, True)]
