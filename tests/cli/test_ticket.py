"""Tickets on the command line: one word on stdout, the key in a file for its owner only."""

from __future__ import annotations

import json
import stat
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moshpit.cli.app import app
from moshpit.cli.ticket import parse_expiry, parse_roles
from moshpit.errors import ConfigError, TicketError
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.types import Address, Role

from .conftest import Moshpit


@pytest.fixture(autouse=True)
def own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def invoke(*args: str) -> str:
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_new_prints_the_ticket_and_nothing_else(moshpit: Moshpit, tmp_path: Path) -> None:
    done = moshpit("ticket", "new")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 1
    ticket = Ticket.decode(done.stdout.strip())
    assert ticket.addresses == (Address("127.0.0.1", 7000),)
    assert ticket.roles == tuple(Role)
    assert "New run" in done.stderr
    assert done.stdout.strip() not in done.stderr
    [key] = (tmp_path / "state").rglob("run.key")
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert str(key) in done.stderr


def test_without_keys_every_ticket_is_a_run_of_its_own() -> None:
    first, second = (Ticket.decode(invoke("ticket", "new").strip()) for _ in range(2))
    assert first.run != second.run


def test_a_key_file_makes_more_invites_to_one_run(tmp_path: Path) -> None:
    key = tmp_path / "run.key"
    new = ("ticket", "new", "--keys", str(key), "--address", "[::1]:7001")
    first = Ticket.decode(invoke(*new).strip())
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    before = key.read_bytes()
    second = Ticket.decode(invoke(*new, "--roles", "client", "--expires", "7d").strip())
    assert key.read_bytes() == before
    assert first.run == second.run
    assert first.invite_key != second.invite_key
    assert second.roles == (Role.CLIENT,)
    assert abs(second.expires_at - (time.time() + 7 * 86400)) < 60
    assert second.addresses == (Address("::1", 7001),)


def test_show_says_what_is_in_it_and_hides_the_secret() -> None:
    text = invoke("ticket", "new", "--roles", "aux", "--expires", "90m", "--address", "h:1").strip()
    ticket = Ticket.decode(text)
    shown = invoke("ticket", "show", text)
    assert "aux" in shown
    assert "h:1" in shown
    assert "1h" in shown
    read = json.loads(invoke("ticket", "show", text, "--json"))
    assert read == {
        "run": ticket.run.hex(),
        "roles": ["aux"],
        "expires_at": ticket.expires_at,
        "addresses": ["h:1"],
    }
    assert ticket.invite_key.hex() not in shown + json.dumps(read)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("show", "hello"), "no ticket"),
        (("new", "--roles", "king"), "choose from worker, client, aux"),
        (("new", "--expires", "soon"), "length of time"),
        (("new", "--address", "no-port"), "host:port"),
        (("new", "--address", "h:0"), "port 0"),
        (("new", "--address", "0.0.0.0:7000"), "nobody can dial it"),
        (("new", "--address", "[::]:7000"), "one of "),
        (("new", "--expires", "99999999w"), "longer than 100 years"),
    ],
)
def test_errors_are_one_line_and_exit_code_2(
    moshpit: Moshpit, arguments: tuple[str, ...], said: str
) -> None:
    done = moshpit("ticket", *arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert said in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr


def test_debug_shows_the_traceback(moshpit: Moshpit) -> None:
    done = moshpit("--debug", "ticket", "show", "hello")
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert TicketError.__name__ in done.stderr


def test_a_place_that_cannot_be_written_is_said(moshpit: Moshpit) -> None:
    done = moshpit("ticket", "new", "--keys", "/proc/no/run.key")
    assert (done.returncode, done.stdout) == (2, "")
    assert "/proc/no" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_expiry_and_roles() -> None:
    assert parse_expiry("never") == 0
    before = time.time()
    assert int(before) <= parse_expiry("1h") - 3600 <= time.time() + 1
    with pytest.raises(ConfigError, match="never"):
        parse_expiry("0")
    assert parse_roles("aux,aux, Worker") == (Role.AUX, Role.WORKER)


def test_an_address_in_a_strangers_ticket_forges_no_line() -> None:
    ticket = RunKey.generate().invite().ticket((Address("h\nroles      all\x1b[2J", 1),))
    *_, last = shown = invoke("ticket", "show", ticket.encode()).splitlines()
    assert len(shown) == 4
    assert last == r"dials      h\nroles      all\x1b[2J:1"
