"""`moshpit run` runs a script as Python would, with settings for its bare join()."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from moshpit.identity.tickets import RunKey
from moshpit.types import Address

from .conftest import Moshpit

TICKET = RunKey.generate().invite().ticket(()).encode()


def write(folder: Path, text: str, name: str = "train.py") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def test_script_sees_its_arguments_and_its_folder(moshpit: Moshpit, tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    write(folder, "WORD = 'beside'", "helper.py")
    script = write(
        folder,
        "import sys, helper\nassert __name__ == '__main__'\n"
        "assert sys.modules['__main__'].__file__ == __file__\n"
        "print(sys.argv, helper.WORD)\n",
    )
    done = moshpit("run", "--ticket", TICKET, script, "--ticket", "mine", "-x", "--", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[script, '--ticket', 'mine', '-x', '--', '--help']} beside\n"


def test_settings_reach_the_script(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(
        tmp_path, "from moshpit.runtime.ambient import get_ambient\nprint(get_ambient())\n"
    )
    done = moshpit(
        *("run", "--ticket", TICKET, "--role", "client", "--listen", "[::]:7000"),
        *("--advertise", "h:7001", "--preset", "internet", "--plaintext"),
        *("--identity", "me.key", script),
    )
    assert done.returncode == 0, done.stderr
    for part in (
        f"ticket='{TICKET}'",
        "CLIENT",
        "listen='[::]:7000'",
        "advertise='h:7001'",
        "preset='internet'",
        "plaintext=True",
        "me.key",
    ):
        assert part in done.stdout


def test_logging_stays_the_scripts_to_set_up(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import logging\nlogging.basicConfig(format='mine %(message)s', level=logging.INFO)\n"
        "logging.getLogger('moshpit').info('ours')\nlogging.info('hello')\n",
    )
    lines = moshpit("run", script).stderr.splitlines()
    assert lines[0].endswith(" ours")
    assert lines[1:] == ["mine hello"]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("", 0, ""),
        ("raise SystemExit(7)", 7, ""),
        ("import sys; sys.exit('gone')", 1, "gone\n"),
        ("raise KeyboardInterrupt", 130, ""),
    ],
)
def test_exit_codes_are_passed_on(
    moshpit: Moshpit, tmp_path: Path, text: str, code: int, said: str
) -> None:
    done = moshpit("run", write(tmp_path, text))
    assert (done.returncode, done.stderr) == (code, said)


def test_traceback_is_the_scripts_own(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(tmp_path, "def step():\n    raise ValueError('loss is NaN')\n\nstep()\n")
    done = moshpit("run", script)
    assert done.returncode == 1
    lines = done.stderr.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1] == f'  File "{script}", line 4, in <module>'
    assert lines[-1] == "ValueError: loss is NaN"
    assert "runpy" not in done.stderr
    assert "moshpit/cli" not in done.stderr


def test_syntax_error_is_shown_without_our_frames(moshpit: Moshpit, tmp_path: Path) -> None:
    done = moshpit("run", write(tmp_path, "x = = 1\n"))
    assert done.returncode == 1
    assert "SyntaxError" in done.stderr
    assert "runpy" not in done.stderr


def test_our_errors_are_one_line_with_the_place(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(
        tmp_path, "import moshpit.errors as e\n\nraise e.LayoutError('3 tensors, expected 4')\n"
    )
    done = moshpit("run", script)
    assert done.returncode == 2
    assert done.stderr.split() == f"error: 3 tensors, expected 4 ({script}:3)".split()
    assert "Traceback" in moshpit("--debug", "run", script).stderr


def test_peers_that_do_not_come_are_one_line(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(
        tmp_path,
        "import moshpit\n"
        "with moshpit.join(listen='127.0.0.1:0', identity='new') as swarm:\n"
        "    swarm.wait_for_peers(2, timeout_s=0.1)\n",
    )
    ticket = RunKey.generate().invite().ticket(()).encode()
    done = moshpit("run", "--ticket", ticket, script)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "1 of 2 peers after 0.1 s (this one and nobody else)" in error
    assert error.endswith(f"({script}:3)")


def test_a_port_that_is_taken_and_one_that_nobody_has(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(tmp_path, "import moshpit\nmoshpit.join(identity='new').close()\n")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = "{}:{}".format(*taken.getsockname())
        done = moshpit("run", "--ticket", TICKET, "--listen", address, script)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: cannot listen at {address}: Address already in use; ")
    assert "choose another port" in done.stderr

    ticket = RunKey.generate().invite().ticket((Address.parse(address),)).encode()
    asked = moshpit("peers", "--ticket", ticket)
    assert asked.returncode == 2
    assert (
        asked.stderr.split()
        == (
            f"error: peer {address}: refused: nobody listens there; "
            "start a peer with --listen at this address, or check the port"
        ).split()
    )
    first = moshpit("run", "--ticket", ticket, "--listen", "127.0.0.1:0", script)
    assert first.returncode == 0
    failed, here = first.stderr.splitlines()
    assert f"{address}: refused: nobody listens there; trying again until somebody" in failed
    assert re.search(r"this is peer \w{8} of run \w{8}, role worker, at 127.0.0.1:\d+$", here)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("missing.py",), "no script at missing.py"),
        (("--role", "worker"), "name a script"),
        (("--listen", "7000", "missing.py"), "host:port"),
        (("--grace", "long", "missing.py"), "length of time"),
    ],
)
def test_what_cannot_run_is_said(moshpit: Moshpit, arguments: tuple[str, ...], said: str) -> None:
    done = moshpit("run", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
    assert "Traceback" not in done.stderr


SLOW = """
import signal, sys, threading, time
try:
    print("ready", flush=True)
    threading.Event().wait(600)
finally:
    print("leaving", flush=True)
    {ending}
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [("pass", ""), ("time.sleep(600)", "not done 0 s after SIGTERM")],
)
def test_sigterm_unwinds_the_script_within_its_grace(
    tmp_path: Path, ending: str, said: str
) -> None:
    script = write(tmp_path, SLOW.format(ending=ending))
    grace = "30s" if ending == "pass" else "0s"
    with subprocess.Popen(
        [sys.executable, "-m", "moshpit", "run", "--grace", grace, script],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=100)  # and not the 600 s that it would sleep
    assert process.returncode == (128 + signal.SIGTERM if said else 0)
    assert said in err
    assert "Traceback" not in err
    assert out == ("leaving\n" if not said else out)


def test_a_bad_ticket_is_said_in_one_line(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(tmp_path, "import moshpit\nmoshpit.join()\n")
    for arguments in (("--ticket", "moshpit1_xyz", script), (script,)):
        done = moshpit("run", *arguments)
        assert done.returncode == 2
        assert "ticket" in done.stderr
        assert "Traceback" not in done.stderr
    aux = moshpit("run", "--role", "aux", "--ticket", "moshpit1_xyz")
    assert (aux.returncode, len(aux.stderr.splitlines())) == (2, 1)
