"""Device timestamps between two kernels of a stream, from which the timeline of a recorded step is built."""

import triton
import triton.language as tl

from sglang_scout.ops.triton.ring_words import now_ns


@triton.jit
def stamp_kernel(stamps, index):
    """One word of ``stamps``, int64: nanoseconds of ``%globaltimer``."""
    tl.store(stamps + index, now_ns())


def stamp(stamps, index):
    """Write the time at which the stream reaches this point to ``stamps[index]``."""
    stamp_kernel[(1,)](stamps, index, num_warps=1)
