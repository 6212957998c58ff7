// Min/max digests of pages. Plain code: it is memory-bound.
#pragma once

#include <cstdint>

#include "scout/attend.h"

namespace scout {

// For each page ids[i] of k [P, S, H, D], head and column the minimum and maximum over the page's
// tokens, to row ids[i] of kmin and kmax [P, H, D] of type `to`: that of k, or for fp8 another, in
// which `values` [256] are those of its bytes. A NaN becomes the minimum, the maximum or both; -0
// orders below +0, except in fp32.
void digest_pages(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim, DType dtype,
                  const int64_t* ids, int64_t n, DType to, const void* values, void* kmin,
                  void* kmax);

}  // namespace scout
