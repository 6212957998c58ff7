#include <algorithm>
#include <atomic>
#include <cmath>
#include <memory>

#include "attend.h"
#include "isa.h"
#include "split.h"
#include "thread_pool.h"

namespace scout {
namespace {

constexpr int kMaxBatchSplits = 16;

struct Columns {
  int begin, end;
};

// The columns of one of `splits`: each has as many pages as the others, give or take one.
Columns columns_of(const int32_t* pages, int columns, int64_t count, uint32_t split,
                   uint32_t splits) {
  const int64_t first = count * split / splits, end = count * (split + 1) / splits;
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

void attend_sequence(const KvPages& kv, const AttendParams& params, const float* q,
                     const int32_t* pages, int32_t n, int32_t last_page, int32_t last_len,
                     float* out, float* lse) {
  const AttendArgs args{&kv, &params, q, pages, n, last_page, last_len, out, lse};
#ifdef SCOUT_AVX512
  const Isa isa = current_isa();
  // A row of AVX-512 pairs is 32 elements; the odd multiples of 16 take the narrower kernel.
  if (isa >= Isa::kAvx512 && kv.head_dim % 32 == 0) {
    // Its steps are lines: of fp8 64 elements.
    const bool lines =
        kv.dtype == DType::kBF16 || (bytes_of(kv.dtype) == 1 && kv.head_dim % 64 == 0);
    if (isa == Isa::kAvx512Bf16 && lines) return attend_avx512bf16(args);
    return attend_avx512(args);
  }
#endif
  attend_avx2(args);
}

void attend_batch(const KvPages& kv, const AttendParams& params, const AttendBatch& of,
                  int threads) {
  const int lists = of.lists, rows = of.batch * lists;
  const uint32_t heads = static_cast<uint32_t>(kv.kv_heads / lists) * params.group;  // of a row
  const uint32_t dim = kv.head_dim;
  const uint64_t q_floats = uint64_t{heads} * dim;
  auto last_page = [&](int r) { return of.last_page != nullptr ? of.last_page[r / lists] : -1; };
  auto last_len = [&](int r) { return of.last_len != nullptr ? of.last_len[r / lists] : 0; };
  auto pages = [&](int r) { return of.pages + int64_t{r} * of.columns; };

  uint32_t splits = 1;
  std::unique_ptr<int64_t[]> counts;
  if (threads > 1) {
    counts.reset(new int64_t[rows]);
    int64_t sequences = 0, total = 0, largest = 0;
    for (int r = 0; r < rows; ++r) {
      counts[r] =
          std::count_if(pages(r), pages(r) + of.columns, [](int32_t id) { return id >= 0; });
      sequences += counts[r] > 0;
      total += counts[r];
      largest = std::max(largest, counts[r]);
    }
    const int64_t page_bytes = 2 * kv.page_size * (kv.kv_heads / lists) * head_bytes(kv);
    splits = Split{threads, kMaxBatchSplits, min_split_pages(page_bytes)}.splits(sequences, total,
                                                                                 largest);
  }
  if (splits == 1) {
    parallel_for(rows, threads, [&](int r) {
      attend_sequence(heads_of_list(kv, r % lists, lists), params, of.q + r * q_floats, pages(r),
                      of.columns, last_page(r), last_len(r), of.out + r * q_floats,
                      of.lse + uint64_t{heads} * r);
    });
    return;
  }

  const uint64_t stride = (q_floats + heads + 15) / 16 * 16;
  std::unique_ptr<float[]> results(new float[stride * splits * rows]);
  std::unique_ptr<std::atomic<uint32_t>[]> done(new std::atomic<uint32_t>[rows]());
  parallel_for(rows * static_cast<int>(splits), threads, [&](int task) {
    const int r = task / static_cast<int>(splits);
    const uint32_t split = task % splits;
    float* const result = results.get() + stride * task;
    const Columns mine = columns_of(pages(r), of.columns, counts[r], split, splits);
    const bool with_last = split + 1 == splits && last_page(r) >= 0;
    if (mine.begin == mine.end && !with_last) {
      std::fill_n(result + q_floats, heads, -INFINITY);
    } else {
      attend_sequence(heads_of_list(kv, r % lists, lists), params, of.q + r * q_floats,
                      pages(r) + mine.begin, mine.end - mine.begin, with_last ? last_page(r) : -1,
                      with_last ? last_len(r) : 0, result, result + q_floats);
    }
    if (done[r].fetch_add(1, std::memory_order_acq_rel) + 1 == splits)
      merge_splits(heads, dim, splits, results.get() + stride * splits * r, stride,
                   of.out + r * q_floats, of.lse + uint64_t{heads} * r);
  });
}

}  // namespace scout
