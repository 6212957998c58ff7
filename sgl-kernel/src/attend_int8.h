// Attention of one sequence over pages of int8 codes, written once for every Vec. Include a vec_*.h
// first; see attend_tile.h for why nothing of the standard library is used.
//
// Products are those of 16-bit integers: one takes pairs of them, which is the work of four fused
// multiply-adds, and needs no conversion to float. Codes lie in an order (scout/attend.h) in which
// they meet the query, or the weights, without a shuffle: a line of K has four channels of 16
// tokens, so tokens are lanes, and no sum goes across lanes; a line of V has four tokens of 16
// channels. Both are read strictly in the order of memory, head by head: K of up to 64 tokens,
// their softmax, their V.
//
// The query becomes 16-bit codes once per call (scale = largest magnitude / 32767), the weights
// once per tile and row (relative to the row's largest weight in the tile). Products are summed
// exactly: |code of a page| <= 128, so those of kMaxCodedDim elements stay below 2^31, and those of
// a tile's tokens below 2^28. What is lost is the rounding of the codes, at most 2^-16 of the
// largest element, where an int8 code loses 2^-8.
//
// While a line is computed, the ones that come 16 KiB and 8 KiB later are asked for, as in
// attend_kernel.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "attend_cpu.h"
#include "attend_shared.h"
#include "scout/attend.h"

namespace scout {
namespace {

constexpr float kLargestShort = 32767.0f;  // code of the largest query element or weight
constexpr ptrdiff_t kCodeLeadBytes = 8 << 10;
constexpr int kCodeLeads = 2;
// Vectors of a line.
constexpr int kLineVectors = kLineBytes / (4 * Vec::kLanes);
static_assert(kTileTokens % kCodedBlock == 0 && kCodedBlock * 4 == kLineBytes, "of one tile");
static_assert(kMaxCodedDim * 32767LL * 128 < 1LL << 31, "of all elements, in score_codes");
static_assert(kTileTokens * 32767LL * 128 < 1LL << 31, "of all tokens, in weigh_codes");

// `count` floats to 16-bit codes, `count` a multiple of Vec::kLanes. Returns the scale; NaN if a
// value is not finite.
inline float encode_shorts(const float* from, int count, int16_t* to) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  F largest = Vec::zero();
  F wrong = Vec::zero();  // 0 * x summed up
  for (int i = 0; i < count; i += W) {
    const F x = Vec::load(from + i);
    largest = Vec::max(largest, Vec::abs(x));
    wrong = Vec::fma(x, Vec::zero(), wrong);
  }
  const float magnitude = Vec::hmax(largest);
  const float poison = Vec::hsum(wrong);
  const bool usable = poison == poison && magnitude > 0x1p-100f;
  const F factor = Vec::set1(usable ? kLargestShort / magnitude : 0.0f);
  for (int i = 0; i < count; i += W) {
    const F x = usable ? Vec::load(from + i) : Vec::zero();
    Vec::store_shorts(Vec::mul(x, factor), to + i);
  }
  return poison == poison ? (usable ? magnitude / kLargestShort : 0.0f) : poison;
}

// Codes of the query heads of a chunk, [rows, dim], in the order of use: [dim / 4, rows, 4].
inline void pack_query(const int16_t* codes, int rows, int dim, int16_t* to) {
  for (int d = 0; d < dim; d += 4) {
    for (int g = 0; g < rows; ++g, to += 4) {
      __builtin_memcpy(to, codes + g * dim + d, 4 * sizeof *to);
    }
  }
}

// A chunk of query heads and a tile of one KV head.
struct CodeTile {
  const char* codes;  // of K or V
  Hints ahead;        // for meanwhile, as many bytes as the tile has
  int tokens;
  int dim;
  const int16_t* q;      // pack_query
  float* scores;         // [GB, kTileTokens]: products of codes
  int16_t* weights;      // [GB, kTileTokens]: codes, zero behind the last token
  const float* rescale;  // [GB]: by which acc shrinks first
  const float* factor;   // [GB]: scale of a sum of codes
  float* acc;            // [GB, dim]
};

// scores = products of the codes of NV vectors of tokens, which begin at vector `first`.
template <int NV, int GB>
inline Hints score_tokens(const CodeTile& tile, int first, Hints ahead) {
  using I = Vec::I;
  using S = Vec::S;
  constexpr int W = Vec::kLanes;
  // Sums of even and of odd bytes apart, where the sums of one kind are too few to be added to
  // without waiting.
  constexpr int E = 4 * GB * NV <= Vec::kRegisters ? 2 : 1;
  const char* at[NV];
#pragma GCC unroll 4
  for (int i = 0; i < NV; ++i) {
    const int vector = first + i;
    at[i] = tile.codes + ptrdiff_t{vector / kLineVectors} * kCodedBlock * tile.dim +
            vector % kLineVectors * 4 * W;
  }
  I acc[GB][NV][E];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 8
    for (int i = 0; i < NV * E; ++i) acc[g][i / E][i % E] = Vec::zero_words();
  }
  const int16_t* q = tile.q;
#pragma GCC unroll 1
  for (int d = 0; d < tile.dim; d += 4) {
    S even[NV], odd[NV];
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      Vec::split_codes(at[i], even[i], odd[i]);
      at[i] += kLineBytes;
    }
    prefetch_span<NV / kLineVectors * kLineBytes, true>(ahead);
#pragma GCC unroll 8
    for (int g = 0; g < GB; ++g) {
      const S q_even = Vec::set1_pair(q + 4 * g), q_odd = Vec::set1_pair(q + 4 * g + 2);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i) acc[g][i][0] = Vec::dot_shorts(acc[g][i][0], even[i], q_even);
#pragma GCC unroll 4
      for (int i = 0; i < NV; ++i)
        acc[g][i][E - 1] = Vec::dot_shorts(acc[g][i][E - 1], odd[i], q_odd);
    }
    q += 4 * GB;
  }
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 4
    for (int i = 0; i < NV; ++i) {
      const I sum = E == 2 ? Vec::add_words(acc[g][i][0], acc[g][i][E - 1]) : acc[g][i][0];
      Vec::store(tile.scores + g * kTileTokens + (first + i) * W, Vec::from_words(sum));
    }
  }
  return ahead;
}

template <int GB>
void score_codes(const CodeTile& tile) {
  constexpr int kAtOnce = kLineVectors > 2 ? kLineVectors : 2;
  const int vectors = (tile.tokens + kCodedBlock - 1) / kCodedBlock * kLineVectors;
  Hints ahead = tile.ahead;
  int i = 0;
  for (; i + kAtOnce <= vectors; i += kAtOnce) ahead = score_tokens<kAtOnce, GB>(tile, i, ahead);
  if constexpr (kLineVectors == 1) {
    if (i < vectors) ahead = score_tokens<1, GB>(tile, i, ahead);
  }
}

// acc[g] = rescale[g] * acc[g] + factor[g] * sum_t weights[g][t] * v[t], over NV vectors of columns
// from `column` on.
template <int NV, int GB>
inline Hints weigh_columns_of_codes(const CodeTile& tile, int column, Hints ahead) {
  using I = Vec::I;
  using S = Vec::S;
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  I sums[GB][NV];
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) sums[g][j] = Vec::zero_words();
  }
  const char* at = tile.codes + 4 * column;
  for (int t = 0; t < tile.tokens; t += 4, at += 4 * tile.dim) {
    const int16_t* const weights = tile.weights + t;
    if constexpr (GB * (NV + 2) + 2 <= Vec::kRegisters) {  // all weights fit the registers
      S w_even[GB], w_odd[GB];
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        w_even[g] = Vec::set1_pair(weights + g * kTileTokens);
        w_odd[g] = Vec::set1_pair(weights + g * kTileTokens + 2);
      }
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) {
        S even, odd;
        Vec::split_codes(at + j * 4 * W, even, odd);
#pragma GCC unroll 8
        for (int g = 0; g < GB; ++g) sums[g][j] = Vec::dot_shorts(sums[g][j], even, w_even[g]);
#pragma GCC unroll 8
        for (int g = 0; g < GB; ++g) sums[g][j] = Vec::dot_shorts(sums[g][j], odd, w_odd[g]);
      }
    } else {
      S even[NV], odd[NV];
#pragma GCC unroll 8
      for (int j = 0; j < NV; ++j) Vec::split_codes(at + j * 4 * W, even[j], odd[j]);
#pragma GCC unroll 8
      for (int g = 0; g < GB; ++g) {
        const S w_even = Vec::set1_pair(weights + g * kTileTokens);
        const S w_odd = Vec::set1_pair(weights + g * kTileTokens + 2);
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) sums[g][j] = Vec::dot_shorts(sums[g][j], even[j], w_even);
#pragma GCC unroll 8
        for (int j = 0; j < NV; ++j) sums[g][j] = Vec::dot_shorts(sums[g][j], odd[j], w_odd);
      }
    }
    prefetch_span<NV * 4 * W, true>(ahead);
  }
#pragma GCC unroll 8
  for (int g = 0; g < GB; ++g) {
    const F shrink = Vec::set1(tile.rescale[g]), scale = Vec::set1(tile.factor[g]);
#pragma GCC unroll 8
    for (int j = 0; j < NV; ++j) {
      float* const to = tile.acc + g * tile.dim + column + j * W;
      const F sum = Vec::mul(scale, Vec::from_words(sums[g][j]));
      Vec::store(to, Vec::fma(shrink, Vec::load(to), sum));
    }
  }
  return ahead;
}

template <int GB>
void weigh_codes(const CodeTile& tile) {
  constexpr int W = Vec::kLanes;
  constexpr int kMost = Vec::kRegisters / (GB <= 2 ? 4 : GB <= 5 ? 8 : 16);
  Hints ahead = tile.ahead;
  int column = 0;
  for (; column + kMost * W <= tile.dim; column += kMost * W)
    ahead = weigh_columns_of_codes<kMost, GB>(tile, column, ahead);
  if constexpr (kMost > 2) {
    for (; column + 2 * W <= tile.dim; column += 2 * W)
      ahead = weigh_columns_of_codes<2, GB>(tile, column, ahead);
  }
  for (; column < tile.dim; column += W) ahead = weigh_columns_of_codes<1, GB>(tile, column, ahead);
}

struct CodeFns {
  void (*score)(const CodeTile&);
  void (*weigh)(const CodeTile&);
};

template <int GB>
CodeFns code_fns() {
  return {score_codes<GB>, weigh_codes<GB>};
}

inline CodeFns find_code_fns(int group) {
  if (group == 1) return code_fns<1>();
  if (group == 2) return code_fns<2>();
  if (group == 3) return code_fns<3>();
  if (group == 4) return code_fns<4>();
  if constexpr (Vec::kMaxGroupChunk >= 5) {
    if (group == 5) return code_fns<5>();
  }
  if constexpr (Vec::kMaxGroupChunk >= 8) {
    if (group == 6) return code_fns<6>();
    if (group == 7) return code_fns<7>();
    if (group == 8) return code_fns<8>();
  }
  return {nullptr, nullptr};
}

// One step of online softmax of a chunk of query heads.
struct CodeSoftmax {
  float logit_cap;
  const float* q_scale;  // [GB], times the scale of scores
  float k_scale;
  float v_scale;
  float* highest;  // [GB] base-2 logarithm of the largest weight so far, -inf at first
  float* totals;   // [GB, kLanes] sums of the weights so far, of some of the tokens in each lane
  float* rescale;  // [GB] by which earlier sums shrink
  float* factor;   // [GB] scale of a sum of codes
};

// Weights are 2^(score - largest score of these tokens), 32767 the code of the largest.
inline void softmax_codes(const CodeTile& tile, int group, const CodeSoftmax& step) {
  using F = Vec::F;
  constexpr int W = Vec::kLanes;
  const Scores to(step.logit_cap);
  const F unit = Vec::set1(kLargestShort);
  const int padded = static_cast<int>(coded_tokens(tile.tokens));
  for (int g = 0; g < group; ++g) {
    float* const scores = tile.scores + g * kTileTokens;
    // So that no score is beyond the limit: sums of codes are below 2^31.
    const F factor =
        within(kScoreLimit * 0x1p-31f, to.factor(Vec::set1(step.k_scale * step.q_scale[g])));
    F most = Vec::set1(-kInfinity);
    for (int t = 0; t < padded; t += W) {
      const F s = to.of(factor, Vec::load(scores + t));
      Vec::store(scores + t, s);
      most = Vec::max(most, s);
    }
    if (padded != tile.tokens) {
      for (int t = tile.tokens; t < padded; ++t) scores[t] = -kInfinity;
      most = Vec::set1(-kInfinity);
      for (int t = 0; t < padded; t += W) most = Vec::max(most, Vec::load(scores + t));
    }
    const F largest = Vec::set1(Vec::hmax(most));
    const F before = Vec::set1(step.highest[g]);
    const F now = Vec::max(before, largest);
    const F shrink = exp2_nonpositive(Vec::sub(before, now));
    const F lift = exp2_nonpositive(Vec::sub(largest, now));
    F total = Vec::zero();
    for (int t = 0; t < padded; t += W) {
      const F weight = exp2_nonpositive(Vec::sub(Vec::load(scores + t), largest));
      total = Vec::add(total, weight);
      Vec::store_shorts(Vec::mul(unit, weight), tile.weights + g * kTileTokens + t);
    }
    float* const totals = step.totals + g * W;
    Vec::store(totals, Vec::fma(shrink, Vec::load(totals), Vec::mul(lift, total)));
    step.highest[g] = Vec::first(now);
    step.rescale[g] = Vec::first(shrink);
    // Codes cannot say that a weight is NaN; the totals do, by which the output is divided.
    step.factor[g] = Vec::first(lift) * step.v_scale * (1.0f / kLargestShort);
  }
}

// Where the codes of one page begin, and their scales; whether they are in cache.
struct CodePlace {
  const char* codes;
  const float* scales;
  bool cached;
};

inline void attend_coded_heads(const AttendArgs& args, HeadRange range) {
  const KvPages& kv = *args.kv;
  const int dim = kv.head_dim;
  const int heads = range.head_end - range.head_begin;
  const int group = range.group_end - range.group_begin;
  const int rows = heads * group;
  const ptrdiff_t head_bytes = coded_tokens(kv.page_size) * dim;  // of K, and of V
  const ptrdiff_t page_bytes = 2 * head_bytes * kv.kv_heads;
  const Chunks chunks(group);
  const CodeFns run = find_code_fns(chunks.size);
  const CodeFns run_larger = chunks.larger > 0 ? find_code_fns(chunks.size + 1) : run;

  alignas(64) int16_t q[kScratchFloats];
  alignas(64) int16_t natural[Vec::kMaxGroupChunk * kMaxCodedDim];
  float q_scale[kScratchRows];
  alignas(64) float acc[kScratchFloats];
  alignas(64) float scores[Vec::kMaxGroupChunk * kTileTokens];
  alignas(64) int16_t weights[Vec::kMaxGroupChunk * kTileTokens];
  alignas(64) float totals[kScratchRows * Vec::kLanes];
  float highest[kScratchRows];
  float rescale[Vec::kMaxGroupChunk];
  float factor[Vec::kMaxGroupChunk];
  for (int h = 0; h < heads; ++h) {
    const int q_head = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int c = 0, g = 0; c < chunks.count; g += chunks.of(c), ++c) {
      const int row = h * group + g;
      for (int i = 0; i < chunks.of(c); ++i) {
        const float* const from = args.q + static_cast<ptrdiff_t>(q_head + g + i) * dim;
        q_scale[row + i] = args.params->scale * encode_shorts(from, dim, natural + i * dim);
      }
      pack_query(natural, chunks.of(c), dim, q + row * dim);
    }
  }
  for (int i = 0; i < rows * dim; ++i) acc[i] = 0.0f;
  for (int i = 0; i < rows * Vec::kLanes; ++i) totals[i] = 0.0f;
  for (int row = 0; row < rows; ++row) highest[row] = -kInfinity;

  const Entries entries(args);
  // `ahead`: only for prefetching.
  auto place_at = [&](int i, bool ahead) -> CodePlace {
    if (args.records != nullptr) {
      const Int8Record record =
          ahead ? Int8Record{args.records->first(i), false} : args.records->get(i);
      const char* const codes = reinterpret_cast<const char*>(record.at);
      return {codes, reinterpret_cast<const float*>(codes + page_bytes), record.cached};
    }
    const int64_t page = entries.page(i);
    return {static_cast<const char*>(kv.k) + page * page_bytes, kv.scales + 2 * page * kv.kv_heads,
            false};
  };

  // What is read of a page lies side by side; K and V of a head come in tiles, one after the other
  // if a page is one tile. Hints are that much ahead, in whole tiles.
  const ptrdiff_t first_byte = 2 * range.head_begin * head_bytes, span = 2 * heads * head_bytes;
  const ptrdiff_t tile_bytes = head_bytes < kTileTokens * dim ? head_bytes : kTileTokens * dim;
  const ptrdiff_t whole = kCodeLeadBytes / tile_bytes * tile_bytes;
  const ptrdiff_t lead = whole < tile_bytes ? tile_bytes : whole < span ? whole : span;
  const ptrdiff_t lead_again = kCodeLeads * lead < span ? kCodeLeads * lead : span;

  int entry = entries.from(0);
  CodePlace here{};
  if (entries.has(entry)) {
    here = place_at(entry, false);
    // Nothing was computed while the first codes could have come: ask for them at once.
    for (ptrdiff_t i = 0; i < lead_again && !here.cached; i += kLineBytes)
      prefetch(here.codes + first_byte + i);
  }
  while (entries.has(entry)) {
    const int following = entries.from(entry + 1);
    // At the end the prefetches go to the page at hand, which is cached: cheaper than branches.
    const CodePlace next = entries.has(following) ? place_at(following, true) : here;
    const int page_tokens = entries.tokens(entry);
    if (entries.has(following)) {
      prefetch(reinterpret_cast<const char*>(next.scales + range.head_begin));
      prefetch(reinterpret_cast<const char*>(next.scales + kv.kv_heads + range.head_begin));
    }
    auto walk = [&](ptrdiff_t at) {
      return at < span ? here.codes + first_byte + at : next.codes + first_byte + (at - span);
    };
    auto hints = [&](ptrdiff_t at) -> Hints {
      // Of a page in cache nothing has to be asked for: all hints are for what follows.
      if (here.cached) return {next.codes + first_byte + at, 0};
      const char* const again = walk(at + lead_again);
      return {again, walk(at + lead) - again};
    };
    CodeTile tile;
    tile.dim = dim;
    tile.scores = scores;
    tile.weights = weights;
    tile.rescale = rescale;
    tile.factor = factor;
    for (int h = 0; h < heads; ++h) {
      const int head = range.head_begin + h;
      for (int begin = 0; begin < page_tokens; begin += kTileTokens) {
        const ptrdiff_t k_at = 2 * h * head_bytes + ptrdiff_t{begin} * dim;
        const ptrdiff_t v_at = k_at + head_bytes;
        Hints k_ahead = hints(k_at), v_ahead = hints(v_at);
        tile.tokens = page_tokens - begin < kTileTokens ? page_tokens - begin : kTileTokens;
        for (int c = 0, row = h * group; c < chunks.count; row += chunks.of(c), ++c) {
          const CodeFns& fns = c < chunks.larger ? run_larger : run;
          tile.q = q + row * dim;
          tile.acc = acc + row * dim;
          tile.codes = here.codes + first_byte + k_at;
          tile.ahead = k_ahead;
          fns.score(tile);
          softmax_codes(tile, chunks.of(c),
                        {args.params->logit_cap, q_scale + row, here.scales[head],
                         here.scales[kv.kv_heads + head], highest + row, totals + row * Vec::kLanes,
                         rescale, factor});
          tile.codes = here.codes + first_byte + v_at;
          tile.ahead = v_ahead;
          fns.weigh(tile);
          // Later chunks find the tile in cache: their hints are for lines that are there.
          k_ahead = v_ahead = {tile.codes, 0};
        }
      }
    }
    entry = following;
    here = entries.has(entry) ? place_at(entry, false) : here;
  }

  for (int h = 0; h < heads; ++h) {
    const int q_head = (range.head_begin + h) * args.params->group + range.group_begin;
    for (int g = 0; g < group; ++g) {
      const int row = h * group + g;
      const RowResult result(highest[row], Vec::hsum(Vec::load(totals + row * Vec::kLanes)));
      float* const out = args.out + static_cast<ptrdiff_t>(q_head + g) * dim;
      for (int d = 0; d < dim; ++d) out[d] = result.inverse * acc[row * dim + d];
      args.lse[q_head + g] = result.lse;
    }
  }
}

inline void attend_all_codes(const AttendArgs& args) {
  for_heads_that_fit(args, [&](HeadRange range) { attend_coded_heads(args, range); });
}

}  // namespace
}  // namespace scout
