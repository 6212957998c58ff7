// Quantising pages to int8, written once for every Vec. Include a vec_*.h first; see
// attend_kernel.h for why nothing of the standard library is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "quantize_cpu.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr float kNoMagnitude = 0x1p-100f;

// One page and head: `tokens` rows of dim elements, row_elements apart in both. Returns the scale.
// Heads follow each other, and hardware prefetchers see no order in rows that far apart.
template <DType T>
inline float quantize_head(const char* from, int8_t* to, int tokens, int dim,
                           ptrdiff_t row_elements) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  constexpr int kElement = T == DType::kF32 ? 4 : 2;
  F largest0 = Vec::zero(), largest1 = Vec::zero();
  F wrong = Vec::zero();  // 0 * x summed up: NaN if any x is not finite
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * kElement;
  for (int t = 0; t < tokens; ++t) {
    const char* const row = from + t * row_elements * kElement;
    // The next head's elements, and where this one's codes go.
    for (ptrdiff_t i = 0; i < head_bytes; i += 64) __builtin_prefetch(row + head_bytes + i);
    for (ptrdiff_t i = 0; i < dim; i += 64) __builtin_prefetch(to + t * row_elements + i, 1);
    for (int d = 0; d < dim; d += 2 * W) {
      F x, y;
      Vec::load_pair<T>(row + static_cast<ptrdiff_t>(d) * kElement, x, y);
      wrong = Vec::fma(x, Vec::zero(), Vec::fma(y, Vec::zero(), wrong));
      largest0 = Vec::max(largest0, Vec::abs(x));
      largest1 = Vec::max(largest1, Vec::abs(y));
    }
  }
  const float magnitude = Vec::hmax(Vec::max(largest0, largest1));
  const float poison = Vec::hsum(wrong);
  const bool finite = poison == poison;
  const bool empty = !finite || magnitude < kNoMagnitude;
  const F factor = Vec::set1(empty ? 0.0f : kLargestCode / magnitude);
  for (int t = 0; t < tokens; ++t) {
    const char* const row = from + t * row_elements * kElement;
    for (int d = 0; d < dim; d += 2 * W) {
      F x = Vec::zero(), y = Vec::zero();
      if (finite) Vec::load_pair<T>(row + static_cast<ptrdiff_t>(d) * kElement, x, y);
      Vec::template store_codes<T>(Vec::round(Vec::mul(x, factor)), Vec::round(Vec::mul(y, factor)),
                                   to + t * row_elements + d);
    }
  }
  if (!finite) return __builtin_nanf("");
  return empty ? 0.0f : magnitude / kLargestCode;
}

template <DType T>
void quantize_rows(const QuantizeArgs& args) {
  constexpr int kElement = T == DType::kF32 ? 4 : 2;
  const ptrdiff_t row = static_cast<ptrdiff_t>(args.kv_heads) * args.head_dim;
  const ptrdiff_t page = row * args.page_size;
  for (int64_t i = 0; i < args.n; ++i) {
    const char* const from = static_cast<const char*>(args.src) + args.src_ids[i] * page * kElement;
    int8_t* const to = args.codes + args.dst_ids[i] * page;
    float* const scales = args.scales + args.dst_ids[i] * args.kv_heads;
    for (int h = 0; h < args.kv_heads; ++h) {
      const ptrdiff_t at = static_cast<ptrdiff_t>(h) * args.head_dim;
      scales[h] =
          quantize_head<T>(from + at * kElement, to + at, args.page_size, args.head_dim, row);
    }
  }
}

inline void quantize_all(const QuantizeArgs& args) {
  if (args.dtype == DType::kBF16) return quantize_rows<DType::kBF16>(args);
  if (args.dtype == DType::kF16) return quantize_rows<DType::kF16>(args);
  quantize_rows<DType::kF32>(args);
}

}  // namespace
}  // namespace scout
