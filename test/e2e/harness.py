"""Helpers of the end-to-end tests."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil

from servers.group import Servers, flags
from servers.pd_cluster import PDCluster
from servers.server_process import ServerFailed, children_of, title_of
from servers.sglang_http import Generation, generate, http_json

# Room for everything, and no recall that depends on others: a request's residency then depends only on its own history,
# so its tokens are deterministic, and a difference is a fault.
STEADY = {"recall": "fixed", "recall_interval": 1, "resident_tokens": 32768}
SCOUT = flags(kv_offload="scout", kv_offload_budget=128)
# The graph transport on the CPU, where the ring's kernels are interpreted. Only new requests recall, at first: every
# step misses pages.
GRAPH = {"transport": "graph", "verify": True, "resident_tokens": 32}
GRAPH |= {"recall": "fixed", "recall_interval": 50}
SMALL_BUDGET_TOKENS = 320
TRACE_STEPS = 200
SHORT = 10  # the first LENGTHS that fit this budget with their output
GRAPH_ENV = {
    "TRITON_INTERPRET": "1",
    "SGLANG_TEST_RETRACT": "1",
    "SGLANG_TEST_RETRACT_INTERVAL": "20",
}
# All pages of a request fit.
RADIX = flags(kv_offload_budget=1024, disaggregation_decode_enable_radix_cache=True)
LENGTHS = (1, 2, 31, 32, 33, 63, 64, 65, 100, 257, 300, 415, 511, 512, 513, 700)
NEW_TOKENS = 40  # crosses a page boundary for every prompt
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
    for child in children_of(server.pid):
        if "::scheduler" in title_of(child):
            return child.pid
    raise ServerFailed(f"the {which} server has no scheduler process\n{server.tail()}")


def stock_answers(
    model: Path,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    **more: object,
) -> list[Generation]:
    """Answers of stock SGLang in fp32, with log-probabilities: prefill and decode in one server, so that comparisons
    also test the KV transfer. ``more``: its flags."""
    arguments = flags(dtype="float32", max_total_tokens=32768, max_running_requests=16, **more)
    with Servers(model, {"stock": arguments}) as servers:
        send = partial(http_json, servers.server_url("stock") + "/generate")
        return generate(send, prompts, max_new_tokens=max_new_tokens, logprobs=True)


def assert_same_tokens(
    expected: Sequence[Generation],
    actual: Sequence[Generation],
    *,
    logprob_atol: float | None = None,
) -> None:
    """Equal output tokens for every request, and log-probabilities within ``logprob_atol`` if given."""
    for i, (want, got) in enumerate(zip(expected, actual, strict=True)):
        label = f"request {i} ({want.prompt_tokens} prompt tokens)"
        assert want.output_ids == got.output_ids, label
        if logprob_atol is not None:
            gap = max(abs(a - b) for a, b in zip(want.logprobs, got.logprobs, strict=True))
            assert gap <= logprob_atol, f"{label}: log-probabilities differ by {gap:.3g}"


def wait_until(what: str, condition: Callable[[], bool], timeout_s: float) -> None:
    """Poll ``condition`` until it holds; fails with ``what`` after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s: {what}"
        time.sleep(0.05)


def wait_for_steps(cluster: PDCluster, count: int, which: str = "decode") -> None:
    """Until a decode server has made so many more."""
    enough = cluster.kv_offload(which)["steps"] + count
    wait_until("decoding", lambda: cluster.kv_offload(which)["steps"] > enough, 120)


def wait_idle(cluster: PDCluster) -> None:
    """Until no request has a page in host memory."""
    wait_until("pages are free", lambda: not cluster.kv_offload()["host_pages_used"], 60)


def wait_for_worker(cluster: PDCluster, which: str = "decode") -> None:
    """Until its CPU attention process serves."""
    ready = lambda: cluster.kv_offload(which)["worker"]["state"] == "ready"  # noqa: E731
    wait_until("a worker", ready, 60)


@dataclass(frozen=True)
class Holdings:
    """Resources of a cluster right now: its processes, the shared memory that they map, and those of the scheduler of
    the server ``which``."""

    processes: int
    shared_objects: int
    open_files: int
    threads: int
    mib: int

    @classmethod
    def of(cls, cluster: PDCluster, which: str = "decode") -> Holdings:
        mapped: set[tuple[str, str]] = set()
        pids = cluster.processes()
        for pid in pids:
            try:
                lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
            except OSError:  # it has exited
                continue
            for words in (line.split(maxsplit=5) for line in lines):
                if words[-1].startswith(("/memfd:", "/dev/shm/")):
                    mapped.add((words[3], words[4]))  # device and inode
        scheduler = psutil.Process(scheduler_pid(cluster, which))
        mib = scheduler.memory_info().rss >> 20
        return cls(len(pids), len(mapped), scheduler.num_fds(), scheduler.num_threads(), mib)

    def beyond(self, before: Holdings, open_files: int = 4) -> list[str]:
        """Growth since ``before`` beyond what allocators and pools may take, a line each."""
        slack = {"open_files": open_files, "threads": 8, "mib": 200}
        rows = [
            (name, n, getattr(before, name) + slack.get(name, 0)) for name, n in vars(self).items()
        ]
        return [f"{name}: {n}, at most {most}" for name, n, most in rows if n > most]
