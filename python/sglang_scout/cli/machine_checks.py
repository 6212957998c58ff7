"""``doctor``'s checks of the machine: CPUs, GPU, environment and memory."""

from __future__ import annotations

import os
import resource
from dataclasses import asdict, dataclass, field
from typing import Any

from sglang_scout.cli import machine
from sglang_scout.cli.table import gib
from sglang_scout.core.cpu_list import ranges

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
    """

    name: str
    state: str
    found: str
    fix: str = ""
    values: dict[str, Any] = field(default_factory=dict)


def check_cpus() -> Check:
    cpus = sorted(os.sched_getaffinity(0))
    nodes, quota = machine.numa_nodes(), machine.cpu_quota()
    text = f"{len(cpus)} for this process ({ranges(cpus)})"
    values = {"cpus": cpus, "numa_nodes": {str(n): of for n, of in nodes.items()}, "quota": quota}
    if quota is not None and quota < len(cpus):
        fix = "give --kv-offload-cpus no more CPUs than the quota, or raise it"
        return Check("cpus", WARNING, f"{text}, but a quota of {quota:g}", fix, values)
    if len(cpus) < 2:
        fix = "the worker and the server share one CPU; give the process more"
        return Check("cpus", WARNING, text, fix, values)
    if len(nodes) > 1:
        listed = "; ".join(f"{node}: CPUs {ranges(of)}" for node, of in nodes.items())
        text += f", {len(nodes)} NUMA nodes ({listed}); with CPUs of several, host pages are divided among them"
        near = [gpu.numa_node for gpu in machine.nvidia_gpus() if gpu.numa_node in nodes]
        which = f"node {near[0]}, the GPU's, alone" if near else f"node {min(nodes)} alone"
        text += f"; {which} is --kv-offload-cpus {ranges(nodes[(near or [min(nodes)])[0]])}"
    return Check("cpus", OK, text, values=values)


def check_gpu() -> Check:
    gpus = machine.nvidia_gpus()
    values: dict[str, Any] = {"gpus": [asdict(gpu) for gpu in gpus]}
    if not gpus:
        return Check("gpu", OK, "none; servers run with --device cpu", values=values)
    found = ", ".join(f"{gpu.address} on node {gpu.numa_node}" for gpu in gpus)
    count, why = machine.cuda_devices()
    values["cuda_devices"] = count
    if not count:
        fix = "NVIDIA's driver, and in a container access to the device; or --device cpu"
        return Check("gpu", WARNING, f"{found}, but torch sees no CUDA device ({why})", fix, values)
    note = f"; torch sees {count}: --device cuda, which has not been tried on a GPU (docs/gpu.md)"
    return Check("gpu", OK, found + note, values=values)


def check_environment() -> Check:
    """The variables without which a manually started server fails at start."""
    wanted = {} if machine.nvidia_gpus() else {"SGLANG_USE_CPU_ENGINE": "1"}
    if not machine.has_rdma():
        wanted["MOONCAKE_PROTOCOL"] = "tcp"
    missing = {name: value for name, value in wanted.items() if not os.environ.get(name)}
    if not missing:
        return Check("environment", OK, "what servers need is set", values={"missing": {}})
    exports = " ".join(f"{name}={value}" for name, value in missing.items())
    found = f"{' and '.join(missing)} not set; a server that you start by hand ends without them"
    fix = f"source scripts/cpu_env.sh, or export {exports}"
    return Check("environment", WARNING, found, fix, {"missing": missing})


def check_memory() -> Check:
    from sglang_scout.worker.host_memory import available_bytes, bytes_now

    available, now = available_bytes(), bytes_now()
    text = f"{gib(available)} available, {gib(now)} at the moment; half for KV pages by default, or a huge page pool"
    values = {"available_bytes": available, "available_now_bytes": now}
    if available < SMALL_MEMORY_BYTES:
        fix = "two servers need some GiB beside the KV pages; free memory"
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
    return Check("huge pages", WARNING, text + "; KV uses 4 KiB pages", fix, values)


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
        note = "not needed without a GPU or an RDMA device"
        return Check("locked memory", OK, f"{gib(limit)}; {note}", values=values)
    fix = f"{', and '.join(why)}: ulimit -l unlimited (LimitMEMLOCK=infinity of a service), or {' and '.join(without)}"
    return Check("locked memory", WARNING, gib(limit), fix, values)
