// Exact sums of a query over the sign bits of a page, with an fp32 lookup table of all 16 sums for
// every four channels.
#pragma once

#include <cstddef>
#include <cstdint>

#include "rotate_kernel.h"

namespace scout {
namespace {

struct CodeSums {
  // Per query head, in addition to its table of table_floats(dim) floats.
  struct Query {};
  static ptrdiff_t table_floats(int dim) { return 4 * dim; }

  // sums [dim / 4, 16]: of +-q over four channels, + where the bit of the index is set.
  static void make_table(const float* sums, int dim, float* table, Query&) {
    __builtin_memcpy(table, sums, sizeof(float) * 4 * dim);
  }

  void load(const uint8_t* at, int of_bits, int of_dim) {
    planes = at;
    bits = of_bits;
    groups = of_dim / 4;
  }

  // levels [32]: sum_d q_d level_d of every token, to be multiplied by its scale and the result.
  float add_up(const float* table, const Query&, float* levels) const {
    const float weights[2] = {bits == 1 ? 1.0f : kFirst, kSecond};
    for (int t = 0; t < kRotatedTokens; ++t) levels[t] = 0.0f;
    for (int row = 0; row < 16 * bits; ++row) {
      const uint8_t* const bytes = planes + static_cast<ptrdiff_t>(row) * groups;
      float low = 0.0f, high = 0.0f;
      for (int c = 0; c < groups; ++c) {
        low += table[16 * c + (bytes[c] & 15)];
        high += table[16 * c + (bytes[c] >> 4)];
      }
      levels[row % 16] += weights[row / 16] * low;
      levels[16 + row % 16] += weights[row / 16] * high;
    }
    return 1.0f;
  }

  // The tokens' scales in the order of levels.
  static void scales(const uint8_t* bf16, float* to) {
    for (int t = 0; t < kRotatedTokens; ++t) {
      uint16_t half;
      __builtin_memcpy(&half, bf16 + 2 * t, sizeof half);
      const uint32_t word = static_cast<uint32_t>(half) << 16;
      __builtin_memcpy(to + t, &word, sizeof word);
    }
  }

  // The tokens' value norms, in steps, in the order of levels.
  static void norms(const uint8_t* steps, float* to) {
    for (int t = 0; t < kRotatedTokens; ++t) to[t] = steps[t];
  }

  const uint8_t* planes;
  int bits;
  int groups;
};

}  // namespace
}  // namespace scout
