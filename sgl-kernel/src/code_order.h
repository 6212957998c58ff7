// From rows of codes to the order of kI8 pages (scout/attend.h), sixteen bytes at a time, for any
// architecture: GCC and Clang make the shuffles of the instruction set at hand of it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scout/attend.h"

namespace scout {
namespace {

using CodeBytes = int8_t __attribute__((vector_size(16)));
using CodePairs = int16_t __attribute__((vector_size(16)));
using CodeWords = int32_t __attribute__((vector_size(16)));

inline CodeBytes load_codes(const int8_t* p) {
  CodeBytes x;
  __builtin_memcpy(&x, p, sizeof x);
  return x;
}
inline void store_codes(int8_t* p, CodeBytes x) { __builtin_memcpy(p, &x, sizeof x); }

// Element by element of a and b in turn: of their first halves, of their second ones.
inline CodeBytes zip_low(CodeBytes a, CodeBytes b) {
  return __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
}
inline CodeBytes zip_high(CodeBytes a, CodeBytes b) {
  return __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15,
                                 31);
}
inline CodePairs zip_low(CodePairs a, CodePairs b) {
  return __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
}
inline CodePairs zip_high(CodePairs a, CodePairs b) {
  return __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
}
inline CodeWords zip_low(CodeWords a, CodeWords b) {
  return __builtin_shufflevector(a, b, 0, 4, 1, 5);
}
inline CodeWords zip_high(CodeWords a, CodeWords b) {
  return __builtin_shufflevector(a, b, 2, 6, 3, 7);
}
inline CodeWords first_halves(CodeWords a, CodeWords b) {
  return __builtin_shufflevector(a, b, 0, 1, 4, 5);
}
inline CodeWords second_halves(CodeWords a, CodeWords b) {
  return __builtin_shufflevector(a, b, 2, 3, 6, 7);
}
// Of each four bytes the second and the third change places.
inline CodeBytes swap_middle(CodeWords x) {
  const CodeBytes bytes = (CodeBytes)x;
  return __builtin_shufflevector(bytes, bytes, 0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13,
                                 15);
}

// A block of kCodedBlock tokens of one head, rows `stride` bytes apart, of `dim` codes (a multiple
// of 16), to [dim / 4, 16, 4].
inline void order_keys(const int8_t* rows, ptrdiff_t stride, int dim, int8_t* to) {
  for (int d = 0; d < dim; d += 16) {
    for (int t = 0; t < kCodedBlock; t += 4) {
      const int8_t* const from = rows + t * stride + d;
      const CodeWords a = (CodeWords)load_codes(from);
      const CodeWords b = (CodeWords)load_codes(from + stride);
      const CodeWords c = (CodeWords)load_codes(from + 2 * stride);
      const CodeWords e = (CodeWords)load_codes(from + 3 * stride);
      const CodeWords ab = zip_low(a, b), ce = zip_low(c, e);
      const CodeWords ab_high = zip_high(a, b), ce_high = zip_high(c, e);
      int8_t* const line = to + d * kCodedBlock + t * 4;
      store_codes(line, swap_middle(first_halves(ab, ce)));
      store_codes(line + 64, swap_middle(second_halves(ab, ce)));
      store_codes(line + 128, swap_middle(first_halves(ab_high, ce_high)));
      store_codes(line + 192, swap_middle(second_halves(ab_high, ce_high)));
    }
  }
}

// The same, to [4, dim, 4].
inline void order_values(const int8_t* rows, ptrdiff_t stride, int dim, int8_t* to) {
  for (int t = 0; t < kCodedBlock; t += 4) {
    for (int d = 0; d < dim; d += 16) {
      const int8_t* const from = rows + t * stride + d;
      const CodeBytes a = load_codes(from), b = load_codes(from + stride);
      const CodeBytes c = load_codes(from + 2 * stride), e = load_codes(from + 3 * stride);
      const CodePairs ac = (CodePairs)zip_low(a, c), be = (CodePairs)zip_low(b, e);
      const CodePairs ac_high = (CodePairs)zip_high(a, c), be_high = (CodePairs)zip_high(b, e);
      int8_t* const line = to + t * dim + d * 4;
      store_codes(line, (CodeBytes)zip_low(ac, be));
      store_codes(line + 16, (CodeBytes)zip_high(ac, be));
      store_codes(line + 32, (CodeBytes)zip_low(ac_high, be_high));
      store_codes(line + 48, (CodeBytes)zip_high(ac_high, be_high));
    }
  }
}

}  // namespace
}  // namespace scout
