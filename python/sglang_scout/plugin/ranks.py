"""The tensor-parallel ranks of this server, on SGLang's process groups, and each one's CPUs and host memory.

Every rank makes the same calls in the same order, in the scheduler's thread.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections import Counter
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group

from sglang_scout.core import numa
from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.core.numa import CpuPlan, deal_cpus, parse_cpu_list, plan_cpus
from sglang_scout.engine.device import LOCK_CHUNK_BYTES, lock_memory
from sglang_scout.engine.memory import MIN_PAGES, ServerSize
from sglang_scout.plugin.hooks import adapter
from sglang_scout.plugin.launch import PROCESS_CPUS, parse
from sglang_scout.plugin.model import model_shape, rank_policy
from sglang_scout.worker import host_memory
from sglang_scout.worker.host_memory import LAST_RESORT
from sglang_scout.worker.ring import MAX_NODES

logger = logging.getLogger(__name__)


class AttentionRanks:
    """The ranks that share a layer's heads; see :class:`engine.stores.Ranks`."""

    def __init__(self) -> None:
        self._group = get_attn_tp_group()
        self.rank: int = self._group.rank_in_group
        self.size: int = self._group.world_size

    def combine(self, x: torch.Tensor, how: str) -> torch.Tensor:
        """Sum or maximum of all ranks' ``x``, on the device."""
        if how == "sum":
            return self._group.all_reduce(x)
        torch.distributed.all_reduce(x, torch.distributed.ReduceOp.MAX, self._group.device_group)
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
        if fd >= 0:
            os.ftruncate(fd, 8 * count)
        owner, number = self.gather([os.getpid(), fd])[0]
        if fd < 0:
            fd = os.open(f"/proc/{owner}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
        words = torch.frombuffer(mmap.mmap(fd, 8 * count), dtype=torch.int64)
        self.least(0)  # until then the owner's descriptor must stay open
        os.close(fd)
        return words


class RankCpus(NamedTuple):
    """The CPUs of a rank's attention process."""

    plan: CpuPlan
    by_node: dict[int, list[int]]  # by NUMA node, if its pages are divided among those nodes


def rank_cpus(runner: Any, config: OffloadConfig, ranks: AttentionRanks) -> RankCpus:
    """This rank's share of the configured CPUs, or of all that the server may use."""
    near = share = None
    if torch.device(runner.device).type == "cuda":
        gpu = torch.cuda.get_device_properties(runner.gpu_id)
        place = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        near = numa.near_cpus(place)  # empty if unknown
    allowed = set(PROCESS_CPUS)
    if ranks.size > 1:
        home = near
        # Without a GPU SGLANG_CPU_OMP_THREADS_BIND, or the NUMA node that SGLang runs this rank on.
        if home is None:
            home = sorted(parse_cpu_list(str(adapter.omp_cpus(runner)), set(range(1 << 16))))
        found = ranks.gather([sorted(PROCESS_CPUS), home])
        allowed = {cpu for cpus, _ in found for cpu in cpus}
        homes = [home or cpus for cpus, home in found]
        share = deal_cpus(config.cpus or allowed, homes)[ranks.rank]
    plan = plan_cpus(allowed, near, config.cpus, share)
    return RankCpus(plan, _by_node(plan.threads, ranks))


def _by_node(cpus: list[int], ranks: AttentionRanks) -> dict[int, list[int]]:
    """Nothing if unknown, or if the ranks' CPUs are on different numbers of nodes: the order in which pages are
    allocated depends on it, and must be the same on all ranks."""
    found = numa.cpus_by_node(cpus)
    counts = ranks.gather(len(found)) if ranks.size > 1 else [len(found)]
    if len(found) <= 1 or (len(set(counts)) == 1 and len(found) <= MAX_NODES):
        return found
    logger.warning(
        f"--kv-offload-cpus: the CPUs of the CPU attention processes are on {counts} NUMA nodes, by rank, but pages "
        f"can be divided among at most {MAX_NODES}, and the same number on each rank. The system decides where host "
        "pages are; name CPUs of fewer nodes"
    )
    return {}


def size_of(runner: Any, max_batch: int) -> tuple[ServerSize, RankCpus]:
    """What the memory of this rank follows from; ``runner`` is SGLang's, with a loaded model."""
    config, shape = parse(runner.server_args), model_shape(runner)
    cpus = rank_cpus(runner, config, AttentionRanks())
    policy, context = rank_policy(config, shape), runner.model_config.context_len
    # How many CPUs are on each node that the pages are divided among.
    counts = [len(of_node) for of_node in cpus.by_node.values()] or [len(cpus.plan.threads)]
    return ServerSize(config, policy, shape, max_batch, context, counts), cpus


def host_bytes(
    size: ServerSize, nodes: list[int], ranks: AttentionRanks, device_bytes: int | None
) -> int:
    """Bytes for the KV pages of this rank: its share of ``--kv-offload-host-gb``, or of the default.

    Args:
        nodes: NUMA nodes that the pages are divided among, if any.
        device_bytes: for digests and resident pages on a device with separate memory; None: the CPU device.
    """
    host_gb, page_bytes = size.config.host_gb, size.page_bytes
    if host_gb is not None:
        total = int(host_gb * 2**30)
    else:
        total = default_bytes(size, nodes, ranks, device_bytes)
        logger.info("--kv-offload-host-gb not given: %.1f GiB for KV pages", total / 2**30)
    of_pages = total // ranks.size
    if of_pages < MIN_PAGES * page_bytes:
        given = "not given" if host_gb is None else format(host_gb, "g")
        raise ConfigError(
            f"--kv-offload-host-gb ({given}): {total / 2**30:.6f} GiB hold {of_pages // page_bytes} of the "
            f"{MIN_PAGES} pages of {page_bytes} bytes that each rank needs; raise it, or free memory"
        )
    return of_pages


def default_bytes(
    size: ServerSize, nodes: list[int], ranks: AttentionRanks, device_bytes: int | None
) -> int:
    """For the KV pages of all ranks: a share of what CPU attention leaves of host memory, or the pool of huge pages;
    at most the pages whose digests fit on the devices."""
    # The most pages with which every rank's arena is in the pool.
    most = size.arena(host_memory.free_pool_bytes() // size.page_bytes + 2)
    in_pool = host_memory.max_pages_in_pool(most, nodes, ranks.size)
    of_pool = ranks.least(_bytes_of(size, ranks, in_pool))
    worker = ranks.size * sum(nbytes for *_, nbytes in size.worker)
    left = ranks.least(_available_bytes(nodes, ranks) - worker)
    if max(left, of_pool) <= 0:
        raise ConfigError(
            f"--max-running-requests {size.max_batch}: ring and partial results of CPU attention need "
            f"{worker / 2**30:.2f} GiB, {-left / 2**30:.2f} more than are available; "
            f"lower it, or name fewer CPUs in --kv-offload-cpus; {LAST_RESORT}"
        )
    total = int(max(left, 0) * DEFAULT_HOST_SHARE)
    # A pool of less than half of that is somebody else's.
    total = of_pool if 2 * of_pool >= total else total
    return total if device_bytes is None else _with_digests(size, ranks, device_bytes, total)


def _bytes_of(size: ServerSize, ranks: AttentionRanks, num_pages: int) -> int:
    """KV of all ranks, without SGLang's padding page."""
    return ranks.size * max(num_pages - 1, 0) * size.page_bytes


def _with_digests(size: ServerSize, ranks: AttentionRanks, device_bytes: int, total: int) -> int:
    """``total``, or less: the KV of the pages whose digests fit on the devices beside resident pages."""
    room = size.room(device_bytes)
    least = ranks.least(room.num_pages)
    if least < MIN_PAGES + 1:
        raise ConfigError(
            f"--kv-offload {size.config.policy}: the {(device_bytes - size.step_bytes) / 2**30:.2f} GiB of device "
            f"memory left for digests and resident pages hold {least} of the {MIN_PAGES + 1} pages that each rank "
            "needs; raise --mem-fraction-static"
        )
    of_digests = _bytes_of(size, ranks, least)
    if of_digests >= total:
        return total
    fits = room.num_slots >= size.wanted_slots
    short = (
        f"; a budget for each of --max-running-requests {size.max_batch} would need {size.wanted_slots}: lower that "
        "flag, or raise --mem-fraction-static"
    )
    logger.log(
        logging.INFO if fits else logging.WARNING,
        f"--kv-offload-host-gb not given: limited to {of_digests / 2**30:.1f} GiB of KV pages, whose digests fit on "
        f"the device beside {room.num_slots} resident slots{'' if fits else short}",
    )
    return of_digests


def _available_bytes(nodes: list[int], ranks: AttentionRanks) -> int:
    """Memory for the pages of all ranks if each had as much as this one: of the NUMA nodes that they are bound to, if
    any. A node that several ranks' pages are bound to is divided among them."""
    bound_to = ranks.gather(nodes) if ranks.size > 1 else [nodes]
    available = host_memory.available_bytes()
    if len(numa.nodes()) <= 1 or not nodes:
        return available
    users = Counter(node for of_rank in bound_to for node in of_rank)
    of_nodes = (host_memory.available_bytes(node) // users[node] for node in nodes)
    return min(available, ranks.size * sum(of_nodes))


def lock(address: int, nbytes: int, message: str) -> None:
    """Page-lock memory that the device uses, until this process ends.

    Args:
        message: of the refusal, with a place for the error.
    """

    def progress(done: int) -> None:
        if nbytes > LOCK_CHUNK_BYTES:
            of = nbytes / 2**30
            logger.info("--kv-offload: %.0f of %.0f GiB are page-locked", done / 2**30, of)

    try:
        lock_memory(address, nbytes, progress)
    except MemoryError as error:
        raise ConfigError(message.format(error)) from None
