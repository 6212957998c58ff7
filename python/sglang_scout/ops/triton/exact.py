"""Tensor-core products with the accuracy of fp32.

Decode attention and digest scores are bound by memory: a KV token of 128 bf16 channels costs 512
bytes and, with the query heads of a group padded to 16 rows, 8 k multiply-adds, a third of what
the tensor cores of an H100 do in that time even when each product is computed three times. So the
fp32 operand is kept whole, and a kernel differs from its reference by the order of sums only.
"""

import triton
import triton.language as tl

# The interpreter keeps bfloat16 as bits and would multiply those: there the parts, which are
# rounded as on the device, are multiplied as fp32, which gives the same products.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))


@triton.jit
def dot_fp32(a, b, acc):
    """acc + a b. a: [M, K] float32; b: [K, N] float32, bfloat16 or float16; acc: [M, N] float32.

    A bfloat16 b is multiplied by three bfloat16 parts of a, which hold its 24 bits; all products
    are exact in the accumulator. Other types go through three TF32 products (22 bits of each).
    The small parts come first, as sums lose least that way.
    """
    if b.dtype == tl.bfloat16:
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        mid = rest.to(tl.bfloat16)
        low = (rest - mid.to(tl.float32)).to(tl.bfloat16)
        if INTERPRETED:
            b32 = b.to(tl.float32)
            acc = tl.dot(low.to(tl.float32), b32, acc)
            acc = tl.dot(mid.to(tl.float32), b32, acc)
            acc = tl.dot(high.to(tl.float32), b32, acc)
        else:
            acc = tl.dot(low, b, acc)
            acc = tl.dot(mid, b, acc)
            acc = tl.dot(high, b, acc)
    else:
        acc = tl.dot(a, b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


@triton.jit
def finite(x):
    """x, and 0 where it is -inf: what to subtract from values that may all be -inf."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def tanh(x):
    """Within 2e-7 of tanh: by e^(-2|x|), and by its series near 0, where that loses digits."""
    e = tl.exp(-2.0 * tl.abs(x))
    large = (1.0 - e) / (1.0 + e)
    square = x * x
    near = x * (1.0 - square * (1 / 3 - square * (2 / 15 - square * (17 / 315))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0, -large, large))


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x in another float type, to the nearest even, also in the interpreter, which truncates."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)
