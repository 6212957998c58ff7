// One process's mapping of the ring of ring.h: validated once, then typed access to its parts.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <string>

#include "attend.h"
#include "ring.h"
#include "shared_words.h"

namespace scout {

// A mapped ring. The header is a private, validated copy, immune to later changes of the shared
// one.
class Ring {
 public:
  // Returns an empty string, or why `bytes` at `base` are not a ring of this version.
  std::string open(void* base, uint64_t bytes) {
    base_ = static_cast<char*>(base);
    if (base == nullptr || bytes < kHeaderBytes) return "the mapping is smaller than a header";
    std::memcpy(&h_, base, sizeof(Header));
    if (h_.magic != kRingMagic) return "not an sglang-scout arena (the magic number differs)";
    if (h_.layout_version != kLayoutVersion)
      return "layout version " + std::to_string(h_.layout_version) + ", this build has " +
             std::to_string(kLayoutVersion);
    const auto in = [](uint64_t v, uint64_t lo, uint64_t hi) { return v >= lo && v <= hi; };
    if (!in(h_.num_layers, 1, 1u << 16) || !in(h_.page_size, 1, 2048) ||
        !in(h_.num_kv_heads, 1, 1024) || !in(h_.num_q_heads, 1, 1u << 14) ||
        h_.num_q_heads % h_.num_kv_heads != 0 || !in(h_.head_dim, 16, 512) ||
        h_.head_dim % 16 != 0 || h_.dtype >= kDTypes || h_.q_dtype > 1 ||
        !in(h_.max_batch, 1, 1u << 16) || !in(h_.max_pages, 1, 1u << 20) ||
        !in(static_cast<uint64_t>(h_.num_pages), 1, INT32_MAX) ||
        (h_.lists != 1 && h_.lists != h_.num_kv_heads) || h_.max_batch % h_.lists != 0 ||
        !in(h_.num_nodes, 1, kMaxNodes) || !in(h_.stripe_pages, 1, INT32_MAX) ||
        uint64_t{h_.stripe_pages} * h_.num_nodes < static_cast<uint64_t>(h_.num_pages) ||
        h_.context_pages > INT32_MAX || id_end(h_) > INT32_MAX)
      return "a size in the header is out of range";
    // First, as the size of all planes may overflow 64 bits.
    if (plane_bytes(h_) > bytes / (2 * h_.num_layers) || h_.total_bytes > bytes)
      return "the header asks for more bytes than the " + std::to_string(bytes) + " mapped";
    Header expected = h_;
    lay_out(expected);
    return std::memcmp(&expected, &h_, sizeof(Header)) == 0
               ? ""
               : "an offset in the header is not what its sizes say";
  }

  const Header& header() const { return h_; }
  uint32_t num_slots() const { return 2 * h_.num_layers; }
  uint64_t q_floats() const { return uint64_t{h_.row_heads} * h_.head_dim; }  // of one row
  uint32_t slot(uint32_t layer, uint64_t step) const {
    return static_cast<uint32_t>(step & 1) * h_.num_layers + layer;
  }
  Control* control() const { return at<Control>(h_.control_offset); }
  Bell* bell() const { return at<Bell>(h_.bell_offset); }
  StatLine* stats(uint32_t i) const { return at<StatLine>(h_.stats_offset) + i; }
  uint64_t* log_entry(uint64_t post) const {
    return at<uint64_t>(h_.log_offset) + (post & (h_.log_entries - 1));
  }
  Event* event(uint32_t line, uint64_t number) const {
    return at<Event>(h_.events_offset) + line * h_.event_entries +
           (number & (h_.event_entries - 1));
  }
  RecordHeader* record(uint32_t slot) const {
    return at<RecordHeader>(h_.records_offset + slot * h_.record_stride);
  }
  char* q(uint32_t slot, uint32_t row) const {
    return at<char>(h_.records_offset + slot * h_.record_stride + h_.q_offset) +
           row * q_floats() * value_bytes(h_);
  }
  // Stores queries or results in q_dtype. bf16 is rounded to nearest even, so queries of a bf16
  // model are exact, and a result is off by up to 2^-8 of itself.
  void store_values(const float* from, uint64_t count, void* to) const {
    if (h_.q_dtype == 0) {
      std::memcpy(to, from, count * sizeof(float));
      return;
    }
    auto* bits = static_cast<uint16_t*>(to);
    for (uint64_t i = 0; i < count; ++i) {
      uint32_t word;
      std::memcpy(&word, from + i, sizeof word);
      const bool nan = (word & 0x7fffffffu) > 0x7f800000u;
      bits[i] = nan ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fffu + (word >> 16 & 1)) >> 16);
    }
  }
  void load_values(const void* from, uint64_t count, float* to) const {
    if (h_.q_dtype == 0) {
      std::memcpy(to, from, count * sizeof(float));
      return;
    }
    const auto* bits = static_cast<const uint16_t*>(from);
    for (uint64_t i = 0; i < count; ++i) {
      const uint32_t word = uint32_t{bits[i]} << 16;
      std::memcpy(to + i, &word, sizeof word);
    }
  }
  int32_t* pages(uint32_t slot, uint32_t row) const {
    return at<int32_t>(h_.records_offset + slot * h_.record_stride + h_.pages_offset) +
           uint64_t{row} * h_.max_pages;
  }
  int32_t* n_pages(uint32_t slot) const {
    return at<int32_t>(h_.records_offset + slot * h_.record_stride + h_.n_pages_offset);
  }
  ReplyHeader* reply(uint32_t slot) const {
    return at<ReplyHeader>(h_.replies_offset + slot * h_.reply_stride);
  }
  char* out(uint32_t slot, uint32_t row) const {
    return at<char>(h_.replies_offset + slot * h_.reply_stride + h_.out_offset) +
           row * q_floats() * value_bytes(h_);
  }
  float* lse(uint32_t slot, uint32_t row) const {
    return at<float>(h_.replies_offset + slot * h_.reply_stride + h_.lse_offset) +
           uint64_t{row} * h_.row_heads;
  }
  KvPages kv(uint32_t layer) const {
    const char* k = base_ + h_.kv_offset + layer * h_.layer_stride;
    return {k,
            k + h_.v_offset,
            h_.num_pages,
            static_cast<int32_t>(h_.page_size),
            static_cast<int32_t>(h_.num_kv_heads),
            static_cast<int32_t>(h_.head_dim),
            static_cast<DType>(h_.dtype),
            static_cast<int32_t>(h_.num_kv_heads)};
  }
  KvPages context(uint32_t layer) const {
    const uint64_t begin = uint64_t(h_.num_pages) * h_.num_kv_heads * context_page_bytes(h_);
    const char* k = base_ + h_.kv_offset + layer * h_.layer_stride + begin;
    KvPages pages = kv(layer);
    pages.k = k;
    pages.v = k + h_.v_offset;
    pages.num_pages = static_cast<int64_t>(h_.context_pages);
    pages.kv_heads = pages.stored_heads = 1;
    return pages;
  }
  // The checksum word of a page, or null if it has none, like a context page.
  uint64_t* checksum(uint32_t layer, int64_t page) const {
    if (h_.checksums_offset == 0 || page >= h_.num_pages) return nullptr;
    return at<uint64_t>(h_.checksums_offset) + layer * h_.num_pages + page;
  }
  AttendParams params() const {
    return {static_cast<int32_t>(h_.num_q_heads / h_.num_kv_heads), h_.scale};
  }

 private:
  template <class T>
  T* at(uint64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }
  char* base_ = nullptr;
  Header h_{};
};

}  // namespace scout
