// Checks the kernels without Python, for sanitizer builds:
//   cmake -S sgl-kernel -B build/asan -DSCOUT_BUILD_TESTS=ON -DSCOUT_SANITIZE=ON
//   cmake --build build/asan && build/asan/attend_test
// Every buffer is a heap block of exactly its size, so reading or writing beyond one is caught.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "isa.h"
#include "scout/attend.h"
#include "tensors.h"

namespace {

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

// All tokens get the keys of the first.
void repeat_first_token(Tensor& t, size_t columns) {
  for (size_t i = columns; i < t.full.size(); ++i) {
    t.full[i] = t.full[i % columns];
    if (!t.half.empty()) t.half[i] = t.half[i % columns];
    if (!t.bytes.empty()) t.bytes[i] = t.bytes[i % columns];
  }
}

// K's first channel of each head becomes -inf, in every token or in every second one.
void mask_keys(Tensor& k, size_t columns, size_t dim, bool all) {
  for (size_t i = 0; i < k.full.size(); i += dim) {
    if (!all && i / columns % 2) continue;
    k.full[i] = -std::numeric_limits<float>::infinity();
    if (!k.half.empty()) k.half[i] = k.dtype == DType::kF16 ? 0xfc00 : 0xff80;
    if (!k.bytes.empty()) k.bytes[i] = 0xfc;  // of e5m2; e4m3 has no infinity
  }
}

std::string describe(const char* isa, const Shape& s, Trial trial) {
  char text[96];
  std::snprintf(text, sizeof text, "%s dtype=%d S=%d H=%d D=%d G=%d P=%d trial=%d", isa,
                static_cast<int>(s.dtype), s.page_size, s.heads, s.dim, s.group, s.pages,
                static_cast<int>(trial));
  return text;
}

// A sequence, and what is asked about it.
struct Case {
  Shape shape;  // of which list `list` of `lists` is attended to
  int list, lists;
  Trial trial;
  Tensor k, v;
  std::vector<float> q;
  std::vector<int32_t> ids;
  int32_t last, last_len;
  scout::AttendParams params;
  bool rounds_weights = false;  // to bf16: fp8 pages where the CPU has dot products of bf16
};

Case make_case(const Shape& s, std::mt19937& rng, Trial trial, int lists) {
  const int columns = s.heads * s.dim;
  const size_t size = static_cast<size_t>(s.pages) * s.page_size * columns;
  Case c{s,
         static_cast<int>(rng() % lists),
         lists,
         trial,
         random_tensor(size, s.dtype, rng),
         random_tensor(size, s.dtype, rng),
         {},
         {},
         0,
         0,
         {}};
  const bool masked = trial == Trial::kNoKeyCounts || trial == Trial::kSomeKeysCount;
  if (trial == Trial::kIdenticalKeys) repeat_first_token(c.k, columns);
  if (masked) mask_keys(c.k, columns, s.dim, trial == Trial::kNoKeyCounts);
  std::normal_distribution<float> normal;
  const float factor = trial == Trial::kLargeLogits     ? 300
                       : trial == Trial::kExtremeLogits ? 1e30
                                                        : 1;
  c.q.resize(static_cast<size_t>(columns) * s.group / lists);
  for (float& x : c.q) x = factor * normal(rng);
  if (rng() % 2)
    for (float& x : c.q) x = bf16_value(bf16_bits(x));
  for (size_t i = 0; masked && i < c.q.size(); i += s.dim) c.q[i] = 1.0f;
  c.ids.resize(s.pages);
  std::iota(c.ids.begin(), c.ids.end(), 0);
  std::shuffle(c.ids.begin(), c.ids.end(), rng);
  const bool one = trial == Trial::kOneToken;
  c.last = one || rng() % 2 ? c.ids.back() : -1;
  c.last_len = one ? 1 : 1 + static_cast<int32_t>(rng() % s.page_size);
  c.ids.pop_back();
  if (one) c.ids.assign(c.ids.size(), -1);
  if (!c.ids.empty() && rng() % 2) c.ids[rng() % c.ids.size()] = -1;
  c.params = {s.group, 1.0f / std::sqrt(static_cast<float>(s.dim)),
              trial == Trial::kRandom && rng() % 2 ? 3.0f : 0.0f};
  return c;
}

bool within(const float* out, int dim, float most) {
  return std::all_of(out, out + dim, [most](float x) { return std::fabs(x) <= most; });
}

void check_head(const Case& c, int hq, const float* out, float lse, const std::string& detail) {
  const Shape& s = c.shape;
  const int columns = s.heads * s.dim, n = static_cast<int>(c.ids.size());
  const int head = c.list * (s.heads / c.lists) + hq / s.group;
  std::vector<double> scores;
  std::vector<size_t> rows;
  for (int i = 0; i <= n; ++i) {
    const int32_t id = i < n ? c.ids[i] : c.last;
    for (int t = 0; id >= 0 && t < (i < n ? s.page_size : c.last_len); ++t) {
      const size_t row = (static_cast<size_t>(id) * s.page_size + t) * columns + head * s.dim;
      double dot = 0;
      for (int d = 0; d < s.dim; ++d)
        dot += static_cast<double>(c.q[static_cast<size_t>(hq) * s.dim + d]) * c.k.full[row + d];
      dot *= c.params.scale;
      const double cap = c.params.logit_cap;
      scores.push_back(cap > 0 ? cap * std::tanh(dot / cap) : dot);
      rows.push_back(row);
    }
  }
  if (scores.empty()) {
    expect(lse == -std::numeric_limits<float>::infinity(), "empty lse", detail);
    expect(within(out, s.dim, 0), "empty out", detail);
    return;
  }
  const double top = *std::max_element(scores.begin(), scores.end());
  const bool extreme = c.trial == Trial::kExtremeLogits;
  if (extreme || std::isinf(top)) {
    // Which of nearly equal tokens wins is rounding; a mean of values it is all the same. A masked
    // score is bounded, so no -inf, but less than nothing for whoever merges it.
    expect(extreme ? std::fabs(lse - top) <= 1e-3 * std::fabs(top) : lse < -1e30, "lse", detail);
    expect(within(out, s.dim, 8), "out", detail);
    return;
  }
  // fp32 rounding of the scores enters weights and lse in proportion to them.
  const double most = std::max(1.0, std::fabs(top));
  const double tolerance = 1e-5 * (c.trial == Trial::kLargeLogits ? 100 * most : 1);
  double total = 0;
  for (double x : scores) total += std::exp(x - top);
  expect(std::fabs(lse - (top + std::log(total))) < 1e-5 * most, "lse", detail);
  for (int d = 0; d < s.dim; ++d) {
    double expected = 0, size = 0;
    for (size_t j = 0; j < scores.size(); ++j) {
      const double term = std::exp(scores[j] - top) / total * c.v.full[rows[j] + d];
      expected += term;
      size += std::fabs(term);
    }
    const double rounding = c.rounds_weights ? size / 256 : 0;
    expect(std::fabs(out[d] - expected) < tolerance + rounding, "out", detail);
  }
}

void check_list(const char* isa, const Shape& s, std::mt19937& rng, Trial trial, int lists) {
  const std::string detail = describe(isa, s, trial) + " lists=" + std::to_string(lists);
  Case c = make_case(s, rng, trial, lists);
  c.rounds_weights =
      scout::bytes_of(s.dtype) == 1 && scout::current_isa() == scout::Isa::kAvx512Bf16;
  const scout::KvPages kv{c.k.data(), c.v.data(), s.pages, s.page_size,
                          s.heads,    s.dim,      s.dtype, s.heads};
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int q_heads = s.heads * s.group / lists;
  std::vector<float> out(c.q.size(), nan), lse(q_heads, nan);
  scout::attend_sequence(scout::heads_of_list(kv, c.list, lists), c.params, c.q.data(),
                         c.ids.data(), static_cast<int>(c.ids.size()), c.last, c.last_len,
                         out.data(), lse.data());
  for (int hq = 0; hq < q_heads; ++hq)
    check_head(c, hq, &out[static_cast<size_t>(hq) * s.dim], lse[hq], detail);
}

// One list of pages for all heads, and one for each.
void check_attend(const char* isa, const Shape& s, std::mt19937& rng,
                  Trial trial = Trial::kRandom) {
  check_list(isa, s, rng, trial, 1);
  if (s.heads > 1) check_list(isa, s, rng, trial, s.heads);
}

}  // namespace

int main() {
  std::mt19937 rng(7);
  for (const char* isa : {"portable", "avx2", "avx512", "avx512bf16"}) {
    if (!scout::set_isa(isa)) continue;
    for (DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2}) {
      for (int dim : {16, 64, 80, 96, 128, 256}) {
        for (int group : {1, 2, 3, 5, 6, 7, 8, 12, 16}) {
          const int page_size = (dim + group) % 3 == 0 ? 32 : (dim + group) % 3 == 1 ? 16 : 7;
          const Shape shape{dtype, page_size, 2, dim, group, 1 + static_cast<int>(rng() % 4)};
          check_attend(isa, shape, rng);
        }
      }
      for (Trial trial : {Trial::kLargeLogits, Trial::kExtremeLogits, Trial::kIdenticalKeys,
                          Trial::kNoKeyCounts, Trial::kSomeKeysCount, Trial::kOneToken}) {
        const bool masked = trial == Trial::kNoKeyCounts || trial == Trial::kSomeKeysCount;
        if (masked && dtype == DType::kE4M3) continue;  // which has no -inf
        for (int group : {1, 4, 5}) check_attend(isa, {dtype, 16, 2, 64, group, 3}, rng, trial);
      }
    }
    // More rows than one pass holds, and pages longer than a tile.
    check_attend(isa, {DType::kBF16, 16, 40, 128, 8, 2}, rng);
    check_attend(isa, {DType::kF32, 16, 1, 256, 70, 2}, rng);
    check_attend(isa, {DType::kF16, 150, 2, 64, 5, 3}, rng);
    check_attend(isa, {DType::kBF16, 40, 32, 16, 32, 2}, rng);
  }
  if (failures == 0) std::puts("all passed");
  return failures == 0 ? 0 : 1;
}
