// Python bindings of residency.h, with numpy arrays. They keep the GIL: reacquiring it from a busy
// thread can take 5 ms, and the passes take less than one.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

#include "residency.h"
#include "tensors.h"

namespace nb = nanobind;

namespace {

using scout::Array;
using scout::expect_shape;
using scout::require;
using scout::Residency;

using Keys = Array<const int64_t, 1>;
using PageIds = nb::ndarray<const int32_t, nb::ndim<3>, nb::device::cpu>;

// An array that takes ownership of the values.
template <class T>
nb::ndarray<nb::numpy, T, nb::ndim<1>> handed_over(std::vector<T>&& values) {
  auto* const kept = new std::vector<T>(std::move(values));
  nb::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return {kept->data(), {kept->size()}, owner};
}

template <class... T>
nb::tuple all_handed_over(std::vector<T>&... values) {
  return nb::make_tuple(handed_over(std::move(values))...);
}

// A view of the residency's memory that keeps it alive.
template <class T>
using View = nb::ndarray<nb::numpy, T>;

template <class T>
View<T> of_pages(Residency& r, T* data, int64_t step = 1) {
  const auto layers = static_cast<size_t>(r.num_layers), pages = static_cast<size_t>(r.num_pages);
  return View<T>(data, {layers, pages}, nb::handle(), {step * r.num_pages, step});
}

template <class T>
View<T> of_slots(Residency& r, T* data) {
  return View<T>(data, {static_cast<size_t>(r.num_layers), static_cast<size_t>(r.num_slots)});
}

View<int64_t> of_all(std::vector<int64_t>& values) {
  return View<int64_t>(values.data(), {values.size()});
}

int64_t size(const Keys& keys) { return static_cast<int64_t>(keys.shape(0)); }

void check_below(const char* op, const char* name, const Keys& ids, int64_t end) {
  scout::expect_ids(op, name, ids.data(), size(ids), end);
}

void check_slots(const char* op, const Residency& r, const Keys& layers, const Keys& slots) {
  expect_shape(op, "slots", slots, {size(layers)});
  check_below(op, "layers", layers, r.num_layers);
  check_below(op, "slots", slots, r.num_slots);
}

scout::LayerPageIds ids_of(const char* op, const int64_t* layers, const PageIds& pages) {
  require(op, pages.shape(2) <= 1 || pages.stride(2) == 1, "pages of a row must be contiguous");
  const auto [n, rows, k] = scout::sizes<3>(pages);
  return {layers, pages.data(), n, rows, k, pages.stride(0), pages.stride(1)};
}

scout::LayerPageIds checked(const char* op, const Residency& r, const Keys& layers,
                            const PageIds& pages) {
  const scout::LayerPageIds ids = ids_of(op, layers.data(), pages);
  expect_shape(op, "layers", layers, {ids.n});
  require(op, scout::are_valid(r, ids), "a layer or page is out of range");
  return ids;
}

nb::ndarray<nb::numpy, int64_t, nb::ndim<2>> count_pages(const PageIds& pages) {
  const scout::LayerPageIds ids = ids_of("count_pages", nullptr, pages);
  auto* const counts = new int64_t[ids.n * ids.rows];
  nb::capsule owner(counts, [](void* p) noexcept { delete[] static_cast<int64_t*>(p); });
  scout::count_pages(ids, counts);
  return {counts, {pages.shape(0), pages.shape(1)}, owner};
}

void touch(Residency& r, const Keys& layers, const PageIds& pages,
           const Array<const float, 1>& weights, int32_t step) {
  const scout::LayerPageIds ids = checked("touch", r, layers, pages);
  expect_shape("touch", "weights", weights, {ids.rows});
  scout::touch_pages(r, ids, weights.data(), step);
}

int64_t protect(Residency& r, const Keys& pages, int32_t step) {
  check_below("protect", "pages", pages, r.num_pages);
  return scout::protect_pages(r, pages.data(), pages.shape(0), step);
}

nb::tuple least_frequent(const Residency& r, const Keys& counts, int32_t before_step,
                         const Array<const float, 1>& below) {
  expect_shape("least_frequent", "counts", counts, {r.num_layers});
  expect_shape("least_frequent", "below", below, {r.num_layers});
  auto found = scout::least_frequent_slots(r, counts.data(), before_step, below.data());
  return all_handed_over(found.layers, found.slots, found.frequency);
}

nb::tuple most_frequent(const Residency& r, const Keys& layers, const PageIds& pages,
                        const Array<const bool, 2>& counts, const Array<const bool, 1>& is_first,
                        const Keys& limits) {
  const scout::LayerPageIds ids = checked("most_frequent", r, layers, pages);
  expect_shape("most_frequent", "counts", counts, {ids.n, ids.rows});
  expect_shape("most_frequent", "is_first", is_first, {ids.rows});
  expect_shape("most_frequent", "limits", limits, {ids.n});
  auto found = scout::most_frequent_pages(r, ids, counts.data(), is_first.data(), limits.data());
  return all_handed_over(found.layers, found.pages);
}

auto absent(const Residency& r, const Keys& keys) {
  check_below("absent", "keys", keys, r.num_layers * r.num_pages);
  return handed_over(scout::absent_keys(r, keys.data(), keys.shape(0)));
}

nb::tuple reserve(Residency& r, const Keys& keys) {
  check_below("reserve", "keys", keys, r.num_layers * r.num_pages);
  scout::Reserved found;
  require("reserve", scout::reserve(r, keys.data(), keys.shape(0), &found),
          "more pages than free slots");
  return all_handed_over(found.layers, found.pages, found.slots, found.generations);
}

auto land(Residency& r, const Keys& layers, const Keys& pages, const Keys& slots,
          const Keys& generations, int32_t step) {
  check_slots("land", r, layers, slots);
  check_below("land", "pages", pages, r.num_pages);
  expect_shape("land", "pages", pages, {size(layers)});
  expect_shape("land", "generations", generations, {size(layers)});
  return handed_over(scout::land(r, layers.data(), pages.data(), slots.data(), generations.data(),
                                 layers.shape(0), step));
}

auto vacate(Residency& r, const Keys& layers, const Keys& slots) {
  check_slots("vacate", r, layers, slots);
  for (size_t i = 0; i < slots.shape(0); ++i) {
    const int32_t page = r.page_of[layers.data()[i] * r.num_slots + slots.data()[i]];
    require("vacate", page >= 0, "a slot holds no page");
  }
  return handed_over(scout::vacate(r, layers.data(), slots.data(), layers.shape(0)));
}

}  // namespace

void bind_residency(nb::module_& m) {
  // No implicit conversion: ids of another width are an error.
  const auto exact = [](const char* name) { return nb::arg(name).noconvert(); };
  m.def("count_pages", &count_pages, exact("pages"));
  nb::class_<Residency> of(m, "Residency", "Metadata of page slots; see ops/residency.py.");
  const auto view = [&of](const char* name, auto get) {
    of.def_prop_ro(name, get, nb::rv_policy::reference_internal);
  };
  view("frequency", [](Residency& r) { return of_pages(r, &r.uses[0].frequency, 2); });
  view("stamp", [](Residency& r) { return of_pages(r, &r.uses[0].stamp, 2); });
  view("slot_of", [](Residency& r) { return of_pages(r, r.slot_of.data()); });
  view("is_pending", [](Residency& r) { return of_pages(r, r.is_pending.get()); });
  view("generation", [](Residency& r) { return of_all(r.generation); });
  view("page_of", [](Residency& r) { return of_slots(r, r.page_of.data()); });
  view("slot_frequency", [](Residency& r) { return of_slots(r, r.slot_frequency.data()); });
  view("slot_stamp", [](Residency& r) { return of_slots(r, r.slot_stamp.data()); });
  view("free", [](Residency& r) { return of_slots(r, r.free.data()); });
  view("num_free", [](Residency& r) { return of_all(r.num_free); });
  of.def(nb::init<int64_t, int64_t, int64_t>(), nb::arg("layers"), nb::arg("pages"),
         nb::arg("slots"))
      .def("touch", &touch, exact("layers"), exact("pages"), exact("weights"), nb::arg("step"))
      .def("protect", &protect, exact("pages"), nb::arg("step"))
      .def("least_frequent", &least_frequent, exact("counts"), nb::arg("before_step"),
           exact("below"))
      .def("most_frequent", &most_frequent, exact("layers"), exact("pages"), exact("counts"),
           exact("is_first"), exact("limits"))
      .def("absent", &absent, exact("keys"))
      .def("reserve", &reserve, exact("keys"))
      .def("land", &land, exact("layers"), exact("pages"), exact("slots"), exact("generations"),
           nb::arg("step"))
      .def("vacate", &vacate, exact("layers"), exact("slots"));
}
