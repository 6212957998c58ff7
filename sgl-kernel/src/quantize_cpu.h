// Quantising pages to int8, and its instruction-set variants.
#pragma once

#include <cstdint>

#include "scout/attend.h"

namespace scout {

// One scale per page and KV head, symmetric (round half to even, all in fp32):
//   a = max |x| over the page's tokens and columns of the head
//   scale = a / 127, code = round(x * (127 / a)), so |x - code * scale| <= (0.5 + 1e-4) * scale
// a < 2^-100 counts as zero: scale 0, codes 0. A value that is not finite makes the scale NaN, so
// that it is not hidden.
struct QuantizeArgs {
  const void* src;  // [*, S, H, D] of dtype, not kI8
  DType dtype;
  int32_t page_size;
  int32_t kv_heads;
  int32_t head_dim;        // multiple of 16
  const int64_t* src_ids;  // [n] pages of src
  const int64_t* dst_ids;  // [n] pages of codes and scales
  int64_t n;
  int8_t* codes;  // [*, S, H, D]
  float* scales;  // [*, H]
};

void quantize_pages(const QuantizeArgs& args);

// head_dim must be a multiple of 16; of 32 for quantize_avx512.
void quantize_portable(const QuantizeArgs& args);
#ifdef SCOUT_X86
void quantize_avx2(const QuantizeArgs& args);
void quantize_avx512(const QuantizeArgs& args);
#endif

}  // namespace scout
