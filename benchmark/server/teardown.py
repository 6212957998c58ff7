"""Time until all memory of the host pages is released after a decode server has ended.

    python -m benchmark.server.teardown --gib 8 --json FILE

The server here is an arena, fully populated and mapped in the server and in its real attention process, without a
model. It exits by itself (`stop`) or is killed (`kill`), and the process with it. Both have ended when the
system has reclaimed their resources: a process is gone only after its mappings and files are.

Rows (format: rows.py), one per way of ending:
    gib, backing        of the arena; its pages: 4k, thp or hugetlb
    samples_us          from the signal to the end
"""

from __future__ import annotations

import argparse
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmark import rows

LAYERS, PAGE, HEADS, DIM = 32, 32, 8, 128

SERVER = f"""
import os, signal, sys, time
from pathlib import Path
from sglang_scout.worker.arena import Arena, ArenaSpec
from sglang_scout.worker.client import WorkerClient, WorkerConfig
from sglang_scout.worker.host_memory import populate_together
page_bytes = 2 * {LAYERS * PAGE * HEADS * DIM} * 2
spec = ArenaSpec(
    num_layers={LAYERS}, num_pages=int(float(sys.argv[1]) * 2**30) // page_bytes, page_size={PAGE},
    num_kv_heads={HEADS}, num_q_heads={4 * HEADS}, head_dim={DIM}, kv_dtype="bfloat16", scale=0.1,
    max_batch=16, max_pages=64,
)
arena = Arena.create(spec)
assert populate_together(arena.address, arena.nbytes) == 0
with WorkerClient(arena, [max(os.sched_getaffinity(0))], config=WorkerConfig(populate=True)) as client:
    pid = client.snapshot().pid
    while int(Path(f"/proc/{{pid}}/statm").read_text().split()[2]) * 4096 < spec.kv_bytes:  # of other processes too
        time.sleep(0.1)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    print(pid, arena.backing, flush=True)
    signal.sigwait([signal.SIGTERM])
"""


def measure(gib: float, how: signal.Signals) -> tuple[float, str]:
    """Microseconds, and the backing of the arena."""
    command = [sys.executable, "-c", SERVER, str(gib)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        worker, _, backing = server.stdout.readline().strip().partition(" ")
        if not backing:
            raise SystemExit(f"the server ended with code {server.wait()}")
        ended = os.pidfd_open(int(worker))
        begin = time.monotonic()
        server.send_signal(how)
        server.wait()
        select.select([ended], [], [])
        took_s = time.monotonic() - begin
        os.close(ended)
        return took_s * 1e6, backing


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--gib", type=float, default=8.0)
    parser.add_argument("--samples", type=int, default=3)
    options = parser.parse_args(argv)
    writer = rows.Writer(options.json, rows.environment("teardown", ("sglang-scout",)))
    for name, how in (("stop", signal.SIGTERM), ("kill", signal.SIGKILL)):
        found = [measure(options.gib, how) for _ in range(options.samples)]
        row = writer.add(
            name, gib=options.gib, backing=found[0][1], **rows.summary([us for us, _ in found])
        )
        print(f"{name}: {row['median_us'] / 1e6:.2f} s for {options.gib:g} GiB ({row['backing']})")
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
