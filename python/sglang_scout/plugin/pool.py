"""KV pools, as subclasses of SGLang's.

Both sides send and receive digests through the KV transfer itself: the transfer engine halves the
list of buffers into keys and values, so ``[K.., first.., V.., second..]`` carries a page's digest with
its K and V, each buffer with its own item length.
"""

from __future__ import annotations

import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.model_executor import model_runner_kv_cache_mixin as pools_module

from sglang_scout.core.forecast import PageWeights
from sglang_scout.engine.context_cache import context_pages
from sglang_scout.engine.digest_pool import DigestPool
from sglang_scout.engine.memory import MemoryPlan
from sglang_scout.engine.stores import HostPages, ModelShape
from sglang_scout.plugin.allocator import ScoutAllocator
from sglang_scout.plugin.device import lock_pages
from sglang_scout.worker.arena import Arena, ArenaSpec

BufferInfos = tuple[list[int], list[int], list[int]]


def with_digests(infos: BufferInfos, digests: DigestPool) -> BufferInfos:
    """Put the digest buffers behind the K and the V buffers. Lists: pointers, bytes, item bytes."""
    middle = len(infos[0]) // 2
    extra = [
        ([t.data_ptr() for t in part], [t.nbytes for t in part], [t[0].nbytes for t in part])
        for part in digests.parts
    ]
    pointers, lengths, items = (
        infos[i][:middle] + extra[0][i] + infos[i][middle:] + extra[1][i] for i in range(3)
    )
    return pointers, lengths, items


def num_layers(item_lens: list[int]) -> int:
    """Layers of a pool from the item bytes of its buffers, with digests or without."""
    # The items of K and V are pages, those of digests a small part of one.
    return item_lens.count(item_lens[0]) // 2


def carries(buffers: int, layers: int) -> bool:
    """Whether a list of so many buffers is of K and V of these layers, with digests or without."""
    return buffers in (2 * layers, 4 * layers)


def same_digests(items: list[int], target: list[int], layers: int) -> bool:
    """Whether the buffers at ``target``, of a list as long, are for digests with ``items`` bytes each.

    The parts of a digest are one allocation each, in which a layer is as many items long as there are pages there.
    """
    at = layers, 3 * layers
    first, second = (target[i + 1] - target[i] if layers > 1 else 0 for i in at)
    return 0 < first * items[at[1]] == second * items[at[0]]


def without_digests(values: list[int], layers: int) -> list[int]:
    """The K and V part of one of the lists that :func:`with_digests` made, or of one without digests."""
    middle = len(values) // 2
    return values[:layers] + values[middle : middle + layers]


class HostKVPool(MHATokenToKVPool):
    """Decode side: all KV in one memory file that the attention worker maps as well.

    Args:
        arena_spec: everything about the arena but its numbers of pages, which follow from the pool.
        context_share: of the host pages' memory, for kept tokens beside them.
        numa_nodes: nodes to bind the arena's pages to, as many as ``arena_spec`` says; none: empty.
    """

    def __init__(
        self,
        *args: Any,
        arena_spec: dict[str, Any],
        numa_nodes: list[int],
        context_share: float = 0.0,
        **kwargs: Any,
    ) -> None:
        self._arena_spec, self._context_share = arena_spec, context_share
        self._numa_nodes = numa_nodes
        super().__init__(*args, **kwargs)

    def _create_buffers(self) -> None:
        num_pages = (self.size + self.page_size) // self.page_size
        context_pages = int(num_pages * self._context_share) * self.head_num
        spec = ArenaSpec(num_pages=num_pages, context_pages=context_pages, **self._arena_spec)
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

    def attach(
        self,
        shape: ModelShape,
        plan: MemoryPlan,
        digest: str,
        weights: PageWeights | None = None,
    ) -> None:
        """Make the page view and the digest pool, once the model's shape is known."""
        self.plan = plan
        context = context_pages(self.arena, shape)
        self.host_pages = HostPages(shape, self.k_buffer, self.v_buffer, context)
        pages = self.host_pages.num_pages
        self.digests = DigestPool(shape, pages, self.device, digest, weights)

    def get_cpu_copy(self, indices: torch.Tensor, mamba_indices: Any = None) -> Any:
        """SGLang retracts a request: its pages go to others. Whole pages are kept, the last one too."""
        return self.host_pages.save(self._pages_of(indices))

    def load_cpu_copy(
        self, kv_cache_cpu: Any, indices: torch.Tensor, mamba_indices: Any = None
    ) -> None:
        """It comes back, to other pages, whose tokens are as many."""
        self.host_pages.restore(self._pages_of(indices), kv_cache_cpu)

    def _pages_of(self, indices: torch.Tensor) -> npt.NDArray[np.int64]:
        """Of a request's tokens, which fill its pages in order; what running steps still write has been
        written after this."""
        if torch.device(self.device).type == "cuda":
            torch.cuda.synchronize()
        return indices[:: self.page_size].cpu().numpy().astype(np.int64) // self.page_size

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


class DigestKVPool(MHATokenToKVPool):
    """Prefill side: SGLang's pool, with digests beside it that are sent along."""

    digests: DigestPool

    def attach(self, shape: ModelShape, digest: str, weights: PageWeights | None = None) -> None:
        num_pages = (self.size + self.page_size) // self.page_size
        self.digests = DigestPool(shape, num_pages, self.device, digest, weights)
        self.host_pages = HostPages(shape, self.k_buffer, self.v_buffer)

    def get_contiguous_buf_infos(self) -> BufferInfos:
        return with_digests(super().get_contiguous_buf_infos(), self.digests)


def build_pools(
    original: Callable[..., None], runner: Any, make_pool: Any, pool_class: type
) -> Any:
    """Build SGLang's pools with our classes in place of its own, and make sure that they were used."""
    stock = pools_module.MHATokenToKVPool, pools_module.PagedTokenToKVPoolAllocator
    pools_module.MHATokenToKVPool = make_pool
    pools_module.PagedTokenToKVPoolAllocator = ScoutAllocator
    try:
        original(runner)
    finally:
        pools_module.MHATokenToKVPool, pools_module.PagedTokenToKVPoolAllocator = stock
    pool, allocator = runner.token_to_kv_pool, runner.token_to_kv_pool_allocator
    if not isinstance(pool, pool_class) or not isinstance(allocator, ScoutAllocator):
        raise RuntimeError(
            f"--kv-offload: SGLang built {type(pool).__name__} with {type(allocator).__name__}, "
            f"expected {pool_class.__name__} with {ScoutAllocator.__name__}"
        )
    assert torch.is_tensor(pool.k_buffer[0])
    return pool


def around_batch_register(
    original: Callable[..., int], engine: Any, pointers: list[int], lengths: list[int]
) -> int:
    """SGLang goes on without memory that the transfer engine refuses; then every transfer fails.

    Raises:
        RuntimeError: the engine refused; with what may be the cause.
    """
    error = original(engine, pointers, lengths)
    if error == 0:
        return error
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "unlimited" if limit == resource.RLIM_INFINITY else f"{limit / 2**20:.3g} MiB"
    raise RuntimeError(
        f"--kv-offload: the transfer engine does not register {len(pointers)} buffers of "
        f"{sum(lengths) / 2**30:.2f} GiB (error {error}; its own lines above name the first), so no KV could be "
        f"transferred. RDMA needs them locked: the limit on locked memory is {locked}; make it unlimited (ulimit -l, "
        "LimitMEMLOCK of a service, --ulimit memlock=-1 of a container). It needs room for them in the tables of the "
        "network device: lower --kv-offload-host-gb, or raise its limits (max_mr and max_mr_size of ibv_devinfo -v). "
        "And for what lies on a GPU (digests on a decode server, all on a prefill server) the kernel module "
        "nvidia_peermem, or a mooncake with CUDA and WITH_NVIDIA_PEERMEM=0. Without RDMA: "
        "--disaggregation-transfer-backend mooncake_tcp"
    )


def _tensor(pages: npt.NDArray[Any], dtype: torch.dtype, size: tuple[int, ...]) -> torch.Tensor:
    # 16-bit floats arrive as uint16, because numpy has no bfloat16.
    return torch.from_numpy(pages).view(dtype).view(size)
