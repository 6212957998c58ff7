// The producer of the ring: the decode server's side. Posts records, takes replies, and computes a
// record itself when its worker is gone, late or busy. Layout and states: ring.h.
//
// post and wait belong to one thread. set_life and the counters may be used from another.
#pragma once

#include <atomic>
#include <climits>
#include <cmath>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "ring.h"
#include "row.h"
#include "split.h"
#include "test_points.h"

namespace scout {

class Producer {
 public:
  struct Reply {
    int64_t waited_us;
    int64_t fallback_pages;  // pages computed here; 0 if the worker answered
  };

  struct EventsRead {
    uint64_t next;   // where to go on
    uint32_t count;  // copied
    uint64_t lost;
  };

  Producer(void* base, uint64_t bytes) {
    const std::string why = ring_.open(base, bytes);
    if (!why.empty()) throw std::invalid_argument("ring producer: " + why);
    const Header& h = ring_.header();
    slots_.resize(ring_.num_slots());
    scratch_pages_.resize(h.max_pages);
    part_floats_ = ring_.q_floats() + h.q_heads;
    // An arena may see several producers, one after the other.
    posts_ = load_acquire(&ring_.control()->head);
    // What the one before left in the ring may still be served by a worker that outlived it.
    for (uint32_t i = 0; i < ring_.num_slots(); ++i)
      slots_[i].seq = load_acquire(&ring_.record(i)->seq);
    set_trace(false);
  }

  // Reserves the number of a new worker life; only when no earlier worker is alive any more.
  uint32_t next_epoch() {
    const uint32_t epoch = load_relaxed(&ring_.control()->epoch) + 1;
    if (epoch >> 24 != 0) throw std::runtime_error("ring producer: epochs are used up");
    store_relaxed(&ring_.control()->epoch, epoch);
    return epoch;
  }

  // From now on records go to the worker of `epoch`, or to nobody (0). Whoever waits looks again.
  void set_life(uint32_t epoch) {
    live_epoch_.store(epoch, std::memory_order_seq_cst);
    full_fence();  // either await_done sees the new life, or its waiter is seen here
    for (uint32_t i = 0; i < ring_.num_slots(); ++i) {
      const ReplyHeader* reply = ring_.reply(i);
      if (load_acquire(&reply->waiters) != 0) futex_wake(low_half(&reply->done), INT_MAX);
    }
  }

  // How post(parts = 0) splits; `most` is what the worker was started with.
  void set_split(const Split& split) {
    if (split.threads < 1 || split.least_pages < 1 || split.most < 1 ||
        split.most > static_cast<int32_t>(kMaxParts))
      throw std::invalid_argument(
          "ring producer: a split of " + std::to_string(split.threads) + " threads, runs of " +
          std::to_string(split.least_pages) + " pages, at most " + std::to_string(split.most) +
          "; all must be 1 or more, the last up to " + std::to_string(kMaxParts));
    split_ = split;
  }

  // Hands rows [0, rows) to the worker. Returns the ticket. Copies everything. q fp32 [rows, HQ,
  // D]; pages int32 [rows, k], of row b the first n_pages[b] count, ids < 0 skipped; parts: runs
  // of each row, 0: as set_split said. Throws std::invalid_argument for a value out of range
  // (nothing is posted then).
  uint64_t post(uint32_t layer, uint64_t step, uint32_t rows, const float* q, const int32_t* pages,
                uint32_t k, const int32_t* n_pages, uint32_t parts) {
    const Header& h = ring_.header();
    if (layer >= h.num_layers) fail("layer", layer, 0, h.num_layers - 1);
    if (rows > h.max_batch) fail("rows", rows, 0, h.max_batch);
    if (parts > kMaxParts) fail("parts", parts, 0, kMaxParts);
    int64_t sequences = 0, listed = 0, largest = 0, total = 0;  // total: those that are no padding
    for (uint32_t b = 0; b < rows; ++b) {
      const int64_t limit = k < h.max_pages ? k : h.max_pages;
      if (n_pages[b] < 0 || n_pages[b] > limit) fail("n_pages", n_pages[b], 0, limit, b);
      sequences += n_pages[b] > 0;
      listed += n_pages[b];
      largest = n_pages[b] > largest ? n_pages[b] : largest;
      for (int32_t i = 0; i < n_pages[b]; ++i) {
        const int32_t id = pages[uint64_t{b} * k + i];
        if (id >= h.num_pages) fail("page id", id, 0, h.num_pages - 1, b);
        total += id >= 0;
      }
    }
    const uint32_t index = ring_.slot(layer, step);
    Slot& slot = slots_[index];
    const uint32_t live = live_epoch_.load(std::memory_order_acquire);
    slot.ticket = ++tickets_;
    slot.rows = rows;
    slot.parts = parts > 0 ? parts : split_.runs(sequences, listed, largest);
    slot.pages = total;
    if (total == 0) {
      slot.kind = Kind::kEmpty;
    } else if (live == 0 || is_busy(index, live)) {
      slot.kind = Kind::kLocal;
      add_own<int64_t>(&local_tickets_, 1);
      keep(slot, q, pages, k, n_pages);
    } else {
      slot.kind = Kind::kPosted;
      publish(index, live, layer, step, q, pages, k, n_pages);
    }
    return slot.ticket;
  }

  // True if wait() would not sleep. For the caller's choice to keep the GIL.
  bool is_done(uint64_t ticket, uint32_t layer, uint64_t step) const {
    if (layer >= ring_.header().num_layers) return true;
    const uint32_t index = ring_.slot(layer, step);
    const Slot& slot = slots_[index];
    return slot.ticket != ticket || slot.kind == Kind::kEmpty ||
           (slot.kind == Kind::kPosted && load_acquire(&ring_.reply(index)->done) == slot.seq);
  }

  // Fills out fp32 [rows, HQ, D] and lse fp32 [rows, HQ], from the worker's reply if it comes
  // within timeout_us, otherwise by computing the same pages here. Throws std::invalid_argument if
  // the ticket was waited for before or its slot has been given to a later one.
  Reply wait(uint64_t ticket, uint32_t layer, uint64_t step, int64_t timeout_us, int64_t spin_us,
             float* out, float* lse) {
    const Header& h = ring_.header();
    if (layer >= h.num_layers) fail("layer", layer, 0, h.num_layers - 1);
    const uint32_t index = ring_.slot(layer, step);
    Slot& slot = slots_[index];
    if (ticket == 0 || slot.ticket != ticket)
      throw std::invalid_argument("wait: ticket " + std::to_string(ticket) + " of layer " +
                                  std::to_string(layer) + " step " + std::to_string(step) +
                                  " is used up: waited for before, or replaced by a later post");
    slot.ticket = 0;
    const uint64_t q_floats = ring_.q_floats();
    Reply reply{0, 0};
    if (slot.kind == Kind::kEmpty) {
      std::memset(out, 0, slot.rows * q_floats * sizeof(float));
      for (uint64_t i = 0; i < uint64_t{slot.rows} * h.q_heads; ++i) lse[i] = -INFINITY;
      return reply;
    }
    if (slot.kind == Kind::kPosted) {
      const int64_t begin_ns = now_ns();
      const bool answered = await_done(index, slot.seq, begin_ns, timeout_us, spin_us);
      reply.waited_us = (now_ns() - begin_ns) / 1000;
      if (answered) {
        SCOUT_POINT(kAnswered, index);
        std::memcpy(out, ring_.out(index, 0), slot.rows * q_floats * sizeof(float));
        std::memcpy(lse, ring_.lse(index, 0), uint64_t{slot.rows} * h.q_heads * sizeof(float));
        return reply;
      }
      // The worker never writes a record, so q and pages are still there.
      compute(layer, slot, ring_.q(index, 0), ring_.pages(index, 0), h.max_pages,
              ring_.n_pages(index), out, lse);
    } else {
      compute(layer, slot, slot.q.data(), slot.page_ids.data(), h.max_pages, slot.n_pages.data(),
              out, lse);
    }
    reply.fallback_pages = slot.pages;
    add_own<int64_t>(&fallback_pages_, slot.pages);
    return reply;
  }

  const Ring& ring() const { return ring_; }
  // The life that records go to; 0: nobody.
  uint32_t live_epoch() const { return live_epoch_.load(std::memory_order_acquire); }
  int64_t fallback_pages() const { return load_relaxed(&fallback_pages_); }
  int64_t local_tickets() const { return load_relaxed(&local_tickets_); }
  int64_t late_tickets() const { return load_relaxed(&late_tickets_); }

  // Sums over all worker threads and lives; `events` is left out.
  StatLine totals() const {
    StatLine sum{};
    for (uint32_t i = 0; i < ring_.header().stat_lines; ++i) {
      const StatLine* s = ring_.stats(i);
      sum.items += load_relaxed(&s->items);
      sum.pages += load_relaxed(&s->pages);
      sum.busy_ns += load_relaxed(&s->busy_ns);
      sum.refused += load_relaxed(&s->refused);
      sum.stale += load_relaxed(&s->stale);
      sum.records += load_relaxed(&s->records);
      sum.remote_pages += load_relaxed(&s->remote_pages);
    }
    return sum;
  }

  // Whether worker threads write events.
  void set_trace(bool on) { store_relaxed(&ring_.control()->trace, on ? 1u : 0u); }

  // Number of the event that worker thread `line` will write next.
  uint64_t next_event(uint32_t line) const {
    if (line >= ring_.header().stat_lines) fail_line(line);
    return load_acquire(&ring_.stats(line)->events);
  }

  // Copies the events of thread `line` from number `from` on, at most event_entries of them, to
  // `to`. The log is the worker's to write, so everything in it is checked: an event that was
  // overwritten, is being written or says what cannot be is counted in `lost` and left out.
  EventsRead read_events(uint32_t line, uint64_t from, Event* to) const {
    const Header& h = ring_.header();
    EventsRead read{next_event(line), 0, 0};
    if (read.next - from > h.event_entries) {
      // Too late for some, or a count that runs backwards, which only damage can cause.
      const uint64_t first = read.next > from ? read.next - h.event_entries : read.next;
      read.lost = first - (read.next > from ? from : first);
      from = first;
    }
    for (uint64_t number = from; number != read.next; ++number) {
      const Event* event = ring_.event(line, number);
      Event copy{};
      const uint64_t stamp = load_acquire(&event->stamp);
      copy.seq = load_relaxed(&event->seq);
      copy.step = load_relaxed(&event->step);
      copy.begin_ns = load_relaxed(&event->begin_ns);
      copy.end_ns = load_relaxed(&event->end_ns);
      copy.layer = load_relaxed(&event->layer);
      copy.first_item = load_relaxed(&event->first_item);
      copy.items = load_relaxed(&event->items);
      copy.parts = load_relaxed(&event->parts);
      copy.pages = load_relaxed(&event->pages);
      __atomic_thread_fence(__ATOMIC_ACQUIRE);
      copy.stamp = load_relaxed(&event->stamp);
      if (stamp == number + 1 && copy.stamp == stamp && is_possible(copy))
        to[read.count++] = copy;
      else
        ++read.lost;
    }
    return read;
  }

 private:
  enum class Kind { kEmpty, kLocal, kPosted };
  struct Slot {
    uint64_t ticket = 0;  // outstanding ticket, 0: none
    uint64_t seq = 0;     // last record that was published in this slot
    Kind kind = Kind::kEmpty;
    uint32_t rows = 0;
    uint32_t parts = 1;
    int64_t pages = 0;
    // A local ticket's copy of the request; grows to the largest seen.
    std::vector<float> q;
    std::vector<int32_t> page_ids;
    std::vector<int32_t> n_pages;
  };

  [[noreturn]] static void fail(const char* what, int64_t value, int64_t lo, int64_t hi,
                                int64_t row = -1) {
    throw std::invalid_argument("post: " + std::string(what) + " " + std::to_string(value) +
                                (row >= 0 ? " of row " + std::to_string(row) : "") +
                                " is outside " + std::to_string(lo) + ".." + std::to_string(hi));
  }

  [[noreturn]] static void fail_line(uint32_t line) {
    throw std::invalid_argument("events: no worker thread " + std::to_string(line));
  }

  bool is_possible(const Event& e) const {
    const Header& h = ring_.header();
    const uint64_t epoch = epoch_of(e.seq);
    const uint64_t items = uint64_t{h.max_batch} * h.num_nodes * e.parts;
    return epoch >= 1 && epoch <= load_relaxed(&ring_.control()->epoch) && e.layer < h.num_layers &&
           e.parts >= 1 && e.parts <= kMaxParts && e.items >= 1 && e.items <= items &&
           e.first_item <= items - e.items && e.pages <= uint64_t{h.max_batch} * h.max_pages &&
           e.begin_ns > 0 && e.begin_ns <= e.end_ns && e.end_ns <= now_ns();
  }

  // A worker that lives may still read the record or write the reply.
  bool is_busy(uint32_t index, uint32_t live) const {
    const uint64_t seq = slots_[index].seq;
    return seq != 0 && epoch_of(seq) == live && load_acquire(&ring_.reply(index)->done) != seq;
  }

  void keep(Slot& slot, const float* q, const int32_t* pages, uint32_t k, const int32_t* n_pages) {
    const uint64_t max_pages = ring_.header().max_pages;
    const uint64_t rows = slot.rows;
    if (slot.q.size() < rows * ring_.q_floats()) slot.q.resize(rows * ring_.q_floats());
    if (slot.page_ids.size() < rows * max_pages) slot.page_ids.resize(rows * max_pages);
    slot.n_pages.assign(n_pages, n_pages + rows);
    std::memcpy(slot.q.data(), q, rows * ring_.q_floats() * sizeof(float));
    for (uint64_t b = 0; b < rows; ++b)
      std::memcpy(&slot.page_ids[b * max_pages], pages + b * k, n_pages[b] * sizeof(int32_t));
  }

  void publish(uint32_t index, uint32_t live, uint32_t layer, uint64_t step, const float* q,
               const int32_t* pages, uint32_t k, const int32_t* n_pages) {
    Slot& slot = slots_[index];
    RecordHeader* record = ring_.record(index);
    const uint64_t post = ++posts_;
    slot.seq = make_seq(live, post);
    const uint32_t nodes = ring_.header().num_nodes;
    for (uint32_t node = 0; node < nodes; ++node)
      store_relaxed(&record->claim[node], (post & kPostMask) << 24 | kClosed);
    full_fence();  // nobody claims an item of the old record from here on
    SCOUT_POINT(kClosed, index);
    store_relaxed(&record->seq, slot.seq);
    store_relaxed(&record->layer, layer);
    store_relaxed(&record->rows, slot.rows);
    store_relaxed(&record->parts, slot.parts);
    store_relaxed(&record->step, step);
    SCOUT_POINT(kHeaderWritten, index);
    std::memcpy(ring_.q(index, 0), q, slot.rows * ring_.q_floats() * sizeof(float));
    for (uint32_t b = 0; b < slot.rows; ++b)
      std::memcpy(ring_.pages(index, b), pages + uint64_t{b} * k, n_pages[b] * sizeof(int32_t));
    std::memcpy(ring_.n_pages(index), n_pages, slot.rows * sizeof(int32_t));
    SCOUT_POINT(kDataWritten, index);
    for (uint32_t node = 0; node < nodes; ++node)
      store_release(&record->claim[node], (post & kPostMask) << 24);
    SCOUT_POINT(kOpened, index);
    store_release(ring_.log_entry(post), (post & kPostMask) << 24 | index);
    SCOUT_POINT(kLogged, index);
    Control* control = ring_.control();
    store_release(&control->head, post);
    SCOUT_POINT(kHeadRaised, index);
    __atomic_fetch_add(&control->bell, 1u, __ATOMIC_SEQ_CST);
    full_fence();
    SCOUT_POINT(kBellRaised, index);
    const uint32_t sleepers = load_acquire(&control->sleepers);
    if (sleepers != 0) {
      const uint64_t items = uint64_t{slot.rows} * slot.parts;  // of each node
      const int wanted = static_cast<int>(items < 1024 ? items : 1024);
      if (nodes == 1)
        futex_wake(&control->bell, wanted);
      else
        for (uint32_t node = 0; node < nodes; ++node)
          futex_wake_group(&control->bell, wanted, 1u << node);
    }
    SCOUT_POINT(kWoken, index);
  }

  // True if the worker's answer to `seq` is there and good.
  bool await_done(uint32_t index, uint64_t seq, int64_t begin_ns, int64_t timeout_us,
                  int64_t spin_us) {
    constexpr int64_t kSliceUs = 10000;  // between looks at the worker's life
    ReplyHeader* reply = ring_.reply(index);
    const uint32_t epoch = static_cast<uint32_t>(epoch_of(seq));
    const int64_t spin_until_ns = begin_ns + spin_us * 1000;
    for (;;) {
      const uint64_t done = load_acquire(&reply->done);
      if (done == seq) return load_relaxed(&reply->status) == kReplyOk;
      if (live_epoch_.load(std::memory_order_acquire) != epoch)
        // Lost. An answer that was completed just before still counts.
        return load_acquire(&reply->done) == seq && load_relaxed(&reply->status) == kReplyOk;
      const int64_t now = now_ns();
      if (now < spin_until_ns) {
        for (int i = 0; i < 32 && load_relaxed(&reply->done) != seq; ++i) cpu_pause();
        continue;
      }
      const int64_t left_us = timeout_us - (now - begin_ns) / 1000;
      if (left_us <= 0) {
        add_own<int64_t>(&late_tickets_, 1);
        return false;
      }
      store_relaxed(&reply->waiters, 1u);
      full_fence();
      SCOUT_POINT(kWaiting, index);
      if (load_acquire(&reply->done) == done &&
          live_epoch_.load(std::memory_order_seq_cst) == epoch)
        futex_wait(low_half(&reply->done), static_cast<uint32_t>(done),
                   left_us < kSliceUs ? left_us : kSliceUs);
      store_relaxed(&reply->waiters, 0u);
    }
  }

  void compute(uint32_t layer, const Slot& slot, const float* q, const int32_t* pages,
               uint64_t pages_stride, const int32_t* n_pages, float* out, float* lse) {
    const Header& h = ring_.header();
    const uint64_t q_floats = ring_.q_floats();
    const uint32_t parts = slot.parts * h.num_nodes;
    if (parts > 1) scratch_parts_.resize(parts * part_floats_);
    for (uint32_t b = 0; b < slot.rows; ++b) {
      float* row_out = out + b * q_floats;
      float* row_lse = lse + uint64_t{b} * h.q_heads;
      for (uint32_t p = 0; p < parts; ++p) {
        float* to = parts == 1 ? row_out : scratch_parts_.data() + p * part_floats_;
        float* to_lse = parts == 1 ? row_lse : to + q_floats;
        if (attend_part(ring_, layer, q + b * q_floats, pages + b * pages_stride, n_pages[b], p,
                        slot.parts, scratch_pages_.data(), to, to_lse) < 0)
          throw std::runtime_error("wait: the record of row " + std::to_string(b) +
                                   " was changed in shared memory");
      }
      if (parts > 1)
        merge_runs(h.q_heads, h.head_dim, parts, scratch_parts_.data(), part_floats_, row_out,
                   row_lse);
    }
  }

  Ring ring_;
  std::vector<Slot> slots_;
  std::vector<int32_t> scratch_pages_;
  std::vector<float> scratch_parts_;
  uint64_t part_floats_ = 0;
  Split split_;
  uint64_t tickets_ = 0;
  uint64_t posts_ = 0;
  int64_t fallback_pages_ = 0;
  int64_t local_tickets_ = 0;
  int64_t late_tickets_ = 0;  // deadlines that passed while the worker was alive
  std::atomic<uint32_t> live_epoch_{0};
};

}  // namespace scout
