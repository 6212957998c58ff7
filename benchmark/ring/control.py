"""The control channel of the CPU attention process: start to ready, and what a heartbeat costs.

    python -m benchmark.ring.control --json FILE     half a minute

Rows (format: rows.py):
    python      a bare interpreter from start to exit: what any Python process takes
    start       WorkerClient.start, from nothing to a process that has taken an arena and is ready
    stop        WorkerClient.stop, to the process's exit
    heartbeat   CPU time of one heartbeat, of both processes and all their threads; samples are runs of 2 s with
                heartbeats every 2 ms, less the CPU time of runs without
Times that are not CPU time depend on what else runs.
"""

from __future__ import annotations

import argparse
import logging
import os
import subprocess
import sys
import time
from pathlib import Path

from benchmark.ring.ring_latency import SPEC
from benchmark.rows import Writer, environment, summary
from sglang_scout.worker.arena import Arena
from sglang_scout.worker.client import WorkerClient, WorkerConfig

STARTS, RUNS, RUN_S, INTERVAL_S = 30, 5, 2.0, 0.002


def time_starts(arena: Arena, cpu: int, count: int) -> dict[str, list[float]]:
    """Samples in microseconds, taken in turns."""
    found: dict[str, list[float]] = {"python": [], "start": [], "stop": []}
    for _ in range(count):
        begin_s = time.perf_counter()
        subprocess.run([sys.executable, "-P", "-c", "pass"], check=True)
        python_s = time.perf_counter()
        client = WorkerClient(arena, [cpu])
        client.start()
        ready_s = time.perf_counter()
        client.stop()
        end_s = time.perf_counter()
        found["python"].append(1e6 * (python_s - begin_s))
        found["start"].append(1e6 * (ready_s - python_s))
        found["stop"].append(1e6 * (end_s - ready_s))
    return found


def cpu_time_s(arena: Arena, cpu: int, interval_s: float, run_s: float) -> float:
    """Of this process and of an attention process, with a heartbeat every ``interval_s``."""
    # Long timeouts: a process that is starved on a busy machine must not be replaced.
    config = WorkerConfig(
        heartbeat_interval_s=interval_s, heartbeat_timeout_s=60, stall_timeout_s=60
    )
    with WorkerClient(arena, [cpu], config=config) as client:
        pids = [os.getpid(), client.snapshot().pid]
        before_ns = sum(map(_spent_ns, pids))
        time.sleep(run_s)
        return (sum(map(_spent_ns, pids)) - before_ns) / 1e9


def _spent_ns(pid: int) -> int:
    """On a CPU, all threads; times(2) counts in steps of 10 ms."""
    stats = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(stat.read_text().split()[0]) for stat in stats)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write rows to FILE")
    parser.add_argument("--quick", action="store_true", help="only a few samples")
    args = parser.parse_args(argv)
    logging.basicConfig(level=logging.WARNING)
    starts, runs, run_s = (2, 1, 0.5) if args.quick else (STARTS, RUNS, RUN_S)
    cpu = max(os.sched_getaffinity(0))
    writer = Writer(args.json, environment("control", ("sglang-scout", "pyzmq")))
    with Arena.create(SPEC) as arena:
        for impl, samples in time_starts(arena, cpu, starts).items():
            writer.add(impl, **summary(samples))
        beats_us = []
        for _ in range(runs):
            with_s = cpu_time_s(arena, cpu, INTERVAL_S, run_s)
            without_s = cpu_time_s(arena, cpu, 60.0, run_s)
            beats_us.append(max(1e6 * (with_s - without_s) * INTERVAL_S / run_s, 0.001))
        writer.add("heartbeat", **summary(beats_us), interval_us=1e6 * INTERVAL_S)
    for row in writer.rows:
        print(f"{row['impl']:10} {row['median_us']:10.1f} us", file=sys.stderr)
    writer.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
