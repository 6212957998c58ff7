#include "residency.h"

#include <algorithm>
#include <limits>

namespace scout {
namespace {

constexpr float kNone = std::numeric_limits<float>::infinity();
constexpr int64_t kAhead = 16;  // prefetch distance in pages, each on different cache lines
constexpr int32_t kFree = -1;
constexpr int32_t kReserved = -2;

void clear_slot(Residency& r, int64_t at, int32_t state) {
  r.page_of[at] = state;
  r.slot_frequency[at] = kNone;
}

void give_back(Residency& r, int64_t layer, int64_t slot) {
  r.free[layer * r.num_slots + r.num_free[layer]++] = slot;
  clear_slot(r, layer * r.num_slots + slot, kFree);
}

}  // namespace

Residency::Residency(int64_t layers, int64_t pages, int64_t slots)
    : num_layers(layers),
      num_pages(pages),
      num_slots(slots),
      uses(layers * pages, PageUse{0.0f, -1}),
      slot_of(layers * pages, -1),
      is_pending(new bool[layers * pages]()),
      generation(pages, 0),
      page_of(layers * slots, kFree),
      slot_frequency(layers * slots, kNone),
      slot_stamp(layers * slots, -1),
      free(layers * slots),
      num_free(layers, slots) {
  for (int64_t i = 0; i < layers * slots; ++i) free[i] = i % slots;
}

std::vector<int64_t> absent_keys(const Residency& r, const int64_t* keys, int64_t n) {
  std::vector<int64_t> found;
  for (int64_t i = 0; i < n; ++i) {
    const int64_t ahead = keys[std::min(i + kAhead, n - 1)];
    __builtin_prefetch(r.slot_of.data() + ahead);
    __builtin_prefetch(r.is_pending.get() + ahead);
    const int64_t key = keys[i];
    if (r.slot_of[key] < 0 && !r.is_pending[key]) found.push_back(key);
  }
  if (!std::is_sorted(found.begin(), found.end())) std::sort(found.begin(), found.end());
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

bool reserve(Residency& r, const int64_t* keys, int64_t n, Reserved* reserved) {
  std::vector<int64_t> counts(r.num_layers, 0);
  for (int64_t i = 0; i < n; ++i) ++counts[keys[i] / r.num_pages];
  for (int64_t layer = 0; layer < r.num_layers; ++layer) {
    if (counts[layer] > r.num_free[layer]) return false;
  }
  for (int64_t layer = 0; layer < r.num_layers; ++layer) {
    r.num_free[layer] -= counts[layer];
    counts[layer] = r.num_free[layer];  // from here on the position of its next free slot
  }
  for (int64_t i = 0; i < n; ++i) {
    const int64_t layer = keys[i] / r.num_pages, page = keys[i] % r.num_pages;
    const int64_t slot = r.free[layer * r.num_slots + counts[layer]++];
    clear_slot(r, layer * r.num_slots + slot, kReserved);
    r.is_pending[keys[i]] = true;
    reserved->layers.push_back(layer);
    reserved->pages.push_back(page);
    reserved->slots.push_back(slot);
    reserved->generations.push_back(r.generation[page]);
  }
  return true;
}

std::vector<int64_t> land(Residency& r, const int64_t* layers, const int64_t* pages,
                          const int64_t* slots, const int64_t* generations, int64_t n,
                          int32_t step) {
  std::vector<int64_t> landed;
  landed.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t next = std::min(i + kAhead, n - 1);
    const int64_t ahead = layers[next] * r.num_pages + pages[next];
    __builtin_prefetch(r.uses.data() + ahead, 1);
    __builtin_prefetch(r.slot_of.data() + ahead, 1);
    __builtin_prefetch(r.is_pending.get() + ahead, 1);
    if (generations[i] != r.generation[pages[i]]) {
      give_back(r, layers[i], slots[i]);
      continue;
    }
    const int64_t key = layers[i] * r.num_pages + pages[i];
    const int64_t at = layers[i] * r.num_slots + slots[i];
    PageUse& use = r.uses[key];
    use.stamp = std::max(use.stamp, step);
    r.slot_of[key] = static_cast<int32_t>(slots[i]);
    r.is_pending[key] = false;
    r.page_of[at] = static_cast<int32_t>(pages[i]);
    r.slot_frequency[at] = use.frequency;
    r.slot_stamp[at] = use.stamp;
    landed.push_back(key);
  }
  return landed;
}

std::vector<int64_t> vacate(Residency& r, const int64_t* layers, const int64_t* slots, int64_t n) {
  std::vector<int64_t> keys;
  keys.reserve(n);
  for (int64_t i = 0; i < n; ++i) {
    const int64_t page = r.page_of[layers[i] * r.num_slots + slots[i]];
    keys.push_back(layers[i] * r.num_pages + page);
    __builtin_prefetch(r.slot_of.data() + keys.back(), 1);
  }
  for (int64_t i = 0; i < n; ++i) {
    r.slot_of[keys[i]] = -1;
    give_back(r, layers[i], slots[i]);
  }
  return keys;
}

}  // namespace scout
