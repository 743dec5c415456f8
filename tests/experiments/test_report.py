"""The page: whole by itself, honest about its numbers, and safe whatever the sections say."""

from __future__ import annotations

import re
from base64 import b64decode
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import pytest
from typer.testing import CliRunner

from moshpit.cli.experiment import experiment_app
from moshpit.errors import ConfigError
from moshpit.experiments import catalogue, kept, plots, report
from moshpit.experiments.section import Claim, Context, Figure, Nature, Section, Table

SVG = '<svg xmlns="http://www.w3.org/2000/svg"/>'
OTHER_SVG = '<svg xmlns="http://www.w3.org/2000/svg" width="2"/>'


def section(name: str = "one") -> Section:
    return Section(
        name=name,
        title="Title of <one>",
        text=("Plain & simple, with `code <b>`.",),
        commands=("moshpit experiment averaging --failure 0.1 && echo done",),
        figures=(
            Figure(title="f", image=SVG, text="t", natures=(Nature.REAL,), alt='a "b"'),
            Figure(title="g", image=OTHER_SVG, text="t", natures=(Nature.SIMULATED,), alt="c"),
        ),
        tables=(
            Table(
                title="t", head=("a", "b"), rows=(("1", "2\n5"), ("3", "<4>")), text="x",
                natures=(Nature.QUOTED, Nature.MODELLED), marked=frozenset({(1, 0)}),
            ),
        ),
        claims=(Claim(what="<x>", paper="1", here="2", natures=(Nature.SIMULATED,)),),
        seconds=3.0,
        cpu_s=2.0,
    )  # fmt: skip


class Page(HTMLParser):
    """Collects tags, and fails on those that do not close."""

    VOID = ("meta", "img", "br")

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def page(*sections: Section, failed: tuple[report.Failed, ...] = ()) -> Page:
    return Page(report.page(sections, failed, {"took": "1 s"}, "moshpit experiment all"))


def test_the_page_needs_no_network() -> None:
    found = page(section())
    for tag in ("script", "link", "iframe", "object", "base"):
        assert found.all(tag) == []
    images = [image["src"] or "" for image in found.all("img")]
    whole = [re.fullmatch(r"data:image/(.*);base64,(.*)", image) for image in images]
    assert [(one[1], b64decode(one[2])) for one in whole if one is not None] == [
        ("svg+xml", SVG.encode()),
        ("svg+xml", OTHER_SVG.encode()),
    ]
    assert [link["href"] for link in found.all("a")] == ["#one", "#one"]
    assert "url(" not in report._STYLE
    assert "@import" not in report._STYLE


def test_text_stays_text() -> None:
    found = page(section())
    assert "Title of <one>" in found.words
    assert "code <b>" in found.words
    assert "<4>" in found.words
    assert found.words[found.words.index("2") + 1] == "5"
    assert len(found.all("br")) == 1
    assert found.all("img")[0]["alt"] == 'a "b"'
    assert section().commands[0] in "".join(found.words)


def test_every_figure_and_table_says_what_its_numbers_are() -> None:
    found = page(section())
    badges = [span["class"] for span in found.all("span") if "class" in span]
    legend = len(Nature)
    assert badges[legend:] == [
        "nature quoted",  # the claim: the paper's value, and ours
        "nature simulated",
        "nature quoted",
        "nature modelled",
        "nature real",
        "nature simulated",
    ]
    assert set(report.NATURES) == set(Nature)


def test_phones_and_paper_are_thought_of() -> None:
    found = page(section())
    viewport = next(meta for meta in found.all("meta") if meta.get("name") == "viewport")
    assert "width=device-width" in (viewport["content"] or "")
    assert "@media print" in report._STYLE
    assert "prefers-color-scheme: dark" in report._STYLE
    boxes = [box for box in found.all("div") if box.get("class") == "scroll"]
    wide = len(found.all("table")) + len(found.all("img"))
    assert len(boxes) == wide, "what is wide must scroll by itself"
    colours = set(re.findall(r"var\((--\w+)\)", report._STYLE))
    for block in re.findall(r":root \{([^}]*)\}", report._STYLE):
        named = set(re.findall(r"(--\w+):", block))
        assert colours == named, "a colour is missing in the light or in the dark"


def test_what_the_paper_says_stands_beside_what_came_out() -> None:
    found = page(section())
    assert "The paper, and here" in found.words
    assert found.words[found.words.index("<x>") + 1 :][:3] == ["1", "2 ", "simulated"]
    assert "The paper, and here" not in page(replace(section(), claims=())).words
    assert "Took 3 s here, with 2 s of computing." in found.words


def test_cells_that_stand_out_and_experiments_that_failed_are_shown() -> None:
    found = page(section(), failed=(report.Failed("vision", "no <data>"),))
    assert [td for td in found.all("td") if td.get("class") == "marked"] == [{"class": "marked"}]
    assert "no <data>" in "".join(found.words)


def test_the_command_writes_it_and_tells_of_failures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def good(context: Context) -> Section:
        assert context.small
        context.say("on the way")
        return section("good")

    def bad(context: Context) -> Section:
        raise ConfigError("out of luck")

    experiments = {"good": good, "bad": bad}
    monkeypatch.setattr(catalogue, "CATALOGUE", dict.fromkeys(experiments, "x:y"))
    monkeypatch.setattr(catalogue, "experiment", experiments.__getitem__)
    arguments = ["all", "--small", "--report", str(tmp_path / "out")]
    result = CliRunner().invoke(experiment_app, arguments)
    assert result.exit_code == 1
    text = (tmp_path / "out" / report.PAGE).read_text()
    assert 'id="good"' in text
    assert "out of luck" in text
    assert "--small" in text
    result = CliRunner().invoke(experiment_app, [*arguments, "--only", "good"])
    assert result.exit_code == 0, result.output
    (tmp_path / "file").touch()
    result = CliRunner().invoke(
        experiment_app, ["all", "--small", "--only", "good", "--report", str(tmp_path / "file")]
    )
    assert isinstance(result.exception, ConfigError)


def test_a_report_that_was_interrupted_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[str, int]] = []

    def first(context: Context) -> Section:
        ran.append(("first", context.jobs))
        return section("first")

    def second(context: Context) -> Section:
        ran.append(("second", context.jobs))
        if len(ran) == 2:
            raise ConfigError("interrupted")
        return section("second")

    experiments = {"first": first, "second": second}
    monkeypatch.setattr(catalogue, "CATALOGUE", dict.fromkeys(experiments, "x:y"))
    monkeypatch.setattr(catalogue, "experiment", experiments.__getitem__)
    arguments = ["all", "--small", "--jobs", "3", "--report", str(tmp_path)]
    assert CliRunner().invoke(experiment_app, arguments).exit_code == 1
    result = CliRunner().invoke(experiment_app, [*arguments, "--resume"])
    assert result.exit_code == 0, result.output
    assert ran == [("first", 3), ("second", 3), ("second", 3)]
    text = (tmp_path / report.PAGE).read_text()
    assert 'id="first"' in text
    assert 'id="second"' in text
    assert "kept from an earlier run" in text
    assert CliRunner().invoke(experiment_app, arguments).exit_code == 0
    assert ran[3:] == [("first", 3), ("second", 3)], "nothing is kept unless that is asked for"
    result = CliRunner().invoke(experiment_app, [*arguments, "--jobs", "0"])
    assert isinstance(result.exception, ConfigError)


def test_what_is_kept_is_the_same_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept.keep(tmp_path, "one", True, section())
    assert kept.kept(tmp_path, "one", True) == section()
    assert kept.kept(tmp_path, "one", False) is None, "of the other size"
    (file,) = (tmp_path / kept.FOLDER).iterdir()
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert kept.kept(tmp_path, "one", True) is None
    file.write_bytes(whole)
    monkeypatch.setattr(kept, "version", lambda _name: "0.0.0-other")
    assert kept.kept(tmp_path, "one", True) is None
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="--report"):
        kept.keep(tmp_path / "file", "one", True, section())


def test_every_experiment_of_the_catalogue_is_there() -> None:
    for name in catalogue.CATALOGUE:
        assert callable(catalogue.experiment(name))
    with pytest.raises(ConfigError, match="averaging"):
        catalogue.experiment("alchemy")


def test_names_at_the_ends_of_lines_never_overlap() -> None:
    places = plots.spread_out([0.0, 0.0, 0.01, 0.5, 0.99, 1.0, 1.0], 0.05)
    assert all(b - a >= 0.05 - 1e-12 for a, b in pairwise(places))
    assert places[-1] <= 1.0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["averaging", "--plot", "nowhere/x.svg"], "--plot nowhere/x.svg: there is no folder"),
        (["averaging", "--csv", "nowhere/x.csv"], "--csv nowhere/x.csv: there is no folder"),
        (["protocol", "--plot", "nowhere/x.svg"], "there is no folder"),
        (["training", "--csv", "nowhere/x.csv"], "there is no folder"),
        (
            ["training", "--preset", "language", "--methods", "sgp"],
            "--methods: for --preset vision",
        ),
        (
            ["training", "--steps", "3", "--prices", "1,2"],
            "--steps, --prices: for --preset language",
        ),
    ],
)
def test_what_cannot_be_is_said_before_hours_of_work(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(experiment_app, arguments)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert result.stderr == "", "nothing has begun"
