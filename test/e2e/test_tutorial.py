"""The commands of docs/tutorial.md, unchanged except ports, in one shell."""

import contextlib
import os
import re
import signal
import subprocess
from pathlib import Path

import pytest

from servers.server_process import free_ports

ROOT = Path(__file__).resolve().parents[2]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text()


@pytest.mark.slow
def test_its_commands_run(tmp_path):
    commands = "\n".join(re.findall(r"```bash\n(.*?)```", TUTORIAL, re.DOTALL))
    assert commands.count("launch_") == 3
    places = ("30000", "30001", "30002", "8998")
    for place, port in zip(places, free_ports(len(places)), strict=True):
        commands = re.sub(rf"\b{place}\b", str(port), commands)
    [page] = free_ports(1)
    commands = commands.replace("dashboard", f"dashboard --port {page}")
    commands = re.sub(r"\.cache/(\w+\.(?:log|jsonl))", rf"{tmp_path}/\1", commands)
    look = f"\nuntil curl -sf http://127.0.0.1:{page} | grep canvas > /dev/null; do sleep 1; done\nkill $(jobs -p)"
    commands = commands.replace("\nkill $(jobs -p)", look)
    with (tmp_path / "said").open("w") as file:
        words = ["bash", "-euo", "pipefail", "-c", commands]
        shell = subprocess.Popen(words, cwd=ROOT, stdout=file, start_new_session=True)
    try:
        status = shell.wait(1200)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
    said = (tmp_path / "said").read_text()
    assert status == 0, said
    assert said.count('"finish_reason"') == 2, said
    counts = {name: float(n) for name, n in re.findall(r"^(\w+) ([\d.]+)$", said, re.M)}
    assert counts["cpu_pages"] > 0 and counts["recalled_pages"] > 0, said
    assert "kv_offload_cpu_pages_total" in said and "layer" in said
