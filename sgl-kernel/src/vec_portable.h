// Four-lane vectors in GCC/Clang vector extensions: any architecture, base instruction set only.
//
// Everything below sits in an unnamed namespace on purpose: the vec_*.h files define the same names
// and each translation unit that includes one is compiled with its own flags, so nothing may be
// shared between them by the linker.
#pragma once

#include <cstdint>

#include "scout/attend.h"

namespace scout {
namespace {

struct Vec {
  using F = float __attribute__((vector_size(16)));
  using U = uint32_t __attribute__((vector_size(16)));
  using H = uint16_t __attribute__((vector_size(8)));
  using B = uint8_t __attribute__((vector_size(4)));

  static constexpr int kLanes = 4;
  static constexpr bool kSpecialiseDims = false;  // compile-time head sizes
  // Of __builtin_prefetch: 3 is into all cache levels, 2 leaves out the first.
  static constexpr int kPrefetchLocality = 3;
  static constexpr int kMaxGroupChunk = 4;  // query heads per pass over a K row
  // V column pairs held in registers at a time, by query heads.
  static constexpr int pairs_per_pass(int) { return 1; }
  // Query heads, for elements of so many bytes, for which memory binds rather than arithmetic, see
  // weigh_block.
  static constexpr bool by_rows(int, int) { return false; }
  static constexpr int token_block(int group) {  // tokens per pass over the query rows
    return group <= 2 ? 4 : group <= 3 ? 2 : 1;
  }
  // The column, of the 2 * kLanes that load_pair takes, that comes as its element i.
  static constexpr int column(DType type, int i) {
    return type == DType::kBF16 ? i / 4 + i % 4 * 2 : i;
  }
  // By what the numbers of a type are more than those that load_pair makes of them. The bits of
  // e4m3 become those of a type whose exponent begins lower; the product with this is exact, so it
  // is left to a factor that there is anyway.
  static constexpr float widening(DType type) { return type == DType::kE4M3 ? 256.0f : 1.0f; }
  // By what queries and weights are to be more than they are, so that sums of their products with
  // what load_pair makes are normal numbers.
  static constexpr float lift(DType) { return 1.0f; }

  static F zero() { return F{}; }
  static F set1(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
  // Not to be loaded again for each use: loads are what binds.
  static F in_register(F x) { return x; }
  static F add(F a, F b) { return a + b; }
  static F sub(F a, F b) { return a - b; }
  static F mul(F a, F b) { return a * b; }
  static F div(F a, F b) { return a / b; }
  static F fma(F a, F b, F c) { return a * b + c; }
  // A NaN in b survives, as with the x86 instructions when it is their second operand.
  static F max(F a, F b) { return a > b ? a : b; }
  static F min(F a, F b) { return a < b ? a : b; }
  static F copysign(F magnitude, F sign) {
    const U bit = U{} + 0x80000000u;
    return (F)(((U)magnitude & ~bit) | ((U)sign & bit));
  }

  static float first(F x) { return x[0]; }
  static float hmax(F x) {
    float m = x[0];
    for (int i = 1; i < kLanes; ++i) m = x[i] > m ? x[i] : m;
    return m;
  }
  static float hsum(F x) { return (x[0] + x[1]) + (x[2] + x[3]); }
  static void hsum4(F a, F b, F c, F d, float* sums) {
    sums[0] = hsum(a);
    sums[1] = hsum(b);
    sums[2] = hsum(c);
    sums[3] = hsum(d);
  }
  static void hmax4(F a, F b, F c, F d, float* most) {
    most[0] = hmax(a);
    most[1] = hmax(b);
    most[2] = hmax(c);
    most[3] = hmax(d);
  }

  // 2^n for integral n in [-126, 127] given as magic + n, magic = 1.5 * 2^23.
  static F pow2_of_magic(F shifted) { return (F)(((U)shifted - 0x4b400000u + 127u) << 23); }
  static F round_magic(F x) { return x + set1(12582912.0f); }
  static F exp2_split(F x, F& fraction) {
    const F shifted = round_magic(x);
    fraction = x - (shifted - set1(12582912.0f));
    return pow2_of_magic(shifted);
  }
  static F scale_by(F x, F power) { return x * power; }
  // x where keep >= bound or keep is NaN, else 0.
  static F zero_below(F x, F keep, float bound) { return (F)((U)x & ~(U)(keep < set1(bound))); }

  static F widen_half(U h) {
    const U magnitude = (h & 0x7fffu) << 13;
    // The exponent moves by 112 in an exact product, which also makes half's denormals normal.
    U bits = (U)((F)magnitude * set1(0x1p112f));
    bits |= (U)(magnitude >= 0x0f800000u) & 0x7f800000u;  // inf and NaN
    return (F)(bits | ((h & 0x8000u) << 16));
  }

  // The same of fp8, whose bits become the upper ones of a half.
  template <DType T>
  static F widen_byte(const char* p) {
    B bytes;
    __builtin_memcpy(&bytes, p, sizeof bytes);
    const U raw = __builtin_convertvector(bytes, U);
    if constexpr (T == DType::kE5M2) return widen_half(raw << 8);
    return widen_half((raw & 0x7fu) << 7 | (raw & 0x80u) << 8);
  }

  // Widens 2 * kLanes elements, to 1 / widening(T) of them, in the order of `column`.
  template <DType T>
  static void load_pair(const char* p, F& x, F& y) {
    if constexpr (T == DType::kBF16) {
      U raw;
      __builtin_memcpy(&raw, p, sizeof raw);
      x = (F)(raw << 16);
      y = (F)(raw & 0xffff0000u);
    } else if constexpr (T == DType::kF16) {
      H low, high;
      __builtin_memcpy(&low, p, sizeof low);
      __builtin_memcpy(&high, p + sizeof low, sizeof high);
      x = widen_half(__builtin_convertvector(low, U));
      y = widen_half(__builtin_convertvector(high, U));
    } else if constexpr (bytes_of(T) == 1) {
      x = widen_byte<T>(p);
      y = widen_byte<T>(p + kLanes);
    } else {
      x = load(reinterpret_cast<const float*>(p));
      y = load(reinterpret_cast<const float*>(p) + kLanes);
    }
  }
};

}  // namespace
}  // namespace scout
