#include "score_cpu.h"

#include "isa.h"

namespace scout {

void score_sequence(const ScoreArgs& args) {
#ifdef SCOUT_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512 && args.digests->head_dim % 32 == 0) return score_avx512(args);
  if (isa != Isa::kPortable) return score_avx2(args);
#endif
  score_portable(args);
}

void score_signs_sequence(const SignArgs& args) {
#ifdef SCOUT_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512) return score_signs_avx512(args);
  if (isa != Isa::kPortable) return score_signs_avx2(args);
#endif
  score_signs_portable(args);
}

size_t sign_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns) {
  return static_cast<size_t>(query_heads) * (static_cast<size_t>(head_dim) + 1 + columns);
}

size_t score_scratch_floats(int32_t query_heads, int32_t head_dim, int32_t columns) {
  constexpr size_t kWidest = 16;
  const size_t padded = (static_cast<size_t>(columns) + kWidest - 1) / kWidest * kWidest;
  return 2 * static_cast<size_t>(query_heads) * head_dim + padded * (query_heads + size_t{1});
}

}  // namespace scout
