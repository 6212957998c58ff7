#include "attend_cpu.h"

#include "isa.h"

namespace scout {

void attend_sequence(const KvPages& kv, const AttendParams& params, const float* q,
                     const int32_t* pages, int32_t n, int32_t last_page, int32_t last_len,
                     float* out, float* lse) {
  const AttendArgs args{&kv, &params, q, pages, n, last_page, last_len, out, lse};
#ifdef SCOUT_AVX512
  const Isa isa = current_isa();
  // A row of AVX-512 pairs is 32 elements; the odd multiples of 16 take the narrower kernel.
  if (isa >= Isa::kAvx512 && kv.head_dim % 32 == 0) {
    // Its steps are lines: of fp8 64 elements.
    const bool lines =
        kv.dtype == DType::kBF16 || (bytes_of(kv.dtype) == 1 && kv.head_dim % 64 == 0);
    if (isa == Isa::kAvx512Bf16 && lines) return attend_avx512bf16(args);
    return attend_avx512(args);
  }
#endif
  attend_avx2(args);
}

}  // namespace scout
