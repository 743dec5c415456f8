"""Can others dial this peer? What they say, what to make of it, and when to act on it.

Rules:

* One witness may lie, or be cut off itself. Where there are two or more to ask, two must agree,
  and be the majority; the only other one is believed.
* Nothing is done at the first sign: it must be confirmed, by a question to others if there are
  any. Who changes to and fro waits longer each time.
* What cannot be told changes nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, final

from moshpit.config import ReachConfig
from moshpit.runtime.helpdesk import DETAIL_CHARS_MAX, HOST_CHARS_MAX, plain_host
from moshpit.types import Address, PeerId
from moshpit.wire.help import DialBack, DialBackReply

AGREEING: Final = 2  # witnesses, where there are as many
OUTCOMES: Final = ("reached", "refused", "unreachable", "no-handshake", "foreign")


class Verdict(StrEnum):
    """Whether a peer can be dialled."""

    REACHED = "reached"
    """At an address that it advertises."""
    ELSEWHERE = "elsewhere"
    """Not there, but where its connections come from."""
    UNREACHED = "unreached"
    UNKNOWN = "unknown"


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """What one peer found when it dialled back, or what several agree on.

    Attributes:
        verdict: in short.
        at: where it got through, if elsewhere.
        detail: why it did not.
        witnesses: who says so.
    """

    verdict: Verdict
    at: Address | None = None
    detail: str = ""
    witnesses: tuple[PeerId, ...] = ()


UNKNOWN: Final = Finding(Verdict.UNKNOWN)


def reply_fault(question: DialBack, reply: DialBackReply) -> str:
    """Say why this cannot be an honest peer's answer; empty if it can."""
    if len(reply.seen) > HOST_CHARS_MAX:
        return f"a host of {len(reply.seen)} characters"
    if reply.results:
        asked = [(host or reply.seen, port) for host, port in question.addresses]
        if [(r.host or reply.seen, r.port) for r in reply.results] != asked:
            return "results for other addresses than were asked for"
        if any(r.outcome not in OUTCOMES for r in reply.results):
            return "an outcome that there is none of"
        if any(len(r.detail) > DETAIL_CHARS_MAX for r in reply.results):
            return "an endless detail"
    return ""


def finding(
    witness: PeerId, reply: DialBackReply, advertised: Sequence[Address], *, given: bool
) -> Finding:
    """Judge a fault-free reply.

    Args:
        witness: whose it is.
        reply: what it says.
        advertised: where this peer is to be dialled.
        given: the user has said so: that it cannot be dialled at another address, the one that
            its connections come from, means nothing then.
    """
    leading = [Address(plain_host(a.host), a.port) for a in advertised]
    elsewhere: Address | None = None
    failures: list[str] = []
    for result in reply.results:
        where = Address(plain_host(result.host), result.port)
        if result.outcome == "reached" and where in leading:
            return Finding(Verdict.REACHED, witnesses=(witness,))
        if result.outcome == "reached":
            elsewhere = elsewhere or where
        elif result.outcome != "foreign" and (where in leading or not given):
            failures.append(f"{where} {result.outcome}")
    if elsewhere is not None:
        return Finding(Verdict.ELSEWHERE, elsewhere, witnesses=(witness,))
    if not failures:
        return UNKNOWN
    return Finding(Verdict.UNREACHED, None, ", ".join(dict.fromkeys(failures)), (witness,))


def agree(findings: Sequence[Finding], others: int) -> Finding:
    """Return what is to be believed.

    Args:
        findings: one of each witness that was asked.
        others: how many peers could be asked at all.

    Example:
        >>> no, yes = Finding(Verdict.UNREACHED), Finding(Verdict.REACHED)
        >>> [str(agree(said, 3).verdict) for said in ([no], [no, no], [no, yes], [no, yes, no])]
        ['unknown', 'unreached', 'unknown', 'unreached']
    """
    needed = min(AGREEING, max(1, others))
    reached = [t for t in findings if t.verdict is Verdict.REACHED]
    outside = [t for t in findings if t.verdict is Verdict.ELSEWHERE]
    failed = [t for t in findings if t.verdict is Verdict.UNREACHED]
    if len(reached) >= needed and len(reached) > len(failed):
        return _together(reached)
    if outside:
        (where, count), *_ = Counter(t.at for t in outside).most_common()
        if count >= needed and count + len(reached) > len(failed):
            return _together([t for t in outside if t.at == where])
    if len(failed) >= needed and len(failed) > len(reached) + len(outside):
        return _together(failed)
    return UNKNOWN


def _together(same: Sequence[Finding]) -> Finding:
    witnesses = tuple(dict.fromkeys(w for t in same for w in t.witnesses))
    return Finding(same[0].verdict, same[0].at, same[0].detail, witnesses)


@final
class Patience:
    """When to ask again, and whether to act on what was heard.

    Attributes:
        hidden: whether this peer counts as one that cannot be dialled.
        due: when to ask next, on the clock of ``now``.
    """

    def __init__(self, config: ReachConfig, now: float) -> None:
        self.hidden = False
        self.due = now + config.first_s
        self._config = config
        self._contrary = 0  # conclusions in a row that contradict `hidden`
        self._same = 0  # and that confirm it
        self._hidings = 0
        self._shown_from = now  # not a worker again before

    def conclude(self, verdict: Verdict, now: float) -> bool:
        """Take a conclusion; return whether to change now: to `hidden`, or back."""
        config = self._config
        if verdict is Verdict.UNKNOWN:
            self.due = now + config.unknown_s
            return False
        if (verdict is Verdict.UNREACHED) == self.hidden:
            self._contrary = 0
            self._same += 1
            growing = config.hidden_s * 2 ** min(self._same - 1, 20)
            self.due = now + (min(config.steady_s, growing) if self.hidden else config.steady_s)
            return False
        self._contrary += 1
        if self._contrary < config.confirmations:
            self.due = now + config.confirm_s
            return False
        if self.hidden and now < self._shown_from:
            self.due = self._shown_from
            return False
        self._flip(now)
        return True

    def soon(self, now: float) -> None:
        """Something has changed: ask before long, and believe nothing of before."""
        self._contrary = 0
        self.due = min(self.due, now + self._config.confirm_s)

    def _flip(self, now: float) -> None:
        config = self._config
        self.hidden = not self.hidden
        self._contrary = self._same = 0
        self.due = now + (config.hidden_s if self.hidden else config.steady_s)
        if self.hidden:
            self._hidings += 1
            hold_s = config.hidden_s * 2 ** min(self._hidings - 1, 20)
            self._shown_from = now + min(config.hold_s_max, hold_s)
