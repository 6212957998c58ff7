"""The request ring from inside a CUDA graph: post a record, wait for its answer, merge it.

The producer's side of sgl-kernel/src/ring.h, in kernels: layout, states and numbers are said there.
The ring is page-locked host memory; it comes as an address that the device can use.

Bytes over the bus, of rows that miss pages: a post writes 4 HQ D of query and 4 k of page ids; a merge
reads 4 HQ D + 4 HQ. With 40 heads of 128 at batch 16 that is 320 KiB each way, about 6 us at 55 GB/s.

Order. All programs of a post write their row, then arrive at a counter with a release and an acquire
in system scope; the last to arrive writes the header, opens the claim word, writes the log entry and
at last releases the head, all from one thread. So one release orders the record: a worker thread looks
at nothing of a post before it has acquired a head that covers it. The claim word is closed by row 0
before it arrives, hence before the header changes. The bell stays as it is: a futex cannot be woken
from here, so a thread on the host has to watch the head, or the worker does not sleep in a step.
"""

import time

import numpy as np
import torch
import triton
import triton.language as tl

from sglang_scout import _native

from .merge import merge_rows

# Words of the state tensor, int64. The host writes the first two between steps.
EPOCH = tl.constexpr(0)  # epoch of the worker that records go to; 0: post nothing
STEP = tl.constexpr(1)
POSTS = tl.constexpr(2)  # the number of the last post
ERRORS = tl.constexpr(3)  # bits below, kept until the host clears them

LATE = tl.constexpr(1)  # no answer within the deadline
REFUSED = tl.constexpr(2)  # the worker refused the record
BUSY = tl.constexpr(4)  # the slot still holds a record without an answer

MAX_RUNS = tl.constexpr(_native.RING_MAX_PARTS)
RUNS_PER_THREAD = tl.constexpr(_native.RUNS_PER_THREAD)

# Offsets within the ring's structs, in bytes.
_CONTROL, _RECORD, _REPLY = (
    np.dtype(_native.RING_STRUCTS[name]).fields
    for name in ("Control", "RecordHeader", "ReplyHeader")
)
CONTROL_HEAD = tl.constexpr(_CONTROL["head"][1])
RECORD_SEQ = tl.constexpr(_RECORD["seq"][1])
RECORD_LAYER = tl.constexpr(_RECORD["layer"][1])
RECORD_ROWS = tl.constexpr(_RECORD["rows"][1])
RECORD_PARTS = tl.constexpr(_RECORD["parts"][1])
RECORD_STEP = tl.constexpr(_RECORD["step"][1])
RECORD_CLAIM = tl.constexpr(_RECORD["claim"][1])
REPLY_DONE = tl.constexpr(_REPLY["done"][1])
REPLY_STATUS = tl.constexpr(_REPLY["status"][1])

CLOSED_ITEM = tl.constexpr(_native.RING_CLOSED_ITEM)

if triton.knobs.runtime.interpret:

    def now_ns():
        return time.monotonic_ns()

    @triton.jit
    def load_acquire(word):
        return tl.atomic_add(word, 0, sem="acquire", scope="sys")

    @triton.jit
    def store_release(word, value):
        tl.atomic_xchg(word, value, sem="release", scope="sys")

else:
    # Not Triton's atomics: over PCIe an atomic on host memory is a request of its own kind, which
    # not every platform serves. Loads and stores always work.

    @triton.jit
    def now_ns():
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def load_acquire(word):
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s64 $0, [$1];",
            "=l,l",
            [word],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def store_release(word, value):
        # Every thread of the program runs inline code; the first one has made the stores before.
        tl.inline_asm_elementwise(
            """{
            .reg .pred first;
            .reg .u32 thread;
            mov.u32 thread, %tid.x;
            setp.eq.u32 first, thread, 0;
            @first st.release.sys.global.s64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [word, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def at_word(address):
    """An address within a header as a pointer to one int64."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def at_half(address):
    """An address within a header as a pointer to one int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def at_array(address, dtype: tl.constexpr):
    """The start of an array; the ring aligns these to 128 bytes, so a thread may move 16 at once."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)


@triton.jit
def runs_of(sequences, total, largest, threads, most, least_pages):
    """`Split::runs` of sgl-kernel/src/split.h: all numbers of runs at once, the smallest of the best ones.

    32 bits are enough for 8 million pages: where more than one run is allowed, rounds are 16 or fewer.
    """
    runs = 1 + tl.arange(0, MAX_RUNS)
    useful = tl.minimum(largest // least_pages, RUNS_PER_THREAD * threads // sequences)
    every = sequences * runs
    rounds = tl.cdiv(every, threads)
    time = (rounds - 1) * 16 * total // every + 16 * largest // runs + rounds * least_pages
    allowed = (runs == 1) | (runs <= tl.minimum(most, useful))
    return 1 + tl.argmin(tl.where(allowed, time, 0x7FFFFFFF), axis=0, tie_break_left=True)


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def post_kernel(
    q,
    pages,
    n_pages,
    state,
    open_seq,
    awaited,
    asked,
    arrivals,
    control,
    log,
    records,
    record_stride,
    pages_offset,
    n_pages_offset,
    layer,
    rows,
    parts,
    threads,
    most,
    least_pages,
    nodes,
    k,
    max_pages,
    max_batch,
    log_entries,
    L: tl.constexpr,
    WIDTH: tl.constexpr,
    Q_OFFSET: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_B: tl.constexpr,
):
    """One row of a record each; the last program to arrive publishes it.

    q [B, WIDTH]; pages [B, k]; n_pages [B]. open_seq [2 L]: the record of a slot that has no answer
    yet, 0 if the slot is free. awaited [2 L]: what `wait_kernel` waits for, 0: nothing was posted.
    asked [2 L, max_batch]: pages that rows asked for, for `merge_answer_kernel`.
    control, log, records: addresses within the ring.
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
    claim = at_word(record + RECORD_CLAIM)
    if wanted & (blocked == 0):
        if b == 0:
            for node in range(0, nodes):
                tl.store(claim + node, (post << 24) | CLOSED_ITEM)
        n = tl.load(n_pages + b)
        tl.store(asked + slot * max_batch + b, n)
        if n > 0:  # nobody reads the query of a row without pages
            for first in range(0, WIDTH, BLOCK_Q):
                i = first + tl.arange(0, BLOCK_Q)
                value = tl.load(q + b.to(tl.int64) * WIDTH + i, mask=i < WIDTH)
                tl.store(
                    at_array(record + Q_OFFSET, tl.float32) + b * WIDTH + i, value, mask=i < WIDTH
                )
        for first in range(0, k, BLOCK_K):
            i = first + tl.arange(0, BLOCK_K)
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
            tl.store(at_word(record + RECORD_SEQ), seq)
            tl.store(at_half(record + RECORD_LAYER), layer)
            tl.store(at_half(record + RECORD_ROWS), rows)
            tl.store(at_half(record + RECORD_PARTS), tl.where(parts > 0, parts, runs))
            tl.store(at_word(record + RECORD_STEP), step)
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
                errors = tl.load(state + ERRORS)
                tl.debug_barrier()  # all threads read, the first one writes
                tl.store(state + ERRORS, errors | BUSY)


# One compilation for all layers.
@triton.jit(do_not_specialize=["layer"])
def wait_kernel(
    state,
    open_seq,
    awaited,
    answered,
    waited_ns,
    fault,
    replies,
    reply_stride,
    layer,
    timeout_ns,
    L,
):
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
    state,
    answered,
    asked,
    out,
    lse,
    replies,
    reply_stride,
    lse_offset,
    layer,
    rows,
    max_batch,
    L,
    OUT_OFFSET: tl.constexpr,
    HQ: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Merges the answer into out [rows, D] and lse [rows], rows being those of [B, HQ]."""
    if tl.load(answered) != 0:
        slot = (tl.load(state + STEP) & 1) * L + layer
        reply = replies + slot * reply_stride
        r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
        d = tl.arange(0, BLOCK_D)
        at = r[:, None] * D + d[None, :]
        mask = (r < rows)[:, None] & (d < D)[None, :]
        # Rows that asked for nothing got nothing, and do not cross the bus.
        got = tl.load(asked + slot * max_batch + r // HQ, mask=r < rows, other=0) > 0
        # Volatile: the worker wrote this a moment ago, no cache may answer for it.
        # [BLOCK_R, BLOCK_D]
        their_out = tl.load(
            at_array(reply + OUT_OFFSET, tl.float32) + at,
            mask=mask & got[:, None],
            other=0.0,
            volatile=True,
        )
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


def post(ring, layer: int, q: torch.Tensor, pages: torch.Tensor, n_pages: torch.Tensor) -> None:
    """See `ops.doorbell.DeviceRing.post`."""
    (B, HQ, D), k, at = q.shape, pages.shape[1], ring.layout
    post_kernel[(B,)](
        q,
        pages,
        n_pages,
        ring.state,
        ring.open_seq,
        ring.awaited,
        ring.asked,
        ring.arrivals,
        ring.address + at.control_offset,
        ring.address + at.log_offset,
        ring.address + at.records_offset,
        at.record_stride,
        at.pages_offset,
        at.n_pages_offset,
        layer,
        B,
        ring.parts,
        *ring.split,
        ring.num_nodes,
        k,
        ring.max_pages,
        ring.max_batch,
        at.log_entries,
        ring.num_layers,
        HQ * D,
        at.q_offset,
        min(2048, triton.next_power_of_2(HQ * D)),
        min(1024, max(16, triton.next_power_of_2(k))),
        triton.next_power_of_2(B),
        num_warps=4,
    )


def merge(ring, layer: int, out: torch.Tensor, lse: torch.Tensor) -> None:
    """See `ops.doorbell.DeviceRing.merge`."""
    (B, HQ, D), at = out.shape, ring.layout
    replies = ring.address + at.replies_offset
    wait_kernel[(1,)](
        ring.state,
        ring.open_seq,
        ring.awaited,
        ring.answered,
        ring.waited_ns,
        ring.fault,
        replies,
        at.reply_stride,
        layer,
        ring.timeout_us * 1000,
        ring.num_layers,
        num_warps=1,
    )
    block_d = triton.next_power_of_2(D)
    block_r = max(1, 1024 // block_d)
    merge_answer_kernel[(triton.cdiv(B * HQ, block_r),)](
        ring.state,
        ring.answered,
        ring.asked,
        out,
        lse,
        replies,
        at.reply_stride,
        at.lse_offset,
        layer,
        B * HQ,
        ring.max_batch,
        ring.num_layers,
        at.out_offset,
        HQ,
        D,
        block_r,
        block_d,
        num_warps=4,
    )
