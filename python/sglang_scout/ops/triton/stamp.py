"""The device's clock written down between two kernels of a stream: what a timeline of a recorded step is made of."""

import triton
import triton.language as tl

from sglang_scout.ops.triton.ring_words import now_ns


@triton.jit
def stamp_kernel(stamps, index):
    """One word of ``stamps``, int64: nanoseconds of ``%globaltimer``."""
    tl.store(stamps + index, now_ns())


def stamp(stamps, index):
    """Write the time at which the stream comes here to ``stamps[index]``."""
    stamp_kernel[(1,)](stamps, index, num_warps=1)
