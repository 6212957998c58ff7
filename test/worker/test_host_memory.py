"""Available memory, from files of /proc and of cgroups, and in a real cgroup of this machine."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from sglang_scout.worker import host_memory

GIB = 2**30
MEMINFO = "MemTotal: 99 kB\nMemAvailable: {} kB\nCommitLimit: {} kB\nCommitted_AS: {} kB\n"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(files, ...) -> available bytes, in GiB. 64 GiB are available, 20 of 50 committed."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")

    def available(files, cgroup="", mounts="", overcommit=0):
        kib = (n * 2**20 for n in (64, 50, 20))
        mounts = "".join(
            f"31 23 0:28 {root} {tmp_path}/{folder} rw,relatime shared:9 - {kind} {kind} {options}\n"
            for root, folder, kind, options in mounts
        )
        proc = {
            "meminfo": MEMINFO.format(*kib), "sys/vm/overcommit_memory": f"{overcommit}\n",
            "self/cgroup": cgroup, "self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts,
        }  # fmt: skip
        for name, text in ({f"proc/{k}": text for k, text in proc.items()} | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
        return host_memory.available_bytes() / GIB

    return available


def group(folder, used, version=2, cache=0, **limits):
    """Files of a cgroup, in GiB; a limit may be a word."""
    names = ("usage_in_bytes", "total_inactive_file"), ("current", "inactive_file")
    name, stat = names[version - 1]
    files = {name: used * GIB, "stat": f"anon 1\n{stat} {cache * GIB}\n"}
    files |= {k: v if isinstance(v, str) else v * GIB for k, v in limits.items()}
    return {f"{folder}/memory.{k}": v for k, v in files.items()}


V2 = [("/", "cg", "cgroup2", "rw,nsdelegate")]


def test_without_limits_it_is_the_system_s(machine):
    assert machine({}) == 64
    assert machine(group("cg/a", 3, max="max", high="max"), "0::/a\n", V2) == 64
    # No such directory, as in a namespace that the process was moved out of.
    assert machine({}, "0::/../gone\n", V2) == 64


@pytest.mark.parametrize("kind", ["max", "high"])
@pytest.mark.parametrize("where", ["cg/slurm", "cg/slurm/job", "cg/slurm/job/step"])
def test_a_limit_of_any_group_above_counts(machine, where, kind):
    files = {}
    for folder in ("cg/slurm", "cg/slurm/job", "cg/slurm/job/step"):
        limits = {"max": "max", "high": "max"} | ({kind: 12} if folder == where else {})
        files |= group(folder, 5, cache=2, **limits)
    assert machine(files, "0::/slurm/job/step\n", V2) == 12 - (5 - 2)


def test_of_several_limits_the_one_that_leaves_least(machine):
    files = group("cg/a", 30, max=40, high="max") | group("cg/a/b", 1, max=20, high=18)
    assert machine(files, "0::/a/b\n", V2) == 10
    files = group("cg/a", 50, max=40, high=45)  # above its limit already
    assert machine(files, "0::/a\n", V2) == 0


def test_version_1_and_a_container_that_sees_the_host_s_paths(machine):
    cgroup = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    files = group("m", 4, 1, limit_in_bytes=9)
    mounts = [("/docker/abc", "m", "cgroup", "rw,cpu,memory"), ("/", "u", "cgroup2", "rw")]
    assert machine(files, cgroup, mounts) == 5
    below = files | group("m/inner", 1, 1, limit_in_bytes=3)
    assert machine(below, cgroup.replace("abc", "abc/inner"), mounts) == 2
    whole = group("h/docker", 9, 1, limit_in_bytes=10) | group(
        "h/docker/abc", 1, 1, limit_in_bytes=8
    )
    mounts = [("/", "h", "cgroup", "rw,memory"), ("/", "h", "cgroup", "rw,pids")]
    assert machine(whole, cgroup, mounts) == 1


@pytest.mark.parametrize(("overcommit", "found"), [(0, 64), (1, 64), (2, 30)])
def test_beyond_the_commit_limit_a_write_would_be_a_sigbus(machine, overcommit, found):
    assert machine({}, overcommit=overcommit) == found


def test_a_group_of_this_machine():
    """A process in a real one sees its limit, and is refused an arena beyond it instead of being killed."""
    parents = [folder for kind, folder in host_memory._memory_groups() if kind == "cgroup"]
    group = (parents or [Path("/absent")])[0] / f"scout-test-{os.getpid()}"
    code = """
import sys
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.host_memory import available_bytes
open(sys.argv[1], "w").write("0")
sizes = dict(num_layers=4, page_size=32, num_kv_heads=8, num_q_heads=8, head_dim=128, kv_dtype="float32")
sizes |= dict(scale=1.0, max_batch=1, max_pages=1)
print(available_bytes())
try:
    Arena.create(ArenaSpec(num_pages=300, **sizes))  # 300 MiB
except ArenaError as error:
    print(error)
"""
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text("256M")
    except OSError as error:
        pytest.skip(f"no group of version 1 can be made: {error}")
    try:
        command = [sys.executable, "-c", code, str(group / "cgroup.procs")]
        done = subprocess.run(command, capture_output=True, text=True)
    finally:
        group.rmdir()
    assert done.returncode == 0, done.stderr
    available, refusal = done.stdout.splitlines()
    assert 128 * 2**20 < int(available) <= 256 * 2**20
    assert "does not fit" in refusal and "lower num_pages=300 to at most" in refusal
