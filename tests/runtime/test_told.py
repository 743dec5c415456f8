"""The log of notices: each at its level, one line each, and never without end."""

from __future__ import annotations

import logging

import pytest

from moshpit.errors import MoshpitError, StateError, WireError
from moshpit.events import Notice
from moshpit.runtime.told import LOG_BURST, NoticeLog
from moshpit.types import PeerId

PEER = PeerId(bytes(32))


class Told:
    """A log at a clock that is set by hand."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        caplog.set_level(logging.INFO, "moshpit")
        self.now = 0.0
        self._log = NoticeLog(lambda: self.now)
        self._caplog = caplog

    def tell(self, code: str, detail: str = "", count: int = 1) -> list[str]:
        self._caplog.clear()
        for _ in range(count):
            self._log(Notice(code, PEER, detail))
        return [record.getMessage() for record in self._caplog.records]


@pytest.fixture
def told(caplog: pytest.LogCaptureFixture) -> Told:
    return Told(caplog)


@pytest.mark.parametrize("code", ["refused", "peer-joined"])
def test_a_flood_becomes_a_trickle_with_a_count(told: Told, code: str) -> None:
    assert len(told.tell(code, "nonsense", count=100_000)) == LOG_BURST
    assert told.tell("peer-dead") == ["peer-dead aaaaaaaa"], "another code has its own lines"
    told.now += 1.0
    [line] = told.tell(code, "nonsense", count=1000)
    assert line == f"{code} aaaaaaaa: nonsense (and {100_000 - LOG_BURST} more before)"
    told.now += 3600.0
    lines = told.tell(code, count=LOG_BURST)
    assert lines[0] == f"{code} aaaaaaaa: (and 999 more before)"
    assert lines[1:] == [f"{code} aaaaaaaa"] * (LOG_BURST - 1)


def test_a_notice_is_one_line_whatever_a_peer_has_put_into_it(told: Told) -> None:
    [line] = told.tell("refused", "of role \n12:00:00 peer-dead \x1b[2J\x00\u202e")
    assert line.isprintable()
    assert line == r"refused aaaaaaaa: of role \n12:00:00 peer-dead \x1b[2J\x00\u202e"


@pytest.mark.parametrize(
    "error", [StateError("no tensor \x1b[2J\n"), WireError("me\n", "late", "\rby 1 s")]
)
def test_errors_with_words_of_others_are_one_line_too(error: MoshpitError) -> None:
    assert str(error).isprintable()
