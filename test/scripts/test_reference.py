"""Generated parts of the documents: a damaged mark is named before anything is written, and a block has one place."""

import shutil

import pytest

import reference

KEYS = "<!-- generated: keys -->"
END = "<!-- end -->"
PAGE = "reference/configuration.md"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (
            END,
            "",
            f"{PAGE}: a block needs",
        ),  # the text up to the next block's end would be replaced
        (KEYS, "", f"{PAGE}: a block needs"),
        (KEYS, f"{KEYS} ", f"{PAGE}: a block needs"),
        (KEYS, "<!-- generated: kies -->", r"unknown blocks \['kies'\]; known: flags"),
        (KEYS, f"{KEYS}\n{END}\n{KEYS}", r"\['keys'\] must be in one page, once"),
        (KEYS, "<!-- generated: flags -->", "must be in one page, once"),
    ],
)
def test_damaged_marks_are_named(monkeypatch, tmp_path, old, new, what):
    docs = tmp_path / "docs"
    shutil.copytree(reference.DOCS, docs, ignore=shutil.ignore_patterns("*.jsonl", "*.png"))
    monkeypatch.setattr(reference, "DOCS", docs)
    assert len(reference.generated()) >= 6
    page = docs / PAGE
    page.write_text(page.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=what):
        reference.generated()


def test_a_default_is_the_end_of_a_help_or_the_value():
    assert reference.split_default("Words. Default: 7; 8 with x.", None) == ("7; 8 with x", "Words")
    assert reference.split_default("Words.", None) == ("none", "Words")
    assert reference.split_default("Words", ()) == ("`[]`", "Words")
    assert reference.split_default("Words", False) == ("`false`", "Words")
