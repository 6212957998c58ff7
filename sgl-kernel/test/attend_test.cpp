// Checks the kernels without Python, for sanitizer builds:
//   cmake -S sgl-kernel -B build/asan -DSCOUT_BUILD_TESTS=ON -DSCOUT_SANITIZE=ON
//   cmake --build build/asan && build/asan/attend_test
// Every buffer is a heap block of exactly its size, so reading or writing beyond one is caught.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "isa.h"
#include "pages.h"
#include "quantize_cpu.h"
#include "score_cpu.h"
#include "scout/attend.h"
#include "thread_pool.h"

namespace {

using scout::DType;

int failures = 0;

void expect(bool condition, const char* what, const char* detail) {
  if (condition) return;
  ++failures;
  std::fprintf(stderr, "FAILED: %s (%s)\n", what, detail);
}

// K or V as bytes of a dtype together with the exact values.
struct Tensor {
  std::vector<uint16_t> half;
  std::vector<float> full;
  DType dtype;
  std::vector<int8_t> codes = {};
  std::vector<float> scales = {};

  const void* data() const {
    if (dtype == DType::kI8) return codes.data();
    return dtype == DType::kF32 ? static_cast<const void*>(full.data()) : half.data();
  }
};

float half_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const float mantissa = static_cast<float>(bits & 1023);
  const float magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024.0f + mantissa, exponent - 25);
  return bits & 0x8000 ? -magnitude : magnitude;
}

Tensor random_tensor(size_t n, DType dtype, std::mt19937& rng) {
  Tensor t{{}, std::vector<float>(n), dtype};
  std::normal_distribution<float> normal;
  if (dtype != DType::kF32) t.half.resize(n);
  for (size_t i = 0; i < n; ++i) {
    if (dtype == DType::kF32) {
      t.full[i] = normal(rng);
    } else if (dtype == DType::kBF16) {
      const float x = normal(rng);
      uint32_t bits;
      std::memcpy(&bits, &x, sizeof bits);
      t.half[i] = static_cast<uint16_t>(bits >> 16);
      bits &= 0xffff0000u;
      std::memcpy(&t.full[i], &bits, sizeof bits);
    } else {
      t.half[i] = static_cast<uint16_t>(rng() % 0x4400 | (rng() & 0x8000));  // up to 4, denormals
      t.full[i] = half_value(t.half[i]);
    }
  }
  return t;
}

// Codes and scales of random pages, and the values that they stand for. Checks the quantiser too.
Tensor random_codes(int pages, int page_size, int heads, int dim, DType from, std::mt19937& rng,
                    const char* detail) {
  const size_t row = static_cast<size_t>(heads) * dim;
  const size_t page = row * page_size;
  const Tensor src = random_tensor(page * pages, from, rng);
  Tensor t{{}, std::vector<float>(src.full.size()), DType::kI8};
  t.codes.resize(src.full.size());
  t.scales.resize(static_cast<size_t>(pages) * heads);
  std::vector<int64_t> ids(pages);
  for (int i = 0; i < pages; ++i) ids[i] = i;
  scout::quantize_pages({src.data(), from, page_size, heads, dim, ids.data(), ids.data(), pages,
                         t.codes.data(), t.scales.data()});
  for (size_t i = 0; i < t.full.size(); ++i) {
    const float scale = t.scales[i / page * heads + i % row / dim];
    t.full[i] = t.codes[i] * scale;
    expect(std::fabs(t.full[i] - src.full[i]) <= 0.5001f * scale, "quantize", detail);
  }
  return t;
}

struct Shape {
  DType dtype;
  int page_size, heads, dim, group, pages;
};

void check_attend(const Shape& s, std::mt19937& rng, const char* detail) {
  const int columns = s.heads * s.dim;
  const int q_heads = s.heads * s.group;
  const size_t page = static_cast<size_t>(s.page_size) * columns;
  auto make = [&](DType source) {
    return s.dtype == DType::kI8
               ? random_codes(s.pages, s.page_size, s.heads, s.dim, source, rng, detail)
               : random_tensor(page * s.pages, s.dtype, rng);
  };
  const Tensor k = make(DType::kBF16);
  const Tensor v = make(s.group % 2 ? DType::kF16 : DType::kF32);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(q_heads) * s.dim);
  for (float& x : q) x = normal(rng);
  std::vector<int32_t> ids(s.pages);
  for (int i = 0; i < s.pages; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), rng);
  const int32_t last = rng() % 2 ? ids.back() : -1;
  const int32_t last_len = 1 + static_cast<int32_t>(rng() % s.page_size);
  ids.pop_back();
  if (!ids.empty() && rng() % 2) ids[rng() % ids.size()] = -1;

  scout::KvPages kv{k.data(), v.data(), s.pages, s.page_size, s.heads, s.dim, s.dtype};
  kv.k_scale = k.scales.data();
  kv.v_scale = v.scales.data();
  const scout::AttendParams params{s.group, 1.0f / std::sqrt(static_cast<float>(s.dim)),
                                   rng() % 2 ? 3.0f : 0.0f};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  std::vector<float> out(q.size(), nan), lse(q_heads, nan);
  const int n = static_cast<int>(ids.size());
  scout::attend_sequence(kv, params, q.data(), ids.data(), n, last, last_len, out.data(),
                         lse.data());

  for (int hq = 0; hq < q_heads; ++hq) {
    std::vector<double> scores;
    std::vector<size_t> rows;
    for (int i = 0; i <= n; ++i) {
      const int32_t id = i < n ? ids[i] : last;
      if (id < 0) continue;
      for (int t = 0; t < (i < n ? s.page_size : last_len); ++t) {
        const size_t row = id * page + static_cast<size_t>(t) * columns + hq / s.group * s.dim;
        double dot = 0;
        for (int d = 0; d < s.dim; ++d) {
          dot += static_cast<double>(q[static_cast<size_t>(hq) * s.dim + d]) * k.full[row + d];
        }
        dot *= params.scale;
        if (params.logit_cap > 0) dot = params.logit_cap * std::tanh(dot / params.logit_cap);
        scores.push_back(dot);
        rows.push_back(row);
      }
    }
    if (scores.empty()) {
      expect(lse[hq] == -std::numeric_limits<float>::infinity(), "empty lse", detail);
      for (int d = 0; d < s.dim; ++d) {
        expect(out[static_cast<size_t>(hq) * s.dim + d] == 0.0f, "empty out", detail);
      }
      continue;
    }
    const double top = *std::max_element(scores.begin(), scores.end());
    double total = 0;
    for (double x : scores) total += std::exp(x - top);
    expect(std::fabs(lse[hq] - (top + std::log(total))) < 1e-5, "lse", detail);
    for (int d = 0; d < s.dim; ++d) {
      double expected = 0;
      for (size_t j = 0; j < scores.size(); ++j) {
        expected += std::exp(scores[j] - top) / total * v.full[rows[j] + d];
      }
      expect(std::fabs(out[static_cast<size_t>(hq) * s.dim + d] - expected) < 1e-5, "out", detail);
    }
  }
}

void check_digest_and_score(const Shape& s, std::mt19937& rng, const char* detail) {
  const int columns = s.heads * s.dim;
  const Tensor k =
      random_tensor(static_cast<size_t>(s.pages) * s.page_size * columns, s.dtype, rng);
  const size_t bytes = static_cast<size_t>(s.pages) * columns * (s.dtype == DType::kF32 ? 4 : 2);
  std::vector<char> kmin(bytes), kmax(bytes);
  std::vector<int64_t> ids(s.pages);
  for (int i = 0; i < s.pages; ++i) ids[i] = s.pages - 1 - i;
  scout::digest_pages(k.data(), s.page_size, s.heads, s.dim, s.dtype, ids.data(), s.pages,
                      kmin.data(), kmax.data());

  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(columns) * s.group);
  for (float& x : q) x = normal(rng);
  std::vector<int32_t> table(s.pages + 1, -1);
  for (int i = 0; i < s.pages; ++i) table[i] = i;
  const scout::Digests digests{kmin.data(), kmax.data(), s.dtype, s.heads, s.dim};
  std::vector<float> out(table.size());
  std::vector<float> scratch(
      scout::score_scratch_floats(s.heads * s.group, s.dim, static_cast<int>(table.size())));
  scout::score_sequence({&digests, s.group, 0.5f, scout::Reduce::kSum, q.data(), table.data(),
                         s.pages, static_cast<int32_t>(table.size()), scratch.data(), out.data()});
  for (int p = 0; p < s.pages; ++p) {
    double expected = 0;
    for (int hq = 0; hq < s.heads * s.group; ++hq) {
      for (int d = 0; d < s.dim; ++d) {
        float low = std::numeric_limits<float>::infinity(), high = -low;
        for (int t = 0; t < s.page_size; ++t) {
          const float x = k.full[(static_cast<size_t>(p) * s.page_size + t) * columns +
                                 hq / s.group * s.dim + d];
          low = std::min(low, x);
          high = std::max(high, x);
        }
        const double qd = q[static_cast<size_t>(hq) * s.dim + d];
        expected += 0.5 * std::max(qd * low, qd * high);
      }
    }
    expect(std::fabs(out[p] - expected) < 1e-5 * std::max(1.0, std::fabs(expected)), "score",
           detail);
  }
  expect(out.back() == -std::numeric_limits<float>::infinity(), "score of no page", detail);
}

void check_pool() {
  for (int threads : {1, 2, 4}) {
    std::vector<int> runs(100, 0);
    scout::parallel_for(100, threads, [&](int i) { ++runs[i]; });
    expect(std::set<int>(runs.begin(), runs.end()) == std::set<int>{1}, "parallel_for", "");
  }
}

}  // namespace

int main() {
  std::mt19937 rng(7);
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    if (!scout::set_isa(isa)) continue;
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kI8}) {
      for (int dim : {16, 64, 80, 96, 128, 256}) {
        for (int group : {1, 2, 3, 5, 6, 7, 8, 12, 16}) {
          const int page_size = (dim + group) % 3 == 0 ? 32 : (dim + group) % 3 == 1 ? 16 : 7;
          const Shape shape{dtype, page_size, 2, dim, group, 1 + static_cast<int>(rng() % 4)};
          char detail[96];
          std::snprintf(detail, sizeof detail, "%s dtype=%d S=%d D=%d G=%d P=%d", isa,
                        static_cast<int>(dtype), page_size, dim, group, shape.pages);
          check_attend(shape, rng, detail);
          if (group <= 5 && dtype != DType::kI8) check_digest_and_score(shape, rng, detail);
        }
      }
    }
    // More rows than one pass holds, and pages longer than a tile.
    check_attend({DType::kBF16, 16, 40, 128, 8, 2}, rng, "many heads");
    check_attend({DType::kF32, 16, 1, 256, 70, 2}, rng, "large group");
    check_attend({DType::kF16, 150, 2, 64, 5, 3}, rng, "long pages");
    check_attend({DType::kI8, 16, 40, 128, 8, 2}, rng, "many heads of codes");
    check_attend({DType::kI8, 150, 2, 64, 5, 3}, rng, "long pages of codes");
    check_attend({DType::kBF16, 40, 32, 16, 32, 2}, rng, "tiles shorter than pages");
  }
  check_pool();
  if (failures == 0) std::puts("all passed");
  return failures == 0 ? 0 : 1;
}
