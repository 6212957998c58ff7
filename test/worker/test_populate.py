"""A worker that pre-faults the whole arena in the background, and one that is configured not to."""

from __future__ import annotations

import contextlib
import mmap
import os

import numpy as np
import psutil
import pytest

from sglang_scout.worker import populate
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.populate import PopulateThread


def mapped_bytes(pid, address=None):
    """Resident bytes mapped in a process, of all arenas or of the one at an address."""
    maps = psutil.Process(pid).memory_maps(grouped=False)
    return sum(
        m.rss
        for m in maps
        if "sglang-scout" in m.path and address in (None, int(m.addr.split("-")[0], 16))
    )


def most(arena):
    return arena.nbytes - arena.layout().kv_offset


@pytest.mark.usefixtures("populates")
def test_all_pages_are_mapped_and_nothing_is_changed(make_arena, make_request, cpu, until):
    arena = make_arena(num_pages=4000)
    before = [arena.k_pages(layer).copy() for layer in range(arena.spec.num_layers)]
    q, pages, n_pages = make_request(arena.spec, 4, 1)
    with WorkerClient(arena, [cpu], config=WorkerConfig(populate=True)) as client:
        pid = client.snapshot().pid
        until(lambda: mapped_bytes(pid) >= most(arena), "everything is mapped")
        out, lse = np.empty_like(q), np.empty(q.shape[:2], np.float32)
        assert client.wait(client.post(0, 0, q, pages, n_pages), out, lse).fallback_pages == 0
    for layer, k in enumerate(before):
        np.testing.assert_array_equal(arena.k_pages(layer), k)


def test_it_stops_when_it_is_told_to(make_arena, monkeypatch):
    monkeypatch.setattr(populate, "PIECE_BYTES", mmap.PAGESIZE)
    arena = make_arena(num_pages=4000)
    populating = PopulateThread(arena)
    populating.stop()
    populating.stop()
    assert mapped_bytes(os.getpid(), arena.address) < most(arena)


@pytest.mark.usefixtures("populates")
def test_a_system_that_refuses_is_told_of(make_arena, caplog):
    arena = make_arena()
    arena.address = 2**46  # nothing is mapped there
    PopulateThread(arena)._thread.join()
    assert "mapped 0.0 of 0.0 GiB of the arena" in caplog.text
    assert "Cannot allocate memory" in caplog.text


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is no other CPU")
def test_it_keeps_off_the_cpus_that_compute(make_spec, cpu, until):
    spec = make_spec(num_pages=40_000, head_dim=64)  # 0.5 GB: long enough to be seen
    config = WorkerConfig(populate=True)
    with Arena.create(spec) as arena, WorkerClient(arena, [cpu], config=config) as client:
        tasks = f"/proc/{client.snapshot().pid}/task"
        found: list[set[int]] = []

        def seen() -> bool:
            with contextlib.suppress(OSError):  # a thread that has ended
                for thread in map(int, os.listdir(tasks)):
                    if os.getpriority(os.PRIO_PROCESS, thread) == 19:
                        found.append(os.sched_getaffinity(thread))
            return any(cpu not in cpus for cpus in found)

        until(seen, f"a thread of its own, {found}")
