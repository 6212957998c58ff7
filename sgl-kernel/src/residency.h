// Metadata of the device's page slots: which (layer, page) is resident in which slot, and how
// frequently each was used recently. Passes run over everything that a step selected, or over all
// slots; plain, memory-bound code. Callers and terms: python/sglang_scout/ops/residency.py.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace scout {

// Of one page in one layer. Both fields share one 8-byte word, since they are used together and
// every page is a different cache line.
struct PageUse {
  float frequency;  // decayed; never negative or NaN
  int32_t stamp;    // step in which it was last selected or landed, -1: never
};

// For L layers, P pages and S slots per layer. Slot attributes are those of the page in the slot,
// as a structure of arrays, since for most slots a pass reads only one of them.
struct Residency {
  Residency(int64_t layers, int64_t pages, int64_t slots);

  const int64_t num_layers, num_pages, num_slots;
  std::vector<PageUse> uses;           // [L, P]
  std::vector<int32_t> slot_of;        // [L, P] or -1
  std::unique_ptr<bool[]> is_pending;  // [L, P] in flight to a slot
  std::vector<int64_t> generation;     // [P] incremented when a page's content is replaced
  std::vector<int32_t> page_of;        // [L, S], negative: none
  std::vector<float> slot_frequency;   // [L, S], infinite without a page
  std::vector<int32_t> slot_stamp;     // [L, S]
  std::vector<int64_t> free;           // [L, S], the first num_free of each layer are valid
  std::vector<int64_t> num_free;       // [L]
};

// Pages [n, rows, k] of `layers` [n], padded with -1. Rows may be strided.
struct LayerPageIds {
  const int64_t* layers;
  const int32_t* ids;
  int64_t n, rows, k;
  int64_t layer_stride, row_stride;  // in elements

  const int32_t* row(int64_t i, int64_t b) const { return ids + i * layer_stride + b * row_stride; }
};

// All layers in [0, L), all ids in [-1, P).
bool are_valid(const Residency& residency, const LayerPageIds& pages);

// counts [n, rows]: the number of non-negative ids in each row.
void count_pages(const LayerPageIds& pages, int64_t* counts);

// frequency += weights[b], stamp = step, for each page of row b; in this order, so that sums are
// reproducible. Then refreshes frequency and stamp of these layers' slots. Ids must be valid.
void touch_pages(Residency& residency, const LayerPageIds& pages, const float* weights,
                 int32_t step);

// stamp = step for `pages` [n] and their slots, in every layer. Ids must be valid. Returns how many
// have no slot.
int64_t protect_pages(Residency& residency, const int64_t* pages, int64_t n, int32_t step);

struct FoundSlots {
  std::vector<int64_t> layers, slots;
  std::vector<float> frequency;
};

// For each layer l, the counts[l] slots with the least frequent pages among those with a stamp
// before `before_step` and a frequency lower than below[l]. Sorted by layer, then frequency, stamp
// and slot.
FoundSlots least_frequent_slots(const Residency& residency, const int64_t* counts,
                                int32_t before_step, const float* below);

struct FoundPages {
  std::vector<int64_t> layers, pages;
};

// For each layer i, limits[i] distinct pages from the rows with counts[i][b]: pages of rows with
// is_first[b] have priority, then the most frequent, then the smaller id. Sorted by layer, then id.
// Ids must be valid.
FoundPages most_frequent_pages(const Residency& residency, const LayerPageIds& pages,
                               const bool* counts, const bool* is_first, const int64_t* limits);

// A key is the index of a (layer, page) in the flattened [L, P].

// The distinct `keys` [n] that neither have a slot nor are pending, ascending.
std::vector<int64_t> absent_keys(const Residency& residency, const int64_t* keys, int64_t n);

// Page pages[i] of layers[i] and slot slots[i] of that layer.
struct Reserved {
  std::vector<int64_t> layers, pages, slots, generations;
};

// Reserves free slots for absent pages, `keys` [n] ascending; false if a layer has too few.
bool reserve(Residency& residency, const int64_t* keys, int64_t n, Reserved* reserved);

// Maps the n reserved pages to their slots, as if last selected in `step`; slots of pages whose
// generation has changed are freed. Returns the keys of the mapped pages.
std::vector<int64_t> land(Residency& residency, const int64_t* layers, const int64_t* pages,
                          const int64_t* slots, const int64_t* generations, int64_t n,
                          int32_t step);

// Unmaps the pages in slots[i] of layers[i]. Returns their keys.
std::vector<int64_t> vacate(Residency& residency, const int64_t* layers, const int64_t* slots,
                            int64_t n);

}  // namespace scout
