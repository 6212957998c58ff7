"""Generated parts of the documents are current, a damaged mark is named, and monitoring uses metrics that there are."""

import re
import shutil

import pytest

import reference
from sglang_scout.plugin.status import METRICS

KEYS = "<!-- generated: keys -->"
END = "<!-- end -->"
PAGE = "reference/configuration.md"


def test_generated_parts_are_what_the_script_writes():
    for path, text in reference.generated().items():
        assert path.read_text() == text, f"{path}: run .venv/bin/python scripts/reference.py"


@pytest.mark.parametrize(
    ("old", "new", "what"),
    [
        (END, "", f"{PAGE}: a block needs"),  # else the text up to the next end would be replaced
        (KEYS, "<!-- generated: kies -->", "in one page, once; found: .*'kies'"),
        (KEYS, f"{KEYS}\n{END}\n{KEYS}", "in one page, once; found: .*'keys', 'keys'"),
    ],
)
def test_damaged_marks_are_named(monkeypatch, tmp_path, old, new, what):
    docs = tmp_path / "docs"
    shutil.copytree(reference.DOCS, docs, ignore=shutil.ignore_patterns("*.jsonl", "*.png"))
    monkeypatch.setattr(reference, "DOCS", docs)
    page = docs / PAGE
    page.write_text(page.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=what):
        reference.generated()


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_rules_and_panels_are_of_metrics_that_there_are(file):
    suffixes = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    published = {name + suffix for name, stat in METRICS.items() for suffix in suffixes[stat.kind]}
    used = re.findall(r"kv_offload_(\w+)", (reference.DOCS / "monitoring" / file).read_text())
    assert used and set(used) <= published
