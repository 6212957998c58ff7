// The two halves of attention over a block of rows (tokens), all KV heads of them, each against all
// query heads of its group, written once for every Vec. Include a vec_*.h first.
//
// score_block: dot products of all query heads; each K row is loaded once. softmax_rows: one step
// of online softmax for some query heads. weigh_block: weighted sum of V with the accumulators in
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

constexpr int kTileTokens = 64;  // of a page, at once; also the length of a row of scores
constexpr int kMaxGroup = 16;    // at least the largest group chunk, a multiple of every lane count
constexpr int kLineBytes = 64;
constexpr float kLargestShort = 32767.0f;  // code of the largest query element or weight

template <DType T>
constexpr int element_bytes() {
  return T == DType::kF32 ? 4 : 2;
}

struct Block {
  const char* rows;   // K or V: first row of the first head; rows are row_bytes apart
  const char* ahead;  // what to prefetch meanwhile, as many bytes as the block has
  ptrdiff_t row_bytes;
  int tokens;
  int heads;
  int head_dim;
  int group;               // query heads per KV head, of which the block function takes GB
  const float* q;          // [heads * group, D], column order of load_pair
  const int16_t* q_codes;  // the same for attend_tile_int8.h and attend_tile_bf16.h, natural order
  float* acc;              // [heads * group, D], same order: sum of weights * v
  float* scores;           // [heads * group, kTileTokens] from the first token on; later weights
  const float* rescale;    // [heads * group]: by which acc shrinks first; null: it stays
  const float* factor;     // [heads * group]: scale of the sums of codes (attend_tile_int8.h)
};

template <int kBytes>
inline void prefetch_span(const char*& p) {
#pragma GCC unroll 16
  for (int offset = 0; offset < kBytes; offset += kLineBytes) prefetch(p + offset);
  p += kBytes;
}

// scores[g][t] = sum of the lanes of acc[g][t].
template <int TB, int GB, typename X>
inline __attribute__((always_inline)) void store_sums(const X (&acc)[GB][TB], float* scores) {
  if constexpr (TB == 4) {
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      Vec::hsum4(acc[g][0], acc[g][1], acc[g][2], acc[g][3], scores + g * kTileTokens);
    }
  } else {
    constexpr int kSums = GB * TB;
#pragma GCC unroll 16
    for (int i = 0; i < kSums; i += 4) {
      X part[4];
#pragma GCC unroll 4
      for (int j = 0; j < 4; ++j) {
        part[j] = i + j < kSums ? acc[(i + j) % kSums / TB][(i + j) % TB] : X{};
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

// scores[g][t] = <q[g], k[t]> for TB tokens.
template <DType T, int kDim, int TB, int GB>
inline const char* score_tokens(const char* k, ptrdiff_t row_bytes, const float* q, int head_dim,
                                const char* ahead, float* scores) {
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
  store_sums<TB, GB>(acc, scores);
  return ahead;
}

// acc[g] = rescale[g] * acc[g] + sum_t weights[g][t] * v[t], over 2 * NP vectors of columns.
template <DType T, int NP, int GB>
inline const char* accumulate(const char* v, ptrdiff_t row_bytes, int tokens, const float* weights,
                              const float* rescale, float* acc, int dim, const char* ahead) {
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
  return ahead;
}

// One step of online softmax for R consecutive rows (query heads): raw dot products become weights.
struct Softmax {
  const float* scale;  // [R], of the dot products
  float logit_cap;
  float* highest;  // [R] base-2 logarithm of the largest weight so far, -inf at first; brought up
  float* shift;    // [R] base-2 logarithm of the factor by which earlier sums shrink
  float* lift;     // [R] kCodes: base-2 logarithm of the factor that these weights lack
  float* total;    // [R] sum of these weights
};

// Weights are 2^(score - highest). kCodes: 2^(score - largest score of these tokens), as 16-bit
// codes: code t of a row lies at half of float t's offset, zeros behind the last one.
template <int R, bool kCodes>
inline void softmax_rows(float* rows, int tokens, const Softmax& step) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  static_assert(R <= 4);
  const int padded = (tokens + W - 1) / W * W;
  const bool capped = step.logit_cap > 0.0f;
  const F cap = Vec::set1(step.logit_cap * kLog2e);
  const F limit = Vec::set1(kScoreLimit);
  const F lower_limit = Vec::set1(-kScoreLimit);
  F highest[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const row = rows + r * kTileTokens;
    const F scale = Vec::set1(capped ? step.scale[r] / step.logit_cap : step.scale[r] * kLog2e);
    highest[r] = Vec::set1(-kInfinity);
    for (int t = tokens; t < padded; ++t) row[t] = 0.0f;
    for (int t = 0; t < padded; t += W) {
      F s = Vec::mul(scale, Vec::load(row + t));
      if (capped) s = Vec::mul(cap, tanh(s));
      s = Vec::max(lower_limit, Vec::min(limit, s));
      Vec::store(row + t, s);
      highest[r] = Vec::max(highest[r], s);
    }
    if (padded > tokens) {  // once more, without what was padded
      for (int t = tokens; t < padded; ++t) row[t] = -kInfinity;
      highest[r] = Vec::set1(-kInfinity);
      for (int t = 0; t < padded; t += W) highest[r] = Vec::max(highest[r], Vec::load(row + t));
    }
  }
  float largest[4];
  Vec::hmax4(highest[0], highest[1], highest[2], highest[3], largest);
  F sums[4] = {Vec::zero(), Vec::zero(), Vec::zero(), Vec::zero()};
#pragma GCC unroll 4
  for (int r = 0; r < R; ++r) {
    float* const row = rows + r * kTileTokens;
    const float before = step.highest[r];
    const float now = before > largest[r] ? before : largest[r];
    step.highest[r] = now;
    step.shift[r] = before - now;
    if (kCodes) step.lift[r] = largest[r] - now;
    const F base = Vec::set1(kCodes ? largest[r] : now);
    for (int t = 0; t < padded; t += W) {
      const F w = exp2_nonpositive(Vec::sub(Vec::load(row + t), base));
      sums[r] = Vec::add(sums[r], w);
      if (kCodes) {  // in place: codes never overtake the scores
        Vec::store_shorts(Vec::mul(w, Vec::set1(kLargestShort)),
                          reinterpret_cast<int16_t*>(row) + t);
      } else {
        Vec::store(row + t, w);
      }
    }
  }
  float totals[4];
  Vec::hsum4(sums[0], sums[1], sums[2], sums[3], totals);
  for (int r = 0; r < R; ++r) step.total[r] = totals[r];
}

template <int kTokens>
struct Tokens {
  static constexpr int kCount = kTokens;
};

// score(Tokens<n>, rows of a head, its first query, scores) for all heads of a block, in the order
// of memory: as many tokens at a time as fit the registers, the rest one by one.
template <int TB, typename Query, typename Score>
inline __attribute__((always_inline)) void score_each(const Block& block, const Query* q, int dim,
                                                      int head_bytes, Score score) {
  int t = 0;
  auto heads = [&](auto tokens) {
    for (int h = 0; h < block.heads; ++h) {
      score(tokens, block.rows + t * block.row_bytes + ptrdiff_t{h} * head_bytes,
            q + h * block.group * dim, block.scores + h * block.group * kTileTokens + t);
    }
  };
  for (; t + TB <= block.tokens; t += TB) heads(Tokens<TB>());
  for (; t < block.tokens; ++t) heads(Tokens<1>());
}

template <DType T, int kDim, int GB>
void score_block(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  const char* ahead = block.ahead;
  score_each<Vec::token_block(GB)>(block, block.q, dim, dim * element_bytes<T>(),
                                   [&](auto tokens, const char* k, const float* q, float* scores) {
                                     ahead = score_tokens<T, kDim, tokens.kCount, GB>(
                                         k, block.row_bytes, q, dim, ahead, scores);
                                   });
}

template <DType T, int kDim, int GB>
void weigh_block(const Block& block) {
  constexpr int W = Vec::kLanes;
  constexpr int kPairBytes = 2 * W * element_bytes<T>();
  const int dim = kDim != 0 ? kDim : block.head_dim;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * element_bytes<T>();
  constexpr int NP = Vec::pairs_per_pass(GB);
  constexpr int kStep = 2 * W * NP;
  const char* ahead = block.ahead;
  for (int h = 0; h < block.heads; ++h) {
    const char* const v = block.rows + h * head_bytes;
    const float* const weights = block.scores + h * block.group * kTileTokens;
    const float* const rescale =
        block.rescale != nullptr ? block.rescale + h * block.group : nullptr;
    float* const acc = block.acc + h * block.group * dim;
    int d = 0;
    for (; d + kStep <= dim; d += kStep) {
      const ptrdiff_t at = d / (2 * W) * kPairBytes;
      ahead = accumulate<T, NP, GB>(v + at, block.row_bytes, block.tokens, weights, rescale,
                                    acc + d, dim, ahead);
    }
    for (; d < dim; d += 2 * W) {
      const ptrdiff_t at = d / (2 * W) * kPairBytes;
      ahead = accumulate<T, 1, GB>(v + at, block.row_bytes, block.tokens, weights, rescale, acc + d,
                                   dim, ahead);
    }
  }
}

}  // namespace
}  // namespace scout
