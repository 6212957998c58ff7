// Statistics of worker threads in the ring: counters, and events while tracing is on.
//
// Event n of a thread, counted across epochs, is at n % event_entries; a late reader finds another
// number in the stamp. The reader validates everything, as the worker can write all of it.
#pragma once

#include <stdexcept>
#include <string>

#include "mapped_ring.h"

namespace scout {

struct EventsRead {
  uint64_t next;   // where to continue
  uint32_t count;  // copied
  uint64_t lost;   // overwritten, being written, or invalid
};

// Sums over all worker threads and epochs, without `events`.
inline StatLine stat_totals(const Ring& ring) {
  StatLine sum{};
  for (uint32_t i = 0; i < ring.header().stat_lines; ++i) {
    const StatLine* s = ring.stats(i);
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

// Copies the fields of an event except its stamp. `to` or `from` is shared.
inline void copy_event(Event* to, const Event* from) {
  store_relaxed(&to->seq, load_relaxed(&from->seq));
  store_relaxed(&to->step, load_relaxed(&from->step));
  store_relaxed(&to->begin_ns, load_relaxed(&from->begin_ns));
  store_relaxed(&to->end_ns, load_relaxed(&from->end_ns));
  store_relaxed(&to->layer, load_relaxed(&from->layer));
  store_relaxed(&to->first_item, load_relaxed(&from->first_item));
  store_relaxed(&to->items, load_relaxed(&from->items));
  store_relaxed(&to->splits, load_relaxed(&from->splits));
  store_relaxed(&to->pages, load_relaxed(&from->pages));
}

// Worker: appends an event of thread `line`.
inline void write_event(const Ring& ring, uint32_t line, const Event& event) {
  StatLine* stats = ring.stats(line);
  const uint64_t number = load_relaxed(&stats->events);
  Event* to = ring.event(line, number);
  store_relaxed(&to->stamp, uint64_t{0});
  __atomic_thread_fence(__ATOMIC_RELEASE);  // a reader of a new field cannot see the old stamp
  copy_event(to, &event);
  store_release(&to->stamp, number + 1);
  store_release(&stats->events, number + 1);
}

inline bool is_possible(const Header& h, const Event& e, uint32_t last_epoch) {
  const uint64_t epoch = epoch_of(e.seq);
  const uint64_t items = uint64_t{h.max_batch} * h.num_nodes * e.splits;
  return epoch >= 1 && epoch <= last_epoch && e.layer < h.num_layers && e.splits >= 1 &&
         e.splits <= kMaxSplits && e.items >= 1 && e.items <= items &&
         e.first_item <= items - e.items && e.pages <= uint64_t{h.max_batch} * h.max_pages &&
         e.begin_ns > 0 && e.begin_ns <= e.end_ns && e.end_ns <= now_ns();
}

// Number of the event that thread `line` will write next.
inline uint64_t next_event(const Ring& ring, uint32_t line) {
  if (line >= ring.header().stat_lines)
    throw std::invalid_argument("events: no worker thread " + std::to_string(line));
  return load_acquire(&ring.stats(line)->events);
}

// Copies up to event_entries events of thread `line`, from number `from` on, to `to`.
inline EventsRead read_events(const Ring& ring, uint32_t line, uint64_t from, uint32_t last_epoch,
                              Event* to) {
  const Header& h = ring.header();
  EventsRead read{next_event(ring, line), 0, 0};
  if (read.next - from > h.event_entries) {
    // Too late for some, or a count that ran backwards, which only corruption can cause.
    const uint64_t first = read.next > from ? read.next - h.event_entries : read.next;
    read.lost = first - (read.next > from ? from : first);
    from = first;
  }
  for (uint64_t number = from; number != read.next; ++number) {
    const Event* event = ring.event(line, number);
    Event copy{};
    copy.stamp = load_acquire(&event->stamp);
    copy_event(&copy, event);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (copy.stamp == number + 1 && load_relaxed(&event->stamp) == copy.stamp &&
        is_possible(h, copy, last_epoch))
      to[read.count++] = copy;
    else
      ++read.lost;
  }
  return read;
}

}  // namespace scout
