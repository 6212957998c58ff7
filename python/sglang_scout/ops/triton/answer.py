"""The request ring from inside a CUDA graph: wait for the answer to a post, and merge it. One launch.

Bus traffic for each row that requested pages: 2 HQ D bytes of a bfloat16 model's results, 4 HQ D of others, and 4 HQ.

Accuracy. A bfloat16 result is off by up to 2^-8 of itself, which the merge scales by the CPU's weight. With p the
softmax over all tokens that is at most 2^-8 times the sum of p |v| over the CPU's: the bound that FlashAttention has,
over all tokens, for rounding p to bfloat16 before the product with V. Then the merged output is rounded the same way.
"""

import torch
import triton
import triton.language as tl

from .exact import rounded
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
    pause,
    store_release,
)

_BLOCK_VALUES = 512  # per program (one warp)
# Between polls, so that scores on other streams get the device. One program polls over the link, where a load takes
# about 1 us, ten times its pause. The others, 320 at batch 32 with 40 heads, load the same word of one L2 slice, and
# each acquire invalidates its SM's L1; their pause, 500 ns to 1 us at most, is shorter than the loads over the link.
_LINK_PAUSE_NS, _WORD_PAUSE_NS = tl.constexpr(100), tl.constexpr(500)


@triton.jit
def await_answer(state, open_seq, answered, waited_ns, fault, reply, slot, seq, layer, timeout_ns):
    """Wait for answer ``seq`` of a slot, if it is not 0; ``answered`` gets seq, or -seq without a valid answer.

    Bounded by the device clock: if the worker does not answer, an error is set and the stream continues.
    After any error there is no more waiting: the server is shutting down, and each remaining slot of the
    step would take the full timeout.
    fault [1] int64, in host memory, gets all error bits, including those of the post.
    """
    if seq != 0:
        limit_ns = tl.where(tl.load(state + ERRORS) == 0, timeout_ns, 0)
        begin = now_ns()
        done = load_acquire(at_word(reply + REPLY_DONE))
        while (done != seq) & (now_ns() - begin < limit_ns):
            pause(_LINK_PAUSE_NS)
            done = load_acquire(at_word(reply + REPLY_DONE))
        tl.store(waited_ns + layer, tl.load(waited_ns + layer) + now_ns() - begin)
        error = tl.full([], LATE, tl.int64)
        good = tl.zeros([], tl.int32)
        if done == seq:
            status = tl.load(at_half(reply + REPLY_STATUS), volatile=True)
            good = (status == 0).to(tl.int32)
            error = tl.where(status == 0, tl.zeros([], tl.int64), tl.full([], REFUSED, tl.int64))
            tl.store(open_seq + slot, tl.zeros([], tl.int64))
        if error != 0:
            tl.atomic_or(state + ERRORS, error)  # another layer may be posted concurrently
        store_release(answered + slot, tl.where(good != 0, seq, -seq))
    errors = tl.load(state + ERRORS)
    if errors != 0:
        store_release(fault, errors)  # other ranks' hosts read it when their own step has completed


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def merge_answer_kernel(
    state, open_seq, awaited, answered, asked, waited_ns, fault, out, lse, change, merged, replies,
    reply_stride, lse_offset, layer, timeout_ns, rows, max_batch, L,
    OUT_OFFSET: tl.constexpr, OUT_BF16: tl.constexpr, ROW_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Program 0 waits for the answer; the others wait for its word in ``answered`` and merge a block of rows each.

    Rows of out, merged [rows, D] and lse [rows] are those of [B, HQ], ROW_HEADS per posted row; change [rows] or None:
    added to the answer's lse. answered [2 L] int64: the last record of a slot whose answer has been checked, negated
    if that is not valid.
    """
    slot = (tl.load(state + STEP) & 1) * L + layer
    seq = tl.load(awaited + slot)
    reply = replies + slot * reply_stride
    if tl.program_id(0) == 0:
        await_answer(
            state, open_seq, answered, waited_ns, fault, reply, slot, seq, layer, timeout_ns
        )
    else:
        r = (tl.program_id(0) - 1) * BLOCK_R + tl.arange(0, BLOCK_R)
        d = tl.arange(0, BLOCK_D)
        at = r[:, None] * D + d[None, :]
        mask = (r < rows)[:, None] & (d < D)[None, :]
        # [BLOCK_R, BLOCK_D] and [BLOCK_R]
        our_out = tl.load(out + at, mask=mask, other=0.0).to(tl.float32)
        our_lse = tl.load(lse + r, mask=r < rows, other=0.0)
        if change is not None:  # same merge weights as adding it to the answer's lse
            our_lse -= tl.load(change + r, mask=r < rows, other=0.0)
        # Rows that requested no pages have no answer; skip their bus traffic.
        got = tl.load(asked + slot * max_batch + r // ROW_HEADS, mask=r < rows, other=0) > 0
        word = seq
        if seq != 0:
            begin = now_ns()
            word = load_acquire(answered + slot)
            # Program 0 finishes within the timeout; allow twice that, as it may not be scheduled first.
            while (word != seq) & (word != -seq) & (now_ns() - begin < 2 * timeout_ns):
                pause(_WORD_PAUSE_NS)
                word = load_acquire(answered + slot)
            if (word != seq) & (word != -seq):
                store_release(fault, tl.full([], LATE, tl.int64))
        got = got & (seq != 0) & (word == seq)
        if OUT_BF16:
            values = at_array(reply, tl.bfloat16) + OUT_OFFSET // 2
        else:
            values = at_array(reply, tl.float32) + OUT_OFFSET // 4
        # Volatile: the worker has just written this, so it must not come from a cache.
        # [BLOCK_R, BLOCK_D]
        their_out = tl.load(values + at, mask=mask & got[:, None], other=0.0, volatile=True)
        # [BLOCK_R]
        their_lse = tl.load(
            at_array(reply + lse_offset, tl.float32) + r,
            mask=got,
            other=float("-inf"),
            volatile=True,
        )
        result, _ = merge_rows(our_out, our_lse, their_out.to(tl.float32), their_lse)
        tl.store(merged + at, rounded(result, merged.dtype.element_ty), mask=mask)


def merge(ring, layer: int, out: torch.Tensor, lse: torch.Tensor, change, dtype) -> torch.Tensor:
    """See `ops.doorbell.DeviceRing.merge`."""
    (B, HQ, D), at = out.shape, ring.layout
    merged = torch.empty_like(out, dtype=dtype)
    block_d = triton.next_power_of_2(D)
    block_r = max(1, _BLOCK_VALUES // block_d)
    merge_answer_kernel[(1 + triton.cdiv(B * HQ, block_r),)](
        ring.state, ring.open_seq, ring.awaited, ring.answered, ring.asked, ring.waited_ns, ring.fault,
        out, lse, change, merged, ring.address + at.replies_offset, at.reply_stride, at.lse_offset, layer,
        ring.timeout_us * 1000, B * HQ, ring.spec.max_batch, ring.spec.num_layers, at.out_offset,
        ring.spec.q_dtype == "bfloat16", ring.spec.row_heads, D, block_r, block_d, num_warps=1,
    )  # fmt: skip
    return merged
