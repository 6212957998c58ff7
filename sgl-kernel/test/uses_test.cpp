// The passes of page_uses.h over random histories against plain loops; run it under sanitizers.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <map>
#include <memory>
#include <random>
#include <tuple>
#include <vector>

#include "page_uses.h"

namespace {

using scout::PageUse;

constexpr float kInfinite = std::numeric_limits<float>::infinity();

void require(bool good, const char* what, unsigned seed) {
  if (good) return;
  std::fprintf(stderr, "uses_test: %s, seed %u\n", what, seed);
  std::exit(1);
}

void run(unsigned seed) {
  std::mt19937 random(seed);
  const auto below = [&](int end) { return static_cast<int>(random() % end); };
  const int64_t layers = 1 + below(3), pages = 1 + below(60), slots = 1 + below(70);
  const int64_t rows = below(5), k = below(6), wide = k + below(3);
  std::vector<PageUse> uses(layers * pages, PageUse{0.0f, -1});
  std::vector<int32_t> page_of(layers * slots, -1);
  std::vector<float> slot_heat(layers * slots, kInfinite);
  for (int64_t i = 0; i < layers * slots; ++i) {
    if (below(4)) page_of[i] = below(static_cast<int>(pages));
  }
  std::vector<int32_t> slot_stamp(layers * slots, -1);
  const scout::PageUses all{
      uses.data(), page_of.data(), slot_heat.data(), slot_stamp.data(), layers, pages, slots};
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
          expected[l * pages + page].heat += weights[b];
          expected[l * pages + page].stamp = step;
        }
      }
    }
    require(scout::touch_pages(all, missed, weights.data(), step), "a slot's page", seed);
    for (int64_t i = 0; i < layers * pages; ++i) {
      require(uses[i].heat == expected[i].heat && uses[i].stamp == expected[i].stamp, "touch",
              seed);
    }

    std::vector<int64_t> row_counts(layers * rows);
    scout::count_pages(missed, row_counts.data());
    for (int64_t i = 0; i < layers * rows; ++i) {
      const int32_t* const row = missed.row(i / rows, i % rows);
      require(row_counts[i] == k - std::count(row, row + k, -1), "counts", seed);
    }

    // A page has no more than one slot in a layer here, or none.
    std::vector<int32_t> slot_of(layers * pages, -1);
    for (int64_t i = 0; i < layers * slots; ++i) {
      if (page_of[i] < 0) continue;
      int32_t& slot = slot_of[i / slots * pages + page_of[i]];
      if (slot < 0)
        slot = static_cast<int32_t>(i % slots);
      else
        page_of[i] = -1, slot_heat[i] = kInfinite;
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
    require(
        scout::protect_pages(all, slot_of.data(), in_use.data(), in_use.size(), step + 1) == absent,
        "number of absent pages", seed);
    for (int64_t i = 0; i < layers * pages; ++i) {
      require(uses[i].stamp == expected[i].stamp, "protect", seed);
    }

    std::vector<int64_t> counts(layers);
    std::vector<float> limits(layers);
    std::vector<std::tuple<int64_t, float, int32_t, int64_t>> cold;
    const int before = step + 2 - below(5);
    for (int64_t l = 0; l < layers; ++l) {
      counts[l] = below(9) - 1;
      limits[l] = below(2) ? kInfinite : static_cast<float>(below(12));
      std::vector<std::tuple<int64_t, float, int32_t, int64_t>> own;
      for (int64_t s = 0; s < slots; ++s) {
        const int32_t page = page_of[l * slots + s];
        if (page < 0) continue;
        const PageUse use = uses[l * pages + page];
        require(slot_heat[l * slots + s] == use.heat && slot_stamp[l * slots + s] == use.stamp,
                "heat and stamp of a slot", seed);
        if (use.stamp < before && use.heat < limits[l]) own.push_back({l, use.heat, use.stamp, s});
      }
      std::sort(own.begin(), own.end());
      own.resize(std::min<size_t>(own.size(), std::max<int64_t>(counts[l], 0)));
      cold.insert(cold.end(), own.begin(), own.end());
    }
    const auto found = scout::coldest_slots(all, counts.data(), before, limits.data());
    require(found.slots.size() == cold.size(), "number of cold slots", seed);
    for (size_t i = 0; i < cold.size(); ++i) {
      require(found.layers[i] == std::get<0>(cold[i]) && found.slots[i] == std::get<3>(cold[i]) &&
                  found.heat[i] == std::get<1>(cold[i]),
              "cold slots", seed);
    }

    // Not std::vector<bool>, whose elements have no addresses.
    const auto is_first = std::make_unique<bool[]>(rows + 1);
    const auto may = std::make_unique<bool[]>(layers * rows + 1);
    for (int64_t b = 0; b < rows; ++b) is_first[b] = below(2);
    for (int64_t i = 0; i < layers * rows; ++i) may[i] = below(4);
    std::vector<std::pair<int64_t, int64_t>> hot;
    for (int64_t l = 0; l < layers; ++l) {
      std::map<int32_t, std::tuple<bool, float, int32_t>> worth;
      for (int64_t b = 0; b < rows; ++b) {
        for (int64_t j = 0; may[l * rows + b] && j < k; ++j) {
          const int32_t page = missed.row(l, b)[j];
          if (page < 0) continue;
          const std::tuple<bool, float, int32_t> rank{!is_first[b], -uses[l * pages + page].heat,
                                                      page};
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
      hot.insert(hot.end(), own.begin(), own.end());
    }
    const auto best = scout::hottest_pages(all, missed, may.get(), is_first.get(), counts.data());
    require(best.pages.size() == hot.size(), "number of hot pages", seed);
    for (size_t i = 0; i < hot.size(); ++i) {
      require(best.layers[i] == hot[i].first && best.pages[i] == hot[i].second, "hot pages", seed);
    }
  }
}

}  // namespace

int main() {
  for (unsigned seed = 0; seed < 3000; ++seed) run(seed);
  std::printf("uses_test: 3000 histories passed\n");
  return 0;
}
