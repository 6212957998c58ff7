// Sixteen-lane vectors: AVX-512 F, BW, DQ, VL. The interface is explained in vec_avx2.h.
//
// VDPBF16PS serves queries that are bf16 (attend_avx512bf16.cpp): others it would round.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attend.h"

namespace scout {
namespace {

struct Vec {
  using F = __m512;
  using S = __m512i;  // bf16 numbers

  static constexpr int kLanes = 16;
  // AMD Zen 4 has few lines on their way into its L1: hints as far as L2 made pages of bf16 1.9
  // times as fast.
  static constexpr int kPrefetchLocality = 2;
  static constexpr int kMaxGroupChunk = 8;
  static constexpr int pairs_per_pass(int group) { return group <= 6 ? 2 : 1; }
  static constexpr bool by_rows(int group, int) { return group <= 5; }
  static constexpr int token_block(int group) { return group <= 5 ? 4 : 2; }

  static constexpr int column(DType type, int i) {
    return type == DType::kBF16 ? i / 16 + i % 16 * 2 : i;
  }
  static constexpr float widening(DType type) { return type == DType::kE4M3 ? 256.0f : 1.0f; }
  static constexpr float lift(DType) { return 1.0f; }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F in_register(F x) { return x; }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }

  static float hmax(F x) { return _mm512_reduce_max_ps(x); }
  static float hsum(F x) { return _mm512_reduce_add_ps(x); }
  static void hsum4(F a, F b, F c, F d, float* sums) {
    const F ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
    const F cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
    const F low = _mm512_shuffle_ps(ab, cd, 0x44);
    const F high = _mm512_shuffle_ps(ab, cd, 0xee);
    const F s = _mm512_add_ps(low, high);
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(s), _mm512_extractf32x8_ps(s, 1));
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
  }
  static void hmax4(F a, F b, F c, F d, float* most) {
    most[0] = hmax(a);
    most[1] = hmax(b);
    most[2] = hmax(c);
    most[3] = hmax(d);
  }

  static F exp2_split(F x, F& fraction) {
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    fraction = _mm512_sub_ps(x, n);
    return n;
  }
  static F scale_by(F x, F power) { return _mm512_scalef_ps(x, power); }
  static F zero_below(F x, F keep, float bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(keep, _mm512_set1_ps(bound), _CMP_NLT_UQ), x);
  }

#ifdef __AVX512BF16__
  static S load_shorts(const int16_t* p) { return _mm512_loadu_si512(p); }
  // acc + sums of the products of pairs of bf16 numbers.
  static F dot_bf16(F acc, S a, S b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
  static S set1_pair(const float* pair) {
    int32_t bits;
    __builtin_memcpy(&bits, pair, sizeof bits);
    return _mm512_set1_epi32(bits);
  }
  // Pairs of bf16 numbers, x below y, rounded to nearest.
  static void store_pairs(float* p, F x, F y) {
    const S low = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(x)));
    const S high = _mm512_cvtepu16_epi32(reinterpret_cast<__m256i>(_mm512_cvtneps_pbh(y)));
    _mm512_storeu_si512(p, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
  }

  // The bf16 numbers of all fp8 numbers without their sign, in bytes. By table, because the dot
  // product reads what is subnormal in bf16 as zero: shifts would lose the small ones.
  template <DType T>
  struct Bf16Of {
    alignas(64) uint8_t low[128], high[128];

    constexpr Bf16Of() : low(), high() {
      constexpr int kMantissa = T == DType::kE4M3 ? 3 : 2, kBias = T == DType::kE4M3 ? 7 : 15;
      for (int i = 1; i < 128; ++i) {
        int exponent = i >> kMantissa, fraction = i - (exponent << kMantissa);
        if (exponent == 0) {
          for (exponent = 1; fraction < 1 << kMantissa; fraction *= 2) --exponent;
          fraction -= 1 << kMantissa;
        }
        const bool not_finite = T == DType::kE5M2 && exponent == 31;
        const int biased = not_finite ? 255 : exponent - kBias + 127;
        const int bits = biased << 7 | fraction << (7 - kMantissa);
        low[i] = static_cast<uint8_t>(bits & 255);
        high[i] = static_cast<uint8_t>(bits >> 8);
      }
    }
    S of(const uint8_t (&table)[128], S bytes) const {
      return _mm512_permutex2var_epi8(_mm512_load_si512(table), bytes,
                                      _mm512_load_si512(table + 64));
    }
    // Of 64 numbers, those of each 128 bits in order, its first half in x and the others in y.
    void widen(S bytes, S& x, S& y) const {
      const S signs = _mm512_set1_epi8(-128), l = of(low, bytes);
      const S h = _mm512_ternarylogic_epi32(of(high, bytes), bytes, signs, 0xf8);  // a | b & c
      x = _mm512_unpacklo_epi8(l, h);
      y = _mm512_unpackhi_epi8(l, h);
    }
  };
  template <DType T>
  static constexpr Bf16Of<T> kBf16Of{};

  // One line: 32 bf16 or 64 fp8 numbers.
  template <DType T>
  static void load_words(const char* p, S (&x)[2 / bytes_of(T)]) {
    if constexpr (T == DType::kBF16) {
      x[0] = _mm512_loadu_si512(p);
    } else {
      kBf16Of<T>.widen(_mm512_loadu_si512(p), x[0], x[1]);
    }
  }
  // The column, of these, that comes as word i.
  static constexpr int word_column(DType type, int i) {
    return type == DType::kBF16 ? i : i % 32 / 8 * 16 + i / 32 * 8 + i % 8;
  }
  // Of 64 fp8 numbers of two rows, or of one row and zeros, as pairs of one column.
  template <DType T>
  static void load_pairs(const char* p, const char* q, S (&pairs)[4]) {
    const S a = _mm512_loadu_si512(p);
    const S b = q != nullptr ? _mm512_loadu_si512(q) : _mm512_setzero_si512();
    kBf16Of<T>.widen(_mm512_unpacklo_epi8(a, b), pairs[0], pairs[1]);
    kBf16Of<T>.widen(_mm512_unpackhi_epi8(a, b), pairs[2], pairs[3]);
  }
  // The column, of these 64, whose pair comes as the i-th.
  static constexpr int pair_column(int i) { return i % 16 / 4 * 16 + i / 16 * 4 + i % 4; }
#endif

  template <DType T>
  static void load_pair(const char* p, F& x, F& y) {
    if constexpr (T == DType::kBF16) {
      const __m512i raw = _mm512_loadu_si512(p);
      x = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
      y = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(-65536)));
    } else if constexpr (T == DType::kF16) {
      x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      y = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1));
    } else if constexpr (bytes_of(T) == 1) {
      const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      __m512i half = _mm512_slli_epi16(_mm512_cvtepi8_epi16(raw), T == DType::kE5M2 ? 8 : 7);
      if constexpr (T == DType::kE4M3)  // which has the sign twice
        half = _mm512_and_si512(half, _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
      x = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
      y = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
    } else {
      x = load(reinterpret_cast<const float*>(p));
      y = load(reinterpret_cast<const float*>(p) + kLanes);
    }
  }
};

}  // namespace
}  // namespace scout
