// The long passes over how much each page of each layer has been of use. Semantics, and the same in
// numpy, are in python/sglang_scout/core/uses.py. Plain code: bound by memory.
#pragma once

#include <cstdint>
#include <vector>

namespace scout {

// Of one page in one layer. Both are in one word of eight bytes, since whoever wants one wants the
// other, and every page is another line of memory.
struct PageUse {
  float heat;  // never negative or NaN
  int32_t stamp;
};

// uses [num_layers, num_pages], and of each layer's slots [num_layers, num_slots] the page,
// negative where there is none, and its heat, there infinite, and stamp. These stand side by side:
// of most slots only one is of interest, and not for long.
struct PageUses {
  PageUse* uses;
  const int32_t* page_of;
  float* slot_heat;
  int32_t* slot_stamp;
  int64_t num_layers, num_pages, num_slots;
};

// Pages [n, rows, k] of `layers` [n], -1 where there is none. Rows need not stand close together.
struct LayerPageIds {
  const int64_t* layers;
  const int32_t* ids;
  int64_t n, rows, k;
  int64_t layer_stride, row_stride;  // in elements

  const int32_t* row(int64_t i, int64_t b) const { return ids + i * layer_stride + b * row_stride; }
};

// All layers in [0, num_layers), all ids in [-1, num_pages).
bool are_valid(const PageUses& uses, const LayerPageIds& pages);

// counts [n, rows]: the ids of each row that are not negative.
void count_pages(const LayerPageIds& pages, int64_t* counts);

// heat += weights[b], stamp = step, for each page of row b; in this order, so that sums are the
// same everywhere. Then heat and stamp of these layers' slots anew. Ids must be valid; false if a
// slot's page is not.
bool touch_pages(const PageUses& uses, const LayerPageIds& pages, const float* weights,
                 int32_t step);

// stamp = step for `pages` [n], in every layer, and of their slots. slot_of [num_layers,
// num_pages], negative where there is none. Ids must be valid. How many have no slot.
int64_t protect_pages(const PageUses& uses, const int32_t* slot_of, const int64_t* pages, int64_t n,
                      int32_t step);

struct FoundSlots {
  std::vector<int64_t> layers, slots;
  std::vector<float> heat;
};

// Of each layer l the counts[l] slots whose pages are the coldest of those with a stamp before
// `before_step` and less heat than below[l]. By layer, then heat, stamp and slot.
FoundSlots coldest_slots(const PageUses& uses, const int64_t* counts, int32_t before_step,
                         const float* below);

struct FoundPages {
  std::vector<int64_t> layers, pages;
};

// Of each layer i the limits[i] distinct pages of those rows for which counts[i][b] holds: those of
// rows with is_first[b] before all others, then the hottest, with equal heat the smaller id. By
// layer, then id. Ids must be valid.
FoundPages hottest_pages(const PageUses& uses, const LayerPageIds& pages, const bool* counts,
                         const bool* is_first, const int64_t* limits);

}  // namespace scout
