// One tile of attention: up to 64 tokens of one KV head against all query heads of its group,
// written once for every Vec. Include a vec_*.h first.
//
// Scores of all query heads (each K row is loaded once), one step of online softmax (tile maximum,
// one rescale), weighted sum of V with the accumulators in registers.
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
  return T == DType::kF32 ? 4 : 2;
}

// One tile: `tokens` rows of one KV head against GB query heads.
struct Tile {
  const char* k;  // first row; rows are row_bytes apart
  const char* v;
  const char*
      prefetch_k;  // what to prefetch while this tile is computed, as many bytes as it reads
  const char* prefetch_v;
  ptrdiff_t row_bytes;
  int tokens;
  int head_dim;
  float scale;
  float logit_cap;
  const float* q;  // [GB, D], column order of load_pair
  float* acc;      // [GB, D], same order: sum of weights * v
  float* max;      // [GB], base-2 logarithm of the largest weight so far, -inf at first
  float* sum;      // [GB], sum of weights relative to max
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
                         const char*& ahead, float* scores) {
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
      Vec::hsum4(acc[g][0], acc[g][1], acc[g][2], acc[g][3], scores + g * kTileTokens);
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
        if (i + j < kSums) scores[(i + j) / TB * kTileTokens + (i + j) % TB] = sums[j];
      }
    }
  }
}

// acc[g] = rescale[g] * acc[g] + sum_t weights[g][t] * v[t], over 2 * NP vectors of columns.
template <DType T, int NP, int GB>
inline void accumulate(const char* v, ptrdiff_t row_bytes, int tokens, const float* weights,
                       const float* rescale, float* acc, int dim, const char*& ahead) {
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
      const F w = Vec::set1(weights[g * kTileTokens + t]);
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

// Turns raw dot products into weights 2^(score - max), brings max and sum up to date, and writes
// the factor by which earlier sums shrink.
template <int GB>
inline void softmax_step(const Tile& tile, float* scores, float* rescale) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  const int padded = (tile.tokens + W - 1) / W * W;
  const bool capped = tile.logit_cap > 0.0f;
  const F scale = Vec::set1(capped ? tile.scale / tile.logit_cap : tile.scale * kLog2e);
  const F cap = Vec::set1(tile.logit_cap * kLog2e);
  const F limit = Vec::set1(kScoreLimit);
  const F lower_limit = Vec::set1(-kScoreLimit);
  float total[kMaxGroup];
  for (int g = 0; g < GB; ++g) {
    float* row = scores + g * kTileTokens;
    for (int t = tile.tokens; t < padded; ++t) row[t] = 0.0f;
    for (int t = 0; t < padded; t += W) {
      F s = Vec::mul(scale, Vec::load(row + t));
      if (capped) s = Vec::mul(cap, tanh(s));
      Vec::store(row + t, Vec::max(lower_limit, Vec::min(limit, s)));
    }
    for (int t = tile.tokens; t < padded; ++t) row[t] = -kInfinity;
    F highest = Vec::set1(tile.max[g]);
    for (int t = 0; t < padded; t += W) highest = Vec::max(highest, Vec::load(row + t));
    const float new_max = Vec::hmax(highest);
    rescale[g] = tile.max[g] - new_max;
    tile.max[g] = new_max;
    F weights = Vec::zero();
    for (int t = 0; t < padded; t += W) {
      const F w = exp2_nonpositive(Vec::sub(Vec::load(row + t), Vec::set1(new_max)));
      Vec::store(row + t, w);
      weights = Vec::add(weights, w);
    }
    total[g] = Vec::hsum(weights);
  }
  for (int g = GB; g < kMaxGroup; ++g) rescale[g] = 0.0f;
  for (int g = 0; g < kMaxGroup; g += W) {
    Vec::store(rescale + g, exp2_nonpositive(Vec::load(rescale + g)));
  }
  for (int g = 0; g < GB; ++g) tile.sum[g] = tile.sum[g] * rescale[g] + total[g];
}

template <DType T, int kDim, int GB>
void attend_tile(const Tile& tile) {
  constexpr int W = Vec::kLanes;
  constexpr int TB = Vec::token_block(GB);
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  const int dim = kDim != 0 ? kDim : tile.head_dim;
  alignas(64) float scores[GB * kTileTokens];
  alignas(64) float rescale[kMaxGroup];

  const char* ahead = tile.prefetch_k;
  int t = 0;
  for (; t + TB <= tile.tokens; t += TB) {
    score_tokens<T, kDim, TB, GB>(tile.k + t * tile.row_bytes, tile.row_bytes, tile.q, dim, ahead,
                                  scores + t);
  }
  for (; t < tile.tokens; ++t) {
    score_tokens<T, kDim, 1, GB>(tile.k + t * tile.row_bytes, tile.row_bytes, tile.q, dim, ahead,
                                 scores + t);
  }
  softmax_step<GB>(tile, scores, rescale);

  ahead = tile.prefetch_v;
  constexpr int kStep = 2 * W * Vec::kPairsPerPass;
  int d = 0;
  for (; d + kStep <= dim; d += kStep) {
    accumulate<T, Vec::kPairsPerPass, GB>(tile.v + d / (2 * W) * kPairBytes, tile.row_bytes,
                                          tile.tokens, scores, rescale, tile.acc + d, dim, ahead);
  }
  for (; d < dim; d += 2 * W) {
    accumulate<T, 1, GB>(tile.v + d / (2 * W) * kPairBytes, tile.row_bytes, tile.tokens, scores,
                         rescale, tile.acc + d, dim, ahead);
  }
}

using TileFn = void (*)(const Tile&);

template <DType T, int kDim>
TileFn tile_for_group(int group) {
  static_assert(Vec::kMaxGroupChunk <= kMaxGroup);
  switch (group) {
    case 1:
      return attend_tile<T, kDim, 1>;
    case 2:
      return attend_tile<T, kDim, 2>;
    case 3:
      return attend_tile<T, kDim, 3>;
    case 4:
      return attend_tile<T, kDim, 4>;
    default:
      break;
  }
  if constexpr (Vec::kMaxGroupChunk >= 5) {
    if (group == 5) return attend_tile<T, kDim, 5>;
  }
  if constexpr (Vec::kMaxGroupChunk >= 8) {
    if (group == 6) return attend_tile<T, kDim, 6>;
    if (group == 7) return attend_tile<T, kDim, 7>;
    if (group == 8) return attend_tile<T, kDim, 8>;
  }
  return nullptr;
}

template <DType T>
TileFn tile_for_dim(int dim, int group) {
  switch (Vec::kSpecialiseDims ? dim : 0) {
    case 64:
      return tile_for_group<T, 64>(group);
    case 96:
      return tile_for_group<T, 96>(group);
    case 128:
      return tile_for_group<T, 128>(group);
    case 256:
      return tile_for_group<T, 256>(group);
    default:
      return tile_for_group<T, 0>(group);
  }
}

inline TileFn find_tile(DType dtype, int dim, int group) {
  if (dtype == DType::kBF16) return tile_for_dim<DType::kBF16>(dim, group);
  if (dtype == DType::kF16) return tile_for_dim<DType::kF16>(dim, group);
  return tile_for_dim<DType::kF32>(dim, group);
}

}  // namespace
}  // namespace scout
