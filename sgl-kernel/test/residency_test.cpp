// Random histories of residency.h: its passes against plain loops, and invariants of slots. Run it
// under sanitizers; whole steps are compared with plain Python in the Python tests.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <tuple>
#include <vector>

#include "residency.h"

namespace {

using scout::PageUse;

constexpr float kInfinite = std::numeric_limits<float>::infinity();

void require(bool good, const char* what, unsigned seed) {
  if (good) return;
  std::fprintf(stderr, "residency_test: %s, seed %u\n", what, seed);
  std::exit(1);
}

void run_passes(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  const int64_t layers = 1 + below(3), pages = 1 + below(60), slots = 1 + below(70);
  const int64_t rows = below(5), k = below(6), wide = k + below(3);
  scout::Residency all(layers, pages, slots);
  auto& uses = all.uses;
  auto &page_of = all.page_of, &slot_of = all.slot_of;
  for (int64_t i = 0; i < layers * slots; ++i) {  // a page has at most one slot per layer
    const int32_t page = below(static_cast<int>(pages));
    int32_t& slot = slot_of[i / slots * pages + page];
    if (slot >= 0) continue;
    page_of[i] = page;
    slot = static_cast<int32_t>(i % slots);
  }
  std::vector<int64_t> ids_of(layers);
  for (int64_t l = 0; l < layers; ++l) ids_of[l] = l;
  std::vector<int32_t> ids(layers * rows * wide + 1);
  const scout::LayerPageIds missed{ids_of.data(), ids.data(), layers, rows, k, rows * wide, wide};

  for (int step = 1; step < 12; ++step) {
    for (int32_t& id : ids) id = below(static_cast<int>(pages) + 1) - 1;
    require(scout::are_valid(all, missed), "valid ids are refused", seed);
    if (layers * rows * k > 0) {
      int32_t& one = ids[below(static_cast<int>(rows)) * wide + below(static_cast<int>(k))];
      const int32_t kept = one;
      one = below(2) ? static_cast<int32_t>(pages) : -2;
      require(!scout::are_valid(all, missed), "ids out of range are taken", seed);
      one = kept;
      const int64_t layer = ids_of[0];
      ids_of[0] = below(2) ? layers : -1;
      require(!scout::are_valid(all, missed), "layers out of range are taken", seed);
      ids_of[0] = layer;
    }
    std::vector<float> weights(rows);
    for (float& weight : weights) weight = static_cast<float>(1 + below(3));
    std::vector<PageUse> expected = uses;
    for (int64_t l = 0; l < layers; ++l) {
      for (int64_t b = 0; b < rows; ++b) {
        for (int64_t j = 0; j < k; ++j) {
          const int32_t page = missed.row(l, b)[j];
          if (page < 0) continue;
          expected[l * pages + page].frequency += weights[b];
          expected[l * pages + page].stamp = step;
        }
      }
    }
    scout::touch_pages(all, missed, weights.data(), step);
    for (int64_t i = 0; i < layers * pages; ++i) {
      require(uses[i].frequency == expected[i].frequency && uses[i].stamp == expected[i].stamp,
              "touch", seed);
    }

    std::vector<int64_t> row_counts(layers * rows);
    scout::count_pages(missed, row_counts.data());
    for (int64_t i = 0; i < layers * rows; ++i) {
      const int32_t* const row = missed.row(i / rows, i % rows);
      require(row_counts[i] == k - std::count(row, row + k, -1), "counts", seed);
    }

    std::vector<int64_t> in_use(below(4));
    for (int64_t& page : in_use) page = below(static_cast<int>(pages));
    int64_t absent = 0;
    for (int64_t l = 0; l < layers; ++l) {
      for (const int64_t page : in_use) {
        expected[l * pages + page].stamp = step + 1;
        absent += slot_of[l * pages + page] < 0;
      }
    }
    require(scout::protect_pages(all, in_use.data(), in_use.size(), step + 1) == absent,
            "number of absent pages", seed);
    for (int64_t i = 0; i < layers * pages; ++i) {
      require(uses[i].stamp == expected[i].stamp, "protect", seed);
    }

    std::vector<int64_t> counts(layers);
    std::vector<float> limits(layers);
    std::vector<std::tuple<int64_t, float, int32_t, int64_t>> least;
    const int before = step + 2 - below(5);
    for (int64_t l = 0; l < layers; ++l) {
      counts[l] = below(9) - 1;
      limits[l] = below(2) ? kInfinite : static_cast<float>(below(12));
      std::vector<std::tuple<int64_t, float, int32_t, int64_t>> own;
      for (int64_t s = 0; s < slots; ++s) {
        const int32_t page = page_of[l * slots + s];
        if (page < 0) continue;
        const PageUse use = uses[l * pages + page];
        require(all.slot_frequency[l * slots + s] == use.frequency &&
                    all.slot_stamp[l * slots + s] == use.stamp,
                "frequency and stamp of a slot", seed);
        if (use.stamp < before && use.frequency < limits[l])
          own.push_back({l, use.frequency, use.stamp, s});
      }
      std::sort(own.begin(), own.end());
      own.resize(std::min<size_t>(own.size(), std::max<int64_t>(counts[l], 0)));
      least.insert(least.end(), own.begin(), own.end());
    }
    const auto found = scout::least_frequent_slots(all, counts.data(), before, limits.data());
    require(found.slots.size() == least.size(), "number of least frequent slots", seed);
    for (size_t i = 0; i < least.size(); ++i) {
      require(found.layers[i] == std::get<0>(least[i]) && found.slots[i] == std::get<3>(least[i]) &&
                  found.frequency[i] == std::get<1>(least[i]),
              "least frequent slots", seed);
    }

    // Not std::vector<bool>, whose elements have no addresses.
    const auto is_first = std::make_unique<bool[]>(rows + 1);
    const auto may = std::make_unique<bool[]>(layers * rows + 1);
    for (int64_t b = 0; b < rows; ++b) is_first[b] = below(2);
    for (int64_t i = 0; i < layers * rows; ++i) may[i] = below(4);
    std::vector<std::pair<int64_t, int64_t>> most;
    for (int64_t l = 0; l < layers; ++l) {
      std::map<int32_t, std::tuple<bool, float, int32_t>> worth;
      for (int64_t b = 0; b < rows; ++b) {
        for (int64_t j = 0; may[l * rows + b] && j < k; ++j) {
          const int32_t page = missed.row(l, b)[j];
          if (page < 0) continue;
          const std::tuple<bool, float, int32_t> rank{!is_first[b],
                                                      -uses[l * pages + page].frequency, page};
          const auto at = worth.emplace(page, rank).first;
          at->second = std::min(at->second, rank);
        }
      }
      std::vector<std::tuple<bool, float, int32_t>> ranks;
      for (const auto& [page, rank] : worth) ranks.push_back(rank);
      std::sort(ranks.begin(), ranks.end());
      ranks.resize(std::min<size_t>(ranks.size(), std::max<int64_t>(counts[l], 0)));
      std::vector<std::pair<int64_t, int64_t>> own;
      for (const auto& rank : ranks) own.push_back({l, std::get<2>(rank)});
      std::sort(own.begin(), own.end());
      most.insert(most.end(), own.begin(), own.end());
    }
    const auto best =
        scout::most_frequent_pages(all, missed, may.get(), is_first.get(), counts.data());
    require(best.pages.size() == most.size(), "number of most frequent pages", seed);
    for (size_t i = 0; i < most.size(); ++i) {
      require(best.layers[i] == most[i].first && best.pages[i] == most[i].second, "most pages",
              seed);
    }
  }
}

void run_slots(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int64_t end) { return static_cast<int64_t>(random() % end); };
  const int64_t layers = 1 + below(3), pages = 1 + below(30), slots = 1 + below(40);
  scout::Residency all(layers, pages, slots);
  for (scout::PageUse& use : all.uses) use.frequency = 1.5f;
  auto &slot_of = all.slot_of, &page_of = all.page_of;
  auto &generation = all.generation, &free = all.free, &num_free = all.num_free;
  auto& is_pending = all.is_pending;
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
          is_pending[key] = false;  // as the code that changes the generation does
          continue;
        }
        require(landed[found++] == key && slot_of[key] == r.slots[i], "landed", seed);
        require(!is_pending[key], "pending", seed);
        require(page_of[at] == r.pages[i] && all.slot_frequency[at] == 1.5f, "mapped", seed);
        require(all.slot_stamp[at] == step && all.uses[key].stamp == step, "stamps", seed);
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
        require((all.slot_frequency[l * slots + s] == kInfinite) == (page < 0), "frequency", seed);
      }
    }
  }
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 3000; ++seed) {
    run_passes(seed);
    run_slots(seed);
  }
  std::printf("residency_test: 3000 histories passed\n");
  return 0;
}
