"""The walls between the floors of the package, read from its imports.

    floor 0  core             numpy, msgspec and the standard library
    floor 1  ops, worker      ops has torch; the worker process must stay without it
    floor 2  policy           decides; never moves bytes, starts threads or touches streams
    floor 3  engine           moves; never asks which policy it serves
    floor 4  plugin, cli      only plugin imports sglang

The checker reads source, so a lazy import inside a function counts like one at the top. That it
sees a broken wall is tested here too, on small trees that break one each.
"""

import ast
import graphlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "sglang_scout"

# Which floors a floor may import (its own is added). "" is the package's top level.
MAY_IMPORT = {
    "": {"cli"},  # python -m sglang_scout
    "core": set(),
    "ops": {"core", "_native"},
    "worker": {"core", "_native"},
    "policy": {"core", "ops"},
    "engine": {"core", "ops", "worker", "policy"},
    "plugin": {"core", "ops", "worker", "policy", "engine"},
    "cli": {"core", "ops", "worker", "policy", "engine"},
    "benchmark": {"core", "ops", "worker", "policy", "engine", "cli", "_native"},
}
# All that a floor may import from outside; floors that are not named may import anything else.
OUTSIDE = {
    "": set(),
    "core": {"numpy", "msgspec"},
    "worker": {"numpy", "msgspec", "zmq"},
}
PICKLE_MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "shelve", "joblib"}
PICKLE_CALLS = {"send_pyobj", "recv_pyobj", "send_serialized", "recv_serialized"}
MOVERS = {"threading", "_thread", "multiprocessing", "concurrent", "asyncio", "subprocess",
          "socket", "zmq", "mmap", "ctypes"}  # fmt: skip
STREAMS = {"Stream", "stream", "current_stream", "Event", "CUDAGraph"}
PRESETS = {"scout", "hgca", "infinigen", "sparda", "rheo", "none"}
POLICY_NAMES = {"name", "policy", "policy_name", "preset", "preset_name"}


def floor_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package).parts
    return parts[0] if len(parts) > 1 else ""


def imports(tree: ast.AST, module: list[str], is_package: bool):
    """Every (dotted name, line) that a module imports, relative ones resolved."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                up = node.level - 1 if is_package else node.level
                base = ".".join([*module[: len(module) - up], *([base] if base else [])])
            # `from a import b` may import the module a.b: both count.
            yield from ((f"{base}.{alias.name}", node.lineno) for alias in node.names)
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            if last_name(node.func) in ("import_module", "__import__", "find_spec"):
                yield str(node.args[0].value), node.lineno


def last_name(node: ast.AST) -> str:
    """a.b.c -> "c", c -> "c", anything else -> ""."""
    return getattr(node, "attr", None) or getattr(node, "id", None) or ""


def asks_for_policy(node: ast.AST) -> bool:
    """`x.name == "..."`, `x in ("scout", ...)`, `match x.policy`: it asks whom it serves."""
    if isinstance(node, ast.Match):
        return last_name(node.subject) in POLICY_NAMES or any(
            isinstance(inner, ast.Constant) and inner.value in PRESETS
            for case in node.cases
            for inner in ast.walk(case.pattern)
        )
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    texts = {
        inner.value
        for side in sides
        for inner in ast.walk(side)
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str)
    }
    named = any(last_name(side) in POLICY_NAMES for side in sides)
    return bool(texts & PRESETS) or (named and bool(texts))


def broken_walls(package: Path, benchmark: Path | None = None) -> list[str]:
    """Every broken wall of a tree as "file:line: what", empty if all stand."""
    found = []
    for path in sorted(package.rglob("*.py")):
        module = [package.name, *path.relative_to(package).with_suffix("").parts]
        is_package = path.name == "__init__.py"
        floor = floor_of(path, package)
        found += broken_in(path, floor, module[:-1] if is_package else module, is_package)
    if benchmark is not None and benchmark.is_dir():
        for path in sorted(benchmark.rglob("*.py")):
            found += broken_in(path, "benchmark", [path.stem], False)
    return found


def broken_in(path: Path, floor: str, module: list[str], is_package: bool) -> list[str]:
    found = []

    def say(line: int, what: str) -> None:
        found.append(f"{floor or '.'}/{path.name}:{line}: {what}")

    if floor not in MAY_IMPORT:
        say(1, f"{floor} is no floor; known: {', '.join(filter(None, MAY_IMPORT))}")
        return found
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    for name, line in imports(tree, module, is_package):
        top, *below = name.split(".")
        if top == "sglang_scout":
            # An import of the package itself, or of a name at its top level, is no floor's.
            target = below[0] if below else ""
            known = target in MAY_IMPORT or target == "_native"
            if known and target not in MAY_IMPORT[floor] | {floor}:
                say(line, f"{floor or 'the top level'} imports {target}")
        elif top == "sglang" and floor != "plugin":
            say(line, f"{floor} imports sglang; only plugin may")
        elif floor in OUTSIDE and top not in OUTSIDE[floor] | sys.stdlib_module_names:
            say(line, f"{floor} imports {top}; it may import {', '.join(sorted(OUTSIDE[floor]))}")
        if top in PICKLE_MODULES:
            say(line, f"{floor} imports {top}: no pickle anywhere")
        if floor == "policy" and top in MOVERS:
            say(line, f"policy imports {top}: it decides and moves nothing")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in PICKLE_CALLS:
            say(node.lineno, f"{node.attr} pickles")
        if isinstance(node, ast.Attribute) and node.attr in ("load", "save"):
            if last_name(node.value) == "torch":
                say(node.lineno, f"torch.{node.attr} pickles")
        if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            if not (isinstance(node.value, ast.Constant) and node.value.value is False):
                say(node.value.lineno, "allow_pickle")
        if floor == "policy" and isinstance(node, ast.Attribute) and node.attr in STREAMS:
            say(node.lineno, f"policy touches {node.attr}")
        if floor == "engine" and asks_for_policy(node):
            say(node.lineno, "the engine asks which policy it serves: an axis is wrong")
    return found


def import_cycles(package: Path) -> list[str]:
    """Modules that import each other in a circle, as graphlib finds the first. Imports for type checkers do not run."""
    paths = {}
    for path in package.rglob("*.py"):
        parts = [package.name, *path.relative_to(package).with_suffix("").parts]
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    graph: dict[str, set[str]] = {name: set() for name in paths}
    for name, path in paths.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.If) and last_name(node.test) == "TYPE_CHECKING":
                node.body = []
        for imported, _ in imports(tree, name.split("."), path.name == "__init__.py"):
            if imported not in paths:  # a name in a module
                imported = imported.rpartition(".")[0]
            graph[name] |= {imported} & paths.keys() - {name}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


def policies_named(package: Path) -> list[str]:
    """Lines outside of policy/ that name a policy. "scout" and "none" also name the product and its absence."""
    name = re.compile(rf"\b({'|'.join(PRESETS - {'scout', 'none'})})\b", re.IGNORECASE)
    return [
        f"{path.relative_to(package)}:{number}"
        for path in sorted(package.rglob("*.py"))
        if floor_of(path, package) != "policy"
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if name.search(line)
    ]


def test_the_walls_stand():
    assert broken_walls(PACKAGE, ROOT / "benchmark") == []


def test_no_modules_import_each_other():
    assert import_cycles(PACKAGE) == []


def test_no_policy_is_named_outside_of_its_folder():
    assert policies_named(PACKAGE) == []


GOOD = {
    "__init__.py": '__version__ = "1"\n',
    "core/config.py": "import json\nimport numpy as np\nfrom msgspec import Struct\n",
    "ops/attend.py": "import torch\nfrom ..core.config import np\nfrom .. import _native\n",
    "worker/main.py": "import msgspec\nfrom ..core import config\n"
    "from sglang_scout.core.config import np\n",
    "policy/presets.py": "import torch\nfrom ..ops.attend import torch as t\nname = 'scout'\n",
    "engine/step.py": "from .. import __version__\nfrom ..policy import presets\n"
    "ok = presets.reduce == 'mass' or presets.name is None\n",
    "plugin/entry.py": "from sglang.srt import server_args\nfrom ..engine import step\n",
    "cli/__init__.py": "from ..core import config\nfrom . import doctor\n",
    "cli/doctor.py": "import subprocess\nfrom .. import __version__\n",
}


def tree_with(tmp_path: Path, changes: dict[str, str]) -> list[str]:
    package = tmp_path / "sglang_scout"
    for name, text in (GOOD | changes).items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return broken_walls(package)


def test_a_good_tree_has_no_broken_walls(tmp_path):
    assert tree_with(tmp_path, {}) == []
    package = tmp_path / "sglang_scout"
    assert import_cycles(package) == [] and policies_named(package) == []


def test_circles_and_names_of_policies_are_seen(tmp_path):
    lazy = "def f():\n    from ..engine import step\n"
    checked = "if TYPE_CHECKING:\n    from . import step\n"
    tree_with(tmp_path, {"policy/presets.py": lazy, "engine/typed.py": checked})
    package = tmp_path / "sglang_scout"
    assert {"sglang_scout.policy.presets", "sglang_scout.engine.step"} == {*import_cycles(package)}
    tree_with(tmp_path, {"cli/x.py": "ok = 1\nif policy == 'hgca':\n    pass\n"})
    assert policies_named(package) == ["cli/x.py:2"]


BROKEN = [
    ("core/x.py", "import torch", "core imports torch"),
    ("core/x.py", "from ..ops import attend", "core imports ops"),
    ("ops/x.py", "from sglang.srt import utils", "ops imports sglang; only plugin may"),
    ("ops/triton/x.py", "from ...engine import step", "ops imports engine"),
    ("worker/x.py", "def f():\n    import torch.nn", "worker imports torch"),
    ("worker/x.py", "import transformers", "worker imports transformers"),
    ("worker/__init__.py", "from ..ops import attend", "worker imports ops"),
    ("policy/x.py", "from ..engine import step", "policy imports engine"),
    ("policy/x.py", "import torch\nx = torch.cuda.Stream()", "policy touches Stream"),
    ("engine/x.py", "from ..plugin import entry", "engine imports plugin"),
    ("engine/x.py", "from importlib import *\nimport_module('sglang.srt')", "only plugin may"),
    ("engine/x.py", "def f(policy):\n    return policy.name == 'mine'", "which policy"),
    ("engine/x.py", "def f(p):\n    return p in ('scout', 'hgca')", "which policy"),
    ("engine/x.py", "match p.preset:\n    case 'x':\n        pass", "which policy"),
    ("cli/x.py", "from ..plugin import entry", "cli imports plugin"),
    ("__init__.py", "import torch", " imports torch"),
    ("utils/x.py", "", "utils is no floor"),
    ("plugin/x.py", "from pickle import loads", "no pickle anywhere"),
    ("worker/x.py", "def f(s):\n    s.send_pyobj(1)", "send_pyobj pickles"),
    ("policy/x.py", "import torch\ntorch.load('x')", "torch.load pickles"),
    ("core/x.py", "import numpy\nnumpy.load('x', allow_pickle=True)", "allow_pickle"),
]


@pytest.mark.parametrize(("name", "text", "what"), BROKEN)
def test_each_broken_wall_is_seen(tmp_path, name, text, what):
    found = tree_with(tmp_path, {name: text})
    assert len(found) == 1 and what in found[0] and Path(name).name in found[0], found


def test_benchmarks_do_not_import_sglang(tmp_path):
    (tmp_path / "serve.py").write_text("import torch\nfrom sglang.srt import utils\n")
    assert broken_walls(tmp_path / "none", tmp_path) == [
        "benchmark/serve.py:2: benchmark imports sglang; only plugin may"
    ]


def loaded_by(module: str) -> set[str]:
    """Top-level modules that a fresh process has loaded after importing one."""
    code = f"import {module}, json, sys; print(json.dumps([m.split('.')[0] for m in sys.modules]))"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_a_fresh_worker_process_loads_neither_torch_nor_sglang():
    loaded = loaded_by("sglang_scout.worker.main")
    assert "sglang_scout" in loaded
    assert not loaded & {"torch", "sglang", "triton", "transformers", "pickle5", "cloudpickle"}
