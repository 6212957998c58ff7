"""What memory there is, by files of /proc and of control groups that a test has written."""

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
    """Files of a control group, in GiB; a limit may be a word."""
    names = ("usage_in_bytes", "total_inactive_file"), ("current", "inactive_file")
    name, stat = names[version - 1]
    files = {name: used * GIB, "stat": f"anon 1\n{stat} {cache * GIB}\n"}
    files |= {k: v if isinstance(v, str) else v * GIB for k, v in limits.items()}
    return {f"{folder}/memory.{k}": v for k, v in files.items()}


V2 = [("/", "cg", "cgroup2", "rw,nsdelegate")]


def test_without_limits_it_is_the_system_s(machine):
    assert machine({}) == 64
    assert machine(group("cg/a", 3, max="max", high="max"), "0::/a\n", V2) == 64
    # No such folder, as in a namespace that the process was moved out of.
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
