"""The request ring from inside a CUDA graph: post a record. `answer` waits for its answer.

The producer's side of sgl-kernel/src/ring.h, in kernels.

Bus traffic, per row that misses pages: 2 HQ D bytes of bfloat16 queries, 4 HQ D of others, and 4 k of page ids.
With 40 heads of 128 at batch 16 that is 160 KiB, about 3 us at 55 GB/s.

Ordering. Every program of a post writes its row, then increments an arrival counter with acquire-release
in system scope; the last to arrive writes the header, opens the claim word, writes the log entry and
finally store-releases the head, all from one thread. That release publishes the record: a worker thread
reads nothing of a post before it has acquired a head that covers it. The claim word is closed by row 0
before it arrives, hence before the header changes. The post's number is store-released after the rest of
the header: the attendant reads headers that the head covers, and a corrupted head may cover any. The bell
is not rung: a futex cannot be woken from the device, so either a host thread polls the head, or the
worker does not sleep during a step.
"""

import torch
import triton
import triton.language as tl

from sglang_scout import _native

from .exact import rounded
from .ring_words import (
    BUSY,
    CLOSED_ITEM,
    CONTROL_HEAD,
    EPOCH,
    ERRORS,
    POSTS,
    RECORD_LAYER,
    RECORD_PARTS,
    RECORD_ROWS,
    RECORD_SEQ,
    RECORD_STEP,
    REPLY_CLAIM,
    STEP,
    at_array,
    at_half,
    at_word,
    store_release,
)

MAX_RUNS = tl.constexpr(_native.RING_MAX_PARTS)
RUNS_PER_THREAD = tl.constexpr(_native.RUNS_PER_THREAD)


@triton.jit
def runs_of(sequences, total, largest, threads, most, least_pages):
    """`Split::runs` of sgl-kernel/src/split.h: evaluates all run counts at once; ties go to the smallest.

    32 bits are enough for 8 million pages: where more than one run is allowed, rounds are 16 or fewer.
    """
    runs = 1 + tl.arange(0, MAX_RUNS)
    useful = tl.minimum(largest // least_pages, threads * RUNS_PER_THREAD // sequences)
    every = sequences * runs
    rounds = tl.cdiv(every, threads)
    time = (rounds - 1) * 16 * total // every + 16 * largest // runs + rounds * least_pages
    allowed = (runs == 1) | (runs <= tl.minimum(most, useful))
    return 1 + tl.argmin(tl.where(allowed, time, 0x7FFFFFFF), axis=0, tie_break_left=True)


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def post_kernel(
    q, pages, n_pages, state, open_seq, awaited, asked, arrivals, control, log, records,
    replies, record_stride, reply_stride, pages_offset, n_pages_offset, layer, rows, parts, threads, most, least_pages,
    nodes, k, max_pages, max_batch, log_entries,
    L: tl.constexpr, WIDTH: tl.constexpr, Q_OFFSET: tl.constexpr, Q_BF16: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_B: tl.constexpr,
):  # fmt: skip
    """Each program writes one row of a record; the last to arrive publishes it.

    q [rows, WIDTH]; pages [rows, k]; n_pages [rows]. open_seq [2 L]: the in-flight record of a slot, 0 if the
    slot is free. awaited [2 L]: the record that `answer.merge_answer_kernel` waits for, 0: nothing was posted.
    asked [2 L, max_batch]: number of pages that each row requested.
    control, log, records, replies: addresses within the ring.
    """
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
                if Q_BF16:
                    to = at_array(record, tl.bfloat16) + Q_OFFSET // 2
                else:
                    to = at_array(record, tl.float32) + Q_OFFSET // 4
                value = rounded(value, to.dtype.element_ty)
                tl.store(to + b * WIDTH + i, value, mask=i < WIDTH)
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
            runs = runs_of(sequences, total, largest, threads, most, least_pages)
            seq = (epoch << 40) | post
            tl.store(at_half(record + RECORD_LAYER), layer)
            tl.store(at_half(record + RECORD_ROWS), rows)
            tl.store(at_half(record + RECORD_PARTS), tl.where(parts > 0, parts, runs))
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


def post(ring, layer: int, q: torch.Tensor, pages: torch.Tensor, n_pages: torch.Tensor) -> None:
    """See `ops.doorbell.DeviceRing.post`."""
    (rows, k), at, spec = pages.shape, ring.layout, ring.spec
    width = spec.row_heads * spec.head_dim
    post_kernel[(rows,)](
        q, pages, n_pages, ring.state, ring.open_seq, ring.awaited, ring.asked, ring.arrivals,
        ring.address + at.control_offset, ring.address + at.log_offset,
        ring.address + at.records_offset, ring.address + at.replies_offset, at.record_stride,
        at.reply_stride, at.pages_offset, at.n_pages_offset, layer, rows, ring.parts, *ring.split,
        spec.num_nodes, k, spec.max_pages, spec.max_batch, at.log_entries, spec.num_layers, width,
        at.q_offset, spec.q_dtype == "bfloat16", min(2048, triton.next_power_of_2(width)),
        min(1024, max(16, triton.next_power_of_2(k))),
        triton.next_power_of_2(rows), num_warps=4,
    )  # fmt: skip
