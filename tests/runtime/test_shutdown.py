"""However a script ends, its network thread ends with it, and the others are told."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
import threading

import pytest

import moshpit
from moshpit.errors import ClosedError
from moshpit.identity.tickets import RunKey
from moshpit.types import Address
from tests.real.harness import free_port


def new_ticket() -> tuple[str, str]:
    address = Address("127.0.0.1", free_port())
    return RunKey.generate().invite().ticket((address,)).encode(), str(address)


def script(ticket: str, body: str) -> subprocess.Popen[str]:
    text = f"""
    import moshpit, signal, sys, time
    swarm = moshpit.join({ticket!r}, listen="127.0.0.1:0", identity="new")
    swarm.wait_for_peers(2)
    print("in", flush=True)
    {body}
    """
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(text)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


ENDINGS = {
    "return": ("pass", None, 0),
    "exit": ("sys.exit(3)", None, 3),
    "exception": ("raise ValueError('mine')", None, 1),
    "sigint": ("sys.stdin.read()", signal.SIGINT, -signal.SIGINT),
    "sigterm": ("sys.stdin.read()", signal.SIGTERM, 128 + signal.SIGTERM),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_script_that_ends_says_goodbye_and_leaves_nothing(ending: str) -> None:
    body, sign, code = ENDINGS[ending]
    ticket, listen = new_ticket()
    left = threading.Event()
    with moshpit.join(ticket, listen=listen, identity="new") as swarm:
        swarm.listen(lambda notice: left.set() if notice.code == "peer-left" else None)
        process = script(ticket, body)
        assert process.stdout is not None
        assert process.stdout.readline() == "in\n"
        if sign is not None:
            process.send_signal(sign)
        try:
            _, errors = process.communicate(timeout=100)
        finally:
            process.kill()
            process.wait()
        assert process.returncode == code, errors
        assert left.wait(60.0), "the other peer was not told"
        assert len(swarm.peers()) == 1


def test_close_ends_the_thread_and_may_be_repeated() -> None:
    ticket, listen = new_ticket()
    before = set(threading.enumerate())
    swarm = moshpit.join(ticket, listen=listen, identity="new")
    assert set(threading.enumerate()) != before
    swarm.close()
    swarm.close()
    assert set(threading.enumerate()) == before
    with pytest.raises(ClosedError):
        swarm.peers()


def test_a_port_that_is_taken_is_a_clear_error_and_leaves_no_thread() -> None:
    ticket, listen = new_ticket()
    before = set(threading.enumerate())
    with (
        moshpit.join(ticket, listen=listen, identity="new"),
        pytest.raises(moshpit.MoshpitError, match=listen.split(":")[1]),
    ):
        moshpit.join(ticket, listen=listen, identity="new")
    assert set(threading.enumerate()) == before
