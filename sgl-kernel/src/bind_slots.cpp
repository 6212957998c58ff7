// Python bindings of page_slots.h, over numpy arrays that one object keeps. They keep the GIL, as
// those of bind_uses.cpp do.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <string>
#include <utility>
#include <vector>

#include "bind_found.h"
#include "page_slots.h"

namespace nb = nanobind;

namespace {

using nb::device::cpu;

template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, cpu>;
using Ids = Array<const int64_t, 1>;

class BoundSlots {
 public:
  BoundSlots(Array<int32_t, 3> uses, Array<int32_t, 2> slot_of, Array<bool, 2> is_pending,
             Array<int64_t, 1> generation, Array<int32_t, 2> page_of, Array<float, 2> slot_heat,
             Array<int32_t, 2> slot_stamp, Array<int64_t, 2> free, Array<int64_t, 1> num_free)
      : kept_(nb::make_tuple(uses, slot_of, is_pending, generation, page_of, slot_heat, slot_stamp,
                             free, num_free)) {
    const size_t layers = uses.shape(0), pages = uses.shape(1), slots = page_of.shape(1);
    const auto is = [](const auto& array, size_t rows, size_t columns) {
      return array.shape(0) == rows && array.shape(1) == columns;
    };
    const bool fits = uses.shape(2) == 2 && is(slot_of, layers, pages) &&
                      is(is_pending, layers, pages) && generation.shape(0) == pages &&
                      is(page_of, layers, slots) && is(slot_heat, layers, slots) &&
                      is(slot_stamp, layers, slots) && is(free, layers, slots) &&
                      num_free.shape(0) == layers;
    if (!fits) throw nb::value_error("PageSlots: arrays must be of the same L, P and S");
    slots_ = {reinterpret_cast<scout::PageUse*>(uses.data()),
              slot_of.data(),
              is_pending.data(),
              generation.data(),
              page_of.data(),
              slot_heat.data(),
              slot_stamp.data(),
              free.data(),
              num_free.data(),
              static_cast<int64_t>(layers),
              static_cast<int64_t>(pages),
              static_cast<int64_t>(slots)};
  }

  scout::Found<int64_t> absent(const Ids& keys) const {
    check_keys(keys);
    return scout::handed_over(scout::absent_keys(slots_, keys.data(), keys.shape(0)));
  }

  nb::tuple reserve(const Ids& keys) const {
    check_keys(keys);
    scout::Reserved reserved;
    if (!scout::reserve(slots_, keys.data(), keys.shape(0), &reserved)) {
      throw nb::value_error("PageSlots: more pages than free slots");
    }
    return nb::make_tuple(scout::handed_over(std::move(reserved.layers)),
                          scout::handed_over(std::move(reserved.pages)),
                          scout::handed_over(std::move(reserved.slots)),
                          scout::handed_over(std::move(reserved.generations)));
  }

  scout::Found<int64_t> land(const Ids& layers, const Ids& pages, const Ids& slots,
                             const Ids& generations, int32_t step) const {
    check_slots(layers, slots);
    check(pages, slots_.num_pages);
    if (pages.shape(0) != layers.shape(0) || generations.shape(0) != layers.shape(0)) {
      throw nb::value_error("PageSlots: as many pages and generations as layers");
    }
    return scout::handed_over(scout::land(slots_, layers.data(), pages.data(), slots.data(),
                                          generations.data(), layers.shape(0), step));
  }

  scout::Found<int64_t> vacate(const Ids& layers, const Ids& slots) const {
    check_slots(layers, slots);
    for (size_t i = 0; i < slots.shape(0); ++i) {
      const int32_t page = slots_.page_of[layers.data()[i] * slots_.num_slots + slots.data()[i]];
      if (page < 0 || page >= slots_.num_pages) throw nb::value_error("PageSlots: no page there");
    }
    return scout::handed_over(scout::vacate(slots_, layers.data(), slots.data(), layers.shape(0)));
  }

 private:
  static void check(const Ids& ids, int64_t end) {
    for (size_t i = 0; i < ids.shape(0); ++i) {
      if (ids.data()[i] < 0 || ids.data()[i] >= end) {
        throw nb::value_error("PageSlots: a layer, page or slot is out of range");
      }
    }
  }
  void check_keys(const Ids& keys) const { check(keys, slots_.num_layers * slots_.num_pages); }
  void check_slots(const Ids& layers, const Ids& slots) const {
    if (slots.shape(0) != layers.shape(0)) {
      throw nb::value_error("PageSlots: as many slots as layers");
    }
    check(layers, slots_.num_layers);
    check(slots, slots_.num_slots);
  }

  nb::tuple kept_;  // the arrays
  scout::PageSlots slots_;
};

}  // namespace

void bind_slots(nb::module_& m) {
  const auto exact = [](const char* name) { return nb::arg(name).noconvert(); };
  nb::class_<BoundSlots>(m, "PageSlots",
                         "Books of which page is in which slot, in arrays of numpy.")
      .def(nb::init<Array<int32_t, 3>, Array<int32_t, 2>, Array<bool, 2>, Array<int64_t, 1>,
                    Array<int32_t, 2>, Array<float, 2>, Array<int32_t, 2>, Array<int64_t, 2>,
                    Array<int64_t, 1>>(),
           exact("uses"), exact("slot_of"), exact("is_pending"), exact("generation"),
           exact("page_of"), exact("slot_heat"), exact("slot_stamp"), exact("free"),
           exact("num_free"))
      .def("absent", &BoundSlots::absent, exact("keys"),
           "The distinct keys without a slot that are not pending, ascending.")
      .def("reserve", &BoundSlots::reserve, exact("keys"),
           "Takes free slots; returns layers, pages, slots and generations.")
      .def("land", &BoundSlots::land, exact("layers"), exact("pages"), exact("slots"),
           exact("generations"), nb::arg("step"),
           "Maps reserved pages; returns the keys of those that were still wanted.")
      .def("vacate", &BoundSlots::vacate, exact("layers"), exact("slots"),
           "Frees slots; returns the keys of the pages that were there.");
}
