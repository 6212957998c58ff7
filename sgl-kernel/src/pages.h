// Moving pages and summarising them. Plain code: both are bound by memory.
#pragma once

#include <cstdint>

#include "scout/attend.h"

namespace scout {

// dst[dst_ids[i]] = src[src_ids[i]] for i in [0, n); pages of page_bytes, not overlapping.
void copy_pages(const void* src, void* dst, int64_t page_bytes, const int64_t* src_ids,
                const int64_t* dst_ids, int64_t n);

// Per page ids[i], head and column the smallest and largest K over the page's tokens, exact,
// written to row ids[i] of kmin and kmax [P, H, D] (same dtype as k [P, S, H, D]). A NaN is the
// smallest or the largest or both; of 16-bit zeros, -0 counts as smaller than +0.
void digest_pages(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim, DType dtype,
                  const int64_t* ids, int64_t n, void* kmin, void* kmax);

// Digests rounded outward to int8, 32 channels to a step (ops/digest_int8.py). low, high [P, H, D]
// codes; low_step, high_step [P, H, D / 32] bf16.
struct CodedDigests {
  int8_t* low;
  uint16_t* low_step;
  int8_t* high;
  uint16_t* high_step;
};

// digest_pages, rounded: low * low_step <= kmin and high * high_step >= kmax, by less than a step.
// Where one of 32 channels is not finite the codes are zeros, the steps NaN. D a multiple of 32.
void digest_pages_int8(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim,
                       DType dtype, const int64_t* ids, int64_t n, const CodedDigests& to);

// The signs of K of pages ids[i] of 32 tokens: row ids[i] of low and high [P, H, D], of k's element
// size, gets one word per column; bit t is set where token t (low) or 16 + t (high) is not
// negative.
void sign_pages(const void* k, int32_t kv_heads, int32_t head_dim, DType dtype, const int64_t* ids,
                int64_t n, void* low, void* high);

}  // namespace scout
