"""Page embeddings on the device: `build_layer_means`, `build_layer_pilots` and `score_embeddings`. Rows share no
operands, so products run on CUDA cores: memory binds."""

import torch
import triton
import triton.language as tl

from ..embed import largest
from .exact import rounded, stored_as, widened
from .pages import layer_pointer, source_row

_BLOCK_RANKS = tl.constexpr(16)
# Elements that a scoring program holds at a time.
_BLOCK_VALUES, _BLOCK_PAGES = 4096, 64


@triton.jit
def limited(x, LARGEST: tl.constexpr):
    """Clamped fp32, with NaN as 0."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)


@triton.jit
def means_kernel(
    addresses, ids, rows, embeddings,
    P, R,
    HALF: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
    LARGEST: tl.constexpr, KV: tl.constexpr, FP8: tl.constexpr, ALIGN: tl.constexpr,
):
    """One page, head and layer. addresses [L] of [R, 2 HALF, H, D]; ids [n]; rows: see `source_row`; embeddings
    [L, P, H, 2, D]."""
    page, h = tl.load(ids + tl.program_id(0)), tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    source = source_row(rows, page, layer)
    if (page >= 0) & (page < P) & (source >= 0) & (source < R):
        k = layer_pointer(addresses, layer, KV, ALIGN)
        s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        mask = (s < HALF)[:, None] & (d < D)[None, :]
        for half in tl.static_range(2):
            at = ((source * (2 * HALF) + half * HALF + s) * H + h)[:, None] * D + d[None, :]
            x = widened(tl.load(k + at, mask=mask, other=0), FP8)
            x = limited(x, LARGEST)  # [BLOCK_S, BLOCK_D]
            mean = rounded(tl.sum(x, axis=0) / HALF, embeddings.dtype.element_ty)
            row = (((layer * P + page) * H + h) * 2 + half) * D
            tl.store(embeddings + row + d, mean, mask=d < D)


@triton.jit
def pilots_kernel(
    addresses, ids, rows, embeddings, w_k,
    P, R,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, BLOCK_S: tl.constexpr,
    BLOCK_D: tl.constexpr, LARGEST: tl.constexpr, KV: tl.constexpr, FP8: tl.constexpr, ALIGN: tl.constexpr,
):
    """One page, head and layer. addresses [L] of [R, S, H, D]; embeddings [L, P, H, E]; w_k [L, H, E, 2 D]."""
    page, h = tl.load(ids + tl.program_id(0)), tl.program_id(1)
    layer = tl.program_id(2).to(tl.int64)
    source = source_row(rows, page, layer)
    if (page >= 0) & (page < P) & (source >= 0) & (source < R):
        k = layer_pointer(addresses, layer, KV, ALIGN)
        s, d = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D)
        mask = (s < S)[:, None] & (d < D)[None, :]
        at = ((source * S + s) * H + h)[:, None] * D + d[None, :]
        x = widened(tl.load(k + at, mask=mask, other=0), FP8)
        x = limited(x, LARGEST)  # [BLOCK_S, BLOCK_D]
        mean = tl.sum(x, axis=0) / S
        # Masked tokens are 0, which never wins over a nonzero element.
        high, low = tl.max(x, axis=0), tl.min(x, axis=0)
        extreme = tl.where(high >= -low, high, low)
        for first in range(0, E, _BLOCK_RANKS):
            r = first + tl.arange(0, _BLOCK_RANKS)
            of_row = w_k + ((layer * H + h) * E + r)[:, None] * (2 * D) + d[None, :]
            here = (r < E)[:, None] & (d < D)[None, :]
            # [_BLOCK_RANKS, BLOCK_D]
            products = tl.load(of_row, mask=here, other=0.0) * mean[None, :]
            products += tl.load(of_row + D, mask=here, other=0.0) * extreme[None, :]
            e = rounded(limited(tl.sum(products, axis=1), LARGEST), embeddings.dtype.element_ty)
            tl.store(embeddings + ((layer * P + page) * H + h) * E + r, e, mask=r < E)


@triton.jit
def dots(embeddings, page, query, h, which, H: tl.constexpr, W: tl.constexpr, E: tl.constexpr):
    """[BLOCK_N] dot products with the ``which``-th embedding of pages; -inf where page < 0."""
    e = tl.arange(0, query.shape[0])
    at = ((page.to(tl.int64) * H + h) * W + which)[:, None] * E + e[None, :]
    x = tl.load(embeddings + at, mask=(page >= 0)[:, None] & (e < E)[None, :], other=0.0)
    return tl.where(page >= 0, tl.sum(x.to(tl.float32) * query[None, :], axis=1), float("-inf"))


@triton.jit
def embedding_scores_kernel(
    q, embeddings, table, n_full, out,
    N,
    H: tl.constexpr, W: tl.constexpr, E: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_E: tl.constexpr,
):
    """One block of pages for one KV head of a request. q [B * H, E]; embeddings [P, H, W, E]; out [B * H, N]."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2).to(tl.int64)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    full = tl.minimum(tl.load(n_full + b), N)
    score = tl.full([BLOCK_N], float("-inf"), tl.float32)
    if block * BLOCK_N < full:
        e = tl.arange(0, BLOCK_E)
        query = tl.load(q + (b * H + h) * E + e, mask=e < E, other=0.0).to(tl.float32)
        page = tl.load(table + b * N + n, mask=n < full, other=-1)  # [BLOCK_N]
        score = dots(embeddings, page, query, h, 0, H, W, E)
        if W == 2:
            following = tl.load(table + b * N + n + 1, mask=n + 1 < full, other=-1)
            score = tl.maximum(score, dots(embeddings, following, query, h, 0, H, W, E))
            score = (dots(embeddings, page, query, h, 1, H, W, E) + score) / 2
            score = tl.where(page >= 0, score, float("-inf"))
    tl.store(out + (b * H + h) * N + n, score, mask=n < N)


def build_layer_means(source, ids, embeddings, rows):
    """See `ops.embed.build_layer_means`."""
    R, S, H, D = source.k[0].shape
    if ids.numel():
        blocks = triton.next_power_of_2(S // 2), triton.next_power_of_2(D)
        means_kernel[(ids.numel(), H, len(source.k))](
            source.addresses, ids, rows, embeddings, embeddings.shape[1], R, S // 2, H, D, *blocks,
            largest(embeddings.dtype), *stored_as(source.k[0].dtype), source.align_bytes, num_warps=4,
        )


def build_layer_pilots(source, ids, embeddings, w_k, rows):
    """See `ops.embed.build_layer_pilots`."""
    R, S, H, D = source.k[0].shape
    if ids.numel():
        blocks = triton.next_power_of_2(S), triton.next_power_of_2(D)
        pilots_kernel[(ids.numel(), H, len(source.k))](
            source.addresses, ids, rows, embeddings, w_k, embeddings.shape[1], R, S, H, D,
            embeddings.shape[-1], *blocks, largest(embeddings.dtype), *stored_as(source.k[0].dtype),
            source.align_bytes, num_warps=4,
        )


def score_embeddings(q, embeddings, table, n_full):
    """See `ops.embed.score_embeddings`."""
    (B, N), (H, W, E) = table.shape, embeddings.shape[1:]
    out = q.new_empty((B * H, N), dtype=torch.float32)
    if out.numel():
        block_e = triton.next_power_of_2(E)
        block_n = min(_BLOCK_PAGES, _BLOCK_VALUES // block_e, triton.next_power_of_2(N))
        embedding_scores_kernel[(triton.cdiv(N, block_n), H, B)](
            q, embeddings, table, n_full, out, N, H, W, E, block_n, block_e, num_warps=4
        )
    return out
