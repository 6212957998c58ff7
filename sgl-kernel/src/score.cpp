#include "score.h"

#include "isa.h"

namespace scout {

void score_sequence(const Digests& digests, const ScoreArgs& args) {
#ifdef SCOUT_AVX512
  if (current_isa() >= Isa::kAvx512 && digests.head_dim % 32 == 0)
    return score_avx512(digests, args);
#endif
  score_avx2(digests, args);
}

void score_rotated_sequence(const RotatedDigests& digests, const ScoreArgs& args) {
#ifdef SCOUT_AVX512
  if (current_isa() >= Isa::kAvx512) return score_rotated_avx512(digests, args);
#endif
  score_rotated_avx2(digests, args);
}

void rotate_pages(const RotateArgs& args) {
#ifdef SCOUT_AVX512
  if (current_isa() >= Isa::kAvx512 && args.head_dim % 32 == 0) return rotate_pages_avx512(args);
#endif
  rotate_pages_avx2(args);
}

size_t score_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns) {
  return 2 * static_cast<size_t>(query_heads) * head_dim +
         padded_columns(columns) * (query_heads + size_t{1});
}

size_t rotated_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns) {
  // Per head: 16 sums for every 4 channels (wide kernels take at least 32 channels), D 16-bit words
  // and three more numbers; per page: three numbers.
  const size_t rounded_dim = (static_cast<size_t>(head_dim) + 31) / 32 * 32;
  const size_t row = padded_columns(columns);
  const size_t line = 16;  // for aligning the scratch to a cache line
  return (4 * rounded_dim + head_dim / 2 + 3 + 3 * row) * query_heads + row + line;
}

}  // namespace scout
