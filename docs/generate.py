"""Writes the reference pages that are made from the code: ``make docs``.

`tests/test_docs.py` fails if a page is not what this script would write.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import typer.main

from moshpit import config, errors
from moshpit.cli.app import app
from moshpit.wire import help as help_messages
from moshpit.wire import links, messages, parcels, transfer

HERE = Path(__file__).parent
NOTE = "<!-- Made by docs/generate.py from {source}. Change it there, then run `make docs`. -->\n"


def pages() -> dict[Path, str]:
    """Return every generated page by its file."""
    reference = HERE / "reference"
    return {
        reference / "cli.md": cli_page(),
        reference / "errors.md": errors_page(),
        reference / "messages.md": messages_page(),
        reference / "settings.md": settings_page(),
    }


def cell(text: str) -> str:
    """Return text for a cell of a table."""
    return " ".join(text.split()).replace("|", "\\|")


def docstring(thing: Any) -> str:
    """Return a docstring in Markdown: our own names in code marks, as they are there already."""
    return inspect.cleandoc(inspect.getdoc(thing) or "")


# --- command line ---------------------------------------------------------------------------


def cli_page() -> str:
    """The command line, from the app itself."""
    root = typer.main.get_command(app)
    head = NOTE.format(source="src/moshpit/cli/")
    return head + "\n# Command line\n" + "".join(command_section(root, "moshpit"))


def command_section(command: Any, name: str) -> Iterator[str]:
    """Yield a command's section, then those of the commands below it."""
    below = getattr(command, "commands", {})
    yield f"\n## {name}\n\n{inspect.cleandoc(command.help or '').strip()}\n"
    usage = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
    words = [name, "[OPTIONS]", *(["COMMAND [ARGS]..."] if below else usage)]
    yield f"\n```console\n$ {' '.join(words)}\n```\n"
    rows = list(parameter_rows(command))
    if rows:
        yield "\n| option | meaning |\n|---|---|\n" + "".join(rows)
    for key, child in below.items():
        yield from command_section(child, f"{name} {key}")


def parameter_rows(command: Any) -> Iterator[str]:
    """Yield the rows of the table of options and arguments."""
    for parameter in command.params:
        text = cell(parameter.help or "")
        if parameter.param_type_name == "argument":
            yield f"| `{parameter.metavar or parameter.name.upper()}` | {text} |\n"
            continue
        value = cell(parameter.metavar or kind_of(parameter))
        flag = parameter.is_flag
        default = parameter.default
        said = "" if flag or default in (None, "", ()) else f" Default: `{default}`."
        names = ", ".join(f"`{option}`" for option in parameter.opts)
        yield f"| {names}{'' if flag or not value else f' `{value}`'} | {text}{said} |\n"


def kind_of(parameter: Any) -> str:
    """Return the word for an option's value where the option names none."""
    annotation = getattr(getattr(parameter, "type_descriptor", None), "annotation", None)
    return {int: "N", float: "X", Path: "FILE"}.get(annotation, "TEXT")


# --- errors ------------------------------------------------------------------------------------


def errors_page() -> str:
    """The tree of errors, from their docstrings."""
    lines = [NOTE.format(source="src/moshpit/errors.py"), "\n# Errors\n\n"]
    lines.append(docstring(errors).split("\n", 1)[1].strip() + "\n\n")
    lines += error_lines(errors.MoshpitError, 0)
    return "".join(lines)


def error_lines(error: type, depth: int) -> Iterator[str]:
    """Yield an error and below it those that are made from it, in the order of the source."""
    first = docstring(error).split("\n\n")[0].replace("\n", " ")
    yield f"{'  ' * depth}- **{error.__name__}**: {first}\n"
    for child in error.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from error_lines(child, depth + 1)


# --- messages ------------------------------------------------------------------------------------


def messages_page() -> str:
    """The wire's vocabulary, from the schemas."""
    lines = [
        NOTE.format(source="src/moshpit/wire/{messages,links,help,transfer,parcels}.py"),
        "\n# Messages\n\n",
    ]
    lines.append(docstring(messages) + "\n\n")
    lines.append("[protocol.md](../internals/protocol.md) says who sends what to whom, and why.\n")
    structs = [
        thing
        for module in (messages, links, help_messages, transfer, parcels)
        for thing in vars(module).values()
        if inspect.isclass(thing)
        and issubclass(thing, msgspec.Struct)
        and thing.__module__ == module.__name__
    ]
    for struct in structs:
        tag = struct.__struct_config__.tag
        title = struct.__name__ + (f" (tag {tag})" if tag is not None else "")
        lines.append(f"\n## {title}\n\n{docstring(struct)}\n")
        notes = field_notes(struct)
        rows = [
            f"| `{name}` | `{cell(kind)}` | {cell(notes.get(name, ''))} |\n"
            for name, kind in struct.__annotations__.items()
        ]
        if rows:
            lines.append("\n| field | type | |\n|---|---|---|\n" + "".join(rows))
    return "".join(lines)


def field_notes(struct: type) -> dict[str, str]:
    """Return what stands below each field in the source."""
    source = inspect.getsource(struct)
    return dict(re.findall(r'^    (\w+): [^\n]+\n    """(.*?)"""', source, re.M | re.S))


# --- settings ------------------------------------------------------------------------------------


def settings_page() -> str:
    """Every setting, with its value in each preset and where the value is from."""
    names = ("local", "lan", "internet")
    presets = [config.preset(name) for name in names]
    lines = [
        NOTE.format(source="src/moshpit/config.py"),
        "\n# Settings\n\nA preset is chosen by name: `moshpit.preset(\"internet\")`, or "
        "`--preset internet`. Single values are\nchanged with `dataclasses.replace`. Units are at "
        "the end of the names; the last column says where\na value is from.\n",
    ]  # fmt: skip
    for part in dataclasses.fields(config.SwarmConfig):
        if part.name == "preset":
            continue
        values = [getattr(p, part.name) for p in presets]
        kind = type(values[0])
        origin = dict(re.findall(r"^    (\w+): [^#\n]+# ([^\n]+)$", inspect.getsource(kind), re.M))
        lines.append(f"\n## {part.name}: {docstring(kind)}\n\n")
        lines.append(f"| setting | {' | '.join(names)} | |\n|---|---|---|---|---|\n")
        for field in dataclasses.fields(kind):
            shown = " | ".join(f"{getattr(v, field.name)}" for v in values)
            lines.append(f"| `{field.name}` | {shown} | {cell(origin.get(field.name, ''))} |\n")
    return "".join(lines)


def main() -> None:
    """Write the pages."""
    for path, text in pages().items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(HERE.parent))


if __name__ == "__main__":
    main()
