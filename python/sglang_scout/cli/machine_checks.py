"""``doctor``'s checks of the machine: CPUs, GPU, environment and memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_scout.cli import machine
from sglang_scout.cli.table import columns, gib
from sglang_scout.core.cpu_list import ranges
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.files import check_socket_folder
from sglang_scout.worker import numa
from sglang_scout.worker.cpus import plan_cpus

OK, WARNING, FAILED = "ok", "warning", "failed"
SMALL_MEMORY_BYTES = 4 * 2**30


@dataclass(frozen=True)
class Check:
    """One line of the report.

    Attributes:
        state: "ok", "warning" (serves, but suboptimally) or "failed" (does not serve).
        found: the observation.
        fix: what to do; empty if ok.
        values: the same as numbers, for --json.
        below: lines of text below it, not for --json.
    """

    name: str
    state: str
    found: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)
    below: str = ""


def check_cpus(given: Collection[int] | None = None) -> Check:
    """Args: given: as ``--kv-offload-cpus`` of a decode server."""
    cpus, quota, nodes = sorted(os.sched_getaffinity(0)), machine.cpu_quota(), numa.hardware()
    text = f"{len(cpus)} for this process ({ranges(cpus)})"
    below = [
        f"NUMA node {node['node']}: CPUs {ranges(node['cpus']) or 'none'}, "
        f"{gib(node['total_bytes'] or 0)}, {gib(node['free_bytes'] or 0)} free"
        + (f", distances {' '.join(map(str, node['distances']))}" if len(nodes) > 1 else "")
        for node in nodes
    ]
    by_home: dict[tuple[int, ...] | None, list[str]] = {}
    for gpu in machine.nvidia_gpus():
        by_home.setdefault(tuple(numa.near_cpus(gpu.address)), []).append(gpu.address)
    uses, problem = [], ""
    for near, gpus in (by_home or {None: []}).items():
        plan = plan_cpus(cpus, near, given)
        uses.append({"gpus": gpus, "rows": [use._asdict() for use in plan.rows]})
        device = f"GPU {', '.join(gpus)}" if gpus else "the CPU device"
        below += [f"CPUs of a decode server on {device}:", columns(plan.rows, indent=2)]
        problem = plan.warning or problem
    values = {"cpus": cpus, "numa_nodes": nodes, "quota": quota, "uses": uses}
    fix = ""
    if quota is not None and quota < len(cpus):
        text += f", but the CPU quota is {quota:g}"
        fix = "name no more CPUs in --kv-offload-cpus than the quota allows, or raise the quota"
    elif len(cpus) < 2:
        fix = "CPU attention and the server share one CPU; give this process more CPUs"
    elif problem:
        text, fix = (
            f"{text}; {problem}",
            "add CPUs near the GPU to the cpuset, for example with docker's --cpuset-cpus",
        )
    return Check("cpus", WARNING if fix else OK, text, fix, values, "\n".join(below))


def check_gpu() -> Check:
    gpus = machine.nvidia_gpus()
    values: dict[str, Any] = {"gpus": [asdict(gpu) for gpu in gpus]}
    if not gpus:
        return Check("gpu", OK, "none; start servers with --device cpu", values=values)
    found = ", ".join(f"{gpu.address} on NUMA node {gpu.numa_node}" for gpu in gpus)
    count, why = machine.cuda_devices()
    values["cuda_devices"] = count
    if not count:
        fix = "install NVIDIA's driver and, in a container, give access to the GPU; or start servers with --device cpu"
        return Check("gpu", WARNING, f"{found}, but torch sees no CUDA device ({why})", fix, values)
    note = f"; torch sees {count}: start servers with --device cuda, which is untested on a GPU (docs/gpu.md)"
    return Check("gpu", OK, found + note, values=values)


def check_environment() -> Check:
    """The variables by which a manually started server fails at start."""
    try:
        check_socket_folder()
    except ConfigError as error:
        what, _, fix = str(error).rpartition("; ")
        return Check("environment", FAILED, what, fix)
    wanted = {} if machine.nvidia_gpus() else {"SGLANG_USE_CPU_ENGINE": "1"}
    if not machine.has_rdma():
        wanted["MOONCAKE_PROTOCOL"] = "tcp"
    missing = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    if not missing:
        return Check(
            "environment", OK, "the variables that servers need are set", values={"missing": {}}
        )
    exports = " ".join(f"{name}={value}" for name, value in missing.items())
    verb = "is" if len(missing) == 1 else "are"
    found = f"{' and '.join(missing)} {verb} not set; servers that you start by hand need this"
    fix = f"source scripts/cpu_env.sh, or export {exports}"
    return Check("environment", WARNING, found, fix, {"missing": missing})


def check_memory() -> Check:
    from sglang_scout.worker.host_memory import available_bytes, bytes_now

    available, now = available_bytes(), bytes_now()
    text = f"{gib(available)} available"
    if now < available:
        text += f", {gib(now)} of it now and the rest as the machine grows"
    text += "; by default KV pages take half of it, or the pool of huge pages"
    values = {"available_bytes": available, "available_now_bytes": now}
    if available < SMALL_MEMORY_BYTES:
        fix = "free memory: two servers need a few GiB in addition to the KV pages"
        return Check("memory", WARNING, text, fix, values)
    return Check("memory", OK, text, values=values)


def check_hugepages() -> Check:
    from sglang_scout.worker import host_memory

    pool = host_memory.free_pool_bytes() // host_memory.HUGE_PAGE_BYTES
    mode = host_memory.shmem_mode()
    text = f"{pool} free 2 MiB pages in the pool, shmem_enabled is {mode or 'unknown'}"
    values = {"free_pool_pages": pool, "shmem_enabled": mode}
    if pool or host_memory.shared_huge_pages_allowed():
        return Check("huge pages", OK, text, values=values)
    fix = "as root: echo advise > /sys/kernel/mm/transparent_hugepage/shmem_enabled"
    return Check(
        "huge pages", WARNING, text + "; host memory for KV uses pages of 4 KiB", fix, values
    )


def check_locked_memory() -> Check:
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return Check("locked memory", OK, "unlimited", values={"limit_bytes": None})
    why, without = [], []
    if machine.nvidia_gpus():
        why.append("a decode server with --device cuda page-locks all KV pages")
        without.append("--device cpu")
    if machine.has_rdma():
        why.append("RDMA transfer registers all KV pages")
        without.append("MOONCAKE_PROTOCOL=tcp")
    values = {"limit_bytes": limit}
    if not why:
        note = "more is not needed without a GPU or an RDMA device"
        return Check("locked memory", OK, f"{gib(limit)}; {note}", values=values)
    fix = (
        f"{', and '.join(why)}: set ulimit -l unlimited (LimitMEMLOCK=infinity of a service), "
        f"or use {' and '.join(without)}"
    )
    return Check("locked memory", WARNING, gib(limit), fix, values)
