"""KV pools and the page allocator, as subclasses of SGLang's.

Both sides send and receive digests through the KV transfer itself: the transfer engine halves the
list of buffers into keys and values, so ``[K.., Dmin.., V.., Dmax..]`` carries a page's digest with
its K and V, each buffer with its own item length.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator, alloc_extend_naive
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_scout.engine.memory import MemoryPlan
from sglang_scout.engine.pools import DigestPool, HostPages, ModelShape
from sglang_scout.plugin.device import lock_pages
from sglang_scout.worker.arena import Arena, ArenaSpec

NODE_RUN_PAGES = 8
"""Neighbouring pages that a request gets of one NUMA node before it gets some of the next: 256 tokens."""

BufferInfos = tuple[list[int], list[int], list[int]]


def with_digests(infos: BufferInfos, digests: DigestPool) -> BufferInfos:
    """Put the digest buffers behind the K and the V buffers. Lists: pointers, bytes, item bytes."""
    half = len(infos[0]) // 2
    halves = (digests.low, digests.high)
    extra = [
        ([t.data_ptr() for t in half], [t.nbytes for t in half], [t[0].nbytes for t in half])
        for half in halves
    ]
    pointers, lengths, items = (
        infos[i][:half] + extra[0][i] + infos[i][half:] + extra[1][i] for i in range(3)
    )
    return pointers, lengths, items


def without_digests(values: list[int]) -> list[int]:
    """The K and V part of one of the lists that :func:`with_digests` made."""
    quarter = len(values) // 4
    return values[:quarter] + values[2 * quarter : 3 * quarter]


class PageListener(Protocol):
    """Who wants to know about pages."""

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None: ...

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None: ...

    def clear(self) -> None: ...


class DigestListener:
    """Prefill side: only digests follow the pages' lives."""

    def __init__(self, digests: DigestPool) -> None:
        self._digests = digests

    def allocate_pages(self, pages: npt.NDArray[np.int64]) -> None:
        self._digests.poison(pages)

    def free_pages(self, pages: npt.NDArray[np.int64]) -> None:
        self._digests.invalidate(pages)

    def clear(self) -> None:
        self._digests.valid[:] = False


class HostKVPool(MHATokenToKVPool):
    """Decode side: all KV in one memory file that the attention worker maps as well.

    Args:
        arena_spec: everything about the arena but its number of pages, which follows from the pool.
        numa_nodes: nodes to bind the arena's pages to, as many as ``arena_spec`` says; none: empty.
    """

    def __init__(
        self, *args: Any, arena_spec: dict[str, Any], numa_nodes: list[int], **kwargs: Any
    ) -> None:
        self._arena_spec = arena_spec
        self._numa_nodes = numa_nodes
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        num_pages = (self.size + self.page_size) // self.page_size
        spec = ArenaSpec(num_pages=num_pages, **self._arena_spec)
        self.arena = Arena.create(spec, numa_nodes=self._numa_nodes)
        if torch.device(self.device).type == "cuda":
            lock_pages(self.arena)
        tokens = (num_pages * self.page_size, self.head_num, self.head_dim)
        layers = range(self.layer_num)
        self.k_buffer = [_tensor(self.arena.k_pages(i), self.store_dtype, tokens) for i in layers]
        self.v_buffer = [_tensor(self.arena.v_pages(i), self.store_dtype, tokens) for i in layers]
        buffers = self.k_buffer + self.v_buffer
        pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
        self.k_data_ptrs, self.v_data_ptrs = pointers[: self.layer_num], pointers[self.layer_num :]
        self.data_ptrs = pointers
        self.data_strides = torch.tensor([b[0].nbytes for b in buffers])

    def attach(self, shape: ModelShape, plan: MemoryPlan, digest: str) -> None:
        """Make the page view and the digest pool, once the model's shape is known."""
        self.plan = plan
        cpu_pages = self.arena.spec.cpu_pages
        self.host_pages = HostPages(shape, self.k_buffer, self.v_buffer, cpu_pages)
        self.digests = DigestPool(shape, self.host_pages.num_pages, self.device, digest)

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        return super().get_cpu_copy(self._on_host(indices), mamba_indices)

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None
    ) -> None:
        super().load_cpu_copy(kv_cache_cpu, self._on_host(indices), mamba_indices)

    def _on_host(self, indices: torch.Tensor) -> torch.Tensor:
        """For a retraction: what running steps still write has been written after this."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()
        return indices.cpu()

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


class DigestKVPool(MHATokenToKVPool):
    """Prefill side: SGLang's pool, with digests beside it that are sent along."""

    digests: DigestPool

    def attach(self, shape: ModelShape, digest: str) -> None:
        num_pages = (self.size + self.page_size) // self.page_size
        self.digests = DigestPool(shape, num_pages, self.device, digest)
        self.host_pages = HostPages(shape, self.k_buffer, self.v_buffer)

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


def _tensor(pages: npt.NDArray[Any], dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    # 16-bit floats arrive as uint16, because numpy has no bfloat16.
    return torch.from_numpy(pages).view(dtype).view(size)


def alternate_nodes(pages: torch.Tensor, stripe_pages: int) -> torch.Tensor:
    """Free pages so ordered that whoever takes the first n takes as many of each NUMA node.

    In runs of ``NODE_RUN_PAGES`` neighbours, which the KV transfer sends in one piece. A node that
    has fewer free pages than the others is used up first.

    Args:
        pages: int64 [n], page ids.
        stripe_pages: page i is of node ``i // stripe_pages``.
    """
    pages = torch.sort(pages).values
    _, counts = torch.unique_consecutive(pages // stripe_pages, return_counts=True)
    begins = torch.repeat_interleave(counts.cumsum(0) - counts, counts)
    place_in_node = torch.arange(len(pages), device=pages.device) - begins
    return pages[torch.argsort(place_in_node // NODE_RUN_PAGES, stable=True)]


class ScoutAllocator(PagedTokenToKVPoolAllocator):
    """SGLang's page allocator that reports pages' lives and needs no GPU.

    The truth about a page is here: pages outlive requests in the radix cache, and requests leave in
    many ways (finished, aborted, retracted), but every page comes from and returns to this place.
    """

    listener: PageListener | None = None

    @property
    def used_pages(self) -> int:
        return self.num_pages - len(self.free_pages) - len(self.release_pages)

    def _alternate_nodes(self) -> None:
        arena = getattr(self._kvcache, "arena", None)
        if arena is not None and arena.spec.num_nodes > 1:
            self.free_pages = alternate_nodes(self.free_pages, arena.spec.stripe_pages)

    def merge_and_sort_free(self) -> None:
        super().merge_and_sort_free()
        self._alternate_nodes()

    def alloc_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor | None:
        on_cpu = torch.device(self.device).type == "cpu"
        alloc = self._alloc_extend_cpu if on_cpu else super().alloc_extend
        return self._report(alloc(*args, **kwargs))

    def _report(self, locations: torch.Tensor | None) -> torch.Tensor | None:
        """Tell the listener about the pages whose first token is among ``locations``."""
        if locations is not None and self.listener is not None:
            opened = locations[locations % self.page_size == 0] // self.page_size
            if len(opened):
                self.listener.allocate_pages(opened.cpu().numpy())
        return locations

    def _alloc_extend_cpu(
        self,
        prefix_lens: torch.Tensor,
        prefix_lens_cpu: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        last_loc: torch.Tensor,
        extend_num_tokens: int,
        num_new_pages: int | None = None,
    ) -> torch.Tensor | None:
        size = self.page_size
        needed = (seq_lens_cpu + size - 1) // size - (prefix_lens_cpu + size - 1) // size
        count = int(needed.sum())
        if self.need_sort and count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        locations = torch.empty(extend_num_tokens, dtype=torch.int64)
        alloc_extend_naive(
            prefix_lens, seq_lens, last_loc, self.free_pages, locations, size, self.device
        )
        self.free_pages = self.free_pages[count:]
        return locations

    def alloc_decode(
        self, seq_lens: torch.Tensor, seq_lens_cpu: torch.Tensor, last_loc: torch.Tensor
    ) -> torch.Tensor | None:
        if torch.device(self.device).type != "cpu":
            return self._report(super().alloc_decode(seq_lens, seq_lens_cpu, last_loc))
        opens_page = (seq_lens - 1) % self.page_size == 0
        count = int(opens_page.sum())
        if self.need_sort and count > len(self.free_pages):
            self.merge_and_sort_free()
        if count > len(self.free_pages):
            return None
        locations = last_loc.long() + 1
        locations[opens_page] = self.free_pages[:count] * self.page_size
        self.free_pages = self.free_pages[count:]
        return self._report(locations)

    def free(self, free_index: torch.Tensor) -> None:
        super().free(free_index)
        # Inside a free group SGLang only collects; it calls again with everything at the end.
        if self.listener is not None and self.is_not_in_free_group and free_index.numel():
            self.listener.free_pages(torch.unique(free_index // self.page_size).cpu().numpy())

    def clear(self) -> None:
        super().clear()
        self._alternate_nodes()
        if self.listener is not None:
            self.listener.clear()
