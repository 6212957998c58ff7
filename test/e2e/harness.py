"""What the end-to-end tests share. No test lives here."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from servers.pd_cluster import PDCluster, flags
from servers.processes import children_of, process_title
from servers.server_process import ServerFailed
from servers.sglang_http import (
    Generation,
    generate,
    generate_payload,
    parse_generation,
    sse_events,
)
from servers.single_server import SingleServer

CPUS = sorted(os.sched_getaffinity(0))
# SGLang wants to be told where two ranks run, and compiles its embedding for them: 40 s.
RANKS_ENV = {
    "SGLANG_CPU_OMP_THREADS_BIND": f"{CPUS[0]}|{CPUS[-1]}",
    "TORCHDYNAMO_DISABLE": "1",
}


def random_prompts(lengths: Sequence[int], *, vocab: int = 500, seed: int = 0) -> list[list[int]]:
    """Random token ids below ``vocab``, one prompt per length; the same for the same arguments.

    The tiny model's special tokens lie above 500.
    """
    source = random.Random(seed)
    return [[source.randrange(vocab) for _ in range(length)] for length in lengths]


def scheduler_pid(cluster: PDCluster, which: str = "decode") -> int:
    """The process of a server that runs the model. Raises ServerFailed when there is none."""
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
    env: Mapping[str, str] | None = None,
    **more: object,
) -> list[Generation]:
    """What SGLang without this project answers in fp32, with log-probabilities: prefill and decode in
    one server, so that the transfer of KV is under test too. ``more``: its flags."""
    arguments = flags(dtype="float32", max_total_tokens=32768, max_running_requests=16, **more)
    log = log_dir / "stock.log"
    with SingleServer("stock", model, arguments, device="cpu", log=log, environment=env) as server:
        return generate(server.url, prompts, max_new_tokens=max_new_tokens, logprobs=True)


def generate_with(
    cluster: PDCluster,
    which: str,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    logprobs: bool = False,
    concurrency: int | None = None,
) -> list[Generation]:
    """``cluster.generate`` with a decode server that the router does not know."""

    def ask(prompt: Sequence[int]) -> Generation:
        payload = generate_payload(prompt, max_new_tokens, logprobs=logprobs)
        return parse_generation(cluster.ask_pair(payload, which), 0.0)

    with ThreadPoolExecutor(concurrency or len(prompts)) as pool:
        return list(pool.map(ask, prompts))


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
    cluster: PDCluster, prompt: Sequence[int], events: int, *, max_new_tokens: int = 512
) -> int:
    """Start a streamed request and drop the connection after ``events`` events (0: at the first).

    Returns how many events had come; fewer than asked for when the answer ended before.
    """
    payload = generate_payload(prompt, max_new_tokens, stream=True)
    stream = sse_events(cluster.url + "/generate", payload)
    seen = 0
    try:
        for _ in stream:
            seen += 1
            if seen >= events:
                break
    finally:
        stream.close()  # type: ignore[attr-defined]  # a generator
    return seen


@dataclass(frozen=True)
class ProcessUsage:
    """What a process holds right now."""

    open_files: int
    rss_bytes: int
    threads: int

    @classmethod
    def of(cls, pid: int) -> ProcessUsage:
        """Raises FileNotFoundError when the process has ended."""
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        return cls(
            open_files=len(os.listdir(f"/proc/{pid}/fd")),
            rss_bytes=int(status["VmRSS"].split()[0]) * 1024,
            threads=int(status["Threads"]),
        )


@dataclass(frozen=True)
class Holdings:
    """What a cluster holds right now: its processes, the shared memory that they map, and what the decode server's
    scheduler has."""

    processes: int
    shared_objects: int
    scheduler: ProcessUsage

    @classmethod
    def of(cls, cluster: PDCluster) -> Holdings:
        pids = cluster.processes()
        mapped: set[tuple[str, str]] = set()
        for pid in pids:
            with contextlib.suppress(OSError):  # it has ended
                for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                    words = line.split(maxsplit=5)
                    if words[-1].startswith(("/memfd:", "/dev/shm/")):
                        mapped.add((words[3], words[4]))  # device and inode
        return cls(len(pids), len(mapped), ProcessUsage.of(scheduler_pid(cluster)))

    def beyond(self, before: Holdings, open_files: int = 4) -> list[str]:
        """What is more than ``before`` and what allocators and pools may take, a line each."""
        now, was = self.scheduler, before.scheduler
        rows = (
            ("processes", self.processes, before.processes),
            ("shared objects", self.shared_objects, before.shared_objects),
            ("open files", now.open_files, was.open_files + open_files),
            ("threads", now.threads, was.threads + 8),
            ("MiB", now.rss_bytes >> 20, (was.rss_bytes >> 20) + 200),
        )
        return [f"{what}: {n}, at most {most}" for what, n, most in rows if n > most]
