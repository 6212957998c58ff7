// Random histories of page_slots.h against what must hold of slots; run it under sanitizers. That
// numpy does the same is tested in Python.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "page_slots.h"

namespace {

constexpr float kInfinite = std::numeric_limits<float>::infinity();

void require(bool good, const char* what, unsigned seed) {
  if (good) return;
  std::fprintf(stderr, "slots_test: %s, seed %u\n", what, seed);
  std::exit(1);
}

void run(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % end); };
  const int64_t layers = 1 + below(3), pages = 1 + below(30), slots = 1 + below(40);
  std::vector<scout::PageUse> uses(layers * pages, scout::PageUse{1.5f, -1});
  std::vector<int32_t> slot_of(layers * pages, -1), page_of(layers * slots, -1);
  std::vector<int32_t> slot_stamp(layers * slots, -1);
  std::vector<float> slot_heat(layers * slots, kInfinite);
  std::vector<int64_t> generation(pages, 0), free(layers * slots), num_free(layers, slots);
  const auto is_pending = std::make_unique<bool[]>(layers * pages);
  for (int64_t i = 0; i < layers * slots; ++i) free[i] = i % slots;
  const scout::PageSlots all{uses.data(),
                             slot_of.data(),
                             is_pending.get(),
                             generation.data(),
                             page_of.data(),
                             slot_heat.data(),
                             slot_stamp.data(),
                             free.data(),
                             num_free.data(),
                             layers,
                             pages,
                             slots};
  std::vector<scout::Reserved> in_flight;

  for (int step = 1; step < 30; ++step) {
    std::vector<int64_t> keys(below(12));
    for (int64_t& key : keys) key = below(layers * pages);
    std::set<int64_t> absent;
    for (const int64_t key : keys) {
      if (slot_of[key] < 0 && !is_pending[key]) absent.insert(key);
    }
    keys = scout::absent_keys(all, keys.data(), static_cast<int64_t>(keys.size()));
    require(keys == std::vector<int64_t>(absent.begin(), absent.end()), "absent", seed);

    std::vector<int64_t> wanted(layers, 0);
    for (const int64_t key : keys) ++wanted[key / pages];
    bool fits = true;
    for (int64_t l = 0; l < layers; ++l) fits &= wanted[l] <= num_free[l];
    scout::Reserved taken;
    const bool reserved = scout::reserve(all, keys.data(), keys.size(), &taken);
    require(reserved == fits, "more than there are", seed);
    require(taken.pages.size() == (fits ? keys.size() : 0), "reserved", seed);
    for (size_t i = 0; i < taken.pages.size(); ++i) {
      require(taken.layers[i] * pages + taken.pages[i] == keys[i], "order", seed);
      require(page_of[taken.layers[i] * slots + taken.slots[i]] == -2, "state", seed);
    }
    if (fits) in_flight.push_back(taken);

    if (below(2)) ++generation[below(pages)];
    if (!in_flight.empty() && below(2)) {
      const size_t which = below(in_flight.size());
      const scout::Reserved r = in_flight[which];
      in_flight.erase(in_flight.begin() + which);
      const int64_t n = r.pages.size();
      const auto landed = scout::land(all, r.layers.data(), r.pages.data(), r.slots.data(),
                                      r.generations.data(), n, step);
      size_t found = 0;
      for (int64_t i = 0; i < n; ++i) {
        const int64_t key = r.layers[i] * pages + r.pages[i];
        const int64_t at = r.layers[i] * slots + r.slots[i];
        if (r.generations[i] != generation[r.pages[i]]) {
          require(page_of[at] == -1, "given back", seed);
          is_pending[key] = false;  // as who changes the generation does
          continue;
        }
        require(landed[found++] == key && slot_of[key] == r.slots[i], "landed", seed);
        require(!is_pending[key], "pending", seed);
        require(page_of[at] == r.pages[i] && slot_heat[at] == 1.5f, "mapped", seed);
        require(slot_stamp[at] == step && uses[key].stamp == step, "stamps", seed);
      }
      require(found == landed.size(), "number of landed", seed);
    }

    std::vector<int64_t> of_layer, slot;
    for (int64_t i = 0; i < layers * slots; ++i) {
      if (page_of[i] < 0 || below(4)) continue;
      of_layer.push_back(i / slots);
      slot.push_back(i % slots);
    }
    const auto gone = scout::vacate(all, of_layer.data(), slot.data(), slot.size());
    require(gone.size() == slot.size(), "number of vacated", seed);
    for (const int64_t key : gone) require(slot_of[key] == -1, "vacated", seed);

    for (int64_t l = 0; l < layers; ++l) {
      const std::set<int64_t> own(&free[l * slots], &free[l * slots] + num_free[l]);
      require(static_cast<int64_t>(own.size()) == num_free[l], "a slot is free twice", seed);
      for (int64_t s = 0; s < slots; ++s) {
        const int32_t page = page_of[l * slots + s];
        require((page == -1) == (own.count(s) > 0), "a free slot was lost", seed);
        require(page < 0 || slot_of[l * pages + page] == s, "map", seed);
        require((slot_heat[l * slots + s] == kInfinite) == (page < 0), "heat", seed);
      }
    }
  }
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 3000; ++seed) run(seed);
  std::printf("slots_test: 3000 histories passed\n");
  return 0;
}
