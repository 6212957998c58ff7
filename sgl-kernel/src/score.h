// Page digests: building rotated digests, scoring one sequence by either kind, and their
// instruction-set variants.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend.h"

namespace scout {

// kmin, kmax: [P, H, D] of dtype, contiguous; D a multiple of 16.
struct Digests {
  const void* kmin;
  const void* kmax;
  DType dtype;
  int32_t kv_heads;
  int32_t head_dim;
};

// Rotated digests of pages of 32 tokens, with the layout of ops/rotated.py: planes [P, H, 2, 16,
// D / 4], stats [P, H, D + kStatsBytes]; D a multiple of 16 up to kRotatedMaxDim.
struct RotatedDigests {
  const uint8_t* planes;
  const uint8_t* stats;
  int32_t kv_heads;
  int32_t head_dim;
};

constexpr int kRotatedTokens = 32;
constexpr int kStatsBytes = 112;      // per page and KV head, after the D bytes of its mean
constexpr int kRotatedMaxDim = 1024;  // larger dims would overflow 16-bit sums

struct ScoreArgs {
  int32_t group;
  float scale;
  bool log_masses;                 // rotated only: of each query head, instead of scores of pages
  const float* q = nullptr;        // [H*G, D] fp32
  const int32_t* table = nullptr;  // [columns] page ids, < 0: no page
  int32_t n_full = 0;              // pages beyond it are not scored
  int32_t columns = 0;
  float* scratch = nullptr;  // score_scratch_floats(...) or rotated_scratch_floats(...) floats
  float* out = nullptr;      // [columns], or for log_masses [HQ]
};

// Columns of a scratch row, rounded up to whole vectors of any instruction set.
constexpr int padded_columns(int columns) { return (columns + 15) / 16 * 16; }

// Score of a page for every query head:
//   min and max: u[h, page] = scale * sum_d max(q[h, d] kmin[page, d], q[h, d] kmax[page, d]), an
//   upper bound (Quest, arXiv:2406.10774);
//   rotated: u[h, page] = log sum_t exp(scale R q[h] . x[page, t]), x as stored in the digest;
// reduced over query heads: sum_h softmax_page(u), for rotated digests times the mean value norm
// under the page's softmax; or for log_masses over pages: logsumexp_page(u) of each head, -inf
// without pages.
// Columns >= n_full and those without a page are -inf.
void score_sequence(const Digests& digests, const ScoreArgs& args);
void score_rotated_sequence(const RotatedDigests& digests, const ScoreArgs& args);

size_t score_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns);
size_t rotated_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns);

// Rotated digests of pages ids[i] of K and V [P, 32, H, D], to rows ids[i].
struct RotateArgs {
  const void* k;
  const void* v;
  DType dtype;
  const int64_t* ids;
  int64_t n;
  uint8_t* planes;
  uint8_t* stats;
  int32_t kv_heads;
  int32_t head_dim;
};
void rotate_pages(const RotateArgs& args);

// Min/max digests: for each page ids[i] of k [P, S, H, D], head and column the minimum and maximum
// over the page's tokens, to row ids[i] of kmin and kmax [P, H, D] of type `to`: that of k, or for
// fp8 another, in which `values` [256] are those of its bytes. A NaN becomes the minimum, the
// maximum or both; -0 orders below +0, except in fp32.
void digest_pages(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim, DType dtype,
                  const int64_t* ids, int64_t n, DType to, const void* values, void* kmin,
                  void* kmax);

void score_avx2(const Digests& digests, const ScoreArgs& args);
void score_avx512(const Digests& digests, const ScoreArgs& args);
void score_rotated_avx2(const RotatedDigests& digests, const ScoreArgs& args);
void score_rotated_avx512(const RotatedDigests& digests, const ScoreArgs& args);
void rotate_pages_avx2(const RotateArgs& args);
void rotate_pages_avx512(const RotateArgs& args);

}  // namespace scout
