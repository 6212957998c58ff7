// The two halves of attention over a block of rows (tokens), all KV heads of them, each against all
// query heads of its group, written once for every Vec. Include a vec_*.h first.
//
// score_block: dot products of all query heads; each K row is loaded once. softmax_row: one step of
// online softmax for one query head. weigh_block: weighted sum of V with the accumulators in
// registers. A block is walked in the order of memory as far as that is possible.
//
// Only __builtin functions and this file's own code: an inline function of the standard library
// compiled here with wide instructions could be what the linker keeps for everybody.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scout/attend.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr int kTileTokens = 64;
constexpr int kMaxGroup = 16;  // at least the largest group chunk, a multiple of every lane count
constexpr int kLineBytes = 64;

template <DType T>
constexpr int element_bytes() {
  return T == DType::kF32 ? 4 : T == DType::kI8 ? 1 : 2;
}

struct Block {
  const char* rows;   // K or V: first row of the first head; rows are row_bytes apart
  const char* ahead;  // what to prefetch meanwhile, as many bytes as the block has
  ptrdiff_t row_bytes;
  int tokens;
  int heads;
  int head_dim;
  int group;             // query heads per KV head, of which the block function takes GB
  int stride;            // of a row of scores
  const float* q;        // [heads * group, D], column order of load_pair
  float* acc;            // [heads * group, D], same order: sum of weights * v
  float* scores;         // [heads * group, stride] from the block's first token on; later weights
  const float* rescale;  // [heads * group]: by which acc shrinks first
};

template <int kBytes>
inline void prefetch_span(const char*& p) {
#pragma GCC unroll 16
  for (int offset = 0; offset < kBytes; offset += kLineBytes) prefetch(p + offset);
  p += kBytes;
}

// scores[g][t] = <q[g], k[t]> for TB tokens.
template <DType T, int kDim, int TB, int GB>
inline void score_tokens(const char* k, ptrdiff_t row_bytes, const float* q, int head_dim,
                         const char*& ahead, float* scores, int stride) {
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
  for (int d = 0; d < dim; d += 2 * W) {
    F x[TB], y[TB];
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) {
      Vec::load_pair<T>(k + t * row_bytes + d * element_bytes<T>(), x[t], y[t]);
    }
    prefetch_span<TB * kPairBytes>(ahead);
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const F q0 = Vec::load(q + g * dim + d);
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t) acc[g][t] = Vec::fma(q0, x[t], acc[g][t]);
      const F q1 = Vec::load(q + g * dim + d + W);
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t) acc[g][t] = Vec::fma(q1, y[t], acc[g][t]);
    }
  }
  if constexpr (TB == 4) {
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      Vec::hsum4(acc[g][0], acc[g][1], acc[g][2], acc[g][3], scores + g * stride);
    }
  } else {
    constexpr int kSums = GB * TB;
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i += 4) {
      F part[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        part[j] = i + j < kSums ? acc[(i + j) % kSums / TB][(i + j) % TB] : Vec::zero();
      }
      float sums[4];
      Vec::hsum4(part[0], part[1], part[2], part[3], sums);
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        if (i + j < kSums) scores[(i + j) / TB * stride + (i + j) % TB] = sums[j];
      }
    }
  }
}

// acc[g] = rescale[g] * acc[g] + sum_t weights[g][t] * v[t], over 2 * NP vectors of columns.
template <DType T, int NP, int GB>
inline void accumulate(const char* v, ptrdiff_t row_bytes, int tokens, const float* weights,
                       int stride, const float* rescale, float* acc, int dim, const char*& ahead) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  F sums[GB][2 * NP];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
    const F factor = Vec::set1(rescale[g]);
#pragma GCC unroll 4
    for (int j = 0; j < 2 * NP; ++j) {
      sums[g][j] = Vec::mul(factor, Vec::load(acc + g * dim + j * W));
    }
  }
  for (int t = 0; t < tokens; ++t) {
    F x[2 * NP];
#pragma GCC unroll 2
    for (int j = 0; j < NP; ++j) {
      Vec::load_pair<T>(v + t * row_bytes + j * kPairBytes, x[2 * j], x[2 * j + 1]);
    }
    prefetch_span<NP * kPairBytes>(ahead);
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const F w = Vec::set1(weights[g * stride + t]);
#pragma GCC unroll 4
      for (int j = 0; j < 2 * NP; ++j) sums[g][j] = Vec::fma(w, x[j], sums[g][j]);
    }
  }
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int j = 0; j < 2 * NP; ++j) Vec::store(acc + g * dim + j * W, sums[g][j]);
  }
}

// Turns raw dot products of one query head into weights 2^(score - max), brings max (base-2
// logarithm of the largest weight so far, -inf at first) up to date,
// writes to `shift` the base-2 logarithm of the factor by which earlier sums shrink, returns the
// sum of the weights.
inline float softmax_row(float* row, int tokens, float row_scale, float logit_cap, float& max,
                         float& shift) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  const int padded = (tokens + W - 1) / W * W;
  const bool capped = logit_cap > 0.0f;
  const F scale = Vec::set1(capped ? row_scale / logit_cap : row_scale * kLog2e);
  const F cap = Vec::set1(logit_cap * kLog2e);
  const F limit = Vec::set1(kScoreLimit);
  const F lower_limit = Vec::set1(-kScoreLimit);
  for (int t = tokens; t < padded; ++t) row[t] = 0.0f;
  for (int t = 0; t < padded; t += W) {
    F s = Vec::mul(scale, Vec::load(row + t));
    if (capped) s = Vec::mul(cap, tanh(s));
    Vec::store(row + t, Vec::max(lower_limit, Vec::min(limit, s)));
  }
  for (int t = tokens; t < padded; ++t) row[t] = -kInfinity;
  F highest = Vec::set1(max);
  for (int t = 0; t < padded; t += W) highest = Vec::max(highest, Vec::load(row + t));
  const float new_max = Vec::hmax(highest);
  shift = max - new_max;
  max = new_max;
  F weights = Vec::zero();
  for (int t = 0; t < padded; t += W) {
    const F w = exp2_nonpositive(Vec::sub(Vec::load(row + t), Vec::set1(new_max)));
    Vec::store(row + t, w);
    weights = Vec::add(weights, w);
  }
  return Vec::hsum(weights);
}

// Puts the scale of V codes on the weights, of which there are D times fewer than products.
inline void scale_row(float* row, int tokens, float factor) {
  for (int t = 0; t < tokens; t += Vec::kLanes) {
    Vec::store(row + t, Vec::mul(Vec::set1(factor), Vec::load(row + t)));
  }
}

template <DType T, int kDim, int GB>
void score_block(const Block& block) {
  constexpr int TB = Vec::token_block(GB);
  const int dim = kDim != 0 ? kDim : block.head_dim;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * element_bytes<T>();
  const char* ahead = block.ahead;
  int t = 0;
  for (; t + TB <= block.tokens; t += TB) {
    for (int h = 0; h < block.heads; ++h) {
      score_tokens<T, kDim, TB, GB>(block.rows + t * block.row_bytes + h * head_bytes,
                                    block.row_bytes, block.q + h * block.group * dim, dim, ahead,
                                    block.scores + h * block.group * block.stride + t,
                                    block.stride);
    }
  }
  for (; t < block.tokens; ++t) {
    for (int h = 0; h < block.heads; ++h) {
      score_tokens<T, kDim, 1, GB>(block.rows + t * block.row_bytes + h * head_bytes,
                                   block.row_bytes, block.q + h * block.group * dim, dim, ahead,
                                   block.scores + h * block.group * block.stride + t, block.stride);
    }
  }
}

template <DType T, int kDim, int GB>
void weigh_block(const Block& block) {
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  const int dim = kDim != 0 ? kDim : block.head_dim;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * element_bytes<T>();
  const char* ahead = block.ahead;
  constexpr int NP = Vec::pairs_per_pass(GB);
  constexpr int kStep = 2 * W * NP;
  for (int h = 0; h < block.heads; ++h) {
    const char* const v = block.rows + h * head_bytes;
    const float* const weights = block.scores + h * block.group * block.stride;
    const float* const rescale = block.rescale + h * block.group;
    float* const acc = block.acc + h * block.group * dim;
    int d = 0;
    for (; d + kStep <= dim; d += kStep) {
      accumulate<T, NP, GB>(v + d / (2 * W) * kPairBytes, block.row_bytes, block.tokens, weights,
                            block.stride, rescale, acc + d, dim, ahead);
    }
    for (; d < dim; d += 2 * W) {
      accumulate<T, 1, GB>(v + d / (2 * W) * kPairBytes, block.row_bytes, block.tokens, weights,
                           block.stride, rescale, acc + d, dim, ahead);
    }
  }
}

struct BlockFns {
  void (*score)(const Block&);
  void (*weigh)(const Block&);
};

template <DType T, int kDim>
BlockFns fns_for_group(int group) {
  static_assert(Vec::kMaxGroupChunk <= kMaxGroup);
  switch (group) {
    case 1:
      return {score_block<T, kDim, 1>, weigh_block<T, kDim, 1>};
    case 2:
      return {score_block<T, kDim, 2>, weigh_block<T, kDim, 2>};
    case 3:
      return {score_block<T, kDim, 3>, weigh_block<T, kDim, 3>};
    case 4:
      return {score_block<T, kDim, 4>, weigh_block<T, kDim, 4>};
    default:
      break;
  }
  if constexpr (Vec::kMaxGroupChunk >= 5) {
    if (group == 5) return {score_block<T, kDim, 5>, weigh_block<T, kDim, 5>};
  }
  if constexpr (Vec::kMaxGroupChunk >= 8) {
    if (group == 6) return {score_block<T, kDim, 6>, weigh_block<T, kDim, 6>};
    if (group == 7) return {score_block<T, kDim, 7>, weigh_block<T, kDim, 7>};
    if (group == 8) return {score_block<T, kDim, 8>, weigh_block<T, kDim, 8>};
  }
  return {nullptr, nullptr};
}

template <DType T>
BlockFns fns_for_dim(int dim, int group) {
  switch (Vec::kSpecialiseDims ? dim : 0) {
    case 64:
      return fns_for_group<T, 64>(group);
    case 96:
      return fns_for_group<T, 96>(group);
    case 128:
      return fns_for_group<T, 128>(group);
    case 256:
      return fns_for_group<T, 256>(group);
    default:
      return fns_for_group<T, 0>(group);
  }
}

inline BlockFns find_block_fns(DType dtype, int dim, int group) {
  if (dtype == DType::kBF16) return fns_for_dim<DType::kBF16>(dim, group);
  if (dtype == DType::kF16) return fns_for_dim<DType::kF16>(dim, group);
  if (dtype == DType::kI8) return fns_for_dim<DType::kI8>(dim, group);
  return fns_for_dim<DType::kF32>(dim, group);
}

}  // namespace
}  // namespace scout
