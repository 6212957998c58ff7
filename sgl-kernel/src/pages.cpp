#include "pages.h"

#include <cmath>
#include <cstddef>
#include <cstring>
#include <vector>

#include "score_cpu.h"

namespace scout {
namespace {

// bf16 and fp16 order like sign-magnitude integers; flipping the magnitude of negative ones makes
// that the order of int16. The mapping is its own inverse.
inline int16_t ordered(int16_t bits) {
  return static_cast<int16_t>(bits ^ ((bits >> 15) & 0x7fff));
}

constexpr int kBlock = 64;  // columns whose extremes stay in registers or L1 over all tokens

void digest_16bit(const int16_t* page, int32_t tokens, ptrdiff_t columns, int16_t* low,
                  int16_t* high) {
  for (ptrdiff_t begin = 0; begin < columns; begin += kBlock) {
    const int count = static_cast<int>(columns - begin < kBlock ? columns - begin : kBlock);
    int16_t smallest[kBlock];
    int16_t largest[kBlock];
    for (int c = 0; c < count; ++c) smallest[c] = largest[c] = ordered(page[begin + c]);
    for (int32_t t = 1; t < tokens; ++t) {
      const int16_t* row = page + t * columns + begin;
      for (int c = 0; c < count; ++c) {
        const int16_t x = ordered(row[c]);
        smallest[c] = x < smallest[c] ? x : smallest[c];
        largest[c] = x > largest[c] ? x : largest[c];
      }
    }
    for (int c = 0; c < count; ++c) {
      low[begin + c] = ordered(smallest[c]);
      high[begin + c] = ordered(largest[c]);
    }
  }
}

void digest_f32(const float* page, int32_t tokens, ptrdiff_t columns, float* low, float* high) {
  std::memcpy(low, page, sizeof(float) * columns);
  std::memcpy(high, page, sizeof(float) * columns);
  for (int32_t t = 1; t < tokens; ++t) {
    const float* row = page + t * columns;
    for (ptrdiff_t c = 0; c < columns; ++c) {
      const bool is_nan = row[c] != row[c];  // and stays, as comparisons with it are false
      low[c] = row[c] < low[c] || is_nan ? row[c] : low[c];
      high[c] = row[c] > high[c] || is_nan ? row[c] : high[c];
    }
  }
}

float widened(const void* values, ptrdiff_t i, DType dtype) {
  if (dtype == DType::kF32) return static_cast<const float*>(values)[i];
  const uint32_t bits = static_cast<const uint16_t*>(values)[i];
  uint32_t wide = bits << 16;
  if (dtype == DType::kF16) {
    wide = (bits & 0x8000) << 16 | (bits & 0x7fff) << 13;
    if ((bits & 0x7c00) == 0x7c00) wide |= 0x7f800000;
  }
  float x;
  std::memcpy(&x, &wide, sizeof x);
  return dtype == DType::kF16 ? x * 0x1p112f : x;
}

// The nearest bf16 that is not below x, of a positive x.
uint16_t rounded_up(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0xffff) >> 16);
}

constexpr uint16_t kNoStep = 0x7fff;  // a NaN, and not the one that marks an unset digest
// As in ops/digest_int8.py, whose results these are bit by bit.
constexpr float kSteps = static_cast<float>(1.0 / 127 * (1 + 0x1p-21));
constexpr float kLeastStep = 0x1p-120f;

// Rounds 32 bounds in one direction: -1 down, 1 up.
void code_bounds(const float* bounds, float direction, int8_t* codes, uint16_t* step) {
  float size = 0.0f;
  for (int c = 0; c < kStepChannels; ++c) size = std::fmax(size, std::fabs(bounds[c]));
  *step = rounded_up(std::fmax(size * kSteps, kLeastStep));
  const float unit = widened(step, 0, DType::kBF16);
  for (int c = 0; c < kStepChannels; ++c) {
    const float x = direction * bounds[c];
    codes[c] = static_cast<int8_t>(direction * std::ceil(x / unit));
  }
}

// One word for every column from 16 rows: bit t is set where row t is not negative.
template <typename Bits>
void sign_words(const Bits* rows, ptrdiff_t columns, Bits* words) {
  constexpr int kSignBit = 8 * sizeof(Bits) - 1;
  for (ptrdiff_t c = 0; c < columns; ++c) words[c] = 0;
  for (int t = 0; t < 16; ++t) {
    const Bits* row = rows + t * columns;
    for (ptrdiff_t c = 0; c < columns; ++c) {
      words[c] = static_cast<Bits>(words[c] | ((row[c] >> kSignBit ^ 1) << t));
    }
  }
}

template <typename Bits>
void sign_pages_of(const void* k, ptrdiff_t columns, const int64_t* ids, int64_t n, void* low,
                   void* high) {
  for (int64_t i = 0; i < n; ++i) {
    const Bits* page = static_cast<const Bits*>(k) + ids[i] * columns * 32;
    sign_words(page, columns, static_cast<Bits*>(low) + ids[i] * columns);
    sign_words(page + 16 * columns, columns, static_cast<Bits*>(high) + ids[i] * columns);
  }
}

}  // namespace

void sign_pages(const void* k, int32_t kv_heads, int32_t head_dim, DType dtype, const int64_t* ids,
                int64_t n, void* low, void* high) {
  const ptrdiff_t columns = static_cast<ptrdiff_t>(kv_heads) * head_dim;
  if (dtype == DType::kF32) {
    sign_pages_of<uint32_t>(k, columns, ids, n, low, high);
  } else {
    sign_pages_of<uint16_t>(k, columns, ids, n, low, high);
  }
}

void copy_pages(const void* src, void* dst, int64_t page_bytes, const int64_t* src_ids,
                const int64_t* dst_ids, int64_t n) {
  const char* from = static_cast<const char*>(src);
  char* to = static_cast<char*>(dst);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + dst_ids[i] * page_bytes, from + src_ids[i] * page_bytes,
                static_cast<size_t>(page_bytes));
  }
}

void digest_pages_int8(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim,
                       DType dtype, const int64_t* ids, int64_t n, const CodedDigests& to) {
  const ptrdiff_t columns = static_cast<ptrdiff_t>(kv_heads) * head_dim;
  const ptrdiff_t element = dtype == DType::kF32 ? 4 : 2;
  std::vector<float> extremes(2 * columns);  // of the page's dtype
  float* const kmin = extremes.data();
  float* const kmax = kmin + columns;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t first = 0;
    const char* const page = static_cast<const char*>(k) + ids[i] * columns * page_size * element;
    digest_pages(page, page_size, kv_heads, head_dim, dtype, &first, 1, kmin, kmax);
    for (ptrdiff_t c = 0; c < columns; c += kStepChannels) {
      const ptrdiff_t at = ids[i] * columns + c;
      float low[kStepChannels], high[kStepChannels];
      bool finite = true;
      for (int j = 0; j < kStepChannels; ++j) {
        low[j] = widened(kmin, c + j, dtype);
        high[j] = widened(kmax, c + j, dtype);
        finite = finite && std::isfinite(low[j]) && std::isfinite(high[j]);
      }
      if (finite) {
        code_bounds(low, -1.0f, to.low + at, to.low_step + at / kStepChannels);
        code_bounds(high, 1.0f, to.high + at, to.high_step + at / kStepChannels);
      } else {
        std::memset(to.low + at, 0, kStepChannels);
        std::memset(to.high + at, 0, kStepChannels);
        to.low_step[at / kStepChannels] = to.high_step[at / kStepChannels] = kNoStep;
      }
    }
  }
}

void digest_pages(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim, DType dtype,
                  const int64_t* ids, int64_t n, void* kmin, void* kmax) {
  const ptrdiff_t columns = static_cast<ptrdiff_t>(kv_heads) * head_dim;
  for (int64_t i = 0; i < n; ++i) {
    const ptrdiff_t page = ids[i] * columns * page_size;
    const ptrdiff_t row = ids[i] * columns;
    if (dtype == DType::kF32) {
      digest_f32(static_cast<const float*>(k) + page, page_size, columns,
                 static_cast<float*>(kmin) + row, static_cast<float*>(kmax) + row);
    } else {
      digest_16bit(static_cast<const int16_t*>(k) + page, page_size, columns,
                   static_cast<int16_t*>(kmin) + row, static_cast<int16_t*>(kmax) + row);
    }
  }
}

}  // namespace scout
