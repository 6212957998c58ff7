#include "pages.h"

#include <cstddef>
#include <cstring>

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

}  // namespace

void copy_pages(const void* src, void* dst, int64_t page_bytes, const int64_t* src_ids,
                const int64_t* dst_ids, int64_t n) {
  const char* from = static_cast<const char*>(src);
  char* to = static_cast<char*>(dst);
  for (int64_t i = 0; i < n; ++i) {
    std::memcpy(to + dst_ids[i] * page_bytes, from + src_ids[i] * page_bytes,
                static_cast<size_t>(page_bytes));
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
