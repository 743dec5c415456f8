"""The rules of the house, checked on every run: layers, purity, sizes, names, links.

Each test walks the source and fails with a line that says where, what, and what to do
instead. `docs/internals/` has the reasons.
"""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

import moshpit

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src" / "moshpit"
SOURCES = sorted(SRC.rglob("*.py"))

LAYERS = (
    ("errors",),
    ("types", "config"),
    ("events",),
    ("wire",),
    ("tensors", "protocol"),
    ("transport", "identity"),
    ("runtime", "sim"),
    ("training", "planning", "baselines"),
    ("experiments",),
    ("dashboard", "integrations", "metrics", "cli"),
    ("", "__main__"),
)
"""The drawing in docs/internals/layers.md, from the ground up. "" is the package itself."""

RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}

SIDEWAYS = {
    ("config", "types"),
    ("transport", "identity"),  # the handshake proves keys and admissions
    ("baselines", "training"),  # they are strategies
    ("__main__", ""),
}
"""Imports within one layer that are meant."""

FORBIDDEN = {
    ("training", "sim"): "training meets the network through runtime only",
    ("sim", "transport"): "the simulator has its own network",
    ("transport", "protocol"): "a transport carries messages; machines belong to the drivers",
    ("planning", "runtime"): "a plan is arithmetic; it needs no network",
    ("planning", "tensors"): "a plan loads no torch; it has a table of codecs of its own",
    ("identity", "tensors"): "keys have no business with tensors",
}
"""Arrows that point down and are not wanted all the same."""

PURE = {
    "random": "take the generator given to the constructor (machine.Rng)",
    "secrets": "take the generator given to the constructor (machine.Rng)",
    "time": "use the argument `now`",
    "datetime": "use the argument `now`",
    "os": "take what is needed as an argument; the driver knows the system",
    "sys": "take what is needed as an argument; the driver knows the system",
    "pathlib": "take what is needed as an argument; the driver knows the files",
    "io": "take what is needed as an argument; the driver knows the files",
    "logging": "return an Emit(Notice(...)) effect",
    "asyncio": "set `wakeup` and return effects; the driver waits",
    "selectors": "return a Send effect; the driver owns the sockets",
    "socket": "return a Send effect; the driver owns the sockets",
    "ssl": "return a Send effect; the driver owns the sockets",
    "threading": "machines run in one thread; the driver owns the threads",
    "multiprocessing": "machines run in one thread; the driver owns the processes",
    "subprocess": "machines run in one thread; the driver owns the processes",
    "concurrent": "machines run in one thread; the driver owns the threads",
    "queue": "use collections.deque with a limit",
    "uuid": "take bits from the generator given to the constructor",
    "torch": "name the payload by (group, chunk); the driver owns the bytes",
    "numpy": "name the payload by (group, chunk); the driver owns the bytes",
    "cryptography": "ask the Signer that was given to the constructor",
}
"""What nothing in protocol/ may import, and what to use instead."""

VIRTUAL = {
    name: PURE[name]
    for name in ("asyncio", "selectors", "socket", "ssl", "threading", "datetime", "secrets")
}
"""The same for sim/, where time and the network are virtual."""

PUBLIC_NAMES = [
    "Checkpoint",
    "DiLoCo",
    "EpochReport",
    "GradientAveraging",
    "Leaving",
    "LocalSGD",
    "MoshpitError",
    "Nesterov",
    "Optimizer",
    "Outcome",
    "OverlappedGradientAveraging",
    "RoundReport",
    "Swarm",
    "SwarmConfig",
    "Ticket",
    "join",
    "preset",
]

LINES_MAX = 500


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}"


def package_of(path: Path) -> str:
    """Return the layer's name: the first part of the path below the package."""
    first = path.relative_to(SRC).parts[0]
    name = first.removesuffix(".py")
    return "" if name == "__init__" else name


def imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Yield every module that the file imports, also in functions, as an absolute name.

    `from a import b` yields ``a.b``, since b may be a module.
    """
    package = ("moshpit", *path.relative_to(SRC).parts[:-1])
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) + 1 - node.level]) if node.level else ""
            module = ".".join(part for part in (base, node.module or "") if part)
            for alias in node.names:
                yield node, f"{module}.{alias.name}"


def target_of(module: str) -> str | None:
    """Return the layer that an import leads to; None if it leads out of Moshpit."""
    parts = module.split(".")
    if parts[0] != "moshpit":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in RANK else ""


def arrows(path: Path) -> Iterator[str]:
    """Yield what is wrong with a file's imports of other layers."""
    source = package_of(path)
    for node, module in imports(path):
        target = target_of(module)
        if target is None or target == source:
            continue
        down = RANK[target] < RANK[source] or (source, target) in SIDEWAYS
        if target == "" and source in (
            "cli",
            "dashboard",
            "experiments",
            "integrations",
            "metrics",
        ):
            down = True  # these stand on the public names, like any user
        reason = FORBIDDEN.get((source, target))
        if {source, target} == {"runtime", "sim"}:
            reason = "the two drivers never know each other; share through protocol/"
        if not down or reason:
            said = reason or "arrows point down; move the shared part to a lower layer"
            yield f"{where(path, node)}: {source or 'moshpit'} imports {module}: {said}"


def test_every_package_has_a_layer() -> None:
    unknown = {package_of(path) for path in SOURCES} - RANK.keys()
    assert not unknown, f"give {sorted(unknown)} a place in LAYERS and in docs/internals/layers.md"


def test_arrows_point_down() -> None:
    assert [wrong for path in SOURCES for wrong in arrows(path)] == []


@pytest.mark.parametrize(("package", "banned"), [("protocol", PURE), ("sim", VIRTUAL)])
def test_machines_are_pure(package: str, banned: dict[str, str]) -> None:
    wrong = [
        f"{where(path, node)}: no {module} in {package}/: {banned[module.split('.')[0]]}"
        for path in sorted((SRC / package).rglob("*.py"))
        for node, module in imports(path)
        if module.split(".")[0] in banned
    ]
    assert wrong == []


def test_wire_and_ground_need_neither_torch_nor_network() -> None:
    heavy = ("torch", "numpy", "asyncio", "socket", "ssl", "threading", "cryptography")
    wrong = [
        f"{where(path, node)}: no {module} below protocol/"
        for path in SOURCES
        if RANK[package_of(path)] <= RANK["wire"]
        for node, module in imports(path)
        if module.split(".")[0] in heavy
    ]
    assert wrong == []


# --- sets of ids ----------------------------------------------------------------------------

ORDERLESS = {"any", "all", "frozenset", "len", "max", "min", "set", "sorted", "sum"}
"""Calls whose result does not depend on the order in which they are fed."""


class _SetIteration(ast.NodeVisitor):
    """Finds loops over what is plainly a set of something whose hash depends on the seed.

    It knows set literals, `set(...)` calls, set operators between them, and names and
    attributes that the file annotates as a set or assigns one to. Sets of int and of enum
    members do not vary, so an annotation `set[int]` clears a name.
    """

    def __init__(self, module: ast.Module) -> None:
        self.found: list[ast.AST] = []
        self.sets: set[str] = set()
        self.cleared: set[str] = set()
        for node in ast.walk(module):
            if isinstance(node, ast.AnnAssign | ast.arg) and node.annotation is not None:
                self._note(node, ast.unparse(node.annotation))
            elif isinstance(node, ast.ClassDef):
                self._note_fields(node)
            elif isinstance(node, ast.Assign) and self._is_set(node.value):
                self.sets.update(filter(None, map(self._name, node.targets)))

    def _note_fields(self, node: ast.ClassDef) -> None:
        for field in node.body:
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                self._note_name(f"self.{field.target.id}", ast.unparse(field.annotation))

    def _note(self, node: ast.AnnAssign | ast.arg, annotation: str) -> None:
        name = node.arg if isinstance(node, ast.arg) else self._name(node.target)
        self._note_name(name, annotation)

    def _note_name(self, name: str | None, annotation: str) -> None:
        if name and re.match(r"(set|frozenset|Set|AbstractSet)\[(int|bool)\]", annotation):
            self.cleared.add(name)
        elif name and re.match(r"(set|frozenset|Set|AbstractSet)\b", annotation):
            self.sets.add(name)

    @staticmethod
    def _name(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return node.id
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            return f"{node.value.id}.{node.attr}"
        return None

    def _is_set(self, node: ast.AST) -> bool:
        match node:
            case ast.Set() | ast.SetComp():
                return True
            case ast.Call(func=ast.Name(id="set" | "frozenset")):
                return True
            case ast.BinOp(op=ast.BitOr() | ast.BitAnd() | ast.Sub() | ast.BitXor()):
                return self._is_set(node.left) or self._is_set(node.right)
            case _:
                name = self._name(node)
                return name is not None and name in self.sets - self.cleared

    def _check(self, iterable: ast.AST) -> None:
        if self._is_set(iterable):
            self.found.append(iterable)

    def visit_For(self, node: ast.For) -> None:
        self._check(node.iter)
        self.generic_visit(node)

    def visit_ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.DictComp) -> None:
        for generator in node.generators:
            self._check(generator.iter)
        self.generic_visit(node)

    visit_GeneratorExp = visit_DictComp = visit_ListComp

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        if called in ("list", "tuple", "iter", "enumerate", "zip", "map", "filter"):
            for argument in node.args:
                self._check(argument)
        if called in ORDERLESS:
            for argument in node.args:
                # the order is lost here: look only inside, not at the loop itself
                self.generic_visit(argument)
        else:
            self.generic_visit(node)


def set_iterations(text: str) -> list[int]:
    module = ast.parse(text)
    finder = _SetIteration(module)
    finder.visit(module)
    return [getattr(node, "lineno", 0) for node in finder.found]


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        ("for p in {a, b}: pass", [1]),
        ("peers: set[bytes] = set()\nfor p in peers: pass", [2]),
        ("class A:\n def f(self):\n  self.x = set()\n  return [p for p in self.x]", [4]),
        ("class A:\n x: set[bytes]\n def f(self):\n  return [*map(str, self.x)]", [4]),
        ("def f(x: set[bytes], y):\n return list(x - y)", [2]),
        ("def f(x: set[bytes]):\n return sorted(x), any(p for p in x), {p for p in x}", []),
        ("def f(x: set[int]):\n return list(x)", []),
        ("def f(x: dict[bytes, int]):\n return list(x)", []),
    ],
)
def test_set_iteration_is_found(text: str, lines: list[int]) -> None:
    assert set_iterations(text) == lines


@pytest.mark.parametrize("package", ["protocol", "sim", "wire", "baselines"])
def test_no_iteration_over_sets(package: str) -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{line}: iterates over a set; sort it, or keep a dict"
        for path in sorted((SRC / package).rglob("*.py"))
        for line in set_iterations(path.read_text(encoding="utf-8"))
    ]
    assert wrong == []


# --- sizes, comments, docstrings --------------------------------------------------------------


def test_files_are_small() -> None:
    sizes = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    wrong = [f"{p.relative_to(ROOT)}: {n} lines" for p, n in sizes.items() if n > LINES_MAX]
    assert wrong == [], f"split what is longer than {LINES_MAX} lines by theory, not by size"


def test_ignored_type_errors_have_a_code() -> None:
    bare = re.compile(r"#\s*(type:\s*ignore(?!\[)|pyright:\s*ignore(?!\[)|noqa(?!:))")
    wrong = [
        f"{path.relative_to(ROOT)}:{number}: name the rule in brackets"
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if bare.search(line)
    ]
    assert wrong == []


def test_public_things_are_explained() -> None:
    wrong: list[str] = []
    for path in SOURCES:
        module = tree(path)
        if not ast.get_docstring(module) and path.read_text(encoding="utf-8").strip():
            wrong.append(f"{where(path, module)}: the module says nothing about itself")
        for node in module.body:
            if (
                isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
                and not node.name.startswith("_")
                and not ast.get_docstring(node)
            ):
                wrong.append(f"{where(path, node)}: {node.name} has no docstring")
    assert wrong == []


# --- the public face ---------------------------------------------------------------------------


def test_public_names_are_pinned() -> None:
    moshpit = importlib.import_module("moshpit")
    assert sorted(moshpit.__all__) == PUBLIC_NAMES
    for name in PUBLIC_NAMES:
        assert getattr(moshpit, name) is not None
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert moshpit.__version__ == project["version"]


def test_public_members_are_explained() -> None:
    moshpit = importlib.import_module("moshpit")
    wrong = [
        f"{name}.{member}"
        for name in PUBLIC_NAMES
        if inspect.isclass(getattr(moshpit, name))
        for member, value in vars(getattr(moshpit, name)).items()
        if not member.startswith("_")
        and (inspect.isroutine(value) or isinstance(value, property))
        and not inspect.getdoc(getattr(getattr(moshpit, name), member))
    ]
    assert wrong == []


def test_import_is_light() -> None:
    code = (
        "import sys, moshpit; print(*(m for m in ('torch', 'numpy', 'rich') if m in sys.modules))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [], "moshpit/__init__.py imports its names when they are used"


def _modules_with_examples() -> list[str]:
    return [
        ".".join(("moshpit", *path.relative_to(SRC).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for path in SOURCES
        if ">>>" in path.read_text(encoding="utf-8")
    ]


@pytest.mark.parametrize("module", _modules_with_examples())
def test_examples_in_docstrings_run(module: str) -> None:
    flags = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS
    result = doctest.testmod(importlib.import_module(module), optionflags=flags)
    assert result.attempted > 0
    assert result.failed == 0


def test_public_names_have_an_example() -> None:
    """That it runs is the test above. Only `join` makes a Swarm, so its example shows one."""
    shown = {name: "join" if name == "Swarm" else name for name in PUBLIC_NAMES}
    texts = {name: inspect.getdoc(getattr(moshpit, where)) for name, where in shown.items()}
    assert [name for name, text in texts.items() if ">>>" not in (text or "")] == []


def test_types_are_shipped() -> None:
    assert (SRC / "py.typed").is_file(), "or type checkers take nothing from an installed moshpit"


# --- pages and paths -----------------------------------------------------------------------------


def _tracked(*patterns: str) -> list[Path]:
    """Return the files of the repository; also new ones that git does not ignore."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        pytest.skip("not a git checkout: the list of files comes from git")
    paths = (ROOT / name for name in listed.stdout.splitlines())
    return sorted(path for path in paths if path.is_file())


def _slug(heading: str) -> str:
    bare = re.sub(r"[`*_]|\[([^\]]*)\]\([^)]*\)", r"\1", heading.strip().lower())
    return re.sub(r"[^\w\- ]", "", bare).replace(" ", "-")


def _prose(path: Path) -> str:
    """Return a page without its code and comments, in which brackets are no links."""
    text = re.sub(r"^```.*?^```|<!--.*?-->", "", path.read_text("utf-8"), flags=re.M | re.S)
    return re.sub(r"`[^`\n]*`", "", text)


def test_links_lead_somewhere() -> None:
    wrong: list[str] = []
    for page in _tracked("*.md"):
        for link in re.findall(r"!?\[[^\]]*\]\(([^)\s]+)[^)]*\)", _prose(page)):
            if re.match(r"[a-z]+:", link):
                continue
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists():
                wrong.append(f"{page.relative_to(ROOT)}: {link} leads nowhere")
            elif anchor and target.suffix == ".md":
                headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
                if anchor not in map(_slug, headings):
                    wrong.append(f"{page.relative_to(ROOT)}: {link}: no such heading")
    assert wrong == []


def test_no_path_of_a_machine() -> None:
    # In pieces, so that this file does not name what it forbids.
    roots = "|".join(
        ("/" + "work", "/" + "root", "/" + "home/[a-z]", "/tmp/" + "venv", "/" + "Users/")
    )
    path_of_a_machine = re.compile(rf"(?<![\w.])({roots})(?=[/\s\"'`)]|\b/)")
    wrong: list[str] = []
    for file in _tracked():
        if file.suffix in (".py", ".md", ".toml", ".txt", ".yml", ".cfg", ".json", ""):
            for number, line in enumerate(file.read_text(errors="replace").splitlines(), 1):
                if path_of_a_machine.search(line):
                    wrong.append(f"{file.relative_to(ROOT)}:{number}: {line.strip()[:80]}")
    assert wrong == []


def test_properties_are_checked_on_the_same_examples_everywhere() -> None:
    """What a run of the tests finds, every run finds: nothing depends on time or on luck."""
    used = settings.default
    assert (used.derandomize, used.database, used.deadline) == (True, None, None)
    wrong = [
        f"{path.relative_to(ROOT)}:{node.lineno}: leave {keyword.arg} to tests/conftest.py"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "settings"
        for keyword in node.keywords
        if keyword.arg not in ("max_examples", "stateful_step_count")
    ]
    assert not wrong, "\n".join(wrong)
