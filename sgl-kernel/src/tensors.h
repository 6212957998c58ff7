// Arrays and tensors as arguments: what the signatures say of them (dtype, number of axes,
// contiguous, on the CPU) is checked by nanobind, the sizes by the functions below. With what the
// callers check of ids, nothing outside them is read or written.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <array>
#include <cstdint>
#include <initializer_list>
#include <string>
#include <utility>

#include "attend.h"

namespace scout {

namespace nb = nanobind;

// Of numpy.
template <class T, int N>
using Array = nb::ndarray<T, nb::ndim<N>, nb::c_contig, nb::device::cpu>;

// Of torch. For such an argument nanobind calls Tensor.__dlpack__, which is Python and takes 2 us;
// what it calls in turn takes 0.2 us.
template <int N, class... Of>
struct Tensor : nb::ndarray<Of..., nb::ndim<N>, nb::c_contig, nb::device::cpu> {
  using Base = nb::ndarray<Of..., nb::ndim<N>, nb::c_contig, nb::device::cpu>;
  Tensor() = default;
  explicit Tensor(Base&& base) : Base(std::move(base)) {}
};

template <class T, int N>
using In = Tensor<N, const T>;
template <class T, int N>
using Out = Tensor<N, T>;
template <int N>
using AnyIn = Tensor<N, nb::ro>;  // of any dtype
template <int N>
using AnyOut = Tensor<N>;

// `message` is called on failure only.
template <class Message>
void require_lazily(const char* op, bool condition, const Message& message) {
  if (!condition) throw nb::value_error((std::string(op) + ": " + message()).c_str());
}

inline void require(const char* op, bool condition, const char* message) {
  require_lazily(op, condition, [=] { return message; });
}

template <int N, class T>
std::array<int64_t, N> sizes(const T& array) {
  std::array<int64_t, N> found;
  for (int i = 0; i < N; ++i) found[i] = static_cast<int64_t>(array.shape(i));
  return found;
}

template <class T>
void expect_shape(const char* op, const char* name, const T& tensor,
                  std::initializer_list<int64_t> expected) {
  bool fits = tensor.ndim() == expected.size();
  size_t axis = 0;
  for (const int64_t size : expected)
    fits = fits && static_cast<int64_t>(tensor.shape(axis++)) == size;
  if (fits) return;
  std::string found, wanted;
  for (size_t i = 0; i < tensor.ndim(); ++i)
    found += (i ? ", " : "") + std::to_string(tensor.shape(i));
  for (const int64_t size : expected) wanted += (wanted.empty() ? "" : ", ") + std::to_string(size);
  throw nb::value_error(
      (std::string(op) + ": " + name + " is [" + found + "], expected [" + wanted + "]").c_str());
}

inline DType dtype_of(const char* op, nb::dlpack::dtype of) {
  constexpr struct {
    uint8_t code, bits;  // of DLPack
    DType type;
  } kTypes[] = {{2, 32, DType::kF32},
                {4, 16, DType::kBF16},
                {2, 16, DType::kF16},
                {10, 8, DType::kE4M3},
                {12, 8, DType::kE5M2}};
  for (const auto& known : kTypes)
    if (of.code == known.code && of.bits == known.bits) return known.type;
  throw nb::value_error((std::string(op) + ": unsupported dtype").c_str());
}

// Throws unless all n ids are below `end` and, but for those that `may_be_negative`, not negative.
template <class T>
void expect_ids(const char* op, const char* name, const T* ids, int64_t n, int64_t end,
                bool may_be_negative = false) {
  for (int64_t i = 0; i < n; ++i) {
    require_lazily(op, ids[i] < end && (may_be_negative || ids[i] >= 0), [&] {
      return std::string(name) + " has " + std::to_string(ids[i]) + ", expected values in [0, " +
             std::to_string(end) + ")";
    });
  }
}

}  // namespace scout

namespace nanobind::detail {

template <int N, class... Of>
struct type_caster<scout::Tensor<N, Of...>> {
  using Argument = scout::Tensor<N, Of...>;
  using Base = make_caster<typename Argument::Base>;
  NB_TYPE_CASTER(Argument, Base::Name)

  static PyObject* imported() noexcept try {
    return object(module_::import_("torch.utils.dlpack").attr("to_dlpack")).release().ptr();
  } catch (const python_error&) {  // no torch, so no tensor
    return nullptr;
  }

  bool from_python(handle source, uint32_t flags, cleanup_list* cleanup) noexcept {
    static PyObject* const to_dlpack = imported();
    if (to_dlpack == nullptr) return false;
    const object capsule = steal(PyObject_CallOneArg(to_dlpack, source.ptr()));
    Base base;
    if (!capsule.is_valid() || !base.from_python(capsule, flags, cleanup)) {
      PyErr_Clear();
      return false;
    }
    value = Value(std::move(base.value));
    return true;
  }
};

}  // namespace nanobind::detail
