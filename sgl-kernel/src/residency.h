// Metadata of the device's page slots: which (layer, page) lies in which slot, and how much each
// has been of use lately. The passes go over all that a step selected, or over all slots; plain
// code, bound by memory. Who calls them, and the terms: python/sglang_scout/ops/residency.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace scout {

// Of one page in one layer. Both are in one word of eight bytes, since whoever wants one wants the
// other, and every page is another line of memory.
struct PageUse {
  float frequency;  // decayed; never negative or NaN
  int32_t stamp;    // step in which it was last selected or landed, -1: never
};

// Of L layers, P pages and S slots a layer. What is said of a slot is said of the page in it: these
// stand side by side, since of most slots only one is of interest, and not for long.
struct Residency {
  Residency(int64_t layers, int64_t pages, int64_t slots);

  const int64_t num_layers, num_pages, num_slots;
  std::vector<PageUse> uses;           // [L, P]
  std::vector<int32_t> slot_of;        // [L, P] or -1
  std::unique_ptr<bool[]> is_pending;  // [L, P] on their way to a slot
  std::vector<int64_t> generation;     // [P] goes up when a page gets other content
  std::vector<int32_t> page_of;        // [L, S], negative where there is none
  std::vector<float> slot_frequency;   // [L, S], there infinite
  std::vector<int32_t> slot_stamp;     // [L, S]
  std::vector<int64_t> free;           // [L, S], of each layer the first num_free
  std::vector<int64_t> num_free;       // [L]
};

// Pages [n, rows, k] of `layers` [n], -1 where there is none. Rows need not stand close together.
struct LayerPageIds {
  const int64_t* layers;
  const int32_t* ids;
  int64_t n, rows, k;
  int64_t layer_stride, row_stride;  // in elements

  const int32_t* row(int64_t i, int64_t b) const { return ids + i * layer_stride + b * row_stride; }
};

// All layers in [0, L), all ids in [-1, P).
bool are_valid(const Residency& residency, const LayerPageIds& pages);

// counts [n, rows]: the ids of each row that are not negative.
void count_pages(const LayerPageIds& pages, int64_t* counts);

// frequency += weights[b], stamp = step, for each page of row b; in this order, so that sums are
// the same everywhere. Then frequency and stamp of these layers' slots anew. Ids must be valid.
void touch_pages(Residency& residency, const LayerPageIds& pages, const float* weights,
                 int32_t step);

// stamp = step for `pages` [n], in every layer, and of their slots. Ids must be valid. How many
// have no slot.
int64_t protect_pages(Residency& residency, const int64_t* pages, int64_t n, int32_t step);

struct FoundSlots {
  std::vector<int64_t> layers, slots;
  std::vector<float> frequency;
};

// Of each layer l the counts[l] slots whose pages are the least frequent of those with a stamp
// before `before_step` and a lower frequency than below[l]. By layer, then frequency, stamp and
// slot.
FoundSlots least_frequent_slots(const Residency& residency, const int64_t* counts,
                                int32_t before_step, const float* below);

struct FoundPages {
  std::vector<int64_t> layers, pages;
};

// Of each layer i the limits[i] distinct pages of those rows for which counts[i][b] holds: those of
// rows with is_first[b] before all others, then the most frequent, of equal ones the smaller id. By
// layer, then id. Ids must be valid.
FoundPages most_frequent_pages(const Residency& residency, const LayerPageIds& pages,
                               const bool* counts, const bool* is_first, const int64_t* limits);

// A key is the index of a (layer, page) in the flattened [L, P].

// The distinct `keys` [n] that neither have a slot nor are pending, ascending.
std::vector<int64_t> absent_keys(const Residency& residency, const int64_t* keys, int64_t n);

// Page pages[i] of layers[i] and slot slots[i] of that layer.
struct Reserved {
  std::vector<int64_t> layers, pages, slots, generations;
};

// Free slots for `keys` [n], ascending, of absent pages; false if a layer has too few.
bool reserve(Residency& residency, const int64_t* keys, int64_t n, Reserved* reserved);

// The n reserved pages get their slots, as if last selected in `step`; slots of pages whose
// generation is another now are given back. Returns the keys of those that got theirs.
std::vector<int64_t> land(Residency& residency, const int64_t* layers, const int64_t* pages,
                          const int64_t* slots, const int64_t* generations, int64_t n,
                          int32_t step);

// The pages in slots[i] of layers[i] lose them. Returns the keys of the pages.
std::vector<int64_t> vacate(Residency& residency, const int64_t* layers, const int64_t* slots,
                            int64_t n);

}  // namespace scout
