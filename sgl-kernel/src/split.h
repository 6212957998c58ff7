// How many splits the pages of a batch's sequences are divided into (split-KV), one thread per
// split, and the merge of the partial results.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>

namespace scout {

// At most this many splits in a record whose sequences are split: more would only cost memory.
constexpr int64_t kSplitsPerThread = 16;

// Cost model for the number of splits of each sequence's pages.
//
// Threads take splits one at a time, so N sequences of R splits each take ceil(N R / threads)
// rounds. With P pages in total and L in the longest sequence, a round takes P / (N R) pages and
// the last one up to L / R, and each split has an overhead of min_pages / 16. The R with the
// shortest time is taken, for all sequences. `splits_of` in
// python/sglang_scout/ops/triton/doorbell.py is the same rule on the device.
struct Split {
  int32_t threads = 1;
  int32_t max_splits = 1;
  int32_t min_pages = 1;

  // sequences: number with pages; total: pages of all; largest: pages of the longest.
  uint32_t splits(int64_t sequences, int64_t total, int64_t largest) const {
    if (sequences < 1) return 1;
    const int64_t useful = std::min(largest / min_pages, kSplitsPerThread * threads / sequences);
    const int64_t end = std::min<int64_t>(max_splits, useful);
    uint32_t best = 1;
    int64_t shortest = INT64_MAX;
    for (int64_t r = 1; r <= end; ++r) {
      const int64_t every = sequences * r;
      const int64_t rounds = (every + threads - 1) / threads;
      const int64_t time =
          (rounds - 1) * 16 * total / every + 16 * largest / r + rounds * min_pages;
      if (time < shortest) {
        shortest = time;
        best = static_cast<uint32_t>(r);
      }
    }
    return best;
  }
};

// Below this an additional thread costs about what it saves. A split loads the queries, writes
// partial results of the same size and is merged, and its thread may have to be woken.
constexpr int64_t kSplitBytes = 512 << 10;

// Minimum pages (K and V, page_bytes each) in a split of the longest sequence.
inline int32_t min_split_pages(int64_t page_bytes) {
  return page_bytes >= kSplitBytes
             ? 1
             : static_cast<int32_t>((kSplitBytes + page_bytes - 1) / page_bytes);
}

// Merges the splits of one sequence by their log-sum-exp, in order: the result depends only on the
// pages and how they are split, not on which thread computed what. Split r is at split_out +
// r * stride, its lse after its out. A split whose lse is NaN makes the result NaN.
inline void merge_splits(uint32_t heads, uint32_t dim, uint32_t splits, const float* split_out,
                         uint64_t stride, float* out, float* lse) {
  const uint64_t lse_at = uint64_t{heads} * dim;
  for (uint32_t head = 0; head < heads; ++head) {
    float top = -INFINITY;
    for (uint32_t r = 0; r < splits; ++r) {
      const float l = split_out[r * stride + lse_at + head];
      top = l > top || l != l ? l : top;
    }
    float* row = out + uint64_t{head} * dim;
    std::memset(row, 0, dim * sizeof(float));
    lse[head] = top;
    if (top == -INFINITY) continue;
    float total = 0;
    for (uint32_t r = 0; r < splits; ++r) {
      const float l = split_out[r * stride + lse_at + head];
      if (l == -INFINITY) continue;  // a split without pages does not write its out
      const float weight = std::exp(l - top);
      const float* from = split_out + r * stride + uint64_t{head} * dim;
      total += weight;
      for (uint32_t d = 0; d < dim; ++d) row[d] += weight * from[d];
    }
    const float inverse = 1.0f / total;
    for (uint32_t d = 0; d < dim; ++d) row[d] *= inverse;
    lse[head] = top + std::log(total);
  }
}

}  // namespace scout
