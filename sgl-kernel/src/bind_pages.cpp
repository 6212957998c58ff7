// Python bindings of copies and digests of the pages of all layers; see ops/pages.py, ops/minmax.py
// and ops/rotated.py. Calls release the GIL.
#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "score.h"
#include "tensors.h"

namespace nb = nanobind;

namespace {

using scout::AnyIn;
using scout::AnyOut;
using scout::DType;
using scout::expect_ids;
using scout::expect_shape;
using scout::In;
using scout::Out;
using scout::require;
using scout::sizes;

using Pages = std::vector<AnyIn<4>>;  // K or V of each layer, [P, S, H, D]

// `count` layers of the same shape and dtype.
template <int N, class... Of>
void expect_layers(const char* op, const std::vector<scout::Tensor<N, Of...>>& k,
                   const std::vector<scout::Tensor<N, Of...>>& v, size_t count) {
  require(op, count > 0 && k.size() == count && v.size() == count,
          "no or another number of layers");
  for (const auto* half : {&k, &v}) {
    for (const auto& layer : *half)
      require(op, layer.dtype() == k[0].dtype() && sizes<N>(layer) == sizes<N>(k[0]),
              "layers differ");
  }
}

template <class T>
std::vector<char*> starts_of(const std::vector<T>& layers) {
  std::vector<char*> found;
  for (const T& layer : layers)
    found.push_back(const_cast<char*>(static_cast<const char*>(layer.data())));
  return found;
}

// Of a tensor with all layers.
std::vector<char*> starts_of(const AnyOut<5>& layers) {
  std::vector<char*> found;
  const size_t bytes = layers.nbytes() / layers.shape(0);
  for (size_t i = 0; i < layers.shape(0); ++i)
    found.push_back(static_cast<char*>(layers.data()) + i * bytes);
  return found;
}

// Rows of `bytes` of K and V: row ids[1, i] of layer ids[0, i] to its row ids[2, i]; a negative
// source is none.
void copy_rows(const char* op, const In<int64_t, 2>& ids, int64_t bytes, int64_t sources,
               int64_t targets, std::initializer_list<std::vector<char*>> from,
               std::initializer_list<std::vector<char*>> to) {
  const int64_t n = ids.shape(1);
  expect_shape(op, "ids", ids, {3, n});
  const int64_t *const layer = ids.data(), *const source = layer + n, *const target = source + n;
  expect_ids(op, "layers", layer, n, static_cast<int64_t>(from.begin()->size()));
  expect_ids(op, "sources", source, n, sources, true);
  expect_ids(op, "targets", target, n, targets);
  for (size_t half = 0; half < from.size(); ++half) {
    const std::vector<char*>&of = from.begin()[half], &into = to.begin()[half];
    for (int64_t i = 0; i < n; ++i) {
      if (source[i] >= 0)
        std::memcpy(into[layer[i]] + target[i] * bytes, of[layer[i]] + source[i] * bytes, bytes);
    }
  }
}

void copy_layer_pages(const Pages& k, const Pages& v, const In<int64_t, 2>& ids,
                      const AnyOut<5>& to_k, const AnyOut<5>& to_v) {
  const char* const op = "copy_layer_pages";
  const auto [L, slots, S, H, D] = sizes<5>(to_k);
  expect_layers(op, k, v, L);
  expect_shape(op, "source", k[0], {sizes<4>(k[0])[0], S, H, D});
  expect_shape(op, "dst_v", to_v, {L, slots, S, H, D});
  require(op, to_k.dtype() == k[0].dtype() && to_v.dtype() == k[0].dtype(), "dtypes differ");
  copy_rows(op, ids, S * H * D * to_k.itemsize(), k[0].shape(0), slots,
            {starts_of(k), starts_of(v)}, {starts_of(to_k), starts_of(to_v)});
}

void copy_tokens(const Pages& k, const Pages& v, const In<int64_t, 2>& ids,
                 const std::vector<AnyOut<3>>& to_k, const std::vector<AnyOut<3>>& to_v) {
  const char* const op = "copy_tokens";
  expect_layers(op, k, v, to_k.size());
  expect_layers(op, to_k, to_v, k.size());
  const auto [P, S, H, D] = sizes<4>(k[0]);
  const auto [C, tokens, width] = sizes<3>(to_k[0]);
  require(op, to_k[0].dtype() == k[0].dtype() && width == D, "dtypes or D differ");
  copy_rows(op, ids, D * k[0].itemsize(), P * S * H, C * tokens, {starts_of(k), starts_of(v)},
            {starts_of(to_k), starts_of(to_v)});
}

void stage_pages(const AnyIn<4>& k, const AnyIn<4>& v, const In<int32_t, 2>& pages,
                 const AnyOut<4>& to_k, const AnyOut<4>& to_v) {
  const char* const op = "stage_pages";
  const auto [P, S, H, D] = sizes<4>(k);
  const auto [slots, tokens, heads, width] = sizes<4>(to_k);
  const auto [rows, columns] = sizes<2>(pages);
  expect_shape(op, "v", v, {P, S, H, D});
  expect_shape(op, "dst_k", to_k, {slots, S, heads, D});
  expect_shape(op, "dst_v", to_v, {slots, S, heads, D});
  require(op, slots >= rows * columns, "more entries than slots");
  require(op, heads > 0 && H % heads == 0 && rows * heads % H == 0, "lists are not whole requests");
  for (const nb::dlpack::dtype type : {v.dtype(), to_k.dtype(), to_v.dtype()})
    require(op, type == k.dtype(), "dtypes differ");
  expect_ids(op, "pages", pages.data(), rows * columns, P, true);
  // A list copies its own heads of every token: whole pages if there is one list per request.
  const int64_t lists = H / heads, bytes = heads * D * static_cast<int64_t>(k.itemsize());
  const int64_t run_bytes = lists == 1 ? S * bytes : bytes, runs = lists == 1 ? 1 : S;
  for (int64_t entry = 0; entry < rows * columns; ++entry) {
    const int64_t page = pages.data()[entry], list = entry / columns % lists;
    if (page < 0) continue;
    for (int64_t run = 0; run < runs; ++run) {
      const int64_t from = (page * S + run) * lists * bytes + list * bytes;
      const int64_t to = (entry * S + run) * bytes;
      std::memcpy(static_cast<char*>(to_k.data()) + to, static_cast<const char*>(k.data()) + from,
                  run_bytes);
      std::memcpy(static_cast<char*>(to_v.data()) + to, static_cast<const char*>(v.data()) + from,
                  run_bytes);
    }
  }
}

void digest_layers(const Pages& k, const In<int64_t, 1>& ids, const AnyIn<1>& values,
                   const AnyOut<4>& kmin, const AnyOut<4>& kmax) {
  const char* const op = "build_layer_digests";
  const auto [L, P, H, D] = sizes<4>(kmin);
  expect_layers(op, k, k, L);
  const int64_t S = k[0].shape(1), n = ids.shape(0);
  const DType of = scout::dtype_of(op, k[0].dtype()), to = scout::dtype_of(op, kmin.dtype());
  require(op, S > 0 && H > 0 && D > 0 && D % 16 == 0, "expected tokens, heads, D a multiple of 16");
  expect_shape(op, "source.k", k[0], {P, S, H, D});
  expect_shape(op, "kmax", kmax, {L, P, H, D});
  expect_shape(op, "values", values, {256});
  expect_ids(op, "ids", ids.data(), n, P);
  require(op, scout::bytes_of(of) == 1 ? scout::bytes_of(to) > 1 : to == of,
          "expected digests of the dtype of K, or of a wider one if K is fp8");
  require(op, kmax.dtype() == kmin.dtype() && values.dtype() == kmin.dtype(), "dtypes differ");
  const int64_t layer_bytes = P * H * D * scout::bytes_of(to);
  for (int64_t l = 0; l < L; ++l) {
    scout::digest_pages(k[l].data(), S, H, D, of, ids.data(), n, to, values.data(),
                        static_cast<char*>(kmin.data()) + l * layer_bytes,
                        static_cast<char*>(kmax.data()) + l * layer_bytes);
  }
}

void rotate_layers(const Pages& k, const Pages& v, const In<int64_t, 1>& ids,
                   const Out<uint8_t, 6>& planes, const Out<uint8_t, 4>& stats) {
  const char* const op = "build_layer_rotated";
  const int64_t L = planes.shape(0), n = ids.shape(0);
  expect_layers(op, k, v, L);
  const auto [P, S, H, D] = sizes<4>(k[0]);
  require(op, H > 0 && D > 0 && D % 16 == 0 && D <= scout::kRotatedMaxDim,
          "expected heads, D a multiple of 16 up to 1024");
  require(op, S == scout::kRotatedTokens, "expected pages of 32 tokens");
  expect_shape(op, "planes", planes, {L, P, H, 2, 16, D / 4});
  expect_shape(op, "stats", stats, {L, P, H, D + scout::kStatsBytes});
  expect_ids(op, "ids", ids.data(), n, P);
  for (int64_t l = 0; l < L; ++l) {
    scout::rotate_pages({k[l].data(), v[l].data(), scout::dtype_of(op, k[0].dtype()), ids.data(), n,
                         planes.data() + l * P * H * 8 * D,
                         stats.data() + l * P * H * (D + scout::kStatsBytes), static_cast<int>(H),
                         static_cast<int>(D)});
  }
}

}  // namespace

void bind_pages(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  m.def("copy_layer_pages", &copy_layer_pages, no_gil, "Pages of any layers to slots.");
  m.def("copy_tokens", &copy_tokens, no_gil, "Single tokens and heads to pages of one head.");
  m.def("stage_pages", &stage_pages, no_gil, "Listed pages of a layer to consecutive slots.");
  m.def("digest_layers", &digest_layers, no_gil,
        "Column minimum and maximum of K of pages, to the rows of their ids.");
  m.def("rotate_layers", &rotate_layers, no_gil,
        "Rotated digests of pages of 32 tokens, to the rows of their ids.");
}
