"""Environment variables that SGLang's servers need, by device."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sglang_scout.core.files import SOCKET_PATH_BYTES

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cpu_env.sh"


def server_environment(device: str) -> dict[str, str]:
    """Our own environment plus what SGLang needs with ``--device device``, which ``scripts/cpu_env.sh`` knows."""
    given = {**os.environ, "VIRTUAL_ENV": sys.prefix, "SCOUT_FORCE_CPU": str(int(device == "cpu"))}
    if device != "cpu":  # what the script set for a CPU
        for name, value in (("SGLANG_USE_CPU_ENGINE", "1"), ("SGLANG_NCCL_SO_PATH", "no-gpu")):
            if given.get(name) == value:
                del given[name]
    command = ["bash", "-c", f'. "{SCRIPT}" && env -0']
    said = subprocess.run(command, env=given, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(item.split("=", 1) for item in said.split("\0") if "=" in item)


def make_scratch_dir() -> str:
    """A new folder for the sockets that SGLang creates and leaves: in TMPDIR, unless their paths would be too long."""
    parent = tempfile.gettempdir()
    fits = len(os.fsencode(parent)) + len("/scout-abcdefgh/tmpabcdefgh") <= SOCKET_PATH_BYTES
    return tempfile.mkdtemp(prefix="scout-", dir=parent if fits else "/tmp")


def started_environment(
    device: str, model: str | Path, scratch_dir: str, more: Mapping[str, str]
) -> dict[str, str]:
    """The same for one that a command starts and monitors.

    Args:
        model: folder or name. A folder has all files, so nothing is looked up online.
        scratch_dir: for sockets and temporary files.
        more: overrides, except ``TMPDIR``.
    """
    environment = server_environment(device)
    if Path(model).is_dir():
        environment.setdefault("HF_HUB_OFFLINE", "1")
    # A busy prefill server on a CPU answers late; after 2 such heartbeats a decode server drops its requests.
    environment.setdefault("SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE", "100")
    environment.pop("PYTHONDONTWRITEBYTECODE", None)  # would compile SGLang at every start
    environment.pop("TRITON_INTERPRET", None)  # the unit tests' setting, not the servers'
    environment.update(more)
    environment["TMPDIR"] = scratch_dir
    return environment
