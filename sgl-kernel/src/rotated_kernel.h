// Rotated digest scores, generic over Vec. Include a vec_*.h first.
#pragma once

#include <cstddef>
#include <cstdint>

#include "code_sums.h"
#include "score.h"
#include "score_kernel.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr float kLn2Float = 0.693147180559945309417f;
constexpr int kRowsAtOnce = 4;  // query heads

// The preprocessed queries of a sequence, reused for all its pages.
struct RotatedQueries {
  float* tables;  // [HQ, CodeSums::table_floats(D)]
  CodeSums::Query* codes;
  int16_t* words;     // [HQ, D], for the product with the page mean
  float* word_units;  // [HQ]
};

// Prepares one row of queries, q [D] rotated, in log2 units.
inline void prepare_query(const RotatedQueries& to, ptrdiff_t row, const float* q, int dim) {
  float sums[4 * kRotatedMaxDim];
  for (int c = 0; c < dim / 4; ++c) {
    for (int i = 0; i < 16; ++i) {
      float sum = 0.0f;
      for (int k = 0; k < 4; ++k) sum += i >> k & 1 ? q[4 * c + k] : -q[4 * c + k];
      sums[16 * c + i] = sum;
    }
  }
  CodeSums::make_table(sums, dim, to.tables + row * CodeSums::table_floats(dim), to.codes[row]);
  float peak = 1e-30f, total = 1e-30f;
  for (int d = 0; d < dim; ++d) {
    const float size = __builtin_fabsf(q[d]);
    peak = size > peak ? size : peak;
    total += size;
  }
  // The product with an int8 mean must also fit 32 bits.
  const float by_peak = 32767.0f / peak, by_total = 0x1p30f / 127.0f / total;
  const float factor = by_peak < by_total ? by_peak : by_total;
  for (int d = 0; d < dim; ++d) {
    const int rounded = static_cast<int>(q[d] * factor + 32768.5f) - 32768;
    to.words[row * dim + d] = static_cast<int16_t>(rounded);
  }
  to.word_units[row] = 1.0f / factor;
}

inline void prepare_queries(const RotatedDigests& digests, const ScoreArgs& args,
                            const RotatedQueries& to) {
  const int dim = digests.head_dim;
  for (int row = 0; row < digests.kv_heads * args.group; ++row) {
    float q[kRotatedMaxDim];
    for (int d = 0; d < dim; ++d) {
      q[d] = args.q[static_cast<ptrdiff_t>(row) * dim + d] * args.scale * kLog2e;
    }
    make_finite(q, dim);
    rotate<1>(q, dim);
    prepare_query(to, row, q, dim);
  }
}

inline int32_t dot(const int16_t* a, const int16_t* b, int dim) {
  int32_t sum = 0;
  for (int d = 0; d < dim; ++d) sum += a[d] * b[d];
  return sum;
}

// Softmax sums over the tokens of a page for four query heads: the maximum of x = units * levels *
// scales, the sum of 2^(x - max), and the same weighted by norms. levels [4, 32]; units > 0.
inline void sum_tokens(float* levels, const float* scales, const float* norms, const float* units,
                       float* tops, float* sums, float* of_values) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  F highest[kRowsAtOnce], total[kRowsAtOnce], of_value[kRowsAtOnce];
#pragma GCC unroll 4
  for (int h = 0; h < kRowsAtOnce; ++h) {
    for (int t = 0; t < kRotatedTokens; t += W) {
      const F x = Vec::mul(Vec::load(levels + h * kRotatedTokens + t), Vec::load(scales + t));
      Vec::store(levels + h * kRotatedTokens + t, x);
      highest[h] = t == 0 ? x : Vec::max(highest[h], x);
    }
  }
  Vec::hmax4(highest[0], highest[1], highest[2], highest[3], tops);
#pragma GCC unroll 4
  for (int h = 0; h < kRowsAtOnce; ++h) {
    tops[h] *= units[h];
    total[h] = of_value[h] = Vec::zero();
    for (int t = 0; t < kRotatedTokens; t += W) {
      const F x = Vec::load(levels + h * kRotatedTokens + t);
      const F below = Vec::fma(x, Vec::set1(units[h]), Vec::set1(-tops[h]));
      // A huge tops may be rounded by more than exp2 can take, so clamp to 0.
      const F weight = exp2_rough(Vec::min(below, Vec::zero()));
      total[h] = Vec::add(total[h], weight);
      of_value[h] = Vec::fma(weight, Vec::load(norms + t), of_value[h]);
    }
  }
  Vec::hsum4(total[0], total[1], total[2], total[3], sums);
  Vec::hsum4(of_value[0], of_value[1], of_value[2], of_value[3], of_values);
}

// Prefetches part of the planes' lines. A CPU drops prefetches while its miss queue is full, so a
// few are issued per query head, not all at once.
inline void prefetch_part(const RotatedDigests& digests, int64_t head, int part, int parts) {
  const int bytes = 8 * digests.head_dim;
  const char* const at = reinterpret_cast<const char*>(digests.planes + head * bytes);
  for (int i = part * 64; i < bytes; i += parts * 64) prefetch(at + i);
}

// For each query head and page: its mass is sums 2^tops, and `worth` the mean value norm under it.
struct PageMasses {
  float* tops;
  float* sums;
  float* worth;
};

// One page and KV head, for `group` query heads from `row` on; results at place + g * stride.
inline void sum_head(const RotatedDigests& digests, const RotatedQueries& queries, int64_t head,
                     int64_t coming, ptrdiff_t row, int group, const PageMasses& to,
                     ptrdiff_t place, ptrdiff_t stride) {
  const int dim = digests.head_dim;
  const uint8_t* const stats = digests.stats + head * (dim + kStatsBytes);
  const uint8_t* const stats_ahead = digests.stats + coming * (dim + kStatsBytes);
  for (int i = 0; i < dim + kStatsBytes; i += 64) {
    prefetch(reinterpret_cast<const char*>(stats_ahead + i));
  }
  CodeSums codes;
  codes.load(digests.planes + head * 8 * dim, dim);
  int16_t mean[kRotatedMaxDim];
  for (int d = 0; d < dim; ++d) mean[d] = static_cast<int8_t>(stats[d]);
  const uint8_t* const rest = stats + dim;
  alignas(64) float scales[kRotatedTokens], norms[kRotatedTokens];
  CodeSums::scales(rest + kScalesAt, scales);
  CodeSums::norms(rest + kNormsAt, norms);
  float step, norm_step;
  __builtin_memcpy(&step, rest + kStepAt, sizeof step);
  __builtin_memcpy(&norm_step, rest + kNormStepAt, sizeof norm_step);
  alignas(64) float levels[kRowsAtOnce * kRotatedTokens];
  float units[kRowsAtOnce];
  for (int begin = 0; begin < group; begin += kRowsAtOnce) {
    const int count = group - begin < kRowsAtOnce ? group - begin : kRowsAtOnce;
    for (int h = 0; h < count; ++h) {
      const ptrdiff_t at = row + begin + h;
      prefetch_part(digests, coming, begin + h, group);
      units[h] = codes.add_up(queries.tables + at * CodeSums::table_floats(dim), queries.codes[at],
                              levels + h * kRotatedTokens);
    }
    for (int h = count; h < kRowsAtOnce; ++h) {  // padding: any finite numbers
      __builtin_memcpy(levels + h * kRotatedTokens, levels, sizeof(float) * kRotatedTokens);
      units[h] = units[0];
    }
    float relative[kRowsAtOnce], totals[kRowsAtOnce], of_values[kRowsAtOnce];
    sum_tokens(levels, scales, norms, units, relative, totals, of_values);
    for (int h = 0; h < count; ++h) {
      const ptrdiff_t at = row + begin + h;
      const float product = static_cast<float>(dot(mean, queries.words + at * dim, dim));
      const ptrdiff_t to_place = place + (begin + h) * stride;
      to.tops[to_place] = product * (queries.word_units[at] * step) + relative[h];
      to.sums[to_place] = totals[h];
      to.worth[to_place] = norm_step * of_values[h] / totals[h];
    }
  }
}

// tops = ln(sums 2^tops); 1 <= sums <= 32, up to rounding.
inline void take_logarithms(float* tops, const float* sums, ptrdiff_t count) {
  for (ptrdiff_t i = 0; i < count; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, sums + i, sizeof bits);
    const uint32_t mantissa_bits = (bits & 0x7fffffu) | 0x3f800000u;
    float m;
    __builtin_memcpy(&m, &mantissa_bits, sizeof m);
    const float exponent = static_cast<float>(static_cast<int32_t>(bits >> 23) - 127);
    const float y = (m - 1.0f) / (m + 1.0f);  // log m = 2 artanh y
    const float y2 = y * y;
    const float log_m = 2.0f * y * (1.0f + y2 * (1.0f / 3 + y2 * (1.0f / 5 + y2 * (1.0f / 7))));
    tops[i] = (tops[i] + exponent) * kLn2Float + log_m;
  }
}

// Natural logarithm of the sum over pages of sums 2^tops; for few pages.
inline float log_mass(const ScoreArgs& args, const float* tops, const float* sums) {
  float most = -kInfinity;
  for (int n = 0; n < args.n_full; ++n) {
    if (args.table[n] >= 0 && tops[n] > most) most = tops[n];
  }
  float mass = 0.0f;
  for (int n = 0; n < args.n_full; ++n) {
    if (args.table[n] < 0) continue;
    mass += sums[n] * static_cast<float>(__builtin_exp2(static_cast<double>(tops[n] - most)));
  }
  return mass > 0.0f ? (most + static_cast<float>(__builtin_log2(mass))) * kLn2Float : -kInfinity;
}

inline void sum_pages(const RotatedDigests& digests, const ScoreArgs& args,
                      const RotatedQueries& queries, const PageMasses& to, ptrdiff_t stride) {
  const int heads = digests.kv_heads;
  for (int n = 0; n < args.n_full; ++n) {
    const int64_t page = args.table[n];
    if (page < 0) {
      for (int row = 0; row < heads * args.group; ++row) {
        to.tops[row * stride + n] = 0.0f;
        to.sums[row * stride + n] = 1.0f;
        to.worth[row * stride + n] = 0.0f;
      }
      continue;
    }
    const int64_t coming = n + 1 < args.n_full && args.table[n + 1] >= 0 ? args.table[n + 1] : page;
    for (int h = 0; h < heads; ++h) {
      const ptrdiff_t row = static_cast<ptrdiff_t>(h) * args.group;
      sum_head(digests, queries, page * heads + h, coming * heads + h, row, args.group, to,
               row * stride + n, stride);
    }
  }
}

// Scratch, from the first cache line boundary: tables of RotatedQueries, three numbers per query
// head and page, one per page, then the rest of RotatedQueries.
inline void score_rotated_all(const RotatedDigests& digests, const ScoreArgs& args) {
  const int dim = digests.head_dim;
  const ptrdiff_t rows = static_cast<ptrdiff_t>(digests.kv_heads) * args.group;
  const ptrdiff_t padded = padded_columns(args.n_full);
  const uintptr_t address = reinterpret_cast<uintptr_t>(args.scratch);
  RotatedQueries queries;
  queries.tables = args.scratch + (64 - address % 64) % 64 / sizeof(float);
  float* const tops = queries.tables + rows * CodeSums::table_floats(dim);
  const PageMasses masses{tops, tops + rows * padded, tops + 2 * rows * padded};
  float* const result = masses.worth + rows * padded;
  queries.word_units = result + padded;
  queries.words = reinterpret_cast<int16_t*>(queries.word_units + rows);
  queries.codes = reinterpret_cast<CodeSums::Query*>(queries.words + rows * dim);
  prepare_queries(digests, args, queries);
  sum_pages(digests, args, queries, masses, padded);
  if (args.log_masses) {
    for (ptrdiff_t row = 0; row < rows; ++row) {
      args.out[row] = log_mass(args, tops + row * padded, masses.sums + row * padded);
    }
    return;
  }
  for (ptrdiff_t row = 0; row < rows; ++row) {
    take_logarithms(tops + row * padded, masses.sums + row * padded, args.n_full);
  }
  reduce_heads(args, static_cast<int>(rows), 1.0f, tops, static_cast<int>(padded), masses.worth,
               result);
}

}  // namespace
}  // namespace scout
