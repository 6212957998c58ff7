// Eight-lane vectors: AVX2, FMA and F16C. vec_avx512.h has the same interface.
//
// In an unnamed namespace, as each translation unit that includes one of the two files is compiled
// with its own flags: nothing may be shared between them by the linker.
#pragma once

#include <immintrin.h>

#include <cstdint>

#include "attend.h"

namespace scout {
namespace {

struct Vec {
  using F = __m256;

  static constexpr int kLanes = 8;
  // Of __builtin_prefetch: into all cache levels, measured faster on AMD Zen 3 than L2 alone.
  static constexpr int kPrefetchLocality = 3;
  static constexpr int kMaxGroupChunk = 5;  // query heads per pass over a K row
  // V column pairs held in registers at a time, by query heads.
  static constexpr int pairs_per_pass(int) { return 1; }
  // Query heads, for elements of so many bytes, for which memory binds rather than arithmetic, see
  // weigh_block.
  static constexpr bool by_rows(int group, int bytes) { return group <= 4 && bytes > 1; }
  // Tokens per pass over the query rows.
  static constexpr int token_block(int group) { return group <= 1 ? 4 : group <= 5 ? 2 : 1; }

  // The column, of the 2 * kLanes that load_pair takes, that comes as its element i.
  static constexpr int column(DType type, int i) {
    if (type == DType::kBF16) return i / 8 + i % 8 * 2;
    return type == DType::kE4M3 ? i / 4 + i % 4 * 4 : i;
  }
  // By what the numbers of a type are more than those that load_pair makes of them, whose exponent
  // begins lower for e4m3. The product is exact, so it is left to a factor that there is anyway.
  static constexpr float widening(DType type) { return type == DType::kE4M3 ? 0x1p120f : 1.0f; }
  // By what queries and weights are to be more than they are, so that sums of their products with
  // what load_pair makes are normal numbers.
  static constexpr float lift(DType type) { return type == DType::kE4M3 ? 0x1p20f : 1.0f; }

  static F zero() { return _mm256_setzero_ps(); }
  static F set1(float x) { return _mm256_set1_ps(x); }
  static F load(const float* p) { return _mm256_loadu_ps(p); }
  static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
  // Not to be loaded again for each use: loads are what binds.
  static F in_register(F x) {
    asm("" : "+x"(x));
    return x;
  }
  static F add(F a, F b) { return _mm256_add_ps(a, b); }
  static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
  static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
  static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
  // A NaN in b survives, as in every min and max of x86.
  static F max(F a, F b) { return _mm256_max_ps(a, b); }
  static F min(F a, F b) { return _mm256_min_ps(a, b); }

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
  static void hmax4(F a, F b, F c, F d, float* most) {
    const F ab = _mm256_max_ps(_mm256_unpacklo_ps(a, b), _mm256_unpackhi_ps(a, b));
    const F cd = _mm256_max_ps(_mm256_unpacklo_ps(c, d), _mm256_unpackhi_ps(c, d));
    const F m = _mm256_max_ps(_mm256_shuffle_ps(ab, cd, 0x44), _mm256_shuffle_ps(ab, cd, 0xee));
    _mm_storeu_ps(most, _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1)));
  }

  // Of x in [-126, 127]: 2^x = scale_by(2^fraction, what is returned).
  static F exp2_split(F x, F& fraction) {
    const F magic = set1(12582912.0f + 127.0f);  // the sum's last bits are the biased exponent
    const F shifted = add(x, magic);
    fraction = sub(x, sub(shifted, magic));
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(shifted), 23));
  }
  static F scale_by(F x, F power) { return _mm256_mul_ps(x, power); }
  // x where keep >= bound or keep is NaN, else 0.
  static F zero_below(F x, F keep, float bound) {
    return _mm256_andnot_ps(_mm256_cmp_ps(keep, _mm256_set1_ps(bound), _CMP_LT_OQ), x);
  }

  // Widens 2 * kLanes elements, to 1 / widening(T) of them, in the order of `column`.
  template <DType T>
  static void load_pair(const char* p, F& x, F& y) {
    if constexpr (T == DType::kBF16) {
      const __m256i raw = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
      x = _mm256_castsi256_ps(_mm256_slli_epi32(raw, 16));
      y = _mm256_castsi256_ps(_mm256_and_si256(raw, _mm256_set1_epi32(-65536)));
    } else if constexpr (T == DType::kF16) {
      x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      y = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + 1));
    } else if constexpr (T == DType::kE5M2) {
      const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
      x = _mm256_cvtph_ps(_mm_unpacklo_epi8(_mm_setzero_si128(), raw));
      y = _mm256_cvtph_ps(_mm_unpackhi_epi8(_mm_setzero_si128(), raw));
    } else if constexpr (T == DType::kE4M3) {
      // As bf16, whose exponent begins 120 lower: fewer instructions than by way of fp16. What is
      // subnormal in e4m3 is so in fp32, which AMD Zen 3 multiplies at full speed; other CPUs may
      // not, and with denormals taken as zero it is lost.
      const __m256i twice =
          _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      const __m256i even_odd = _mm256_sllv_epi32(twice, _mm256_setr_epi32(8, 8, 8, 8, 0, 0, 0, 0));
      const __m256i words = _mm256_and_si256(_mm256_srai_epi16(even_odd, 4),  // the sign five times
                                             _mm256_set1_epi16(static_cast<int16_t>(0x87f0)));
      x = _mm256_castsi256_ps(_mm256_slli_epi32(words, 16));
      y = _mm256_castsi256_ps(_mm256_and_si256(words, _mm256_set1_epi32(-65536)));
    } else {
      x = load(reinterpret_cast<const float*>(p));
      y = load(reinterpret_cast<const float*>(p) + kLanes);
    }
  }
};

}  // namespace
}  // namespace scout
