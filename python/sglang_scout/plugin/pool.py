"""KV pools, as subclasses of SGLang's.

Digests go through the KV transfer itself: SGLang halves the list of buffers into keys and values, so ``[K.., first..,
V.., second..]`` carries the two parts of a page's digest with its K and V, each buffer with its own item length. Those
of hints (``engine/hints.py``) follow, if any. Groups 0, 1 and 2 are K and V, digests, hints.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_scout.core.errors import ConfigError
from sglang_scout.engine.device import LOCK_CHUNK_BYTES, lock_memory
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.memory import MemoryPlan, ServerSize
from sglang_scout.engine.policy import SelectionRule
from sglang_scout.engine.stores import HostPages, ModelShape, context_pages
from sglang_scout.plugin.allocator import ScoutAllocator
from sglang_scout.plugin.ranks import RankCpus
from sglang_scout.plugin.release import VERSION, adapter
from sglang_scout.worker.arena import Arena, PageChecksums

logger = logging.getLogger(__name__)

BufferInfos = tuple[list[int], list[int], list[int]]


def with_digests(infos: BufferInfos, digests: DigestPool) -> BufferInfos:
    """Append digests and hints to K and V, in lists of the buffers' pointers, bytes and item bytes."""
    middle = len(infos[0]) // 2
    groups = [digests.parts, *([digests.hints.parts] if digests.hints else [])]

    def put(values: list[int], of: Callable[[torch.Tensor], int]) -> list[int]:
        first, second = (
            [of(t) for part in parts for t in part] for parts in zip(*groups, strict=True)
        )
        return values[:middle] + first + values[middle:] + second

    about = torch.Tensor.data_ptr, lambda t: t.nbytes, lambda t: t[0].nbytes
    pointers, lengths, items = map(put, infos, about)
    return pointers, lengths, items


def num_layers(item_lens: list[int]) -> int:
    """Layers of a pool, from the item bytes of its buffers: those of K and V are equal, all others much smaller."""
    return item_lens.count(item_lens[0]) // 2


def same_items(items: list[int], target: list[int], layers: int, group: int) -> bool:
    """Whether the buffers of digests and of ``group`` at ``target`` have the item bytes of ``items``: each part of a
    group is one allocation, in which a layer has one item per page of that server."""
    if layers == 1:
        return False
    sizes = [n for g in (1, group) for n in of_groups(items, layers, g)[::layers]]
    starts = [of_groups(target, layers, g) for g in (1, group)]
    lengths = [x[i + 1] - x[i] for x in starts for i in (0, layers)]
    return all(
        0 < n * sizes[0] == lengths[0] * size for n, size in zip(lengths, sizes, strict=True)
    )


def of_groups(values: list[int], layers: int, first: int, count: int = 1) -> list[int]:
    """The part of ``count`` groups from ``first`` on, of a list made by :func:`with_digests`."""
    middle, begin, end = len(values) // 2, first * layers, (first + count) * layers
    return values[begin:end] + values[middle + begin : middle + end]


class HostKVPool(MHATokenToKVPool):
    """Decode side: all KV in one memory file that the attention process maps too, and the digests of its pages.

    Args:
        server_size, plan: of this rank.
        cpus: of its attention process; the arena's pages are bound to their NUMA nodes.
    """

    def __init__(
        self,
        *args: Any,
        server_size: ServerSize,
        plan: MemoryPlan,
        cpus: RankCpus,
        **kwargs: Any,
    ) -> None:
        self.plan, self.cpus = plan, cpus
        super().__init__(*args, **kwargs)
        self.shape, rule = server_size.shape, server_size.policy.rule
        context = context_pages(self.arena, self.shape)
        checksums = PageChecksums(self.arena) if plan.arena.checksums else None
        self.host_pages = HostPages(self.shape, self.k_buffer, self.v_buffer, context, checksums)
        hints = plan.bytes_of("hints") > 0
        self.digests = DigestPool(self.shape, plan.num_pages, self.device, rule, hints)

    def _create_buffers(self) -> None:
        adapter.create_buffers(self, super()._create_buffers)

    def _create_buffers_normal(self) -> None:
        self.arena = Arena.create(self.plan.arena, numa_nodes=list(self.cpus.by_node))
        if torch.device(self.device).type == "cuda":
            lock(
                self.arena.address, self.arena.nbytes, "--kv-offload-host-gb: {}, or lower the flag"
            )
        size = (-1, self.head_num, self.head_dim)
        # 16-bit floats are uint16 in the arena, because numpy has no bfloat16; SGLang stores fp8 as bytes.
        self.k_buffer, self.v_buffer = (
            [
                torch.from_numpy(of(i)).view(self.store_dtype).view(size)
                for i in range(self.layer_num)
            ]
            for of in (self.arena.k_pages, self.arena.v_pages)
        )

    def get_cpu_copy(self, indices: torch.Tensor, **_: Any) -> Any:
        """Of a request that SGLang retracts, in whole pages, which are copied many times faster than tokens."""
        pages, checksums = self._pages_of(indices), self.host_pages.checksums
        words = None if checksums is None else checksums.taken(pages)
        return self.host_pages.save(pages), words

    def copy_bytes(self, tokens: int) -> int:
        """Size of the copy made by :meth:`get_cpu_copy`."""
        pages = -(-tokens // self.page_size)
        return pages * self.page_size * sum(b[0].nbytes for b in (*self.k_buffer, *self.v_buffer))

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor, **_: Any) -> None:
        """The request resumes, in other pages, with equally many tokens."""
        pages, (kept, words) = self._pages_of(indices), kv_cache_cpu
        self.host_pages.restore(pages, kept)
        if words is not None:
            self.host_pages.checksums.put(pages, words)

    def _pages_of(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """Pages of a request's tokens, which fill them in order; waits for the writes of running steps."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()
        return indices[:: self.page_size].cpu().numpy().astype(np.int64) // self.page_size

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


class DigestKVPool(MHATokenToKVPool):
    """Prefill side: SGLang's pool, with digests that are sent along."""

    def add_digests(self, shape: ModelShape, rule: SelectionRule, hints: bool) -> None:
        """Before SGLang asks for the buffers to be transferred."""
        self.shape, self.rule = shape, rule
        self.host_pages = HostPages(shape, self.k_buffer, self.v_buffer)
        pages = self.host_pages.num_pages
        self.digests = DigestPool(shape, pages, self.device, rule, hints)

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


def pools_target(name: str) -> dict[str, str]:
    """The hook's target: a method of the class that builds the pools, by release."""
    return {
        "0.5.15.post1": f"model_executor.model_runner_kv_cache_mixin.ModelRunnerKVCacheMixin.{name}",
        "0.5.23": f"mem_cache.kv_cache_configurator.KVCacheConfigurator.{name}",
    }


def build_pools(
    build: Callable[[], Any], builder: Any, make_pool: Callable[..., Any] = MHATokenToKVPool
) -> tuple[Any, Any, ScoutAllocator]:
    """Build SGLang's pools with our classes in place of its own, and verify that they were used.

    Args:
        build: SGLang's function, a method of ``builder``.
        make_pool: a class of pools, or a partial call of one.
    Returns:
        What ``build`` returned, the KV pool, the allocator.
    """
    module = adapter.POOLS_MODULE
    stock = module.MHATokenToKVPool, module.PagedTokenToKVPoolAllocator
    module.MHATokenToKVPool, module.PagedTokenToKVPoolAllocator = make_pool, ScoutAllocator
    try:
        result = build()
    finally:
        module.MHATokenToKVPool, module.PagedTokenToKVPoolAllocator = stock
    pool, allocator = adapter.built_pools(builder, result)
    pool_class = getattr(make_pool, "func", make_pool)
    if not isinstance(pool, pool_class) or not isinstance(allocator, ScoutAllocator):
        raise RuntimeError(
            f"--kv-offload: SGLang built {type(pool).__name__} with {type(allocator).__name__}, "
            f"expected {pool_class.__name__} with {ScoutAllocator.__name__}; serve another model, or drop the flags "
            "that choose another KV pool"
        )
    logger.info("--kv-offload: SGLang %s, %s", VERSION, pool_class.__name__)
    return result, pool, allocator


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
