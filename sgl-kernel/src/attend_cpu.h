// The instruction-set variants behind attend_sequence.
#pragma once

#include "scout/attend.h"

namespace scout {

// The arguments of attend_sequence.
struct AttendArgs {
  const KvPages* kv;
  const AttendParams* params;
  const float* q;
  const int32_t* pages;
  int32_t n;
  int32_t last_page;
  int32_t last_len;
  float* out;
  float* lse;
};

// head_dim must be a multiple of 16, for attend_avx512 of 32. attend_avx512bf16 takes bf16 pages,
// of which it must be one of 32, and fp8 pages, of 64.
void attend_avx2(const AttendArgs& args);
void attend_avx512(const AttendArgs& args);
void attend_avx512bf16(const AttendArgs& args);

}  // namespace scout
