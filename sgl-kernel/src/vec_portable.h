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
  using I = int32_t __attribute__((vector_size(16)));  // sums of products of codes
  using S = int16_t __attribute__((vector_size(16)));  // 16-bit codes

  static constexpr int kLanes = 4;
  static constexpr int kRegisters = 16;
  static constexpr bool kSpecialiseDims = false;  // compile-time head sizes
  static constexpr int kMaxGroupChunk = 4;        // query heads per pass over a K row
  // V column pairs held in registers at a time, by query heads.
  static constexpr int pairs_per_pass(int) { return 1; }
  // Query heads for which memory binds rather than arithmetic, see weigh_block.
  static constexpr bool by_rows(int) { return false; }
  static constexpr int token_block(int group) {  // tokens per pass over the query rows
    return group <= 2 ? 4 : group <= 3 ? 2 : 1;
  }

  static F zero() { return F{}; }
  static F set1(float x) { return F{x, x, x, x}; }
  static F load(const float* p) {
    F x;
    __builtin_memcpy(&x, p, sizeof x);
    return x;
  }
  static void store(float* p, F x) { __builtin_memcpy(p, &x, sizeof x); }
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

  static F abs(F x) { return (F)((U)x & 0x7fffffffu); }
  static F round(F x) { return round_magic(x) - set1(12582912.0f); }  // below 2^22

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

  // 4 * kLanes codes as 16-bit integers, and what attend_int8.h does with them: those of even
  // bytes, those of odd ones.
  static void split_codes(const char* p, S& even, S& odd) {
    S x;
    __builtin_memcpy(&x, p, sizeof x);
    even = (x << 8) >> 8;
    odd = x >> 8;
  }
  static I zero_words() { return I{}; }
  static S set1_pair(const int16_t* p) { return S{p[0], p[1], p[0], p[1], p[0], p[1], p[0], p[1]}; }
  static I add_words(I a, I b) { return a + b; }
  // acc + for each word the sum of the products of its two pairs of codes.
  static I dot_shorts(I acc, S a, S b) {
    return acc + low_shorts(a) * low_shorts(b) + ((I)a >> 16) * ((I)b >> 16);
  }
  static I low_shorts(S x) { return (I)((U)x << 16) >> 16; }
  static F from_words(I x) { return __builtin_convertvector(x, F); }
  static void store_shorts(F x, int16_t* p) {
    const F whole = round(x);
    int16_t codes[kLanes];
    for (int i = 0; i < kLanes; ++i) {
      codes[i] = whole[i] == whole[i] ? static_cast<int16_t>(whole[i]) : int16_t{0};
    }
    __builtin_memcpy(p, codes, sizeof codes);
  }

  // Largest bits without the sign, of 16-bit or 32-bit elements. Compared as signed numbers, as the
  // base instruction set of x86 does.
  using Bits = I;
  static constexpr int kBytes = 16;
  template <DType T>
  static Bits max_magnitude(Bits most, const char* p) {
    U raw;
    __builtin_memcpy(&raw, p, sizeof raw);
    if constexpr (T == DType::kF32) {
      const I x = (I)(raw & 0x7fffffffu);
      return x > most ? x : most;
    } else {
      const S x = (S)(raw & 0x7fff7fffu);
      return (I)(x > (S)most ? x : (S)most);
    }
  }
  template <DType T>
  static uint32_t highest_magnitude(Bits a) {
    uint32_t most = 0;
    for (int i = 0; i < kLanes; ++i) {
      const uint32_t x = static_cast<uint32_t>(a[i]);
      const uint32_t high = T == DType::kF32 ? x : x >> 16;
      const uint32_t low = T == DType::kF32 ? x : x & 0xffffu;
      most = high > most ? high : most;
      most = low > most ? low : most;
    }
    return most;
  }

  // A page that is rewritten while a late thread reads it has values beyond the scale taken before,
  // or no numbers. Their codes are thrown away, but C++ does not define such a conversion.
  static F to_range(F x) {
    x = x > set1(-128.0f) ? x : set1(-128.0f);
    return x < set1(127.0f) ? x : set1(127.0f);
  }
  // 2 * kLanes codes of what load_pair<T> gave, of values that round to [-128, 127], half to even.
  using Codes = int8_t __attribute__((vector_size(8)));
  template <DType T>
  static Codes to_codes(F x, F y) {
    constexpr bool kInTurn = T == DType::kBF16;
    const F a = to_range(round(x)), b = to_range(round(y));
    Codes to;
    for (int i = 0; i < kLanes; ++i) {
      to[kInTurn ? 2 * i : i] = static_cast<int8_t>(a[i]);
      to[kInTurn ? 2 * i + 1 : kLanes + i] = static_cast<int8_t>(b[i]);
    }
    return to;
  }
  static void store(int8_t* p, Codes x) { __builtin_memcpy(p, &x, sizeof x); }
  // Where the instruction set has them: kBytes past the caches, and the order of later stores
  // behind them.
  static void stream(int8_t* to, const int8_t* from) { __builtin_memcpy(to, from, kBytes); }
  static void finish_streams() {}

  // Widens 2 * kLanes elements. bf16 comes as (even elements, odd elements), others in order.
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
    } else if constexpr (T == DType::kI8) {
      using C = int8_t __attribute__((vector_size(4)));
      C low, high;
      __builtin_memcpy(&low, p, sizeof low);
      __builtin_memcpy(&high, p + sizeof low, sizeof high);
      x = __builtin_convertvector(low, F);
      y = __builtin_convertvector(high, F);
    } else {
      x = load(reinterpret_cast<const float*>(p));
      y = load(reinterpret_cast<const float*>(p) + kLanes);
    }
  }
};

}  // namespace
}  // namespace scout
