// Quantising planes (K or V of a page) to int8, written once for every Vec. Include a vec_*.h
// first; see attend_tile.h for why nothing of the standard library is used.
//
// A plane is scanned for its scales and then encoded, both in the order of memory. While one is
// encoded, which reads it from the second cache, the next one is scanned, element by element in
// turn: what binds is how fast memory comes, and hints and loads from it have to come evenly (see
// attend_kernel.h). Codes of sixteen tokens go to a buffer, in rows, and from there to their order.
#pragma once

#include <cstddef>
#include <cstdint>

#include "code_order.h"
#include "quantize_cpu.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr float kLargestCode = 127.0f;
constexpr float kNoMagnitude = 0x1p-100f;
constexpr int kHeadsAtOnce = 64;
constexpr int kRowCodes = 4096;      // of the heads that are walked at once
constexpr int kHintBytes = 6 << 10;  // between a hint and its use

// What one row (token) takes part in; only what the template arguments of advance say is looked at.
struct Rows {
  const char* encoded;
  const float* factors;  // by head
  int8_t* codes;
  const char* scanned;
  Vec::Bits* largest;  // by head
  const char* ahead;   // prefetched: as many bytes as are scanned, or else as there are codes
};

// Some heads, which follow each other in a row.
template <DType T>
struct Heads {
  static constexpr int kElement = T == DType::kF32 ? 4 : 2;
  static constexpr uint32_t kInfinite = T == DType::kF32    ? 0x7f800000
                                        : T == DType::kBF16 ? 0x7f80
                                                            : 0x7c00;

  int count;
  int dim;

  // Encodes a row, and raises `largest` by the magnitudes of another one: without their signs, the
  // bits of floats are in the order of their values, infinities and NaNs above all others.
  template <bool kEncode, bool kScan>
  void advance(Rows rows) const {
    constexpr int kColumns = 2 * Vec::kLanes;
    constexpr int kBytes = kColumns * kElement;
    for (int h = 0; h < count; ++h) {
      const bool finite = kEncode && rows.factors[h] == rows.factors[h];
      const Vec::F factor = kEncode ? Vec::set1(rows.factors[h]) : Vec::zero();
      Vec::Bits largest = rows.largest[h];
      for (int d = 0; d < dim; d += kColumns) {
        if (kEncode) {
          Vec::F x = Vec::zero(), y = Vec::zero();
          if (finite) {
            Vec::load_pair<T>(rows.encoded, x, y);
            x = Vec::mul(x, factor);
            y = Vec::mul(y, factor);
          }
          Vec::store(rows.codes, Vec::to_codes<T>(x, y));
          rows.encoded += kBytes;
          rows.codes += kColumns;
        }
        if (kScan) {
          for (int i = 0; i < kBytes; i += Vec::kBytes)
            largest = Vec::max_magnitude<T>(largest, rows.scanned + i);
          rows.scanned += kBytes;
        }
        constexpr int kAhead = kScan ? kBytes : kColumns;
        for (int i = 0; i < kAhead; i += 64) prefetch(rows.ahead + i);
        rows.ahead += kAhead;
      }
      rows.largest[h] = largest;
    }
  }

  // Scales, and the factors that make codes; both NaN where a value is not finite.
  void measure(const Vec::Bits* largest, float* scales, float* factors) const {
    for (int h = 0; h < count; ++h) {
      const uint32_t bits = Vec::highest_magnitude<T>(largest[h]);
      const uint32_t shifted = bits << (T == DType::kF32 ? 0 : T == DType::kBF16 ? 16 : 13);
      float magnitude;
      __builtin_memcpy(&magnitude, &shifted, sizeof magnitude);
      if (T == DType::kF16) magnitude *= 0x1p112f;  // an exact product, also of denormals
      const bool empty = magnitude < kNoMagnitude;
      scales[h] = empty ? 0.0f : magnitude / kLargestCode;
      factors[h] = empty ? 0.0f : kLargestCode / magnitude;
      if (bits >= kInfinite) scales[h] = factors[h] = __builtin_nanf("");
    }
  }
};

// 64 bytes past the caches, from codes that are there to a multiple of 64.
inline void stream_line(const int8_t* from, int8_t* to) {
  for (int i = 0; i < 64; i += Vec::kBytes) Vec::stream(to + i, from + i);
}

// A block of tokens of some heads in rows, on its way to its place in a plane: a few heads at a
// time, while the next block is encoded, as nothing is asked of memory meanwhile.
struct FullBlock {
  const int8_t* rows = nullptr;  // of count * dim codes
  int8_t* codes = nullptr;       // of the first head
  int8_t* stream = nullptr;
  CodeOrder order = CodeOrder::kKeys;
  int next_head = 0;

  void order_until(int head, int count, int dim, ptrdiff_t head_codes) {
    if (rows == nullptr) return;
    for (int& h = next_head; h < head; ++h) {
      int8_t* const to = codes + h * head_codes;
      if (order == CodeOrder::kKeys)
        order_keys(rows + h * dim, count * dim, dim, to);
      else
        order_values(rows + h * dim, count * dim, dim, to);
      if (stream == nullptr) continue;
      for (int i = 0; i < kCodedBlock * dim; i += 64)
        stream_line(to + i, stream + h * head_codes + i);
    }
  }
};

template <DType T>
void quantize_heads(const QuantizeArgs& args, int first, int count) {
  const Heads<T> heads{count, args.head_dim};
  const int tokens = args.page_size;
  const int codes_of_row = count * args.head_dim;
  const ptrdiff_t row = static_cast<ptrdiff_t>(args.kv_heads) * args.head_dim;
  const ptrdiff_t row_bytes = row * Heads<T>::kElement;
  const ptrdiff_t begin = static_cast<ptrdiff_t>(first) * args.head_dim;
  const ptrdiff_t head_codes = 2 * coded_tokens(tokens) * args.head_dim;  // of both planes
  const int lead = static_cast<int>((kHintBytes + row_bytes - 1) / row_bytes);
  auto row_at = [&](int64_t plane, int t) {
    return static_cast<const char*>(args.planes[plane].src) + begin * Heads<T>::kElement +
           t * row_bytes;
  };
  // What is asked for while a row is scanned; after the last plane, rows that are cached.
  auto ahead_of = [&](int64_t plane, int t) {
    if (t + lead < tokens) return row_at(plane, t + lead);
    return plane + 1 < args.n ? row_at(plane + 1, (t + lead - tokens) % tokens) : row_at(plane, t);
  };
  alignas(64) int8_t buffers[2][kCodedBlock * kRowCodes];
  int8_t* block = buffers[0];
  FullBlock full;
  Vec::Bits largest[kHeadsAtOnce];
  float factors[kHeadsAtOnce];
  auto clear = [&] {
    for (int h = 0; h < count; ++h) largest[h] = Vec::Bits{};
  };
  clear();
  for (int t = 0; t < tokens; ++t) {
    heads.template advance<false, true>(
        {nullptr, nullptr, nullptr, row_at(0, t), largest, ahead_of(0, t)});
  }
  for (int64_t i = 0; i < args.n; ++i) {
    const QuantizePlane& plane = args.planes[i];
    heads.measure(largest, plane.scales + first, factors);
    clear();
    const bool scans = i + 1 < args.n;
    const char* const ahead =
        static_cast<const char*>(args.ahead != nullptr ? args.ahead : plane.codes);
    for (int t = 0; t < tokens; ++t) {
      const int in_block = t % kCodedBlock;
      const Rows rows{row_at(i, t),
                      factors,
                      block + in_block * codes_of_row,
                      scans ? row_at(i + 1, t) : nullptr,
                      largest,
                      scans ? ahead_of(i + 1, t) : ahead + begin + t * row};
      scans ? heads.template advance<true, true>(rows) : heads.template advance<true, false>(rows);
      full.order_until(count * (in_block + 1) / kCodedBlock, count, args.head_dim, head_codes);
      if (in_block + 1 < kCodedBlock && t + 1 < tokens) continue;
      full.order_until(count, count, args.head_dim, head_codes);
      for (int c = (in_block + 1) * codes_of_row; c < kCodedBlock * codes_of_row; ++c) block[c] = 0;
      const ptrdiff_t at = first * head_codes + ptrdiff_t{t - in_block} * args.head_dim;
      full = {block, plane.codes + at, plane.stream != nullptr ? plane.stream + at : nullptr,
              plane.order, 0};
      block = block == buffers[0] ? buffers[1] : buffers[0];
    }
  }
  full.order_until(count, count, args.head_dim, head_codes);
  Vec::finish_streams();
}

template <DType T>
void quantize_all_heads(const QuantizeArgs& args) {
  const int fit = kRowCodes / args.head_dim;
  const int step = fit < 1 ? 1 : fit < kHeadsAtOnce ? fit : kHeadsAtOnce;
  for (int h = 0; h < args.kv_heads; h += step) {
    const int left = args.kv_heads - h;
    quantize_heads<T>(args, h, left < step ? left : step);
  }
}

inline void quantize_all(const QuantizeArgs& args) {
  if (args.n == 0) return;
  if (args.dtype == DType::kBF16) return quantize_all_heads<DType::kBF16>(args);
  if (args.dtype == DType::kF16) return quantize_all_heads<DType::kF16>(args);
  quantize_all_heads<DType::kF32>(args);
}

}  // namespace
}  // namespace scout
