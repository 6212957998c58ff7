"""The layers of the package: the contracts in pyproject.toml, and what imports do not show."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_scout.policy import policies

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "python" / "sglang_scout"
# "scout" also names the product.
NAMES = "|".join(name for name in policies() if name != "scout")
BY_NAME = r"\b(policy|preset)(_name)? (==|!=|in) |\.name (==|!=|in) ?[(\"']"
PICKLES = r"\b(send_pyobj|recv_pyobj|send_serialized|recv_serialized|allow_pickle=True|torch\.(load|save))\b"


def test_the_contracts_of_imports_hold():
    # In a process of its own: it reconfigures logging, and later tests would not see warnings.
    code = "from importlinter.cli import lint_imports as run; raise SystemExit(run(no_cache=True))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize(
    ("what", "pattern", "folders"),
    [
        ("a policy's name", rf"(?i)\b({NAMES})\b", "core ops worker engine plugin cli"),
        ("a question whom it serves", BY_NAME, "engine"),
        ("the name of the default", r"[\"']scout[\"']", "engine"),
        ("a stream", r"\.(Stream|stream|current_stream|Event|CUDAGraph)\b", "policy"),
        ("a pickle", PICKLES, "core ops worker policy engine plugin cli"),
        ("native code", r"import _native\b", "core policy engine plugin"),
    ],
)
def test_no_line_has(what, pattern, folders):
    found = [
        f"{path.relative_to(PACKAGE)}:{number}"
        for folder in folders.split()
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if re.search(pattern, line)
    ]
    assert not found, f"{what} in {found}"


@pytest.mark.parametrize(
    ("module", "costly"),
    [
        ("worker.main", "torch sglang triton transformers pickle5 cloudpickle"),
        ("ops.attend", "sglang triton"),
        ("policy", "sglang triton"),
    ],
)
def test_importing_a_module_loads_nothing_that_it_can_do_without(module, costly):
    code = f"import json, sys, sglang_scout.{module} as module; getattr(module, 'policies', int)()"
    code += "; print(json.dumps(list(sys.modules)))"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    loaded = {name.split(".")[0] for name in json.loads(done.stdout.splitlines()[-1])}
    assert "sglang_scout" in loaded
    assert not loaded & set(costly.split())
