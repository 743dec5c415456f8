"""The doctor finds what is wrong, and says what to do about it."""

from __future__ import annotations

import json
import resource
import socket
import threading
import time

import pytest
from typer.testing import CliRunner

from moshpit.cli import checks, netchecks
from moshpit.cli.app import app
from moshpit.cli.checks import Status
from moshpit.cli.peerchecks import check_dial, check_visit
from moshpit.identity.tickets import RunKey
from moshpit.types import Address


def test_a_whole_visit() -> None:
    result = CliRunner().invoke(app, ["doctor", "--json", "--listen", "127.0.0.1:0"])
    assert result.exit_code == 0, result.output
    found = {check["subject"]: check for check in json.loads(result.stdout)}
    assert {"python", "packages", "torch", "cpu", "memory", "open files", "clock"} <= set(found)
    assert {"listen", "ipv6", "congestion", "loopback", "encryption"} <= set(found)
    assert all(c["status"] == "ok" or c["advice"] for c in found.values())


def test_words_for_people() -> None:
    result = CliRunner().invoke(app, ["doctor", "--listen", "127.0.0.1:0"])
    assert result.exit_code == 0
    assert result.stdout.startswith("ok    python ")
    assert result.stdout.strip().splitlines()[-1].startswith("This machine is fit")


def test_a_port_in_use_fails_the_visit() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = CliRunner().invoke(app, ["doctor", "--json", "--listen", address])
    assert result.exit_code == 1
    [bad] = [c for c in json.loads(result.stdout) if c["status"] == "fail"]
    assert bad["subject"] == "listen"
    assert "another program" in bad["advice"]


def test_listening_really_answers() -> None:
    assert netchecks.check_listening(Address("127.0.0.1", 0)).status is Status.OK
    foreign = netchecks.check_listening(Address("192.0.2.1", 0))
    assert foreign.status is Status.FAIL
    assert "0.0.0.0" in foreign.advice
    assert netchecks.check_listening(Address("no.such.host.invalid", 0)).status is Status.FAIL


def test_few_open_files_are_noticed() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        check = checks.check_open_files()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert check.status is Status.WARN
    assert "ulimit -n" in check.advice


def test_a_clock_from_the_past_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: 1_000_000.0)
    assert checks.check_clock().status is Status.FAIL


def test_missing_parts_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "PARTS", ("torch", "no-such-part"))
    check = checks.check_packages()
    assert check.status is Status.FAIL
    assert "no-such-part" in check.advice


def test_speeds_are_those_of_a_computer() -> None:
    assert 1e7 < netchecks.sealing_speed(0.05) < 1e12
    assert 1e7 < netchecks.loopback_speed(0.05) < 1e12


def test_congestion_control_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing(socket.socket):
        def setsockopt(self, *args: object) -> None:
            raise PermissionError(1, "not permitted")

    monkeypatch.setattr(netchecks.socket, "socket", Refusing)
    check = netchecks.check_congestion_control()
    if check.status is Status.WARN:  # elsewhere than on Linux there is nothing to choose
        assert "tcp_allowed_congestion_control" in check.advice
    else:
        assert "only Linux" in check.found


def test_dialling_tells_refused_from_open() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])
        assert check_dial(address).status is Status.OK
    refused = check_dial(address)
    assert refused.status is Status.FAIL
    assert "nobody listens" in refused.found
    assert check_dial(Address("no.such.host.invalid", 1)).status is Status.FAIL


def test_a_visit_to_something_else_fails() -> None:
    ticket = RunKey.generate().invite().ticket(())
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = Address("127.0.0.1", server.getsockname()[1])

        def answer() -> None:
            with server.accept()[0] as stranger:
                stranger.recv(1024)
                stranger.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        check = check_visit(ticket, address)
        thread.join()
    assert check.status is Status.FAIL
    assert check.advice
