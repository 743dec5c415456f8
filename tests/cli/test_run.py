"""`moshpit run` runs a script as Python would, with settings for its bare join()."""

from __future__ import annotations

from pathlib import Path

import pytest

from .conftest import Moshpit


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
    done = moshpit("run", "--ticket", "T", script, "--ticket", "mine", "-x", "--", "--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{[script, '--ticket', 'mine', '-x', '--', '--help']} beside\n"


def test_settings_reach_the_script(moshpit: Moshpit, tmp_path: Path) -> None:
    script = write(
        tmp_path, "from moshpit.runtime.ambient import get_ambient\nprint(get_ambient())\n"
    )
    done = moshpit(
        *("run", "--ticket", "T", "--role", "client", "--listen", "[::]:7000"),
        *("--advertise", "h:7001", "--preset", "internet", "--plaintext"),
        *("--identity", "me.key", "--grace", "1m30s", script),
    )
    assert done.returncode == 0, done.stderr
    for part in (
        "ticket='T'",
        "CLIENT",
        "listen='[::]:7000'",
        "advertise='h:7001'",
        "preset='internet'",
        "plaintext=True",
        "me.key",
        "grace_s=90.0",
    ):
        assert part in done.stdout


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
