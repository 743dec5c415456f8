"""One page of HTML with every section: figures inside it, nothing from any network.

Figures are images with their data in the page, so that the ids inside one SVG cannot meet those of
another. The page is readable on a phone (figures and tables scroll by themselves where they do
not fit), in the dark, and on paper.
"""

from __future__ import annotations

import html
import os
import platform
import re
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from moshpit.errors import ConfigError
from moshpit.experiments.section import Claim, Figure, Nature, Section, Table

PAGE = "report.html"

NATURES = {
    Nature.REAL: "computed by the algorithm itself or measured",
    Nature.SIMULATED: "the real protocol or training on a simulated network and clock",
    Nature.MODELLED: "from a formula or a stated model",
    Nature.QUOTED: "from a publication",
}


@dataclass(frozen=True, slots=True)
class Failed:
    """An experiment that did not come to its end; the page says so.

    Attributes:
        name: of the catalogue.
        reason: the error, in a line.
    """

    name: str
    reason: str


_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --soft: #555; --line: #ddd; --ground: #fff;
  --code: #f4f4f4; --link: #0053a0; --real: #00664a; --modelled: #9a4300; --loud: #D55E00; }
@media screen and (prefers-color-scheme: dark) { :root { --ink: #e8e8e8; --soft: #aaa;
  --line: #444; --ground: #161616; --code: #242424; --link: #7cc0ff; --real: #4fd1a5;
  --modelled: #ffa45c; --loud: #ff8a3d; } figure img { border-radius: .4rem; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 52rem; color: var(--ink);
  background: var(--ground); font: 1rem/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.2; } h2 { margin-top: 3rem; border-top: 2px solid var(--ink);
  padding-top: .5rem; font-size: 1.35rem; } h3 { font-size: 1.05rem; margin: 1.5rem 0 .3rem; }
a { color: var(--link); } nav ul { padding-left: 1.2rem; }
figure { margin: 1.5rem 0; }
figure img { display: block; width: 100%; min-width: 30rem; height: auto; }
figcaption, .note { color: var(--soft); font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; min-width: 100%; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid var(--line); text-align: right;
  white-space: nowrap; font-variant-numeric: tabular-nums; }
th:first-child, td:first-child { text-align: left; } thead th { border-bottom: 2px solid var(--ink);
  vertical-align: bottom; }
.claims td { text-align: left; white-space: normal; vertical-align: top; }
.claims th { text-align: left; }
td.marked { font-weight: bold; outline: 2px solid var(--loud); outline-offset: -2px; }
pre { background: var(--code); padding: .6rem; white-space: pre-wrap; overflow-x: auto;
  font-size: .85rem; } pre span { white-space: nowrap; }
code { font-family: ui-monospace, monospace; font-size: .9em; }
.nature { display: inline-block; border: 1px solid; border-radius: .6rem; padding: 0 .5rem;
  font-size: .75rem; font-weight: 600; }
.real { color: var(--real); } .simulated { color: var(--link); }
.modelled { color: var(--modelled); } .quoted { color: var(--soft); }
.failed { border-left: 4px solid var(--loud); padding-left: .8rem; }
@media print { body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; }
  figure img { max-width: 13cm; min-width: 0; } figure, table, pre { break-inside: avoid; }
  h2, h3 { break-after: avoid; }
  th, td { white-space: normal; padding: .2rem .3rem; font-size: 8pt; }
  .scroll { overflow: visible; } }
"""


def page(
    sections: Sequence[Section], failed: Sequence[Failed], facts: Mapping[str, str], command: str
) -> str:
    """Return the whole page.

    Args:
        sections: what is told, in this order.
        failed: experiments that there should be and are not.
        facts: about this run, by name: the machine, the versions.
        command: what makes this page again.
    """
    links = "".join(
        f'<li><a href="#{_quoted(s.name)}">{_quoted(s.title)}</a></li>' for s in sections
    )
    rows = "".join(
        f"<tr><td>{_quoted(name)}</td><td>{_quoted(fact)}</td></tr>" for name, fact in facts.items()
    )
    legend = "".join(f"<li>{_badge(nature)} {said}</li>" for nature, said in NATURES.items())
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>Moshpit: experiments</title><style>{_STYLE}</style></head><body>",
        "<h1>Moshpit: the paper’s experiments, and ours beside them</h1>",
        f"<p>Made by</p>{_command(command)}",
        f"<nav><ul>{links}</ul></nav>",
        f"<p>Every figure and table says what its numbers are:</p><ul>{legend}</ul>",
        *map(_failed, failed),
        _claims(sections),
        *map(_section, sections),
        f'<h2>This run</h2><div class="scroll"><table><tbody>{rows}</tbody></table></div>',
        "</body></html>",
    ]
    return "\n".join(parts) + "\n"


def make_folder(folder: Path) -> None:
    """Make the report's folder, before there is anything to lose.

    Raises:
        ConfigError: it cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--report {folder}: {error}") from error


def write(folder: Path, text: str) -> Path:
    """Write the page into a folder; returns the file.

    Raises:
        ConfigError: it cannot be written there.
    """
    try:
        file = folder / PAGE
        part = folder / f".{PAGE}.part"
        part.write_text(text, encoding="utf-8")
        part.replace(file)
    except OSError as error:
        raise ConfigError(f"--report {folder}: {error}") from error
    return file


def facts_here(seconds: float, seconds_of: Callable[[float], str]) -> dict[str, str]:
    """Return what a reader should know about where and how the page was made.

    Args:
        seconds: how long all of it took.
        seconds_of: writes a time as people read it.
    """
    return {
        "took": seconds_of(seconds),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "Python": platform.python_version(),
        **{name: version(name) for name in ("moshpit", "numpy", "torch", "matplotlib")},
    }


def _claims(sections: Sequence[Section]) -> str:
    """The head of the page: what the paper says, and what came out here."""
    rows = [_claim(section.name, claim) for section in sections for claim in section.claims]
    if not rows:
        return ""
    return (
        '<h2>The paper, and here</h2><div class="scroll"><table class="claims"><thead><tr>'
        f'<th scope="col"></th><th scope="col">paper {_badge(Nature.QUOTED)}</th>'
        f'<th scope="col">here</th></tr></thead><tbody>{"".join(rows)}</tbody></table></div>'
    )


def _claim(name: str, claim: Claim) -> str:
    return (
        f'<tr><td><a href="#{_quoted(name)}">{_quoted(claim.what)}</a></td>'
        f"<td>{_quoted(claim.paper)}</td>"
        f"<td>{_quoted(claim.here)} {_badges(claim.natures)}</td></tr>"
    )


def _took(section: Section) -> str:
    if not section.seconds:
        return ""
    cpu = f", with {section.cpu_s:.0f} s of computing" if section.cpu_s else ""
    return f'<p class="note">Took {section.seconds:.0f} s here{cpu}.</p>'


def _section(section: Section) -> str:
    return "\n".join(
        [
            f'<section id="{_quoted(section.name)}"><h2>{_quoted(section.title)}</h2>',
            *(f"<p>{_prose(text)}</p>" for text in section.text),
            *map(_table, section.tables),
            *map(_figure, section.figures),
            "<h3>Repeat it</h3>",
            *map(_command, section.commands),
            _took(section),
            "</section>",
        ]
    )


def _figure(figure: Figure) -> str:
    source = f"data:image/svg+xml;base64,{b64encode(figure.image.encode()).decode()}"
    return (
        f"<h3>{_quoted(figure.title)}</h3>"
        f'<figure><div class="scroll"><img alt="{_quoted(figure.alt)}" src="{source}"></div>'
        f"<figcaption>{_badges(figure.natures)} {_prose(figure.text)}</figcaption></figure>"
    )


def _table(table: Table) -> str:
    head = "".join(f'<th scope="col">{_quoted(name)}</th>' for name in table.head)
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{_marked(table, at, column)}>{_lines(cell)}</td>"
            for column, cell in enumerate(row)
        )
        + "</tr>"
        for at, row in enumerate(table.rows)
    )
    return (
        f'<h3>{_quoted(table.title)}</h3><div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f'<tbody>{rows}</tbody></table></div><p class="note">{_badges(table.natures)} '
        f"{_prose(table.text)}</p>"
    )


def _lines(cell: str) -> str:
    return "<br>".join(_quoted(line) for line in cell.splitlines())


def _marked(table: Table, row: int, column: int) -> str:
    return ' class="marked"' if (row, column) in table.marked else ""


def _failed(one: Failed) -> str:
    return (
        f'<p class="failed"><strong>{_quoted(one.name)} is missing:</strong> '
        f"{_quoted(one.reason)}</p>"
    )


def _command(text: str) -> str:
    # Lines break between words only: browsers would break --option after its first dash.
    words = " ".join(f"<span>{_quoted(word)}</span>" for word in text.split(" "))
    return f"<pre><code>{words}</code></pre>"


def _badges(natures: Sequence[Nature]) -> str:
    return " ".join(map(_badge, natures))


def _badge(nature: Nature) -> str:
    return f'<span class="nature {nature.value}">{nature.value}</span>'


def _prose(text: str) -> str:
    return re.sub(r"`([^`]+)`", r"<code>\1</code>", _quoted(text))


def _quoted(text: str) -> str:
    return html.escape(text)
