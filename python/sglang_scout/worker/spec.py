"""Sizes of an arena, which the decode server and its worker agree on before anything is mapped."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from sglang_scout import _native
from sglang_scout.core.errors import ArenaError

# As numbered in scout/attend.h.
KV_DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2")
QUERY_DTYPES = KV_DTYPES[:2]
MAX_BATCH = 1 << 16
MAX_NODES = _native.RING_MAX_NODES
_HUGE_PAGE_BYTES = 2 * 1024 * 1024
_STORAGE = dict(zip(KV_DTYPES, (np.float32, np.uint16, np.uint16, np.uint8, np.uint8), strict=True))


@dataclass(frozen=True)
class ArenaSpec:
    """Sizes of an arena, validated at construction.

    Args:
        num_layers: L.
        num_pages: P, host pages per layer (with SGLang's padding page 0).
        page_size: S, tokens per page.
        num_kv_heads: H.
        num_q_heads: HQ, a multiple of H.
        head_dim: D, a multiple of 16 up to 512.
        kv_dtype: one of ``KV_DTYPES``.
        scale: softmax scale, a factor on q·k.
        max_batch: rows of a record, a multiple of ``lists``.
        max_pages: k, pages per row of a record.
        num_nodes: NUMA nodes that the pages are striped over by index; see ``stripe_pages``.
        lists: C, page lists (rows of a record) per request: 1, or H, one for each KV head.
        context_pages: C, pages of one KV head in each layer, after the host pages; on the last node.
        q_dtype: of the queries in a record and the output in its reply, ``"float32"``, or ``"bfloat16"`` for a model in
            bf16. Log-sum-exp is fp32 always.
        checksums: whether there is a checksum for each page and layer, see ``checksums.py``.

    Raises:
        ArenaError: a value is out of range.
    """

    num_layers: int
    num_pages: int
    page_size: int
    num_kv_heads: int
    num_q_heads: int
    head_dim: int
    kv_dtype: str
    scale: float
    max_batch: int
    max_pages: int
    num_nodes: int = 1
    lists: int = 1
    context_pages: int = 0
    q_dtype: str = "float32"
    checksums: bool = False

    def __post_init__(self) -> None:
        limits = {
            "num_layers": 1 << 16,
            "num_pages": (1 << 31) - 1,
            "page_size": 2048,
            "num_kv_heads": 1024,
            "num_q_heads": 1 << 14,
            "head_dim": 512,
            "max_batch": MAX_BATCH,
            "max_pages": 1 << 20,
            "num_nodes": MAX_NODES,
            "lists": 1024,
            "context_pages": (1 << 31) - 1,
        }
        for name, limit in limits.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise ArenaError(f"{name}={value!r} is not an integer")
            least = 0 if name == "context_pages" else 1
            if not least <= value <= limit:
                raise ArenaError(f"{name}={value} is outside {least}..{limit}")
            object.__setattr__(self, name, int(value))
        if self.num_pages + self.context_pages * self.page_size >= 1 << 31:
            raise ArenaError(
                f"context_pages={self.context_pages}: with {self.page_size} tokens each, their token ids exceed 31 bits"
            )
        if self.num_q_heads % self.num_kv_heads:
            raise ArenaError(
                f"num_q_heads={self.num_q_heads} is not a multiple of "
                f"num_kv_heads={self.num_kv_heads}"
            )
        if self.lists not in (1, self.num_kv_heads):
            raise ArenaError(
                f"lists={self.lists} is neither 1 nor num_kv_heads={self.num_kv_heads}"
            )
        if self.max_batch % self.lists:
            raise ArenaError(f"max_batch={self.max_batch} is not a multiple of lists={self.lists}")
        if self.head_dim % 16:
            raise ArenaError(f"head_dim={self.head_dim} is not a multiple of 16")
        if self.kv_dtype not in KV_DTYPES:
            raise ArenaError(f"kv_dtype={self.kv_dtype!r}; supported are {', '.join(KV_DTYPES)}")
        if self.q_dtype not in QUERY_DTYPES:
            raise ArenaError(f"q_dtype={self.q_dtype!r}; supported are {', '.join(QUERY_DTYPES)}")
        if self.checksums and self.page_bytes % 32:
            raise ArenaError(
                f"checksums: pages of {self.page_bytes} bytes are not a multiple of 32"
            )
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ArenaError(f"scale={self.scale} is not a positive number")
        # The header holds fp32; rounding here makes both processes see identical specs.
        object.__setattr__(self, "scale", float(np.float32(self.scale)))

    @property
    def storage_dtype(self) -> np.dtype:
        """Numpy dtype of the pages: float32, or the bits of a narrower type."""
        return np.dtype(_STORAGE[self.kv_dtype])

    @property
    def page_bytes(self) -> int:
        """Bytes of K (or of V) of one page of one layer."""
        return self.page_size * self.num_kv_heads * self.head_dim * self.storage_dtype.itemsize

    @property
    def row_heads(self) -> int:
        """Query heads per row of a record."""
        return self.num_q_heads // self.lists

    @property
    def stripe_pages(self) -> int:
        """Pages per node in every plane: page i is on node ``i // stripe_pages``.

        One contiguous stripe per node, so that a plane takes ``num_nodes`` calls of mbind, and the total
        stays far below the per-process limit of mappings (65530) for any model and memory size. The
        allocator decides which request gets which page, so smaller stripes would not improve balance.
        Rounded to whole huge pages if that costs no node more than an eighth of its share.
        """
        share = -(-self.num_pages // self.num_nodes)
        whole = _HUGE_PAGE_BYTES // math.gcd(self.page_bytes, _HUGE_PAGE_BYTES)
        if self.num_nodes == 1 or 8 * whole * (self.num_nodes - 1) > share:
            return share
        return -(-share // whole) * whole

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V of all pages of all layers."""
        context_bytes = self.context_pages * (self.page_bytes // self.num_kv_heads)
        return 2 * self.num_layers * (self.num_pages * self.page_bytes + context_bytes)
