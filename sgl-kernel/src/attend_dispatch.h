// Which block functions serve a storage type, head size and group. Include a vec_*.h first.
#pragma once

#define SCOUT_FLOATS 1  // pages of any type
#define SCOUT_BF16 2    // pages of bf16 and fp8 under queries of bf16

// What this translation unit serves; one that serves the second says so before it includes this.
#ifndef SCOUT_STORAGE
#define SCOUT_STORAGE SCOUT_FLOATS
#endif

#include "attend_tile.h"
#include "attend_tile_values.h"
#if SCOUT_STORAGE == SCOUT_BF16
#include "attend_tile_bf16.h"
#endif

namespace scout {
namespace {

// How pages of one type are attended to.
struct BlockFns {
  void (*pack)(const float* from, void* to, int dim);  // a query, to what score reads
  int query_bytes;                                     // of an element of that
  void (*score)(const Block&);
  void (*finish)(float* weights, ptrdiff_t stride, int tokens);  // to what weigh reads; may be null
  void (*weigh)(const Block&);
  void (*unpack)(const float* from, float factor, float* to, int dim);  // a row of sums
  float widening;  // by what dot products and sums come out too small
  float lift;      // by what weights are to be more than they are
};

template <DType T, int kDim, int GB>
BlockFns fns() {
  constexpr float kWidening = Vec::widening(T) / Vec::lift(T);
#if SCOUT_STORAGE == SCOUT_FLOATS
  return {pack_row<T>,
          4,
          score_block<T, kDim, GB>,
          nullptr,
          weigh_block<T, kDim, GB>,
          unpack_row<T>,
          kWidening,
          Vec::lift(T)};
#else
  if constexpr (T == DType::kBF16)
    return {pack_words<T>,
            2,
            score_words_block<T, kDim, GB>,
            nullptr,
            weigh_block<T, kDim, GB>,
            unpack_row<T>,
            kWidening,
            1.0f};
  else
    return {pack_words<T>,
            2,
            score_words_block<T, kDim, GB>,
            pair_weights,
            weigh_pairs_block<T, kDim, GB>,
            unpack_pairs,
            1.0f,
            1.0f};
#endif
}

template <DType T, int kDim>
BlockFns fns_for_group(int group) {
  static_assert(Vec::kMaxGroupChunk <= kMaxGroup);
  if (group == 1) return fns<T, kDim, 1>();
  if (group == 2) return fns<T, kDim, 2>();
  if (group == 3) return fns<T, kDim, 3>();
  if (group == 4) return fns<T, kDim, 4>();
  if (group == 5) return fns<T, kDim, 5>();
  if constexpr (Vec::kMaxGroupChunk >= 8) {
    if (group == 6) return fns<T, kDim, 6>();
    if (group == 7) return fns<T, kDim, 7>();
    if (group == 8) return fns<T, kDim, 8>();
  }
  return {};
}

// The head sizes of most models at compile time, which gains a little; at 96 and 256 it gained
// nothing. fp32 pages are for tests.
template <DType T>
BlockFns fns_for_dim(int dim, int group) {
  switch (T != DType::kF32 ? dim : 0) {
    case 64:
      return fns_for_group<T, 64>(group);
    case 128:
      return fns_for_group<T, 128>(group);
    default:
      return fns_for_group<T, 0>(group);
  }
}

inline BlockFns find_block_fns(DType dtype, int dim, int group) {
  if (dtype == DType::kBF16) return fns_for_dim<DType::kBF16>(dim, group);
#if SCOUT_STORAGE == SCOUT_FLOATS
  if (dtype == DType::kF16) return fns_for_dim<DType::kF16>(dim, group);
  if (dtype == DType::kF32) return fns_for_dim<DType::kF32>(dim, group);
#endif
  if (dtype == DType::kE4M3) return fns_for_dim<DType::kE4M3>(dim, group);
  if (dtype == DType::kE5M2) return fns_for_dim<DType::kE5M2>(dim, group);
  return {};
}

}  // namespace
}  // namespace scout
