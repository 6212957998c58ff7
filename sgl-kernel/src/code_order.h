// From rows of codes to the order of kI8 pages (scout/attend.h).
#pragma once

#ifdef __AVX512BW__
#include <immintrin.h>
#endif

#include <cstddef>
#include <cstdint>

#include "scout/attend.h"

namespace scout {
namespace {

#ifdef __AVX512BW__

// 16 bytes of each of four rows.
inline __m512i load_rows(const int8_t* p, ptrdiff_t stride) {
  auto row = [&](int i) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + i * stride));
  };
  __m512i x = _mm512_castsi128_si512(row(0));
  x = _mm512_inserti32x4(x, row(1), 1);
  x = _mm512_inserti32x4(x, row(2), 2);
  return _mm512_inserti32x4(x, row(3), 3);
}

// 16 channels of a block of tokens, rows `stride` bytes apart, to four lines of K.
inline void order_key_lines(const int8_t* rows, ptrdiff_t stride, int8_t* to) {
  __m512i x[4];  // lane l: row 4 l + i
  for (int i = 0; i < 4; ++i) x[i] = load_rows(rows + i * stride, 4 * stride);
  const __m512i low[] = {_mm512_unpacklo_epi32(x[0], x[1]), _mm512_unpacklo_epi32(x[2], x[3])};
  const __m512i high[] = {_mm512_unpackhi_epi32(x[0], x[1]), _mm512_unpackhi_epi32(x[2], x[3])};
  const __m512i lines[] = {
      _mm512_unpacklo_epi64(low[0], low[1]), _mm512_unpackhi_epi64(low[0], low[1]),
      _mm512_unpacklo_epi64(high[0], high[1]), _mm512_unpackhi_epi64(high[0], high[1])};
  const __m512i swap_middle =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15));
  for (int i = 0; i < 4; ++i)
    _mm512_storeu_si512(to + 64 * i, _mm512_shuffle_epi8(lines[i], swap_middle));
}

// 16 channels of four tokens, to a line of V.
inline void order_value_line(const int8_t* rows, ptrdiff_t stride, int8_t* to) {
  const __m512i by_channels =
      _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
  const __m512i by_tokens =
      _mm512_broadcast_i32x4(_mm_setr_epi8(0, 8, 4, 12, 1, 9, 5, 13, 2, 10, 6, 14, 3, 11, 7, 15));
  const __m512i x = _mm512_permutexvar_epi32(by_channels, load_rows(rows, stride));
  _mm512_storeu_si512(to, _mm512_shuffle_epi8(x, by_tokens));
}

#else  // sixteen bytes at a time, for any architecture

#ifdef __clang__
#define SCOUT_SHUFFLE(type, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else  // GCC has the other one from version 12 on
#define SCOUT_SHUFFLE(type, a, b, ...) __builtin_shuffle(a, b, type{__VA_ARGS__})
#endif

using CodeBytes = int8_t __attribute__((vector_size(16)));
using CodePairs = int16_t __attribute__((vector_size(16)));
using CodeWords = int32_t __attribute__((vector_size(16)));

inline CodeBytes load_codes(const int8_t* p) {
  CodeBytes x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
template <typename V>
inline void store_codes(int8_t* p, V x) {
  __builtin_memcpy(p, &x, sizeof x);
}

// Element by element of a and b in turn: of their first halves, of their second ones.
inline CodePairs zip_low(CodeBytes a, CodeBytes b) {
  return (CodePairs)SCOUT_SHUFFLE(CodeBytes, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22,
                                  7, 23);
}
inline CodePairs zip_high(CodeBytes a, CodeBytes b) {
  return (CodePairs)SCOUT_SHUFFLE(CodeBytes, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14,
                                  30, 15, 31);
}
inline CodePairs zip_low(CodePairs a, CodePairs b) {
  return SCOUT_SHUFFLE(CodePairs, a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline CodePairs zip_high(CodePairs a, CodePairs b) {
  return SCOUT_SHUFFLE(CodePairs, a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline CodeWords zip_low(CodeWords a, CodeWords b) {
  return SCOUT_SHUFFLE(CodeWords, a, b, 0, 4, 1, 5);
}
inline CodeWords zip_high(CodeWords a, CodeWords b) {
  return SCOUT_SHUFFLE(CodeWords, a, b, 2, 6, 3, 7);
}
// Of the first halves, or the second ones, of a and b; of each four bytes of them the second and
// the third change places.
inline CodeBytes swapped(CodeWords halves) {
  const CodeBytes x = (CodeBytes)halves;
  return SCOUT_SHUFFLE(CodeBytes, x, x, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
}
inline CodeBytes first_halves(CodeWords a, CodeWords b) {
  return swapped(SCOUT_SHUFFLE(CodeWords, a, b, 0, 1, 4, 5));
}
inline CodeBytes second_halves(CodeWords a, CodeWords b) {
  return swapped(SCOUT_SHUFFLE(CodeWords, a, b, 2, 3, 6, 7));
}

inline void order_key_lines(const int8_t* rows, ptrdiff_t stride, int8_t* to) {
  for (int t = 0; t < kCodedBlock; t += 4) {
    auto row = [&](int i) { return (CodeWords)load_codes(rows + (t + i) * stride); };
    const CodeWords ab = zip_low(row(0), row(1)), cd = zip_low(row(2), row(3));
    const CodeWords ab_high = zip_high(row(0), row(1)), cd_high = zip_high(row(2), row(3));
    store_codes(to + t * 4, first_halves(ab, cd));
    store_codes(to + t * 4 + 64, second_halves(ab, cd));
    store_codes(to + t * 4 + 128, first_halves(ab_high, cd_high));
    store_codes(to + t * 4 + 192, second_halves(ab_high, cd_high));
  }
}

inline void order_value_line(const int8_t* rows, ptrdiff_t stride, int8_t* to) {
  auto row = [&](int i) { return load_codes(rows + i * stride); };
  const CodePairs ac = zip_low(row(0), row(2)), bd = zip_low(row(1), row(3));
  const CodePairs ac_high = zip_high(row(0), row(2)), bd_high = zip_high(row(1), row(3));
  store_codes(to, zip_low(ac, bd));
  store_codes(to + 16, zip_high(ac, bd));
  store_codes(to + 32, zip_low(ac_high, bd_high));
  store_codes(to + 48, zip_high(ac_high, bd_high));
}

#undef SCOUT_SHUFFLE
#endif

// A block of kCodedBlock tokens of one head, rows `stride` bytes apart, of `dim` codes (a multiple
// of 16), to [dim / 4, 16, 4].
inline void order_keys(const int8_t* rows, ptrdiff_t stride, int dim, int8_t* to) {
  for (int d = 0; d < dim; d += 16) order_key_lines(rows + d, stride, to + d * kCodedBlock);
}

// The same, to [4, dim, 4].
inline void order_values(const int8_t* rows, ptrdiff_t stride, int dim, int8_t* to) {
  for (int t = 0; t < kCodedBlock; t += 4) {
    for (int d = 0; d < dim; d += 16)
      order_value_line(rows + t * stride + d, stride, to + t * dim + d * 4);
  }
}

}  // namespace
}  // namespace scout
