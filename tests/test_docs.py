"""The pages tell the truth: the tutorial runs, and what is made from code is current."""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from typer.main import get_command

from moshpit.cli.app import app

DOCS = Path(__file__).parents[1] / "docs"
END_OF_BLOCK = "~~~ end of block ~~~"
BASH_S_MAX = 280


@dataclass
class Block:
    """A fenced block of a page: its language, its file name if it has one, its text."""

    language: str
    file: str
    text: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m[1], m[2] or "", m[3], text[: m.start()].count("\n") + 1)
        for m in re.finditer(r"^```(\w+)(?: file=(\S+))?\n(.*?)^```$", text, re.M | re.S)
    ]


def matches(expected: str, got: str) -> bool:
    """Whether an output is the expected one; ``...`` stands for anything on its line.

    Blanks at the end of a line, as tables have them, do not matter.
    """
    pattern = r"[^\n]*".join(re.escape(part) for part in expected.split("..."))
    bare = re.sub(r" +$", "", got, flags=re.M)
    return re.fullmatch(pattern, bare) is not None


def test_the_wildcard_is_one_line_wide() -> None:
    assert matches("a ... b\nc\n", "a x y b\nc\n")
    assert not matches("a ... b\n", "a\nb\n")
    assert not matches("a\n", "a\nb\n")


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return str(probe.getsockname()[1])


def run_bash(script: str, folder: Path, environment: dict[str, str]) -> tuple[int, str, str]:
    """Run a script, and leave none of its background processes behind if it fails."""
    out, err = folder / "stdout.log", folder / "stderr.log"
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            ["bash", "-c", script],
            cwd=folder,
            env=environment,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
        code = -1
        try:
            code = process.wait(timeout=BASH_S_MAX)
        except subprocess.TimeoutExpired:
            print(f"not done after {BASH_S_MAX} s", file=stderr)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return code, out.read_text(), err.read_text()


def test_the_tutorial_runs(tmp_path: Path) -> None:
    page = blocks(DOCS / "tutorial" / "first-swarm.md")
    port = free_port()
    commands: list[Block] = []
    expected: list[Block] = []
    for block in page:
        if block.file:
            (tmp_path / block.file).write_text(block.text)
        elif block.language == "bash":
            commands.append(block)
        elif block.language == "text":
            expected += [Block("text", "", "", 0)] * (len(commands) - 1 - len(expected))
            expected.append(block)
    script = "set -euo pipefail\n" + "".join(
        f"{block.text}echo '{END_OF_BLOCK}'\n" for block in commands
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MOSHPIT_")}
    environment |= {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{environment.get('PATH', '')}",
        "XDG_STATE_HOME": str(tmp_path / "state"),
    }
    code, stdout, said = run_bash(script.replace(":7000", f":{port}"), tmp_path, environment)
    assert code == 0, f"{stdout}\n{said}"
    assert "Traceback" not in said
    outputs = stdout.replace(f":{port}", ":7000").split(f"{END_OF_BLOCK}\n")
    assert len(outputs) == len(commands) + 1
    for block, output in zip(expected, outputs, strict=False):
        if block.line:
            assert matches(block.text, output), f"first-swarm.md:{block.line}: got\n{output}"


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", ["cli.md", "errors.md", "messages.md", "settings.md"])
def test_generated_pages_are_current(generator: ModuleType, name: str) -> None:
    page = DOCS / "reference" / name
    assert generator.pages()[page] == page.read_text(encoding="utf-8"), "run `make docs`"


# --- the table of faults ------------------------------------------------------------------------

FAULTS = DOCS / "reference" / "faults.md"
ROOT = DOCS.parent
FRAGMENT_MIN = 4  # letters; shorter ones say nothing


def rows_of_faults() -> list[list[str]]:
    """The cells of each row: what is done, what is seen, what is lost, the proof."""
    lines = FAULTS.read_text(encoding="utf-8").splitlines()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in lines if line[:1] == "|"
    ]
    return [row for row in rows if row[0] != "what is done" and not row[0].startswith("---")]


def words_of_the_program() -> str:
    """Every string in the source that is no docstring, and the names of its errors."""
    words: list[str] = []
    for path in sorted((ROOT / "src").rglob("*.py")):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        explained = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                words.append(node.name)
            elif isinstance(node, ast.Constant) and id(node) not in explained:
                words.append(str(node.value))
    return "\0".join(words)


def test_every_fault_names_a_test_that_exists() -> None:
    rows = rows_of_faults()
    assert len(rows) > 40
    wrong: list[str] = []
    for row in rows:
        assert len(row) == 4, row
        named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", row[3])
        if not named and "trusted" not in row[2]:
            wrong.append(f"{row[0]}: no test")
        for file, test in named:
            path = ROOT / file
            if not path.is_file() or not re.search(rf"^def {test}\(", path.read_text(), re.M):
                wrong.append(f"{row[0]}: there is no {file}::{test}")
    assert wrong == []


def test_messages_of_faults_are_the_programs() -> None:
    words = words_of_the_program()
    wrong: list[str] = []
    for row in rows_of_faults():
        for message in re.findall(r"`([^`]+)`", row[1]):
            for fragment in re.split(r"…|: ", message):
                said = fragment.strip(" :;,.")
                if len(said) >= FRAGMENT_MIN and said not in words:
                    wrong.append(f"{row[0]}: nothing in the source says {said!r}")
    assert wrong == []


# --- what the pages name -------------------------------------------------------------------------

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("*/README.md"))]
PAGES += sorted(DOCS.rglob("*.md"))
COMMAND = re.compile(
    r"\bmoshpit ((?:run|peers|plan|doctor|sim|demo|bench|experiment|ticket)\b[^\n`#|&;]*)"
)


def options_by_command() -> dict[tuple[str, ...], set[str]]:
    known: dict[tuple[str, ...], set[str]] = {}

    def walk(command: Any, path: tuple[str, ...]) -> None:
        known[path] = {o for p in command.params for o in (*p.opts, *p.secondary_opts)}
        known[path] |= {"--help", "-h"}
        for name, below in getattr(command, "commands", {}).items():
            walk(below, (*path, name))

    walk(get_command(app), ())
    return known


def test_commands_in_the_pages_have_their_options() -> None:
    known = options_by_command()
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "examples").glob("*.py")]
    wrong: list[str] = []
    looked_at = 0
    for page in [*PAGES, *sources]:
        text = page.read_text(encoding="utf-8").replace("\\\n", " ")
        for found in COMMAND.finditer(text):
            path: tuple[str, ...] = ()
            words = found[1].split()
            while words and (*path, words[0]) in known:
                path = (*path, words.pop(0))
            for word in words:
                if word.endswith(".py"):
                    break  # what follows is the script's
                option = re.match(r"--[a-z][a-z-]*|-[a-z]\b", word)
                looked_at += option is not None
                if option is not None and option[0] not in known[path] | known[()]:
                    wrong.append(f"{page.relative_to(ROOT)}: {found[0].strip()}: no {option[0]}")
    assert wrong == []
    assert looked_at > 100


def test_names_in_the_pages_exist() -> None:
    wrong: list[str] = []
    for page in PAGES:
        for name in set(
            re.findall(r"(?<![\w./-])(moshpit(?:\.[A-Za-z_]\w*)+)", page.read_text("utf-8"))
        ):
            thing: object = importlib.import_module("moshpit")
            for part in name.split(".")[1:]:
                try:
                    thing = getattr(thing, part)
                except AttributeError:
                    try:
                        thing = importlib.import_module(f"{thing.__name__}.{part}")
                    except (ImportError, AttributeError):
                        wrong.append(f"{page.relative_to(ROOT)}: there is no {name}")
                        break
    assert wrong == []
