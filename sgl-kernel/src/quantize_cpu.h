// Quantising pages to int8, and its instruction-set variants.
#pragma once

#include <cstdint>

#include "scout/attend.h"

namespace scout {

// One scale per plane (K or V of a page) and KV head, symmetric (round half to even, all in fp32):
//   a = max |x| over the plane's tokens and columns of the head
//   scale = a / 127, code = round(x * (127 / a)), so |x - code * scale| <= (0.5 + 1e-4) * scale
// a < 2^-100 counts as zero: scale 0, codes 0. A value that is not finite makes the scale NaN, so
// that it is not hidden.
//
// Codes lie in the order of kI8 pages (scout/attend.h); where a page has no token they are zero.
enum class CodeOrder { kKeys, kValues };

struct QuantizePlane {
  const void* src;  // [S, H, D] of the dtype
  // Of each head coded_tokens(S) * D codes in `order`, then as many of the other plane.
  int8_t* codes;
  float* scales;  // [H]
  // If not null, takes the codes as well, with stores past the caches if there are such, for later:
  // memory does not have to be read for them. At a multiple of 64 bytes.
  int8_t* stream;
  CodeOrder order;
};

// K and V of a page, to codes and scales of a kI8 page.
inline void add_planes_of_page(const void* k, const void* v, const KvPages& kv, int8_t* codes,
                               float* scales, int8_t* stream, QuantizePlane* to) {
  const int64_t plane = coded_tokens(kv.page_size) * kv.head_dim;
  to[0] = {k, codes, scales, stream, CodeOrder::kKeys};
  to[1] = {v, codes + plane, scales + kv.kv_heads, stream != nullptr ? stream + plane : nullptr,
           CodeOrder::kValues};
}

struct QuantizeArgs {
  DType dtype;  // not kI8
  int32_t page_size;
  int32_t kv_heads;
  int32_t head_dim;  // multiple of 16
  const QuantizePlane* planes;
  int64_t n;
  const void* ahead;  // null, or S * H * D bytes to prefetch while the last plane is encoded
};

// Other threads that acquire what the caller releases afterwards see all that was written.
void quantize_planes(const QuantizeArgs& args);

// head_dim must be a multiple of 16; of 32 for quantize_avx512.
void quantize_portable(const QuantizeArgs& args);
#ifdef SCOUT_X86
void quantize_avx2(const QuantizeArgs& args);
void quantize_avx512(const QuantizeArgs& args);
#endif

}  // namespace scout
