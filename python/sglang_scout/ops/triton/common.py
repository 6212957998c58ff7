"""What kernels share: tensor-core products with fp32 accuracy, conversions, the device's clock, and loads and stores of
host memory that are ordered for the whole system.

Decode attention and digest scoring are memory-bound, even when each product is computed three times. So fp32 operands
keep full precision, and a kernel differs from its reference only in summation order, except where it says so.
"""

import time

import torch
import triton
import triton.language as tl

# The interpreter stores bfloat16 as raw bits and would multiply those: there the parts, rounded
# as on the device, are multiplied in fp32, which gives the same products.
INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
# torch converts values out of e4m3's range to NaN, since 2.14 to 448.
_E4M3_LARGEST = tl.constexpr(int(torch.tensor(1e3).to(torch.float8_e4m3fn).view(torch.uint8)))


@triton.jit
def dot_narrow(a, b, acc):
    """acc + a b of one 16-bit type."""
    if INTERPRETED:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc)
    else:
        acc = tl.dot(a, b, acc)
    return acc


@triton.jit
def dot_fp32(a, b, acc):
    """acc + a b, of float32, bfloat16 or float16; acc float32.

    Products of the same 16-bit type are exact. Otherwise a is widened, and with a bfloat16 b split into three bfloat16
    parts, which hold its 24 bits; other types use three TF32 products (22 bits of each). Small parts are added first.
    """
    if a.dtype == b.dtype and a.dtype != tl.float32:
        acc = dot_narrow(a, b, acc)
    elif b.dtype == tl.bfloat16:
        a = a.to(tl.float32)
        high = a.to(tl.bfloat16)
        rest = a - high.to(tl.float32)
        mid = rest.to(tl.bfloat16)
        acc = dot_narrow((rest - mid.to(tl.float32)).to(tl.bfloat16), b, acc)
        acc = dot_narrow(mid, b, acc)
        acc = dot_narrow(high, b, acc)
    else:
        acc = tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="tf32x3")
    return acc


def stored_as(dtype: torch.dtype) -> tuple[tl.dtype, int]:
    """Dtype that kernels load K and V as, and FP8 of `widened`: the number of mantissa bits, 0 for wider types. fp8 is
    loaded as bytes: Triton has no e4m3 on A100 and does not round to it as torch does."""
    fp8 = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}.get(dtype, 0)
    return (tl.uint8 if fp8 else getattr(tl, str(dtype).removeprefix("torch."))), fp8


def as_loaded(x: torch.Tensor) -> torch.Tensor:
    """A view of the same memory with the dtype of `stored_as`."""
    return x.view(torch.uint8) if stored_as(x.dtype)[1] else x


@triton.jit
def widened(x, FP8: tl.constexpr):
    """Elements of K or V; fp8 converted exactly to bfloat16, with the NaN of e4m3 as 480. e5m2 is the upper byte of a
    half. e4m3 is placed in a float32, whose exponent bias is 120 higher; small ones are denormal until the product."""
    if FP8 == 2:
        x = (x.to(tl.int16) << 8).to(tl.float16, bitcast=True).to(tl.float32).to(tl.bfloat16)
    elif FP8 == 3:
        bits = (x.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000  # 0x87F00000
        x = (bits.to(tl.float32, bitcast=True) * 2.0**120).to(tl.bfloat16)
    return x


@triton.jit
def limited(x, LARGEST: tl.constexpr):
    """Clamped fp32, with NaN as 0."""
    x = x.to(tl.float32)
    return tl.where(x == x, tl.minimum(tl.maximum(x, -LARGEST), LARGEST), 0.0)


@triton.jit
def fp8_bits(x, FP8: tl.constexpr):
    """x rounded to nearest-even fp8; values out of range as in torch."""
    BIAS: tl.constexpr = 7 if FP8 == 3 else 15
    LARGEST: tl.constexpr = _E4M3_LARGEST if FP8 == 3 else 0x7C
    DROPPED: tl.constexpr = 23 - FP8  # bits
    bits = x.to(tl.float32).to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    code = size - ((127 - BIAS) << 23) + (1 << (DROPPED - 1)) - 1 + ((size >> DROPPED) & 1)
    code = tl.minimum(code >> DROPPED, LARGEST)
    # Subnormals: adding 2^23 times the smallest makes the last mantissa bit one subnormal step, so the sum rounds.
    STEP: tl.constexpr = 151 - BIAS - FP8
    least = (size.to(tl.float32, bitcast=True) + 2.0 ** (STEP - 127)).to(tl.int32, bitcast=True)
    code = tl.where(size < ((128 - BIAS) << 23), least - (STEP << 23), code)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def dot_16(a, b, acc):
    """acc + a b, where the float32 a is exactly representable in b's dtype if that is 16-bit: one exact product."""
    if b.dtype == tl.float32:
        acc = tl.dot(a, b, acc, input_precision="tf32x3")
    else:
        acc = dot_narrow(rounded(a, b.dtype), b, acc)
    return acc


@triton.jit
def finite(x):
    """x with -inf replaced by 0: a safe maximum to subtract from values that may all be -inf."""
    return tl.where(x == float("-inf"), 0.0, x)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """x converted to another float type with round-to-nearest-even, also in the interpreter, which truncates."""
    if INTERPRETED and dtype == tl.bfloat16 and x.dtype != tl.bfloat16:
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        bits = tl.where(x == x, bits + 0x7FFF + ((bits >> 16) & 1), 0x7FC00000)
        return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


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
