// What attention over pages of floats (attend_kernel.h) and of codes (attend_int8.h) have in
// common. Include a vec_*.h first; see attend_tile.h for why nothing of the standard library is
// used.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_cpu.h"
#include "scout/attend.h"
#include "vec_math.h"

namespace scout {
namespace {

constexpr int kTileTokens = 64;  // of a page, at once
constexpr int kLineBytes = 64;
constexpr int kScratchFloats = 16384;  // of q, and of accumulators, in one pass over the pages
constexpr int kScratchRows = kScratchFloats / kTileTokens;

// What to prefetch: lines from `at` on; where kTwice, also those `again` bytes from there. A CPU
// drops hints while as many lines are on their way as it can follow, and the second hint, nearer to
// the use, is for what was dropped. Where arithmetic binds it is one instruction too many.
struct Hints {
  const char* at;
  ptrdiff_t again;
};

template <int kBytes, bool kTwice = false>
inline void prefetch_span(Hints& hints) {
#pragma GCC unroll 16
  for (int offset = 0; offset < kBytes; offset += kLineBytes) {
    prefetch(hints.at + offset);
    if constexpr (kTwice) prefetch(hints.at + hints.again + offset);
  }
  hints.at += kBytes;
}

// Scores in units of log2, from dot products.
class Scores {
 public:
  explicit Scores(float logit_cap)
      : capped_(logit_cap > 0.0f),
        given_(Vec::set1(logit_cap)),
        cap_(Vec::set1(logit_cap * kLog2e)) {}

  // The factor of `of`, from that of natural scores.
  Vec::F factor(Vec::F scale) const {
    return capped_ ? Vec::div(scale, given_) : Vec::mul(scale, Vec::set1(kLog2e));
  }
  Vec::F of(Vec::F factor, Vec::F dot) const {
    const Vec::F s = Vec::mul(factor, dot);
    return capped_ ? Vec::mul(cap_, tanh(s)) : s;
  }

 private:
  bool capped_;
  Vec::F given_, cap_;
};

// What is not within the limit at it; NaN stays NaN.
inline Vec::F within(float limit, Vec::F x) {
  return Vec::max(Vec::set1(-limit), Vec::min(Vec::set1(limit), x));
}

// KV heads [head_begin, head_end) and, of each, query heads [group_begin, group_end) of the group.
struct HeadRange {
  int head_begin, head_end;
  int group_begin, group_end;
};

// attend(range) for as many heads at a time as fit the scratch; nearly always for all of them.
template <typename Attend>
inline __attribute__((always_inline)) void for_heads_that_fit(const AttendArgs& args,
                                                              Attend attend) {
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
      attend(range);
    }
  }
}

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
// last_page. With records every listed entry is one.
class Entries {
 public:
  explicit Entries(const AttendArgs& args) : args_(args) {}

  int64_t page(int entry) const {
    if (entry < args_.n) return args_.records != nullptr ? 0 : args_.pages[entry];
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

}  // namespace
}  // namespace scout
