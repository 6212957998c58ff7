"""Ring access from kernels: word offsets, and acquire loads and release stores in system scope.

The ring is pinned host memory, passed as a device-accessible address. Layout, states and numbers
are those of sgl-kernel/src/ring.h. In the interpreter, loads and stores are Triton's atomics.
"""

import time

import numpy as np
import triton
import triton.language as tl

from sglang_scout import _native

# Words of the state tensor, int64. The host writes the first two between steps.
EPOCH = tl.constexpr(0)  # epoch of the worker that records go to; 0: post nothing
STEP = tl.constexpr(1)
POSTS = tl.constexpr(2)  # the number of the last post
ERRORS = tl.constexpr(3)  # bits below, kept until the host clears them

LATE = tl.constexpr(1)  # no answer within the deadline
REFUSED = tl.constexpr(2)  # the worker refused the record
BUSY = tl.constexpr(4)  # the slot still holds a record without an answer

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
REPLY_DONE = tl.constexpr(_REPLY["done"][1])
REPLY_CLAIM = tl.constexpr(_REPLY["claim"][1])
REPLY_STATUS = tl.constexpr(_REPLY["status"][1])

CLOSED_ITEM = tl.constexpr(_native.RING_CLOSED_ITEM)

if triton.knobs.runtime.interpret:

    def now_ns():
        return time.monotonic_ns()

    def pause(ns):
        time.sleep(ns.value * 1e-9)

    @triton.jit
    def load_acquire(word):
        return tl.atomic_add(word, 0, sem="acquire", scope="sys")

    @triton.jit
    def store_release(word, value):
        tl.atomic_xchg(word, value, sem="release", scope="sys")

else:
    # Not Triton's atomics: PCIe atomics on host memory are a separate request type, which not
    # every platform supports. Loads and stores always work.

    @triton.jit
    def now_ns():
        return tl.inline_asm_elementwise(
            "mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def pause(ns):
        """Suspend the warp for a time between 0 and twice ``ns``, a constant."""
        tl.inline_asm_elementwise(
            "{ nanosleep.u32 $1; mov.u32 $0, 0; }",
            "=r,r",
            [ns],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
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
        # Every thread of the program runs inline asm; thread 0 made the preceding stores.
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
    """An address within a header, as a pointer to int64."""
    return address.to(tl.pointer_type(tl.int64))


@triton.jit
def at_half(address):
    """An address within a header, as a pointer to int32."""
    return address.to(tl.pointer_type(tl.int32))


@triton.jit
def at_array(address, dtype: tl.constexpr):
    """The start of an array; the ring aligns these to 128 bytes, so accesses can be 16-byte vectorized. A constant in
    ``address`` loses the alignment hint: Triton 3.8 turns it into an offset from another pointer."""
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
