// The halves of attention by products of pairs of bf16 numbers, for queries of bf16: one
// instruction does the work of two fused multiply-adds and needs no conversion to fp32. Scores of
// bf16 and fp8 pages; of fp8 pages the weighted sum of V too, whose weights are rounded to bf16 for
// it. Include attend_tile.h first.
//
// The products are exact and the sums fp32, as in score_block. What the instruction takes away are
// numbers below 2^-126, which it reads as zero.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_tile.h"

namespace scout {
namespace {

constexpr int kPairTokens = 8;  // of add_pairs, at once

// A query of bf16 numbers, which are the upper halves of floats, in the order of load_words.
template <DType T>
void pack_words(const float* from, void* to, int dim) {
  int16_t* const words = static_cast<int16_t*>(to);
  constexpr int kColumns = 4 * Vec::kLanes / element_bytes<T>();
  for (int d = 0; d < dim; d += kColumns) {
    for (int i = 0; i < kColumns; ++i) {
      uint32_t bits;
      __builtin_memcpy(&bits, from + d + Vec::word_column(T, i), sizeof bits);
      words[d + i] = static_cast<int16_t>(bits >> 16);
    }
  }
}

// A row of sums from the order of load_pairs to the natural one.
inline void unpack_pairs(const float* from, float factor, float* to, int dim) {
  constexpr int kColumns = 4 * Vec::kLanes;
  for (int d = 0; d < dim; d += kColumns)
    for (int i = 0; i < kColumns; ++i) to[d + Vec::pair_column(i)] = factor * from[d + i];
}

// scores[t][g] = <q[g], k[t]> for TB tokens.
template <DType T, int kDim, int TB, int GB>
inline Hints score_words(const char* k, ptrdiff_t row_bytes, const int16_t* q, int head_dim,
                         Hints ahead, float* scores, ptrdiff_t stride) {
  using F = Vec::F;
  using S = Vec::S;
  constexpr int W = 2 * Vec::kLanes;
  constexpr int kParts = 2 / element_bytes<T>();  // of a line
  const int dim = kDim != 0 ? kDim : head_dim;
  F acc[GB][TB];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) acc[g][t] = Vec::zero();
  }
#pragma GCC unroll 1
  for (int d = 0; d < dim; d += kParts * W) {
    // Token by token, so that one line is widened while another is multiplied. A prefetch for each
    // line read: several at once would be dropped.
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) {
      S x[kParts];
      Vec::load_words<T>(k + t * row_bytes + d * element_bytes<T>(), x);
      prefetch_span<kLineBytes, Vec::by_rows(GB, 2)>(ahead);
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 2
        for (int part = 0; part < kParts; ++part) {
          acc[g][t] =
              Vec::dot_bf16(acc[g][t], Vec::load_shorts(q + g * dim + d + part * W), x[part]);
        }
      }
    }
  }
  store_sums<TB, GB>(acc, scores, stride);
  return ahead;
}

template <DType T, int kDim, int GB>
void score_words_block(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  score_each<Vec::token_block(GB), int16_t>(
      block, dim, dim * element_bytes<T>(),
      [&](auto tokens, const char* k, const int16_t* q, float* scores) {
        ahead = score_words<T, kDim, tokens.kCount, GB>(k, block.row_bytes, q, dim, ahead, scores,
                                                        block.score_stride);
      });
}

// Weights of two tokens side by side, in place of those of the first.
inline void pair_weights(float* scores, ptrdiff_t stride, int tokens) {
  for (int t = 0; t < tokens; t += 2) {
    for (float* at = scores + t * stride; at < scores + (t + 1) * stride; at += Vec::kLanes) {
      Vec::store_pairs(at, Vec::load(at), t + 1 < tokens ? Vec::load(at + stride) : Vec::zero());
    }
  }
}

// acc[g] = rescale[g] * acc[g] + sum_t weights[t][g] * v[t], for TB tokens from `first` on, of all
// heads; without kRescale the factor is 1. A few pointers advance, all else are constant offsets:
// address arithmetic would cost as many instructions as the products.
template <DType T, int kDim, int TB, int GB, bool kRescale>
inline Hints add_pairs(const Block& block, int first, Hints ahead) {
  using F = Vec::F;
  using S = Vec::S;
  constexpr int W = Vec::kLanes;
  constexpr int kPairs = (TB + 1) / 2;
  const int dim = kDim != 0 ? kDim : block.head_dim;
  const int group = block.group;
  const ptrdiff_t row_bytes = block.row_bytes, stride = 2 * block.score_stride;
  const char* v = block.rows + first * row_bytes;
  const float* weights = block.scores + first * block.score_stride;
  const float* rescale = block.rescale;
  float* acc = block.acc;
  for (int h = 0; h < block.heads; ++h) {
#pragma GCC unroll 1
    for (int d = 0; d < dim; d += 4 * W) {
      S x[kPairs][4];
#pragma GCC unroll 4
      for (int i = 0; i < kPairs; ++i) {
        const char* const at = v + 2 * i * row_bytes;
        Vec::load_pairs<T>(at, 2 * i + 1 < TB ? at + row_bytes : nullptr, x[i]);
        prefetch_span<2 * kLineBytes, true>(ahead);
      }
      v += 4 * W;
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        float* const at = acc + g * dim;
        F sums[4];
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) {
          sums[j] = Vec::load(at + j * W);
          if constexpr (kRescale) sums[j] = Vec::mul(Vec::set1(rescale[g]), sums[j]);
        }
#pragma GCC unroll 4
        for (int i = 0; i < kPairs; ++i) {
          const S pair = Vec::set1_pair(weights + i * stride + g);
#pragma GCC unroll 4
          for (int j = 0; j < 4; ++j) sums[j] = Vec::dot_bf16(sums[j], pair, x[i][j]);
        }
#pragma GCC unroll 4
        for (int j = 0; j < 4; ++j) Vec::store(at + j * W, sums[j]);
      }
      acc += 4 * W;
    }
    acc += (group - 1) * dim;
    weights += group;
    if constexpr (kRescale) rescale += group;
  }
  return ahead;
}

template <DType T, int kDim, int GB, bool kRescale>
inline Hints weigh_some_pairs(const Block& block, int tokens, int first, Hints ahead) {
  if (tokens == kPairTokens)
    return add_pairs<T, kDim, kPairTokens, GB, kRescale>(block, first, ahead);
  if (tokens == 2) return add_pairs<T, kDim, 2, GB, kRescale>(block, first, ahead);
  return add_pairs<T, kDim, 1, GB, kRescale>(block, first, ahead);
}

template <DType T, int kDim, int GB>
void weigh_pairs_block(const Block& block) {
  Hints ahead = block.ahead;
  for (int t = 0, step; t < block.tokens; t += step) {
    const int left = block.tokens - t;
    step = left >= kPairTokens ? kPairTokens : left >= 2 ? 2 : 1;
    ahead = t == 0 && block.rescale != nullptr
                ? weigh_some_pairs<T, kDim, GB, true>(block, step, t, ahead)
                : weigh_some_pairs<T, kDim, GB, false>(block, step, t, ahead);
  }
}

}  // namespace
}  // namespace scout
