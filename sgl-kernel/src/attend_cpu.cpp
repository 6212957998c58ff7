#include "attend_cpu.h"

#include "isa.h"

namespace scout {

namespace {

void attend_floats(const AttendArgs& args) {
#ifdef SCOUT_X86
  const Isa isa = current_isa();
  // A row of AVX-512 pairs is 32 elements; the odd multiples of 16 take the narrower kernel.
  if (isa >= Isa::kAvx512 && args.kv->head_dim % 32 == 0) {
    if (isa == Isa::kAvx512Bf16 && args.kv->dtype == DType::kBF16) return attend_avx512bf16(args);
    return attend_avx512(args);
  }
  if (isa != Isa::kPortable) return attend_avx2(args);
#endif
  attend_portable(args);
}

void attend_codes(const AttendArgs& args) {
#ifdef SCOUT_X86
  const Isa isa = current_isa();
  if (isa >= Isa::kAvx512 && has_vnni()) return attend_int8_avx512vnni(args);
  if (isa != Isa::kPortable) return attend_int8_avx2(args);
#endif
  attend_int8_portable(args);
}

void attend(const AttendArgs& args) {
  args.kv->dtype == DType::kI8 ? attend_codes(args) : attend_floats(args);
}

}  // namespace

void attend_sequence(const KvPages& kv, const AttendParams& params, const float* q,
                     const int32_t* pages, int32_t n, int32_t last_page, int32_t last_len,
                     float* out, float* lse) {
  attend({&kv, &params, q, pages, n, last_page, last_len, out, lse});
}

void attend_records(const KvPages& kv, const AttendParams& params, const float* q,
                    Int8Records& records, int32_t n, float* out, float* lse) {
  KvPages sizes = kv;
  sizes.dtype = DType::kI8;
  attend({&sizes, &params, q, nullptr, n, -1, 0, out, lse, &records});
}

bool valid_pages(const KvPages& kv, const int32_t* pages, int32_t n) {
  for (int32_t i = 0; i < n; ++i) {
    if (pages[i] >= kv.num_pages) return false;
  }
  return true;
}

}  // namespace scout
