"""The tensor-parallel ranks of this server, on SGLang's process groups.

Every rank makes the same calls in the same order, in the scheduler's thread.
"""

from __future__ import annotations

import functools
import logging
import mmap
import os
from collections.abc import Collection
from typing import Any

import msgspec
import torch

from sglang_scout.core.config import OffloadConfig
from sglang_scout.core.cpu_list import parse_cpu_list
from sglang_scout.plugin.launch import PROCESS_CPUS
from sglang_scout.plugin.release import adapter
from sglang_scout.worker.cpus import CpuPlan, deal_cpus, plan_cpus
from sglang_scout.worker.numa import cpus_by_node, near_cpus
from sglang_scout.worker.ring import MAX_NODES

logger = logging.getLogger(__name__)


class AttentionRanks:
    """The ranks that share a layer's heads; see :class:`engine.tensor_parallel.Ranks`."""

    def __init__(self) -> None:
        self._group = adapter.tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    def combine(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Sum or maximum of all ranks' ``x``, on the device."""
        if how == "sum":
            return self._group.all_reduce(x)
        largest, nccl = torch.distributed.ReduceOp.MAX, self._group.pynccl_comm
        if nccl is not None and not nccl.disabled:  # during SGLang's graph capture
            nccl.all_reduce(x, largest)
        else:
            torch.distributed.all_reduce(x, largest, self._group.device_group)
        return x

    def least(self, value: int) -> int:
        """The minimum of the ranks' values; also a barrier."""
        found = torch.tensor(value, dtype=torch.int64)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MIN, self._group.cpu_group)
        return int(found)

    def gather(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank. Numbers, strings, lists and dictionaries of them."""
        own = torch.frombuffer(bytearray(msgspec.json.encode(value)), dtype=torch.uint8)
        longest = -self.least(-len(own))
        padded = torch.full((longest,), ord(" "), dtype=torch.uint8)
        padded[: len(own)] = own
        found = [torch.empty_like(padded) for _ in range(self.size)]
        torch.distributed.all_gather(found, padded, self._group.cpu_group)
        return [msgspec.json.decode(one.numpy().tobytes()) for one in found]

    def shared_words(self, count: int) -> torch.Tensor:
        """``[count]`` int64 zeros in memory that all ranks map; they are on one machine.

        It is not in the file system, so nothing is left there whichever process is killed.
        """
        fd = os.memfd_create("sglang-scout-ranks", os.MFD_CLOEXEC) if self.rank == 0 else -1
        try:
            if fd >= 0:
                os.ftruncate(fd, 8 * count)
            owner, number = self.gather([os.getpid(), fd])[0]
            if fd < 0:
                fd = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
            words = torch.frombuffer(mmap.mmap(fd, 8 * count), dtype=torch.int64)
            self.least(0)  # until then the owner's descriptor must stay open
            return words
        finally:
            if fd >= 0:
                os.close(fd)


def cpu_plan(runner: Any, config: OffloadConfig) -> CpuPlan:
    """CPUs of this rank's attention threads, its share of those configured or of all that the server may use, and the
    table of all CPUs."""
    ranks, share, allowed = AttentionRanks(), None, set(PROCESS_CPUS)
    near = _near_cpus(runner) if torch.device(runner.device).type == "cuda" else None
    if ranks.size > 1:
        home = sorted(_omp_cpus(runner) if near is None else near)
        found = ranks.gather([sorted(PROCESS_CPUS), home])
        allowed = {cpu for cpus, _ in found for cpu in cpus}
        homes = [home or cpus for cpus, home in found]
        share = deal_cpus(config.cpus or allowed, homes)[ranks.rank]
    plan = plan_cpus(allowed, near, config.cpus, share)
    if plan.warning:
        _warn_once(
            f"--kv-offload: attention threads are far from the GPU: {plan.warning}; allow them (cpuset, taskset)"
        )
    return plan


_warn_once = functools.cache(logger.warning)  # the pools ask too


def worker_nodes(cpus: Collection[int]) -> dict[int, list[int]]:
    """The CPUs of this rank's worker by NUMA node; the host pages are divided among these nodes.

    Empty if unknown, and if other ranks' workers have another number of nodes: the allocation order of pages depends on
    it, and must be the same on all ranks.
    """
    ranks, found = AttentionRanks(), cpus_by_node(cpus)
    counts = ranks.gather(len(found)) if ranks.size > 1 else [len(found)]
    if len(found) <= 1 or (len(set(counts)) == 1 and len(found) <= MAX_NODES):
        return found
    logger.warning(
        "--kv-offload-cpus: the CPUs of the CPU attention processes are on %s NUMA nodes, by rank, but pages can be "
        "divided among at most %d, and the same number on each rank. The system decides where host pages are; name "
        "CPUs of fewer nodes",
        counts,
        MAX_NODES,
    )
    return {}


def _near_cpus(runner: Any) -> list[int]:
    """CPUs close to this rank's GPU; empty if unknown."""
    gpu = torch.cuda.get_device_properties(runner.gpu_id)
    return near_cpus(f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0")


def _omp_cpus(runner: Any) -> tuple[int, ...]:
    """SGLANG_CPU_OMP_THREADS_BIND, or the NUMA node that SGLang runs this rank on."""
    return parse_cpu_list(adapter.omp_cpus(runner), set(range(1 << 16)))


def nodes_of_worker(runner: Any, config: OffloadConfig) -> tuple[list[int], list[int]]:
    """The nodes that this rank's pages are bound to, none if unknown, and how many of its worker's CPUs are on each
    node that the pages are divided among."""
    cpus = cpu_plan(runner, config).threads
    nodes = worker_nodes(cpus)
    return list(nodes), [len(of_node) for of_node in nodes.values()] or [len(cpus)]
