"""``doctor``'s checks of the machine: CPUs, GPU, environment, memory, and CPU attention by a real process."""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import re
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sglang_scout.cli import columns, gib
from sglang_scout.core import numa
from sglang_scout.core.flags import ADAPTERS, check_socket_folder
from sglang_scout.core.numa import plan_cpus, ranges
from sglang_scout.worker import host_memory

if TYPE_CHECKING:
    import numpy as np

    from sglang_scout.worker.arena import Arena
    from sglang_scout.worker.client import WorkerClient

OK, WARNING, FAILED = "ok", "warning", "failed"
TIMEOUT_S = 120
ROUNDS = 30
TOLERANCE = 1e-4
"""Absolute, of CPU attention, for values of order one: fp32 sums over 512 tokens in different orders."""
ASK_CUDA = """
import ctypes, json, torch
try:
    ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(driver := (ctypes.c_int * 1)())
except (OSError, AttributeError):
    driver = [0]
print(json.dumps([torch.version.cuda, driver[0], torch.cuda.is_available() and torch.cuda.device_count()]))
"""
DRIVER_VERSION = "/proc/driver/nvidia/version"
OLDEST_DRIVER = {"12": 525, "13": 580}
"""Branch of NVIDIA's driver by CUDA's major release, from the latter's release notes."""
GIVE_DRIVER = "apt-get install nvidia-driver-580-server on the host, or docker run --gpus all"


@dataclass(frozen=True)
class Check:
    found: str
    fix: str = ""  # what to do; empty if ok
    values: dict[str, Any] = field(default_factory=dict)  # the same as numbers, for --json
    failed: bool = False  # the machine does not serve; otherwise it does, with a fix suboptimally
    below: str = ""  # lines of text below it

    @property
    def state(self) -> str:
        return FAILED if self.failed else WARNING if self.fix else OK


def python(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a subprocess: its imports may crash, print or start threads."""
    command, env = [sys.executable, *words], {**os.environ, **variables}
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=env)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 1, "", f"no answer within {TIMEOUT_S} s")


def reason(done: subprocess.CompletedProcess[str]) -> str:
    return (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]


def node_hardware(node: int) -> dict[str, Any]:
    """What ``numactl --hardware`` says of a node; bytes are None and distances empty if the kernel does not tell."""
    folder = numa.folder(node)
    memory = numa.read_meminfo(folder / "meminfo")
    return {
        "node": node,
        "cpus": numa.read_cpus(folder / "cpulist"),
        "total_bytes": memory.get("MemTotal"),
        "free_bytes": memory.get("MemFree"),
        "distances": list(map(int, numa.read(folder / "distance").split())),
    }


def check_cpus(given: Collection[int] | None = None) -> Check:
    """``given``: as ``--kv-offload-cpus`` of a decode server."""
    cpus, quota = sorted(os.sched_getaffinity(0)), numa.cpu_quota()
    nodes = list(map(node_hardware, numa.nodes()))
    text, fix, problem = f"{len(cpus)} for this process ({ranges(cpus)})", "", ""
    below = [
        f"NUMA node {node['node']}: CPUs {ranges(node['cpus']) or 'none'}, "
        f"{gib(node['total_bytes'] or 0)}, {gib(node['free_bytes'] or 0)} free"
        + (f", distances {' '.join(map(str, node['distances']))}" if len(nodes) > 1 else "")
        for node in nodes
    ]
    by_home: dict[tuple[int, ...] | None, list[str]] = {}
    for gpu in numa.nvidia_gpus():
        by_home.setdefault(tuple(numa.near_cpus(gpu)), []).append(gpu)
    uses = []
    for near, gpus in (by_home or {None: []}).items():
        plan = plan_cpus(cpus, near, given)
        uses.append({"gpus": gpus, "rows": [use._asdict() for use in plan.rows]})
        device = f"GPU {', '.join(gpus)}" if gpus else "the CPU device"
        below += [f"CPUs of a decode server on {device}:", columns(plan.rows, indent=2)]
        problem = plan.warning or problem
    if quota is not None and quota < len(cpus):
        text += f", but the CPU quota is {quota:g}"
        fix = "name no more CPUs in --kv-offload-cpus than the quota allows, or raise the quota"
    elif len(cpus) < 2:
        fix = "CPU attention and the server share one CPU; give this process more CPUs"
    elif problem:
        text += f"; {problem}"
        fix = "add CPUs near the GPU to the cpuset, for example by docker run --cpuset-cpus"
    elif len(nodes) > 1 and (refusal := bind_refusal(nodes[0]["node"])):
        text += f"; memory cannot be bound to a NUMA node: {refusal}"
        fix = "docker run --cap-add SYS_NICE, or a pod's capabilities: {add: [SYS_NICE]}"
    values = {"cpus": cpus, "numa_nodes": nodes, "quota": quota, "uses": uses}
    return Check(text, fix, values, below="\n".join(below))


def bind_refusal(node: int) -> str:
    """Why memory cannot be bound to a NUMA node; "" if it can."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        begin = ctypes.addressof(first := ctypes.c_char.from_buffer(page))
        error = host_memory._mbind(begin, mmap.PAGESIZE, node)
        del first  # or the mapping cannot be closed
    return os.strerror(error) if error else ""


def check_gpu() -> Check:
    gpus = [{"address": gpu, "numa_node": numa.node_of(gpu)} for gpu in numa.nvidia_gpus()]
    values: dict[str, Any] = {"gpus": gpus}
    if not gpus:
        return Check("none; start servers with --device cpu", values=values)
    found = ", ".join(f"{gpu['address']} on NUMA node {gpu['numa_node']}" for gpu in gpus)
    done, hidden = python("-c", ASK_CUDA), os.environ.get("CUDA_VISIBLE_DEVICES")
    built, knows, count = json.loads(
        done.stdout.splitlines()[-1] if done.stdout else "[null, 0, 0]"
    )
    values |= {"torch_cuda": built, "driver_cuda": knows, "cuda_devices": count}
    if count:
        note = f"torch sees {count}: start servers with --device cuda, which is untested on a GPU (docs/gpu.md)"
        return Check(f"{found}; {note}", values=values)
    why, fix, is_old = "no driver or no device", GIVE_DRIVER, False
    again = f"pip install --force-reinstall sglang=={next(iter(ADAPTERS))}"
    if done.returncode:
        why, fix = reason(done), again
    elif built is None:
        why, fix = "it is built without CUDA", again
    elif hidden in ("", "-1"):
        why, fix = f"CUDA_VISIBLE_DEVICES={hidden!r}", "unset CUDA_VISIBLE_DEVICES"
    elif is_old := 0 < knows // 1000 < int(built.partition(".")[0]):
        version = re.search(r"\d+\.[\d.]+|$", numa.read(DRIVER_VERSION))[0]
        least = OLDEST_DRIVER.get(built.partition(".")[0], "of that CUDA")
        why = f"built for CUDA {built}; the driver {version} supports {knows // 1000}.{knows % 1000 // 10}"
        fix = f"apt-get install nvidia-driver-{least}-server (or later) on the host, and reboot it"
    fix += "; or start servers with --device cpu"
    return Check(f"{found}, but torch sees no CUDA device ({why})", fix, values, is_old)


def check_environment() -> Check:
    """The variables by which a server fails at start."""
    try:
        check_socket_folder()
    except FileNotFoundError as error:  # in a read-only container
        return Check(error.strerror, "docker run --tmpfs /tmp, or emptyDir in a pod", failed=True)
    if os.environ.get("MOONCAKE_PROTOCOL") == "rdma" and not numa.has_rdma():
        fix = "unset MOONCAKE_PROTOCOL, or docker run --device /dev/infiniband"
        return Check("MOONCAKE_PROTOCOL=rdma without an RDMA device", fix, failed=True)
    return Check("ok for servers")


def check_memory() -> Check:
    available, now = host_memory.available_bytes(), host_memory.bytes_now()
    limit = numa.memory_limit_bytes()
    text = f"{gib(available)} available"
    if now < available:
        text += f", {gib(now)} of it now and the rest as the machine grows"
    fix = "free memory: two servers need a few GiB in addition to the KV pages"
    if limit is not None:
        text += f"; this container is limited to {gib(limit)}"
        fix = "raise docker's --memory, compose's mem_limit or the pod's limits.memory"
    text += "; by default KV pages take half of it, or the pool of huge pages"
    values = {"available_bytes": available, "available_now_bytes": now, "limit_bytes": limit}
    return Check(text, fix if available < 4 * 2**30 else "", values)


def check_hugepages() -> Check:
    pool, mode, fix = host_memory.pool_pages()[0], host_memory.shmem_mode(), ""
    text = f"{pool} free 2 MiB pages in the pool, shmem_enabled is {mode or 'unknown'}"
    if not pool and mode not in host_memory.SHMEM_MODES_THAT_HELP:
        text += "; host memory for KV uses pages of 4 KiB"
        fix = "as root, of a container on its host: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Check(text, fix, {"free_pool_pages": pool, "shmem_enabled": mode})


def check_locked_memory() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("unlimited", values={"limit_bytes": None})
    values, needs = {"limit_bytes": limit}, {}
    if numa.nvidia_gpus():
        needs["--device cpu"] = "a decode server with --device cuda page-locks all KV pages"
    if numa.has_rdma():
        needs["MOONCAKE_PROTOCOL=tcp"] = "RDMA transfer registers all KV pages"
    if not needs:
        found = f"{gib(limit)}; more is not needed without a GPU or an RDMA device"
        return Check(found, values=values)
    fix = (
        f"{', and '.join(needs.values())}: set ulimit -l unlimited (LimitMEMLOCK=infinity of a service), or use "
        f"{' and '.join(needs)}"
    )
    return Check(gib(limit), fix, values)


def check_worker(cpus: Collection[int] | None) -> Check:
    """Starts an attention process on ``cpus`` or all, compares its result with a reference, and times it. Raises
    ScoutError."""
    from sglang_scout.worker.arena import Arena, ArenaSpec  # loads numpy
    from sglang_scout.worker.client import WorkerClient, WorkerConfig

    # One layer with the heads of Qwen3-14B; 8 MiB of pages.
    heads = {"num_kv_heads": 8, "num_q_heads": 40, "head_dim": 128, "scale": 128**-0.5}
    sizes = {"num_layers": 1, "num_pages": 65, "page_size": 32, "max_batch": 4, "max_pages": 16}
    spec, config = ArenaSpec(kv_dtype="bfloat16", **sizes, **heads), WorkerConfig(wait_timeout_s=5)
    logging.disable(logging.WARNING)  # the result says what was wrong
    cpus, begin_s = sorted(cpus or os.sched_getaffinity(0)), time.monotonic()
    try:
        with Arena.create(spec) as arena, WorkerClient(arena, cpus, config=config) as client:
            ready_s = time.monotonic() - begin_s
            found, status = attend_and_time(client, arena), client.snapshot()
    finally:
        logging.disable(logging.NOTSET)
    error, problem = found["max_error"], ""
    if not error <= TOLERANCE:  # also true for NaN
        problem = f"the error of {error:.2e} exceeds the tolerance of {TOLERANCE:.0e}"
    elif status.fallback_pages or status.restarts:
        problem = (
            f"the CPU attention process was replaced {status.restarts} times, and {status.fallback_pages} pages were "
            f"computed without it: {status.last_error}"
        )
    text = (
        f"ready in {ready_s * 1e3:.0f} ms, control socket {status.endpoint}; {found['rows']} sequences x "
        f"{found['pages']} pages: largest error {error:.1e}, round trip {found['batch_us']:.0f} us; one page: "
        f"{found['page_us']:.0f} us{problem and f': {problem}'}"
    )
    values = {"right": not problem, "problem": problem, "ready_s": ready_s} | found
    values |= {"isa": status.isa, "endpoint": status.endpoint}
    return Check(text, problem and "please report it", values, failed=bool(problem))


def attend_and_time(client: WorkerClient, arena: Arena) -> dict[str, Any]:
    """The largest error of what a started client's process computes, and median times in us of the whole and of one
    page."""
    import numpy as np

    spec, rng = arena.spec, np.random.default_rng(0)
    rows, of_each = spec.max_batch, spec.max_pages
    for plane in (arena.k_pages(0), arena.v_pages(0)):
        values = rng.standard_normal(plane.shape, dtype=np.float32)
        plane[:] = (values.view(np.uint32) >> 16).astype(np.uint16)  # bf16, rounded towards zero
    q = rng.standard_normal((rows, spec.num_q_heads, spec.head_dim), dtype=np.float32)
    order = rng.permutation(np.arange(1, spec.num_pages, dtype=np.int32))
    pages = order[: rows * of_each].reshape(rows, of_each).copy()
    out, lse = np.full_like(q, np.nan), np.full(q.shape[:2], np.nan, np.float32)

    def time_us(rows: int, of_each: int) -> float:
        times, counts = [], np.full(rows, of_each, np.int32)
        for step in range(ROUNDS):
            begin_ns = time.perf_counter_ns()
            ticket = client.post(0, step, q[:rows], pages[:rows], counts)
            client.wait(ticket, out[:rows], lse[:rows])
            times.append((time.perf_counter_ns() - begin_ns) / 1e3)
        return statistics.median(times)

    page_us, batch_us = time_us(1, 1), time_us(rows, of_each)
    want = attend_plainly(q, arena.k_pages(0)[pages], arena.v_pages(0)[pages], spec.scale)
    # numpy's max: Python's ignores a NaN.
    error = np.max([np.abs(x - y).max() for x, y in zip((out, lse), want, strict=True)])
    times = {"batch_us": batch_us, "page_us": page_us, "max_error": float(error)}
    return {"rows": rows, "pages": of_each} | times


def attend_plainly(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Softmax attention of ``q`` ``[B, HQ, D]`` over the bits of bf16 ``[B, n, S, H, D]``: out and log-sum-exp."""
    import numpy as np

    pool = (np.stack([k, v]).astype(np.uint32) << 16).view(np.float32)
    group = q.shape[1] // k.shape[3]
    keys, values = pool.reshape(2, len(q), -1, *k.shape[3:]).repeat(group, axis=3)
    scores = np.einsum("bhd,bthd->bht", q, keys) * scale
    lse = np.logaddexp.reduce(scores, axis=2)
    return np.einsum("bht,bthd->bhd", np.exp(scores - lse[..., None]), values), lse
