// Attention of one sequence, written once for every Vec. Include a vec_*.h first.
//
// The walk follows memory: page by page, of a page first K and then V, in blocks of a few tokens
// with all their heads; while a block is computed, what comes 16 KiB later in this order is
// prefetched line by line, in the order of addresses, and where memory binds what comes 8 KiB later
// once more. What binds is how many lines can be on their way: hints that rise evenly are followed,
// hints in bursts are dropped. docs/results/cpu.md has its speed.
//
// As in attend_tile.h, nothing of the standard library is used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend.h"
#include "attend_dispatch.h"

namespace scout {
namespace {

constexpr int kTileTokens = 64;        // of a page, at once
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
// Where rows have other heads between those that are read, hints in the order of addresses would
// mostly name bytes of others: those of a block come in a burst before it, so it is a small one.
constexpr Pace kWithGaps{1 << 10, 1 << 10, 4};

// KV heads [head_begin, head_end) and, of each, query heads [group_begin, group_end) of the group.
struct HeadRange {
  int head_begin, head_end;
  int group_begin, group_end;
};

// A group in chunks of nearly equal size: `larger` of size + 1 query heads, then chunks of size.
struct Chunks {
  int count, size, larger;

  explicit Chunks(int group)
      : count((group + Vec::kMaxGroupChunk - 1) / Vec::kMaxGroupChunk),
        size(group / count),
        larger(group % count) {}
  int of(int chunk) const { return chunk < larger ? size + 1 : size; }
  int most() const { return larger > 0 ? size + 1 : size; }
};

// The pages of a sequence by the place in its list; the entry after the listed ones stands for
// last_page.
class Entries {
 public:
  explicit Entries(const AttendArgs& args) : args_(args) {}

  int64_t page(int entry) const {
    if (entry < args_.n) return args_.pages[entry];
    return args_.last_page >= 0 && args_.last_len > 0 ? args_.last_page : -1;
  }
  bool has(int entry) const { return entry <= args_.n; }
  // The first from `entry` on that names a page; if there is none, one that `has` denies.
  int from(int entry) const {
    while (has(entry) && page(entry) < 0) ++entry;
    return entry;
  }
  int tokens(int entry) const { return entry < args_.n ? args_.kv->page_size : args_.last_len; }

 private:
  const AttendArgs& args_;
};

// What the sums over all tokens of a query head mean.
struct RowResult {
  float inverse;  // by which the sum of weighted values becomes the output
  float lse;

  RowResult(float highest, float sum) {
    // At the limit: every score was -inf, as if there were no token. A NaN among them is no score.
    const bool hidden = highest <= -kScoreLimit && sum == sum;
    const bool empty = hidden || sum == 0.0f;
    inverse = empty ? 0.0f : 1.0f / sum;
    lse = empty ? -kInfinity : static_cast<float>(highest * kLn2 + __builtin_log(sum));
  }
};

// Where one page begins.
struct Place {
  const char* k;
  const char* v;
};

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
  const ptrdiff_t head_bytes = static_cast<ptrdiff_t>(dim) * bytes_of(kv.dtype);
  const ptrdiff_t row_bytes = head_bytes * kv.stored_heads;
  const ptrdiff_t page_bytes = row_bytes * kv.page_size;
  const Chunks chunks(group);
  const BlockFns run = find_block_fns(kv.dtype, dim, chunks.size);
  const BlockFns run_larger =
      chunks.larger > 0 ? find_block_fns(kv.dtype, dim, chunks.size + 1) : run;

  alignas(64) char q[kScratchFloats * sizeof(float)];
  const ptrdiff_t query_bytes = static_cast<ptrdiff_t>(dim) * run.query_bytes;
  alignas(64) float acc[kScratchFloats];
  float highest[kScratchRows];
  float sum[kScratchRows];
  alignas(64) float scores[kScratchFloats];
  alignas(64) float shift[kScratchRows] = {};
  alignas(64) float rescale[kScratchRows];
  float total[kScratchRows];
  for (int h = 0; h < heads; ++h) {
    const int q_head = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      run.pack(args.q + static_cast<ptrdiff_t>(q_head + g) * dim, q + row * query_bytes, dim);
      highest[row] = -kInfinity;
      sum[row] = 0.0f;
    }
  }
  for (int i = 0; i < heads * group * dim; ++i) acc[i] = 0.0f;

  const int rows = heads * group;
  const int stride = (rows + Vec::kLanes - 1) / Vec::kLanes * Vec::kLanes;  // of scores
  // Lanes of no query head: their scores are zero and stay finite.
  for (int row = rows; row < stride; ++row) {
    highest[row] = sum[row] = 0.0f;
    for (int t = 0; t < kTileTokens; ++t) scores[t * stride + row] = 0.0f;
  }
  const Softmax softmax{args.params->scale * run.widening, run.lift, highest, shift, total};
  const int most = kv.page_size < kTileTokens ? kv.page_size : kTileTokens;
  const bool by_rows = Vec::by_rows(chunks.most(), bytes_of(kv.dtype));
  const ptrdiff_t used_bytes = heads * head_bytes;  // of a row
  const bool gaps = used_bytes < row_bytes;
  Pace pace = gaps ? kWithGaps : by_rows ? kByRows : kByColumns;
  // By columns sums are loaded and stored once a block, so many of them ask for a large one.
  const ptrdiff_t sums_bytes = rows * dim * sizeof(float);
  if (!by_rows && !gaps && sums_bytes > pace.block_bytes) pace.block_bytes = sums_bytes;
  const int step = block_tokens(pace.block_bytes, used_bytes, kRowTokens, most);
  const int lead_tokens = static_cast<int>(pace.lead_bytes / used_bytes) / step * step;
  const int lead = lead_tokens < step ? step : lead_tokens < most ? lead_tokens : most;

  Block block;
  block.row_bytes = row_bytes;
  block.heads = heads;
  block.head_dim = dim;
  block.group = group;
  block.score_stride = stride;

  const Entries entries(args);
  const ptrdiff_t head_offset = range.head_begin * head_bytes;
  auto place_at = [&](int i) -> Place {
    const ptrdiff_t at = entries.page(i) * page_bytes;
    return {static_cast<const char*>(kv.k) + at, static_cast<const char*>(kv.v) + at};
  };
  auto ask_for = [&](const char* of_rows, int tokens) {
    for (int t = 0; t < tokens; ++t)
      for (ptrdiff_t i = 0; i < used_bytes; i += kLineBytes) prefetch(of_rows + t * row_bytes + i);
  };
  int entry = entries.from(0);
  Place here{};
  if (entries.has(entry)) {
    here = place_at(entry);
    // Nothing was computed while the first block could have come: ask for it at once.
    ask_for(here.k + head_offset, pace.leads * lead < most ? pace.leads * lead : most);
  }
  while (entries.has(entry)) {
    const int following = entries.from(entry + 1);
    // At the end the prefetches go to the page at hand, which is cached: cheaper than branches.
    const Place next = entries.has(following) ? place_at(following) : here;
    const int page_tokens = entries.tokens(entry);
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
        const char* const at = walk(i + pace.leads * lead);
        const char* const again = walk(i + lead);
        if (!gaps) return {at, again - at};
        ask_for(at, step);
        ask_for(again, step);
        return {q, 0};  // cached: costs less than branches
      };
      for (int t = 0; t < tokens; t += step) {
        block.rows = k + t * row_bytes;
        block.ahead = hints(t);
        block.tokens = tokens - t < step ? tokens - t : step;
        for (int c = 0, g = 0; c < chunks.count; g += chunks.of(c), ++c) {
          block.q = q + g * query_bytes;
          block.scores = scores + t * stride + g;
          (c < chunks.larger ? run_larger : run).score(block);
        }
      }
      softmax_rows(scores, stride, stride, tokens, softmax);
      if (run.finish != nullptr) run.finish(scores, stride, tokens);
      for (int row = 0; row < rows; row += Vec::kLanes) {
        Vec::store(rescale + row, exp2_nonpositive(Vec::load(shift + row)));
      }
      for (int row = 0; row < rows; ++row) sum[row] = sum[row] * rescale[row] + total[row];
      for (int t = 0; t < tokens; t += step) {
        block.rows = v + t * row_bytes;
        block.ahead = hints(tokens + t);
        block.tokens = tokens - t < step ? tokens - t : step;
        for (int c = 0, g = 0; c < chunks.count; g += chunks.of(c), ++c) {
          block.acc = acc + g * dim;
          block.scores = scores + t * stride + g;
          block.rescale = t == 0 ? rescale + g : nullptr;
          (c < chunks.larger ? run_larger : run).weigh(block);
        }
      }
    }
    entry = following;
    here = entries.has(entry) ? place_at(entry) : here;
  }

  for (int h = 0; h < heads; ++h) {
    const int q_head = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      const RowResult result(highest[row], sum[row]);
      run.unpack(acc + row * dim, result.inverse * run.widening,
                 args.out + static_cast<ptrdiff_t>(q_head + g) * dim, dim);
      args.lse[q_head + g] = result.lse;
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
