"""Page embeddings on the device: `build_layer_means`, `build_layer_pilots` and `score_embeddings`. Rows share no
operands, so products run on CUDA cores: memory binds."""

import torch
import triton
import triton.language as tl

from sglang_scout.ops.pages import largest
from sglang_scout.ops.triton.common import limited, rounded
from sglang_scout.ops.triton.pages import for_each_page, page_keys, source_of

_BLOCK_RANKS = tl.constexpr(16)
# Elements that a scoring program holds at a time.
_BLOCK_VALUES, _BLOCK_PAGES = 4096, 64


@triton.jit
def means_kernel(
    addresses, ids, rows, embeddings,
    P, R,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, LARGEST: tl.constexpr, KV: tl.constexpr, FP8: tl.constexpr,
    ALIGN: tl.constexpr,
):
    """One page, head and layer, as `pages.digest_kernel`. embeddings [L, P, H, 2, D]."""
    k, source, row = source_of(addresses, ids, rows, P, R, KV, ALIGN)
    if row >= 0:
        x = limited(page_keys(k, source, S, H, D, FP8)[0], LARGEST)
        s, d = tl.arange(0, x.shape[0])[:, None], tl.arange(0, x.shape[1])
        for half in tl.static_range(2):
            of_half = tl.where((s < S // 2) == (half == 0), x, 0.0)
            mean = rounded(tl.sum(of_half, axis=0) / (S // 2), embeddings.dtype.element_ty)
            tl.store(embeddings + (row * 2 + half) * D + d, mean, mask=d < D)


@triton.jit
def pilots_kernel(
    addresses, ids, rows, embeddings, w_k,
    P, R,
    S: tl.constexpr, H: tl.constexpr, D: tl.constexpr, E: tl.constexpr, LARGEST: tl.constexpr, KV: tl.constexpr,
    FP8: tl.constexpr, ALIGN: tl.constexpr,
):
    """One page, head and layer, as `pages.digest_kernel`. embeddings [L, P, H, E]; w_k [L, H, E, 2 D]."""
    k, source, row = source_of(addresses, ids, rows, P, R, KV, ALIGN)
    if row >= 0:
        x = limited(page_keys(k, source, S, H, D, FP8)[0], LARGEST)
        d = tl.arange(0, x.shape[1])
        mean = tl.sum(x, axis=0) / S
        # Masked tokens are 0, which never wins over a nonzero element.
        high, low = tl.max(x, axis=0), tl.min(x, axis=0)
        extreme = tl.where(high >= -low, high, low)
        w_k += (tl.program_id(2) * H + tl.program_id(1)) * E * (2 * D)
        for first in range(0, E, _BLOCK_RANKS):
            r = first + tl.arange(0, _BLOCK_RANKS)
            of_row = w_k + r[:, None] * (2 * D) + d[None, :]
            here = (r < E)[:, None] & (d < D)[None, :]
            # [_BLOCK_RANKS, BLOCK_D]
            products = tl.load(of_row, mask=here, other=0.0) * mean[None, :]
            products += tl.load(of_row + D, mask=here, other=0.0) * extreme[None, :]
            e = rounded(limited(tl.sum(products, axis=1), LARGEST), embeddings.dtype.element_ty)
            tl.store(embeddings + row * E + r, e, mask=r < E)


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


def build_layer_means(source, ids, embeddings, rows=None):
    for_each_page(means_kernel, source, ids, rows, (embeddings,), largest(embeddings.dtype))


def build_layer_pilots(source, ids, embeddings, w_k, rows=None):
    constants = embeddings.shape[-1], largest(embeddings.dtype)
    for_each_page(pilots_kernel, source, ids, rows, (embeddings, w_k), *constants)


def score_embeddings(q, embeddings, table, n_full):
    (B, N), (H, W, E) = table.shape, embeddings.shape[1:]
    out = q.new_empty((B * H, N), dtype=torch.float32)
    if out.numel():
        block_e = triton.next_power_of_2(E)
        block_n = min(_BLOCK_PAGES, _BLOCK_VALUES // block_e, triton.next_power_of_2(N))
        embedding_scores_kernel[(triton.cdiv(N, block_n), H, B)](
            q, embeddings, table, n_full, out, N, H, W, E, block_n, block_e, num_warps=4
        )
    return out
