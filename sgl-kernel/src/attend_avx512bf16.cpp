// Pages of bf16 and fp8 under queries of bf16, as a model of that type makes them: scores by its
// dot product, whose products are exact and whose sums are fp32. Other queries it would round.
#define SCOUT_STORAGE SCOUT_BF16
#include "vec_avx512.h"

#include "attend_kernel.h"

namespace scout {
namespace {

bool all_bf16(const float* q, int count) {  // a multiple of 32
  __m512i bits = _mm512_setzero_si512();
  for (int i = 0; i < count; i += Vec::kLanes) {
    bits = _mm512_or_si512(bits, _mm512_loadu_si512(q + i));
  }
  return _mm512_test_epi32_mask(bits, _mm512_set1_epi32(0xffff)) == 0;
}

}  // namespace

void attend_avx512bf16(const AttendArgs& args) {
  const KvPages& kv = *args.kv;
  if (!all_bf16(args.q, kv.kv_heads * args.params->group * kv.head_dim)) return attend_avx512(args);
  attend_all(args);
}

}  // namespace scout
