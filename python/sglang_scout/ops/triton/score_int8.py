"""`pack_digests` and `score_pages_int8` on the device.

Bytes that must move: a score reads 2 H D + H D / 8 per offered page and row, 53 % of what bfloat16
digests take, and 8 for id and score; packing a page reads 2 H D e and writes what a score reads.
"""

import torch
import triton
import triton.language as tl

from .exact import dot_fp32, rounded
from .score import Scratch, leave_bounds, leave_nothing

_BLOCK_PAGES = 64


@triton.jit
def pack_kernel(
    kmin,
    kmax,
    ids,
    low,
    high,
    step,
    P,
    LEAST_STEP: tl.constexpr,
    STEPS: tl.constexpr,
    H: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
):
    """The codes of one page and head. kmin, kmax, low, high [P, H, D]; step [P, H, D / GROUP]."""
    page, h = tl.load(ids + tl.program_id(0)), tl.program_id(1)
    group = tl.arange(0, BLOCK_GROUPS)
    at = group[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    mask = at < D
    if (page >= 0) & (page < P):
        row = page * H + h
        least = tl.load(kmin + row * D + at, mask=mask, other=0.0).to(tl.float32)
        most = tl.load(kmax + row * D + at, mask=mask, other=0.0).to(tl.float32)
        size = tl.max(tl.maximum(tl.abs(least), tl.abs(most)), axis=1)
        sound = (least - least == 0.0) & (most - most == 0.0)  # neither infinite nor NaN
        good = tl.min(sound.to(tl.int32), axis=1) > 0
        width = tl.maximum(tl.where(good, size, 0.0) * STEPS, LEAST_STEP)
        wide = width[:, None] + tl.zeros([BLOCK_GROUPS, GROUP], tl.float32)
        least = tl.where(good[:, None], least, 0.0)
        most = tl.where(good[:, None], most, 0.0)
        below = tl.floor(tl.div_rn(least, wide))
        below -= (below * wide > least).to(tl.float32)
        above = tl.ceil(tl.div_rn(most, wide))
        above += (above * wide < most).to(tl.float32)
        tl.store(low + row * D + at, below.to(tl.int8), mask=mask)
        tl.store(high + row * D + at, above.to(tl.int8), mask=mask)
        width = tl.where(good, width, float("nan"))
        tl.store(step + row * (D // GROUP) + group, width, mask=group < D // GROUP)


@triton.jit
def bounds_int8_kernel(
    q,
    low,
    high,
    step,
    table,
    n_full,
    bounds,
    block_top,
    block_mass,
    scale,
    N,
    row_stride,
    H: tl.constexpr,
    G: tl.constexpr,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    """As `bounds_kernel`, group of channels by group: u = sum of step (q+ . high + q- . low)."""
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = (b * H + h) * G + g
    full = tl.minimum(tl.load(n_full + b), N)
    if block * BLOCK_N < full:
        page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
        offered = page >= 0
        row = page.to(tl.int64) * H + h
        u = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
        for c in tl.static_range(D // GROUP):
            d = c * GROUP + tl.arange(0, GROUP)
            q_part = tl.load(q + head[:, None] * D + d[None, :], mask=(g < G)[:, None], other=0.0)
            q_part = q_part * scale
            at = row[:, None] * D + d[None, :]
            most = tl.load(high + at, mask=offered[:, None], other=0).to(tl.float32)
            least = tl.load(low + at, mask=offered[:, None], other=0).to(tl.float32)
            part = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
            part = dot_fp32(tl.maximum(q_part, 0.0), tl.trans(rounded(most, tl.bfloat16)), part)
            part = dot_fp32(tl.minimum(q_part, 0.0), tl.trans(rounded(least, tl.bfloat16)), part)
            u += part * tl.load(step + row * (D // GROUP) + c, mask=offered, other=0.0)[None, :]
        u = tl.where(offered[None, :], u, float("-inf"))
        leave_bounds(u, bounds, block_top, block_mass, head, n, g < G, row_stride)
    else:
        leave_nothing(block_top, block_mass, head, g < G, BLOCK_G)


def pack_digests(
    kmin: torch.Tensor,
    kmax: torch.Tensor,
    ids: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
) -> None:
    """See `ops.digest_int8.pack_digests`."""
    from ..digest_int8 import GROUP, LEAST_STEP, STEPS

    (P, H, D), groups = kmin.shape, step.shape[2]
    if ids.numel() == 0:
        return
    blocks = triton.next_power_of_2(groups)
    pack_kernel[(ids.numel(), H)](
        kmin, kmax, ids, low, high, step, P, LEAST_STEP, STEPS, H, D, GROUP, blocks, num_warps=1
    )


def score_pages_int8(
    q: torch.Tensor,
    low: torch.Tensor,
    high: torch.Tensor,
    step: torch.Tensor,
    table: torch.Tensor,
    n_full: torch.Tensor,
    scale: float,
    reduce: str = "mass",
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `ops.digest_int8.score_pages_int8`."""
    (B, N), (_, H, D), HQ = table.shape, low.shape, q.shape[1]
    if out is None:
        out = q.new_empty((B, N))
    if B * N == 0:
        return out
    scratch = Scratch(q, table, _BLOCK_PAGES)
    G = HQ // H
    bounds_int8_kernel[(scratch.blocks, H, B)](
        q,
        low,
        high,
        step,
        table,
        n_full,
        *scratch.tensors,
        scale,
        N,
        scratch.row_stride,
        H,
        G,
        D,
        D // step.shape[2],
        scratch.block_n,
        max(16, triton.next_power_of_2(G)),
        num_warps=4,
    )
    scratch.reduce(table, n_full, out, reduce)
    return out
