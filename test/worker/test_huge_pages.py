"""An arena from the hugetlb pool, and the fallback if the pool cannot provide it."""

from __future__ import annotations

import errno
import gc
import os
from dataclasses import replace

import pytest

from fake_sys import use_sys
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker import arena as arena_module
from sglang_scout.worker import host_memory
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.arena_fits import pool, pool_lacks
from sglang_scout.worker.ring import layout_of
from worker_cases import small_spec

HUGE = 2 << 20


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(free huge pages of each node): fakes their pool, and backs an arena of it by an ordinary file.

    Three more of each node are in use.
    """

    def make(*free):
        monkeypatch.setattr(host_memory, "_SYS_MM", tmp_path / "mm")
        use_sys(monkeypatch, tmp_path, {})
        nodes = [(node, pages, pages + 3) for node, pages in enumerate(free)]
        for node, free_pages, all_pages in [(None, sum(free), sum(free) + 3 * len(free)), *nodes]:
            folder = host_memory.pool_folder(node)
            folder.mkdir(parents=True)
            (folder / "free_hugepages").write_text(f"{free_pages}\n")
            (folder / "nr_hugepages").write_text(f"{all_pages}\n")
        monkeypatch.setattr(host_memory, "_mbind", lambda *call: 0)
        monkeypatch.setattr(arena_module, "_MFD_HUGE_2MB", 0)
        monkeypatch.setattr(os, "MFD_HUGETLB", 0)

    return make


def huge_pages_of(spec):
    return layout_of(spec).total_bytes // HUGE


@pytest.mark.usefixtures("populates")
def test_what_is_taken_from_the_pool_is_there_at_once(machine, caplog):
    spec = small_spec(num_nodes=2, num_pages=4000)
    machine(*[huge_pages_of(spec)] * 2)
    with Arena.create(spec, numa_nodes=[0, 1]) as arena:
        assert arena.backing == "hugetlb" and not caplog.text
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes


def test_nothing_stays_open_of_an_arena_that_fails_late(machine, monkeypatch):
    def fail(*args):
        raise MemoryError("of the test")

    machine(10_000)
    monkeypatch.setattr(arena_module, "write_header", fail)
    before = len(os.listdir("/proc/self/fd"))
    for pages in (10_000, 0):
        monkeypatch.setattr(host_memory, "free_pool_bytes", lambda node=None, n=pages: n * HUGE)
        with pytest.raises(MemoryError, match="of the test"):
            Arena.create(small_spec())
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


def test_each_node_must_have_its_share(machine, caplog):
    spec = small_spec(num_nodes=2, num_pages=4000)
    machine(2 * huge_pages_of(spec), 1)
    with Arena.create(spec, numa_nodes=[0, 1]) as arena:
        assert arena.backing != "hugetlb"
    # It is too small to be meant for this.
    assert "huge pages of 2 MiB on NUMA node 1, and 1 are free in the pool" in caplog.text
    with Arena.create(small_spec(), numa_nodes=[0]) as arena:
        assert arena.backing == "hugetlb"
    with Arena.create(small_spec()) as arena:  # bound to no node
        assert arena.backing == "hugetlb"


@pytest.mark.parametrize("arenas", [1, 2])
def test_a_pool_that_lacks_some_pages_says_what_fits(machine, arenas):
    spec = small_spec(num_pages=200_000)  # 294 MiB
    needed = arenas * huge_pages_of(spec)
    machine(needed - 10)
    with pytest.raises(ArenaError) as caught:
        pool_lacks(spec, arenas=arenas)
    text = str(caught.value)
    assert f"needs {needed} huge pages of 2 MiB, and {needed - 10} are free in the pool" in text
    assert f"sysctl vm.nr_hugepages={needed + 3}, or" in text
    page_bytes = 2 * spec.num_layers * spec.page_bytes
    pages = int(float(text.split("--kv-offload-host-gb ")[1]) * 2**30) // page_bytes // arenas + 1
    assert pool(arenas=arenas).has(replace(spec, num_pages=pages))
    beside = 10 * HUGE + arenas * (layout_of(spec).kv_offset + HUGE) + 2**21
    assert needed * HUGE - pages * arenas * page_bytes < beside, "it could not be much more"


def test_a_node_s_pool_that_lacks_some_pages_is_named(machine):
    spec = small_spec(num_nodes=2, num_pages=200_000)
    half = huge_pages_of(spec) // 2
    machine(2 * half, half - 9)
    with pytest.raises(ArenaError, match=rf" on NUMA node 1, and {half - 9} are free") as caught:
        Arena.create(spec, numa_nodes=[0, 1])
    assert f"to {host_memory.pool_folder(1)}/nr_hugepages, or" in str(caught.value)


@pytest.mark.parametrize(
    ("error", "backing"), [(errno.EFAULT, False), (errno.ENOMEM, False), (errno.EINVAL, True)]
)
def test_a_page_that_would_be_missing_later_is_missed_now(
    machine, monkeypatch, caplog, error, backing
):
    machine(10_000)
    monkeypatch.setattr(host_memory, "populate", lambda address, nbytes: error)
    before = len(os.listdir("/proc/self/fd"))
    with Arena.create(small_spec(), numa_nodes=[0]) as arena:
        assert (arena.backing == "hugetlb") == backing
        assert len(os.listdir("/proc/self/fd")) == before + 2  # its own, and the mapping's
    assert (os.strerror(error) in caplog.text) == (not backing)
