"""KV pools and their allocator, as subclasses of SGLang's.

The step boundary needs the ids of new pages on the host. SGLang's own free lists are on the device, so reading an id
would wait for all launched work; the allocator's are on the host.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_scout.engine.digests import DigestPool
from sglang_scout.engine.memory import MemoryPlan
from sglang_scout.engine.requests import hints_of
from sglang_scout.engine.stores import HostPages, context_pages
from sglang_scout.plugin.hooks import VERSION, adapter
from sglang_scout.plugin.ranks import RankMemory, lock
from sglang_scout.worker.arena import Arena, PageChecksums

logger = logging.getLogger(__name__)

NODE_RUN_PAGES = 8
"""Consecutive pages that a request gets from one NUMA node before the next node: 256 tokens."""
BufferInfos = tuple[list[int], list[int], list[int]]


def alternate_nodes(pages: torch.Tensor, stripe_pages: int) -> torch.Tensor:
    """Free ``pages`` ``[n]`` in an order in which the first ones, however many, are spread evenly over the NUMA nodes:
    page i is on node ``i // stripe_pages``. Runs of ``NODE_RUN_PAGES`` stay together, as the KV transfer sends
    consecutive pages in one piece.
    """
    pages = torch.sort(pages).values
    _, counts = torch.unique_consecutive(pages // stripe_pages, return_counts=True)
    begins = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    place_in_node = torch.arange(len(pages), device=pages.device) - begins
    return pages[torch.argsort(place_in_node // NODE_RUN_PAGES, stable=True)]


def _synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


class ScoutAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's page allocator with its lists on the host; results are on ``device``. Pages that were freed are sorted
    in when the others run out, as SGLang does on the servers of a pair (``need_sort``)."""

    listener: Any = None  # an engine.pages.Pages, told of every page allocated or freed
    # [B] page that each row of the last alloc_decode has opened, -1: none.
    opened: npt.NDArray[np.int64]

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self.free_pages) - len(self.release_pages)

    def _set_free(self, pages: torch.Tensor) -> None:
        arena = getattr(self._kvcache, "arena", None)
        if arena is not None and arena.spec.num_nodes > 1:
            pages = alternate_nodes(pages, arena.spec.stripe_pages)
        self.free_pages, self.release_pages = pages, torch.empty(0, dtype=torch.int64)

    def clear(self) -> None:
        self._set_free(torch.arange(1, self.num_pages + 1))
        self._held_back: list[torch.Tensor] | None = None  # freed within a group
        if self.listener is not None:
            self.listener.clear()

    def available_size(self) -> int:
        return (len(self.free_pages) + len(self.release_pages)) * self.page_size

    def get_all_free_pages(self) -> torch.Tensor:
        return torch.cat((self.free_pages, self.release_pages))

    def merge_and_sort_free(self) -> None:
        if len(self.release_pages):
            self._set_free(self.get_all_free_pages().sort().values)

    def _take(self, count: int, in_order: bool = False) -> torch.Tensor | None:
        """The next ``count`` free pages, or None if there are fewer. Written ``in_order`` with steps, or by the KV
        transfer, for which steps that may still write to them have to end."""
        if count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        taken, self.free_pages = self.free_pages[:count], self.free_pages[count:]
        if count and self.listener is not None:
            self.listener.allocate_pages(taken.numpy().copy())
            if not in_order and self.listener.may_be_written(taken.numpy()):
                _synchronize(self.device)
        return taken

    def alloc(self, need_size: int) -> torch.Tensor | None:
        taken = self._take(need_size // self.page_size)
        if taken is None:
            return None
        locations = taken[:, None] * self.page_size + torch.arange(self.page_size)
        return self._result(locations.flatten())

    def alloc_extend(
        self, prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, last_loc, *_, **__
    ) -> torch.Tensor | None:
        size = self.page_size
        opened = (seq_lens_cpu + size - 1) // size - (prefix_lens_cpu + size - 1) // size
        taken = self._take(int(opened.sum()))
        if taken is None:
            return None
        inside = bool((prefix_lens_cpu % size).any())  # the prefix's last page continues
        last = last_loc.cpu() if inside else torch.zeros_like(prefix_lens_cpu)
        # SGLang's own function for the host takes milliseconds for a long prompt.
        pieces, slots = [], (taken[:, None] * size + torch.arange(size)).flatten()
        for row, count in enumerate(opened.tolist()):
            begin, end = int(prefix_lens_cpu[row]), int(seq_lens_cpu[row])
            rest = min(-begin % size, end - begin)
            pieces += int(last[row]) + 1 + torch.arange(rest), slots[: end - begin - rest]
            slots = slots[count * size :]
        return self._result(torch.cat(pieces))

    def alloc_decode(self, seq_lens, seq_lens_cpu, last_loc) -> torch.Tensor | None:
        opens = (seq_lens_cpu - 1) % self.page_size == 0
        taken = self._take(int(opens.sum()), in_order=True)
        if taken is None:
            return None
        pages = torch.full((len(opens),), -1, dtype=torch.int64)
        pages[opens] = taken
        self.opened = pages.numpy()
        on_device = self._result(pages)
        return torch.where(on_device >= 0, on_device * self.page_size, last_loc.long() + 1)

    def free(self, free_index: torch.Tensor) -> None:
        if free_index.numel() == 0:
            return
        if self._held_back is not None:
            self._held_back.append(free_index.clone())  # the caller may overwrite it
            return
        pages = torch.unique(free_index.cpu() // self.page_size)
        self.release_pages = torch.cat((pages, self.release_pages))
        if self.listener is not None:
            self.listener.free_pages(pages.numpy())

    def free_page_ids(self, page_ids: torch.Tensor) -> None:
        self.free(page_ids * self.page_size)

    def free_group_begin(self) -> None:
        self._held_back = []

    def free_group_end(self) -> None:
        held_back, self._held_back = self._held_back, None
        if held_back:
            self.free(torch.cat(held_back))

    def _result(self, locations: torch.Tensor) -> torch.Tensor:
        if torch.device(self.device).type == "cpu":
            return locations
        return locations.pin_memory().to(self.device, non_blocking=True)


class DigestKVPool(MHATokenToKVPool):
    """SGLang's pool, with ``digests`` that are sent along; set before it is asked for its buffers."""

    digests: DigestPool

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


def with_digests(infos: BufferInfos, digests: DigestPool) -> BufferInfos:
    """The buffers' pointers, bytes and item bytes with those of digests, and of hints (``engine/requests.py``).

    SGLang halves the lists into keys and values, so ``[K.., first.., V.., second..]`` sends the two parts of a page's
    digest with its K and V, each buffer with its own item length. Groups 0, 1 and 2 are K and V, digests, hints.
    """
    middle = len(infos[0]) // 2
    groups = [digests.parts, *([digests.hints.parts] if digests.hints else [])]
    first, second = ([t for part in parts for t in part] for parts in zip(*groups, strict=True))

    def put(values: list[int], of: Callable[[torch.Tensor], int]) -> list[int]:
        return [*values[:middle], *map(of, first), *values[middle:], *map(of, second)]

    of_buffers = torch.Tensor.data_ptr, lambda t: t.nbytes, lambda t: t[0].nbytes
    pointers, lengths, items = map(put, infos, of_buffers)
    return pointers, lengths, items


class HostKVPool(DigestKVPool):
    """Decode side: all KV in one memory file that the attention process maps too, bound to the NUMA nodes of its CPUs,
    and the digests of its pages."""

    def __init__(self, *args: Any, memory: RankMemory, plan: MemoryPlan, **kwargs: Any) -> None:
        size, self.ranks, self.cpus, self.plan = memory.size, memory.ranks, memory.cpus, plan
        super().__init__(*args, **kwargs)
        self.config, self.policy, self.shape = size.config, size.policy, size.shape
        self.page_bytes = size.page_bytes
        context = context_pages(self.arena, self.shape)
        checksums = PageChecksums(self.arena) if plan.arena.checksums else None
        self.host_pages = HostPages(self.shape, self.k_buffer, self.v_buffer, context, checksums)
        sizes = self.shape, plan.num_pages
        kind = hints_of(rule := self.policy.rule)
        self.digests = DigestPool(*sizes, self.device, rule, kind and kind(*sizes))

    def _create_buffers(self) -> None:
        adapter.create_buffers(self, super()._create_buffers)

    def _create_buffers_normal(self) -> None:
        self.arena = arena = Arena.create(self.plan.arena, numa_nodes=list(self.cpus.by_node))
        if torch.device(self.device).type == "cuda":
            lock(arena.address, arena.nbytes, "--kv-offload-host-gb")

        def plane(pages: npt.NDArray[Any]) -> torch.Tensor:
            """16-bit floats are uint16 in the arena, because numpy has no bfloat16; SGLang stores fp8 as bytes."""
            of_tokens = torch.from_numpy(pages).view(self.store_dtype)
            return of_tokens.view(-1, self.head_num, self.head_dim)

        self.k_buffer = [plane(arena.k_pages(layer)) for layer in range(self.layer_num)]
        self.v_buffer = [plane(arena.v_pages(layer)) for layer in range(self.layer_num)]

    def get_cpu_copy(self, indices: torch.Tensor, **_: Any) -> Any:
        """Of a request that SGLang retracts, in whole pages, which are copied many times faster than tokens."""
        pages, checksums = self._pages_of(indices), self.host_pages.checksums
        words = None if checksums is None else checksums.taken(pages)
        return self.host_pages.save(pages), words

    def copy_bytes(self, tokens: int) -> int:
        return -(-tokens // self.page_size) * self.page_bytes

    def load_cpu_copy(self, kv_cache_cpu: Any, indices: torch.Tensor, **_: Any) -> None:
        """The request resumes, in other pages, with equally many tokens."""
        pages, (kept, words) = self._pages_of(indices), kv_cache_cpu
        self.host_pages.restore(pages, kept)
        if words is not None:
            self.host_pages.checksums.put(pages, words)

    def _pages_of(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """Pages of a request's tokens, which fill them in order; waits for the writes of running steps."""
        _synchronize(self.device)
        return indices[:: self.page_size].cpu().numpy().astype(np.int64) // self.page_size


def build_pools(
    build: Callable[[], Any], builder: Any, pool_class: type = MHATokenToKVPool, **options: Any
) -> tuple[Any, Any, ScoutAllocator]:
    """Build SGLang's pools by its function ``build``, a method of ``builder``, with our classes in place of its own.
    Returns what that returned, the KV pool and the allocator, of which it verifies that they are of these classes."""
    make_pool = functools.partial(pool_class, **options) if options else pool_class
    module = adapter.POOLS_MODULE
    stock = module.MHATokenToKVPool, module.PagedTokenToKVPoolAllocator
    module.MHATokenToKVPool, module.PagedTokenToKVPoolAllocator = make_pool, ScoutAllocator
    try:
        result = build()
    finally:
        module.MHATokenToKVPool, module.PagedTokenToKVPoolAllocator = stock
    built = adapter.built_pools(builder, result)
    pool, allocator = built.token_to_kv_pool, built.token_to_kv_pool_allocator
    if not isinstance(pool, pool_class) or not isinstance(allocator, ScoutAllocator):
        raise RuntimeError(
            f"--kv-offload: SGLang built {type(pool).__name__} with {type(allocator).__name__}; drop the flags that "
            "choose another KV pool, or serve another model"
        )
    logger.info("--kv-offload: SGLang %s, %s", VERSION, pool_class.__name__)
    return result, pool, allocator
