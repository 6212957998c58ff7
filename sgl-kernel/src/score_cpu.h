// Digest scores of one sequence, and their instruction-set variants.
#pragma once

#include <cstddef>
#include <cstdint>

#include "scout/attend.h"

namespace scout {

enum class Reduce : int32_t { kMass = 0, kMax = 1 };

// kmin, kmax: [P, H, D] of dtype, contiguous; D a multiple of 16.
struct Digests {
  const void* kmin;
  const void* kmax;
  DType dtype;
  int32_t kv_heads;
  int32_t head_dim;
};

struct ScoreArgs {
  const Digests* digests;
  int32_t group;
  float scale;
  Reduce reduce;
  const float* q;        // [H*G, D] fp32
  const int32_t* table;  // [columns] page ids, < 0: no page
  int32_t n_full;        // pages beyond it are not scored
  int32_t columns;
  float* scratch;  // score_scratch_floats(...) floats
  float* out;      // [columns]
};

// Upper bound of a page's scores (Quest, arXiv:2406.10774):
//   u[h, page] = scale * sum_d max(q[h, d] kmin[page, d], q[h, d] kmax[page, d])
// reduced over the query heads: kMass: sum_h softmax_page(u); kMax: max_h (u - logsumexp_page(u)).
// Columns >= n_full and those without a page are -inf.
void score_sequence(const ScoreArgs& args);

size_t score_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns);

// Pages of 32 tokens. low, high: [P, H, D] words of element_bytes, of which the first two bytes
// count: bit t is the sign of token t (low) or 16 + t (high), set where the key is not negative.
struct SignArgs {
  const void* low;
  const void* high;
  int32_t element_bytes;
  int32_t kv_heads;
  int32_t head_dim;
  int32_t group;
  const float* q;        // [H*G, D] fp32
  const int32_t* table;  // [columns] page ids, < 0: no page
  int32_t n_full;        // pages beyond it are not scored
  int32_t columns;
  float* scratch;  // sign_scratch_floats(...) floats
  float* out;      // [columns]
};

// u[h, page] = max_t sum_d q[h, d] sign(k[page, t, d]); then, over the pages of the sequence,
// max_h (u - mean_page(u)) / std_page(u). Columns >= n_full and those without a page are -inf.
void score_signs_sequence(const SignArgs& args);

size_t sign_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns);

void score_portable(const ScoreArgs& args);
void score_signs_portable(const SignArgs& args);
#ifdef SCOUT_X86
void score_avx2(const ScoreArgs& args);
void score_avx512(const ScoreArgs& args);
void score_signs_avx2(const SignArgs& args);
void score_signs_avx512(const SignArgs& args);
#endif

}  // namespace scout
