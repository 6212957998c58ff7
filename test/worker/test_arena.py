from __future__ import annotations

import fcntl
import gc
import mmap
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_scout.core.errors import ArenaError, ScoutError
from sglang_scout.worker import arena as arena_module
from sglang_scout.worker import numa
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.ring import layout_of, read_header, write_header

F_GET_SEALS = 1034


def test_file_is_sealed(make_arena):
    arena = make_arena()
    assert fcntl.fcntl(arena.fd, F_GET_SEALS) & 7 == 7
    for size in (0, arena.nbytes - 4096, arena.nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert "memfd:sglang-scout" in os.readlink(f"/proc/self/fd/{arena.fd}")
    assert not os.get_inheritable(arena.fd)


@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16", "float16"])
def test_planes_are_disjoint_and_shared(make_arena, kv_dtype):
    arena = make_arena(kv_dtype=kv_dtype)
    s = arena.spec
    shape = (s.num_pages, s.page_size, s.num_kv_heads, s.head_dim)
    planes = [p(i) for i in range(s.num_layers) for p in (arena.k_pages, arena.v_pages)]
    for number, plane in enumerate(planes):
        assert plane.shape == shape and plane.dtype == s.storage_dtype
        plane[:] = number + 1
    with Arena.attach(arena.fd) as other:
        assert other.spec == s and other.fd != arena.fd and other.nbytes == arena.nbytes
        for number in range(len(planes)):
            plane = (other.v_pages if number % 2 else other.k_pages)(number // 2)
            assert (plane == number + 1).all()
        del plane


def test_addresses_are_those_of_the_views_and_aligned(make_arena):
    arena = make_arena()
    for layer in range(arena.spec.num_layers):
        assert arena.k_address(layer) == arena.k_pages(layer).ctypes.data
        assert arena.v_address(layer) == arena.v_pages(layer).ctypes.data
        assert arena.k_address(layer) % 4096 == 0
    assert arena.layout().kv_offset % (2 << 20) == 0 and arena.nbytes % (2 << 20) == 0
    with pytest.raises(ArenaError, match="layer 3 is outside 0..2"):
        arena.k_pages(3)


sizes = st.fixed_dictionaries(
    {
        "num_layers": st.integers(1, 9), "num_pages": st.integers(1, 300),
        "page_size": st.integers(1, 33), "num_kv_heads": st.integers(1, 5),
        "group": st.integers(1, 5), "head_dim": st.sampled_from([16, 48, 128]),
        "kv_dtype": st.sampled_from(["float32", "bfloat16", "float16"]),
        "scale": st.floats(1e-3, 10), "logit_cap": st.floats(0, 100),
        "max_batch": st.integers(1, 40), "max_pages": st.integers(1, 70),
        "num_nodes": st.sampled_from([1, 1, 2, 5]),
    }
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(sizes)
def test_layout_has_no_overlap(values):
    spec = _spec(values)
    at = layout_of(spec)
    slots = 2 * spec.num_layers
    q = spec.max_batch * spec.num_q_heads * spec.head_dim * 4
    plane = spec.num_pages * spec.page_bytes
    assert plane <= at.v_offset and 2 * at.v_offset == at.layer_stride
    spans = [(0, 4096), (at.control_offset, 512), (at.stats_offset, 128 * 1024)]
    spans += [(at.log_offset, 8 * at.log_entries)]
    for i in range(slots):
        base = at.records_offset + i * at.record_stride
        spans += [(base, 256), (base + at.q_offset, q)]
        spans += [(base + at.pages_offset, spec.max_batch * spec.max_pages * 4)]
        spans += [(base + at.n_pages_offset, spec.max_batch * 4)]
        base = at.replies_offset + i * at.reply_stride
        spans += [(base, 256), (base + at.out_offset, q)]
        spans += [(base + at.lse_offset, spec.max_batch * spec.num_q_heads * 4)]
    for i in range(spec.num_layers):
        spans += [(at.kv_offset + i * at.layer_stride + j * at.v_offset, plane) for j in (0, 1)]
    spans.sort()
    for (a, size), (b, _) in zip(spans, spans[1:], strict=False):
        assert a + size <= b
    assert spans[-1][0] + spans[-1][1] <= at.total_bytes
    assert at.log_entries > 2 * slots and at.log_entries & (at.log_entries - 1) == 0


@settings(max_examples=50, deadline=None)
@given(sizes)
def test_header_round_trip(values):
    spec = _spec(values)
    memory = np.zeros(4096, np.uint8)
    at = layout_of(spec)
    write_header(memory, spec, at)
    with pytest.raises(ArenaError, match="mapped are 4096"):
        read_header(memory)  # its sizes need more than is there
    # Address space only: nothing else of it is touched.
    mapped = np.frombuffer(mmap.mmap(-1, at.total_bytes), np.uint8)
    mapped[:4096] = memory
    assert read_header(mapped) == (spec, at)


def _spec(values: dict) -> ArenaSpec:
    values = dict(values)
    values["num_q_heads"] = values.pop("group") * values["num_kv_heads"]
    return ArenaSpec(**values)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 0}, "num_layers=0 is outside 1..65536"),
        ({"num_pages": 1 << 31}, "num_pages=2147483648 is outside"),
        ({"num_q_heads": 5}, "num_q_heads=5 is not a multiple of num_kv_heads=2"),
        ({"head_dim": 24}, "head_dim=24 is not a multiple of 16"),
        ({"kv_dtype": "fp8"}, "kv_dtype='fp8'; supported are float32, bfloat16, float16"),
        ({"scale": 0.0}, "scale=0.0 is not a positive number"),
        ({"logit_cap": -1.0}, "logit_cap=-1.0 is negative"),
        ({"max_batch": 2.0}, "max_batch=2.0 is not an integer"),
    ],
)
def test_bad_sizes_are_named(make_spec, change, text):
    with pytest.raises(ArenaError, match=text) as caught:
        make_spec(**change)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ScoutError)


def test_too_large_names_sizes_and_what_would_fit(make_spec, monkeypatch):
    spec = make_spec(num_pages=10_000_000)
    monkeypatch.setattr(arena_module, "available_bytes", lambda: 1 << 30)
    with pytest.raises(ArenaError) as caught:
        Arena.create(spec)
    text = str(caught.value)
    assert "1.000 GiB of host memory are available" in text and "3 layers x 10000000 pages" in text
    fits = int(text.split("to at most ")[1])
    page_bytes = spec.kv_bytes // spec.num_pages
    nbytes = layout_of(make_spec(num_pages=fits)).total_bytes
    assert (1 << 30) - page_bytes - (4 << 20) < nbytes <= 1 << 30


def test_attach_refuses_foreign_files(make_spec, tmp_path):
    with (
        open(tmp_path / "f", "wb+") as file,
        pytest.raises(ArenaError, match="not sealed|no memory"),
    ):
        Arena.attach(file.fileno())
    fd = os.memfd_create("x", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, 1 << 16)
        with pytest.raises(ArenaError, match="not sealed"):
            Arena.attach(fd)
        fcntl.fcntl(fd, 1033, 7)
        with pytest.raises(ArenaError, match="magic number differs"):
            Arena.attach(fd)
    finally:
        os.close(fd)


def test_close_is_idempotent_and_views_outlive_it(make_arena):
    arena = make_arena()
    view = arena.k_pages(1)
    before = view.copy()
    arena.close()
    arena.close()
    assert (view == before).all()
    with pytest.raises(ArenaError, match="closed"):
        arena.k_pages(0)


def test_no_descriptor_left(make_spec):
    gc.collect()  # what other tests left
    count = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        arena = Arena.create(make_spec())
        Arena.attach(arena.fd).close()
        arena.close()
        del arena
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == count


def test_numa_is_a_logged_no_op_on_one_node(make_spec, monkeypatch, caplog):
    monkeypatch.setattr(numa, "nodes", lambda: [0])
    with caplog.at_level("INFO"):
        Arena.create(make_spec(), numa_nodes=[0]).close()
    assert "not bound to [0]" in caplog.text
    monkeypatch.setattr(numa, "nodes", lambda: [0, 1])
    with pytest.raises(ArenaError, match=r"numa_nodes=\[7\]; this machine has \[0, 1\]"):
        Arena.create(make_spec(), numa_nodes=[7])


@pytest.mark.skipif(not numa.nodes(), reason="kernel without NUMA")
def test_mbind_really_runs(make_spec, monkeypatch, caplog):
    monkeypatch.setattr(numa, "nodes", lambda: [0, 1])  # this machine may have only node 0
    arena = Arena.create(make_spec(), numa_nodes=[0])
    if "cannot bind" in caplog.text:
        pytest.skip("mbind is not permitted here")
    maps = open("/proc/self/numa_maps").read()
    assert any("bind:0" in line and "sglang-scout" in line for line in maps.splitlines())
    arena.close()


def test_worker_package_needs_no_torch():
    code = (
        "import sys, sglang_scout.worker.main, sglang_scout.worker.client\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'sglang', 'transformers')])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
