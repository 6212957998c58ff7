// Sums of a query over the sign bits of a page by table lookup, as in FAISS FastScan
// (arXiv:1704.07355): the sums of +-q over four channels are a table of 16 bytes, four bits of a
// token are the index, and one shuffle does 32 lookups. Pairs are added in 8 bits, the rest in 16.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>

#include "rotate_kernel.h"

namespace scout {
namespace {

// Vector operations on one plane of a page; BothPlanes has both, one in each half.
struct Plane {
  using I = __m256i;
  static constexpr int kPlanes = 1;
  static I load(const void* p) { return _mm256_load_si256(static_cast<const I*>(p)); }
  static void store(void* p, I x) { _mm256_store_si256(static_cast<I*>(p), x); }
  static I table(const void* p) { return load(p); }
  static I row(const uint8_t* p, ptrdiff_t, __m256i mask) {
    return _mm256_maskload_epi32(reinterpret_cast<const int*>(p), mask);
  }
  static I zero() { return _mm256_setzero_si256(); }
  static I unpack_low(I a, I b) { return _mm256_unpacklo_epi8(a, b); }
  static I unpack_high(I a, I b) { return _mm256_unpackhi_epi8(a, b); }
  static I low_half(I x) { return _mm256_and_si256(x, _mm256_set1_epi8(15)); }
  static I high_half(I x) { return low_half(_mm256_srli_epi16(x, 4)); }
  static I look_up(I table, I at) { return _mm256_shuffle_epi8(table, at); }
  static I add8(I a, I b) { return _mm256_add_epi8(a, b); }
  static I add16(I a, I b) { return _mm256_add_epi16(a, b); }
  static I odd_bytes(I x) { return _mm256_maddubs_epi16(x, _mm256_set1_epi16(256)); }
  static __m256i plane(I x, int) { return x; }
};

#ifdef __AVX512BW__
struct BothPlanes {
  using I = __m512i;
  static constexpr int kPlanes = 2;
  static I load(const void* p) { return _mm512_load_si512(p); }
  static void store(void* p, I x) { _mm512_store_si512(p, x); }
  static I table(const void* p) { return _mm512_broadcast_i64x4(Plane::load(p)); }
  static I row(const uint8_t* p, ptrdiff_t plane_bytes, __m256i mask) {
    const I first = _mm512_castsi256_si512(Plane::row(p, 0, mask));
    return _mm512_inserti64x4(first, Plane::row(p + plane_bytes, 0, mask), 1);
  }
  static I zero() { return _mm512_setzero_si512(); }
  static I unpack_low(I a, I b) { return _mm512_unpacklo_epi8(a, b); }
  static I unpack_high(I a, I b) { return _mm512_unpackhi_epi8(a, b); }
  static I low_half(I x) { return _mm512_and_si512(x, _mm512_set1_epi8(15)); }
  static I high_half(I x) { return low_half(_mm512_srli_epi16(x, 4)); }
  static I look_up(I table, I at) { return _mm512_shuffle_epi8(table, at); }
  static I add8(I a, I b) { return _mm512_add_epi8(a, b); }
  static I add16(I a, I b) { return _mm512_add_epi16(a, b); }
  static I odd_bytes(I x) { return _mm512_maddubs_epi16(x, _mm512_set1_epi16(256)); }
  static __m256i plane(I x, int i) {
    return i == 0 ? _mm512_castsi512_si256(x) : _mm512_extracti64x4_epi64(x, 1);
  }
};
#endif

struct CodeSums {
  static constexpr int kBlock = 32;  // bytes of a row per iteration: 16 columns in each lane
  static constexpr float kSteps =
      125.0f;  // of a pair of tables: with rounding their sum is at most 254

  // Per query head, in addition to its table of table_floats(dim) floats.
  struct Query {
    float step;      // quantization step of the table
    int16_t offset;  // sum of the tables' zero points
  };

  static ptrdiff_t table_floats(int dim) { return (dim / 4 + kBlock - 1) / kBlock * 4 * kBlock; }

  // sums [dim / 4, 16]: of +-q over four channels, + where the bit of the index is set. Column c of
  // a block of the table holds groups c and 16 + c of the block in its two lanes.
  static void make_table(const float* sums, int dim, float* table, Query& query) {
    const int groups = dim / 4;
    float peaks[kRotatedMaxDim / 4];
    float most = 0.0f;
    for (int g = 0; g < groups; ++g) {
      peaks[g] = 0.0f;
      for (int i = 0; i < 16; ++i) {
        const float x = sums[16 * g + i];
        peaks[g] = x > peaks[g] ? x : peaks[g];
      }
      const float both = peaks[g] + (g % 2 ? peaks[g - 1] : 0.0f);  // lookups added in 8 bits
      most = both > most ? both : most;
    }
    query.step = most / kSteps;
    const float inverse = most > 1e-30f ? kSteps / most : 0.0f;
    int offset = 0;
    uint8_t* const bytes = reinterpret_cast<uint8_t*>(table);
    __builtin_memset(bytes, 0, sizeof(float) * table_floats(dim));
    for (int g = 0; g < groups; ++g) {
      const int zero = static_cast<int>(peaks[g] * inverse) + 1;
      offset += zero;
      uint8_t* const to = bytes + g / kBlock * 16 * kBlock + g % 16 * kBlock + g % kBlock / 16 * 16;
      for (int i = 0; i < 16; ++i) {
        const int rounded = static_cast<int>(sums[16 * g + i] * inverse + 128.5f) - 128;
        to[i] = static_cast<uint8_t>(rounded + zero);
      }
    }
    query.offset = static_cast<int16_t>(offset);
  }

  // Unpacks both planes of a page and head into table indices.
  void load(const uint8_t* planes, int dim) {
    const ptrdiff_t plane_bytes = 4 * dim;
#ifdef __AVX512BW__
    pairs = make_indices<BothPlanes>(planes, plane_bytes, dim, indices);
#else
    pairs = make_indices<Plane>(planes, 0, dim, indices);
    make_indices<Plane>(planes + plane_bytes, 0, dim, indices + 128 * pairs);
#endif
  }

  // levels [32]: sum_d q_d level_d of every token, to be multiplied by its scale and the result.
  float add_up(const float* table, const Query& query, float* levels) const {
    __m256i even[2], odd[2];
#ifdef __AVX512BW__
    add_plane<BothPlanes>(indices, table, query, even, odd);
#else
    for (int i = 0; i < 2; ++i) {
      add_plane<Plane>(indices + i * 128 * pairs, table, query, even + i, odd + i);
    }
#endif
    constexpr float kUnit = 32767.0f;
    constexpr int kSecondUnit = static_cast<int>(kUnit * kSecond / kFirst + 0.5f);
    const __m256i weights = _mm256_set1_epi32(kSecondUnit << 16 | static_cast<int>(kUnit));
    const __m256i words[4] = {
        _mm256_unpacklo_epi16(even[0], even[1]), _mm256_unpackhi_epi16(even[0], even[1]),
        _mm256_unpacklo_epi16(odd[0], odd[1]), _mm256_unpackhi_epi16(odd[0], odd[1])};
    for (int i = 0; i < 4; ++i) {
      _mm256_store_ps(levels + 8 * i, _mm256_cvtepi32_ps(_mm256_madd_epi16(words[i], weights)));
    }
    return kFirst / kUnit * query.step;
  }

  // The tokens' scales in the order of levels: even tokens first; within each half, tokens 0..7 and
  // 16..23 before the rest.
  static void scales(const uint8_t* bf16, float* to) {
    const auto* const from = reinterpret_cast<const __m256i*>(bf16);
    const Pairs pairs(_mm256_loadu_si256(from), _mm256_loadu_si256(from + 1));
    const __m256i odd = _mm256_set1_epi32(-65536);
    for (int i = 0; i < 2; ++i) {
      Plane::store(to + 8 * i, _mm256_slli_epi32(pairs.words[i], 16));
      Plane::store(to + 16 + 8 * i, _mm256_and_si256(pairs.words[i], odd));
    }
  }

  // Their value norms, in steps, in the same order.
  static void norms(const uint8_t* steps, float* to) {
    const auto* const from = reinterpret_cast<const __m128i*>(steps);
    const Pairs pairs(_mm256_cvtepu8_epi16(_mm_loadu_si128(from)),
                      _mm256_cvtepu8_epi16(_mm_loadu_si128(from + 1)));
    const __m256i even = _mm256_set1_epi32(65535);
    for (int i = 0; i < 2; ++i) {
      const __m256i first = _mm256_and_si256(pairs.words[i], even);
      const __m256i second = _mm256_srli_epi32(pairs.words[i], 16);
      _mm256_store_ps(to + 8 * i, _mm256_cvtepi32_ps(first));
      _mm256_store_ps(to + 16 + 8 * i, _mm256_cvtepi32_ps(second));
    }
  }

 private:
  // From tokens 0..15 and 16..31, 16 bits each: 0..7 and 16..23, and the others.
  struct Pairs {
    Pairs(__m256i low, __m256i high)
        : words{_mm256_permute2x128_si256(low, high, 0x20),
                _mm256_permute2x128_si256(low, high, 0x31)} {}
    __m256i words[2];
  };

  static constexpr int kPlaneIndices = kRotatedMaxDim / 4 * kRotatedTokens;

  // Transposes the 16 rows of each block: for each column, in pairs of columns, tokens 0..15, then
  // 16..31.
  template <class P>
  static int make_indices(const uint8_t* rows, ptrdiff_t plane_bytes, int dim, uint8_t* to) {
    const int row_bytes = dim / 4;
    for (int begin = 0; begin < row_bytes; begin += kBlock) {
      const int left = row_bytes - begin;
      const __m256i words = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
      const __m256i mask = _mm256_cmpgt_epi32(_mm256_set1_epi32(left), words);
      typename P::I x[16], y[16];
#pragma GCC unroll 16
      for (int j = 0; j < 16; ++j) x[j] = P::row(rows + j * row_bytes + begin, plane_bytes, mask);
#pragma GCC unroll 2
      for (int twice = 0; twice < 2; ++twice) {
        interleave<P>(x, y);
        interleave<P>(y, x);
      }
#pragma GCC unroll 16
      for (int c = 0; c < 16; ++c) {
        if (c >= left) break;
        P::store(to, P::low_half(x[c]));
        P::store(to + sizeof x[c], P::high_half(x[c]));
        to += 2 * sizeof x[c];
      }
    }
    return (row_bytes / kBlock * 16 + (row_bytes % kBlock < 16 ? row_bytes % kBlock : 16)) / 2;
  }

  // Rotates the eight bits of the (row, byte) index: the first becomes the last.
  template <class P>
  static void interleave(const typename P::I (&x)[16], typename P::I (&y)[16]) {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) {
      y[2 * i] = P::unpack_low(x[i], x[i + 8]);
      y[2 * i + 1] = P::unpack_high(x[i], x[i + 8]);
    }
  }

  // even, odd [planes]: the sums of tokens 0, 2 .. 14 and 16 .. 30, and of those after them.
  template <class P>
  void add_plane(const uint8_t* at, const float* table, const Query& query, __m256i* even,
                 __m256i* odd) const {
    typename P::I low = P::zero(), low_odd = low, high = low, high_odd = low;
#pragma GCC unroll 4
    for (int p = 0; p < pairs; ++p, at += 4 * sizeof low, table += 16) {
      const auto index = [at](int i) { return P::load(at + i * sizeof low); };
      const auto one = P::table(table), two = P::table(table + 8);
      const auto x = P::add8(P::look_up(one, index(0)), P::look_up(two, index(2)));
      const auto y = P::add8(P::look_up(one, index(1)), P::look_up(two, index(3)));
      low = P::add16(low, x);
      low_odd = P::add16(low_odd, P::odd_bytes(x));
      high = P::add16(high, y);
      high_odd = P::add16(high_odd, P::odd_bytes(y));
    }
    const __m256i offset = _mm256_set1_epi16(query.offset);
#pragma GCC unroll 2
    for (int i = 0; i < P::kPlanes; ++i) {
      const __m256i all = both_lanes(P::plane(low, i), P::plane(high, i));
      const __m256i of_odd = both_lanes(P::plane(low_odd, i), P::plane(high_odd, i));
      even[i] = _mm256_sub_epi16(_mm256_sub_epi16(all, _mm256_slli_epi16(of_odd, 8)), offset);
      odd[i] = _mm256_sub_epi16(of_odd, offset);
    }
  }

  // The sum of the two lanes of a, then that of b.
  static __m256i both_lanes(__m256i a, __m256i b) {
    return _mm256_add_epi16(_mm256_permute2x128_si256(a, b, 0x20),
                            _mm256_permute2x128_si256(a, b, 0x31));
  }

  alignas(64) uint8_t indices[2 * kPlaneIndices];
  int pairs;
};

}  // namespace
}  // namespace scout
