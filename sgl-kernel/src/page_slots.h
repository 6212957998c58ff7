// What changes when pages get slots and lose them, a few hundred of all layers at a time.
// Semantics, and the same in numpy, are in python/sglang_scout/core/pages.py.
#pragma once

#include <cstdint>
#include <vector>

#include "page_uses.h"

namespace scout {

// Of L layers, P pages and S slots a layer, as in core/pages.py and core/uses.py.
struct PageSlots {
  PageUse* uses;        // [L, P]
  int32_t* slot_of;     // [L, P]
  bool* is_pending;     // [L, P]
  int64_t* generation;  // [P]
  int32_t* page_of;     // [L, S]
  float* slot_heat;     // [L, S]
  int32_t* slot_stamp;  // [L, S]
  int64_t* free;        // [L, S], of each layer the first num_free
  int64_t* num_free;    // [L]
  int64_t num_layers, num_pages, num_slots;
};

// Page pages[i] of layers[i] and slot slots[i] of that layer.
struct Reserved {
  std::vector<int64_t> layers, pages, slots, generations;
};

// The distinct `keys` [n] that neither have a slot nor are pending, ascending.
std::vector<int64_t> absent_keys(const PageSlots& slots, const int64_t* keys, int64_t n);

// Free slots for `keys` [n], ascending, of absent pages; false if a layer has too few.
bool reserve(const PageSlots& slots, const int64_t* keys, int64_t n, Reserved* reserved);

// The n reserved pages get their slots, as if last selected in `step`; slots of pages whose
// generation is another now are given back. Returns the keys of those that got theirs.
std::vector<int64_t> land(const PageSlots& slots, const int64_t* layers, const int64_t* pages,
                          const int64_t* of_layer, const int64_t* generations, int64_t n,
                          int32_t step);

// The pages in slots of_layer[i] of layers[i] lose them. Returns the keys of the pages.
std::vector<int64_t> vacate(const PageSlots& slots, const int64_t* layers, const int64_t* of_layer,
                            int64_t n);

}  // namespace scout
