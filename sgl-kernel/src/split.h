// Into how many runs the pages of a batch's sequences are split, one thread a run; and the merge of
// what the threads found.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace scout {

// Of a record, at most, where its sequences are split: more would make no difference but in memory.
constexpr int64_t kRunsPerThread = 16;

// Rule for the number of runs that each sequence's pages are split into, one thread a run.
//
// Threads take runs one after the other, so N sequences in R runs each take ceil(N R / threads)
// rounds. With P pages altogether and L in the longest sequence a round takes P / (N R) pages and
// the last one up to L / R, and each run costs as much again as a sixteenth of least_pages. The R
// of the shortest time is taken. So a batch of as many sequences as there are threads is not split,
// a single one is, and so are three on two threads, and a batch in which one is much longer than
// the others. All sequences get as many runs, shorter or empty ones. `runs_of` in
// python/sglang_scout/ops/triton/doorbell.py is this rule on a device.
struct Split {
  int32_t threads = 1;
  int32_t most = 1;
  int32_t least_pages = 1;

  // sequences: that have pages; total: pages of all of them; largest: of the longest one.
  uint32_t runs(int64_t sequences, int64_t total, int64_t largest) const {
    if (sequences < 1) return 1;
    const int64_t useful = std::min(largest / least_pages, kRunsPerThread * threads / sequences);
    const int64_t end = std::min<int64_t>(most, useful);
    uint32_t best = 1;
    int64_t shortest = INT64_MAX;
    for (int64_t r = 1; r <= end; ++r) {
      const int64_t every = sequences * r;
      const int64_t rounds = (every + threads - 1) / threads;
      const int64_t time =
          (rounds - 1) * 16 * total / every + 16 * largest / r + rounds * least_pages;
      if (time < shortest) {
        shortest = time;
        best = static_cast<uint32_t>(r);
      }
    }
    return best;
  }
};

// Below this a thread that helps costs about what it saves. A run begins with the queries, ends
// with sums of their size and is merged; with 256 KiB it was 1.5 times as fast on AMD Zen 5 to have
// a second thread that was polling, and no faster with one that had to be woken.
constexpr int64_t kRunBytes = 512 << 10;

// Pages of K and V of so many bytes in the shortest run of the longest sequence.
inline int32_t least_run_pages(int64_t page_bytes) {
  return page_bytes >= kRunBytes ? 1
                                 : static_cast<int32_t>((kRunBytes + page_bytes - 1) / page_bytes);
}

// Merges the runs of one sequence by their log-sum-exp, in order: the result depends on the pages
// and on their split only, not on who computed what. Run r is at run_out + r * stride, its lse
// behind its out. A run whose lse is NaN makes the result NaN.
inline void merge_runs(uint32_t heads, uint32_t dim, uint32_t runs, const float* run_out,
                       uint64_t stride, float* out, float* lse) {
  const uint64_t lse_at = uint64_t{heads} * dim;
  for (uint32_t head = 0; head < heads; ++head) {
    float top = -INFINITY;
    for (uint32_t r = 0; r < runs; ++r) {
      const float l = run_out[r * stride + lse_at + head];
      top = l > top || l != l ? l : top;
    }
    float* row = out + uint64_t{head} * dim;
    std::memset(row, 0, dim * sizeof(float));
    lse[head] = top;
    if (top == -INFINITY) continue;
    float total = 0;
    for (uint32_t r = 0; r < runs; ++r) {
      const float l = run_out[r * stride + lse_at + head];
      if (l == -INFINITY) continue;  // a run without pages leaves its out as it was
      const float weight = std::exp(l - top);
      const float* from = run_out + r * stride + uint64_t{head} * dim;
      total += weight;
      for (uint32_t d = 0; d < dim; ++d) row[d] += weight * from[d];
    }
    const float inverse = 1.0f / total;
    for (uint32_t d = 0; d < dim; ++d) row[d] *= inverse;
    lse[head] = top + std::log(total);
  }
}

}  // namespace scout
