"""``sglang-scout profile`` on real servers: a profile that a server loads, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from harness import process_title, wait_until
from sglang_scout.core.profile import load_profile


def command(model, output, *more):
    return [sys.executable, "-m", "sglang_scout.cli", "profile", "--model-path", str(model),
            "--output", str(output), "--budget", "128", "--input-len", "600", "--batch", "2",
            "--steps", "24", *more]  # fmt: skip


def test_profile_of_a_small_model(tiny_model, tmp_path):
    """The second run of the command is a server that loads the file of the first."""
    output = tmp_path / "p.json"
    done = subprocess.run(
        command(tiny_model(), output, "--json", "--plot", str(tmp_path / "p.png")),
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    profile = load_profile(str(output))
    assert json.loads(done.stdout)["intervals"] == profile.intervals
    assert profile.samples == [2] * 24 and profile.num_layers == len(profile.curves) == 4
    assert all(0 <= ratio <= 1 for curve in profile.curves for ratio in curve)
    assert max(map(max, profile.curves)) > 0, "the CPU computed nothing"
    assert profile.check is not None and len(profile.check.curves[0]) == 24
    assert profile.identity is not None and profile.identity.architecture == "Qwen3ForCausalLM"
    assert (tmp_path / "p.png").stat().st_size > 10_000


def test_ctrl_c_stops_everything(tiny_model, tmp_path):
    """While the servers start, which is when most people lose patience."""
    running = subprocess.Popen(
        command(tiny_model(), tmp_path / "p.json"), stderr=subprocess.PIPE, text=True,
        start_new_session=True,  # a shell's terminal would signal this group alone
    )  # fmt: skip
    assert running.stderr is not None and "starting the servers" in running.stderr.readline()

    def children():
        tasks = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        return [int(pid) for pid in tasks if "sglang.launch_server" in process_title(int(pid))]

    wait_until("both servers are there", lambda: len(children()) == 2, 60)
    servers = children()
    time.sleep(1)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait(60) == 130
    assert "interrupted" in running.stderr.read()
    assert [process_title(pid) for pid in servers] == ["", ""]
    assert not (tmp_path / "p.json").exists()
