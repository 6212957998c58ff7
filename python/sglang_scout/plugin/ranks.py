"""The tensor-parallel ranks of this server, on SGLang's process groups, and each one's CPUs and host memory.

Every rank makes the same calls in the same order, in the scheduler's thread.
"""

from __future__ import annotations

import logging
import math
import mmap
import os
from collections import Counter
from dataclasses import replace
from typing import Any, NamedTuple

import msgspec
import torch
from sglang.srt.distributed.parallel_state import get_attn_tp_group

from sglang_scout.core import numa
from sglang_scout.core.config import DEFAULT_HOST_SHARE, OffloadConfig
from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.device import LOCK_CHUNK_BYTES, lock_limit, lock_memory
from sglang_scout.engine.memory import MIN_PAGES, MemoryPlan, ServerSize, check_memory, largest
from sglang_scout.plugin.hooks import adapter, hook, pools_target
from sglang_scout.plugin.launch import PROCESS_CPUS, parse
from sglang_scout.plugin.model import model_shape, rank_policy
from sglang_scout.worker import host_memory
from sglang_scout.worker.host_memory import gib
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
        """``[count]`` int64 zeros in memory that all ranks map; they are on one machine. It is in no file system, so
        nothing is left there whichever process is killed."""
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
    plan: numa.CpuPlan
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
            home = sorted(numa.parse_cpu_list(str(adapter.omp_cpus(runner)), set(range(1 << 16))))
        found = ranks.gather([sorted(PROCESS_CPUS), home])
        allowed = {cpu for cpus, _ in found for cpu in cpus}
        homes = [home or cpus for cpus, home in found]
        share = numa.deal_cpus(config.cpus or allowed, homes)[ranks.rank]
    plan = numa.plan_cpus(allowed, near, config.cpus, share)
    by_node = numa.cpus_by_node(plan.threads)
    counts = ranks.gather(len(by_node)) if ranks.size > 1 else [len(by_node)]
    # The order in which pages are allocated depends on it, and must be the same on all ranks.
    if len(by_node) > 1 and (len(set(counts)) > 1 or len(by_node) > MAX_NODES):
        logger.warning(
            f"--kv-offload-cpus: host pages are not bound to NUMA nodes, so CPU attention may be slower: the ranks' "
            f"CPUs are on {counts} nodes; give each rank CPUs of equally many nodes, at most {MAX_NODES}"
        )
        by_node = {}
    return RankCpus(plan, by_node)


class RankMemory(NamedTuple):
    """What the memory of this rank follows from. ``device_bytes``: what a device with separate memory has for digests
    and resident pages; None: the CPU device."""

    ranks: AttentionRanks
    cpus: RankCpus
    size: ServerSize
    device_bytes: int | None

    def host_bytes(self) -> int:
        """Bytes for the KV pages of this rank: its share of ``--kv-offload-host-gb``, or of the default."""
        host_gb, page_bytes = self.size.config.host_gb, self.size.page_bytes
        if host_gb is not None:
            total = int(host_gb * 2**30)
        else:
            total = self.default_bytes()
            logger.info("--kv-offload-host-gb not given: %.1f GiB for KV pages", total / 2**30)
        of_pages = total // self.ranks.size
        if of_pages < MIN_PAGES * page_bytes:
            least = math.ceil(self.ranks.size * MIN_PAGES * page_bytes / 2**30 * 1000) / 1000
            raise ConfigError(
                f"--kv-offload-host-gb {total / 2**30:.4g}: less than {MIN_PAGES} host pages of {page_bytes} bytes for "
                f"each of {self.ranks.size} ranks; set it to at least {least}, or free memory"
            )
        return of_pages

    def default_bytes(self) -> int:
        """For the KV pages of all ranks: a share of what CPU attention leaves of host memory, or the pool of huge
        pages; at most the pages whose digests fit on the devices."""
        ranks, size = self.ranks, self.size
        # The most pages with which every rank's arena is in the pool, the first one being SGLang's padding.
        most = size.arena(host_memory.free_pool_bytes() // size.page_bytes + 2)
        in_pool = host_memory.max_pages_in_pool(most, list(self.cpus.by_node), ranks.size)
        of_pool = ranks.least(ranks.size * max(in_pool - 1, 0) * size.page_bytes)

        def memory_of(batch: int) -> int:
            return sum(nbytes for *_, nbytes in replace(size, max_batch=batch).worker)

        worker = ranks.size * memory_of(size.max_batch)
        left = ranks.least(self._available_bytes() - worker)
        if max(left, of_pool) <= 0:
            available = left + worker
            # Half of it, so that as much is left for pages.
            fitting = largest(size.max_batch, lambda n: 2 * ranks.size * memory_of(n) < available)
            raise ConfigError(
                f"--max-running-requests {size.max_batch}: host memory is short by {gib(-left)} for CPU attention; "
                f"{f'set it to {fitting}' if fitting else 'free memory'}, or give fewer CPUs in --kv-offload-cpus\n"
                f"  Needed: {gib(worker)}. {gib(available)} are available; {host_memory.LAST_RESORT}"
            )
        total = int(max(left, 0) * DEFAULT_HOST_SHARE)
        # A pool of less than half of that is somebody else's.
        total = of_pool if 2 * of_pool >= total else total
        return total if self.device_bytes is None else self._with_digests(total, self.device_bytes)

    def _with_digests(self, total: int, device_bytes: int) -> int:
        """``total``, or less: the KV of the pages whose digests fit on the devices beside resident pages."""
        size, room = self.size, self.size.room(device_bytes)
        least = self.ranks.least(room.num_pages)
        if least < MIN_PAGES + 1:
            check_memory(size, MIN_PAGES + 1, 2**62, device_bytes=device_bytes, shared=False)
            raise ConfigError(
                "--mem-fraction-static: too little is left on the GPU of another rank; raise it"
            )
        of_digests = self.ranks.size * (least - 1) * size.page_bytes
        if of_digests >= total:
            return total
        limited = f"--kv-offload-host-gb not given: limited to {of_digests / 2**30:.1f} GiB of KV pages, whose digests "
        limited += f"fit on the GPU beside {room.num_slots} resident pages"
        logger.info(limited)
        if room.num_slots < size.wanted_slots:
            fitting = (room.num_slots - size.budget_pages) // (size.budget_pages + 1)
            logger.warning(
                f"--max-running-requests {size.max_batch}: the GPU has memory for {room.num_slots} resident pages of "
                f"the {size.wanted_slots} that full budgets take, so more is left to the CPU; "
                f"{f'set it to {fitting}, or ' * (fitting > 0)}raise --mem-fraction-static"
            )
        return of_digests

    def _available_bytes(self) -> int:
        """For the pages of all ranks if each had as much as this one: of the NUMA nodes that they are bound to, if any.
        A node that several ranks' pages are bound to is divided among them."""
        ranks, nodes = self.ranks, list(self.cpus.by_node)
        bound_to = ranks.gather(nodes) if ranks.size > 1 else [nodes]
        available = host_memory.available_bytes()
        if len(numa.nodes()) <= 1 or not nodes:
            return available
        users = Counter(node for of_rank in bound_to for node in of_rank)
        of_nodes = (host_memory.available_bytes(node) // users[node] for node in nodes)
        return min(available, ranks.size * sum(of_nodes))

    def plan(self, num_pages: int) -> MemoryPlan:
        """Sizes of the stores. Raises ConfigError if they do not fit in host memory."""
        # Every rank reads both before any allocates.
        in_pool = not host_memory.pool_lacks(self.size.arena(num_pages), arenas=self.ranks.size)
        available = self.ranks.least(host_memory.available_bytes())
        device = {"device_bytes": self.device_bytes, "shared": self.device_bytes is None}
        own = {"in_pool": in_pool, "ranks": self.ranks.size}
        return check_memory(self.size, num_pages, available, **own, **device)


_memory: RankMemory | None = None


@hook(pools_target("_profile_available_bytes"), "around", roles="decode")
def around_profile_available_bytes(original, runner, *args, **kwargs) -> int:
    """Size the KV pool by host memory."""
    # All ranks must get the same number of pages, as they allocate the same ids.
    global _memory
    on_cuda = torch.device(runner.device).type == "cuda"
    # Digests and resident pages share the memory that SGLang would give to KV pages.
    device_bytes = original(runner, *args, **kwargs) if on_cuda else None
    ranks, shape = AttentionRanks(), model_shape(runner)
    config = parse(runner.server_args).of_rank(ranks.rank)
    cpus, policy = rank_cpus(runner, config, ranks), rank_policy(config, shape)
    # How many CPUs are on each node that the pages are divided among.
    counts = [len(of_node) for of_node in cpus.by_node.values()] or [len(cpus.plan.threads)]
    max_batch = adapter.resolved(runner.server_args).max_running_requests
    context_tokens = runner.model_config.context_len
    size = ServerSize(config, policy, shape, max_batch, context_tokens, counts)
    _memory = RankMemory(ranks, cpus, size, device_bytes)
    return _memory.host_bytes()


def rank_memory(max_batch: int) -> RankMemory:
    """Of this rank, once: SGLang has lowered the number of requests now that the page count is known."""
    global _memory
    memory, _memory = _memory, None  # the policy's weights may be gigabytes
    assert memory is not None
    return memory._replace(size=replace(memory.size, max_batch=max_batch))


def lock(address: int, nbytes: int, flag: str) -> None:
    """Page-lock memory that the device uses, until this process ends. ``flag``: begins a refusal."""

    def progress(done: int) -> None:
        if nbytes > LOCK_CHUNK_BYTES:
            logger.info(f"--kv-offload: {gib(done)} of {gib(nbytes)} are page-locked")

    try:
        lock_memory(address, nbytes, progress)
    except MemoryError as error:
        raise ConfigError(f"{flag}: {error}") from None


@hook(
    "distributed.device_communicators.mooncake_transfer_engine.MooncakeTransferEngine.batch_register",
    "around",
)
def around_batch_register(original, engine, pointers: list[int], lengths: list[int]) -> int:
    """End the server if the transfer engine rejects its memory; SGLang ignores that, and every transfer would
    fail."""
    # https://github.com/sgl-project/sglang/pull/33264 does so too.
    if not (error := original(engine, pointers, lengths)):
        return error
    no_rdma = "set --disaggregation-transfer-backend mooncake_tcp to work without RDMA"
    raise RuntimeError(
        f"--kv-offload: the transfer engine cannot register {len(pointers)} buffers of {gib(sum(lengths))} (error "
        f"{error}); {lock_limit() or no_rdma}\n  Its own log lines above name the first one. Or the network device has "
        "no room for them (max_mr and max_mr_size in ibv_devinfo -v): lower --kv-offload-host-gb. Buffers on a GPU "
        "need the kernel module nvidia_peermem, or a mooncake with CUDA and WITH_NVIDIA_PEERMEM=0"
    )
