// Python module sglang_scout._native. Tensors are passed as addresses and sizes, in the order of
// the functions below; callers check them (ops/op.py, ops/native.py), except page ids, which are
// checked here. Calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

#include "isa.h"
#include "pages.h"
#include "score_cpu.h"
#include "scout/attend.h"
#include "split.h"
#include "thread_pool.h"

namespace nb = nanobind;

void bind_residency(nb::module_& m);
void bind_runtime(nb::module_& m);

namespace {

using scout::DType;

template <typename T>
T* at(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// For checks in loops over pages: the message is only built on failure.
template <class Message>
void require_lazily(bool condition, const Message& message) {
  if (!condition) throw std::invalid_argument(message());
}

void require(bool condition, const std::string& message) {
  if (!condition) throw nb::value_error(message.c_str());
}

void check_shape(const char* op, int page_size, int heads, int dim, int group, int end = 16384) {
  require(page_size > 0 && heads > 0 && group > 0 && dim > 0 && dim % 16 == 0 && dim <= end,
          std::string(op) + ": S=" + std::to_string(page_size) + " H=" + std::to_string(heads) +
              " G=" + std::to_string(group) + " D=" + std::to_string(dim) +
              "; all must be positive, D a multiple of 16 up to " + std::to_string(end));
}

void attend_batch(uintptr_t q, uintptr_t k, uintptr_t v, int64_t num_pages, int page_size,
                  int heads, int dim, int dtype, int group, float scale, uintptr_t pages, int batch,
                  int lists, int columns, uintptr_t last_page, uintptr_t last_len, uintptr_t out,
                  uintptr_t lse, int threads) {
  check_shape("attend_batch", page_size, heads, dim, group);
  const scout::KvPages kv{at<const void>(k),
                          at<const void>(v),
                          num_pages,
                          page_size,
                          heads,
                          dim,
                          static_cast<DType>(dtype),
                          heads};
  const int32_t* const ids = at<const int32_t>(pages);
  const int32_t* const last_ids = at<const int32_t>(last_page);
  const int32_t* const last_lens = at<const int32_t>(last_len);
  for (int64_t i = 0; i < int64_t{batch} * lists * columns; ++i) {
    require_lazily(ids[i] < num_pages, [&] {
      return "attend_batch: a page id of row " + std::to_string(i / columns) +
             " is not below num_pages=" + std::to_string(num_pages);
    });
  }
  for (int b = 0; b < batch; ++b) {
    if (last_ids == nullptr || last_ids[b] < 0) continue;
    require_lazily(last_ids[b] < num_pages && last_lens[b] >= 1 && last_lens[b] <= page_size, [&] {
      return "attend_batch: request " + std::to_string(b) +
             " has last_page=" + std::to_string(last_ids[b]) +
             " last_len=" + std::to_string(last_lens[b]) + "; expected a page below " +
             std::to_string(num_pages) + " and a length in 1.." + std::to_string(page_size);
    });
  }
  scout::attend_batch(kv, {group, scale},
                      {at<const float>(q), ids, batch, columns, lists, last_ids, last_lens,
                       at<float>(out), at<float>(lse)},
                      threads);
}

void copy_pages(uintptr_t src, uintptr_t dst, int64_t page_bytes, uintptr_t src_ids,
                uintptr_t dst_ids, int64_t n) {
  scout::copy_pages(at<const void>(src), at<void>(dst), page_bytes, at<const int64_t>(src_ids),
                    at<const int64_t>(dst_ids), n);
}

void digest_pages(uintptr_t k, int page_size, int heads, int dim, int dtype, uintptr_t ids,
                  int64_t n, int digest_dtype, uintptr_t values, uintptr_t kmin, uintptr_t kmax) {
  check_shape("digest_pages", page_size, heads, dim, 1);
  scout::digest_pages(at<const void>(k), page_size, heads, dim, static_cast<DType>(dtype),
                      at<const int64_t>(ids), n, static_cast<DType>(digest_dtype),
                      at<const void>(values), at<void>(kmin), at<void>(kmax));
}

scout::Coordinates coordinates(uintptr_t turn, uintptr_t bits) {
  return {at<const float>(turn), at<const float>(bits)};
}

void rotate_pages(uintptr_t k, uintptr_t v, int heads, int dim, int dtype, uintptr_t ids, int64_t n,
                  uintptr_t planes, uintptr_t stats, uintptr_t turn, uintptr_t bits) {
  check_shape("rotate_pages", scout::kRotatedTokens, heads, dim, 1, scout::kRotatedMaxDim);
  scout::rotate_pages({at<const void>(k), at<const void>(v), static_cast<DType>(dtype),
                       at<const int64_t>(ids), n, at<uint8_t>(planes), at<uint8_t>(stats),
                       coordinates(turn, bits), heads, dim});
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

void check_tables(const char* op, const int32_t* ids, const int32_t* counts, int batch, int columns,
                  int64_t num_pages) {
  const std::string name = op;
  for (int b = 0; b < batch; ++b) {
    require_lazily(counts[b] >= 0 && counts[b] <= columns, [&] {
      return name + ": n_full[" + std::to_string(b) + "]=" + std::to_string(counts[b]) +
             " is outside 0.." + std::to_string(columns);
    });
    for (int i = 0; i < counts[b]; ++i) {
      const int32_t page = ids[static_cast<int64_t>(b) * columns + i];
      require_lazily(page < num_pages, [&] {
        return name + ": table[" + std::to_string(b) + ", " + std::to_string(i) +
               "]=" + std::to_string(page) + " is not below P=" + std::to_string(num_pages);
      });
    }
  }
}

void score_pages(uintptr_t q, uintptr_t kmin, uintptr_t kmax, int dtype, int64_t num_pages,
                 int heads, int group, int dim, uintptr_t table, uintptr_t n_full, int batch,
                 int columns, float scale, uintptr_t out, int threads) {
  check_shape("score_pages", 1, heads, dim, group);
  const scout::Digests digests{at<const void>(kmin), at<const void>(kmax),
                               static_cast<DType>(dtype), heads, dim};
  const int32_t* const ids = at<const int32_t>(table);
  const int32_t* const counts = at<const int32_t>(n_full);
  check_tables("score_pages", ids, counts, batch, columns, num_pages);
  const int64_t q_heads = static_cast<int64_t>(heads) * group;
  const size_t floats = scout::score_scratch_floats(heads * group, dim, columns);
  scout::parallel_for(batch, threads, [&](int b) {
    const int64_t row = static_cast<int64_t>(b) * columns;
    scout::score_sequence(
        digests, {group, scale, false, at<const float>(q) + b * q_heads * dim, ids + row, counts[b],
                  columns, scratch(floats), at<float>(out) + row});
  });
}

void score_rotated(uintptr_t q, uintptr_t planes, uintptr_t stats, int64_t num_pages, int heads,
                   int group, int dim, uintptr_t table, uintptr_t n_full, int batch, int columns,
                   float scale, bool log_masses, uintptr_t out, int threads, uintptr_t turn,
                   uintptr_t bits) {
  check_shape("score_rotated", scout::kRotatedTokens, heads, dim, group, scout::kRotatedMaxDim);
  const int64_t results = log_masses ? heads * group : columns;
  const scout::RotatedDigests digests{at<const uint8_t>(planes), at<const uint8_t>(stats),
                                      coordinates(turn, bits), heads, dim};
  const int32_t* const ids = at<const int32_t>(table);
  const int32_t* const counts = at<const int32_t>(n_full);
  check_tables("score_rotated", ids, counts, batch, columns, num_pages);
  const int64_t q_heads = static_cast<int64_t>(heads) * group;
  const size_t floats = scout::rotated_scratch_floats(heads * group, dim, columns);
  scout::parallel_for(batch, threads, [&](int b) {
    const int64_t row = static_cast<int64_t>(b) * columns;
    scout::score_rotated_sequence(
        digests, {group, scale, log_masses, at<const float>(q) + b * q_heads * dim, ids + row,
                  counts[b], columns, scratch(floats), at<float>(out) + b * results});
  });
}

}  // namespace

NB_MODULE(_native, m) {
  if (!scout::has_avx2())
    throw std::runtime_error("this CPU has no AVX2, FMA or F16C, which sglang-scout needs");
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  m.doc() = "CPU kernels of sglang_scout over raw addresses; see sglang_scout.ops.native.";
  m.def("attend_batch", &attend_batch, no_gil,
        "Attention of B requests over C lists of R pages (-1: none) and an optional partial last "
        "page.");
  m.def("copy_pages", &copy_pages, no_gil,
        "dst[dst_ids[i]] = src[src_ids[i]] for n pages of page_bytes; int64 ids, not checked.");
  m.def("digest_pages", &digest_pages, no_gil,
        "Column minimum and maximum of K of n pages, to rows ids[i]; int64 ids, not checked.");
  m.def("score_pages", &score_pages, no_gil,
        "Quest bounds of the first n_full pages of B sequences, reduced over the query heads.");
  m.def("rotate_pages", &rotate_pages, no_gil,
        "Rotated digests of n pages of 32 tokens, to rows ids[i]; int64 ids, not checked.");
  m.def("score_rotated", &score_rotated, no_gil,
        "Scores of the first n_full pages of B sequences by their rotated digests, or log masses.");
  m.attr("RUNS_PER_THREAD") = scout::kRunsPerThread;
  m.def(
      "split_runs",
      [](int32_t threads, int32_t most, int32_t least_pages, int64_t sequences, int64_t total,
         int64_t largest) {
        return scout::Split{threads, most, least_pages}.runs(sequences, total, largest);
      },
      "Runs that each of so many sequences with pages is split into; see split.h.");
  m.def(
      "isa", [] { return scout::isa_name(scout::current_isa()); },
      "Instruction set in use: avx512bf16, avx512 or avx2.");
  m.def(
      "best_isa", [] { return scout::isa_name(scout::best_isa()); },
      "The best instruction set that this machine supports.");
  m.def(
      "set_isa",
      [](const std::string& name) {
        require(scout::set_isa(name.c_str()),
                "set_isa: " + name + " is unknown or not supported by this machine");
      },
      "Use another instruction set from the next call on, for tests and benchmarks.");
  bind_residency(m);
  bind_runtime(m);
}
