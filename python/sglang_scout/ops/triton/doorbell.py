"""The request ring from inside a CUDA graph: post a record, wait for its answer and merge it. The producer's side of
sgl-kernel/src/ring.h, in kernels (`engine.graph_transport`). A post with 40 heads of 128 at batch 16 is 160 KiB, about
3 us at 55 GB/s, and so is an answer.

Ordering. Every program of a post writes its row, then increments an arrival counter with acquire-release in system
scope; the last to arrive writes the header, opens the claim word, writes the log entry and finally store-releases the
head, all from one thread. That release publishes the record: a worker thread reads nothing of a post before it has
acquired a head that covers it. The claim word is closed by row 0 before it arrives, hence before the header changes.
The post's number is store-released after the rest of the header: the attendant reads headers that the head covers, and
a corrupted head may cover any. The bell is not rung, as a futex cannot be woken from the device: either a host thread
polls the head, or the worker does not sleep during a step.

Accuracy. A bfloat16 result is off by up to 2^-8 of itself, which the merge scales by the CPU's weight: at most the
error that FlashAttention has from rounding the softmax to bfloat16. """

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_scout import _native

from .attend import merge_rows
from .common import load_acquire, now_ns, pause, rounded, store_release

# Words of the state tensor, int64. The host writes the first two between steps.
EPOCH = tl.constexpr(0)  # of the process that records go to; 0: post nothing
STEP = tl.constexpr(1)
POSTS = tl.constexpr(2)  # the number of the last post
ERRORS = tl.constexpr(3)  # bits below, kept until the host clears them

LATE = tl.constexpr(1)  # no answer within the deadline
REFUSED = tl.constexpr(2)  # the process refused the record
BUSY = tl.constexpr(4)  # the slot still holds a record without an answer

# Offsets within the ring's structs, in bytes.
def _at(struct: str, *names: str) -> list[tl.constexpr]:
    fields = np.dtype(_native.RING_STRUCTS[struct]).fields
    return [tl.constexpr(fields[name][1]) for name in names]


[CONTROL_HEAD] = _at("Control", "head")
RECORD_SEQ, RECORD_LAYER, RECORD_ROWS, RECORD_SPLITS, RECORD_STEP = _at(
    "RecordHeader", "seq", "layer", "rows", "splits", "step"
)
REPLY_DONE, REPLY_CLAIM, REPLY_STATUS = _at("ReplyHeader", "done", "claim", "status")

CLOSED_ITEM = tl.constexpr(_native.RING_CLOSED_ITEM)

@triton.jit
def at_word(address):
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def at_half(address):
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def at_array(address, dtype: tl.constexpr):
    """The start of an array, aligned for 16-byte accesses. A constant in ``address`` would lose the hint: Triton 3.8
    turns it into an offset from another pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


MAX_SPLITS = tl.constexpr(_native.RING_MAX_SPLITS)
SPLITS_PER_THREAD = tl.constexpr(_native.SPLITS_PER_THREAD)


@triton.jit
def splits_of(sequences, total, largest, threads, max_splits, min_pages):
    """`Split::splits` of sgl-kernel/src/split.h, for all counts at once; ties go to the smallest. 32 bits are enough
    for 8 million pages: where more than one run is allowed, rounds are 16 or fewer."""
    splits = 1 + tl.arange(0, MAX_SPLITS)
    useful = tl.minimum(largest // min_pages, threads * SPLITS_PER_THREAD // sequences)
    every = sequences * splits
    rounds = tl.cdiv(every, threads)
    time = (rounds - 1) * 16 * total // every + 16 * largest // splits + rounds * min_pages
    allowed = (splits == 1) | (splits <= tl.minimum(max_splits, useful))
    return 1 + tl.argmin(tl.where(allowed, time, 0x7FFFFFFF), axis=0, tie_break_left=True)


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def post_kernel(
    q, pages, n_pages, state, open_seq, awaited, asked, arrivals, control, log, records,
    replies, record_stride, reply_stride, pages_offset, n_pages_offset, layer, rows, threads, max_splits, min_pages,
    nodes, k, max_pages, max_batch, log_entries,
    L: tl.constexpr, WIDTH: tl.constexpr, Q: tl.constexpr, Q_AT: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):
    """Each program writes one row of a record; the last to arrive publishes it.

    q [rows, WIDTH]; pages [rows, k]; n_pages [rows]. Q, Q_AT: see `placed`. open_seq [2 L]: the in-flight record of a
    slot, 0 if free. awaited [2 L]: the record that `merge_answer_kernel` waits for, 0 without a post. asked [2 L,
    max_batch]: number of pages that each row requested. control, log, records, replies: addresses within the ring. """
    b = tl.program_id(0)
    step = tl.load(state + STEP)
    epoch = tl.load(state + EPOCH)
    slot = (step & 1) * L + layer
    row = tl.arange(0, BLOCK_B)
    # [BLOCK_B]
    counts = tl.load(n_pages + row, mask=row < rows, other=0)
    total = tl.sum(counts, axis=0)
    blocked = tl.load(open_seq + slot) != 0
    wanted = (epoch != 0) & (total > 0)
    post = tl.load(state + POSTS) + 1
    record = records + slot * record_stride
    claim = at_word(replies + slot * reply_stride + REPLY_CLAIM)
    if wanted & (blocked == 0):
        if b == 0:
            for node in range(0, nodes):
                tl.store(claim + node, (post << 24) | CLOSED_ITEM)
        n = tl.load(n_pages + b)
        tl.store(asked + slot * max_batch + b, n)
        if n > 0:  # the query of a row without pages is never read
            for first in range(0, WIDTH, BLOCK_Q):
                i = first + tl.arange(0, BLOCK_Q)
                # [BLOCK_Q]
                value = tl.load(q + b.to(tl.int64) * WIDTH + i, mask=i < WIDTH)
                to = at_array(record, Q) + Q_AT + b * WIDTH + i
                tl.store(to, rounded(value, Q), mask=i < WIDTH)
        for first in range(0, k, BLOCK_K):
            i = first + tl.arange(0, BLOCK_K)
            # [BLOCK_K]
            page = tl.load(pages + b.to(tl.int64) * k + i, mask=i < n)
            tl.store(
                at_array(record + pages_offset, tl.int32) + b * max_pages + i, page, mask=i < n
            )
        tl.store(at_array(record + n_pages_offset, tl.int32) + b, n)
    tl.debug_barrier()
    if tl.atomic_add(arrivals, 1, sem="acq_rel", scope="sys") == rows - 1:
        tl.store(arrivals, 0)
        if wanted & (blocked == 0):
            largest = tl.max(counts, axis=0)
            sequences = tl.sum((counts > 0).to(tl.int32), axis=0)
            splits = splits_of(sequences, total, largest, threads, max_splits, min_pages)
            seq = (epoch << 40) | post
            tl.store(at_half(record + RECORD_LAYER), layer)
            tl.store(at_half(record + RECORD_ROWS), rows)
            tl.store(at_half(record + RECORD_SPLITS), splits)
            tl.store(at_word(record + RECORD_STEP), step)
            store_release(at_word(record + RECORD_SEQ), seq)
            for node in range(0, nodes):
                tl.store(claim + node, post << 24)
            tl.store(at_array(log, tl.int64) + (post & (log_entries - 1)), (post << 24) | slot)
            store_release(at_word(control + CONTROL_HEAD), post)
            tl.store(state + POSTS, post)
            tl.store(open_seq + slot, seq)
            tl.store(awaited + slot, seq)
        else:
            tl.store(awaited + slot, tl.zeros([], tl.int64))
            if wanted:
                # Atomic: a merge of another layer may set errors concurrently.
                tl.atomic_or(state + ERRORS, tl.full([], BUSY, tl.int64))


def placed(spec, offset: int) -> tuple[tl.dtype, int]:
    """Dtype of queries or results in a record or reply, and where they begin, in elements."""
    dtype = getattr(tl, spec.q_dtype)
    return dtype, offset * 8 // dtype.primitive_bitwidth


def post(ring, layer: int, q: torch.Tensor, pages: torch.Tensor, n_pages: torch.Tensor) -> None:
    (rows, k), arena = pages.shape, ring.arena
    at, spec = arena.layout, arena.spec
    width = spec.row_heads * spec.head_dim
    post_kernel[(rows,)](
        q, pages, n_pages, ring.state, ring.open_seq, ring.awaited, ring.asked, ring.arrivals,
        arena.address + at.control_offset, arena.address + at.log_offset,
        arena.address + at.records_offset, arena.address + at.replies_offset, at.record_stride,
        at.reply_stride, at.pages_offset, at.n_pages_offset, layer, rows, *ring.split,
        spec.num_nodes, k, spec.max_pages, spec.max_batch, at.log_entries, spec.num_layers, width,
        *placed(spec, at.q_offset), min(2048, triton.next_power_of_2(width)),
        min(1024, max(16, triton.next_power_of_2(k))),
        triton.next_power_of_2(rows), num_warps=4,
    )


_BLOCK_VALUES = 512  # per program (one warp)
# Between polls, so that scores on other streams get the device: by one program over the link, where a load takes 1 us,
# and by some hundreds of one word in the L2 cache, each of which invalidates its SM's L1.
_LINK_PAUSE_NS, _WORD_PAUSE_NS = tl.constexpr(100), tl.constexpr(500)


@triton.jit
def await_answer(state, open_seq, answered, waited_ns, fault, reply, slot, seq, layer, timeout_ns):
    """Wait for answer ``seq`` of a slot, if it is not 0; ``answered`` gets seq, or -seq without a valid answer. Bounded
    by the device clock: if the worker does not answer, an error is set and the stream continues. After any error there
    is no more waiting, as the server is shutting down. ``fault`` gets all error bits, including those of the post."""
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
    OUT: tl.constexpr, OUT_AT: tl.constexpr, ROW_HEADS: tl.constexpr, D: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Program 0 waits for the answer; the others wait for its word in ``answered`` and merge a block of rows each. Rows
    of out, merged and lse are those of [B, HQ], ROW_HEADS per posted row; change [rows] or None: added to the answer's
    lse. answered [2 L] int64: the last checked record of a slot, negated if not valid."""
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
        # Volatile: CPU attention has just written this, so it must not come from a cache.
        # [BLOCK_R, BLOCK_D]
        values = at_array(reply, OUT) + OUT_AT + at
        their_out = tl.load(values, mask=mask & got[:, None], other=0.0, volatile=True)
        # [BLOCK_R]
        their_lse = tl.load(
            at_array(reply + lse_offset, tl.float32) + r, mask=got, other=float("-inf"), volatile=True
        )
        result, _ = merge_rows(our_out, our_lse, their_out.to(tl.float32), their_lse)
        tl.store(merged + at, rounded(result, merged.dtype.element_ty), mask=mask)


def merge(ring, layer: int, out: torch.Tensor, lse: torch.Tensor, change, dtype) -> torch.Tensor:
    (B, HQ, D), at, spec = out.shape, ring.arena.layout, ring.arena.spec
    merged = torch.empty_like(out, dtype=dtype)
    block_d = triton.next_power_of_2(D)
    block_r = max(1, _BLOCK_VALUES // block_d)
    merge_answer_kernel[(1 + triton.cdiv(B * HQ, block_r),)](
        ring.state, ring.open_seq, ring.awaited, ring.answered, ring.asked, ring.waited_ns, ring.fault,
        out, lse, change, merged, ring.arena.address + at.replies_offset, at.reply_stride, at.lse_offset, layer,
        ring.timeout_us * 1000, B * HQ, spec.max_batch, spec.num_layers, *placed(spec, at.out_offset),
        spec.row_heads, D, block_r, block_d, num_warps=1,
    )
    return merged
