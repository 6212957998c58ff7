"""The documents against the code: what can be turned, seen or hooked is written down."""

import ast
import re
from pathlib import Path

import pytest

from sglang_scout.cli import COMMANDS
from sglang_scout.core.config import (
    DEFAULT_BUDGET_TOKENS,
    DEFAULT_HOST_SHARE,
    KEYS,
    PUBLIC_KEYS,
    Key,
)
from sglang_scout.plugin.hooks import HOOKS, Hook
from sglang_scout.policy.base import policies

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "sglang_scout"
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OPERATIONS = (ROOT / "docs" / "operations.md").read_text()
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text()
PAPER_MAP = (ROOT / "docs" / "paper-map.md").read_text()
README = (ROOT / "README.md").read_text()


def assignments(path: Path) -> dict[str, ast.expr]:
    """Values of a module's top-level assignments. Read, not imported: plugin needs SGLang."""
    found = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found[node.targets[0].id] = node.value
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value:
            found[node.target.id] = node.value
    return found


def flags() -> list[str]:
    fields = assignments(PACKAGE / "plugin" / "fields.py")["FIELDS"]
    assert isinstance(fields, ast.Dict)
    return ["--" + ast.literal_eval(key).replace("_", "-") for key in fields.keys]


def state_fields(function: str) -> list[str]:
    """Keys of the dictionary that a function of status.py returns, those of inner ones included."""
    tree = ast.parse((PACKAGE / "plugin" / "status.py").read_text())
    body = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == function)
    returned = next(n.value for n in body.body if isinstance(n, ast.Return))
    dictionaries = [n for n in ast.walk(returned) if isinstance(n, ast.Dict)]
    lists = assignments(PACKAGE / "plugin" / "status.py")
    spread = [x for name in ("_TOTALS", "_OF_WORKER") for x in ast.literal_eval(lists[name])]
    named = [ast.literal_eval(key) for d in dictionaries for key in d.keys if key is not None]
    return named + (spread if function == "decode_state" else [])


def metrics() -> dict[str, str]:
    table = assignments(PACKAGE / "plugin" / "metrics.py")["METRICS"]
    return {name: kind for name, (kind, _) in ast.literal_eval(table).items()}


def rows(text: str, first_cell: str) -> list[list[str]]:
    """Cells of the table rows whose first cell is ``first_cell``."""
    found = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and cells[0] == first_cell:
            found.append(cells)
    return found


def section(text: str, title: str) -> str:
    return re.split(r"\n## ", text.split(f"\n## {title}\n", 1)[1])[0]


def test_the_readers_of_the_code_find_something():
    assert "--kv-offload-host-gb" in flags() and len(flags()) >= 6
    assert {"cpu_pages", "worker", "restarts"} <= set(state_fields("decode_state"))
    assert metrics()["worker_up"] == "gauge"


@pytest.mark.parametrize("flag", flags())
def test_flags(flag):
    assert len(rows(section(OPERATIONS, "Flags"), f"`{flag}`")) == 1
    assert len(rows(section(README, "Flags"), f"`{flag}`")) == 1


@pytest.mark.parametrize("policy", [*policies(), "none"])
def test_policies(policy):
    assert len(rows(section(OPERATIONS, "Policies"), f"`{policy}`")) == 1


def test_the_default_budget_is_stated():
    for text in (OPERATIONS, README):
        assert rows(text, "`--kv-offload-budget`")[0][1] == str(DEFAULT_BUDGET_TOKENS)


def row_of(name: str, key: Key) -> str:
    """The row of a key in the table of the documents."""
    if key.choices:
        values = ", ".join(f"`{choice}`" for choice in key.choices)
    elif key.limits:
        low, high = key.limits
        values = f"{low:g} or more" if high >= 2**30 else f"{low:g} to {high:g}"
        if key.multiple_of > 1:
            values = f"multiples of {key.multiple_of}"
    else:
        values = {"bool": "true, false", "str": "a file"}.get(key.kind, "a list of layers")
    default = list(key.default) if isinstance(key.default, tuple) else key.default
    written = f"`{default}`" if isinstance(default, str) else str(default).lower()
    return f"| `{name}` | {written} | {values} | {key.help} |"


def test_the_table_of_keys_is_that_of_the_code():
    assert len(PUBLIC_KEYS) <= 12
    text = section(OPERATIONS, "Keys of `--kv-offload-config`")
    written = [line for line in text.splitlines() if line.startswith("| `")]
    assert written == [row_of(name, KEYS[name]) for name in PUBLIC_KEYS]


def test_the_keys_of_some_policies_are_those_of_the_code():
    text = section(OPERATIONS, "Keys of some policies")
    written = [line for line in text.splitlines() if line.startswith("| `")]
    assert written == [row_of(name, key) for name, key in KEYS.items() if not key.is_general]


@pytest.mark.parametrize(
    "key",
    sorted(
        name
        for name, key in KEYS.items()
        if not key.is_public and name not in state_fields("decode_state")
    ),
)
def test_keys_for_tests_are_not_in_documents_for_users(key):
    for text in (OPERATIONS, README):
        assert f"`{key}`" not in text and f'"{key}"' not in text


def targets(hook: Hook) -> str:
    """Of a row of the table of hooks."""
    if isinstance(hook.target, str):
        return f"`{hook.target}`"
    return ", ".join(f"{version}: `{target}`" for version, target in hook.target.items())


def test_the_table_of_hooks_is_that_of_the_code():
    written = [
        line
        for line in section(ARCHITECTURE, "Hooks").splitlines()
        if line.startswith("| ") and "`" in line
    ]
    assert written == [
        f"| {where} | {targets(hook)} | {hook.why} |" for where in HOOKS for hook in HOOKS[where]
    ]


@pytest.mark.parametrize("function", ["decode_state", "prefill_state"])
def test_state_fields(function):
    text = section(OPERATIONS, "State")
    assert [f for f in state_fields(function) if f"`{f}`" not in text] == []


def test_metrics():
    text = section(OPERATIONS, "Metrics")
    for kind in ("gauge", "counter", "histogram"):
        [line] = [line for line in text.splitlines() if re.search(rf"\| {kind}\b", line)]
        assert set(re.findall(r"`(\w+)`", line)) - {"_total"} == {
            name for name, k in metrics().items() if k == kind
        }


READS_VARIABLE = re.compile(
    r'(?:getenv\(|environ(?:ment)?(?:\.get)?[\[(]|OVERRIDE = |\$\{)"?((?:SGLANG_)?SCOUT_(?!ROLE)\w+)'
)


def test_environment_variables():
    """Those that an operator may set, read in C++, Python or a shell."""
    places = ((PACKAGE, "*.py"), (ROOT / "scripts", "*.sh"), (ROOT / "sgl-kernel", "*.cpp"))
    files = [path for folder, pattern in places for path in folder.rglob(pattern)]
    read = {name for path in files for name in READS_VARIABLE.findall(path.read_text())}
    table = section(OPERATIONS, "Environment variables")
    assert read == set(re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE))


def test_the_default_host_share_is_stated():
    assert DEFAULT_HOST_SHARE == 0.5
    assert "half of" in rows(OPERATIONS, "`--kv-offload-host-gb`")[0][1]


def test_every_table_and_figure_of_the_paper_is_mapped():
    figures = re.findall(r"^\| Figure (\d+):", PAPER_MAP, re.MULTILINE)
    assert [int(n) for n in figures] == list(range(1, 13))
    assert "| Table 1:" in PAPER_MAP and "## Algorithm 1" in PAPER_MAP


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_and_paths_exist(document):
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
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
    for name in COMMANDS:
        assert f"`sglang-scout {name}" in OPERATIONS or f"sglang-scout {name}" in README


def test_each_line_of_the_threat_model_names_tests_that_exist():
    table = (ROOT / "docs" / "security.md").read_text().split("\n## ")[0]
    lines = [line for line in table.splitlines() if line.startswith("| ")][2:]
    assert len(lines) > 10
    for line in lines:
        named = re.findall(r"`(test/[\w/]+\.py)::(\w+)`", line)
        assert named or line.endswith("| the same |"), line
        for path, test in named:
            assert f"\ndef {test}(" in (ROOT / path).read_text(), test


def test_the_figure_has_no_outside_parts():
    figure = (ROOT / "docs" / "figures" / "step.svg").read_text()
    assert "<title>" in figure and "href" not in figure and "<script" not in figure
