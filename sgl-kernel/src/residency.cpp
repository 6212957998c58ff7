#include "residency.h"

#include <algorithm>
#include <cstring>
#include <limits>

namespace scout {
namespace {

constexpr float kNone = std::numeric_limits<float>::infinity();
constexpr int64_t kAhead = 16;  // prefetch distance in pages, each on different cache lines
// While pages are touched: enough to hide memory latency, few enough not to be evicted before use.
constexpr int64_t kTouchAhead = 256;
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

constexpr int64_t kBlock = 32;                  // slots examined together
constexpr uint32_t kNoFrequency = 0x7fffffffu;  // more than the bits of any frequency

// Bits that order like the (non-negative) frequency.
uint32_t bits_of(float frequency) {
  frequency += 0.0f;  // -0.0 becomes +0.0
  uint32_t bits;
  std::memcpy(&bits, &frequency, sizeof(bits));
  return bits;
}

float frequency_of(uint32_t bits) {
  float frequency;
  std::memcpy(&frequency, &bits, sizeof(frequency));
  return frequency;
}

// A slot with its sort key: frequency, then stamp, then slot index.
struct RankedSlot {
  uint64_t key;
  int64_t slot;

  bool operator<(const RankedSlot& other) const {
    return key != other.key ? key < other.key : slot < other.slot;
  }
};

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

bool are_valid(const Residency& r, const LayerPageIds& pages) {
  const int32_t num_pages =
      static_cast<int32_t>(std::min<int64_t>(r.num_pages, std::numeric_limits<int32_t>::max()));
  for (int64_t i = 0; i < pages.n; ++i) {
    if (pages.layers[i] < 0 || pages.layers[i] >= r.num_layers) return false;
    for (int64_t b = 0; b < pages.rows; ++b) {
      const int32_t* const ids = pages.row(i, b);
      int32_t bad = 0;  // as wide as the ids, or the loop is not vectorized
      for (int64_t j = 0; j < pages.k; ++j) bad |= (ids[j] < -1) | (ids[j] >= num_pages);
      if (bad) return false;
    }
  }
  return true;
}

void count_pages(const LayerPageIds& pages, int64_t* counts) {
  for (int64_t i = 0; i < pages.n; ++i) {
    for (int64_t b = 0; b < pages.rows; ++b) {
      const int32_t* const ids = pages.row(i, b);
      int32_t count = 0;
      for (int64_t j = 0; j < pages.k; ++j) count += ids[j] >= 0;
      *counts++ = count;
    }
  }
}

void touch_pages(Residency& r, const LayerPageIds& pages, const float* weights, int32_t step) {
  const int64_t all_rows = pages.n * pages.rows;
  const int64_t last_slot = r.num_slots - 1;
  const int64_t rows_ahead = std::max<int64_t>(1, kTouchAhead / std::max<int64_t>(1, pages.k));
  for (int64_t i = 0; i < pages.n; ++i) {
    const int64_t layer = pages.layers[i];
    PageUse* const of_page = r.uses.data() + layer * r.num_pages;
    for (int64_t b = 0; b < pages.rows; ++b) {
      // Prefetch one at a time: bursts stall.
      const int64_t next = std::min(i * pages.rows + b + rows_ahead, all_rows - 1);
      const int32_t* const next_ids = pages.row(next / pages.rows, next % pages.rows);
      PageUse* const of_next = r.uses.data() + pages.layers[next / pages.rows] * r.num_pages;
      const int32_t* const ids = pages.row(i, b);
      const float weight = weights[b];
      for (int64_t j = 0; j < pages.k; ++j) {
        __builtin_prefetch(of_next + std::max(next_ids[j], 0), 1);
        if (ids[j] < 0) continue;
        PageUse& use = of_page[ids[j]];
        use.frequency += weight;
        use.stamp = step;
      }
    }
    // Done while the layer's lines are cached; those of unselected pages need prefetching.
    const int32_t* const page_of = r.page_of.data() + layer * r.num_slots;
    float* const slot_frequency = r.slot_frequency.data() + layer * r.num_slots;
    int32_t* const slot_stamp = r.slot_stamp.data() + layer * r.num_slots;
    for (int64_t slot = 0; slot < r.num_slots; ++slot) {
      __builtin_prefetch(of_page + std::max(page_of[std::min(slot + kTouchAhead, last_slot)], 0));
      const int32_t page = page_of[slot];
      const PageUse use = page >= 0 ? of_page[page] : PageUse{kNone, -1};
      slot_frequency[slot] = use.frequency;
      slot_stamp[slot] = use.stamp;
    }
  }
}

int64_t protect_pages(Residency& r, const int64_t* pages, int64_t n, int32_t step) {
  int64_t absent = 0;
  for (int64_t layer = 0; layer < r.num_layers; ++layer) {
    const int64_t next = std::min(layer + 1, r.num_layers - 1) * r.num_pages;
    PageUse* const of_page = r.uses.data() + layer * r.num_pages;
    const int32_t* const slot_of = r.slot_of.data() + layer * r.num_pages;
    int32_t* const slot_stamp = r.slot_stamp.data() + layer * r.num_slots;
    for (int64_t i = 0; i < n; ++i) {
      __builtin_prefetch(r.uses.data() + next + pages[i], 1);
      __builtin_prefetch(r.slot_of.data() + next + pages[i]);
      const int32_t slot = slot_of[pages[i]];
      of_page[pages[i]].stamp = step;
      if (slot >= 0) slot_stamp[slot] = step;
      absent += slot < 0;
    }
  }
  return absent;
}

FoundSlots least_frequent_slots(const Residency& r, const int64_t* counts, int32_t before_step,
                                const float* below) {
  FoundSlots found;
  std::vector<RankedSlot> heap;  // max-heap of the least frequent so far
  for (int64_t layer = 0; layer < r.num_layers; ++layer) {
    const size_t count = static_cast<size_t>(std::clamp<int64_t>(counts[layer], 0, r.num_slots));
    if (count == 0) continue;
    const float* const frequency = r.slot_frequency.data() + layer * r.num_slots;
    const int32_t* const stamp = r.slot_stamp.data() + layer * r.num_slots;
    heap.clear();
    float highest = below[layer];  // upper bound for candidates
    const auto look_at = [&](int64_t slot) {
      if (!(frequency[slot] < below[layer])) return;  // also rejects slots without a page (inf)
      const uint32_t age =
          static_cast<uint32_t>(stamp[slot]) ^ 0x80000000u;  // order-preserving as unsigned
      const RankedSlot next{static_cast<uint64_t>(bits_of(frequency[slot])) << 32 | age, slot};
      if (heap.size() == count) {
        if (!(next < heap.front())) return;
        std::pop_heap(heap.begin(), heap.end());
        heap.pop_back();
      }
      heap.push_back(next);
      std::push_heap(heap.begin(), heap.end());
      if (heap.size() == count) highest = frequency_of(heap.front().key >> 32);
    };
    const auto may_be_wanted = [&](int64_t slot) -> int {
      return (frequency[slot] <= highest) & (stamp[slot] < before_step);
    };
    // Few of many are wanted: most blocks have no candidates.
    for (int64_t first = 0; first < r.num_slots; first += kBlock) {
      const int64_t end = std::min(first + kBlock, r.num_slots);
      if (end - first == kBlock) {
        int any = 0;
        for (int64_t i = 0; i < kBlock; ++i) any |= may_be_wanted(first + i);
        if (!any) continue;
      }
      // Compact candidates without branches first, as which slots they are is unpredictable.
      int64_t found_here[kBlock], count_here = 0;
      for (int64_t slot = first; slot < end; ++slot) {
        found_here[count_here] = slot;
        count_here += may_be_wanted(slot);
      }
      for (int64_t i = 0; i < count_here; ++i) look_at(found_here[i]);
    }
    std::sort_heap(heap.begin(), heap.end());
    for (const RankedSlot& one : heap) {
      found.layers.push_back(layer);
      found.slots.push_back(one.slot);
      found.frequency.push_back(frequency_of(one.key >> 32));
    }
  }
  return found;
}

FoundPages most_frequent_pages(const Residency& r, const LayerPageIds& pages, const bool* counts,
                               const bool* is_first, const int64_t* limits) {
  FoundPages found;
  std::vector<int32_t> missed(pages.rows * pages.k);
  // Sort keys, ascending: is of a later row, rarity, page.
  std::vector<uint64_t> wanted(missed.size());
  // The (call, layer) counter at which each page was last seen. Persistent, since clearing it would
  // dominate with many pages.
  static thread_local std::vector<uint32_t> seen_for;
  static thread_local uint32_t now = 0;
  if (static_cast<int64_t>(seen_for.size()) < r.num_pages) seen_for.resize(r.num_pages, 0);
  const auto page_of = [](uint64_t code) { return static_cast<uint32_t>(code); };
  for (int64_t i = 0; i < pages.n; ++i) {
    if (limits[i] <= 0) continue;
    const PageUse* const of_page = r.uses.data() + pages.layers[i] * r.num_pages;
    int64_t count = 0;
    if (++now == 0) {  // once in 2^32 layers
      std::fill(seen_for.begin(), seen_for.end(), 0u);
      now = 1;
    }
    // is_first rows come first: a page missed by several rows counts once, with the best priority.
    // Branch-free on which pages a row misses, which is unpredictable.
    for (const bool first : {true, false}) {
      int64_t end = 0;
      for (int64_t b = 0; b < pages.rows; ++b) {
        if (is_first[b] != first || !counts[i * pages.rows + b]) continue;
        const int32_t* const ids = pages.row(i, b);
        for (int64_t j = 0; j < pages.k; ++j) {
          __builtin_prefetch(of_page + std::max(ids[j], 0));
          __builtin_prefetch(seen_for.data() + std::max(ids[j], 0), 1);
          missed[end] = ids[j];
          end += ids[j] >= 0;
        }
      }
      const uint64_t later = first ? 0 : 1;
      for (int64_t j = 0; j < end; ++j) {
        const int32_t page = missed[j];
        const uint64_t rarity = kNoFrequency - bits_of(of_page[page].frequency);
        wanted[count] = later << 63 | rarity << 32 | static_cast<uint64_t>(page);
        count += seen_for[page] != now;
        seen_for[page] = now;
      }
    }
    const int64_t taken = std::min(count, limits[i]);
    const auto first = wanted.begin(), end = first + taken;
    if (taken < count) std::nth_element(first, end, first + count);
    std::sort(first, end, [&](uint64_t a, uint64_t b) { return page_of(a) < page_of(b); });
    for (auto code = first; code != end; ++code) {
      found.layers.push_back(pages.layers[i]);
      found.pages.push_back(page_of(*code));
    }
  }
  return found;
}

}  // namespace scout
