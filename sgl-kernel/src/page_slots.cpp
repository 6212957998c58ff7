#include "page_slots.h"

#include <algorithm>
#include <limits>

namespace scout {
namespace {

constexpr int32_t kFree = -1;
constexpr int32_t kReserved = -2;
constexpr int64_t kAhead = 16;  // pages; every one is other lines of memory

void clear_slot(const PageSlots& slots, int64_t at, int32_t state) {
  slots.page_of[at] = state;
  slots.slot_heat[at] = std::numeric_limits<float>::infinity();
}

void give_back(const PageSlots& slots, int64_t layer, int64_t slot) {
  slots.free[layer * slots.num_slots + slots.num_free[layer]++] = slot;
  clear_slot(slots, layer * slots.num_slots + slot, kFree);
}

}  // namespace

std::vector<int64_t> absent_keys(const PageSlots& slots, const int64_t* keys, int64_t n) {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t ahead = keys[std::min(i + kAhead, n - 1)];
    __builtin_prefetch(slots.slot_of + ahead);
    __builtin_prefetch(slots.is_pending + ahead);
    const int64_t key = keys[i];
    if (slots.slot_of[key] < 0 && !slots.is_pending[key]) found.push_back(key);
  }
  if (!std::is_sorted(found.begin(), found.end())) std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool reserve(const PageSlots& slots, const int64_t* keys, int64_t n, Reserved* reserved) {
  std::vector<int64_t> counts(slots.num_layers, 0);
  for (int64_t i = 0; i < n; ++i) ++counts[keys[i] / slots.num_pages];
  for (int64_t layer = 0; layer < slots.num_layers; ++layer) {
    if (counts[layer] > slots.num_free[layer]) return false;
  }
  for (int64_t layer = 0; layer < slots.num_layers; ++layer) {
    slots.num_free[layer] -= counts[layer];
    counts[layer] = slots.num_free[layer];  // from now on, where its next slot stands
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t layer = keys[i] / slots.num_pages, page = keys[i] % slots.num_pages;
    const int64_t slot = slots.free[layer * slots.num_slots + counts[layer]++];
    clear_slot(slots, layer * slots.num_slots + slot, kReserved);
    slots.is_pending[keys[i]] = true;
    reserved->layers.push_back(layer);
    reserved->pages.push_back(page);
    reserved->slots.push_back(slot);
    reserved->generations.push_back(slots.generation[page]);
  }
  return true;
}

std::vector<int64_t> land(const PageSlots& slots, const int64_t* layers, const int64_t* pages,
                          const int64_t* of_layer, const int64_t* generations, int64_t n,
                          int32_t step) {
  std::vector<int64_t> landed;
  landed.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t next = std::min(i + kAhead, n - 1);
    const int64_t ahead = layers[next] * slots.num_pages + pages[next];
    __builtin_prefetch(slots.uses + ahead, 1);
    __builtin_prefetch(slots.slot_of + ahead, 1);
    __builtin_prefetch(slots.is_pending + ahead, 1);
    if (generations[i] != slots.generation[pages[i]]) {
      give_back(slots, layers[i], of_layer[i]);
      continue;
    }
    const int64_t key = layers[i] * slots.num_pages + pages[i];
    const int64_t at = layers[i] * slots.num_slots + of_layer[i];
    PageUse& use = slots.uses[key];
    use.stamp = std::max(use.stamp, step);
    slots.slot_of[key] = static_cast<int32_t>(of_layer[i]);
    slots.is_pending[key] = false;
    slots.page_of[at] = static_cast<int32_t>(pages[i]);
    slots.slot_heat[at] = use.heat;
    slots.slot_stamp[at] = use.stamp;
    landed.push_back(key);
  }
  return landed;
}

std::vector<int64_t> vacate(const PageSlots& slots, const int64_t* layers, const int64_t* of_layer,
                            int64_t n) {
  std::vector<int64_t> keys;
  keys.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t page = slots.page_of[layers[i] * slots.num_slots + of_layer[i]];
    keys.push_back(layers[i] * slots.num_pages + page);
    __builtin_prefetch(slots.slot_of + keys.back(), 1);
  }
  for (int64_t i = 0; i < n; ++i) {
    slots.slot_of[keys[i]] = -1;
    give_back(slots, layers[i], of_layer[i]);
  }
  return keys;
}

}  // namespace scout
