// Attention of one sequence, written once for every Vec. Include a vec_*.h first.
//
// The walk follows memory: page by page, of a page first K and then V, in blocks of a few tokens
// with all their heads; while a block is computed, what comes 16 KiB later in this order is
// prefetched line by line, in the order of addresses, and where memory binds what comes 8 KiB later
// once more. What binds is how many lines can be on their way: hardware prefetchers hardly help a
// reader that computes, but follow hints that rise evenly; hints in bursts are dropped, so the
// softmax, which reads nothing, asks for nothing. docs/results/README.md has what was measured.
//
// As in attend_tile.h, nothing of the standard library is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_cpu.h"
#include "attend_dispatch.h"
#include "scout/attend.h"

namespace scout {
namespace {

constexpr int kScratchFloats = 16384;  // of q, and of accumulators, in one pass over the pages
constexpr int kScratchRows = kScratchFloats / kTileTokens;

// How a sequence is walked: blocks of about so many bytes; hints for what comes `leads` times
// lead_bytes later, with two of them once more for what comes lead_bytes later.
struct Pace {
  ptrdiff_t block_bytes;
  ptrdiff_t lead_bytes;
  int leads;
};
constexpr Pace kByRows{8 << 10, 8 << 10, 2};
constexpr Pace kByColumns{16 << 10, 16 << 10, 1};

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

// bf16 numbers, which are the upper halves of floats.
inline void narrow_row(const float* from, int16_t* to, int dim) {
  for (int i = 0; i < dim; ++i) {
    uint32_t bits;
    __builtin_memcpy(&bits, from + i, sizeof bits);
    to[i] = static_cast<int16_t>(bits >> 16);
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

// Where one page begins, and the scales of its codes; whether it is in cache.
struct Place {
  const char* k;
  const char* v;
  const float* k_scale;
  const float* v_scale;
  bool cached;
};

// `ahead`: only for prefetching.
inline Place place_of(const AttendArgs& args, int entry, int64_t page, ptrdiff_t page_bytes,
                      bool ahead) {
  const KvPages& kv = *args.kv;
  if (args.records != nullptr) {
    const Int8Record record =
        ahead ? Int8Record{args.records->first(entry), false} : args.records->get(entry);
    const char* const k = reinterpret_cast<const char*>(record.at);
    const float* const scales = reinterpret_cast<const float*>(k + 2 * page_bytes);
    return {k, k + page_bytes, scales, scales + kv.kv_heads, record.cached};
  }
  const ptrdiff_t at = page * page_bytes;
  Place place{static_cast<const char*>(kv.k) + at, static_cast<const char*>(kv.v) + at, nullptr,
              nullptr, false};
  if (kv.dtype == DType::kI8) {
    place.k_scale = kv.k_scale + page * kv.kv_heads;
    place.v_scale = kv.v_scale + page * kv.kv_heads;
  }
  return place;
}

// Tokens of a block. A power of two, as the size of a page is: hints would go astray where a block
// ends behind a page.
inline int block_tokens(ptrdiff_t bytes, ptrdiff_t row_bytes, int least, int most) {
  int tokens = least;
  while (2 * tokens <= most && tokens * 3 / 2 * row_bytes <= bytes) tokens *= 2;
  return tokens;
}

inline void attend_heads(const AttendArgs& args, HeadRange range) {
  const KvPages& kv = *args.kv;
  const int dim = kv.head_dim;
  const int heads = range.head_end - range.head_begin;
  const int group = range.group_end - range.group_begin;
  const bool coded = kv.dtype == DType::kI8;
  const int element = kv.dtype == DType::kF32 ? 4 : coded ? 1 : 2;
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * element;
  const ptrdiff_t row_bytes = head_bytes * kv.kv_heads;
  const ptrdiff_t page_bytes = row_bytes * kv.page_size;
  const bool interleaved = kv.dtype == DType::kBF16;
  const bool narrow = kBf16Queries && kv.dtype == DType::kBF16;

  alignas(64) float q[kScratchFloats];  // in half of them q_codes
  int16_t* const q_codes = reinterpret_cast<int16_t*>(q);
  float q_scale[kScratchRows];
  alignas(64) float acc[kScratchFloats];
  float highest[kScratchRows];
  float sum[kScratchRows];
  alignas(64) int32_t code_sums[kScratchFloats];  // of codes by rows only
  alignas(64) float scores[kScratchFloats];
  alignas(64) float shift[kScratchRows] = {};
  alignas(64) float rescale[kScratchRows];
  alignas(64) float lift[kScratchRows] = {};
  float factor[kScratchRows];
  float row_scale[kScratchRows];
  float total[kScratchRows];
  for (int h = 0; h < heads; ++h) {
    const int first = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      const float* const from = args.q + static_cast<ptrdiff_t>(first + g) * dim;
      if (coded) {
        q_scale[row] = encode_shorts(from, dim, q_codes + row * dim);
      } else if (narrow) {
        narrow_row(from, q_codes + row * dim, dim);
      } else {
        pack_row(interleaved, from, q + row * dim, dim);
      }
      highest[row] = -kInfinity;
      sum[row] = 0.0f;
    }
  }
  for (int i = 0; i < heads * group * dim; ++i) acc[i] = 0.0f;

  // The group in chunks of nearly equal size: `larger` of chunk + 1 heads, then chunks of chunk.
  const int chunks = (group + Vec::kMaxGroupChunk - 1) / Vec::kMaxGroupChunk;
  const int chunk = group / chunks;
  const int larger = group % chunks;
  const BlockFns run = find_block_fns(kv.dtype, dim, chunk);
  const BlockFns run_larger = larger > 0 ? find_block_fns(kv.dtype, dim, chunk + 1) : run;

  const int rows = heads * group;
  const int stride = (rows + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;  // of scores
  alignas(64) float unit[kScratchRows];
  for (int row = 0; row < rows; ++row) {
    row_scale[row] = args.params->scale;
    unit[row] = kLargestShort;
  }
  // Lanes of no query head: their scores are zero and stay finite, so no conversion meets a NaN.
  for (int row = rows; row < stride; ++row) {
    row_scale[row] = unit[row] = highest[row] = sum[row] = 0.0f;
    for (int t = 0; t < kTileTokens; ++t) scores[t * stride + row] = 0.0f;
  }
  const Softmax softmax{row_scale, args.params->logit_cap, highest, shift, lift, unit, total};
  const int most = kv.page_size < kTileTokens ? kv.page_size : kTileTokens;
  const int most_heads = larger > 0 ? chunk + 1 : chunk;
  const bool by_rows = coded ? Vec::codes_by_rows(most_heads) : Vec::by_rows(most_heads);
  Pace pace = by_rows ? kByRows : kByColumns;
  // By columns sums are loaded and stored once a block, so many of them ask for a large one.
  const ptrdiff_t sums_bytes = rows * dim * sizeof(float);
  if (!by_rows && sums_bytes > pace.block_bytes) pace.block_bytes = sums_bytes;
  const int least = coded && by_rows && most >= kCodeRowTokens ? kCodeRowTokens : kRowTokens;
  const int step = block_tokens(pace.block_bytes, row_bytes, least, most);
  const int lead_tokens = static_cast<int>(pace.lead_bytes / row_bytes) / step * step;
  const int lead = lead_tokens < step ? step : lead_tokens < most ? lead_tokens : most;

  Block block;
  block.row_bytes = row_bytes;
  block.heads = heads;
  block.head_dim = dim;
  block.group = group;
  block.score_stride = stride;

  // The entry after the listed pages stands for last_page.
  const bool has_last = args.last_page >= 0 && args.last_len > 0;
  auto page_at = [&](int i) -> int64_t {
    if (i < args.n) return args.records != nullptr ? 0 : args.pages[i];
    return has_last ? args.last_page : -1;
  };
  auto next_entry = [&](int i) {
    while (i <= args.n && page_at(i) < 0) ++i;
    return i;
  };
  const ptrdiff_t head_offset = range.head_begin * head_bytes;
  auto place_at = [&](int i, bool ahead) {
    return place_of(args, i, page_at(i), page_bytes, ahead);
  };
  int entry = next_entry(0);
  Place here{};
  if (entry <= args.n) {
    here = place_at(entry, false);
    // Nothing was computed while the first block could have come: ask for it at once.
    const char* const first = here.k + head_offset;
    const int tokens = pace.leads * lead < most ? pace.leads * lead : most;
    for (ptrdiff_t i = 0; i < tokens * row_bytes; i += kLineBytes) prefetch(first + i);
  }
  while (entry <= args.n) {
    const int following = next_entry(entry + 1);
    // At the end the prefetches go to the page at hand, which is cached: cheaper than branches.
    const Place next = following <= args.n ? place_at(following, true) : here;
    const int page_tokens = entry < args.n ? kv.page_size : args.last_len;
    if (coded && following <= args.n) {
      prefetch(reinterpret_cast<const char*>(next.k_scale + range.head_begin));
      prefetch(reinterpret_cast<const char*>(next.v_scale + range.head_begin));
    }
    for (int begin = 0; begin < page_tokens; begin += kTileTokens) {
      const int tokens = page_tokens - begin < kTileTokens ? page_tokens - begin : kTileTokens;
      const char* const k = here.k + head_offset + begin * row_bytes;
      const char* const v = here.v + head_offset + begin * row_bytes;
      const bool within = begin + tokens < page_tokens;
      const char* const k_next = within ? k + tokens * row_bytes : next.k + head_offset;
      const char* const v_next = within ? v + tokens * row_bytes : next.v + head_offset;
      // Token i of the walk: this tile's K, its V, what is next, at most two tiles further.
      auto walk = [&](int i) {
        if (i < tokens) return k + i * row_bytes;
        if (i < 2 * tokens) return v + (i - tokens) * row_bytes;
        i -= 2 * tokens;
        return i < most ? k_next + i * row_bytes : v_next + (i - most) * row_bytes;
      };
      auto hints = [&](int i) -> Hints {
        // Of a page in cache nothing has to be asked for: all hints are for what follows.
        if (here.cached) return {walk(i + 2 * tokens), 0};
        const char* const at = walk(i + pace.leads * lead);
        return {at, walk(i + lead) - at};
      };
      for (int t = 0; t < tokens; t += step) {
        block.rows = k + t * row_bytes;
        block.ahead = hints(t);
        block.tokens = tokens - t < step ? tokens - t : step;
        for (int c = 0, g = 0; c < chunks; g += c < larger ? chunk + 1 : chunk, ++c) {
          block.q = q + g * dim;
          block.q_codes = q_codes + g * dim;
          block.scores = scores + t * stride + g;
          (c < larger ? run_larger : run).score(block);
        }
      }
      if (coded) {
        for (int h = 0; h < heads; ++h) {
          const float k_scale = args.params->scale * here.k_scale[range.head_begin + h];
          const float v_scale = here.v_scale[range.head_begin + h] * (1.0f / kLargestShort);
          for (int row = h * group; row < (h + 1) * group; ++row) {
            row_scale[row] = k_scale * q_scale[row];
            factor[row] = v_scale;
          }
        }
        softmax_rows<true>(scores, stride, stride, tokens, softmax);
        for (int row = 0; row < rows; row += Vec::kLanes) {
          Vec::store(lift + row, exp2_nonpositive(Vec::load(lift + row)));
        }
        for (int row = 0; row < rows; ++row) {
          total[row] *= lift[row];
          // Codes cannot say that a weight is NaN; their scale can.
          factor[row] *= total[row] == total[row] ? lift[row] : total[row];
        }
      } else {
        softmax_rows<false>(scores, stride, stride, tokens, softmax);
      }
      for (int row = 0; row < rows; row += Vec::kLanes) {
        Vec::store(rescale + row, exp2_nonpositive(Vec::load(shift + row)));
      }
      for (int row = 0; row < rows; ++row) sum[row] = sum[row] * rescale[row] + total[row];
      for (int t = 0; t < tokens; t += step) {
        block.rows = v + t * row_bytes;
        block.ahead = hints(tokens + t);
        block.tokens = tokens - t < step ? tokens - t : step;
        for (int c = 0, g = 0; c < chunks; g += c < larger ? chunk + 1 : chunk, ++c) {
          block.acc = acc + g * dim;
          block.scores = scores + (coded ? t / 2 : t) * stride + g;
          block.code_sums = coded && by_rows ? code_sums + g * dim : nullptr;
          block.factor = factor + g;
          block.rescale = t == 0 ? rescale + g : nullptr;
          (c < larger ? run_larger : run).weigh(block);
        }
      }
      if (coded && by_rows) fold_code_rows(code_sums, factor, rescale, acc, rows, dim);
    }
    entry = following;
    here = entry <= args.n ? place_at(entry, false) : here;
  }

  for (int h = 0; h < heads; ++h) {
    const int first = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      // At the limit: every score was -inf, as if there were no token. A NaN among them is no
      // score.
      const bool hidden = highest[row] <= -kScoreLimit && sum[row] == sum[row];
      const bool empty = hidden || sum[row] == 0.0f;
      const float inverse = empty ? 0.0f : 1.0f / sum[row];
      float* const out = args.out + static_cast<ptrdiff_t>(first + g) * dim;
      if (coded) {
        unpack_zipped(acc + row * dim, inverse, out, dim);
      } else {
        unpack_row(interleaved, acc + row * dim, inverse, out, dim);
      }
      args.lse[first + g] =
          empty ? -kInfinity : static_cast<float>(highest[row] * kLn2 + __builtin_log(sum[row]));
    }
  }
}

// As many heads at a time as fit the scratch; nearly always all of them.
inline void attend_all(const AttendArgs& args) {
  const int heads = args.kv->kv_heads;
  const int group = args.params->group;
  const int fit = kScratchFloats / args.kv->head_dim;
  const int rows = fit < kScratchRows ? fit : kScratchRows;
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
