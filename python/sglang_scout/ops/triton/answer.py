"""The request ring from inside a CUDA graph: wait for the answer to a post, and merge it.

Bytes over the bus: 4 HQ D + 4 HQ for each row that asked for pages.
"""

import torch
import triton
import triton.language as tl

from .merge import merge_rows
from .ring_words import (
    ERRORS,
    LATE,
    REFUSED,
    REPLY_DONE,
    REPLY_STATUS,
    STEP,
    at_array,
    at_half,
    at_word,
    load_acquire,
    now_ns,
    store_release,
)


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def wait_kernel(
    state, open_seq, awaited, answered, waited_ns, fault, replies,
    reply_stride, layer, timeout_ns, L,
):  # fmt: skip
    """One program waits for the answer of a slot; answered [1] int32 says whether there is one.

    Bounded by the device's clock: a worker that does not answer sets an error, the stream goes on.
    After any error nothing is waited for: the server ends, and the slots left of the step would cost
    the whole time each.
    fault [1] int64, in the host's memory, gets the errors that there are, those of the post too.
    """
    slot = (tl.load(state + STEP) & 1) * L + layer
    seq = tl.load(awaited + slot)
    good = tl.zeros([], tl.int32)
    if seq != 0:
        reply = replies + slot * reply_stride
        limit_ns = tl.where(tl.load(state + ERRORS) == 0, timeout_ns, 0)
        begin = now_ns()
        done = load_acquire(at_word(reply + REPLY_DONE))
        while (done != seq) & (now_ns() - begin < limit_ns):
            done = load_acquire(at_word(reply + REPLY_DONE))
        tl.store(waited_ns + layer, tl.load(waited_ns + layer) + now_ns() - begin)
        errors = tl.load(state + ERRORS)
        if done == seq:
            status = tl.load(at_half(reply + REPLY_STATUS), volatile=True)
            good = (status == 0).to(tl.int32)
            errors = tl.where(status == 0, errors, errors | REFUSED)
            tl.store(open_seq + slot, tl.zeros([], tl.int64))
        else:
            errors = errors | LATE
        tl.store(state + ERRORS, errors)
        tl.store(awaited + slot, tl.zeros([], tl.int64))
    tl.store(answered, good)
    errors = tl.load(state + ERRORS)
    if errors != 0:
        store_release(fault, errors)  # other ranks' hosts look at it once their own step is through


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def merge_answer_kernel(
    state, answered, asked, out, lse, replies,
    reply_stride, lse_offset, layer, rows, max_batch, L,
    OUT_OFFSET: tl.constexpr, ROW_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Merges the answer into out [rows, D] and lse [rows], rows being those of [B, HQ], ROW_HEADS a row posted."""
    if tl.load(answered) != 0:
        slot = (tl.load(state + STEP) & 1) * L + layer
        reply = replies + slot * reply_stride
        r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        d = tl.arange(0, BLOCK_D)
        at = r[:, None] * D + d[None, :]
        mask = (r < rows)[:, None] & (d < D)[None, :]
        # Rows of the record that asked for nothing got nothing, and do not cross the bus.
        got = tl.load(asked + slot * max_batch + r // ROW_HEADS, mask=r < rows, other=0) > 0
        # Volatile: the worker wrote this a moment ago, no cache may answer for it.
        # [BLOCK_R, BLOCK_D]
        their_out = tl.load(
            at_array(reply + OUT_OFFSET, tl.float32) + at,
            mask=mask & got[:, None],
            other=0.0,
            volatile=True,
        )
        # [BLOCK_R]
        their_lse = tl.load(
            at_array(reply + lse_offset, tl.float32) + r,
            mask=got,
            other=float("-inf"),
            volatile=True,
        )
        merged, total = merge_rows(
            tl.load(out + at, mask=mask, other=0.0),
            tl.load(lse + r, mask=r < rows, other=0.0),
            their_out,
            their_lse,
        )
        # Every warp reads the lse of its rows and one of them writes all: not before the last has read.
        tl.debug_barrier()
        tl.store(out + at, merged, mask=mask)
        tl.store(lse + r, total, mask=r < rows)


def merge(ring, layer: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """See `ops.doorbell.DeviceRing.merge`."""
    (B, HQ, D), at = out.shape, ring.layout
    replies = ring.address + at.replies_offset
    wait_kernel[(1,)](
        ring.state, ring.open_seq, ring.awaited, ring.answered, ring.waited_ns, ring.fault, replies,
        at.reply_stride, layer, ring.timeout_us * 1000, ring.spec.num_layers, num_warps=1,
    )  # fmt: skip
    block_d = triton.next_power_of_2(D)
    block_r = max(1, 1024 // block_d)
    merge_answer_kernel[(triton.cdiv(B * HQ, block_r),)](
        ring.state, ring.answered, ring.asked, out, lse, replies, at.reply_stride, at.lse_offset,
        layer, B * HQ, ring.spec.max_batch, ring.spec.num_layers, at.out_offset,
        ring.spec.row_heads, D, block_r, block_d, num_warps=4,
    )  # fmt: skip
