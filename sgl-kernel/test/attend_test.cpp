// Checks the kernels without Python, for sanitizer builds:
//   cmake -S sgl-kernel -B build/asan -DSCOUT_BUILD_TESTS=ON -DSCOUT_SANITIZE=ON
//   cmake --build build/asan && build/asan/attend_test
// Every buffer is a heap block of exactly its size, so reading or writing beyond one is caught.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <set>
#include <vector>

#include "isa.h"
#include "pages.h"
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

  const void* data() const {
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

float bf16_value(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  bits &= 0xffff0000u;
  std::memcpy(&x, &bits, sizeof bits);
  return x;
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

// Inputs that a kernel may trip over.
enum class Trial {
  kRandom,
  kLargeLogits,    // some hundreds: all weight on few tokens
  kExtremeLogits,  // far beyond what exp can take
  kIdenticalKeys,  // every weight the same
  kNoKeyCounts,    // every score -inf, as a mask in K makes it
  kSomeKeysCount,  // -inf for every second token
  kOneToken,
};

void put(Tensor& t, size_t i, float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  t.full[i] = x;
  if (t.dtype == DType::kBF16) t.half[i] = static_cast<uint16_t>(bits >> 16);
  if (t.dtype == DType::kF16) t.half[i] = bits >> 31 ? 0xfc00 : 0x7c00;  // only infinities
}

// All tokens get the keys of the first.
void repeat_first_token(Tensor& t, size_t columns) {
  for (size_t i = columns; i < t.full.size(); ++i) {
    t.full[i] = t.full[i % columns];
    if (!t.half.empty()) t.half[i] = t.half[i % columns];
  }
}

// K's first channel of each head becomes -inf, in every token or in every second one.
void mask_keys(Tensor& k, size_t columns, size_t dim, bool all) {
  for (size_t i = 0; i < k.full.size(); i += dim)
    if (all || i / columns % 2 == 0) put(k, i, -std::numeric_limits<float>::infinity());
}

struct Shape {
  DType dtype;
  int page_size, heads, dim, group, pages;
};

void check_attend(const Shape& s, std::mt19937& rng, const char* detail,
                  Trial trial = Trial::kRandom) {
  const int columns = s.heads * s.dim;
  const int q_heads = s.heads * s.group;
  const size_t page = static_cast<size_t>(s.page_size) * columns;
  Tensor k = random_tensor(page * s.pages, s.dtype, rng);
  const Tensor v = random_tensor(page * s.pages, s.dtype, rng);
  if (trial == Trial::kIdenticalKeys) repeat_first_token(k, columns);
  if (trial == Trial::kNoKeyCounts || trial == Trial::kSomeKeysCount)
    mask_keys(k, columns, s.dim, trial == Trial::kNoKeyCounts);
  std::normal_distribution<float> normal;
  std::vector<float> q(static_cast<size_t>(q_heads) * s.dim);
  const float factor = trial == Trial::kLargeLogits     ? 300
                       : trial == Trial::kExtremeLogits ? 1e30
                                                        : 1;
  for (float& x : q) x = factor * normal(rng);
  if (rng() % 2) std::transform(q.begin(), q.end(), q.begin(), bf16_value);  // as of a bf16 model
  if (trial == Trial::kNoKeyCounts || trial == Trial::kSomeKeysCount)
    for (size_t i = 0; i < q.size(); i += s.dim) q[i] = 1.0f;
  std::vector<int32_t> ids(s.pages);
  for (int i = 0; i < s.pages; ++i) ids[i] = i;
  std::shuffle(ids.begin(), ids.end(), rng);
  const bool one = trial == Trial::kOneToken;
  const int32_t last = one || rng() % 2 ? ids.back() : -1;
  const int32_t last_len = one ? 1 : 1 + static_cast<int32_t>(rng() % s.page_size);
  ids.pop_back();
  if (one) ids.assign(ids.size(), -1);
  if (!ids.empty() && rng() % 2) ids[rng() % ids.size()] = -1;

  const scout::KvPages kv{k.data(), v.data(), s.pages, s.page_size, s.heads, s.dim, s.dtype};
  const scout::AttendParams params{s.group, 1.0f / std::sqrt(static_cast<float>(s.dim)),
                                   trial == Trial::kRandom && rng() % 2 ? 3.0f : 0.0f};
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
    if (trial == Trial::kExtremeLogits) {
      // Which of nearly equal tokens wins is rounding; a mean of values it is all the same.
      expect(std::fabs(lse[hq] - top) <= 1e-3 * std::fabs(top), "extreme lse", detail);
      for (int d = 0; d < s.dim; ++d)
        expect(std::fabs(out[static_cast<size_t>(hq) * s.dim + d]) < 8, "extreme out", detail);
      continue;
    }
    if (std::isinf(top)) {
      // Scores are bounded, so this is no -inf, but less than nothing for whoever merges it.
      expect(lse[hq] < -1e30, "masked lse", detail);
      for (int d = 0; d < s.dim; ++d)
        expect(std::fabs(out[static_cast<size_t>(hq) * s.dim + d]) < 8, "masked out", detail);
      continue;
    }
    // fp32 rounding of the scores enters weights and lse in proportion to them.
    const double most = std::max(1.0, std::fabs(top));
    const double tolerance = 1e-5 * (trial == Trial::kLargeLogits ? 100 * most : 1);
    double total = 0;
    for (double x : scores) total += std::exp(x - top);
    expect(std::fabs(lse[hq] - (top + std::log(total))) < 1e-5 * most, "lse", detail);
    for (int d = 0; d < s.dim; ++d) {
      double expected = 0;
      for (size_t j = 0; j < scores.size(); ++j) {
        expected += std::exp(scores[j] - top) / total * v.full[rows[j] + d];
      }
      expect(std::fabs(out[static_cast<size_t>(hq) * s.dim + d] - expected) < tolerance, "out",
             detail);
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
  for (const char* isa : {"portable", "avx2", "avx512", "avx512bf16"}) {
    if (!scout::set_isa(isa)) continue;
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (int dim : {16, 64, 80, 96, 128, 256}) {
        for (int group : {1, 2, 3, 5, 6, 7, 8, 12, 16}) {
          const int page_size = (dim + group) % 3 == 0 ? 32 : (dim + group) % 3 == 1 ? 16 : 7;
          const Shape shape{dtype, page_size, 2, dim, group, 1 + static_cast<int>(rng() % 4)};
          char detail[96];
          std::snprintf(detail, sizeof detail, "%s dtype=%d S=%d D=%d G=%d P=%d", isa,
                        static_cast<int>(dtype), page_size, dim, group, shape.pages);
          check_attend(shape, rng, detail);
          if (group <= 5) check_digest_and_score(shape, rng, detail);
        }
      }
    }
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      for (Trial trial : {Trial::kLargeLogits, Trial::kExtremeLogits, Trial::kIdenticalKeys,
                          Trial::kNoKeyCounts, Trial::kSomeKeysCount, Trial::kOneToken}) {
        for (int group : {1, 4, 5}) {
          char detail[96];
          std::snprintf(detail, sizeof detail, "%s dtype=%d G=%d trial=%d", isa,
                        static_cast<int>(dtype), group, static_cast<int>(trial));
          check_attend({dtype, 16, 2, 64, group, 3}, rng, detail, trial);
        }
      }
    }
    // More rows than one pass holds, and pages longer than a tile.
    check_attend({DType::kBF16, 16, 40, 128, 8, 2}, rng, "many heads");
    check_attend({DType::kF32, 16, 1, 256, 70, 2}, rng, "large group");
    check_attend({DType::kF16, 150, 2, 64, 5, 3}, rng, "long pages");
    check_attend({DType::kBF16, 40, 32, 16, 32, 2}, rng, "tiles shorter than pages");
  }
  check_pool();
  if (failures == 0) std::puts("all passed");
  return failures == 0 ? 0 : 1;
}
