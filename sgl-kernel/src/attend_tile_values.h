// weigh_block, the weighted sum of V over a block: for few query heads a few tokens at a time with
// the accumulators in cache (add_rows), which reads V in the order of memory, for where that binds;
// for many, and fp8 with AVX2, a few columns at a time with the accumulators in registers
// (add_columns). Include attend_tile.h first.
#pragma once

#include <cstddef>

#include "attend_tile.h"

namespace scout {
namespace {

// acc[g] = rescale[g] * acc[g] + sum_t weights[t][g] * v[t], for TB tokens from `first` on, of all
// heads; without `rescale` the factor is 1.
template <DType T, int TB, int GB>
inline __attribute__((always_inline)) Hints add_rows(const Block& block, int dim, int first,
                                                     const float* rescale, Hints ahead) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  const char* const v = block.rows + first * block.row_bytes;
  const float* const weights = block.scores + first * block.score_stride;
  const ptrdiff_t row_bytes = block.row_bytes, stride = block.score_stride;
  const int heads = block.heads, group = block.group;
  float* const sums_of_all = block.acc;
  for (int h = 0; h < heads; ++h) {
    F w[TB][GB];
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) {
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) w[t][g] = Vec::set1(weights[t * stride + h * group + g]);
    }
#pragma GCC unroll 4
    for (int d = 0; d < dim; d += 2 * W) {
      F sums[GB][2];
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        const float* const at = sums_of_all + (h * group + g) * dim + d;
        sums[g][0] = Vec::load(at);
        sums[g][1] = Vec::load(at + W);
        if (rescale != nullptr) {
          const F factor = Vec::set1(rescale[h * group + g]);
          sums[g][0] = Vec::mul(factor, sums[g][0]);
          sums[g][1] = Vec::mul(factor, sums[g][1]);
        }
      }
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t) {
        F x, y;
        Vec::load_pair<T>(v + t * row_bytes + (h * dim + d) * element_bytes<T>(), x, y);
        prefetch_span<kPairBytes, true>(ahead);
#pragma GCC unroll 8
        for (int g = 0; g < GB; ++g) {
          sums[g][0] = Vec::fma(w[t][g], x, sums[g][0]);
          sums[g][1] = Vec::fma(w[t][g], y, sums[g][1]);
        }
      }
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        float* const at = sums_of_all + (h * group + g) * dim + d;
        Vec::store(at, sums[g][0]);
        Vec::store(at + W, sums[g][1]);
      }
    }
  }
  return ahead;
}

// acc[g] = rescale[g] * acc[g] + sum_t weights[t][g] * v[t], over 2 * NP vectors of columns.
template <DType T, int NP, int GB>
inline Hints add_columns(const char* v, ptrdiff_t row_bytes, int tokens, const float* weights,
                         ptrdiff_t stride, const float* rescale, float* acc, int dim, Hints ahead) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  F sums[GB][2 * NP];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int j = 0; j < 2 * NP; ++j) sums[g][j] = Vec::load(acc + g * dim + j * W);
  }
  if (rescale != nullptr) {
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const F factor = Vec::set1(rescale[g]);
#pragma GCC unroll 4
      for (int j = 0; j < 2 * NP; ++j) sums[g][j] = Vec::mul(factor, sums[g][j]);
    }
  }
  auto add = [&](int t) __attribute__((always_inline)) {
    F x[2 * NP];
#pragma GCC unroll 2
    for (int j = 0; j < NP; ++j) {
      Vec::load_pair<T>(v + t * row_bytes + j * kPairBytes, x[2 * j], x[2 * j + 1]);
    }
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const F w = Vec::set1(weights[t * stride + g]);
#pragma GCC unroll 4
      for (int j = 0; j < 2 * NP; ++j) sums[g][j] = Vec::fma(w, x[j], sums[g][j]);
    }
  };
  constexpr int kSpan = NP * kPairBytes;
  // Tokens with one hint for all. Twice the same line is cheaper than a loop of two.
  constexpr int kTogether = kSpan < kLineBytes / 2 ? kLineBytes / kSpan : 1;
  int t = 0;
  for (; t + kTogether <= tokens; t += kTogether) {
    prefetch_span<kTogether * kSpan>(ahead);
#pragma GCC unroll 8
    for (int i = 0; i < kTogether; ++i) add(t + i);
  }
  for (; t < tokens; ++t) add(t);
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int j = 0; j < 2 * NP; ++j) Vec::store(acc + g * dim + j * W, sums[g][j]);
  }
  return ahead;
}

template <DType T, int kDim, int GB>
inline void weigh_rows(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  int t = 0;
  for (; t + kRowTokens <= block.tokens; t += kRowTokens)
    ahead = add_rows<T, kRowTokens, GB>(block, dim, t, t == 0 ? block.rescale : nullptr, ahead);
  for (; t < block.tokens; ++t)
    ahead = add_rows<T, 1, GB>(block, dim, t, t == 0 ? block.rescale : nullptr, ahead);
}

template <DType T, int kDim, int GB>
inline void weigh_columns(const Block& block) {
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  constexpr int NP = Vec::pairs_per_pass(GB);
  constexpr int kStep = 2 * W * NP;
  const int dim = kDim != 0 ? kDim : block.head_dim;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * element_bytes<T>();
  Hints ahead = block.ahead;
  for (int h = 0; h < block.heads; ++h) {
    const char* const v = block.rows + h * head_bytes;
    const float* const weights = block.scores + h * block.group;
    const float* const rescale =
        block.rescale != nullptr ? block.rescale + h * block.group : nullptr;
    float* const acc = block.acc + h * block.group * dim;
    int d = 0;
    for (; d + kStep <= dim; d += kStep) {
      const ptrdiff_t at = d / (2 * W) * kPairBytes;
      ahead = add_columns<T, NP, GB>(v + at, block.row_bytes, block.tokens, weights,
                                     block.score_stride, rescale, acc + d, dim, ahead);
    }
    for (; d < dim; d += 2 * W) {
      const ptrdiff_t at = d / (2 * W) * kPairBytes;
      ahead = add_columns<T, 1, GB>(v + at, block.row_bytes, block.tokens, weights,
                                    block.score_stride, rescale, acc + d, dim, ahead);
    }
  }
}

template <DType T, int kDim, int GB>
void weigh_block(const Block& block) {
  if constexpr (Vec::by_rows(GB, element_bytes<T>()))
    weigh_rows<T, kDim, GB>(block);
  else
    weigh_columns<T, kDim, GB>(block);
}

}  // namespace
}  // namespace scout
