// Scores by key signs, written once and compiled for every instruction set; the 16 tokens of a
// word are the lanes of a vector. See attend_tile.h for why nothing of the standard library
// is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "score_cpu.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr int kWordTokens = 16;  // tokens of one word; a page has two words for every channel
constexpr int kSignHeadsAtOnce = 4;
constexpr float kLeastSpread = 1e-5f;  // of the largest score

// Vectors of the widest kind that the instruction set has, one lane for a token. Spelled out: the
// compiler unrolls a loop over the tokens of a word before it vectorises, and then does not.
#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kWordParts = kWordTokens / kLanes;
typedef float Lanes __attribute__((vector_size(4 * kLanes)));
typedef int32_t LaneBits __attribute__((vector_size(4 * kLanes)));

// Largest of the 16 sums  sum_d +-q[g, d]  for GB query heads, + where the token's bit is set.
// doubled holds 2 q, base holds -sum_d q: a set bit adds 2 q to what all-clear bits give.
template <int GB>
inline void largest_sums(const char* words, int element_bytes, const float* doubled,
                         const float* base, int dim, float* largest) {
  LaneBits bit[kWordParts];
  for (int t = 0; t < kWordTokens; ++t) bit[t / kLanes][t % kLanes] = 1 << t;
  Lanes sums[GB][kWordParts];
  for (int g = 0; g < GB; ++g)
    for (int p = 0; p < kWordParts; ++p) sums[g][p] = Lanes{} + base[g];
  for (int d = 0; d < dim; ++d) {
    uint16_t half;
    __builtin_memcpy(&half, words + static_cast<ptrdiff_t>(d) * element_bytes, sizeof half);
    const int32_t word = half;
    LaneBits is_set[kWordParts];  // all ones or all zeros
    for (int p = 0; p < kWordParts; ++p) is_set[p] = (bit[p] & word) != 0;
#pragma GCC unroll 4
    for (int g = 0; g < GB; ++g) {
      int32_t x;
      __builtin_memcpy(&x, doubled + static_cast<ptrdiff_t>(g) * dim + d, sizeof x);
      for (int p = 0; p < kWordParts; ++p) sums[g][p] += reinterpret_cast<Lanes>(is_set[p] & x);
    }
  }
  for (int g = 0; g < GB; ++g) {
    for (int t = 0; t < kWordTokens; ++t) {
      const float sum = sums[g][t / kLanes][t % kLanes];
      largest[g] = sum > largest[g] ? sum : largest[g];
    }
  }
}

template <int GB>
inline void best_tokens(const SignArgs& args, ptrdiff_t row, ptrdiff_t offset, const float* doubled,
                        const float* base, float* scores, ptrdiff_t stride) {
  const int dim = args.head_dim;
  float largest[GB];
  for (int g = 0; g < GB; ++g) largest[g] = -kInfinity;
  const void* const halves[2] = {args.low, args.high};
  for (const void* words : halves) {
    largest_sums<GB>(static_cast<const char*>(words) + offset, args.element_bytes,
                     doubled + row * dim, base + row, dim, largest);
  }
  for (int g = 0; g < GB; ++g) scores[(row + g) * stride] = largest[g];
}

// One head's scores, in units of their standard deviation over the pages, into the running maximum.
inline void stand_out(const SignArgs& args, const float* scores, float* result) {
  int count = 0;
  float mean = 0.0f;
  float largest = 0.0f;
  for (int n = 0; n < args.n_full; ++n) {
    if (args.table[n] < 0) continue;
    ++count;
    mean += scores[n];
    largest = __builtin_fmaxf(largest, __builtin_fabsf(scores[n]));
  }
  if (count == 0) return;
  mean /= static_cast<float>(count);
  float variance = 0.0f;
  for (int n = 0; n < args.n_full; ++n) {
    if (args.table[n] >= 0) variance += (scores[n] - mean) * (scores[n] - mean);
  }
  variance /= static_cast<float>(count);
  // What is left of equal scores is rounding.
  const float spread = __builtin_sqrtf(variance);
  const float inverse = spread > kLeastSpread * largest ? 1.0f / spread : 0.0f;
  for (int n = 0; n < args.n_full; ++n) {
    const float z = (scores[n] - mean) * inverse;
    result[n] = z > result[n] ? z : result[n];
  }
}

// Scratch: 2 q [HQ, D], -sum q [HQ], scores [HQ, n_full].
inline void score_signs_all(const SignArgs& args) {
  const int dim = args.head_dim;
  const int query_heads = args.kv_heads * args.group;
  float* const doubled = args.scratch;
  float* const base = doubled + static_cast<ptrdiff_t>(query_heads) * dim;
  float* const scores = base + query_heads;
  for (int row = 0; row < query_heads; ++row) {
    float sum = 0.0f;
    for (int d = 0; d < dim; ++d) {
      const float x = args.q[static_cast<ptrdiff_t>(row) * dim + d];
      doubled[static_cast<ptrdiff_t>(row) * dim + d] = 2.0f * x;
      sum += x;
    }
    base[row] = -sum;
  }
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * args.element_bytes;
  for (int n = 0; n < args.n_full; ++n) {
    const int64_t page = args.table[n];
    if (page < 0) continue;
    for (int h = 0; h < args.kv_heads; ++h) {
      const ptrdiff_t offset = (page * args.kv_heads + h) * head_bytes;
      for (int g = 0; g < args.group; g += kSignHeadsAtOnce) {
        const ptrdiff_t row = static_cast<ptrdiff_t>(h) * args.group + g;
        switch (args.group - g) {
          case 1:
            best_tokens<1>(args, row, offset, doubled, base, scores + n, args.n_full);
            break;
          case 2:
            best_tokens<2>(args, row, offset, doubled, base, scores + n, args.n_full);
            break;
          case 3:
            best_tokens<3>(args, row, offset, doubled, base, scores + n, args.n_full);
            break;
          default:
            best_tokens<4>(args, row, offset, doubled, base, scores + n, args.n_full);
            break;
        }
      }
    }
  }
  for (int n = 0; n < args.columns; ++n) args.out[n] = -kInfinity;
  for (int row = 0; row < query_heads; ++row) {
    stand_out(args, scores + static_cast<ptrdiff_t>(row) * args.n_full, args.out);
  }
  for (int n = 0; n < args.n_full; ++n) {
    if (args.table[n] < 0) args.out[n] = -kInfinity;
  }
}

}  // namespace
}  // namespace scout
