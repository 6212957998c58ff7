// Min/max digest scores, and the reduction of any digest's scores per query head to scores per
// page, generic over Vec. Include a vec_*.h first; see attend_tile.h for why the standard library
// is not used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "score.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr int kHeadsAtOnce = 4;

// Adds one head's shares of e^(factor bounds), weighted by worth[n], if given, to result. bounds is
// padded with -inf to whole vectors.
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
    Vec::store(bounds + n, w);
  }
  const float sum = Vec::hsum(total);
  const F inverse = Vec::set1(sum > 0.0f ? 1.0f / sum : 0.0f);
  for (int n = 0; n < padded; n += W) {
    const F share = Vec::mul(inverse, Vec::load(bounds + n));
    const F times = worth != nullptr ? Vec::load(worth + n) : Vec::set1(1.0f);
    Vec::store(result + n, Vec::fma(share, times, Vec::load(result + n)));
  }
}

// bounds [query_heads, padded], worth the same shape or null, result [padded] is scratch.
inline void reduce_heads(const ScoreArgs& args, int query_heads, float factor, float* bounds,
                         int padded, const float* worth, float* result) {
  for (int n = 0; n < padded; ++n) result[n] = 0.0f;
  for (int row = 0; row < query_heads; ++row) {
    const ptrdiff_t at = static_cast<ptrdiff_t>(row) * padded;
    reduce_head(args, factor, bounds + at, padded, worth != nullptr ? worth + at : worth, result);
  }
  for (int n = 0; n < args.columns; ++n) {
    args.out[n] = n < args.n_full && args.table[n] >= 0 ? result[n] : -kInfinity;
  }
}

// Bounds of GB query heads for one KV head of one page, to bounds[g * stride]. max(q, 0) and
// min(q, 0) are in the column order of load_pair: max(q kmin, q kmax) = max(q, 0) kmax +
// min(q, 0) kmin, as one of the two products is exactly zero.
template <DType T, int GB>
inline void bound_heads(const char* kmin, const char* kmax, const float* q_positive,
                        const float* q_negative, int dim, float* bounds, ptrdiff_t stride) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  F acc[kHeadsAtOnce];
#pragma GCC unroll 4
  for (int g = 0; g < kHeadsAtOnce; ++g) acc[g] = Vec::zero();
  for (int d = 0; d < dim; d += 2 * W) {
    F low0, low1, high0, high1;
    Vec::load_pair<T>(kmin + d * bytes_of(T), low0, low1);
    Vec::load_pair<T>(kmax + d * bytes_of(T), high0, high1);
#pragma GCC unroll 4
    for (int g = 0; g < GB; ++g) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(g) * dim + d;
      acc[g] = Vec::fma(Vec::load(q_positive + at), high0, acc[g]);
      acc[g] = Vec::fma(Vec::load(q_negative + at), low0, acc[g]);
      acc[g] = Vec::fma(Vec::load(q_positive + at + W), high1, acc[g]);
      acc[g] = Vec::fma(Vec::load(q_negative + at + W), low1, acc[g]);
    }
  }
  float sums[4];
  Vec::hsum4(acc[0], acc[1], acc[2], acc[3], sums);
#pragma GCC unroll 4
  for (int g = 0; g < GB; ++g) bounds[g * stride] = sums[g];
}

template <DType T>
void bound_pages(const Digests& digests, const ScoreArgs& args, const float* q_positive,
                 const float* q_negative, float* bounds, ptrdiff_t stride) {
  const int dim = digests.head_dim;
  const int heads = digests.kv_heads;
  const int group = args.group;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * bytes_of(T);
  const char* const kmin = static_cast<const char*>(digests.kmin);
  const char* const kmax = static_cast<const char*>(digests.kmax);
  for (int n = 0; n < args.n_full; ++n) {
    const int64_t page = args.table[n];
    if (page < 0) {
      for (int row = 0; row < heads * group; ++row) bounds[row * stride + n] = -kInfinity;
      continue;
    }
    const int64_t coming = n + 1 < args.n_full && args.table[n + 1] >= 0 ? args.table[n + 1] : page;
    for (int h = 0; h < heads; ++h) {
      const ptrdiff_t here = (page * heads + h) * head_bytes;
      const ptrdiff_t ahead = (coming * heads + h) * head_bytes;
      for (ptrdiff_t line = 0; line < head_bytes; line += 64) {
        prefetch(kmin + ahead + line);
        prefetch(kmax + ahead + line);
      }
      for (int g = 0; g < group; g += kHeadsAtOnce) {
        const ptrdiff_t row = static_cast<ptrdiff_t>(h) * group + g;
        const float* qp = q_positive + row * dim;
        const float* qn = q_negative + row * dim;
        float* to = bounds + row * stride + n;
        switch (group - g) {
          case 1:
            bound_heads<T, 1>(kmin + here, kmax + here, qp, qn, dim, to, stride);
            break;
          case 2:
            bound_heads<T, 2>(kmin + here, kmax + here, qp, qn, dim, to, stride);
            break;
          case 3:
            bound_heads<T, 3>(kmin + here, kmax + here, qp, qn, dim, to, stride);
            break;
          default:
            bound_heads<T, 4>(kmin + here, kmax + here, qp, qn, dim, to, stride);
            break;
        }
      }
    }
  }
}

// Scratch: max(q, 0) [HQ, D], min(q, 0) [HQ, D], result [padded], bounds [HQ, padded].
inline void score_all(const Digests& digests, const ScoreArgs& args) {
  constexpr int W = Vec::kLanes;
  const int dim = digests.head_dim;
  const int query_heads = digests.kv_heads * args.group;
  const int padded = padded_columns(args.n_full);
  const ptrdiff_t q_floats = static_cast<ptrdiff_t>(query_heads) * dim;
  float* const q_positive = args.scratch;
  float* const q_negative = q_positive + q_floats;
  float* const result = q_negative + q_floats;
  float* const bounds = result + padded;

  for (ptrdiff_t d = 0; d < q_floats; d += 2 * W) {
    for (int i = 0; i < 2 * W; ++i) {
      const float x = args.q[d + Vec::column(digests.dtype, i)];
      q_positive[d + i] = x > 0.0f ? x : 0.0f;
      q_negative[d + i] = x > 0.0f ? 0.0f : x;
    }
  }
  if (digests.dtype == DType::kBF16) {
    bound_pages<DType::kBF16>(digests, args, q_positive, q_negative, bounds, padded);
  } else if (digests.dtype == DType::kF16) {
    bound_pages<DType::kF16>(digests, args, q_positive, q_negative, bounds, padded);
  } else {
    bound_pages<DType::kF32>(digests, args, q_positive, q_negative, bounds, padded);
  }
  reduce_heads(args, query_heads, args.scale, bounds, padded, nullptr, result);
}

}  // namespace
}  // namespace scout
