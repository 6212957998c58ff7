// Which block functions serve a storage type, head size and group. Include a vec_*.h first.
#pragma once

#define SCOUT_FLOATS 1  // pages of any type
#define SCOUT_BF16 2    // pages of bf16 under queries of bf16

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

constexpr bool kBf16Queries = SCOUT_STORAGE == SCOUT_BF16;

struct BlockFns {
  void (*score)(const Block&);
  void (*weigh)(const Block&);
};

template <DType T, int kDim, int GB>
BlockFns fns() {
#if SCOUT_STORAGE == SCOUT_BF16
  return {score_pairs_block<kDim, GB>, weigh_block<T, kDim, GB>};
#else
  return {score_block<T, kDim, GB>, weigh_block<T, kDim, GB>};
#endif
}

template <DType T, int kDim>
BlockFns fns_for_group(int group) {
  static_assert(Vec::kMaxGroupChunk <= kMaxGroup);
  if (group == 1) return fns<T, kDim, 1>();
  if (group == 2) return fns<T, kDim, 2>();
  if (group == 3) return fns<T, kDim, 3>();
  if (group == 4) return fns<T, kDim, 4>();
  if constexpr (Vec::kMaxGroupChunk >= 5) {
    if (group == 5) return fns<T, kDim, 5>();
  }
  if constexpr (Vec::kMaxGroupChunk >= 8) {
    if (group == 6) return fns<T, kDim, 6>();
    if (group == 7) return fns<T, kDim, 7>();
    if (group == 8) return fns<T, kDim, 8>();
  }
  return {nullptr, nullptr};
}

// The head sizes of most models at compile time, which gains up to 7 % at 64 and up to 5 % at 128 with
// AVX2; at 96 and 256 it gained nothing. fp32 pages are for tests.
template <DType T>
BlockFns fns_for_dim(int dim, int group) {
  switch (Vec::kSpecialiseDims && T != DType::kF32 ? dim : 0) {
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
  if (dtype == DType::kE4M3) return fns_for_dim<DType::kE4M3>(dim, group);
  if (dtype == DType::kE5M2) return fns_for_dim<DType::kE5M2>(dim, group);
#endif
  return {nullptr, nullptr};
}

}  // namespace
}  // namespace scout
