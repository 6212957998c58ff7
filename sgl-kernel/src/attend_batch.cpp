#include "attend_batch.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "split.h"
#include "thread_pool.h"

namespace scout {
namespace {

constexpr int kMostRuns = 16;

int64_t page_bytes(const KvPages& kv) {
  return int64_t{2} * kv.page_size * kv.kv_heads * kv.head_dim * (kv.dtype == DType::kF32 ? 4 : 2);
}

struct Columns {
  int begin, end;
};

// The columns of run `run` of `runs`: each has as many pages as the others, give or take one.
Columns columns_of(const int32_t* pages, int columns, int64_t count, uint32_t run, uint32_t runs) {
  const int64_t first = count * run / runs, end = count * (run + 1) / runs;
  Columns found{columns, columns};
  int64_t seen = 0;
  for (int i = 0; i < columns; ++i) {
    if (pages[i] < 0) continue;
    if (seen == first) found.begin = i;
    if (seen == end) {
      found.end = i;
      break;
    }
    ++seen;
  }
  if (first == end) found.begin = found.end;
  return found;
}

}  // namespace

void attend_batch(const KvPages& kv, const AttendParams& params, const AttendBatch& of,
                  int threads) {
  const uint32_t heads = static_cast<uint32_t>(kv.kv_heads) * params.group;
  const uint32_t dim = kv.head_dim;
  const uint64_t q_floats = uint64_t{heads} * dim;
  auto last_page = [&](int b) { return of.last_page != nullptr ? of.last_page[b] : -1; };
  auto last_len = [&](int b) { return of.last_len != nullptr ? of.last_len[b] : 0; };
  auto pages = [&](int b) { return of.pages + int64_t{b} * of.columns; };

  uint32_t runs = 1;
  std::unique_ptr<int64_t[]> counts;
  if (threads > 1) {
    counts.reset(new int64_t[of.batch]);
    int64_t sequences = 0, total = 0, largest = 0;
    for (int b = 0; b < of.batch; ++b) {
      counts[b] =
          std::count_if(pages(b), pages(b) + of.columns, [](int32_t id) { return id >= 0; });
      sequences += counts[b] > 0;
      total += counts[b];
      largest = std::max(largest, counts[b]);
    }
    runs =
        Split{threads, kMostRuns, least_run_pages(page_bytes(kv))}.runs(sequences, total, largest);
  }
  if (runs == 1) {
    parallel_for(of.batch, threads, [&](int b) {
      attend_sequence(kv, params, of.q + b * q_floats, pages(b), of.columns, last_page(b),
                      last_len(b), of.out + b * q_floats, of.lse + uint64_t{heads} * b);
    });
    return;
  }

  const uint64_t stride = (q_floats + heads + 15) / 16 * 16;
  std::unique_ptr<float[]> results(new float[stride * runs * of.batch]);
  std::unique_ptr<std::atomic<uint32_t>[]> done(new std::atomic<uint32_t>[of.batch]());
  parallel_for(of.batch * static_cast<int>(runs), threads, [&](int task) {
    const int b = task / static_cast<int>(runs);
    const uint32_t run = task % runs;
    float* const result = results.get() + stride * task;
    const Columns mine = columns_of(pages(b), of.columns, counts[b], run, runs);
    const bool with_last = run + 1 == runs && last_page(b) >= 0;
    if (mine.begin == mine.end && !with_last) {
      std::fill_n(result + q_floats, heads, -INFINITY);
    } else {
      attend_sequence(kv, params, of.q + b * q_floats, pages(b) + mine.begin, mine.end - mine.begin,
                      with_last ? last_page(b) : -1, with_last ? last_len(b) : 0, result,
                      result + q_floats);
    }
    if (done[b].fetch_add(1, std::memory_order_acq_rel) + 1 == runs)
      merge_runs(heads, dim, runs, results.get() + stride * runs * b, stride, of.out + b * q_floats,
                 of.lse + uint64_t{heads} * b);
  });
}

}  // namespace scout
