// score_block and weigh_block for pages of int8 codes, in 16-bit integers: a product of int16 pairs
// does the work of four fused multiply-adds and needs no conversion to float. Include
// attend_tile.h first.
//
// For few query heads V is added some tokens at a time over all heads, with the sums in cache until
// the tile ends (add_code_rows, fold_code_rows); for many a few columns at a time with the sums in
// registers (accumulate_codes).
//
// The query becomes 16-bit codes once per call (scale = largest magnitude / 32767), the weights
// once per tile and row (relative to the row's largest weight in the tile, softmax_rows). Products
// are summed exactly: |code of a page| <= 128, so those of kMaxCodedDim elements stay below 2^31,
// and those of a tile's tokens below 2^28. What is lost is the rounding of the codes, at most 2^-16
// of the largest element, where an int8 code loses 2^-8.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_tile.h"

namespace scout {
namespace {

// `count` floats to 16-bit codes, `count` a multiple of Vec::kLanes. Returns the scale; NaN if a
// value is not finite.
inline float encode_shorts(const float* from, int count, int16_t* to) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  F largest = Vec::zero();
  F wrong = Vec::zero();  // 0 * x summed up
  for (int i = 0; i < count; i += W) {
    const F x = Vec::load(from + i);
    largest = Vec::max(largest, Vec::abs(x));
    wrong = Vec::fma(x, Vec::zero(), wrong);
  }
  const float magnitude = Vec::hmax(largest);
  const float poison = Vec::hsum(wrong);
  const bool usable = poison == poison && magnitude > 0x1p-100f;
  const F factor = Vec::set1(usable ? kLargestShort / magnitude : 0.0f);
  for (int i = 0; i < count; i += W) {
    const F x = usable ? Vec::load(from + i) : Vec::zero();
    Vec::store_shorts(Vec::mul(x, factor), to + i);
  }
  return poison == poison ? (usable ? magnitude / kLargestShort : 0.0f) : poison;
}

// Columns of a sum over 2 * kLanes columns: zip_low and zip_high deal out four at a time.
inline void unpack_zipped(const float* from, float factor, float* to, int dim) {
  constexpr int W = Vec::kLanes;
  for (int d = 0; d < dim; d += 2 * W) {
    for (int i = 0; i < W; ++i) {
      const int at = d + i / 4 * 8 + i % 4;
      to[at] = factor * from[d + i];
      to[at + 4] = factor * from[d + W + i];
    }
  }
}

// scores[t][g] = <q[g], k[t]> in codes, for TB tokens.
template <int kDim, int TB, int GB>
inline Hints score_codes(const char* k, ptrdiff_t row_bytes, const int16_t* q, int head_dim,
                         Hints ahead, float* scores, ptrdiff_t stride) {
  using I = Vec::I;
  using S = Vec::S;
  constexpr int W = 2 * Vec::kLanes;
  static_assert(kMaxCodedDim * 32767LL * 128 < 1LL << 31, "of all elements, in store_sums");
  const int dim = kDim != 0 ? kDim : head_dim;
  I acc[GB][TB];
#pragma GCC unroll 8
  for (int d = 0; d < dim; d += W) {
    S x[TB];
#pragma GCC unroll 8
    for (int t = 0; t < TB; ++t) {
      x[t] = Vec::widen_codes(k + t * row_bytes + d);
    }
    prefetch_span<TB * W, Vec::codes_by_rows(GB)>(ahead);
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const S code = Vec::load_shorts(q + g * dim + d);
#pragma GCC unroll 8
      for (int t = 0; t < TB; ++t) {
        acc[g][t] = d == 0 ? Vec::mul_shorts(code, x[t]) : Vec::dot_shorts(acc[g][t], code, x[t]);
      }
    }
  }
  store_sums<TB, GB>(acc, scores, stride);
  return ahead;
}

// acc[g] = rescale[g] * acc[g] + factor[g] * sum_t weights[t][g] * v[t], over 2 * NP vectors of
// columns, in the order of unpack_zipped. Weights are 16-bit codes.
template <int NP, int GB>
inline Hints accumulate_codes(const char* v, ptrdiff_t row_bytes, int tokens, const float* weights,
                              ptrdiff_t stride, const float* rescale, const float* factor,
                              float* acc, int dim, Hints ahead) {
  using I = Vec::I;
  using S = Vec::S;
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  constexpr int kColumns = 2 * W;
  I sums[GB][2 * NP];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int j = 0; j < 2 * NP; ++j) sums[g][j] = Vec::zero_words();
  }
  auto add_pair = [&](int t, const char* even, const char* odd) {
    S low[NP], high[NP];
#pragma GCC unroll 2
    for (int j = 0; j < NP; ++j) {
      const S x = Vec::widen_codes(even + j * kColumns);
      const S y = Vec::widen_codes(odd + j * kColumns);
      low[j] = Vec::zip_low(x, y);
      high[j] = Vec::zip_high(x, y);
    }
    prefetch_span<2 * NP * kColumns>(ahead);
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const S w = Vec::set1_pair(weights + t / 2 * stride + g);
#pragma GCC unroll 2
      for (int j = 0; j < NP; ++j) {
        sums[g][2 * j] = Vec::dot_shorts(sums[g][2 * j], w, low[j]);
        sums[g][2 * j + 1] = Vec::dot_shorts(sums[g][2 * j + 1], w, high[j]);
      }
    }
  };
  int t = 0;
  for (; t + 2 <= tokens; t += 2) add_pair(t, v + t * row_bytes, v + (t + 1) * row_bytes);
  // An odd last token is paired with itself: the weight behind the last one is zero.
  if (t < tokens) add_pair(t, v + t * row_bytes, v + t * row_bytes);
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
    const F scale = Vec::set1(factor[g]);
    const F shrink = Vec::set1(rescale != nullptr ? rescale[g] : 1.0f);
#pragma GCC unroll 4
    for (int j = 0; j < 2 * NP; ++j) {
      float* const at = acc + g * dim + j * W;
      const F sum = Vec::mul(scale, Vec::from_words(sums[g][j]));
      Vec::store(at, Vec::fma(shrink, Vec::load(at), sum));
    }
  }
  return ahead;
}

// code_sums[g] += sum_t weights[t][g] * v[t] for TB tokens from `first` on, of all heads, in the
// order of unpack_zipped; kFresh: = in place of +=. Weights are 16-bit codes.
template <int TB, int GB, bool kFresh>
inline __attribute__((always_inline)) Hints add_code_rows(const Block& block, int dim, int first,
                                                          Hints ahead) {
  using I = Vec::I;
  using S = Vec::S;
  constexpr int W = Vec::kLanes;
  constexpr int kColumns = 2 * W;
  constexpr int kPairs = (TB + 1) / 2;
  const char* const v = block.rows + first * block.row_bytes;
  const float* const weights = block.scores + first / 2 * block.score_stride;
  const ptrdiff_t row_bytes = block.row_bytes, stride = block.score_stride;
  const int heads = block.heads, group = block.group;
  int32_t* const code_sums = block.code_sums;
  for (int h = 0; h < heads; ++h) {
    S w[kPairs][GB];
#pragma GCC unroll 8
    for (int p = 0; p < kPairs; ++p) {
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) w[p][g] = Vec::set1_pair(weights + p * stride + h * group + g);
    }
#pragma GCC unroll 4
    for (int d = 0; d < dim; d += kColumns) {
      I sums[GB][2];
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        const int32_t* const at = code_sums + (h * group + g) * dim + d;
        sums[g][0] = kFresh ? Vec::zero_words() : Vec::load_words(at);
        sums[g][1] = kFresh ? Vec::zero_words() : Vec::load_words(at + W);
      }
#pragma GCC unroll 8
      for (int p = 0; p < kPairs; ++p) {
        const char* const even = v + 2 * p * row_bytes + h * dim + d;
        // An odd last token is paired with itself: the weight behind the last one is zero.
        const S x = Vec::widen_codes(even);
        const S y = Vec::widen_codes(2 * p + 1 < TB ? even + row_bytes : even);
        const S low = Vec::zip_low(x, y), high = Vec::zip_high(x, y);
        prefetch_span<2 * kColumns, true>(ahead);
#pragma GCC unroll 8
        for (int g = 0; g < GB; ++g) {
          sums[g][0] = Vec::dot_shorts(sums[g][0], w[p][g], low);
          sums[g][1] = Vec::dot_shorts(sums[g][1], w[p][g], high);
        }
      }
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        int32_t* const at = code_sums + (h * group + g) * dim + d;
        Vec::store_words(at, sums[g][0]);
        Vec::store_words(at + W, sums[g][1]);
      }
    }
  }
  return ahead;
}

// acc = rescale * acc + factor * code_sums, of `rows` query heads.
inline void fold_code_rows(const int32_t* code_sums, const float* factor, const float* rescale,
                           float* acc, int rows, int dim) {
  using F = Vec::F;
  for (int row = 0; row < rows; ++row) {
    const F scale = Vec::set1(factor[row]);
    const F shrink = Vec::set1(rescale[row]);
    for (int d = 0; d < dim; d += Vec::kLanes) {
      const F sum = Vec::mul(scale, Vec::from_words(Vec::load_words(code_sums + row * dim + d)));
      float* const at = acc + row * dim + d;
      Vec::store(at, Vec::fma(shrink, Vec::load(at), sum));
    }
  }
}

template <int kDim, int GB>
void score_codes_block(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  score_each<Vec::token_block(GB)>(
      block, block.q_codes, dim, dim,
      [&](auto tokens, const char* k, const int16_t* q, float* scores) {
        ahead = score_codes<kDim, tokens.kCount, GB>(k, block.row_bytes, q, dim, ahead, scores,
                                                     block.score_stride);
      });
}

template <int kDim, int GB>
inline void weigh_code_rows(const Block& block) {
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  int t = 0;
  if (block.rescale != nullptr) {  // the first block of a tile
    if (block.tokens >= kCodeRowTokens) {
      ahead = add_code_rows<kCodeRowTokens, GB, true>(block, dim, 0, ahead);
      t = kCodeRowTokens;
    } else if (block.tokens >= 2) {
      ahead = add_code_rows<2, GB, true>(block, dim, 0, ahead);
      t = 2;
    } else {
      ahead = add_code_rows<1, GB, true>(block, dim, 0, ahead);
      t = 1;
    }
  }
  for (; t + kCodeRowTokens <= block.tokens; t += kCodeRowTokens)
    ahead = add_code_rows<kCodeRowTokens, GB, false>(block, dim, t, ahead);
  for (; t + 2 <= block.tokens; t += 2) ahead = add_code_rows<2, GB, false>(block, dim, t, ahead);
  if (t < block.tokens) ahead = add_code_rows<1, GB, false>(block, dim, t, ahead);
}

template <int kDim, int GB>
inline void weigh_code_columns(const Block& block) {
  constexpr int NP = Vec::pairs_per_pass(GB);
  constexpr int kColumns = 2 * Vec::kLanes;
  const int dim = kDim != 0 ? kDim : block.head_dim;
  Hints ahead = block.ahead;
  for (int h = 0; h < block.heads; ++h) {
    const int row = h * block.group;
    const float* const weights = block.scores + row;
    const float* const rescale = block.rescale != nullptr ? block.rescale + row : nullptr;
    int d = 0;
    for (; d + NP * kColumns <= dim; d += NP * kColumns) {
      ahead = accumulate_codes<NP, GB>(block.rows + h * dim + d, block.row_bytes, block.tokens,
                                       weights, block.score_stride, rescale, block.factor + row,
                                       block.acc + row * dim + d, dim, ahead);
    }
    for (; d < dim; d += kColumns) {
      ahead = accumulate_codes<1, GB>(block.rows + h * dim + d, block.row_bytes, block.tokens,
                                      weights, block.score_stride, rescale, block.factor + row,
                                      block.acc + row * dim + d, dim, ahead);
    }
  }
}

template <int kDim, int GB>
void weigh_codes_block(const Block& block) {
  if constexpr (Vec::codes_by_rows(GB)) {
    if (block.code_sums != nullptr) return weigh_code_rows<kDim, GB>(block);
  }
  weigh_code_columns<kDim, GB>(block);
}

}  // namespace
}  // namespace scout
