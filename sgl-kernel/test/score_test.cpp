// Checks page digests and their scores without Python, for sanitizer builds (scripts/sanitize.sh).
// Every buffer is a heap block of exactly its size, so reading or writing beyond one is caught.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "isa.h"
#include "pages.h"
#include "score_cpu.h"
#include "tensors.h"

namespace {

using scout::Reduce;

constexpr int kTokens = scout::kRotatedTokens;

// The inputs for scoring the pages of a sequence.
struct Case {
  Shape shape;
  int query_heads;
  float scale;
  std::vector<float> q;
  std::vector<int32_t> table;
  int32_t n_full;
};

// The last page is not in any table.
Case make_case(const Shape& s, std::mt19937& rng, float q_factor = 1.0f) {
  Case c{s, s.heads * s.group, 1.0f / std::sqrt(static_cast<float>(s.dim)), {}, {}, 0};
  std::normal_distribution<float> normal;
  c.q.resize(c.query_heads * s.dim);
  for (float& x : c.q) x = q_factor * normal(rng);
  c.table.resize(1 + rng() % 40);
  for (int32_t& page : c.table) page = static_cast<int32_t>(rng() % s.pages) - 1;
  c.n_full = static_cast<int32_t>(rng() % (c.table.size() + 1));
  return c;
}

std::string describe(const char* kind, const char* isa, const Case& c) {
  char text[96];
  std::snprintf(text, sizeof text, "%s %s dtype=%d S=%d H=%d D=%d G=%d N=%zu n_full=%d", kind, isa,
                static_cast<int>(c.shape.dtype), c.shape.page_size, c.shape.heads, c.shape.dim,
                c.shape.group, c.table.size(), c.n_full);
  return text;
}

// One number per query head and page: the log of the page's mass, or its upper bound; or the
// weight (worth) of that mass.
using Logs = std::vector<std::vector<double>>;

double log_sum(const std::vector<double>& x) {
  if (x.empty()) return -INFINITY;
  const double top = *std::max_element(x.begin(), x.end());
  double total = 0;
  for (double v : x) total += std::exp(v - top);
  return top + std::log(total);
}

std::vector<double> reduced(const Case& c, const Logs& logs, const Logs& worth, Reduce reduce) {
  std::vector<double> masses, out(c.table.size(), -INFINITY);
  std::vector<size_t> columns;
  for (int32_t n = 0; n < c.n_full; ++n)
    if (c.table[n] >= 0) columns.push_back(n);
  for (size_t h = 0; h < logs.size(); ++h) {
    const std::vector<double>& u = logs[h];
    std::vector<double> listed;
    for (size_t n : columns) listed.push_back(u[c.table[n]]);
    masses.push_back(log_sum(listed));
    for (size_t n : columns) {
      const double share = u[c.table[n]] - masses.back();
      out[n] = reduce == Reduce::kMax ? std::max(out[n], share)
                                      : std::max(out[n], 0.0) + std::exp(share) * worth[h][c.table[n]];
    }
  }
  return reduce == Reduce::kLogMass ? masses : out;
}

// Runs a kernel and checks it against logs, with an error of up to `error` in each; worth <= most.
template <class Run>
void check_scores(const Case& c, const Logs& logs, const Logs& worth, double most, Reduce reduce,
                  double error, size_t floats, const Run& run, const std::string& detail,
                  std::mt19937& rng) {
  const size_t before = rng() % 16;  // scratch at any offset in a line
  std::vector<float> scratch(before + floats, NAN);
  const std::vector<double> expected = reduced(c, logs, worth, reduce);
  std::vector<float> out(expected.size(), NAN);
  run(scout::ScoreArgs{c.shape.group, c.scale, reduce, c.q.data(), c.table.data(), c.n_full,
                       static_cast<int32_t>(c.table.size()), scratch.data() + before, out.data()});
  for (size_t n = 0; n < out.size(); ++n) {
    double tolerance = 2 * error;
    if (reduce == Reduce::kMass)  // if logs may be far off, any page may have all mass
      tolerance =
          (error < 1 ? expected[n] * std::expm1(4 * error) : 0) +
          most * c.query_heads * (error < 1 ? 1e-5 : 1);
    const bool right = out[n] == expected[n] || std::fabs(out[n] - expected[n]) <= tolerance;
    expect(right, "score", detail + " reduce=" + std::to_string(static_cast<int>(reduce)));
  }
}

constexpr DType kOfFp8[] = {DType::kF32, DType::kBF16, DType::kF16};  // digests of its pages

void check_bounds(const char* isa, const Shape& s, std::mt19937& rng) {
  const Case c = make_case(s, rng);
  const int columns = s.heads * s.dim;
  const Tensor k = random_tensor(s.pages * s.page_size * columns, s.dtype, rng);
  const DType to = scout::bytes_of(s.dtype) == 1 ? kOfFp8[rng() % 3] : s.dtype;
  const size_t bytes = s.pages * columns * scout::bytes_of(to);
  std::vector<char> kmin(bytes), kmax(bytes);
  std::vector<int64_t> ids(s.pages);
  for (int i = 0; i < s.pages; ++i) ids[i] = s.pages - 1 - i;
  scout::digest_pages(k.data(), s.page_size, s.heads, s.dim, s.dtype, ids.data(), s.pages, to,
                      kmin.data(), kmax.data());
  Logs bounds(c.query_heads, std::vector<double>(s.pages, 0.0));
  for (int hq = 0; hq < c.query_heads; ++hq) {
    for (int i = 0; i < s.pages * s.dim; ++i) {
      const int p = i / s.dim, d = i % s.dim;
      const float* const k_d = &k.full[p * s.page_size * columns + hq / s.group * s.dim + d];
      double most = -INFINITY;
      for (int t = 0; t < s.page_size; ++t)
        most = std::max(most, double{c.q[hq * s.dim + d]} * k_d[t * columns]);
      bounds[hq][p] += c.scale * most;
    }
  }
  const scout::Digests digests{kmin.data(), kmax.data(), to, s.heads, s.dim};
  const auto run = [&](const scout::ScoreArgs& args) { scout::score_sequence(digests, args); };
  const size_t floats = scout::score_scratch_floats(c.query_heads, s.dim, c.table.size());
  const Logs one(c.query_heads, std::vector<double>(s.pages, 1.0));
  for (Reduce reduce : {Reduce::kMass, Reduce::kMax})
    check_scores(c, bounds, one, 1, reduce, 1e-5, floats, run, describe("bounds", isa, c), rng);
}

// R x, as in ops/rotated.py.
void rotate(double* x, int dim) {
  const int width = dim & -dim;
  for (int d = 0; d < dim; ++d) x[d] *= ((d + 1) * 0x9E3779B1u >> 31 ? -1 : 1) / std::sqrt(width);
  for (int half = 1; half < width; half *= 2) {
    for (int d = 0; d < dim; ++d) {
      if (!(d & half)) continue;
      const double low = x[d - half];
      x[d - half] += x[d];
      x[d] = low - x[d];
    }
  }
}

size_t stats_bytes(int dim) { return dim + 112; }

// The rotated keys [32, D] that the digest of a page and KV head stores.
std::vector<double> decoded(const scout::RotatedDigests& r, size_t row) {
  const int dim = r.head_dim, plane = 4 * dim;
  const uint8_t* const planes = r.planes + row * 2 * plane;
  const uint8_t* const stats = r.stats + row * stats_bytes(dim);
  uint16_t scales[kTokens];
  float step;
  std::memcpy(scales, stats + dim, sizeof scales);
  std::memcpy(&step, stats + dim + sizeof scales, sizeof step);
  std::vector<double> x(kTokens * dim);
  for (int t = 0; t < kTokens; ++t) {
    for (int d = 0; d < dim; ++d) {
      const uint8_t* const byte = planes + t % 16 * (dim / 4) + d / 4;
      const auto sign = [&](int i) { return byte[i * plane] >> (t / 16 * 4 + d % 4) & 1 ? 1 : -1; };
      const double level = 0.98160 * sign(0) + 0.52880 * sign(1);
      x[t * dim + d] = static_cast<int8_t>(stats[d]) * double{step} + bf16_value(scales[t]) * level;
    }
  }
  return x;
}

// log masses from the digests; `worth` gets the mean value norm under a page's softmax, and `size`
// the largest logit of a token.
Logs rotated_logs(const Case& c, const scout::RotatedDigests& r, Logs& worth, double& size) {
  const int dim = r.head_dim;
  const double largest = 0x1p50 * std::log(2.0);  // the kernels count in units of log 2
  std::vector<double> q(c.q.begin(), c.q.end());
  for (double& x : q) x = std::clamp(x * c.scale, -largest, largest);
  for (size_t i = 0; i < q.size(); i += dim) rotate(&q[i], dim);
  Logs logs(c.query_heads, std::vector<double>(c.shape.pages));
  for (int row = 0; row < (c.shape.pages - 1) * r.kv_heads; ++row) {
    const std::vector<double> keys = decoded(r, row);
    const uint8_t* const rest = r.stats + row * stats_bytes(dim) + dim;
    float norm_step;
    std::memcpy(&norm_step, rest + 68, sizeof norm_step);
    for (int g = 0; g < c.shape.group; ++g) {
      const int hq = row % r.kv_heads * c.shape.group + g;
      std::vector<double> logits(kTokens);
      for (int t = 0; t < kTokens; ++t) {
        logits[t] = std::inner_product(&q[hq * dim], &q[hq * dim] + dim, &keys[t * dim], 0.0);
        size = std::max(size, std::fabs(logits[t]));
      }
      const double log_mass = log_sum(logits);
      logs[hq][row / r.kv_heads] = log_mass;
      double& mean = worth[hq][row / r.kv_heads];
      for (int t = 0; t < kTokens; ++t)
        mean += std::exp(logits[t] - log_mass) * rest[72 + t] * double{norm_step};
    }
  }
  return logs;
}

// A value in fp32 and in fp16 for every `every`-th element of K.
struct Special {
  float full;
  uint16_t half;
  int every;
};

// Two bits; test/ops has calibrated coordinates too.
void check_rotated(const char* isa, const Shape& s, std::mt19937& rng, const Special& special = {},
                   float q_factor = 1.0f) {
  const Case c = make_case(s, rng, q_factor);
  const std::string detail =
      describe("rotated", isa, c) + " keys=" + std::to_string(special.full);
  Tensor k = random_tensor(s.pages * kTokens * s.heads * s.dim, s.dtype, rng);
  for (size_t i = 0; special.every && i < k.full.size(); i += special.every) {
    k.full[i] = special.full;
    if (!k.half.empty())
      k.half[i] = s.dtype == DType::kF16 ? special.half : bf16_bits(special.full);
  }
  const size_t rows = s.pages * s.heads;
  const Tensor v = random_tensor(k.full.size(), s.dtype, rng);
  std::vector<uint8_t> planes(rows * 8 * s.dim), stats(rows * stats_bytes(s.dim));
  std::vector<int64_t> ids(s.pages - 1);
  for (int i = 0; i < s.pages - 1; ++i) ids[i] = s.pages - 2 - i;
  scout::rotate_pages({k.data(), v.data(), s.dtype, ids.data(), s.pages - 1, planes.data(),
                       stats.data(), {}, s.heads, s.dim});
  const scout::RotatedDigests digests{planes.data(), stats.data(), {}, s.heads, s.dim};
  double size = 1;
  Logs worth(c.query_heads, std::vector<double>(s.pages, 0.0));
  const Logs logs = rotated_logs(c, digests, worth, size);
  // The portable kernel does not round queries to 8 bits.
  const double error = size * (std::strcmp(isa, "portable") == 0 ? 1e-3 : 2e-2);
  const auto run = [&](const scout::ScoreArgs& args) { score_rotated_sequence(digests, args); };
  const size_t floats = scout::rotated_scratch_floats(c.query_heads, s.dim, c.table.size());
  for (Reduce reduce : {Reduce::kMass, Reduce::kMax, Reduce::kLogMass})
    check_scores(c, logs, worth, 255 * 2.0 * std::sqrt(s.dim), reduce, error, floats, run, detail,
                 rng);
}

}  // namespace

int main() {
  std::mt19937 rng(7);
  const Special specials[] = {{0, 0, 1},           {1.5f, 0x3e00, 1},     {3e38f, 0x7bff, 1},
                              {-3e38f, 0xfbff, 3}, {INFINITY, 0x7c00, 3}, {-INFINITY, 0xfc00, 3},
                              {NAN, 0x7e00, 3}};
  for (const char* isa : {"portable", "avx2", "avx512"}) {
    if (!scout::set_isa(isa)) continue;
    for (DType dtype :
         {DType::kF32, DType::kBF16, DType::kF16, DType::kE4M3, DType::kE5M2}) {
      for (int dim : {16, 64, 80, 96, 128, 256})
        for (int group : {1, 2, 3, 5})
          check_bounds(isa, {dtype, (dim / 16 + group) % 2 ? 7 : 32, 2, dim, group, 4}, rng);
      for (int dim : {16, 48, 80, 128, 1024})
        for (int group : {1, 3, 4, 5, 8})
          check_rotated(isa, {dtype, kTokens, 2, dim, group, 4}, rng);
      if (scout::bytes_of(dtype) == 1) continue;
      for (const Special& special : specials)
        for (float q_factor : {1.0f, 1e30f})
          check_rotated(isa, {dtype, kTokens, 2, 80, 5, 4}, rng, special, q_factor);
    }
  }
  if (failures == 0) std::puts("all passed");
  return failures == 0 ? 0 : 1;
}
