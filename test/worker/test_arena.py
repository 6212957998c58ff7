"""An arena: its file, mapping and layout; where its memory comes from, among others the pool of huge pages."""

import errno
import fcntl
import gc
import os
import re
import signal
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fake_sys import use_sys
from ring_view import RingView
from sglang_scout.core import numa
from sglang_scout.core.errors import ArenaError, ScoutError
from sglang_scout.worker import host_memory
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient
from sglang_scout.worker.host_memory import max_pages_in_pool, pool_lacks
from sglang_scout.worker.ring import HEADER_DTYPE, KV_DTYPES, layout_of
from worker_cases import small_spec

HUGE = 2 << 20


def test_file_is_sealed(make_arena):
    arena = make_arena()
    assert fcntl.fcntl(arena.fd, fcntl.F_GET_SEALS) & 7 == 7
    for size in (0, arena.nbytes - 4096, arena.nbytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    assert "memfd:sglang-scout" in os.readlink(f"/proc/self/fd/{arena.fd}")
    assert not os.get_inheritable(arena.fd)


def test_neither_a_forked_child_nor_a_core_dump_has_it(make_arena, cpu):
    """For both this process and the worker."""
    arena = make_arena()
    client = WorkerClient(arena, [cpu])
    with client:
        for pid in (os.getpid(), client.snapshot().pid):
            smaps = Path(f"/proc/{pid}/smaps").read_text()
            mapped = re.findall(r"memfd:sglang-scout.*?^VmFlags:([^\n]*)", smaps, re.M | re.S)
            assert mapped and all({"dd", "dc"} <= set(flags.split()) for flags in mapped), pid
    inode = os.fstat(arena.fd).st_ino
    child = os.fork()
    if child == 0:
        fds = [fd for fd in Path("/proc/self/fd").iterdir() if fd.exists()]
        os._exit(inode in [fd.stat().st_ino for fd in fds])
    assert os.waitpid(child, 0)[1] == 0, "the child's descriptor keeps the memory"
    assert arena.k_pages(0).any() and os.fstat(arena.fd).st_size == arena.nbytes


@pytest.mark.parametrize("error", [errno.EACCES, errno.EINVAL])
def test_the_file_is_not_executable(monkeypatch, error):
    """With vm.memfd_noexec=2, and before Linux 6.3."""
    create = os.memfd_create

    def memfd_create(name, flags):
        if bool(flags & 8) == (error == errno.EINVAL):
            raise OSError(error, os.strerror(error))
        return create(name, flags & ~8)

    monkeypatch.setattr(os, "memfd_create", memfd_create)
    Arena.create(small_spec()).close()


@pytest.mark.parametrize(
    ("part", "ends"), [("records_offset", True), ("kv_offset", True), ("replies_offset", False)]
)
def test_a_wild_write_ends_the_worker_and_changes_nothing(make_arena, part, ends):
    """Except in its answers."""
    arena = make_arena()
    at = getattr(arena.layout, part)
    before = arena._mapped()[at : at + 64].copy()
    code = (
        "import ctypes, sys; from sglang_scout.worker.arena import Arena; arena = Arena.attach(int(sys.argv[1]));"
        "ctypes.memset(arena.address + int(sys.argv[2]), 0x55, 64)"
    )
    command = [sys.executable, "-c", code, str(arena.fd), str(at)]
    done = subprocess.run(command, pass_fds=[arena.fd])
    assert done.returncode == (-signal.SIGSEGV if ends else 0)
    assert (arena._mapped()[at : at + 64] == before).all() == ends


RANGES = {"num_layers": 9, "num_pages": 300, "page_size": 33, "max_pages": 70}
CHOICES = {"head_dim": [16, 48, 128], "kv_dtype": KV_DTYPES, "num_nodes": [1, 2, 5]}
CHOICES |= {"q_dtype": ["float32", "bfloat16"]}
SIZES = {name: st.integers(1, most) for name, most in RANGES.items()}
SIZES |= {name: st.sampled_from(values) for name, values in CHOICES.items()}


@given(*[st.integers(1, 5)] * 2, st.booleans(), st.integers(1, 40), st.builds(dict, **SIZES))
def test_layout_has_no_overlap_and_is_read_from_the_file(heads, group, per_head, batch, sizes):
    lists = heads if per_head else 1
    of_heads = {"num_kv_heads": heads, "num_q_heads": group * heads}
    spec = small_spec(lists=lists, max_batch=batch * lists, **of_heads, **sizes)
    slots, at = 2 * spec.num_layers, layout_of(spec)
    assert at.log_entries > 2 * slots and at.log_entries & (at.log_entries - 1) == 0
    with Arena.create(spec) as arena:
        ring = RingView(arena)
        parts = [ring.control, ring.stats, ring.log, ring.bell, ring.events]
        parts.append(arena.bytes_at(0, 4096))
        for slot in range(slots):
            parts += [ring.record(slot), *ring.record_data(slot)]
            parts += [ring.reply(slot), *ring.reply_data(slot)]
        for layer in range(spec.num_layers):
            parts += [arena.k_pages(layer), arena.v_pages(layer)]
        spans = sorted((x.__array_interface__["data"][0], x.nbytes) for x in parts)
        for (a, size), (b, _) in pairwise([*spans, (arena.address + arena.nbytes, 0)]):
            assert a + size <= b
        arena.v_pages(0)[-1] = 7
        with Arena.attach(arena.fd) as other:
            assert other.spec == spec and other.nbytes == arena.nbytes and other.fd != arena.fd
            assert (other.v_pages(0)[-1] == 7).all()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"num_layers": 0}, "num_layers=0 is outside 1..65536"),
        ({"num_pages": 1 << 31}, "num_pages=2147483648 is outside"),
        ({"context_pages": 1 << 30}, "context_pages=1073741824: with 4 tokens each"),
    ],
)
def test_bad_sizes_are_named(change, text):
    with pytest.raises(ArenaError, match=text) as caught:
        small_spec(**change)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, ScoutError)


def test_too_large_is_refused_before_anything_is_allocated(monkeypatch):
    monkeypatch.setenv(host_memory.OVERRIDE, "1")
    with pytest.raises(ArenaError) as caught:
        Arena.create(small_spec(num_pages=10_000_000))
    text = str(caught.value)
    assert re.match(
        "host memory is short by .* GiB; lower --kv-offload-host-gb to .* each rank$", text, re.M
    )
    assert "available: 1.000 GiB; as a last resort" in text
    fitting = float(re.search("host-gb to (.*) for", text)[1])
    page_bytes = 2 * 3 * small_spec().page_bytes
    assert (
        layout_of(small_spec(num_pages=int(fitting * 2**30) // page_bytes + 1)).total_bytes
        <= 1 << 30
    )


@pytest.mark.usefixtures("populates")
def test_an_arena_that_relies_on_growth_is_taken_at_once_or_refused(monkeypatch, tmp_path):
    """On a machine of 16 MiB that says it grows to 1 GiB."""
    (tmp_path / "meminfo").write_text("MemTotal: 16384 kB\nMemAvailable: 16384 kB\n")
    (tmp_path / "zoneinfo").write_text("Node 0, zone Normal\n        present 262144\n")
    monkeypatch.setattr(host_memory, "_PROC", tmp_path)
    monkeypatch.setattr(numa, "nodes", lambda: [])
    monkeypatch.setattr(host_memory, "PIECE_BYTES", 4096)
    monkeypatch.setattr(host_memory, "GROWTH_WAIT_S", 0.2)
    with pytest.raises(ArenaError, match=r"does not grow: 0\.000 GiB of 0\.\d+ GiB are allocated"):
        Arena.create(small_spec(num_pages=20_000))
    monkeypatch.setattr(host_memory, "KEPT_BYTES", 0)
    with Arena.create(small_spec(num_pages=20_000)) as arena:
        assert os.fstat(arena.fd).st_blocks * 512 >= arena.nbytes > 32 << 20
    monkeypatch.setenv(host_memory.OVERRIDE, "1")
    with Arena.create(small_spec(num_pages=20_000)) as arena:
        assert os.fstat(arena.fd).st_blocks * 512 < arena.nbytes, "the user's word is not tried"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("magic", 0, "magic number differs"),
        ("lse_offset", 0, "an offset in the header is not what its sizes say"),
        ("total_bytes", 1 << 50, "asks for more bytes than the"),
        ("head_dim", 24, "a size in the header is out of range"),
        ("lists", 3, "a size in the header is out of range"),
        ("layout_version", 1, "layout version 1, this build has"),
    ],
)
def test_attach_refuses_a_wrong_header(make_arena, field, value, text):
    arena = make_arena()
    arena._mapped()[: HEADER_DTYPE.itemsize].view(HEADER_DTYPE)[field] = value
    with pytest.raises(ArenaError, match=text):
        Arena.attach(arena.fd)


def test_close_is_idempotent_and_views_outlive_it(make_arena):
    arena = make_arena()
    view, before = arena.k_pages(1), arena.k_pages(1).copy()
    for _ in range(2):
        arena.close()
    assert (view == before).all()
    with pytest.raises(ArenaError, match="closed"):
        arena.k_pages(0)


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """machine(free huge pages of each node): fakes their pool, of which three more are in use, and backs an arena of it
    by an ordinary file."""

    def make(*free):
        monkeypatch.setattr(host_memory, "_SYS_MM", tmp_path / "mm")
        use_sys(monkeypatch, tmp_path, {})
        for node, pages in [(None, sum(free)), *enumerate(free)]:
            folder = host_memory.pool_folder(node)
            folder.mkdir(parents=True)
            (folder / "free_hugepages").write_text(f"{pages}\n")
            (folder / "nr_hugepages").write_text(f"{pages + 3}\n")
        monkeypatch.setattr(host_memory, "_mbind", lambda *call: 0)
        monkeypatch.setattr(os, "MFD_HUGE_2MB", 0)
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
    monkeypatch.setattr(Arena, "restore_header", fail)
    gc.collect()  # leftovers of other tests
    before = len(os.listdir("/proc/self/fd"))
    for pages in (10_000, 0):
        monkeypatch.setattr(host_memory, "pool_pages", lambda node=None, n=pages: (n, n))
        with pytest.raises(MemoryError, match="of the test"):
            Arena.create(small_spec())
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before


def test_each_node_must_have_its_share(machine, caplog):
    caplog.set_level("INFO")
    spec = small_spec(num_nodes=2, num_pages=200_000)
    half = huge_pages_of(spec) // 2
    machine(2 * half, half - 9)
    with pytest.raises(ArenaError, match=rf" on NUMA node 1, and {half - 9} are free") as caught:
        Arena.create(spec, numa_nodes=[0, 1])
    assert f"> {host_memory.pool_folder(1)}/nr_hugepages, or" in str(caught.value)
    (host_memory.pool_folder(1) / "free_hugepages").write_text("1")
    with Arena.create(spec, numa_nodes=[0, 1]) as arena:
        assert arena.backing != "hugetlb", "so small a pool was not made for this"
    assert "huge pages of 2 MiB on NUMA node 1, and 1 are free in the pool" in caplog.text
    for nodes in ([0], []):
        with Arena.create(small_spec(), numa_nodes=nodes) as arena:
            assert arena.backing == "hugetlb"


@pytest.mark.parametrize("arenas", [1, 2])
def test_a_pool_that_lacks_some_pages_says_what_fits(machine, arenas):
    spec = small_spec(num_pages=200_000)  # 294 MiB
    needed = arenas * huge_pages_of(spec)
    machine(needed - 10)
    with pytest.raises(ArenaError) as caught:
        pool_lacks(spec, arenas=arenas)
    text = str(caught.value)
    assert f"need {needed} huge pages of 2 MiB, and {needed - 10} are free in the pool" in text
    assert f"sysctl vm.nr_hugepages={needed + 3}, or" in text
    page_bytes = 2 * spec.num_layers * spec.page_bytes
    pages = int(float(text.split("--kv-offload-host-gb ")[1]) * 2**30) // page_bytes // arenas + 1
    assert pages <= max_pages_in_pool(spec, arenas=arenas)
    beside = 10 * HUGE + arenas * (layout_of(spec).kv_offset + HUGE) + 2**21
    assert needed * HUGE - pages * arenas * page_bytes < beside, "it could not be much more"


@pytest.mark.parametrize(
    ("error", "backing"), [(errno.EFAULT, False), (errno.ENOMEM, False), (errno.EINVAL, True)]
)
def test_a_page_that_would_be_missing_later_is_missed_now(
    machine, monkeypatch, caplog, error, backing
):
    machine(10_000)
    caplog.set_level("INFO")
    monkeypatch.setattr(host_memory, "populate", lambda address, nbytes: error)
    before = len(os.listdir("/proc/self/fd"))
    with Arena.create(small_spec(), numa_nodes=[0]) as arena:
        assert (arena.backing == "hugetlb") == backing
        assert len(os.listdir("/proc/self/fd")) == before + 2  # its own, and the mapping's
    assert (os.strerror(error) in caplog.text) == (not backing)
