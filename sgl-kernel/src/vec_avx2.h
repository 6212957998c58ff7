// Eight-lane vectors: AVX2, FMA and F16C. Same interface and rules as vec_portable.h.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "scout/attend.h"

namespace scout {
namespace {

struct Vec {
  using F = __m256;
  using I = __m256i;  // sums of products of codes
  using S = __m256i;  // 16-bit codes

  static constexpr int kLanes = 8;
  static constexpr int kRegisters = 16;
  static constexpr bool kSpecialiseDims = true;  // compile-time head sizes
  static constexpr int kMaxGroupChunk = 5;
  static constexpr int pairs_per_pass(int) { return 1; }
  static constexpr bool by_rows(int group) { return group <= 4; }
  static constexpr int token_block(int group) { return group <= 1 ? 4 : group <= 5 ? 2 : 1; }

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F div(F a, F b) { return _mm256_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }
  static F copysign(F magnitude, F sign) {
    const F bit = _mm256_set1_ps(-0.0f);
    return _mm256_or_ps(_mm256_andnot_ps(bit, magnitude), _mm256_and_ps(bit, sign));
  }

  static F abs(F x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }

  static float first(F x) { return _mm256_cvtss_f32(x); }
  static float hmax(F x) {
    __m128 m = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    m = _mm_max_ps(m, _mm_movehl_ps(m, m));
    return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
  }
  static float hsum(F x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
  }
  static void hsum4(F a, F b, F c, F d, float* sums) {
    const F ab = _mm256_add_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const F cd = _mm256_add_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const F low = _mm256_shuffle_ps(ab, cd, 0x44);
    const F high = _mm256_shuffle_ps(ab, cd, 0xee);
    const F s = _mm256_add_ps(low, high);
    _mm_storeu_ps(sums, _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1)));
  }

  static F exp2_split(F x, F& fraction) {
    const F n = _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    fraction = _mm256_sub_ps(x, n);
    const __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
    return _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  }
  static F scale_by(F x, F power) { return _mm256_mul_ps(x, power); }
  static F zero_below(F x, F keep, float bound) {
    return _mm256_andnot_ps(_mm256_cmp_ps(keep, _mm256_set1_ps(bound), _CMP_LT_OQ), x);
  }

  // 4 * kLanes codes as 16-bit integers: those of even bytes, those of odd ones.
  static void split_codes(const char* p, S& even, S& odd) {
    const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    even = _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8);
    odd = _mm256_srai_epi16(x, 8);
  }
  static I zero_words() { return _mm256_setzero_si256(); }
  static S set1_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm256_set1_epi32(pair);
  }
  static I add_words(I a, I b) { return _mm256_add_epi32(a, b); }
  static I dot_shorts(I acc, S a, S b) { return add_words(acc, _mm256_madd_epi16(a, b)); }
  static F from_words(I x) { return _mm256_cvtepi32_ps(x); }
  static void store_shorts(F x, int16_t* p) {
    const __m256i words = _mm256_cvtps_epi32(x);
    const __m128i codes =
        _mm_packs_epi32(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), codes);
  }

  // Largest bits without the sign, of 16-bit or 32-bit elements.
  using Bits = __m256i;
  static constexpr int kBytes = 32;
  template <DType T>
  static Bits max_magnitude(Bits a, const char* p) {
    const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    if constexpr (T == DType::kF32)
      return _mm256_max_epu32(a, _mm256_and_si256(raw, _mm256_set1_epi32(0x7fffffff)));
    else
      return _mm256_max_epu16(a, _mm256_and_si256(raw, _mm256_set1_epi16(0x7fff)));
  }
  template <DType T>
  static uint32_t highest_magnitude(Bits a) {
    if constexpr (T != DType::kF32)
      a = _mm256_max_epu32(_mm256_srli_epi32(a, 16),
                           _mm256_and_si256(a, _mm256_set1_epi32(0xffff)));
    __m128i m = _mm_max_epu32(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1));
    m = _mm_max_epu32(m, _mm_unpackhi_epi64(m, m));
    return _mm_cvtsi128_si32(_mm_max_epu32(m, _mm_shuffle_epi32(m, 1)));
  }

  // 2 * kLanes codes of what load_pair<T> gave, of values that round to [-128, 127], half to even.
  using Codes = __m128i;
  template <DType T>
  static Codes to_codes(F x, F y) {
    const __m256i a = _mm256_cvtps_epi32(x), b = _mm256_cvtps_epi32(y);
    __m256i words;
    if constexpr (T == DType::kBF16) {
      words = _mm256_blend_epi16(a, _mm256_slli_epi32(b, 16), 0xaa);
    } else {
      words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a, b), 0xd8);
    }
    return _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  }
  static void store(int8_t* p, Codes x) { _mm_storeu_si128(reinterpret_cast<__m128i*>(p), x); }
  // kBytes past the caches.
  static void stream(int8_t* to, const int8_t* from) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to),
                        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void finish_streams() { _mm_sfence(); }

  template <DType T>
  static void load_pair(const char* p, F& x, F& y) {
    if constexpr (T == DType::kBF16) {
      const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      x = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
      y = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(-65536)));
    } else if constexpr (T == DType::kF16) {
      x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      y = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + 1));
    } else if constexpr (T == DType::kI8) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes));
      y = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(codes, 8)));
    } else {
      x = load(reinterpret_cast<const float*>(p));
      y = load(reinterpret_cast<const float*>(p) + kLanes);
    }
  }
};

}  // namespace
}  // namespace scout
