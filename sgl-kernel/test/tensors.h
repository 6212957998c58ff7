// Random tensors of every dtype, and failure reporting for C++ tests.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "scout/attend.h"

namespace {

using scout::DType;

int failures = 0;

void expect(bool condition, const char* what, const std::string& detail) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s (%s)\n", what, detail.c_str());
}

struct Shape {
  DType dtype;
  int page_size, heads, dim, group, pages;
};

// K or V in a dtype's encoding, together with the exact values.
struct Tensor {
  std::vector<uint16_t> half;
  std::vector<float> full;
  DType dtype;
  std::vector<uint8_t> bytes = {};  // of fp8

  const void* data() const {
    if (dtype == DType::kF32) return full.data();
    return bytes.empty() ? static_cast<const void*>(half.data()) : bytes.data();
  }
};

float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0f + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

float fp8_value(uint8_t bits, DType dtype) {
  if (dtype == DType::kE5M2) return half_value(static_cast<uint16_t>(bits << 8));
  const int exponent = (bits >> 3) & 15;
  const float mantissa = static_cast<float>(bits & 7);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8.0f + mantissa, exponent - 10);
  return bits & 0x80 ? -magnitude : magnitude;
}

uint16_t bf16_bits(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

float bf16_value(uint16_t bits) {
  const uint32_t word = static_cast<uint32_t>(bits) << 16;
  float x;
  std::memcpy(&x, &word, sizeof x);
  return x;
}

Tensor random_tensor(size_t n, DType dtype, std::mt19937& rng) {
  Tensor t{{}, std::vector<float>(n), dtype};
  std::normal_distribution<float> normal;
  const bool is_fp8 = scout::bytes_of(dtype) == 1;
  if (is_fp8) t.bytes.resize(n);
  if (scout::bytes_of(dtype) == 2) t.half.resize(n);
  for (size_t i = 0; i < n; ++i) {
    if (dtype == DType::kF32) {
      t.full[i] = normal(rng);
    } else if (dtype == DType::kBF16) {
      t.half[i] = bf16_bits(normal(rng));
      t.full[i] = bf16_value(t.half[i]);
    } else if (is_fp8) {  // up to 4, with subnormals
      t.bytes[i] = static_cast<uint8_t>(rng() % (dtype == DType::kE4M3 ? 0x48 : 0x44) | (rng() & 0x80));
      t.full[i] = fp8_value(t.bytes[i], dtype);
    } else {
      t.half[i] = static_cast<uint16_t>(rng() % 0x4400 | (rng() & 0x8000));  // <= 4, subnormals
      t.full[i] = half_value(t.half[i]);
    }
  }
  return t;
}

}  // namespace
