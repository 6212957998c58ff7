// Python module sglang_scout._native: attention and scores; see bind_*.cpp for the rest. Calls
// release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>

#include "attend.h"
#include "isa.h"
#include "score.h"
#include "split.h"
#include "tensors.h"
#include "thread_pool.h"

namespace nb = nanobind;

void bind_pages(nb::module_& m);
void bind_residency(nb::module_& m);
void bind_runtime(nb::module_& m);

namespace {

using scout::AnyIn;
using scout::DType;
using scout::dtype_of;
using scout::expect_shape;
using scout::In;
using scout::Out;
using scout::require;
using scout::require_lazily;
using scout::sizes;

// Returns G, the query heads of a KV head.
int group_of(const char* op, int64_t q_heads, int64_t heads, int64_t dim, int64_t end) {
  require_lazily(op, heads > 0 && q_heads % heads == 0 && dim > 0 && dim % 16 == 0 && dim <= end,
                 [&] {
                   return "HQ=" + std::to_string(q_heads) + " H=" + std::to_string(heads) +
                          " D=" + std::to_string(dim) +
                          "; expected whole groups of query heads, D a multiple of 16 up to " +
                          std::to_string(end);
                 });
  return static_cast<int>(q_heads / heads);
}

void attend_batch(const In<float, 3>& q, const AnyIn<4>& k, const AnyIn<4>& v,
                  const In<int32_t, 2>& pages, const std::optional<In<int32_t, 1>>& last_page,
                  const std::optional<In<int32_t, 1>>& last_len, float scale,
                  const Out<float, 3>& out, const Out<float, 2>& lse, int threads) {
  const char* const op = "attend_batch";
  const auto [B, HQ, D] = sizes<3>(q);
  const auto [P, S, H, K] = sizes<4>(k);
  const auto [rows, columns] = sizes<2>(pages);
  const int group = group_of(op, HQ, H, D, 16384);
  const int64_t lists = B > 0 ? rows / B : 1;
  const DType type = dtype_of(op, k.dtype());
  require(op, lists == 1 || lists == H, "expected 1 or H page lists per request");
  require(op, S > 0 && v.dtype() == k.dtype(), "k and v differ, or have no tokens");
  require(op, last_page.has_value() == last_len.has_value(),
          "last_page and last_len must be given together");
  expect_shape(op, "k", k, {P, S, H, D});
  expect_shape(op, "v", v, {P, S, H, D});
  expect_shape(op, "pages", pages, {B * lists, columns});
  expect_shape(op, "out", out, {B, HQ, D});
  expect_shape(op, "lse", lse, {B, HQ});
  scout::expect_ids(op, "pages", pages.data(), rows * columns, P, true);
  if (last_page) {
    expect_shape(op, "last_page", *last_page, {B});
    expect_shape(op, "last_len", *last_len, {B});
    for (int64_t b = 0; b < B; ++b) {
      const int32_t id = last_page->data()[b], length = last_len->data()[b];
      require_lazily(op, id < 0 || (id < P && length >= 1 && length <= S), [&] {
        return "request " + std::to_string(b) + " has last_page=" + std::to_string(id) +
               " last_len=" + std::to_string(length) + "; expected a page below " +
               std::to_string(P) + " and a length in 1.." + std::to_string(S);
      });
    }
  }
  const auto to_int = [](int64_t size) { return static_cast<int>(size); };
  scout::attend_batch({k.data(), v.data(), P, to_int(S), to_int(H), to_int(D), type, to_int(H)},
                      {group, scale},
                      {q.data(), pages.data(), to_int(B), to_int(columns), to_int(lists),
                       last_page ? last_page->data() : nullptr,
                       last_len ? last_len->data() : nullptr, out.data(), lse.data()},
                      threads);
}

// Thread-local; grows to the largest size requested.
float* scratch(size_t floats) {
  thread_local std::unique_ptr<float[]> buffer;
  thread_local size_t capacity = 0;
#ifdef __SANITIZE_ADDRESS__
  capacity = 0;  // it is as large as requested: an access beyond is found
#endif
  if (floats > capacity) {
    buffer.reset(new float[floats]);
    capacity = floats;
  }
  return buffer.get();
}

// Scores of the pages of B requests: score(arguments of one) for each, with `results` numbers in
// out.
template <class Score>
void score_requests(const char* op, const In<float, 3>& q, const In<int32_t, 2>& table,
                    const In<int32_t, 1>& n_full, int64_t pages, const Out<float, 2>& out,
                    int64_t results, size_t floats, scout::ScoreArgs args, int threads,
                    const Score& score) {
  const auto [B, HQ, D] = sizes<3>(q);
  const int64_t columns = table.shape(1), q_floats = HQ * D;
  expect_shape(op, "table", table, {B, columns});
  expect_shape(op, "n_full", n_full, {B});
  expect_shape(op, "out", out, {B, results});
  const int32_t *const ids = table.data(), *const counts = n_full.data();
  for (int64_t b = 0; b < B; ++b) {
    require_lazily(op, counts[b] >= 0 && counts[b] <= columns, [&] {
      return "n_full[" + std::to_string(b) + "]=" + std::to_string(counts[b]) + " is outside 0.." +
             std::to_string(columns);
    });
    scout::expect_ids(op, "table", ids + b * columns, counts[b], pages, true);
  }
  scout::parallel_for(static_cast<int>(B), threads, [&](int b) {
    scout::ScoreArgs own = args;
    own.q = q.data() + b * q_floats;
    own.table = ids + b * columns;
    own.n_full = counts[b];
    own.columns = static_cast<int>(columns);
    own.scratch = scratch(floats);
    own.out = out.data() + b * results;
    score(own);
  });
}

void score_pages(const In<float, 3>& q, const AnyIn<3>& kmin, const AnyIn<3>& kmax,
                 const In<int32_t, 2>& table, const In<int32_t, 1>& n_full, float scale,
                 const Out<float, 2>& out, int threads) {
  const char* const op = "score_pages";
  const int64_t P = kmin.shape(0), H = kmin.shape(1), HQ = q.shape(1), D = q.shape(2);
  const int columns = static_cast<int>(table.shape(1)), group = group_of(op, HQ, H, D, 16384);
  const DType type = dtype_of(op, kmin.dtype());
  require(op, scout::bytes_of(type) > 1 && kmax.dtype() == kmin.dtype(),
          "expected kmin and kmax of 16 or 32 bits");
  expect_shape(op, "kmin", kmin, {P, H, D});
  expect_shape(op, "kmax", kmax, {P, H, D});
  const scout::Digests digests{kmin.data(), kmax.data(), type, static_cast<int>(H),
                               static_cast<int>(D)};
  score_requests(op, q, table, n_full, P, out, columns,
                 scout::score_scratch_floats(static_cast<int>(HQ), static_cast<int>(D), columns),
                 {group, scale, false}, threads,
                 [&](const scout::ScoreArgs& args) { scout::score_sequence(digests, args); });
}

void score_rotated(const In<float, 3>& q, const In<uint8_t, 5>& planes, const In<uint8_t, 3>& stats,
                   const In<int32_t, 2>& table, const In<int32_t, 1>& n_full, float scale,
                   bool log_masses, const Out<float, 2>& out, int threads) {
  const char* const op = "score_rotated";
  const int64_t P = planes.shape(0), H = planes.shape(1), HQ = q.shape(1), D = q.shape(2);
  const int columns = static_cast<int>(table.shape(1));
  const int group = group_of(op, HQ, H, D, scout::kRotatedMaxDim);
  expect_shape(op, "planes", planes, {P, H, 2, 16, D / 4});
  expect_shape(op, "stats", stats, {P, H, D + scout::kStatsBytes});
  const scout::RotatedDigests digests{planes.data(), stats.data(), static_cast<int>(H),
                                      static_cast<int>(D)};
  score_requests(op, q, table, n_full, P, out, log_masses ? HQ : columns,
                 scout::rotated_scratch_floats(static_cast<int>(HQ), static_cast<int>(D), columns),
                 {group, scale, log_masses}, threads, [&](const scout::ScoreArgs& args) {
                   scout::score_rotated_sequence(digests, args);
                 });
}

}  // namespace

NB_MODULE(_native, m) {
  if (!scout::has_avx2())
    throw std::runtime_error("this CPU has no AVX2, FMA or F16C, which sglang-scout needs");
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  m.doc() = "CPU kernels, ring and residency of sglang_scout.";
  m.def("attend_batch", &attend_batch, no_gil,
        "Attention of each request over its lists of pages (-1: none) and an optional partial last "
        "page; see ops/attend.py.");
  m.def("score_pages", &score_pages, no_gil,
        "Quest bounds of the first n_full pages of each request, reduced over the query heads.");
  m.def("score_rotated", &score_rotated, no_gil,
        "Scores of the first n_full pages of each request by their rotated digests, or log masses "
        "of its query heads.");
  m.attr("SPLITS_PER_THREAD") = scout::kSplitsPerThread;
  m.def(
      "splits_of",
      [](int32_t threads, int32_t max_splits, int32_t min_pages, int64_t sequences, int64_t total,
         int64_t largest) {
        return scout::Split{threads, max_splits, min_pages}.splits(sequences, total, largest);
      },
      "Splits of each of so many sequences with pages; see split.h.");
  m.def(
      "isa", [] { return scout::isa_name(scout::current_isa()); },
      "Instruction set in use: avx512bf16, avx512 or avx2.");
  m.def(
      "best_isa", [] { return scout::isa_name(scout::best_isa()); },
      "The best instruction set that this machine supports.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        require_lazily("set_isa", scout::set_isa(name.c_str()),
                       [&] { return name + " is unknown or not supported by this machine"; });
      },
      "Use another instruction set from the next call on, for tests and benchmarks.");
  bind_pages(m);
  bind_residency(m);
  bind_runtime(m);
}
