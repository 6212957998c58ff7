// Rows of one query head on their way into and out of the walk over the pages. Include a vec_*.h
// first.
//
// As in attend_tile.h, nothing of the standard library is used.
#pragma once

#include <cstdint>

#include "scout/attend.h"
#include "vec_math.h"

namespace scout {
namespace {

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

// What the sums over all tokens of a query head mean.
struct RowResult {
  float inverse;  // by which the sum of weighted values becomes the output
  float lse;

  RowResult(float highest, float sum) {
    // At the limit: every score was -inf, as if there were no token. A NaN among them is no score.
    const bool hidden = highest <= -kScoreLimit && sum == sum;
    const bool empty = hidden || sum == 0.0f;
    inverse = empty ? 0.0f : 1.0f / sum;
    lse = empty ? -kInfinity : static_cast<float>(highest * kLn2 + __builtin_log(sum));
  }
};

}  // namespace
}  // namespace scout
