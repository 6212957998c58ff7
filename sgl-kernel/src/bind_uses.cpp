// Python bindings of page_uses.h, over numpy arrays. They keep the GIL: it can take 5 ms to get
// back from a busy thread, and the passes take less than one.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>

#include "bind_found.h"
#include "page_uses.h"

namespace nb = nanobind;

namespace {

using nb::device::cpu;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, cpu>;
using Uses = Array<int32_t, 3>;
using Ids = nb::ndarray<const int32_t, nb::ndim<3>, cpu>;

void require(bool condition, const char* op, const char* message) {
  if (!condition) throw nb::value_error((std::string(op) + ": " + message).c_str());
}

scout::PageUse* checked(const char* op, const Uses& uses) {
  require(uses.shape(2) == 2, op, "uses must be [L, P, 2]");
  return reinterpret_cast<scout::PageUse*>(uses.data());
}

scout::PageUses checked(const char* op, const Uses& uses, const Array<const int32_t, 2>& page_of,
                        const Array<float, 2>& slot_heat, const Array<int32_t, 2>& slot_stamp) {
  const auto fits = [&](const auto& slots) {
    return slots.shape(0) == uses.shape(0) && slots.shape(1) == page_of.shape(1);
  };
  require(fits(page_of) && fits(slot_heat) && fits(slot_stamp), op,
          "page_of, slot_heat and slot_stamp must be [L, S]");
  return {checked(op, uses),
          page_of.data(),
          slot_heat.data(),
          slot_stamp.data(),
          static_cast<int64_t>(uses.shape(0)),
          static_cast<int64_t>(uses.shape(1)),
          static_cast<int64_t>(page_of.shape(1))};
}

scout::LayerPageIds ids_of(const char* op, const int64_t* layers, const Ids& pages) {
  require(pages.shape(2) <= 1 || pages.stride(2) == 1, op, "pages of a row must stand together");
  return {layers,
          pages.data(),
          static_cast<int64_t>(pages.shape(0)),
          static_cast<int64_t>(pages.shape(1)),
          static_cast<int64_t>(pages.shape(2)),
          pages.stride(0),
          pages.stride(1)};
}

scout::LayerPageIds checked(const char* op, const scout::PageUses& uses,
                            const Array<const int64_t, 1>& layers, const Ids& pages) {
  const scout::LayerPageIds ids = ids_of(op, layers.data(), pages);
  require(layers.shape(0) == pages.shape(0), op, "layers must be [n] for pages of [n, B, k]");
  require(scout::are_valid(uses, ids), op, "a layer or page is out of range");
  return ids;
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> count_pages(const Ids& pages) {
  const scout::LayerPageIds ids = ids_of("count_pages", nullptr, pages);
  auto* const counts = new int64_t[ids.n * ids.rows];
  nb::capsule owner(counts, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  scout::count_pages(ids, counts);
  return {counts, {pages.shape(0), pages.shape(1)}, owner};
}

void touch_pages(const Uses& array, const Array<const int32_t, 2>& page_of,
                 const Array<float, 2>& slot_heat, const Array<int32_t, 2>& slot_stamp,
                 const Array<const int64_t, 1>& layers, const Ids& pages,
                 const Array<const float, 1>& weights, int32_t step) {
  const char* const op = "touch_pages";
  const scout::PageUses uses = checked(op, array, page_of, slot_heat, slot_stamp);
  const scout::LayerPageIds ids = checked(op, uses, layers, pages);
  require(static_cast<int64_t>(weights.shape(0)) == ids.rows, op, "weights must be [B]");
  const bool good = scout::touch_pages(uses, ids, weights.data(), step);
  require(good, op, "a page of a slot is out of range");
}

int64_t protect_pages(const Uses& array, const Array<const int32_t, 2>& page_of,
                      const Array<float, 2>& slot_heat, const Array<int32_t, 2>& slot_stamp,
                      const Array<const int32_t, 2>& slot_of, const Array<const int64_t, 1>& pages,
                      int32_t step) {
  const char* const op = "protect_pages";
  const scout::PageUses uses = checked(op, array, page_of, slot_heat, slot_stamp);
  require(slot_of.shape(0) == array.shape(0) && slot_of.shape(1) == array.shape(1), op,
          "slot_of must be [L, P]");
  for (size_t i = 0; i < pages.shape(0); ++i) {
    require(pages.data()[i] >= 0 && pages.data()[i] < uses.num_pages, op, "a page is out of range");
  }
  return scout::protect_pages(uses, slot_of.data(), pages.data(), pages.shape(0), step);
}

nb::tuple coldest_slots(const Uses& array, const Array<const int32_t, 2>& page_of,
                        const Array<float, 2>& slot_heat, const Array<int32_t, 2>& slot_stamp,
                        const Array<const int64_t, 1>& counts, int32_t before_step,
                        const Array<const float, 1>& below) {
  const char* const op = "coldest_slots";
  const scout::PageUses uses = checked(op, array, page_of, slot_heat, slot_stamp);
  require(counts.shape(0) == array.shape(0) && below.shape(0) == array.shape(0), op,
          "counts and below must be [L]");
  scout::FoundSlots found = scout::coldest_slots(uses, counts.data(), before_step, below.data());
  return nb::make_tuple(scout::handed_over(std::move(found.layers)),
                        scout::handed_over(std::move(found.slots)),
                        scout::handed_over(std::move(found.heat)));
}

nb::tuple hottest_pages(const Uses& array, const Array<const int64_t, 1>& layers, const Ids& pages,
                        const Array<const bool, 2>& counts, const Array<const bool, 1>& is_first,
                        const Array<const int64_t, 1>& limits) {
  const char* const op = "hottest_pages";
  const scout::PageUses uses{checked(op, array),
                             nullptr,
                             nullptr,
                             nullptr,
                             static_cast<int64_t>(array.shape(0)),
                             static_cast<int64_t>(array.shape(1)),
                             0};
  const scout::LayerPageIds ids = checked(op, uses, layers, pages);
  require(counts.shape(0) == pages.shape(0) && counts.shape(1) == pages.shape(1) &&
              is_first.shape(0) == pages.shape(1) && limits.shape(0) == pages.shape(0),
          op, "counts must be [n, B], is_first [B], limits [n]");
  scout::FoundPages found =
      scout::hottest_pages(uses, ids, counts.data(), is_first.data(), limits.data());
  return nb::make_tuple(scout::handed_over(std::move(found.layers)),
                        scout::handed_over(std::move(found.pages)));
}

}  // namespace

void bind_uses(nb::module_& m) {
  // Nothing is converted: what is written to would be a copy, and ids of another size other pages.
  const auto exact = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("count_pages", &count_pages, exact("pages"), "How many pages each row has.");
  m.def("touch_pages", &touch_pages, exact("uses"), exact("page_of"), exact("slot_heat"),
        exact("slot_stamp"), exact("layers"), exact("pages"), exact("weights"), nb::arg("step"),
        "Adds heat to pages and stamps them.");
  m.def("protect_pages", &protect_pages, exact("uses"), exact("page_of"), exact("slot_heat"),
        exact("slot_stamp"), exact("slot_of"), exact("pages"), nb::arg("step"),
        "Stamps pages in every layer; returns how many have no slot.");
  m.def("coldest_slots", &coldest_slots, exact("uses"), exact("page_of"), exact("slot_heat"),
        exact("slot_stamp"), exact("counts"), nb::arg("before_step"), exact("below"),
        "Layers, slots and heat of the layers' coldest pages.");
  m.def("hottest_pages", &hottest_pages, exact("uses"), exact("layers"), exact("pages"),
        exact("counts"), exact("is_first"), exact("limits"),
        "Layers and pages worth most of those missed.");
}
