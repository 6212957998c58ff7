// Min/max digests of pages. Plain code: it is memory-bound.
#include <cstddef>
#include <cstring>

#include "score.h"

namespace scout {
namespace {

// 16-bit and 8-bit floats order like sign-magnitude integers; flipping the magnitude bits of
// negative ones gives integer order. The mapping is its own inverse.
template <typename T>
inline T ordered(T bits) {
  constexpr int kMagnitude = sizeof(T) == 2 ? 0x7fff : 0x7f;
  return static_cast<T>(bits ^ ((bits >> 15) & kMagnitude));
}

constexpr int kBlock = 64;  // columns whose minimum and maximum stay in registers or L1

// write(column, smallest, largest) for all columns.
template <typename T, typename Write>
void digest_narrow(const T* page, int32_t tokens, ptrdiff_t columns, const Write& write) {
  for (ptrdiff_t begin = 0; begin < columns; begin += kBlock) {
    const int count = static_cast<int>(columns - begin < kBlock ? columns - begin : kBlock);
    T smallest[kBlock];
    T largest[kBlock];
    for (int c = 0; c < count; ++c) smallest[c] = largest[c] = ordered(page[begin + c]);
    for (int32_t t = 1; t < tokens; ++t) {
      const T* row = page + t * columns + begin;
      for (int c = 0; c < count; ++c) {
        const T x = ordered(row[c]);
        smallest[c] = x < smallest[c] ? x : smallest[c];
        largest[c] = x > largest[c] ? x : largest[c];
      }
    }
    for (int c = 0; c < count; ++c) write(begin + c, ordered(smallest[c]), ordered(largest[c]));
  }
}

void digest_f32(const float* page, int32_t tokens, ptrdiff_t columns, float* low, float* high) {
  std::memcpy(low, page, sizeof(float) * columns);
  std::memcpy(high, page, sizeof(float) * columns);
  for (int32_t t = 1; t < tokens; ++t) {
    const float* row = page + t * columns;
    for (ptrdiff_t c = 0; c < columns; ++c) {
      const bool is_nan = row[c] != row[c];  // sticky, as comparisons with NaN are false
      low[c] = row[c] < low[c] || is_nan ? row[c] : low[c];
      high[c] = row[c] > high[c] || is_nan ? row[c] : high[c];
    }
  }
}

}  // namespace

void digest_pages(const void* k, int32_t page_size, int32_t kv_heads, int32_t head_dim, DType dtype,
                  const int64_t* ids, int64_t n, DType to, const void* values, void* kmin,
                  void* kmax) {
  const ptrdiff_t columns = static_cast<ptrdiff_t>(kv_heads) * head_dim, bytes = bytes_of(to);
  const char* const table = static_cast<const char*>(values);
  for (int64_t i = 0; i < n; ++i) {
    const ptrdiff_t page = ids[i] * columns * page_size;
    char* const low = static_cast<char*>(kmin) + ids[i] * columns * bytes;
    char* const high = static_cast<char*>(kmax) + ids[i] * columns * bytes;
    const auto write = [=](ptrdiff_t c, int16_t least, int16_t most) {
      std::memcpy(low + c * 2, &least, 2);
      std::memcpy(high + c * 2, &most, 2);
    };
    const auto look_up = [=](ptrdiff_t c, int8_t least, int8_t most) {
      std::memcpy(low + c * bytes, table + static_cast<uint8_t>(least) * bytes, bytes);
      std::memcpy(high + c * bytes, table + static_cast<uint8_t>(most) * bytes, bytes);
    };
    if (dtype == DType::kF32) {
      digest_f32(static_cast<const float*>(k) + page, page_size, columns,
                 reinterpret_cast<float*>(low), reinterpret_cast<float*>(high));
    } else if (bytes_of(dtype) == 2) {
      digest_narrow(static_cast<const int16_t*>(k) + page, page_size, columns, write);
    } else {
      digest_narrow(static_cast<const int8_t*>(k) + page, page_size, columns, look_up);
    }
  }
}

}  // namespace scout
