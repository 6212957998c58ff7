"""The commands of README, GPU quickstart and tutorial in one shell each, unchanged except for ports, log files and, in
the first two, what only a GPU can do."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from servers.server_process import free_ports

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL, README = ROOT / "docs" / "tutorial.md", ROOT / "README.md"
QUICKSTART = ROOT / "docs" / "gpu-quickstart.md"
PLACES = ("30000", "30001", "30002", "8998")
ON_A_CPU = {
    r"(source .venv/bin/activate).*": r"\1\nsource scripts/cpu_env.sh",
    "ulimit -l unlimited": "ulimit -l",
    "--disaggregation-mode prefill": r"\g<0> --disaggregation-bootstrap-port 8998",
    r" --mem-fraction-static \S+| --base-gpu-id \d": "",
    r"HOST_GB=\d+": "HOST_GB=0.5",
    r"--kv-offload-host-gb \d+": "--kv-offload-host-gb 0.5",
    "--kv-offload scout": "--kv-offload scout --device cpu --dtype float32 --max-total-tokens 8192 --sleep-on-idle",
    "--random-input-len 8192 --random-output-len 256 --num-prompts 32": (
        "--random-input-len 64 --random-output-len 8 --num-prompts 4 --output-file bench.jsonl"
    ),
}


def blocks(text: str) -> str:
    return "\n".join(re.findall(r"```bash\n(.*?)```", text, re.DOTALL))


def run(commands: str, folder: Path) -> str:
    """What they print, with their servers on free ports and their files in ``folder``."""
    assert commands.count("launch_") == 3
    for place, port in zip(PLACES, free_ports(len(PLACES)), strict=True):
        commands = re.sub(rf"\b{place}\b", str(port), commands)
    commands = re.sub(r"(?:\.cache/)?\b(\w+\.(?:log|jsonl))", rf"{folder}/\1", commands)
    with (folder / "said").open("w") as file:
        words = ["bash", "-euo", "pipefail", "-c", commands]
        shell = subprocess.Popen(
            words, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        status = shell.wait(1200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    said = (folder / "said").read_text()
    assert status == 0, said
    return said


@pytest.mark.slow
def test_those_of_the_tutorial(tmp_path):
    [page] = free_ports(1)
    commands = blocks(TUTORIAL.read_text()).replace("dashboard", f"dashboard --port {page}")
    look = f"\nuntil curl -sf http://127.0.0.1:{page} | grep canvas > /dev/null; do sleep 1; done\nkill $(jobs -p)"
    said = run(commands.replace("\nkill $(jobs -p)", look), tmp_path)
    assert said.count('"finish_reason"') == 2, said
    counts = {name: float(n) for name, n in re.findall(r"^(\w+) ([\d.]+)$", said, re.M)}
    assert counts["cpu_pages"] > 0 and counts["recalled_pages"] > 0, said
    assert "kv_offload_cpu_pages_total" in said and "layer" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "left_out"),
    [(README, "Without a GPU"), (QUICKSTART, "Two GPUs"), (QUICKSTART, "One GPU")],
    ids=["README", "one GPU", "two GPUs"],
)
def test_those_of_the_quickstarts_as_far_as_a_cpu_goes(page, left_out, tiny_model, tmp_path):
    commands = blocks(re.sub(rf"(?ms)^## {left_out}\n.*?(?=^## )", "", page.read_text()))
    model = str(tiny_model("qwen3"))
    for pattern, here in {**ON_A_CPU, r"MODEL=\S+": f"MODEL={model}", "FOLDER": model}.items():
        commands = re.sub(pattern, here, commands)
    said = run(
        commands.removesuffix("kill $(jobs -p); wait\n") + "\nkill $(jobs -p); wait\n", tmp_path
    )
    assert said.count('"finish_reason"') == 1, said
    if page == QUICKSTART:
        assert "Requests that fit at once" in said and "Serving Benchmark Result" in said, said
        assert re.search(r'"fallback_pages": 0\b', said), said
