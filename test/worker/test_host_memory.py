"""Available memory, from files of /proc and of cgroups."""

import errno
import mmap
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest

from fake_sys import use_sys
from sglang_scout.core.errors import ConfigError
from sglang_scout.worker import host_memory, main
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from worker_cases import buffers, make_request, until

GIB = 2**30
SIZES = {"MemTotal": 64, "MemAvailable": 64, "CommitLimit": 50, "Committed_AS": 20}
MEMINFO = "".join(f"{name}: {n << 20} kB\n" for name, n in SIZES.items())


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(files, ...) -> available bytes, in GiB. 64 GiB are available, 20 of 50 committed."""
    monkeypatch.setattr(host_memory, "_PROC", tmp_path / "proc")

    def available(files, cgroup="", mounts="", overcommit=0):
        mounts = "".join(
            f"31 23 0:28 {root} {tmp_path}/{folder} rw,relatime shared:9 - {kind} {kind} {options}\n"
            for root, folder, kind, options in mounts
        )
        proc = {
            "proc/meminfo": MEMINFO,
            "proc/sys/vm/overcommit_memory": overcommit,
            "proc/self/cgroup": cgroup,
            "proc/self/mountinfo": "22 1 254:0 / / rw - ext4 /dev/vda rw\n" + mounts,
        }
        for name, text in (proc | files).items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(str(text))
        return host_memory.available_bytes() / GIB

    return available


def group(folder, used, version=2, cache=0, **limits):
    """Files of a cgroup, in GiB; without a limit if none is given."""
    names = ("usage_in_bytes", "total_inactive_file"), ("current", "inactive_file")
    name, stat = names[version - 1]
    files = {name: used * GIB, "stat": f"anon 1\n{stat} {cache * GIB}\n"}
    files |= {"max": "max", "high": "max"} | {k: v * GIB for k, v in limits.items()}
    return {f"{folder}/memory.{k}": v for k, v in files.items()}


V2 = [("/", "cg", "cgroup2", "rw,nsdelegate")]
FOLDERS = "cg/a", "cg/a/b", "cg/a/b/c"
FREE = {k: v for folder in FOLDERS for k, v in group(folder, 5, cache=2).items()}


@pytest.mark.parametrize(
    ("files", "path", "left"),
    [
        ({}, "/", 64),
        ({}, "/../gone", 64),  # as in a namespace that the process was moved out of
        (FREE, "/a/b/c", 64),
        # The limit of any group above counts.
        *(
            (FREE | group(folder, 5, cache=2, **{kind: 12}), "/a/b/c", 12 - (5 - 2))
            for kind in ("max", "high")
            for folder in FOLDERS
        ),
        (group("cg/a", 30, max=40) | group("cg/a/b", 1, max=20, high=18), "/a/b", 10),
        (group("cg/a", 50, max=40, high=45), "/a", 0),  # above its limit already
    ],
)
def test_of_several_limits_the_one_that_leaves_least(machine, files, path, left):
    assert machine(files, f"0::{path}\n", V2) == left


def test_version_1_and_a_container_that_sees_the_host_s_paths(machine):
    cgroup = "9:name=systemd:/\n4:cpu,memory:/docker/abc\n0::/\n"
    mounts = [("/docker/abc", "m", "cgroup", "rw,cpu,memory"), ("/", "u", "cgroup2", "rw")]
    files = group("m", 4, 1, limit_in_bytes=9)
    assert machine(files, cgroup, mounts) == 5
    below = files | group("m/inner", 1, 1, limit_in_bytes=3)
    assert machine(below, cgroup.replace("abc", "abc/inner"), mounts) == 2
    inner = group("h/docker/abc", 1, 1, limit_in_bytes=8)
    whole = group("h/docker", 9, 1, limit_in_bytes=10) | inner
    mounts = [("/", "h", "cgroup", "rw,memory"), ("/", "h", "cgroup", "rw,pids")]
    assert machine(whole, cgroup, mounts) == 1


def zones(*present):
    """/proc/zoneinfo of nodes with two zones, and so many GiB in the second."""
    zone = "Node {}, zone {:>8}\n  pages free     5\n        present  {}\n        managed  7\n      nr_free 4\n"
    text = ""
    for node, gib in enumerate(present):
        text += zone.format(node, "DMA32", 0)
        text += zone.format(node, "Normal", gib * GIB // mmap.PAGESIZE)
    return {"proc/zoneinfo": text}


@pytest.mark.parametrize(("overcommit", "found"), [(0, 64), (1, 64), (2, 30)])
def test_beyond_the_commit_limit_a_write_would_be_a_sigbus(machine, overcommit, found):
    assert machine({}, overcommit=overcommit) == found


def test_a_machine_that_grows_has_what_is_present_but_not_yet_in_its_total(machine):
    """Of 128 GiB all but 1/32; so 60 more than its MemTotal of 64."""
    assert machine(zones(128)) == machine(zones(64, 64)) == 64 + 60
    assert host_memory.bytes_now() == 64 * GIB
    assert machine(zones(65)) == 64, "a kernel keeps 1 GiB of 65 to itself"
    assert machine(zones(128), overcommit=2) == 30
    assert machine(zones(128) | group("cg/a", 3, max=80), "0::/a\n", V2) == 77


def test_a_node_grows_by_its_own(machine, tmp_path, monkeypatch):
    machine(zones(64, 128))
    kib = {"MemTotal": 62 << 20, "MemFree": 3 << 18, "Active(file)": 7, "Inactive(file)": 1 << 18}
    text = "".join(f"Node 0 {name}: {n} kB\n" for name, n in kib.items())
    files = [f"devices/system/node/node{node}/meminfo" for node in range(2)]
    use_sys(monkeypatch, tmp_path, dict.fromkeys(files, text))
    assert [host_memory.bytes_now(node) // GIB for node in range(2)] == [1, 1]
    assert [host_memory.available_bytes(node) // GIB for node in range(2)] == [1, 1 + 62]
    monkeypatch.setenv(host_memory.OVERRIDE, "100")
    assert host_memory.available_bytes(1) == 100 * GIB


def test_what_the_user_promises_is_taken(machine, monkeypatch):
    monkeypatch.setenv(host_memory.OVERRIDE, "96.5")
    assert machine(group("cg/a", 3, max=12), "0::/a\n", V2) == 96.5
    for wrong in ("x", "0", "-5", "nan", "inf", "1e7"):
        monkeypatch.setenv(host_memory.OVERRIDE, wrong)
        with pytest.raises(ConfigError, match=f"SGLANG_SCOUT_HOST_MEMORY_GB={wrong}: must be the"):
            host_memory.available_bytes()


@pytest.mark.parametrize("low", [512 + 32, 512 + 1500])
def test_memory_is_taken_in_steps_as_the_machine_grows(monkeypatch, low):
    """One of 6 GiB, which gets 1 more where less than ``low`` MiB are left. One that does not: test_arena.py."""
    size, used, steps = 6 << 10, 0, []

    def grow(_):
        nonlocal size
        size += 1024 if size - used <= low else 0

    def populate(address, nbytes):
        nonlocal used
        assert address == 4096 + (used << 20) and (nbytes >> 20) <= size - used - 512
        steps.append(nbytes >> 20)
        used += steps[-1]
        return 0

    monkeypatch.setattr(host_memory, "populate_together", populate)
    monkeypatch.setattr(host_memory.time, "sleep", grow)
    host_memory.take_in_steps(4096, 20 * GIB, lambda: (size - used) << 20)
    assert sum(steps) == 20 << 10 and steps[0] == max(steps) == 2 << 10


@pytest.mark.usefixtures("populates")
def test_a_worker_maps_all_pages_and_changes_nothing(make_arena, cpu):
    arena = make_arena(num_pages=4000)
    before = arena.k_pages(0).copy()
    request = make_request(arena.spec, 4, 1)
    with WorkerClient(arena, [cpu], config=WorkerConfig(populate=True)) as client:
        process, of_pages = (
            psutil.Process(client.snapshot().pid),
            arena.nbytes - arena.layout.kv_offset,
        )

        def mapped_bytes():
            maps = process.memory_maps(grouped=False)
            return sum(m.rss for m in maps if "sglang-scout" in m.path)

        until(lambda: mapped_bytes() >= of_pages, "everything is mapped")
        reply = client.wait(client.post(0, 0, *request), *buffers(arena, 4))
        assert reply.fallback_pages == 0
    np.testing.assert_array_equal(arena.k_pages(0), before)


@pytest.mark.parametrize("error", [0, errno.ENOMEM])
def test_the_thread_that_maps_is_nice_keeps_to_its_cpus_and_stops(
    make_arena, cpu, monkeypatch, caplog, error
):
    places, stopping = [], threading.Event()
    caplog.set_level("INFO")

    def populate(address, nbytes, write):
        thread = threading.get_native_id()
        places.append((os.getpriority(os.PRIO_PROCESS, thread), os.sched_getaffinity(thread)))
        if len(places) == 3:
            stopping.set()
        return error

    monkeypatch.setattr(main, "populate", populate)
    monkeypatch.setattr(main, "PIECE_BYTES", 1)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(main.map_pages, make_arena(), [cpu], stopping).result()
    assert places == [(19, {cpu})] * (1 if error else 3)
    said = re.search(r"mapped 0\.\d+ GiB of 0\.\d+ GiB of host pages.*Cannot allocate", caplog.text)
    assert bool(said) == bool(error)
