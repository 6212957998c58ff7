// The ring between the decode server (producer) and the CPU attention worker (consumer): one slot
// per layer and step parity, in memory that both processes map.
//
//   producer                                   worker threads
//   --------                                   --------------
//        +----------+
//   +--->|  0 FREE  |  reply.done == seq of the slot's last record, or that is of an older epoch
//   |    +----------+
//   |         | (a)  claims = post|CLOSED (relaxed), fence; header, q, pages, n_pages (plain)
//   |    +-----------+
//   |    | 1 FILLING |  no item can be claimed
//   |    +-----------+
//   |         | (b)  claims = post|0, log entry, head (release each); bell (seq_cst), fence, futex
//   |    +----------+
//   |    | 2 POSTED |<--+  (c)  head, log entry, claim, header (acquire); claim + 1 (CAS, acq_rel)
//   |    +----------+---+       takes one item; q, pages are read; out, lse are written (plain)
//   |         |        (d)  items done + 1 (acq_rel); the last thread: status (relaxed),
//   |    +----------+       done = seq (release), fence, futex
//   +----|  3 DONE  |
//    (e) +----------+
//   done == seq (acquire), then out and lse are copied
//
// The worker maps what only the producer writes read-only, so a wild write there kills the worker
// and leaves records and pages intact, from which the producer or the attendant then answers.
//
// (a) Only from FREE: a live worker never reads a record while it changes.
// (c) The post in the claim makes the CAS of a late thread fail if the slot was refilled (no ABA).
//     A thread that finds a field out of range, or another epoch, closes the claim of node 0 and
//     publishes kReplyRefused.
// (e) Without an answer in time the producer computes the same pages from its copy or the record;
//     the slot stays POSTED until it is answered. When a worker process is dead the next one has a
//     new epoch, and all slots of older epochs are FREE.
//
// Numbers. post: 40 bits, from 1, incremented with every record, never reset. epoch: 24 bits, from
// 1, incremented with every worker process, after the previous process is known to be dead.
// seq = epoch << 40 | post identifies one record of one process. claim = post << 24 | item, where
// item is the next row * splits + i to be taken, i being one of the row's splits.
//
// Rows. A request has `lists` rows of pages, 1 or one per KV head: row r is for the KV heads of
// list r % lists, with their row_heads query heads.
//
// Nodes. Page i of every plane is on NUMA node i / stripe_pages. A row's pages are split by node,
// in list order, and those of a node into `splits` splits: split node * splits + i. Empty ones are
// items too. There is one claim per node; a thread takes items of its own node first.
//
// The log (post n at n % log_entries: n << 24 | slot) records the order in which slots were posted.
// Entries may be overwritten unread: log_entries > 2 * slots, of which at most `slots` are
// unfinished, so some post newer than the lost entry is finished, so some thread has passed the
// lost one, which it does only when all its items are claimed.
//
// lay_out() defines the layout; bind_runtime.cpp exports it to Python and to CUDA kernels.
#pragma once

#include <cstdint>

#include "attend.h"

namespace scout {

constexpr uint64_t kRingMagic = 0x31474E5254554353ull;  // "SCUTRNG1"
constexpr uint32_t kLayoutVersion = 11;
constexpr uint32_t kHeaderBytes = 4096;
constexpr uint32_t kStatLines = 1024;    // most threads of a worker
constexpr uint32_t kEventEntries = 256;  // per thread: four steps of 64 layers, read every step
constexpr uint64_t kSmallPage = 4096;
constexpr uint64_t kHugePage = 2 << 20;
constexpr uint64_t kPostMask = (1ull << 40) - 1;
constexpr uint64_t kItemMask = (1ull << 24) - 1;
constexpr uint64_t kClosed = kItemMask;  // no item can be taken
constexpr uint32_t kMaxSplits = 16;
constexpr uint32_t kMaxNodes = 16;

struct Header {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t log_entries;
  uint64_t total_bytes;
  int64_t num_pages;
  uint32_t num_layers;
  uint32_t page_size;
  uint32_t num_kv_heads;
  uint32_t num_q_heads;
  uint32_t head_dim;
  uint32_t dtype;
  uint32_t max_batch;
  uint32_t max_pages;
  float scale;
  uint32_t stat_lines;
  uint64_t control_offset;
  uint64_t log_offset;
  uint64_t records_offset;
  uint64_t record_stride;
  uint64_t bell_offset;  // from here up to kv_offset also writable by the worker
  uint64_t stats_offset;
  uint64_t replies_offset;
  uint64_t reply_stride;
  uint64_t kv_offset;
  uint64_t layer_stride;
  uint64_t v_offset;        // of V within a layer
  uint64_t q_offset;        // within a record: q_dtype [max_batch, row_heads, D]
  uint64_t pages_offset;    // within a record: int32 [max_batch, max_pages]
  uint64_t n_pages_offset;  // within a record: int32 [max_batch]
  uint64_t out_offset;      // within a reply: q_dtype [max_batch, row_heads, D]
  uint64_t lse_offset;      // within a reply: fp32 [max_batch, row_heads]
  uint64_t events_offset;
  uint32_t event_entries;  // of one thread; a power of two
  uint32_t q_dtype;        // of queries and results: 0 fp32, 1 bf16, for bf16 models
  uint32_t num_nodes;
  uint32_t stripe_pages;      // of a node, in every plane
  uint32_t lists;             // page lists per request
  uint32_t row_heads;         // query heads of a row
  uint64_t context_pages;     // of one KV head, after the pages of every plane; on the last node
  uint64_t checksums_offset;  // of the pages' checksums; 0: there are none
};
static_assert(sizeof(Header) == 248);  // no padding: headers are compared by bytes

// Words of different writers are 128 bytes apart (two cache lines, because of the adjacent-line
// prefetcher) to avoid false sharing.
struct Control {                // the producer's
  alignas(128) uint64_t head;   // number of posts published so far
  alignas(128) uint32_t epoch;  // of the last worker process
  alignas(128) uint32_t trace;  // nonzero: worker threads write events
};
static_assert(sizeof(Control) == 384);

struct Bell {
  alignas(128) uint32_t count;     // futex, incremented by every post, and by a stopping worker
  alignas(128) uint32_t sleepers;  // worker threads about to wait on it or waiting; worker
  alignas(128) uint32_t damaged;   // pages found to differ from their checksums; both
};
static_assert(sizeof(Bell) == 384);

struct StatLine {
  alignas(128) uint64_t items;  // (row, split) items computed
  uint64_t pages;               // pages attended
  uint64_t busy_ns;             // time within items
  uint64_t refused;             // records refused: a field out of range
  uint64_t stale;               // records of another epoch, not served
  uint64_t records;             // records finished, refused and stale ones included
  uint64_t events;              // events ever written by the thread
  uint64_t remote_pages;        // of `pages`: those of another node than the thread's
};
static_assert(sizeof(StatLine) == 128);

struct RecordHeader {
  alignas(128) uint64_t seq;
  uint32_t layer;
  uint32_t rows;
  uint32_t splits;  // of each row's pages of a node, merged in order
  uint64_t step;    // decode step, for events only
};
static_assert(sizeof(RecordHeader) == 128);

enum ReplyStatus : uint32_t { kReplyOk = 0, kReplyRefused = 1 };

struct ReplyHeader {
  alignas(128) uint64_t done;  // its low half is the futex word
  uint32_t status;
  alignas(128) uint32_t waiters;           // producer: nonzero while it sleeps on done
  alignas(128) uint64_t claim[kMaxNodes];  // the first num_nodes are used
};
static_assert(sizeof(ReplyHeader) == 384);

// The items of one record computed consecutively by one thread. Times are CLOCK_MONOTONIC. A stamp
// other than the event's number + 1 means that it is being written or was overwritten.
struct Event {
  alignas(64) uint64_t stamp;
  uint64_t seq;
  uint64_t step;
  int64_t begin_ns;
  int64_t end_ns;
  uint32_t layer;
  uint32_t first_item;  // row * num_nodes * splits + split
  uint32_t items;
  uint32_t splits;
  uint32_t pages;
};
static_assert(sizeof(Event) == 64);

inline uint64_t make_seq(uint64_t epoch, uint64_t post) { return epoch << 40 | (post & kPostMask); }
inline uint64_t epoch_of(uint64_t seq) { return seq >> 40; }
inline uint64_t post_of(uint64_t seq) { return seq & kPostMask; }

// Sizes of a page of one KV head, and of K (or V) of a layer.
inline uint64_t context_page_bytes(const Header& h) {
  return uint64_t{h.page_size} * h.head_dim * bytes_of(static_cast<DType>(h.dtype));
}
inline uint64_t plane_bytes(const Header& h) {
  return (static_cast<uint64_t>(h.num_pages) * h.num_kv_heads + h.context_pages) *
         context_page_bytes(h);
}
// End of the ids in a list. From num_pages on, num_pages + page * page_size + n - 1 denotes the
// first n tokens of a context page. A list has either only such ids or none, and only its last may
// be a partial page.
inline int64_t id_end(const Header& h) {
  return h.num_pages + static_cast<int64_t>(h.context_pages) * h.page_size;
}

// Size of an element of a query or a result.
inline uint64_t value_bytes(const Header& h) { return h.q_dtype == 0 ? 4 : 2; }

// Fills in the rest of a header whose sizes are set (num_pages to scale, q_dtype, num_nodes,
// stripe_pages, lists; checksums_offset as a flag). Layout of the memory file, from 0:
//
//   Header    written once by Arena.create, read-only afterwards
//   Control
//   log       u64[log_entries]
//   records   2 L slots, slot (step & 1) * L + layer: RecordHeader, q, pages, n_pages
//   Bell      at a huge page; from here on also writable by the worker
//   stats     StatLine[stat_lines], each written by one worker thread only
//   replies   2 L slots: ReplyHeader, out, lse
//   events    stat_lines rings of event_entries Events, each written by one worker thread
//   checksums u64[L, P], see checksums.h
//   kv        at a huge page; read-only for the worker. L layers: K [P, S, H, D], [C, S, D] of
//             context pages, V likewise; with several nodes planes begin at huge pages, so that no
//             huge page is shared by two planes
inline void lay_out(Header& h) {
  const auto up = [](uint64_t v, uint64_t align) { return (v + align - 1) / align * align; };
  uint64_t end = kHeaderBytes;
  const auto place = [&](uint64_t bytes, uint64_t align) {
    const uint64_t at = up(end, align);
    end = at + bytes;
    return at;
  };
  const uint32_t slots = 2 * h.num_layers;
  h.row_heads = h.num_q_heads / h.lists;
  const uint64_t values = uint64_t{h.max_batch} * h.row_heads * h.head_dim;
  h.magic = kRingMagic;
  h.layout_version = kLayoutVersion;
  h.stat_lines = kStatLines;
  h.event_entries = kEventEntries;
  h.log_entries = 1;
  while (h.log_entries <= 2 * slots) h.log_entries *= 2;
  h.q_offset = sizeof(RecordHeader);
  h.pages_offset = h.q_offset + up(value_bytes(h) * values, 128);
  h.n_pages_offset = h.pages_offset + up(4ull * h.max_batch * h.max_pages, 128);
  h.record_stride = h.n_pages_offset + up(4ull * h.max_batch, 128);
  h.out_offset = sizeof(ReplyHeader);
  h.lse_offset = h.out_offset + up(value_bytes(h) * values, 128);
  h.reply_stride = h.lse_offset + up(4ull * h.max_batch * h.row_heads, 128);
  h.control_offset = place(sizeof(Control), 128);
  h.log_offset = place(8ull * h.log_entries, 128);
  h.records_offset = place(h.record_stride * slots, kSmallPage);
  h.bell_offset = place(sizeof(Bell), kHugePage);
  h.stats_offset = place(sizeof(StatLine) * h.stat_lines, 128);
  h.replies_offset = place(h.reply_stride * slots, kSmallPage);
  h.events_offset = place(sizeof(Event) * uint64_t{h.event_entries} * h.stat_lines, kSmallPage);
  if (h.checksums_offset != 0)
    h.checksums_offset =
        place(8ull * h.num_layers * static_cast<uint64_t>(h.num_pages), kSmallPage);
  h.v_offset = up(plane_bytes(h), h.num_nodes > 1 ? kHugePage : kSmallPage);
  h.layer_stride = 2 * h.v_offset;
  h.kv_offset = place(h.layer_stride * h.num_layers, kHugePage);
  h.total_bytes = up(end, kHugePage);
}

}  // namespace scout
