#include "pages.h"

#include <cmath>
#include <cstddef>
#include <cstring>

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

// The value of an fp8 byte, see attend.h.
float fp8_value(uint8_t bits, DType type) {
  const int mantissa_bits = type == DType::kE4M3 ? 3 : 2;
  const int bias = type == DType::kE4M3 ? 7 : 15;
  const int magnitude = bits & 0x7f;
  const int exponent = magnitude >> mantissa_bits;
  const int mantissa = magnitude & ((1 << mantissa_bits) - 1);
  const int whole = exponent > 0 ? mantissa + (1 << mantissa_bits) : mantissa;
  float value = std::ldexp(static_cast<float>(whole), (exponent > 0 ? exponent : 1) - bias - mantissa_bits);
  if (type == DType::kE5M2 && magnitude >= 0x7c) value = magnitude == 0x7c ? INFINITY : NAN;
  return bits & 0x80 ? -value : value;
}

// Lookup table from fp8 bytes to the bits of the same value in another type; all are exact.
struct Widened {
  uint32_t bits[256];

  Widened(DType from, DType to) {
    for (int i = 0; i < 256; ++i) {
      const float value = fp8_value(static_cast<uint8_t>(i), from);
      std::memcpy(bits + i, &value, sizeof value);
      if (to == DType::kBF16) bits[i] >>= 16;
      if (to == DType::kF16) bits[i] = half_bits(bits[i]);
    }
  }

 private:
  static uint32_t half_bits(uint32_t single) {
    const uint32_t sign = single >> 16 & 0x8000u, magnitude = single & 0x7fffffffu;
    if (magnitude >= 0x7f800000u) return sign | 0x7c00u | (magnitude >> 13 & 0x3ffu);
    if (magnitude >= 113u << 23) return sign | (magnitude - (112u << 23)) >> 13;
    float value;  // a subnormal or zero: a multiple of 2^-24
    std::memcpy(&value, &magnitude, sizeof value);
    return sign | static_cast<uint32_t>(std::ldexp(value, 24));
  }
};

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
                  const int64_t* ids, int64_t n, DType to, void* kmin, void* kmax) {
  const ptrdiff_t columns = static_cast<ptrdiff_t>(kv_heads) * head_dim;
  const bool is_fp8 = bytes_of(dtype) == 1;
  const Widened widened(is_fp8 ? dtype : DType::kE4M3, to);
  for (int64_t i = 0; i < n; ++i) {
    const ptrdiff_t page = ids[i] * columns * page_size;
    const ptrdiff_t row = ids[i] * columns;
    if (dtype == DType::kF32) {
      digest_f32(static_cast<const float*>(k) + page, page_size, columns,
                 static_cast<float*>(kmin) + row, static_cast<float*>(kmax) + row);
    } else if (!is_fp8) {
      int16_t* const low = static_cast<int16_t*>(kmin) + row;
      int16_t* const high = static_cast<int16_t*>(kmax) + row;
      digest_narrow(static_cast<const int16_t*>(k) + page, page_size, columns,
                    [=](ptrdiff_t c, int16_t least, int16_t most) {
                      low[c] = least;
                      high[c] = most;
                    });
    } else {
      const ptrdiff_t bytes = bytes_of(to);
      char* const low = static_cast<char*>(kmin) + row * bytes;
      char* const high = static_cast<char*>(kmax) + row * bytes;
      digest_narrow(static_cast<const int8_t*>(k) + page, page_size, columns,
                    [&](ptrdiff_t c, int8_t least, int8_t most) {
                      std::memcpy(low + c * bytes, widened.bits + static_cast<uint8_t>(least), bytes);
                      std::memcpy(high + c * bytes, widened.bits + static_cast<uint8_t>(most), bytes);
                    });
    }
  }
}

}  // namespace scout
