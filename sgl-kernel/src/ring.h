// The shared ring between the decode server (producer) and the CPU attention worker (consumer).
//
// Byte layout of the arena, one memory file mapped by both (little-endian; offsets in the header):
//
//   0                Header      written once by Arena.create, read-only afterwards
//   control_offset   Control     doorbell
//   stats_offset     StatLine[stat_lines]   one per worker thread, each written by that thread only
//   log_offset       u64[log_entries]       order of the posts: post n is at (n % log_entries)
//   records_offset   2*L slots of record_stride bytes: RecordHeader, q, pages, n_pages
//   replies_offset   2*L slots of reply_stride bytes:  ReplyHeader, out, lse
//   events_offset    stat_lines rings of event_entries Events, each written by one worker thread
//   kv_offset        L layers of layer_stride bytes: K [P,S,H,D], at +v_offset V [P,S,H,D]
//
// Slot of (layer, step): (step & 1) * L + layer.
//
// Numbers:
//   post   40 bits, from 1, grows by one with every published record, never starts again.
//   epoch  24 bits, from 1, the life of the worker process. A new life begins only after the
//          process of the one before is known to be dead.
//   seq    epoch << 40 | post: names one record of one life.
//   claim  post << 24 | item: which item (row * parts + run) of the record is to be taken next. One
//          for each NUMA node, as below.
//
// Nodes: the pages of every plane are divided among num_nodes memory nodes by their index, page i
// is of node i / stripe_pages. A row's pages are split by node first, in the order of the list, and
// then into `parts` runs: part node * parts + run. Empty parts are items too. A thread takes the
// items of its own node first, then those that other nodes' threads leave lying (runtime.cpp).
//
// States of a slot, who writes, in which order:
//   free     done == seq of the slot's last record, or that record is of an earlier life.
//   filling  producer: claims = post<<24 | kClosed, then header, q, pages, n_pages.
//   posted   producer: claims = post<<24 | 0 (release), log entry, Control.head (release), bell,
//            futex.
//   claimed  worker threads raise a claim by compare-and-swap, one item each; the tag makes a
//   thread
//            that is late miss a slot that was filled again. A record that is refused is closed in
//            the claim of node 0.
//   done     worker: out and lse rows, then the last finisher stores status and done = seq
//            (release).
// The producer fills a slot only when it is free. So a living worker never sees a record change
// that it reads, and never writes a reply that has been assigned again; the tags guard the rest.
//
// Why log entries may be overwritten unread: an entry is lost to a lagging thread only when
// log_entries (> 2*L) newer posts exist. At most 2*L are unfinished, so some newer post is
// finished, so some thread has gone past the lost entry, and a thread goes past a record only when
// all its items, of all nodes, are claimed.
//
// Events say what a worker thread did and when, for the timeline. They are written only while
// Control.trace is set. Event n of a thread, counted over all lives, is at n % event_entries; a
// reader that comes too late finds another number in the stamp and counts a loss.
#pragma once

#include <climits>
#include <cstdint>
#include <cstring>
#include <string>

#include "scout/attend.h"
#include "shared_words.h"

namespace scout {

constexpr uint64_t kRingMagic = 0x31474E5254554353ull;  // "SCUTRNG1"
constexpr uint32_t kLayoutVersion = 6;
constexpr uint32_t kHeaderBytes = 4096;
constexpr uint64_t kPostMask = (1ull << 40) - 1;
constexpr uint64_t kItemMask = (1ull << 24) - 1;
constexpr uint64_t kClosed = kItemMask;  // no item can be taken
constexpr uint32_t kMaxParts = 16;
constexpr uint32_t kMaxNodes = 16;

struct Header {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t header_bytes;
  uint64_t total_bytes;
  int64_t num_pages;
  uint32_t num_layers;
  uint32_t page_size;
  uint32_t kv_heads;
  uint32_t q_heads;
  uint32_t head_dim;
  uint32_t dtype;
  uint32_t max_batch;
  uint32_t max_pages;
  float scale;
  float logit_cap;
  uint32_t log_entries;
  uint32_t stat_lines;
  uint64_t control_offset;
  uint64_t stats_offset;
  uint64_t log_offset;
  uint64_t records_offset;
  uint64_t record_stride;
  uint64_t replies_offset;
  uint64_t reply_stride;
  uint64_t kv_offset;
  uint64_t layer_stride;
  uint64_t v_offset;        // of V within a layer
  uint64_t q_offset;        // within a record: fp32 [max_batch, HQ, D]
  uint64_t pages_offset;    // within a record: int32 [max_batch, max_pages]
  uint64_t n_pages_offset;  // within a record: int32 [max_batch]
  uint64_t out_offset;      // within a reply: fp32 [max_batch, HQ, D]
  uint64_t lse_offset;      // within a reply: fp32 [max_batch, HQ]
  uint64_t events_offset;
  uint64_t event_entries;  // of one thread; a power of two
  uint32_t num_nodes;
  uint32_t stripe_pages;  // of a node, in every plane
};
static_assert(sizeof(Header) == 224, "ring.py mirrors this layout");

// Words of different writers lie 128 bytes apart: two cache lines, as adjacent ones come together.
struct Control {
  alignas(128) uint64_t head;  // posts ever published; producer
  alignas(128) uint32_t bell;  // futex, raised with every post; producer (a stopping worker too)
  alignas(128) uint32_t sleepers;  // worker threads about to wait on bell or waiting; worker
  alignas(128) uint32_t epoch;     // the last life that was begun; producer
  alignas(128) uint32_t trace;     // nonzero: worker threads write events; producer
};
static_assert(sizeof(Control) == 640, "ring.py mirrors this layout");

struct StatLine {
  alignas(128) uint64_t items;  // (row, part) items computed
  uint64_t pages;               // pages attended
  uint64_t busy_ns;             // time within items
  uint64_t refused;             // records refused: a field out of range
  uint64_t stale;               // records of another life that were not served
  uint64_t records;             // records finished, refused and stale ones included
  uint64_t events;              // events ever written by the thread
  uint64_t remote_pages;        // of `pages`: those of another node than the thread's
};
static_assert(sizeof(StatLine) == 128, "ring.py mirrors this layout");

struct RecordHeader {
  alignas(128) uint64_t seq;
  uint32_t layer;
  uint32_t rows;
  uint32_t parts;  // each row's pages of a node are split into this many runs, merged in order
  uint64_t step;   // decode step, for events only
  alignas(128) uint64_t claim[kMaxNodes];  // the first num_nodes count
};
static_assert(sizeof(RecordHeader) == 256, "ring.py mirrors this layout");

enum ReplyStatus : uint32_t { kReplyOk = 0, kReplyRefused = 1 };

struct ReplyHeader {
  alignas(128) uint64_t done;  // its low half is the futex word
  uint32_t status;
  alignas(128) uint32_t waiters;  // producer: nonzero while it sleeps on done
};
static_assert(sizeof(ReplyHeader) == 256, "ring.py mirrors this layout");

// The items of one record that one thread computed, which it does in one go. Times are
// CLOCK_MONOTONIC. A stamp other than the event's number + 1 means that it is being written or was
// overwritten.
struct Event {
  alignas(64) uint64_t stamp;
  uint64_t seq;
  uint64_t step;
  int64_t begin_ns;
  int64_t end_ns;
  uint32_t layer;
  uint32_t first_item;  // row * num_nodes * parts + part
  uint32_t items;
  uint32_t parts;
  uint32_t pages;
};
static_assert(sizeof(Event) == 64, "ring.py mirrors this layout");

inline uint64_t make_seq(uint64_t epoch, uint64_t post) { return epoch << 40 | (post & kPostMask); }
inline uint64_t epoch_of(uint64_t seq) { return seq >> 40; }
inline uint64_t post_of(uint64_t seq) { return seq & kPostMask; }

// ---- the mapped ring --------------------------------------------------------------------------

// A mapping of which every offset has been checked; the header is a private copy, so a later change
// of the shared one cannot move anything.
class Ring {
 public:
  // Returns an empty string, or why `bytes` at `base` are no ring of this version.
  std::string open(void* base, uint64_t bytes) {
    base_ = static_cast<char*>(base);
    if (base == nullptr || bytes < kHeaderBytes) return "mapping smaller than its header";
    std::memcpy(&h_, base, sizeof(Header));
    if (h_.magic != kRingMagic) return "no sglang-scout arena (magic differs)";
    if (h_.layout_version != kLayoutVersion)
      return "layout version " + std::to_string(h_.layout_version) + ", this build has " +
             std::to_string(kLayoutVersion);
    if (h_.total_bytes > bytes) return "header asks for more bytes than are mapped";
    auto in = [&](uint64_t v, uint64_t lo, uint64_t hi) { return v >= lo && v <= hi; };
    if (!in(h_.num_layers, 1, 1u << 16) || !in(h_.page_size, 1, 2048) ||
        !in(h_.kv_heads, 1, 1024) || !in(h_.q_heads, 1, 1u << 14) ||
        h_.q_heads % h_.kv_heads != 0 || !in(h_.head_dim, 16, 512) || h_.head_dim % 16 != 0 ||
        h_.dtype > 2 || !in(h_.max_batch, 1, 1u << 16) || !in(h_.max_pages, 1, 1u << 20) ||
        !in(static_cast<uint64_t>(h_.num_pages), 1, INT32_MAX) || !in(h_.stat_lines, 1, 1u << 16) ||
        h_.log_entries <= 2 * h_.num_layers || (h_.log_entries & (h_.log_entries - 1)) != 0 ||
        h_.log_entries > 1u << 24 || !in(h_.event_entries, 1, 1u << 20) ||
        (h_.event_entries & (h_.event_entries - 1)) != 0 || !in(h_.num_nodes, 1, kMaxNodes) ||
        !in(h_.stripe_pages, 1, INT32_MAX) ||
        uint64_t{h_.stripe_pages} * h_.num_nodes < static_cast<uint64_t>(h_.num_pages))
      return "a size in the header is out of range";
    const uint64_t esize = h_.dtype == 0 ? 4 : 2;
    const uint64_t plane =
        static_cast<uint64_t>(h_.num_pages) * h_.page_size * h_.kv_heads * h_.head_dim * esize;
    const uint64_t q = uint64_t{h_.max_batch} * q_floats() * 4;
    // [offset, offset + size) within limit, aligned; every product above fits 64 bits.
    auto fits = [](uint64_t offset, uint64_t size, uint64_t limit, uint64_t align) {
      return offset % align == 0 && offset <= limit && size <= limit - offset;
    };
    const uint64_t all = h_.total_bytes;
    const uint64_t slots = num_slots();
    if (h_.record_stride > all || h_.reply_stride > all || h_.layer_stride > all)
      return "a stride in the header is out of range";
    const bool ok =
        fits(h_.control_offset, sizeof(Control), all, 128) &&
        fits(h_.stats_offset, sizeof(StatLine) * h_.stat_lines, all, 128) &&
        fits(h_.log_offset, 8ull * h_.log_entries, all, 128) &&
        fits(h_.events_offset, sizeof(Event) * h_.event_entries * h_.stat_lines, all, 64) &&
        h_.record_stride % 128 == 0 && h_.reply_stride % 128 == 0 && h_.records_offset <= all &&
        h_.record_stride <= (all - h_.records_offset) / slots && h_.replies_offset <= all &&
        h_.reply_stride <= (all - h_.replies_offset) / slots && h_.kv_offset <= all &&
        h_.layer_stride <= (all - h_.kv_offset) / h_.num_layers && h_.records_offset % 128 == 0 &&
        h_.replies_offset % 128 == 0 && h_.kv_offset % 64 == 0 &&
        h_.q_offset >= sizeof(RecordHeader) && fits(h_.q_offset, q, h_.record_stride, 64) &&
        fits(h_.pages_offset, 4ull * h_.max_batch * h_.max_pages, h_.record_stride, 64) &&
        fits(h_.n_pages_offset, 4ull * h_.max_batch, h_.record_stride, 64) &&
        h_.out_offset >= sizeof(ReplyHeader) && fits(h_.out_offset, q, h_.reply_stride, 64) &&
        fits(h_.lse_offset, 4ull * h_.max_batch * h_.q_heads, h_.reply_stride, 64) &&
        fits(h_.v_offset, plane, h_.layer_stride, 64) && plane <= h_.layer_stride &&
        h_.layer_stride % 64 == 0;
    return ok ? "" : "an offset in the header lies outside the mapping";
  }

  const Header& header() const { return h_; }
  uint32_t num_slots() const { return 2 * h_.num_layers; }
  uint64_t q_floats() const { return uint64_t{h_.q_heads} * h_.head_dim; }  // of one row
  uint32_t slot(uint32_t layer, uint64_t step) const {
    return static_cast<uint32_t>(step & 1) * h_.num_layers + layer;
  }
  Control* control() const { return at<Control>(h_.control_offset); }
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
  float* q(uint32_t slot, uint32_t row) const {
    return at<float>(h_.records_offset + slot * h_.record_stride + h_.q_offset) + row * q_floats();
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
  float* out(uint32_t slot, uint32_t row) const {
    return at<float>(h_.replies_offset + slot * h_.reply_stride + h_.out_offset) + row * q_floats();
  }
  float* lse(uint32_t slot, uint32_t row) const {
    return at<float>(h_.replies_offset + slot * h_.reply_stride + h_.lse_offset) +
           uint64_t{row} * h_.q_heads;
  }
  KvPages kv(uint32_t layer) const {
    const char* k = base_ + h_.kv_offset + layer * h_.layer_stride;
    return {k,
            k + h_.v_offset,
            h_.num_pages,
            static_cast<int32_t>(h_.page_size),
            static_cast<int32_t>(h_.kv_heads),
            static_cast<int32_t>(h_.head_dim),
            static_cast<DType>(h_.dtype)};
  }
  AttendParams params() const {
    return {static_cast<int32_t>(h_.q_heads / h_.kv_heads), h_.scale, h_.logit_cap};
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
