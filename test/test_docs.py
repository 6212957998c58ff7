"""The documents against the code: what can be turned, seen or hooked is written down, generated parts are current, and
MkDocs makes a site of them."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import reference
from sglang_scout.cli import COMMANDS
from sglang_scout.core.config import KEYS, PUBLIC_KEYS, OffloadConfig
from sglang_scout.engine.policy import Policy
from sglang_scout.engine.stores import Counters
from sglang_scout.plugin import status
from sglang_scout.policy import Context, policies

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PACKAGE = ROOT / "python" / "sglang_scout"
PAGES = sorted(DOCS.rglob("*.md"))
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
FOR_USERS = """tutorial.md gpu-quickstart.md faq.md sizing.md tuning.md monitoring/README.md troubleshooting.md
    compatibility.md deploy/README.md reference/configuration.md reference/metrics.md""".split()
MAX_WORDS = 14_000
LOADED = re.compile(
    r"""<(?:script|img|link|iframe)\b[^>]*\b(?:src|href)=["']?((?:https?:)?//[^"'\s>]*)"""
)


def state_fields(function: str) -> list[str]:
    """Keys of the dictionary that a function of the plugin returns, those of inner ones included."""
    file = {"decode_state": "status.py", "prefill_state": "prefill.py"}[function]
    tree = ast.parse((PACKAGE / "plugin" / file).read_text())
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    returned = next(n.value for n in body.body if isinstance(n, ast.Return))
    dictionaries = [n for n in ast.walk(returned) if isinstance(n, ast.Dict)]
    spread = [*Counters(1).totals(), *status._OF_WORKER]
    named = [ast.literal_eval(key) for d in dictionaries for key in d.keys if key is not None]
    return named + (spread if function == "decode_state" else [])


def section(page: str, title: str) -> str:
    return re.split(r"\n## ", (DOCS / page).read_text().split(f"\n## {title}\n", 1)[1])[0]


def test_documents_stay_short():
    """Without what is generated, and without the tables that are made from rows."""
    words = {}
    for page in PAGES:
        text = reference.BLOCK.sub("", page.read_text())
        if page.is_relative_to(DOCS / "results"):
            text = re.sub(r"(?m)^\|.*", "", text)
        words[str(page.relative_to(DOCS))] = len(text.split())
    assert sum(words.values()) <= MAX_WORDS, words


@pytest.mark.parametrize("policy", [*policies(), "none"])
def test_policies(policy):
    lines = section("tuning.md", "Policies").splitlines()
    assert len([line for line in lines if line.startswith(f"| `{policy}` |")]) == 1


def test_few_keys_are_for_users_and_no_others_are_in_their_documents():
    assert len(PUBLIC_KEYS) <= 12
    fields = state_fields("decode_state")
    hidden = [name for name, key in KEYS.items() if not key.is_public and name not in fields]
    for page in (ROOT / "README.md", *(DOCS / name for name in FOR_USERS)):
        text = page.read_text()
        assert [x for x in hidden if f"`{x}`" in text or f'"{x}"' in text] == [], page


@pytest.mark.parametrize("function", ["decode_state", "prefill_state"])
def test_state_fields(function):
    text = (DOCS / "reference" / "metrics.md").read_text()
    fields = state_fields(function)
    assert {"policy", "digests_computed"} <= set(fields)
    assert [f for f in fields if not re.search(rf"`{f}(_total)?`", text)] == []


READS_VARIABLE = re.compile(
    r'(?:getenv\(|environ(?:ment)?(?:\.get)?[\[(]|OVERRIDE = |\$\{)"?((?:SGLANG_)?SCOUT_(?!ROLE)\w+)'
)


def test_environment_variables():
    """Those that an operator may set, read in C++, Python or a shell."""
    places = ((PACKAGE, "*.py"), (ROOT / "scripts", "*.sh"), (ROOT / "sgl-kernel", "*.cpp"))
    files = [path for folder, pattern in places for path in folder.rglob(pattern)]
    read = {name for path in files for name in READS_VARIABLE.findall(path.read_text())}
    table = section("reference/configuration.md", "Environment variables")
    assert read == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_every_table_and_figure_of_the_paper_is_mapped():
    text = (DOCS / "paper-map.md").read_text()
    figures = re.findall(r"^\| Figure (\d+):", text, re.MULTILINE)
    assert [int(n) for n in figures] == list(range(1, 13))
    assert "| Table 1:" in text and "## Algorithm 1" in text


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\((?!https?:)([^)#]+)\)", text):
        assert (document.parent / target).exists(), target
    folders = "|".join(sorted({p.name for p in PACKAGE.iterdir() if p.is_dir()} - {"__pycache__"}))
    tops = "python|scripts|test|benchmark|docs|figures|sgl-kernel|" + folders
    for path in re.findall(rf"`((?:{tops})/[\w./-]+)", text):
        places = (ROOT / path, PACKAGE / path, document.parent / path)
        assert any(place.exists() for place in places), path


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_run_without_an_activated_environment(document):
    """The programs' own first line takes whatever python3 is on the path, which lacks the packages."""
    for block in re.findall(r"```(?:bash|sh)\n(.*?)```", document.read_text(), re.DOTALL):
        if "bin/activate" in block:
            continue
        block = re.sub(r"\s#.*", "", block)
        for before, path in re.findall(
            r"(\S*?)[ \"]?(scripts/[\w/]+\.py|-m benchmark[\w.]+)", block
        ):
            assert before.endswith("bin/python"), path
        assert not re.search(r"^pip ", block, re.MULTILINE), "installs elsewhere than into .venv"


def test_every_subcommand_is_documented():
    text = "".join(page.read_text() for page in PAGES)
    assert [name for name in COMMANDS if f"sglang-scout {name}" not in text] == []


def test_each_line_of_the_threat_model_names_tests_that_exist():
    table = (DOCS / "security.md").read_text().split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(lines) > 10
    for line in lines:
        named = re.findall(r"`(test/[\w/]+\.py)::(\w+)`", line)
        assert named or line.endswith("| the same |"), line
        for path, test in named:
            assert f"\ndef {test}(" in (ROOT / path).read_text(), test


def test_generated_parts_are_what_the_script_writes():
    for path, text in reference.generated().items():
        assert path.read_text() == text, f"{path}: run .venv/bin/python scripts/reference.py"


@pytest.mark.parametrize("file", ["alerts.yml", "grafana.json"])
def test_rules_and_panels_are_of_metrics_that_there_are(file):
    suffixes = {"gauge": ("",), "counter": ("_total",), "histogram": ("_bucket", "_count", "_sum")}
    published = {
        name + suffix for name, stat in status.METRICS.items() for suffix in suffixes[stat.kind]
    }
    used = re.findall(r"kv_offload_(\w+)", (DOCS / "monitoring" / file).read_text())
    assert used and set(used) <= published


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
