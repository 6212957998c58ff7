// The halves of attention over a block of rows (tokens), all KV heads of them, each against all
// query heads of its group, written once for every Vec. Include a vec_*.h first.
//
// score_block: dot products of all query heads; each K row is loaded once. softmax_rows: one step
// of online softmax for some query heads. attend_tile_values.h: weigh_block, the weighted sum of V.
// A block is walked in the order of memory as far as that is possible.
//
// Only __builtin functions and this file's own code: an inline function of the standard library
// compiled here with wide instructions could be what the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr int kLineBytes = 64;
constexpr int kMaxGroup = 16;  // at least the largest group chunk, a multiple of every lane count
constexpr int kRowTokens = 4;  // of add_rows, at once

template <DType T>
constexpr int element_bytes() {
  return bytes_of(T);
}

// From natural column order to that of load_pair.
template <DType T>
void pack_row(const float* from, void* to, int dim) {
  constexpr int W = Vec::kLanes;
  float* const row = static_cast<float*>(to);
  for (int d = 0; d < dim; d += 2 * W)
    for (int i = 0; i < 2 * W; ++i) row[d + i] = Vec::lift(T) * from[d + Vec::column(T, i)];
}

// And back.
template <DType T>
void unpack_row(const float* from, float factor, float* to, int dim) {
  constexpr int W = Vec::kLanes;
  for (int d = 0; d < dim; d += 2 * W)
    for (int i = 0; i < 2 * W; ++i) to[d + Vec::column(T, i)] = factor * from[d + i];
}

// What to prefetch: lines from `at` on; where kTwice, also those `again` bytes from there. A CPU
// drops hints while as many lines are on their way as it can follow, and the second hint, nearer to
// the use, is for what was dropped. Where arithmetic binds it is one instruction too many.
struct Hints {
  const char* at;
  ptrdiff_t again;
};

template <int kBytes, bool kTwice = false>
inline void prefetch_span(Hints& hints) {
#pragma GCC unroll 16
  for (int offset = 0; offset < kBytes; offset += kLineBytes) {
    prefetch(hints.at + offset);
    if constexpr (kTwice) prefetch(hints.at + hints.again + offset);
  }
  hints.at += kBytes;
}

struct Block {
  const char* rows;  // K or V: first row of the first head; rows are row_bytes apart
  Hints ahead;       // for meanwhile, as many bytes as the block has
  ptrdiff_t row_bytes;
  int tokens;
  int heads;
  int head_dim;
  int group;      // query heads per KV head, of which the block function takes GB
  const void* q;  // [heads * group, D], as the score function's pack has made it
  float* acc;     // [heads * group, D], column order of load_pair: sum of weights * v
  // From the block's first token on: of token t and query head g at [t * score_stride + g]. Later
  // the weights.
  float* scores;
  ptrdiff_t score_stride;
  const float* rescale;  // [heads * group]: by which acc shrinks first; null: it stays
};

// scores[t][g] = sum of the lanes of acc[g][t].
template <int TB, int GB, typename X>
inline __attribute__((always_inline)) void store_sums(const X (&acc)[GB][TB], float* scores,
                                                      ptrdiff_t stride) {
  constexpr int kWhole = GB / 4 * 4;
#pragma GCC unroll 8
  for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 2
    for (int g = 0; g < kWhole; g += 4) {
      Vec::hsum4(acc[g][t], acc[g + 1][t], acc[g + 2][t], acc[g + 3][t], scores + t * stride + g);
    }
  }
  constexpr int kLeft = GB - kWhole;
  if constexpr (kLeft > 0) {
    constexpr int kSums = kLeft * TB;
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i += 4) {
      X part[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        part[j] =
            i + j < kSums ? acc[kWhole + (i + j) % kSums % kLeft][(i + j) % kSums / kLeft] : X{};
      }
      float sums[4];
      Vec::hsum4(part[0], part[1], part[2], part[3], sums);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (i + j < kSums) scores[(i + j) / kLeft * stride + kWhole + (i + j) % kLeft] = sums[j];
      }
    }
  }
}

// scores[t][g] = <q[g], k[t]> for TB tokens.
template <DType T, int kDim, int TB, int GB>
inline Hints score_tokens(const char* k, ptrdiff_t row_bytes, const float* q, int head_dim,
                          Hints ahead, float* scores, ptrdiff_t stride) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  const int dim = kDim != 0 ? kDim : head_dim;
  F acc[GB][TB];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) acc[g][t] = Vec::zero();
  }
  constexpr int kSpan = TB * kPairBytes;
  // One hint for each line, as far as the size is known.
  constexpr int kPairs = kDim % (4 * W) == 0 && kDim != 0 && kSpan < kLineBytes ? 2 : 1;
  for (int first = 0; first < dim; first += 2 * W * kPairs) {
    prefetch_span<kPairs * kSpan, Vec::by_rows(GB, element_bytes<T>())>(ahead);
#pragma GCC unroll 2
    for (int d = first; d < first + 2 * W * kPairs; d += 2 * W) {
      F x[TB], y[TB];
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t) {
        Vec::load_pair<T>(k + t * row_bytes + d * element_bytes<T>(), x[t], y[t]);
      }
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        const F q0 = Vec::in_register(Vec::load(q + g * dim + d));
#pragma GCC unroll 8
        for (int t = 0; t < TB; ++t) acc[g][t] = Vec::fma(q0, x[t], acc[g][t]);
        const F q1 = Vec::in_register(Vec::load(q + g * dim + d + W));
#pragma GCC unroll 8
        for (int t = 0; t < TB; ++t) acc[g][t] = Vec::fma(q1, y[t], acc[g][t]);
      }
    }
  }
  store_sums<TB, GB>(acc, scores, stride);
  return ahead;
}

// What is not within the limit at it; NaN stays NaN.
inline Vec::F within(float limit, Vec::F x) {
  return Vec::max(Vec::set1(-limit), Vec::min(Vec::set1(limit), x));
}

// One step of online softmax: raw dot products of all query heads become weights. Arrays are padded
// to whole vectors.
struct Softmax {
  float scale;     // of the dot products
  float lift;      // weights are written as so much more
  float* highest;  // [rows] base-2 logarithm of the largest weight so far, -inf at first
  float* shift;    // [rows] base-2 logarithm of the factor by which earlier sums shrink
  float* total;    // [rows] sum of these weights
};

// Weights are 2^(score - highest). Lanes are query heads, so that nothing has to be summed across
// them.
inline void softmax_rows(float* scores, ptrdiff_t stride, int rows, int tokens,
                         const Softmax& step) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  const F factor = Vec::set1(step.scale * kLog2e);  // scores in units of log2
  const F lift = Vec::set1(step.lift);
  for (int row = 0; row < rows; row += W) {
    float* const of_rows = scores + row;
    F largest = Vec::set1(-kInfinity);
    for (int t = 0; t < tokens; ++t) {
      const F s = within(kScoreLimit, Vec::mul(factor, Vec::load(of_rows + t * stride)));
      Vec::store(of_rows + t * stride, s);
      largest = Vec::max(largest, s);
    }
    const F before = Vec::load(step.highest + row);
    const F now = Vec::max(before, largest);
    Vec::store(step.highest + row, now);
    Vec::store(step.shift + row, Vec::sub(before, now));
    F total = Vec::zero();
    for (int t = 0; t < tokens; ++t) {
      const F w = exp2_nonpositive(Vec::sub(Vec::load(of_rows + t * stride), now));
      total = Vec::add(total, w);
      Vec::store(of_rows + t * stride, Vec::mul(lift, w));
    }
    Vec::store(step.total + row, total);
  }
}

template <int kTokens>
struct Tokens {
  static constexpr int kCount = kTokens;
};

// score(Tokens<n>, rows of a head, its first query, scores) for all heads of a block, in the order
// of memory: as many tokens at a time as fit the registers, the rest one by one.
template <int TB, typename Query, typename Score>
inline __attribute__((always_inline)) void score_each(const Block& block, int dim, int head_bytes,
                                                      Score score) {
  const Block of = block;  // in registers, where stores of scores cannot change it
  int t = 0;
  auto heads = [&](auto tokens) {
    const char* rows = of.rows + t * of.row_bytes;
    const Query* queries = static_cast<const Query*>(of.q);
    float* scores = of.scores + t * of.score_stride;
    for (int h = 0; h < of.heads; ++h) {
      score(tokens, rows, queries, scores);
      rows += head_bytes;
      queries += of.group * dim;
      scores += of.group;
    }
  };
  for (; t + TB <= of.tokens; t += TB) heads(Tokens<TB>());
  for (; t < of.tokens; ++t) heads(Tokens<1>());
}

template <DType T, int kDim, int GB>
void score_block(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  const ptrdiff_t row_bytes = block.row_bytes, stride = block.score_stride;
  score_each<Vec::token_block(GB), float>(
      block, dim, dim * element_bytes<T>(),
      [&](auto tokens, const char* k, const float* q, float* scores) {
        ahead =
            score_tokens<T, kDim, tokens.kCount, GB>(k, row_bytes, q, dim, ahead, scores, stride);
      });
}

}  // namespace
}  // namespace scout
