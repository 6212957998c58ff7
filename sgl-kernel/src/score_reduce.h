// Reduction of scores per (query head, page) to scores per page, shared by all digests.
// Include a vec_*.h first.
#pragma once

#include <cstddef>

#include "score_cpu.h"
#include "vec_math.h"

namespace scout {
namespace {

// Accumulates one head's bounds, times a factor, into result; kMass weights a page by worth[n], if
// given. bounds is padded with -inf to whole vectors.
inline void reduce_head(const ScoreArgs& args, float factor, float* bounds, int padded,
                        const float* worth, float* result) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  const F scale = Vec::set1(factor);
  const F limit = Vec::set1(kScoreLimit);
  const F lower_limit = Vec::set1(-kScoreLimit);
  for (int n = args.n_full; n < padded; ++n) bounds[n] = 0.0f;
  for (int n = 0; n < padded; n += W) {
    const F u = Vec::mul(scale, Vec::load(bounds + n));
    Vec::store(bounds + n, Vec::max(lower_limit, Vec::min(limit, u)));
  }
  for (int n = 0; n < args.n_full; ++n) {
    if (args.table[n] < 0) bounds[n] = -kInfinity;  // also with a negative scale
  }
  for (int n = args.n_full; n < padded; ++n) bounds[n] = -kInfinity;
  F highest = Vec::set1(-kScoreLimit);
  for (int n = 0; n < padded; n += W) highest = Vec::max(highest, Vec::load(bounds + n));
  const F top = Vec::set1(Vec::hmax(highest));
  const F log2e = Vec::set1(kLog2e);
  F total = Vec::zero();
  for (int n = 0; n < padded; n += W) {
    const F w = exp2_nonpositive(Vec::mul(log2e, Vec::sub(Vec::load(bounds + n), top)));
    total = Vec::add(total, w);
    if (args.reduce == Reduce::kMass) Vec::store(bounds + n, w);
  }
  const float sum = Vec::hsum(total);
  if (args.reduce == Reduce::kMass) {
    const F inverse = Vec::set1(sum > 0.0f ? 1.0f / sum : 0.0f);
    for (int n = 0; n < padded; n += W) {
      const F share = Vec::mul(inverse, Vec::load(bounds + n));
      const F times = worth != nullptr ? Vec::load(worth + n) : Vec::set1(1.0f);
      Vec::store(result + n, Vec::fma(share, times, Vec::load(result + n)));
    }
  } else {
    const F log_sum = Vec::set1(static_cast<float>(__builtin_log(sum)));
    for (int n = 0; n < padded; n += W) {
      const F relative = Vec::sub(Vec::sub(Vec::load(bounds + n), top), log_sum);
      Vec::store(result + n, Vec::max(Vec::load(result + n), relative));
    }
  }
}

// bounds [query_heads, padded], worth the same shape or null, result [padded] is scratch.
inline void reduce_heads(const ScoreArgs& args, int query_heads, float factor, float* bounds,
                         int padded, const float* worth, float* result) {
  const float start = args.reduce == Reduce::kMax ? -kInfinity : 0.0f;
  for (int n = 0; n < padded; ++n) result[n] = start;
  for (int row = 0; row < query_heads; ++row) {
    const ptrdiff_t at = static_cast<ptrdiff_t>(row) * padded;
    reduce_head(args, factor, bounds + at, padded, worth != nullptr ? worth + at : worth, result);
  }
  for (int n = 0; n < args.columns; ++n) {
    args.out[n] = n < args.n_full && args.table[n] >= 0 ? result[n] : -kInfinity;
  }
}

}  // namespace
}  // namespace scout
