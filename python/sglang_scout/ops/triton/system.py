"""The device's clock, and loads and stores of host memory that are ordered for the whole system; in the interpreter
Triton's atomics."""

import time

import triton
import triton.language as tl

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
            "{ nanosleep.u32 $1; mov.u32 $0, 0; }", "=r,r", [ns],
            dtype=tl.int32, is_pure=False, pack=1,
        )

    @triton.jit
    def load_acquire(word):
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.s64 $0, [$1];", "=l,l", [word],
            dtype=tl.int64, is_pure=False, pack=1,
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
            "=r,l,l", [word, value], dtype=tl.int32, is_pure=False, pack=1,
        )


@triton.jit
def stamp_kernel(stamps, index):
    """One word of ``stamps``, int64: nanoseconds of ``%globaltimer``."""
    tl.store(stamps + index, now_ns())
