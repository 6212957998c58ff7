"""`score_pages` on the device: one pass over the digests, one over the bounds.

Bytes that must move: 2 H D e per offered page and row (e bytes per element), 4 for its id and 4
for its score. The bounds in between, 4 HQ per page, are written and read once more; they stay in
the L2 cache (40 heads, 2,048 pages, batch 16: 5 MiB) and are 4 % of the digests of 8 heads of 128.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from .exact import dot_fp32, finite

# Pages of one program, fewer for large heads: with 8 KV heads of 128 and 4,096 pages a single row
# fills 512 programs.
_BLOCK_PAGES, _BLOCK_VALUES = 64, 8192
# Numbers of all blocks that a program of the second pass holds at once, for some of the heads. More take
# so many registers that few programs fit.
_HELD_PARTS = 4096


@triton.jit
def bounds_kernel(
    q, kmin, kmax, table, n_full, bounds, block_top, block_mass,
    scale, N, row_stride, part_stride,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_G: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Bounds of one block of pages for the G query heads of one KV head: u = q+ . M + q- . m.

    Every digest is loaded once, for all G heads. Also leaves the block's largest bound and its sum
    of e^(u - largest), so that the softmax over the request's pages needs no third pass. Blocks
    past n_full write only these.

    q [B, HQ, D]; kmin, kmax [P, H, D]; table [B, N]; bounds [B, HQ, row_stride];
    block_top, block_mass [B, HQ, part_stride].
    """
    block, h, b = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_D)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    head = (b * H + h) * G + g  # row of [B * HQ]
    part = head * part_stride + block
    full = tl.minimum(tl.load(n_full + b), N)
    if block * BLOCK_N < full:
        # [BLOCK_N]
        page = tl.load(table + b.to(tl.int64) * N + n, mask=n < full, other=-1)
        offered = page >= 0
        # [BLOCK_G, BLOCK_D]
        q_tile = tl.load(
            q + head[:, None] * D + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0
        )
        q_tile = q_tile * scale
        at = (page.to(tl.int64) * H + h)[:, None] * D + d[None, :]
        here = offered[:, None] & (d < D)[None, :]
        # [BLOCK_N, BLOCK_D]
        low = tl.load(kmin + at, mask=here, other=0.0)
        high = tl.load(kmax + at, mask=here, other=0.0)
        # [BLOCK_G, BLOCK_N]
        zero = tl.zeros([BLOCK_G, BLOCK_N], dtype=tl.float32)
        u = dot_fp32(tl.maximum(q_tile, 0.0), tl.trans(high), zero)
        u += dot_fp32(tl.minimum(q_tile, 0.0), tl.trans(low), zero)
        u = tl.where(offered[None, :], u, float("-inf"))
        tl.store(
            bounds + head.to(tl.int64)[:, None] * row_stride + n[None, :], u, mask=(g < G)[:, None]
        )
        top = tl.max(u, axis=1)  # [BLOCK_G]
        tl.store(block_top + part, top, mask=g < G)
        tl.store(block_mass + part, tl.sum(tl.exp(u - finite(top)[:, None]), axis=1), mask=g < G)
    else:
        tl.store(block_top + part, tl.full([BLOCK_G], float("-inf"), tl.float32), mask=g < G)
        tl.store(block_mass + part, tl.zeros([BLOCK_G], tl.float32), mask=g < G)


@triton.jit
def reduce_kernel(
    bounds, block_top, block_mass, table, n_full, out,
    N, row_stride, part_stride, blocks,
    HQ: tl.constexpr, REDUCE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_BLOCKS: tl.constexpr,
):  # fmt: skip
    """Scores of one block of pages from the bounds of all heads. out: [B, N]."""
    block, b = tl.program_id(0), tl.program_id(1)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    full = tl.minimum(tl.load(n_full + b), N)
    row = b.to(tl.int64) * N
    if block * BLOCK_N < full:
        # [BLOCK_N]
        offered = tl.load(table + row + n, mask=n < full, other=-1) >= 0
        part = tl.arange(0, BLOCK_BLOCKS)
        score = tl.zeros([BLOCK_N], dtype=tl.float32)
        if REDUCE == "max":
            score = tl.full([BLOCK_N], float("-inf"), tl.float32)
        for first in range(0, HQ, BLOCK_H):
            h = first + tl.arange(0, BLOCK_H)
            head = (b * HQ + h).to(tl.int64)
            # [BLOCK_H, BLOCK_N]
            u = tl.load(
                bounds + head[:, None] * row_stride + n[None, :],
                mask=(h < HQ)[:, None] & offered[None, :],
                other=float("-inf"),
            )
            parts_at = head[:, None] * part_stride + part[None, :]
            known = (h < HQ)[:, None] & (part < blocks)[None, :]
            # [BLOCK_H, BLOCK_BLOCKS]
            tops = tl.load(block_top + parts_at, mask=known, other=float("-inf"))
            masses = tl.load(block_mass + parts_at, mask=known, other=0.0)
            base = finite(tl.max(tops, axis=1))
            total = tl.sum(masses * tl.exp(tops - base[:, None]), axis=1)  # [BLOCK_H]
            # Not u - lse: where bounds are large, that sum would lose what the softmax hangs on.
            x = (u - base[:, None]) - tl.log(tl.maximum(total, 1.0))[:, None]
            if REDUCE == "mass":
                score += tl.sum(tl.exp(x), axis=0)
            else:
                # A device's maximum drops NaN, which says that a page has no bound.
                broken = tl.max((x != x).to(tl.int32), axis=0) > 0
                largest = tl.where(broken, float("nan"), tl.max(x, axis=0))
                score = tl.maximum(score, largest, propagate_nan=tl.PropagateNan.ALL)
        tl.store(out + row + n, tl.where(offered, score, float("-inf")), mask=n < N)
    else:
        tl.store(out + row + n, tl.full([BLOCK_N], float("-inf"), tl.float32), mask=n < N)


class Scratch(NamedTuple):
    """What is written for every block of pages before heads are reduced: u of each page, and the block's largest u
    and sum of e^(u - largest)."""

    tensors: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    block_pages: int

    @classmethod
    def of(cls, q, N, block_pages):
        B, HQ, _ = q.shape
        blocks = triton.cdiv(N, block_pages)
        # So that a program reads the numbers of several blocks at once, whatever their count.
        of_blocks = q.new_empty((2, B, HQ, 16 * triton.cdiv(blocks, 16))).unbind()
        return cls((q.new_empty((B, HQ, blocks * block_pages)), *of_blocks), block_pages)

    @property
    def strides(self):
        """Of a head's rows."""
        return self.tensors[0].shape[2], self.tensors[1].shape[2]

    @property
    def blocks(self):
        return self.tensors[0].shape[2] // self.block_pages

    def reduced(self, table, n_full, reduce, out):
        """``out``, with the scores of all heads together."""
        (B, N), HQ = table.shape, self.tensors[0].shape[1]
        block_blocks = triton.next_power_of_2(self.blocks)
        block_h = min(64, triton.next_power_of_2(HQ), max(1, _HELD_PARTS // block_blocks))
        reduce_kernel[(self.blocks, B)](
            *self.tensors, table, n_full, out, N, *self.strides, self.blocks, HQ, reduce, self.block_pages,
            block_h, block_blocks, num_warps=4,
        )  # fmt: skip
        return out


def score_pages(q, kmin, kmax, table, n_full, scale, reduce, out):
    """See `ops.score.score_pages`."""
    (B, N), (_, H, D), HQ = table.shape, kmin.shape, q.shape[1]
    if out is None:
        out = q.new_empty((B, N))
    if B * N == 0:
        return out
    G, block_d = HQ // H, triton.next_power_of_2(D)
    block_n = min(_BLOCK_PAGES, _BLOCK_VALUES // block_d, max(16, triton.next_power_of_2(N)))
    scratch = Scratch.of(q, N, block_n)
    bounds_kernel[(scratch.blocks, H, B)](
        q, kmin, kmax, table, n_full, *scratch.tensors, scale, N, *scratch.strides,
        H, G, D, block_n, max(16, triton.next_power_of_2(G)), block_d, num_warps=4,
    )  # fmt: skip
    return scratch.reduced(table, n_full, reduce, out)
