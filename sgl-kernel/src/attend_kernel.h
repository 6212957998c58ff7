// Attention of one sequence, written once for every Vec. Include a vec_*.h first.
//
// The walk is page by page, all heads of a page before the next page, so that memory is read in
// whole pages; while one page is computed, prefetches of the next one are spread over the tokens.
// Hardware prefetchers do not follow rows that are H*D apart: without these hints one core of an
// AMD Zen 5 server reads 9 GB/s here, with them 24 (a plain read loop: 37).
//
// As in attend_tile.h, nothing of the standard library is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_cpu.h"
#include "attend_tile.h"
#include "scout/attend.h"

namespace scout {
namespace {

constexpr int kScratchFloats = 16384;  // of q, and of accumulators, in one pass over the pages
constexpr int kScratchRows = kScratchFloats / 16;
constexpr ptrdiff_t kFirstBytes = 64 << 10;

// Between natural column order and the order of load_pair (the same unless pairs are interleaved).
inline void pack_row(bool interleaved, const float* from, float* to, int dim) {
  constexpr int W = Vec::kLanes;
  if (!interleaved) {
    __builtin_memcpy(to, from, sizeof(float) * dim);
    return;
  }
  for (int d = 0; d < dim; d += 2 * W) {
    for (int i = 0; i < W; ++i) {
      to[d + i] = from[d + 2 * i];
      to[d + W + i] = from[d + 2 * i + 1];
    }
  }
}

inline void unpack_row(bool interleaved, const float* from, float factor, float* to, int dim) {
  constexpr int W = Vec::kLanes;
  if (!interleaved) {
    for (int d = 0; d < dim; ++d) to[d] = factor * from[d];
    return;
  }
  for (int d = 0; d < dim; d += 2 * W) {
    for (int i = 0; i < W; ++i) {
      to[d + 2 * i] = factor * from[d + i];
      to[d + 2 * i + 1] = factor * from[d + W + i];
    }
  }
}

// KV heads [head_begin, head_end) and, of each, query heads [group_begin, group_end) of the group.
struct HeadRange {
  int head_begin, head_end;
  int group_begin, group_end;
};

inline void attend_heads(const AttendArgs& args, HeadRange range) {
  const KvPages& kv = *args.kv;
  const int dim = kv.head_dim;
  const int heads = range.head_end - range.head_begin;
  const int group = range.group_end - range.group_begin;
  const int element = kv.dtype == DType::kF32 ? 4 : 2;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * element;
  const ptrdiff_t row_bytes = head_bytes * kv.kv_heads;
  const ptrdiff_t page_bytes = row_bytes * kv.page_size;
  const bool interleaved = kv.dtype == DType::kBF16;
  const char* const k_base = static_cast<const char*>(kv.k);
  const char* const v_base = static_cast<const char*>(kv.v);

  alignas(64) float q[kScratchFloats];
  alignas(64) float acc[kScratchFloats];
  float highest[kScratchRows];
  float sum[kScratchRows];
  for (int h = 0; h < heads; ++h) {
    const int first = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      pack_row(interleaved, args.q + static_cast<ptrdiff_t>(first + g) * dim, q + row * dim, dim);
      highest[row] = -kInfinity;
      sum[row] = 0.0f;
    }
  }
  for (int i = 0; i < heads * group * dim; ++i) acc[i] = 0.0f;

  // The group in chunks of nearly equal size: `larger` of chunk + 1 heads, then chunks of chunk.
  const int chunks = (group + Vec::kMaxGroupChunk - 1) / Vec::kMaxGroupChunk;
  const int chunk = group / chunks;
  const int larger = group % chunks;
  const TileFn run = find_tile(kv.dtype, dim, chunk);
  const TileFn run_larger = larger > 0 ? find_tile(kv.dtype, dim, chunk + 1) : run;

  Tile tile;
  tile.row_bytes = row_bytes;
  tile.head_dim = dim;
  tile.scale = args.params->scale;
  tile.logit_cap = args.params->logit_cap;

  // The entry after the listed pages stands for last_page.
  const bool has_last = args.last_page >= 0 && args.last_len > 0;
  auto page_at = [&](int i) -> int64_t {
    return i < args.n ? args.pages[i] : has_last ? args.last_page : -1;
  };
  auto next_entry = [&](int i) {
    while (i <= args.n && page_at(i) < 0) ++i;
    return i;
  };
  int entry = next_entry(0);
  if (entry <= args.n) {
    // Nothing was computed while the first page could have come: ask for the start of its K at
    // once.
    const char* const first = k_base + page_at(entry) * page_bytes;
    const ptrdiff_t bytes = page_bytes < kFirstBytes ? page_bytes : kFirstBytes;
    for (ptrdiff_t i = 0; i < bytes; i += kLineBytes) prefetch(first + i);
  }
  while (entry <= args.n) {
    const int following = next_entry(entry + 1);
    const ptrdiff_t here = page_at(entry) * page_bytes;
    // At the end the prefetches go to the page at hand, which is cached: cheaper than branches.
    const ptrdiff_t ahead = following <= args.n ? page_at(following) * page_bytes : here;
    const int tokens = entry < args.n ? kv.page_size : args.last_len;
    ptrdiff_t progress = 0;
    for (int t = 0; t < tokens; t += kTileTokens) {
      tile.tokens = tokens - t < kTileTokens ? tokens - t : kTileTokens;
      for (int h = 0; h < heads; ++h) {
        const ptrdiff_t offset = t * row_bytes + (range.head_begin + h) * head_bytes;
        tile.k = k_base + here + offset;
        tile.v = v_base + here + offset;
        tile.prefetch_k = k_base + ahead + progress;
        tile.prefetch_v = v_base + ahead + progress;
        progress += tile.tokens * head_bytes;
        int g = 0;
        for (int c = 0; c < chunks; ++c) {
          const int row = h * group + g;
          tile.q = q + row * dim;
          tile.acc = acc + row * dim;
          tile.max = highest + row;
          tile.sum = sum + row;
          (c < larger ? run_larger : run)(tile);
          g += c < larger ? chunk + 1 : chunk;
        }
      }
    }
    entry = following;
  }

  for (int h = 0; h < heads; ++h) {
    const int first = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      const bool empty = sum[row] == 0.0f;
      unpack_row(interleaved, acc + row * dim, empty ? 0.0f : 1.0f / sum[row],
                 args.out + static_cast<ptrdiff_t>(first + g) * dim, dim);
      args.lse[first + g] =
          empty ? -kInfinity : static_cast<float>(highest[row] * kLn2 + __builtin_log(sum[row]));
    }
  }
}

// As many heads at a time as fit the scratch; nearly always all of them.
inline void attend_all(const AttendArgs& args) {
  const int heads = args.kv->kv_heads;
  const int group = args.params->group;
  const int rows = kScratchFloats / args.kv->head_dim;
  const int group_step = group < rows ? group : rows;
  const int head_step = rows / group_step;
  for (int h = 0; h < heads; h += head_step) {
    for (int g = 0; g < group; g += group_step) {
      HeadRange range;
      range.head_begin = h;
      range.head_end = h + head_step < heads ? h + head_step : heads;
      range.group_begin = g;
      range.group_end = g + group_step < group ? g + group_step : group;
      attend_heads(args, range);
    }
  }
}

}  // namespace
}  // namespace scout
