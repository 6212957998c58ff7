// Sixteen-lane vectors: AVX-512 F, BW, DQ, VL. Same interface and rules as vec_portable.h.
//
// VDPBF16PS serves queries that are bf16 (attend_cpu_avx512bf16.cpp): others it would round.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "scout/attend.h"

namespace scout {
namespace {

struct Vec {
  using F = __m512;
  using I = __m512i;  // sums of products of codes
  using S = __m512i;  // 16-bit codes

  static constexpr int kLanes = 16;
  static constexpr int kRegisters = 32;
  static constexpr bool kSpecialiseDims = true;  // compile-time head sizes
  static constexpr int kMaxGroupChunk = 8;
  static constexpr int pairs_per_pass(int group) { return group <= 6 ? 2 : 1; }
  static constexpr bool by_rows(int group) { return group <= 5; }
  static constexpr int token_block(int group) { return group <= 5 ? 4 : 2; }

  static F zero() { return _mm512_setzero_ps(); }
  static F set1(float x) { return _mm512_set1_ps(x); }
  static F load(const float* p) { return _mm512_loadu_ps(p); }
  static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
  static F add(F a, F b) { return _mm512_add_ps(a, b); }
  static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
  static F div(F a, F b) { return _mm512_div_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
  static F max(F a, F b) { return _mm512_max_ps(a, b); }
  static F min(F a, F b) { return _mm512_min_ps(a, b); }
  static F copysign(F magnitude, F sign) {
    const F bit = _mm512_set1_ps(-0.0f);
    return _mm512_or_ps(_mm512_andnot_ps(bit, magnitude), _mm512_and_ps(bit, sign));
  }

  static F abs(F x) { return _mm512_abs_ps(x); }

  static float first(F x) { return _mm512_cvtss_f32(x); }
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

  static F exp2_split(F x, F& fraction) {
    const F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    fraction = _mm512_sub_ps(x, n);
    return n;
  }
  static F scale_by(F x, F power) { return _mm512_scalef_ps(x, power); }
  static F zero_below(F x, F keep, float bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(keep, _mm512_set1_ps(bound), _CMP_NLT_UQ), x);
  }

  // 4 * kLanes codes as 16-bit integers: those of even bytes, those of odd ones.
  static void split_codes(const char* p, S& even, S& odd) {
    const __m512i x = _mm512_loadu_si512(p);
    even = _mm512_srai_epi16(_mm512_slli_epi16(x, 8), 8);
    odd = _mm512_srai_epi16(x, 8);
  }
  static I zero_words() { return _mm512_setzero_si512(); }
  static S set1_pair(const int16_t* p) {
    int32_t pair;
    __builtin_memcpy(&pair, p, sizeof pair);
    return _mm512_set1_epi32(pair);
  }
  static I add_words(I a, I b) { return _mm512_add_epi32(a, b); }
  static S load_shorts(const int16_t* p) { return _mm512_loadu_si512(p); }
  static I dot_shorts(I acc, S a, S b) {
#ifdef __AVX512VNNI__
    // Not the intrinsic: GCC 12 then copies the sums around the loop, 1.3 times slower.
    asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
    return acc;
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(a, b));
#endif
  }
#ifdef __AVX512BF16__
  static S load_bf16(const char* p) { return _mm512_loadu_si512(p); }
  // acc + sums of the products of pairs of bf16 numbers.
  static F dot_bf16(F acc, S a, S b) {
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(a), reinterpret_cast<__m512bh>(b));
  }
#endif
  static F from_words(I x) { return _mm512_cvtepi32_ps(x); }
  static void store_shorts(F x, int16_t* p) {
    const __m256i codes = _mm512_cvtepi32_epi16(_mm512_cvtps_epi32(x));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), codes);
  }

  // Largest bits without the sign, of 16-bit or 32-bit elements.
  using Bits = __m512i;
  static constexpr int kBytes = 64;
  template <DType T>
  static Bits max_magnitude(Bits a, const char* p) {
    const __m512i raw = _mm512_loadu_si512(p);
    if constexpr (T == DType::kF32)
      return _mm512_max_epu32(a, _mm512_and_si512(raw, _mm512_set1_epi32(0x7fffffff)));
    else
      return _mm512_max_epu16(a, _mm512_and_si512(raw, _mm512_set1_epi16(0x7fff)));
  }
  template <DType T>
  static uint32_t highest_magnitude(Bits a) {
    if constexpr (T != DType::kF32)
      a = _mm512_max_epu32(_mm512_srli_epi32(a, 16),
                           _mm512_and_si512(a, _mm512_set1_epi32(0xffff)));
    return _mm512_reduce_max_epu32(a);
  }

  // 2 * kLanes codes of what load_pair<T> gave, of values that round to [-128, 127], half to even.
  using Codes = __m256i;
  template <DType T>
  static Codes to_codes(F x, F y) {
    const __m512i a = _mm512_cvtps_epi32(x), b = _mm512_cvtps_epi32(y);
    if constexpr (T == DType::kBF16) {
      const __m512i words = _mm512_mask_blend_epi8(0x2222222222222222, a, _mm512_slli_epi32(b, 8));
      return _mm512_cvtepi32_epi16(words);
    } else {
      return _mm256_set_m128i(_mm512_cvtepi32_epi8(b), _mm512_cvtepi32_epi8(a));
    }
  }
  static void store(int8_t* p, Codes x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), x); }
  // kBytes past the caches.
  static void stream(int8_t* to, const int8_t* from) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to), _mm512_loadu_si512(from));
  }
  static void finish_streams() { _mm_sfence(); }

  template <DType T>
  static void load_pair(const char* p, F& x, F& y) {
    if constexpr (T == DType::kBF16) {
      const __m512i raw = _mm512_loadu_si512(p);
      x = _mm512_castsi512_ps(_mm512_slli_epi32(raw, 16));
      y = _mm512_castsi512_ps(_mm512_and_si512(raw, _mm512_set1_epi32(-65536)));
    } else if constexpr (T == DType::kF16) {
      x = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
      y = _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p) + 1));
    } else if constexpr (T == DType::kI8) {
      const __m128i* const codes = reinterpret_cast<const __m128i*>(p);
      x = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes)));
      y = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(codes + 1)));
    } else {
      x = load(reinterpret_cast<const float*>(p));
      y = load(reinterpret_cast<const float*>(p) + kLanes);
    }
  }
};

}  // namespace
}  // namespace scout
