"""Helpers of the end-to-end tests."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from servers.pd_cluster import PDCluster, flags
from servers.processes import children_of, process_title
from servers.server_process import ServerFailed
from servers.sglang_http import (
    Generation,
    generate,
    generate_payload,
    http_json,
    sse_events,
)
from servers.single_server import SingleServer

# Recall in every step and room for everything: a request's residency then depends only on its own history, so its
# tokens are deterministic, and a difference is a fault.
STEADY = {"recall": "fixed", "recall_interval": 1, "resident_tokens": 32768}
SCOUT = flags(kv_offload="scout", kv_offload_budget=128)
CPUS = sorted(os.sched_getaffinity(0))
# SGLang needs the CPUs of two ranks, and compiles its embedding for them: 40 s.
RANKS_ENV = {
    "SGLANG_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[-1]}",
    "TORCHDYNAMO_DISABLE": "1",
}


def random_prompts(lengths: Sequence[int], *, seed: int = 0) -> list[list[int]]:
    """Random token ids, one prompt per length; the same for the same arguments.

    Below 500: the tiny model's special tokens are above.
    """
    source = random.Random(seed)
    return [[source.randrange(500) for _ in range(length)] for length in lengths]


def scheduler_pid(cluster: PDCluster, which: str = "decode") -> int:
    """The scheduler process of a server. Raises ServerFailed when there is none."""
    server = cluster.servers[which]
    for pid in children_of(server.pid):
        if "::scheduler" in process_title(pid):
            return pid
    raise ServerFailed(f"the {which} server has no scheduler process\n{server.tail()}")


def stock_answers(
    model: Path,
    log_dir: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **more: object,
) -> list[Generation]:
    """Answers of stock SGLang in fp32, with log-probabilities: prefill and decode in one server, so that comparisons
    also test the KV transfer. ``more``: its flags."""
    arguments = flags(dtype="float32", max_total_tokens=32768, max_running_requests=16, **more)
    log = log_dir / "stock.log"
    with SingleServer("stock", model, arguments, device="cpu", log=log) as server:
        send = partial(http_json, server.url + "/generate")
        return generate(send, prompts, max_new_tokens=max_new_tokens, logprobs=True)


def assert_same_tokens(
    expected: Sequence[Generation],
    actual: Sequence[Generation],
    *,
    logprob_atol: float | None = None,
) -> None:
    """Equal output tokens for every request, and log-probabilities within ``logprob_atol`` if
    given.

    The failure names the request, its prompt length and the first token that differs.
    """
    assert len(expected) == len(actual), f"{len(actual)} answers, expected {len(expected)}"
    problems = []
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        label = f"request {i} ({want.prompt_tokens} prompt tokens)"
        if want.output_ids != got.output_ids:
            pairs = zip(want.output_ids, got.output_ids, strict=False)
            at = next((j for j, (a, b) in enumerate(pairs) if a != b), "the end")
            problems.append(
                f"{label}: tokens differ from position {at} on: "
                f"expected {want.output_ids}, got {got.output_ids}"
            )
        elif logprob_atol is not None:
            assert want.logprobs and got.logprobs, f"{label}: no log-probabilities; ask for them"
            gap = max(abs(a - b) for a, b in zip(want.logprobs, got.logprobs, strict=True))
            if not gap <= logprob_atol:
                problems.append(f"{label}: log-probabilities differ by {gap:.3g}")
    assert not problems, "\n".join(problems)


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll ``condition`` until it holds; fails with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def abort_after(
    cluster: PDCluster, prompt: Sequence[int], events: int, *, max_new_tokens: int
) -> None:
    """Start a streamed request and drop the connection after ``events`` events (0: at the first)."""
    payload = generate_payload(prompt, max_new_tokens, stream=True)
    with contextlib.closing(sse_events(cluster.url + "/generate", payload)) as stream:
        for _ in itertools.islice(stream, max(1, events)):
            pass


@dataclass(frozen=True)
class ProcessUsage:
    """Resources that a process holds right now."""

    open_files: int
    rss_bytes: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessUsage:
        """Raises psutil.NoSuchProcess when the process has ended."""
        process = psutil.Process(pid)
        return cls(process.num_fds(), process.memory_info().rss, process.num_threads())


@dataclass(frozen=True)
class Holdings:
    """Resources of a cluster right now: its processes, the shared memory that they map, and those of the decode
    server's scheduler."""

    processes: int
    shared_objects: int
    scheduler: ProcessUsage

    @classmethod
    def of(cls, cluster: PDCluster) -> Holdings:
        pids = cluster.processes()
        mapped: set[tuple[str, str]] = set()
        for pid in pids:
            with contextlib.suppress(OSError):  # it has exited
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    words = line.split(maxsplit=5)
                    if words[-1].startswith(("/memfd:", "/dev/shm/")):
                        mapped.add((words[3], words[4]))  # device and inode
        return cls(len(pids), len(mapped), ProcessUsage.of(scheduler_pid(cluster)))

    def beyond(self, before: Holdings, open_files: int = 4) -> list[str]:
        """Growth since ``before`` beyond what allocators and pools may take, a line each."""
        now, was = self.scheduler, before.scheduler
        rows = (
            ("processes", self.processes, before.processes),
            ("shared objects", self.shared_objects, before.shared_objects),
            ("open files", now.open_files, was.open_files + open_files),
            ("threads", now.threads, was.threads + 8),
            ("MiB", now.rss_bytes >> 20, (was.rss_bytes >> 20) + 200),
        )
        return [f"{what}: {n}, at most {most}" for what, n, most in rows if n > most]
