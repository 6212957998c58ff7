"""A server that cannot start says why in one line."""

import os
import subprocess
import sys

import pytest

from servers.environment import server_environment
from servers.pd_cluster import flags


@pytest.mark.slow
def test_a_folder_whose_path_is_too_long_for_sockets(tiny_model, tmp_path):
    folder = f"{tmp_path}/".ljust(100, "t")
    os.mkdir(folder)
    command = [sys.executable, "-m", "sglang.launch_server"]
    command += flags(
        model_path=tiny_model("qwen3"),
        device="cpu",
        disaggregation_mode="decode",
        kv_offload="scout",
    )
    environment = {**server_environment("cpu"), "TMPDIR": folder}
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=240)
    assert ended.returncode != 0
    said = ended.stderr.splitlines()[-1]
    assert said.startswith(f"sglang-scout: TMPDIR={folder}: its 100 bytes"), ended.stderr[-2000:]
    assert said.endswith("at most 95 bytes") and "Traceback" not in ended.stderr
