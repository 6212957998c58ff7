"""Several NUMA nodes: placement of pages and of work. The nodes are fake; the machine needs only one."""

import ctypes
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ring_view import RingView
from sglang_scout.core import numa
from sglang_scout.core.errors import ArenaError
from sglang_scout.worker import host_memory
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient
from sglang_scout.worker.ring import layout_of, node_spans
from worker_cases import make_request, small_spec, until

HUGE = 2 << 20
NEVER_US = 600_000_000  # no thread helps another node


@settings(max_examples=100, deadline=None)
@given(
    pages=st.integers(1, 3000),
    size=st.sampled_from([1, 4, 32]),
    heads=st.integers(1, 8),
    dim=st.sampled_from([16, 48, 128]),
    num_nodes=st.integers(1, 16),
    align=st.sampled_from([4096, HUGE]),
)
def test_spans_cover_everything_once(pages, size, heads, dim, num_nodes, align):
    """And K and V of each page, in every layer, are on its node."""
    spec = ArenaSpec(3, pages, size, heads, heads, dim, "bfloat16", 1.0, 2, 4, num_nodes)
    at = layout_of(spec)
    assert spec.stripe_pages * num_nodes >= pages > 0
    spans = node_spans(spec, range(num_nodes), align)
    end = 0
    for begin, nbytes, _ in spans:
        assert begin == end and begin % align == 0 and nbytes > 0
        end += nbytes
    assert end == at.total_bytes
    if spec.page_bytes % align:
        return
    for page in {0, pages // 2, pages - 1}:
        for plane in range(2 * spec.num_layers):
            begin = at.kv_offset + plane * at.v_offset + page * spec.page_bytes
            end = begin + spec.page_bytes
            nodes = {node for a, nbytes, node in spans if a < end and begin < a + nbytes}
            assert nodes == {page // spec.stripe_pages}


def test_the_system_is_asked_for_each_span(monkeypatch):
    calls = []
    monkeypatch.setattr(numa, "nodes", lambda: [2, 5])
    monkeypatch.setattr(host_memory, "_mbind", lambda *call: calls.append(call) or 0)
    spec = small_spec(num_nodes=2, num_pages=4000)
    with Arena.create(spec, numa_nodes=[2, 5]) as arena:
        page_bytes = HUGE if arena.backing == "hugetlb" else 4096
        expected = node_spans(spec, [2, 5], page_bytes)
        assert calls == [(arena.address + begin, nbytes, node) for begin, nbytes, node in expected]
        assert {node for _, _, node in calls} == {2, 5}


def test_a_node_that_is_too_small_is_named(monkeypatch):
    monkeypatch.setattr(numa, "nodes", lambda: [0, 1])
    monkeypatch.setattr(host_memory, "available_bytes", lambda node: 0 if node else 1 << 40)
    says = (
        "host memory of NUMA node 1 is short by .*; lower --kv-offload-host-gb to .* of that node"
    )
    for spec, nodes in ((small_spec(num_nodes=2), [0, 1]), (small_spec(), [1])):
        with pytest.raises(ArenaError, match=says):
            Arena.create(spec, numa_nodes=nodes)


@pytest.mark.skipif(not numa.nodes(), reason="kernel without NUMA")
def test_a_worker_takes_memory_where_it_runs_wherever_its_server_must(make_arena, cpu):
    def set_mempolicy(*words):
        return ctypes.CDLL(None).syscall(*map(ctypes.c_long, (238, *words)))

    node_0 = ctypes.c_ulong(1)
    if set_mempolicy(2, ctypes.addressof(node_0), 65):  # of this thread: bind
        pytest.skip("set_mempolicy is not permitted here")
    try:
        with WorkerClient(make_arena(), [cpu]) as client:
            lines = Path(f"/proc/{client.snapshot().pid}/numa_maps").read_text().splitlines()
    finally:
        set_mempolicy(0, 0, 0)
    own = [line.split() for line in lines if {"heap", "stack"} & set(line.split())]
    assert {policy for _, policy, *_ in own} == {"default"}


@pytest.mark.parametrize("splits", [1, 2])
def test_threads_read_the_pages_of_their_own_node(make_arena, make_ring, splits):
    arena = make_arena(num_nodes=3)
    threads = [2, 0, 1, 2]
    ring = make_ring(arena, len(threads), splits, threads, NEVER_US)
    ring.producer.set_trace(True)
    ring.live()
    expected = np.zeros(3, np.int64)
    for step in range(20):
        _, pages, n_pages = request = make_request(arena.spec, 4, step)
        pages[1] = 39  # all on one node
        ids = pages[(np.arange(8) < n_pages[:, None]) & (pages >= 0)]
        expected += np.bincount(ids // arena.spec.stripe_pages, minlength=3)
        ring.serve(0, step, request)
    until(lambda: ring.producer.totals()["pages"] == expected.sum(), "every page in the totals")
    stats = RingView(arena).stats
    assert ring.producer.totals()["remote_pages"] == 0
    for node in range(3):
        lines = [i for i, of in enumerate(threads) if of == node]
        assert stats["pages"][lines].sum() == expected[node]
        # Items are numbered by row, then node, then run.
        for line in lines:
            events = RingView(arena).events[line]
            events = events[events["stamp"] > 0]
            assert (events["first_item"] // splits % 3 == node).all() and len(events) > 0


def test_threads_of_each_node_sleep_and_wake(make_arena, make_ring):
    """One row, so one item per node, and no work stealing: one thread of each node must wake."""
    arena = make_arena(num_nodes=2)
    ring = make_ring(arena, 6, 1, [0, 0, 0, 0, 0, 1], NEVER_US)
    ring.live(spin_us=0)
    request = make_request(arena.spec, 1, 1, full=True)
    for step in range(50):
        assert ring.serve(0, step, request)[2] == 0
    assert ring.producer.totals()["remote_pages"] == 0
