// The rotation of ops/rotated.py and building rotated digests, generic over Vec. Include a vec_*.h
// first; see attend_tile.h for why the standard library is not used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "score.h"

namespace scout {
namespace {

constexpr float kFirst = 0.98160f;
constexpr float kSecond = 0.52880f;
constexpr float kLargest = 0x1p50f;  // elements of K and V are clamped to this
constexpr int kScalesAt = 0, kStepAt = 64, kNormStepAt = 68, kNormsAt = 72;  // offsets in these
constexpr uint32_t kFlip = 0x9E3779B1u;

// R x in place for each column of x [dim, kColumns].
template <int kColumns>
inline void rotate(float* x, int dim) {
  const int width = dim & -dim;
  const float norm = 1.0f / __builtin_sqrtf(static_cast<float>(width));
  for (int d = 0; d < dim; ++d) {
    const bool flip = (static_cast<uint32_t>(d + 1) * kFlip) >> 31;
    const float factor = flip ? -norm : norm;
    for (int c = 0; c < kColumns; ++c) x[d * kColumns + c] *= factor;
  }
  for (int half = 1; half < width; half *= 2) {
    for (int base = 0; base < dim; base += 2 * half) {
      float* const low = x + base * kColumns;
      float* const high = low + half * kColumns;
#pragma GCC ivdep
      for (int i = 0; i < half * kColumns; ++i) {
        const float a = low[i];
        const float b = high[i];
        low[i] = a + b;
        high[i] = a - b;
      }
    }
  }
}

inline void make_finite(float* x, int count) {
  for (int i = 0; i < count; ++i) {
    float v = x[i] == x[i] ? x[i] : 0.0f;
    v = v < kLargest ? v : kLargest;
    x[i] = v > -kLargest ? v : -kLargest;
  }
}

// Loads the keys of one KV head of a page to x [dim, 32]; rows are row_bytes apart.
template <DType T>
inline void load_keys(const char* k, ptrdiff_t row_bytes, int dim, float* x) {
  constexpr int W = Vec::kLanes;
  for (int t = 0; t < kRotatedTokens; ++t) {
    for (int d = 0; d < dim; d += 2 * W) {
      Vec::F first, second;
      Vec::load_pair<T>(k + t * row_bytes + d * bytes_of(T), first, second);
      float pair[2 * W];
      Vec::store(pair, first);
      Vec::store(pair + W, second);
      for (int i = 0; i < 2 * W; ++i) {
        x[(d + Vec::column(T, i)) * kRotatedTokens + t] = Vec::widening(T) * pair[i];
      }
    }
  }
  make_finite(x, dim * kRotatedTokens);
}

constexpr float kMagic = 12582912.0f;  // adding and subtracting it rounds to an integer
constexpr float kLeastStep = 1.17549435e-38f;

// Quantizes the value norms [32] of one KV head of a page; rows row_bytes apart. Returns the step.
template <DType T>
inline float round_norms(const char* v, ptrdiff_t row_bytes, int dim, uint8_t* rounded) {
  constexpr int W = Vec::kLanes;
  float norms[kRotatedTokens];
  float peak = 0.0f;
  for (int t = 0; t < kRotatedTokens; ++t) {
    float x[kRotatedMaxDim];  // in any order
    for (int d = 0; d < dim; d += 2 * W) {
      Vec::F first, second;
      Vec::load_pair<T>(v + t * row_bytes + d * bytes_of(T), first, second);
      Vec::store(x + d, Vec::mul(first, Vec::set1(Vec::widening(T))));
      Vec::store(x + d + W, Vec::mul(second, Vec::set1(Vec::widening(T))));
    }
    make_finite(x, dim);
    float sum = 0.0f;
    for (int d = 0; d < dim; ++d) sum += x[d] * x[d];
    norms[t] = __builtin_sqrtf(sum);
    peak = norms[t] > peak ? norms[t] : peak;
  }
  const float step = peak / 255.0f > kLeastStep ? peak / 255.0f : kLeastStep;
  for (int t = 0; t < kRotatedTokens; ++t) {
    rounded[t] = static_cast<uint8_t>((norms[t] / step + kMagic) - kMagic);
  }
  return step;
}

// Quantizes the mean and subtracts it from x [dim, 32]. Returns the step.
inline float take_mean(float* x, int dim, int8_t* rounded) {
  float mean[kRotatedMaxDim];
  float peak = 0.0f;
  for (int d = 0; d < dim; ++d) {
    float sum = 0.0f;
    for (int t = 0; t < kRotatedTokens; ++t) sum += x[d * kRotatedTokens + t];
    mean[d] = sum / kRotatedTokens;
    const float size = __builtin_fabsf(mean[d]);
    peak = size > peak ? size : peak;
  }
  const float step = peak / 127.0f > kLeastStep ? peak / 127.0f : kLeastStep;
  for (int d = 0; d < dim; ++d) {
    const float whole = (mean[d] / step + kMagic) - kMagic;
    rounded[d] = static_cast<int8_t>(whole);
    for (int t = 0; t < kRotatedTokens; ++t) x[d * kRotatedTokens + t] -= whole * step;
  }
  return step;
}

inline uint16_t to_bf16(float x) {
  uint32_t bits;
  __builtin_memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

// Packs the bits of four channels, x [4, 32], into a byte of each of the 16 rows of both planes.
inline void pack_channels(const float* x, const float* bounds, ptrdiff_t row_bytes,
                          uint8_t* planes) {
  int32_t words[2][kRotatedTokens] = {};
  for (int i = 0; i < 4; ++i) {
    for (int t = 0; t < kRotatedTokens; ++t) {
      const float v = x[i * kRotatedTokens + t];
      const int32_t first = v >= 0.0f;
      const int32_t outside = __builtin_fabsf(v) > bounds[t];
      words[0][t] |= first << i;
      words[1][t] |= (first == outside) << i;
    }
  }
  for (int plane = 0; plane < 2; ++plane) {
    for (int j = 0; j < 16; ++j) {
      planes[(plane * 16 + j) * row_bytes] =
          static_cast<uint8_t>(words[plane][j] | words[plane][16 + j] << 4);
    }
  }
}

template <DType T>
void rotate_head(const char* k, const char* v, ptrdiff_t row_bytes, int dim, uint8_t* planes,
                 uint8_t* stats) {
  alignas(64) float x[kRotatedMaxDim * kRotatedTokens];
  load_keys<T>(k, row_bytes, dim, x);
  rotate<kRotatedTokens>(x, dim);
  const float step = take_mean(x, dim, reinterpret_cast<int8_t*>(stats));
  float bounds[kRotatedTokens] = {};  // the scales, then the thresholds between the levels
  for (int d = 0; d < dim; ++d) {
    for (int t = 0; t < kRotatedTokens; ++t) {
      bounds[t] += x[d * kRotatedTokens + t] * x[d * kRotatedTokens + t];
    }
  }
  for (float& bound : bounds) bound = __builtin_sqrtf(bound / static_cast<float>(dim));
  uint16_t scales[kRotatedTokens];
  for (int t = 0; t < kRotatedTokens; ++t) {
    scales[t] = to_bf16(bounds[t]);
    bounds[t] *= kFirst;
  }
  uint8_t* const rest = stats + dim;
  __builtin_memset(rest, 0, kStatsBytes);
  const float norm_step = round_norms<T>(v, row_bytes, dim, rest + kNormsAt);
  __builtin_memcpy(rest + kScalesAt, scales, sizeof scales);
  __builtin_memcpy(rest + kStepAt, &step, sizeof step);
  __builtin_memcpy(rest + kNormStepAt, &norm_step, sizeof norm_step);
  for (int c = 0; c < dim / 4; ++c) {
    pack_channels(x + c * 4 * kRotatedTokens, bounds, dim / 4, planes + c);
  }
}

template <DType T>
void rotate_all_of(const RotateArgs& args) {
  const int dim = args.head_dim;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * bytes_of(T);
  const ptrdiff_t row_bytes = args.kv_heads * head_bytes;
  for (int64_t i = 0; i < args.n; ++i) {
    const ptrdiff_t page = args.ids[i] * kRotatedTokens * row_bytes;
    const char* const k = static_cast<const char*>(args.k) + page;
    const char* const v = static_cast<const char*>(args.v) + page;
    for (int h = 0; h < args.kv_heads; ++h) {
      const ptrdiff_t head = static_cast<ptrdiff_t>(args.ids[i]) * args.kv_heads + h;
      rotate_head<T>(k + h * head_bytes, v + h * head_bytes, row_bytes, dim,
                     args.planes + head * 8 * dim, args.stats + head * (dim + kStatsBytes));
    }
  }
}

inline void rotate_all(const RotateArgs& args) {
  switch (args.dtype) {
    case DType::kBF16:
      return rotate_all_of<DType::kBF16>(args);
    case DType::kF16:
      return rotate_all_of<DType::kF16>(args);
    case DType::kF32:
      return rotate_all_of<DType::kF32>(args);
    case DType::kE4M3:
      return rotate_all_of<DType::kE4M3>(args);
    case DType::kE5M2:
      return rotate_all_of<DType::kE5M2>(args);
  }
}

}  // namespace
}  // namespace scout
