"""The documents as a site: MkDocs builds it without a warning, and it loads nothing from elsewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_scout.core.config import OffloadConfig
from sglang_scout.engine.policy import Policy
from sglang_scout.policy import Context

ROOT = Path(__file__).resolve().parents[1]
LOADED = re.compile(
    r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]*)"""
)


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    command = f"{sys.executable} -m mkdocs build --strict -f {ROOT}/scripts/mkdocs.yml -d {folder}"
    done = subprocess.run(command.split(), capture_output=True, text=True, cwd=folder)
    assert done.returncode == 0, done.stderr  # strict: not with a warning either
    return folder


def test_all_pages_are_found_by_search(site):
    found = {
        x["location"].partition("#")[0]
        for x in json.loads((site / "search/search_index.json").read_text())["docs"]
    }
    pages = {page.relative_to(site).as_posix() for page in site.rglob("*.html")}
    assert found == pages - {"404.html"} and len(pages) > 20


def test_no_page_loads_anything_from_elsewhere(site):
    for page in site.rglob("*.html"):
        assert not LOADED.findall(page.read_text()), page
    assert "url(http" not in (site / "site.css").read_text()


def test_the_reference_has_what_docstrings_say(site):
    text = (site / "reference" / "engine.html").read_text()
    assert "StepEngine.begin_step" in text and "Step boundary; see" in text


def test_the_example_of_a_policy_is_one():
    text = (ROOT / "docs" / "reference" / "policies.md").read_text()
    scope = {}
    exec(re.search(r"```python\n(.*?)```", text, re.DOTALL)[1], scope)
    made = scope["make"](Context(OffloadConfig(policy="exact"), num_layers=4, page_bytes=8192))
    assert isinstance(made, Policy) and made.query.targets(0, 4) == ()
