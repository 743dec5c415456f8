"""What is said in the call outranks the command line, and that the environment."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from moshpit.runtime.ambient import JoinSettings, get_ambient, resolve, set_ambient
from moshpit.types import Role


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("MOSHPIT_TICKET", raising=False)
    before = get_ambient()
    set_ambient(JoinSettings())
    yield
    set_ambient(before)


def test_nothing_said_is_nothing() -> None:
    assert resolve(JoinSettings()) == JoinSettings()


def test_field_by_field() -> None:
    set_ambient(JoinSettings(ticket="T", role=Role.AUX, plaintext=True, identity=Path("key")))
    said = JoinSettings(role=Role.WORKER, plaintext=False, listen="127.0.0.1:0")
    assert resolve(said) == JoinSettings(
        ticket="T",
        role=Role.WORKER,
        listen="127.0.0.1:0",
        plaintext=False,
        identity=Path("key"),
    )


def test_environment_is_last_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MOSHPIT_TICKET", "from-environment")
    with caplog.at_level(logging.INFO, logger="moshpit"):
        assert resolve(JoinSettings(ticket="said")).ticket == "said"
        set_ambient(JoinSettings(ticket="ambient"))
        assert resolve(JoinSettings()).ticket == "ambient"
        assert caplog.records == []
        set_ambient(JoinSettings())
        assert resolve(JoinSettings()).ticket == "from-environment"
    assert "MOSHPIT_TICKET" in caplog.text
