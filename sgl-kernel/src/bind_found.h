// What a pass has found, as numpy arrays that own it.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <utility>
#include <vector>

namespace scout {

template <class T>
using Found = nanobind::ndarray<nanobind::numpy, T, nanobind::ndim<1>>;

template <class T>
Found<T> handed_over(std::vector<T>&& values) {
  auto* const kept = new std::vector<T>(std::move(values));
  nanobind::capsule owner(kept, [](void* p) noexcept { delete static_cast<std::vector<T>*>(p); });
  return Found<T>(kept->data(), {kept->size()}, owner);
}

}  // namespace scout
