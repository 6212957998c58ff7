// The instruction-set variants behind attend_sequence.
#pragma once

#include "scout/attend.h"

namespace scout {

// The arguments of attend_sequence and attend_records.
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
  Int8Records* records = nullptr;  // n of them, of attend_records: in place of pages and planes
};

// head_dim must be a multiple of 16; of 32 for attend_avx512 and attend_avx512bf16. The latter
// takes bf16 pages only, attend_int8_* int8 pages only, the others all but these.
void attend_portable(const AttendArgs& args);
void attend_int8_portable(const AttendArgs& args);
#ifdef SCOUT_X86
void attend_avx2(const AttendArgs& args);
void attend_avx512(const AttendArgs& args);
void attend_avx512bf16(const AttendArgs& args);
void attend_int8_avx2(const AttendArgs& args);
void attend_int8_avx512vnni(const AttendArgs& args);
#endif

}  // namespace scout
