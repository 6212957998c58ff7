"""Environment variables that SGLang's servers need, by device."""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from sglang_scout.cli.machine import has_rdma
from sglang_scout.core.files import SOCKET_PATH_BYTES

NO_NCCL = "no-gpu"
NO_DRIVER = Path(sys.prefix) / "lib" / "no-driver"
"""Where ``scripts/setup.sh`` installs a stub of the GPU driver library, if there is no driver."""


def _with_defaults(defaults: dict[str, str]) -> dict[str, str]:
    """Our own environment plus ``defaults``. A variable that is already set keeps its value."""
    defaults = {"TOKENIZERS_PARALLELISM": "false", **defaults}
    if not has_rdma():
        defaults["MOONCAKE_PROTOCOL"] = "tcp"  # mooncake's own, rdma, would fail at start
    return {**defaults, **{k: v for k, v in os.environ.items() if v or k not in defaults}}


def cpu_environment() -> dict[str, str]:
    """Our own environment plus what SGLang needs to run on the CPU, even if there is a GPU.

    Equal to what ``scripts/cpu_env.sh`` exports; a test compares them.
    """
    environment = _with_defaults(
        {
            "SGLANG_USE_CPU_ENGINE": "1",
            # Spinning threads would take cores from busy ones.
            "OMP_WAIT_POLICY": "PASSIVE",
            # With --tp-size SGLang loads NCCL if it finds it, which needs a GPU. Not a file.
            "SGLANG_NCCL_SO_PATH": NO_NCCL,
        }
    )
    paths = os.environ.get("LD_LIBRARY_PATH")
    if NO_DRIVER.is_dir() and str(NO_DRIVER) not in (paths or "").split(":"):
        environment["LD_LIBRARY_PATH"] = f"{NO_DRIVER}:{paths}" if paths else str(NO_DRIVER)
    # If torch sees a GPU, SGLang's layers use their CUDA kernels regardless of --device.
    environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def cuda_environment() -> dict[str, str]:
    """Our own environment plus what SGLang needs on a CUDA device."""
    environment = _with_defaults({})
    environment.pop("SGLANG_USE_CPU_ENGINE", None)
    if environment.get("SGLANG_NCCL_SO_PATH") == NO_NCCL:
        del environment["SGLANG_NCCL_SO_PATH"]
    return environment


def server_environment(device: str) -> dict[str, str]:
    """The environment of a server with ``--device device``."""
    return cpu_environment() if device == "cpu" else cuda_environment()


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
