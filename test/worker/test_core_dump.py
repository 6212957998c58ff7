"""The core dump of a server that crashes has no host page."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

# A server with host pages full of one word, and its worker, which attends to them; then it crashes.
SERVER = """
import ctypes, sys
import numpy as np
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient
spec = ArenaSpec(
    num_layers=2, num_pages=4096, page_size=32, num_kv_heads=2, num_q_heads=4, head_dim=16,
    kv_dtype="float32", scale=0.25, max_batch=4, max_pages=8,
)
arena = Arena.create(spec)
for layer in range(2):
    for plane in (arena.k_pages(layer), arena.v_pages(layer)):
        plane.view(np.uint32).fill(int(sys.argv[1]))
q = np.ones((4, 4, 16), np.float32)
out, lse = np.empty_like(q), np.empty((4, 4), np.float32)
pages = np.tile(np.arange(8, dtype=np.int32), (4, 1))
with WorkerClient(arena, [int(sys.argv[2])]) as client:
    reply = client.wait(client.post(0, 0, q, pages, np.full(4, 8, np.int32)), out, lse)
    kept = np.full(4096, int(sys.argv[1]) + 1, np.uint32)
    print(reply.fallback_pages, flush=True)
    ctypes.string_at(0)
"""
WORD = 0x3F8A5C63  # a float little above 1


@pytest.mark.skipif(
    Path("/proc/sys/kernel/core_pattern").read_text()[0] in "|/",
    reason="core dumps go to a program, or to a folder for all",
)
def test_a_core_dump_holds_no_host_page(cpu, tmp_path):
    """When a server crashes; the pages are full of a word that is searched for in the dump."""
    command = [sys.executable, "-c", SERVER, str(WORD), str(cpu)]

    def unlimited() -> None:
        resource.setrlimit(resource.RLIMIT_CORE, (resource.RLIM_INFINITY,) * 2)

    done = subprocess.run(command, cwd=tmp_path, preexec_fn=unlimited, capture_output=True)
    assert done.returncode < 0 and done.stdout.split() == [b"0"]
    cores = list(tmp_path.glob("core*"))
    assert len(cores) == 1
    dump = cores[0].read_bytes()
    assert (WORD + 1).to_bytes(4, "little") * 64 in dump, "of other memory it has all"
    assert WORD.to_bytes(4, "little") * 64 not in dump
    assert cores[0].stat().st_mode & 0o077 == 0
