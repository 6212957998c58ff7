"""Tables and figures of the documents are those of the rows, and no figure stands without them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import reference
from benchmark.tables import RESULTS, find
from benchmark.tables import __main__ as tables
from benchmark.tables.study import study

ROOT = RESULTS.parents[1]
DOCUMENTS = [ROOT / "README.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").rglob("*.md"))]
FIGURE = re.compile(
    r"\d\s?(?:x|times|percent|ms|us|GB/s|nats|points)\b|\d\s?%|\b\d[\d,]*\s+of\s+\d|\d tokens (?:per|a) second"
)
"""A speed-up, a share, a time, a rate, a loss or a count of answers. Sizes and limits are none."""
SOURCE = re.compile(
    r"\.jsonl\)|<!-- table|sglang-scout plan|`plan --|not measured"
    r"|\]\((?:[\w./]*results/\w+|accuracy|systems|recall|cpu|faults|predictions)\.md"
)
"""Rows, a page that names them, the program that computes them, or that there are none."""
GIVEN = re.compile(r"12 % of the budget|plus 10 to 20 %")
"""What is assumed or advised, not found."""
UNMARKED = {"What is measured", "Claims"}
"""Sections of results whose tables are not made: a summary, which sentences check; and the papers' own figures."""


def sections(text: str) -> list[tuple[str, str]]:
    """Title and text of each, without code and what is generated."""
    text = re.sub(r"```.*?```", "", reference.BLOCK.sub("", text), flags=re.DOTALL)
    return [(part.split("\n", 1)[0].lstrip("# "), part) for part in re.split(r"\n(?=#+ )", text)]


def without_source(path: Path, text: str) -> list[str]:
    """Figures without a source: in their paragraph, before their table or list; of results in their section."""
    found = []
    for _, section in sections(text):
        if path.is_relative_to(RESULTS) and SOURCE.search(section):
            continue
        before = ""
        for block in re.split(r"\n\n+", section):
            about = before + block if block.startswith(("|", "- ", "1. ")) else block
            figures = FIGURE.search(GIVEN.sub("", block))
            if figures and not SOURCE.search(about):
                found.append(block)
            before = block
    return found


def test_tables_and_sentences_are_those_of_the_rows():
    assert tables.problems() == [], "run .venv/bin/python -m benchmark.tables"


def test_a_changed_figure_is_found(monkeypatch, tmp_path):
    page = tmp_path / "page.md"
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(tables.figures, "sentences", lambda: [("page.md", "It finds 3 of 4.")])
    page.write_text("It finds\n3 of 4.\n<!-- table soak -->\n<!-- end -->\n")
    assert tables.problems() == ["page.md: table soak differs from the rows"]
    assert tables.main([]) == 0 and "| requests answered" in page.read_text()
    page.write_text(page.read_text().replace("3 of 4", "4 of 4"))
    assert tables.main(["--check"]) == 1
    assert tables.problems() == ["page.md does not say: It finds 3 of 4."]


def test_a_line_without_rows_is_an_error():
    with pytest.raises(ValueError, match="no row of nonsense"):
        study("study.jsonl", {"a": "keys 512", "b": "nonsense"}, ["right"])
    with pytest.raises(ValueError, match="has no row with"):
        find("soak.jsonl", impl="nothing")


def test_each_table_of_results_is_made_from_rows():
    named = []
    for page in sorted(RESULTS.glob("*.md")):
        text = page.read_text()
        named += [name for _, name, _ in tables.BLOCK.findall(text)]
        for title, section in sections(tables.BLOCK.sub("", text)):
            lines = [x for x in section.splitlines() if x.startswith("|") and FIGURE.search(x)]
            assert title in UNMARKED or not lines, lines
    assert sorted(named) == sorted(tables.TABLES)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_each_figure_names_its_rows(path):
    assert without_source(path, path.read_text()) == []


def test_a_figure_without_rows_is_found():
    page = ROOT / "docs" / "page.md"
    assert without_source(page, "# A\n\nIt is 2.5 times as fast.\n\nSee [rows](results/a.jsonl).\n")
    assert not without_source(page, "# A\n\nIt is 2.5 times as fast ([rows](results/a.jsonl)).\n")
    assert not without_source(RESULTS / "a.md", "# A\n\n2.5 times.\n\nSee [rows](a.jsonl).\n")


def test_each_file_of_rows_is_used():
    text = "".join(path.read_text() for path in DOCUMENTS)
    text += "".join(path.read_text() for path in (ROOT / "benchmark").rglob("*.py"))
    unused = [x.name for x in RESULTS.iterdir() if x.suffix != ".md" and x.name not in text]
    assert unused == []
