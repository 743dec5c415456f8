"""`moshpit run --role aux` serves, `moshpit peers` and `moshpit doctor` visit: real processes."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from moshpit.cli.checks import Status
from moshpit.cli.peerchecks import check_visit
from moshpit.cli.peers import show
from moshpit.cli.visit import Visit
from moshpit.identity.tickets import RunKey, Ticket
from moshpit.runtime.record import own_record
from moshpit.types import Address, PeerId, Role, short

from .conftest import Moshpit


@dataclass
class Serving:
    key: RunKey
    address: Address
    process: subprocess.Popen[str]

    def ticket(self, *roles: Role) -> str:
        return self.key.invite(roles or tuple(Role)).ticket((self.address,)).encode()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module", params=[False, True], ids=["sealed", "plaintext"])
def serving(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Serving]:
    folder: Path = tmp_path_factory.mktemp("aux")
    key, address = RunKey.generate(), Address("127.0.0.1", free_port())
    ticket = key.invite().ticket((address,)).encode()
    more = ["--plaintext"] if request.param else []
    with subprocess.Popen(
        [sys.executable, "-m", "moshpit", "run", "--role", "aux", "--ticket", ticket]
        + ["--listen", str(address), "--identity", str(folder / "aux.key"), *more],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"XDG_STATE_HOME": str(folder)},
    ) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        assert any("averages for others" in line for line in lines)
        yield Serving(key, address, process)
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()
        assert process.wait(timeout=100) == 0, rest
    assert "Traceback" not in rest


def test_peers_shows_who_is_there(serving: Serving, moshpit: Moshpit) -> None:
    done = moshpit("peers", "--ticket", serving.ticket(), "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    [peer] = found["peers"]
    assert peer["peer"] == found["asked"]
    assert (peer["state"], peer["role"]) == ("up", "aux")
    assert peer["addresses"] == [str(serving.address)]

    shown = moshpit("peers", "--ticket", serving.ticket(Role.CLIENT), "--at", str(serving.address))
    assert shown.stdout.splitlines()[1].startswith(short(bytes.fromhex(peer["peer"])) + "*")
    assert shown.stderr.startswith("1 up")


def test_addresses_are_shown_as_they_are(capsys: pytest.CaptureFixture[str]) -> None:
    """Rich would take ``[fd00::1]`` for a style; and a peer says of itself what it likes."""
    hosts = ("fd00::1", "::1", "[/x]", "evil\x1b[2J\nhost")
    records = tuple(
        own_record(
            *(PeerId(bytes([i]) * 32), Role.WORKER, (Address(host, 7000),)),
            *(RunKey.generate().invite().ticket(()).admit(PeerId(bytes(32))), 0.0),
        )
        for i, host in enumerate(hosts)
    )
    show(Visit(PeerId(bytes(32)), Address("fd00::1", 7000), 0.0, (), records, ()))
    shown, told = capsys.readouterr()
    _, *rows = shown.splitlines()
    assert [row.split()[-1] for row in rows] == [
        *("[fd00::1]:7000", "[::1]:7000", "[/x]:7000"),
        r"evil\x1b[2J\nhost:7000",
    ]
    assert "[fd00::1]:7000 sees it" in told


def test_peers_of_another_run_are_not_shown(serving: Serving, moshpit: Moshpit) -> None:
    other = RunKey.generate().invite().ticket((serving.address,)).encode()
    done = moshpit("peers", "--ticket", other)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1


def test_doctor_visits(serving: Serving) -> None:
    let_in = check_visit(Ticket.decode(serving.ticket()), serving.address)
    assert let_in.status is Status.OK
    assert "knows 1 peers" in let_in.found

    stranger = RunKey.generate().invite().ticket(())
    refused = check_visit(stranger, serving.address)
    assert refused.status is Status.FAIL
    assert "other-run" in refused.found
    assert "ticket" in refused.advice


def test_a_contact_that_hangs_is_soon_named(moshpit: Moshpit) -> None:
    """A stopped process: its system takes the call, and nobody answers."""
    with socket.create_server(("127.0.0.1", 0)) as hanging:
        address = Address("127.0.0.1", hanging.getsockname()[1])
        ticket = RunKey.generate().invite().ticket((address,)).encode()
        done = moshpit("peers", "--ticket", ticket)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"{address}: silent: it takes calls, but has not answered within 3 s" in done.stderr
    assert "--at HOST:PORT" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_nobody_there_is_one_line(moshpit: Moshpit) -> None:
    ticket = RunKey.generate().invite().ticket((Address("127.0.0.1", free_port()),)).encode()
    done = moshpit("peers", "--ticket", ticket)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
