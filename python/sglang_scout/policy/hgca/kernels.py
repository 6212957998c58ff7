"""`decay_mass` on the device."""

import triton
import triton.language as tl

from sglang_scout.ops.triton.common import as_loaded, dot_fp32, stored_as, widened
from sglang_scout.ops.triton.pages import listed_slots


@triton.jit
def decay_kernel(
    q, lse, k, pages, n_pages, slot_of, last_page, last_len, first_at, state, fresh, maw,
    alpha, scale, N, W, ids,
    S: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, FP8: tl.constexpr,
):
    """One page of a row's window and one KV head. q [B, HQ, D]; lse [B, HQ]; k [P, S, H, D]; pages [B, N]; maw
    [M, W, H, S]; the others [B]."""
    BLOCK_S: tl.constexpr = max(16, triton.next_power_of_2(S))
    BLOCK_G: tl.constexpr = max(16, triton.next_power_of_2(G))
    BLOCK_D: tl.constexpr = max(16, min(128, triton.next_power_of_2(D)))
    w, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.load(state + b).to(tl.int64)
    count = tl.load(n_pages + b)
    is_last = w == count
    slot = listed_slots(pages, b.to(tl.int64) * N, w, tl.minimum(count, N), slot_of, ids)
    slot = tl.where(is_last, tl.load(last_page + b), slot).to(tl.int64)
    if (row >= 0) & (slot >= 0):
        length = tl.where(is_last, tl.load(last_len + b), S)
        g, d, s = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_S)
        head = (b * H + h) * G + g
        here = s < length
        k_row = (slot * S + s) * H + h
        x = tl.zeros([BLOCK_G, BLOCK_S], tl.float32)
        for first in range(0, D, BLOCK_D):
            at = first + d[None, :]
            # [BLOCK_G, BLOCK_D], [BLOCK_S, BLOCK_D]
            q_tile = tl.load(
                q + head[:, None] * D + at, mask=(g < G)[:, None] & (at < D), other=0.0
            )
            k_tile = tl.load(k + k_row[:, None] * D + at, mask=here[:, None] & (at < D), other=0)
            k_tile = widened(k_tile, FP8)
            x = dot_fp32(q_tile, tl.trans(k_tile), x)
        x *= scale
        top = tl.load(lse + head, mask=g < G, other=float("inf"))
        weight = tl.max(tl.exp(x - top[:, None]), axis=0)  # [BLOCK_S]
        place = (tl.load(first_at + b) + w) % W
        at = maw + ((row * W + place) * H + h) * S + s
        old = tl.load(at, mask=here, other=0.0)
        starts = (tl.load(fresh + b) != 0) | (is_last & (s == length - 1))
        moved = tl.where(starts, weight, (1 - alpha) * old + alpha * weight)
        tl.store(at, moved, mask=here)


def decay_mass(
    q, lse, k, pages, n_pages, slot_of, last_page, last_len, first_at, state, fresh, maw, alpha, scale
):
    (B, N), (S, H, D), W = pages.shape, k.shape[1:], maw.shape[1]
    decay_kernel[(W, H, B)](
        q, lse, as_loaded(k), pages, n_pages, slot_of, last_page, last_len, first_at, state, fresh, maw, alpha,
        scale, N, W, slot_of.numel(), S, H, q.shape[1] // H, D, stored_as(k.dtype)[1], num_warps=4,
    )
