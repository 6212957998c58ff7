"""The launcher's environment equals that of scripts/cpu_env.sh."""

import os
import shutil
import socket
import subprocess
import tempfile
from pathlib import Path

import pytest

from servers import environment
from servers.environment import cpu_environment, cuda_environment, make_scratch_dir

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "cpu_env.sh"
NAMES = ("TOKENIZERS_PARALLELISM", "MOONCAKE_PROTOCOL", "SGLANG_USE_CPU_ENGINE", "OMP_WAIT_POLICY",
         "SGLANG_NCCL_SO_PATH", "CUDA_VISIBLE_DEVICES", "LD_LIBRARY_PATH")  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"MOONCAKE_PROTOCOL": "rdma"}, {"OMP_WAIT_POLICY": ""},
                                   {"CUDA_VISIBLE_DEVICES": "0"}, {"LD_LIBRARY_PATH": "/opt/lib"}])  # fmt: skip
def test_cpu_environment(monkeypatch, tmp_path, given):
    for name in NAMES:
        monkeypatch.delenv(name, raising=False)
    # As after a set-up without the GPU driver.
    no_driver = tmp_path / "lib" / "no-driver"
    no_driver.mkdir(parents=True)
    monkeypatch.setattr(environment, "NO_DRIVER", no_driver)
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path))
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    # The script leaves a GPU usable, this function is called only for the CPU.
    command = ["bash", "-c", f'export SCOUT_FORCE_CPU=1; . "{SCRIPT}" && env -0']
    dump = subprocess.run(command, capture_output=True, check=True, env=dict(os.environ)).stdout
    exported = dict(item.split("=", 1) for item in dump.decode().split("\0") if item)
    ours = cpu_environment()
    assert {n: ours.get(n) for n in NAMES} == {n: exported.get(n) for n in NAMES}
    assert ours["LD_LIBRARY_PATH"].split(":")[0] == str(no_driver)
    assert ours["SGLANG_USE_CPU_ENGINE"] == "1" and ours["CUDA_VISIBLE_DEVICES"] == ""


def test_cuda_environment(monkeypatch):
    """Without RDMA mooncake uses TCP here too; variables of cpu_env.sh are undone."""
    for name, value in (*cpu_environment().items(), ("CUDA_VISIBLE_DEVICES", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("MOONCAKE_PROTOCOL", raising=False)
    for rdma, protocol in ((False, "tcp"), (True, None)):
        monkeypatch.setattr(environment, "has_rdma", lambda rdma=rdma: rdma)
        ours = cuda_environment()
        assert ours.get("MOONCAKE_PROTOCOL") == protocol and ours["CUDA_VISIBLE_DEVICES"] == "1"
        assert not {"SGLANG_USE_CPU_ENGINE", "SGLANG_NCCL_SO_PATH"} & set(ours)
    monkeypatch.setenv("SGLANG_NCCL_SO_PATH", "/opt/libnccl.so.2")
    assert cuda_environment()["SGLANG_NCCL_SO_PATH"] == "/opt/libnccl.so.2"


@pytest.mark.parametrize(("size", "fits"), [(80, True), (81, False)])
def test_scratch_dir(monkeypatch, tmp_path, size, fits):
    parent = f"{tmp_path}/".ljust(size, "t")
    os.mkdir(parent)
    monkeypatch.setattr("tempfile.tempdir", parent)
    scratch = make_scratch_dir()
    with tempfile.NamedTemporaryFile(dir=scratch) as file, socket.socket(socket.AF_UNIX) as bound:
        bound.bind(file.name[:-1] + "-")  # as long, and no name of tempfile's
    assert scratch.startswith(parent) == fits
    shutil.rmtree(scratch)
