// Python bindings of the ring: RingProducer and RingAttendant (decode server), RingRuntime (worker
// process).
// The memory of a ring is passed as address and size, and opened before use; all else as arrays.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <initializer_list>
#include <optional>
#include <stdexcept>
#include <string>
#include <type_traits>

#include "attendant.h"
#include "checksums.h"
#include "producer.h"
#include "runtime.h"
#include "split.h"
#include "tensors.h"
#include "thread_reports.h"

namespace nb = nanobind;

namespace {

using scout::Array;
using scout::Attendant;
using scout::expect_shape;
using scout::Producer;
using scout::Runtime;

// Copies below this size keep the GIL: reacquiring it from a busy thread can take a switch interval
// (5 ms), while a copy of this size takes tens of microseconds.
constexpr uint64_t kSmallCopyBytes = 512 * 1024;

template <class T>
T* pointer(uintptr_t address) {
  return reinterpret_cast<T*>(address);
}

// q and out [B, HQ, D], lse [B, HQ], pages [B * lists, k], n_pages [B * lists].
uint64_t post(Producer& self, uint32_t layer, uint64_t step, const Array<const float, 3>& q,
              const Array<const int32_t, 2>& pages, const Array<const int32_t, 1>& n_pages,
              uint32_t splits) {
  const scout::Header& h = self.ring().header();
  const int64_t batch = q.shape(0), rows = batch * h.lists;
  const auto k = static_cast<uint32_t>(pages.shape(1));
  expect_shape("post", "q", q, {batch, h.num_q_heads, h.head_dim});
  expect_shape("post", "pages", pages, {rows, k});
  expect_shape("post", "n_pages", n_pages, {rows});
  std::optional<nb::gil_scoped_release> release;
  if (q.nbytes() > kSmallCopyBytes) release.emplace();
  return self.post(layer, step, static_cast<uint32_t>(rows), q.data(), pages.data(), k,
                   n_pages.data(), splits);
}

nb::tuple wait(Producer& self, uint64_t ticket, uint32_t layer, uint64_t step, int64_t timeout_us,
               int64_t spin_us, const Array<float, 3>& out, const Array<float, 2>& lse) {
  const scout::Header& h = self.ring().header();
  const int64_t batch = out.shape(0);
  expect_shape("wait", "out", out, {batch, h.num_q_heads, h.head_dim});
  expect_shape("wait", "lse", lse, {batch, h.num_q_heads});
  Producer::Reply reply;
  {
    std::optional<nb::gil_scoped_release> release;
    if (out.nbytes() > kSmallCopyBytes || !self.is_done(ticket, layer, step)) release.emplace();
    reply = self.wait(ticket, layer, step, static_cast<uint32_t>(batch * h.lists), timeout_us,
                      spin_us, out.data(), lse.data());
  }
  return nb::make_tuple(reply.waited_us, reply.fallback_pages);
}

nb::dict totals(const Producer& self) {
  const scout::StatLine sum = scout::stat_totals(self.ring());
  nb::dict d;
  d["items"] = sum.items;
  d["pages"] = sum.pages;
  d["busy_us"] = sum.busy_ns / 1000;
  d["refused"] = static_cast<int64_t>(sum.refused) + self.refused_answers();
  d["stale"] = sum.stale;
  d["records"] = sum.records;
  d["remote_pages"] = sum.remote_pages;
  d["fallback_pages"] = self.fallback_pages();
  d["local_tickets"] = self.local_tickets();
  d["late_tickets"] = self.late_tickets();
  return d;
}

// A field of a shared struct, for a numpy dtype.
struct Field {
  const char* name;
  size_t offset;
  std::string format;
};

template <class T>
std::string format_of() {
  using E = std::remove_extent_t<T>;
  const char* kind = std::is_floating_point_v<E> ? "<f" : std::is_signed_v<E> ? "<i" : "<u";
  const std::string count = std::is_array_v<T> ? "(" + std::to_string(std::extent_v<T>) + ",)" : "";
  return count + kind + std::to_string(sizeof(E));
}

nb::dict dtype_of(size_t itemsize, std::initializer_list<Field> fields) {
  nb::list names, formats, offsets;
  for (const Field& field : fields) {
    names.append(field.name);
    formats.append(field.format);
    offsets.append(field.offset);
  }
  nb::dict d;
  d["names"] = names;
  d["formats"] = formats;
  d["offsets"] = offsets;
  d["itemsize"] = itemsize;
  return d;
}

void bind_layout(nb::module_& m) {
  m.attr("RING_LAYOUT_VERSION") = scout::kLayoutVersion;
  m.attr("RING_MAX_SPLITS") = scout::kMaxSplits;
  m.attr("RING_MAX_NODES") = scout::kMaxNodes;
  m.attr("RING_CLOSED_ITEM") = scout::kClosed;
  nb::dict structs;
#define F(name) Field{#name, offsetof(S, name), format_of<decltype(S::name)>()}
  {
    using S = scout::Header;
    structs["Header"] = dtype_of(
        sizeof(S), {F(magic),          F(layout_version), F(log_entries),   F(total_bytes),
                    F(num_pages),      F(num_layers),     F(page_size),     F(num_kv_heads),
                    F(num_q_heads),    F(head_dim),       F(dtype),         F(max_batch),
                    F(max_pages),      F(scale),          F(stat_lines),    F(control_offset),
                    F(stats_offset),   F(log_offset),     F(bell_offset),   F(records_offset),
                    F(record_stride),  F(replies_offset), F(reply_stride),  F(kv_offset),
                    F(layer_stride),   F(v_offset),       F(q_offset),      F(pages_offset),
                    F(n_pages_offset), F(out_offset),     F(lse_offset),    F(events_offset),
                    F(event_entries),  F(q_dtype),        F(num_nodes),     F(stripe_pages),
                    F(lists),          F(row_heads),      F(context_pages), F(checksums_offset)});
  }
  {
    using S = scout::Control;
    structs["Control"] = dtype_of(sizeof(S), {F(head), F(epoch), F(trace)});
  }
  {
    using S = scout::Bell;
    structs["Bell"] = dtype_of(sizeof(S), {F(count), F(sleepers), F(damaged)});
  }
  {
    using S = scout::StatLine;
    structs["StatLine"] = dtype_of(sizeof(S), {F(items), F(pages), F(busy_ns), F(refused), F(stale),
                                               F(records), F(events), F(remote_pages)});
  }
  {
    using S = scout::RecordHeader;
    structs["RecordHeader"] = dtype_of(sizeof(S), {F(seq), F(layer), F(rows), F(splits), F(step)});
  }
  {
    using S = scout::ReplyHeader;
    structs["ReplyHeader"] = dtype_of(sizeof(S), {F(done), F(status), F(waiters), F(claim)});
  }
  {
    using S = scout::Event;
    structs["Event"] =
        dtype_of(sizeof(S), {F(stamp), F(seq), F(step), F(begin_ns), F(end_ns), F(layer),
                             F(first_item), F(items), F(splits), F(pages)});
  }
#undef F
  m.attr("RING_STRUCTS") = structs;
  m.def(
      "ring_lay_out", [](uintptr_t header) { scout::lay_out(*pointer<scout::Header>(header)); },
      "Fills offsets and strides of a Header of which the sizes are set.");
  m.def(
      "ring_defect",
      [](uintptr_t address, uint64_t nbytes) {
        return scout::Ring().open(pointer<void>(address), nbytes);
      },
      "Why the memory is no ring of this build, or \"\".");
}

scout::Ring opened(uintptr_t address, uint64_t nbytes) {
  scout::Ring ring;
  const std::string why = ring.open(pointer<void>(address), nbytes);
  if (!why.empty()) throw std::invalid_argument("checksums: " + why);
  return ring;
}

using Ids = Array<const int64_t, 1>;

void bind_checksums(nb::module_& m) {
  const auto no_gil = nb::call_guard<nb::gil_scoped_release>();
  m.attr("PAGE_SEALED") = scout::kSealed;
  m.attr("PAGE_DAMAGED") = scout::kDamaged;
  m.def(
      "page_checksum",
      [](const Array<const uint8_t, 1>& k, const Array<const uint8_t, 1>& v) {
        const auto bytes = static_cast<int64_t>(k.shape(0));
        expect_shape("page_checksum", "v", v, {bytes});
        return scout::page_checksum(k.data(), v.data(), bytes);
      },
      no_gil);
  m.def(
      "seal_pages",
      [](uintptr_t address, uint64_t nbytes, const Ids& pages, int threads) {
        const scout::Ring ring = opened(address, nbytes);
        const auto n = static_cast<int64_t>(pages.shape(0));
        scout::expect_ids("seal_pages", "pages", pages.data(), n, ring.header().num_pages);
        scout::seal_pages(ring, pages.data(), n, threads);
      },
      no_gil);
  m.def(
      "check_pages",
      [](uintptr_t address, uint64_t nbytes, const Ids& layers, const Ids& pages, int threads) {
        const scout::Ring ring = opened(address, nbytes);
        const auto n = static_cast<int64_t>(pages.shape(0));
        expect_shape("check_pages", "layers", layers, {n});
        scout::expect_ids("check_pages", "layers", layers.data(), n, ring.header().num_layers);
        scout::expect_ids("check_pages", "pages", pages.data(), n, ring.header().num_pages);
        scout::check_pages(ring, layers.data(), pages.data(), n, threads);
      },
      no_gil);
}

}  // namespace

void bind_runtime(nb::module_& m) {
  bind_layout(m);
  bind_checksums(m);
  m.def(
      "min_split_pages", &scout::min_split_pages,
      "Pages of K and V of so many bytes in the shortest split that is worth a thread of its own.");
  m.def("partial_bytes", &scout::partial_bytes,
        "What a RingRuntime reserves for the results of sequences in several splits.");

  nb::class_<Producer>(m, "RingProducer", "Posts records to the worker and takes its replies.")
      .def("__init__", [](Producer* self, uintptr_t address,
                          uint64_t nbytes) { new (self) Producer(pointer<void>(address), nbytes); })
      .def("next_epoch", &Producer::next_epoch)
      .def("set_live_epoch", &Producer::set_live_epoch)
      .def("live_epoch", &Producer::live_epoch)
      .def("set_split", [](Producer& self, int32_t threads, int32_t max_splits,
                           int32_t min_pages) { self.set_split({threads, max_splits, min_pages}); })
      // No implicit conversion: a result would be written into the converted copy.
      .def("post", &post, nb::arg("layer"), nb::arg("step"), nb::arg("q").noconvert(),
           nb::arg("pages").noconvert(), nb::arg("n_pages").noconvert(), nb::arg("splits"))
      .def("wait", &wait, nb::arg("ticket"), nb::arg("layer"), nb::arg("step"),
           nb::arg("timeout_us"), nb::arg("spin_us"), nb::arg("out").noconvert(),
           nb::arg("lse").noconvert())
      .def("totals", &totals)
      .def("set_trace",
           [](Producer& self, bool on) {
             scout::store_relaxed(&self.ring().control()->trace, on ? 1u : 0u);
           })
      .def("next_event",
           [](const Producer& self, uint32_t line) { return scout::next_event(self.ring(), line); })
      // Into bytes, as structured dtypes are unknown to DLPack.
      .def(
          "read_events",
          [](const Producer& self, uint32_t line, uint64_t from, const Array<uint8_t, 1>& to) {
            const int64_t room = int64_t{self.ring().header().event_entries} * sizeof(scout::Event);
            expect_shape("read_events", "to", to, {room});
            const auto read = scout::read_events(self.ring(), line, from, self.last_epoch(),
                                                 reinterpret_cast<scout::Event*>(to.data()));
            return nb::make_tuple(read.next, read.count, read.lost);
          },
          nb::arg("line"), nb::arg("start"), nb::arg("to").noconvert());

  nb::class_<Attendant>(m, "RingAttendant",
                        "Stands by a ring whose producer is a CUDA stream, until stop().")
      .def(
          "__init__",
          [](Attendant* self, const Producer& producer, int64_t poll_us) {
            new (self) Attendant(producer, poll_us);
          },
          nb::keep_alive<1, 2>())
      .def("stop", &Attendant::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("pages", &Attendant::pages);

  nb::class_<Runtime>(m, "RingRuntime", "The worker's threads, from construction until stop().")
      .def(
          "__init__",
          [](Runtime* self, uintptr_t address, uint64_t nbytes, uint32_t epoch,
             std::vector<int> cpus, int64_t spin_us, uint32_t max_splits, std::vector<int> nodes,
             int64_t help_after_us) {
            const scout::RuntimeOptions options{epoch,   std::move(cpus), std::move(nodes),
                                                spin_us, max_splits,      help_after_us};
            nb::gil_scoped_release release;
            new (self) Runtime(pointer<void>(address), nbytes, options);
          },
          nb::arg("address"), nb::arg("nbytes"), nb::arg("epoch"), nb::arg("cpus"),
          nb::arg("spin_us"), nb::arg("max_splits"), nb::arg("nodes") = std::vector<int>(),
          nb::arg("help_after_us") = scout::RuntimeOptions().help_after_us)
      .def("stop", &Runtime::stop, nb::call_guard<nb::gil_scoped_release>())
      .def("progress", [](const Runtime& self) {
        const scout::Progress p = self.progress();
        return nb::make_tuple(p.pending, p.items);
      });
}
