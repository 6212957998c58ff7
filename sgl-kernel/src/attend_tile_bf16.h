// score_block for pages of bf16 under queries of bf16: one product of pairs does the work of two
// fused multiply-adds and needs no conversion to fp32. Include attend_tile.h first.
//
// The products are exact and the sums fp32, as in score_block. What the instruction takes away are
// numbers below 2^-126, which it reads as zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_tile.h"

namespace scout {
namespace {

// scores[t][g] = <q[g], k[t]> for TB tokens.
template <int kDim, int TB, int GB>
inline Hints score_pairs(const char* k, ptrdiff_t row_bytes, const int16_t* q, int head_dim,
                         Hints ahead, float* scores, ptrdiff_t stride) {
  using F = Vec::F;
  using S = Vec::S;
  constexpr int W = 2 * Vec::kLanes;
  const int dim = kDim != 0 ? kDim : head_dim;
  F acc[GB][TB];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) acc[g][t] = Vec::zero();
  }
#pragma GCC unroll 1
  for (int d = 0; d < dim; d += W) {
    S x[TB];
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) x[t] = Vec::load_bf16(k + t * row_bytes + 2 * d);
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const S pairs = Vec::load_shorts(q + g * dim + d);
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t) {
        acc[g][t] = Vec::dot_bf16(acc[g][t], pairs, x[t]);
        // TB lines among TB * GB products, evenly: with so little work between them, several hints
        // at once would be lost.
        if ((g * TB + t) % GB == GB - 1) prefetch_span<kLineBytes, Vec::by_rows(GB, 2)>(ahead);
      }
    }
  }
  store_sums<TB, GB>(acc, scores, stride);
  return ahead;
}

template <int kDim, int GB>
void score_pairs_block(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  score_each<Vec::token_block(GB)>(
      block, block.q_words, dim, 2 * dim,
      [&](auto tokens, const char* k, const int16_t* q, float* scores) {
        ahead = score_pairs<kDim, tokens.kCount, GB>(k, block.row_bytes, q, dim, ahead, scores,
                                                     block.score_stride);
      });
}

}  // namespace
}  // namespace scout
